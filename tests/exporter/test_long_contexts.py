"""Decode steps that attend to many positions, where attention with one new token has a kernel of its own."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import transformers

import skipdecode
from skipdecode.exporter.export import ExportRequest, export
from skipdecode.graph_passes import choose_attention_kernel
from skipdecode.schedule_builders import ScheduleRequest
from tests.agreement import assert_gives_the_references_logits
from tests.models import CONFIGS, LAYERS

POSITIONS, NEW = 6000, 4
WORTH = 40_960  # below the real threshold, which such narrow queries reach only with thousands of tokens
PROMPTS = [[(5 * number + number // 7) % 97 + 2 for number in range(length)] for length in (690, 330, 3)]


def test_the_prompts_lengths_are_on_both_sides_of_the_thresholds() -> None:
    """So the test below reaches both kernels, for queries of 64 numbers and of 128."""
    assert len(PROMPTS[0]) > WORTH // 64 > len(PROMPTS[1]) > WORTH // 128 > len(PROMPTS[2])


@pytest.mark.parametrize(("name", "chosen"), [("llama", LAYERS), ("qwen3", LAYERS), ("gemma2", 0)])
def test_long_prompts_give_the_references_logits_alone_and_in_a_ragged_batch(
    name: str, chosen: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Query, key and value from one matrix; with a norm in between; with a cap on scores, for which there is only one kernel."""
    monkeypatch.setattr(choose_attention_kernel, "_MIN_WIDTH_TIMES_POSITIONS", WORTH)
    config = CONFIGS[name]()
    config.num_key_value_heads, config.max_position_embeddings = 1, POSITIONS
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path / "checkpoint")
    schedule = ScheduleRequest(name="linear", max_layers=5, min_layers=2, span=4)
    request = ExportRequest(
        model=str(tmp_path / "checkpoint"),
        out=tmp_path / "bundle",
        schedule=schedule,
        max_batch=4,
        max_length=POSITIONS,
        slim=True,
    )
    export(request)
    engines = [onnx.load(path, load_external_data=False) for path in (request.out / "targets" / "cpu").glob("segment_*.onnx")]
    assert sum(node.op_type == "If" for engine in engines for node in engine.graph.node) == chosen
    generator = skipdecode.load(request.out)
    for prompts in (PROMPTS, PROMPTS[:1]):
        decoder = generator.decoder([len(prompt) for prompt in prompts], NEW)
        assert_gives_the_references_logits(decoder, model, prompts, NEW, 1e-3)
