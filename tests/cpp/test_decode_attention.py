"""A decode step over many positions uses another attention kernel: the C++ runtime agrees with Python's."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import transformers

from skipdecode.exporter.export import ExportRequest, export
from skipdecode.graph_passes import choose_attention_kernel
from skipdecode.schedule_builders import ScheduleRequest
from tests.cpp.conftest import LENGTHS, LONG, Driver, assert_agrees_with_python
from tests.models import CONFIGS


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Queries of 256 numbers, so the other kernel is used from 160 positions on, between the two sets of prompts."""
    folder = tmp_path_factory.mktemp("attention")
    config = CONFIGS["llama"]()
    config.num_attention_heads, config.num_key_value_heads, config.max_position_embeddings = 16, 2, 3 * LONG
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    schedule = ScheduleRequest(name="linear", max_layers=5, min_layers=2, span=10)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose_attention_kernel, "_MIN_WIDTH_TIMES_POSITIONS", 40_960)
        export(ExportRequest(model=str(folder / "model"), out=folder / "bundle", schedule=schedule, max_batch=4, slim=True))
    return folder / "bundle"


@pytest.mark.parametrize("lengths", LENGTHS)
def test_both_runtimes_give_the_same_results(lengths: str, bundle: Path, driver: Driver) -> None:
    engines = [onnx.load(path, load_external_data=False) for path in (bundle / "targets" / "cpu").glob("segment_*.onnx")]
    assert any(node.op_type == "If" for engine in engines for node in engine.graph.node)
    assert_agrees_with_python(driver, bundle, LENGTHS[lengths])
