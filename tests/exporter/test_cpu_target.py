"""Engines for ONNX Runtime's CPU provider: what is in their graphs, and in the bundle's folders."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import onnx
import pytest

import skipdecode
from skipdecode import manifest as manifests
from skipdecode.exporter import cpu_target
from skipdecode.exporter.export import ExportRequest, export
from skipdecode.exporter.skeleton import build_skeleton
from skipdecode.schedule_builders import ScheduleRequest
from tests.agreement import assert_gives_the_references_logits
from tests.models import LAYERS, MAX_LENGTH, VOCABULARY
from tests.zoo import Zoo


def _operators(engine: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(engine, load_external_data=False).graph.node)


@pytest.mark.parametrize(
    ("name", "mlp"),
    [
        ("llama", {"MatMul": 5, "QuickGelu": 1, "Mul": 1}),
        ("mixtral", {"MatMul": 2, "Reshape": 1, "Gemm": 1, "MoE": 1}),  # which chooses the experts
    ],
)
def test_a_layer_is_few_operators(name: str, mlp: dict[str, int], zoo: Zoo) -> None:
    """One product makes query, key and value; each operator costs its launch."""
    found = _operators(zoo.bundle(name) / "targets" / "cpu" / "segment_001.onnx")
    assert found == {"GroupQueryAttention": 1, "RMSNormalization": 2, "Add": 2, **mlp}


def test_one_product_makes_query_key_and_value_where_a_checkpoint_has_them_in_one_matrix(zoo: Zoo) -> None:
    graph = onnx.load(zoo.bundle("gpt2") / "targets" / "cpu" / "segment_001.onnx", load_external_data=False).graph
    (attention,) = [node for node in graph.node if node.op_type == "GroupQueryAttention"]
    assert attention.input[1:3] == ["", ""]


def test_a_quantised_layer_fuses_sums_with_norms_and_no_weight_is_inside_the_graph_that_is_compiled(
    zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head's graph has none inside either: an ONNX file holds at most 2 GiB."""
    sizes: list[int] = []

    def compile_ort(source: Path, engine: Path) -> None:
        sizes.append(source.stat().st_size)
        compile_(source, engine)

    compile_ = cpu_target.compile_ort
    monkeypatch.setattr(cpu_target, "compile_ort", compile_ort)
    request = ExportRequest(
        model=str(zoo.checkpoint("llama")), out=tmp_path / "b", schedule=ScheduleRequest(name="full"), max_length=MAX_LENGTH,
        quantize="int8",
    )  # fmt: skip
    (target,) = export(request).targets
    found = _operators(tmp_path / "b" / target.segments[0])
    assert (found["SkipSimplifiedLayerNormalization"], found["Add"]) == (2 * LAYERS - 1, 1)
    assert (found["MatMulNBits"], found["MatMul"]) == (5 * LAYERS, 0)
    assert len(sizes) == 2 and sizes[0] < target.segment_weight_bytes[0] / 2 and sizes[1] < target.head_weight_bytes / 2


def test_quantised_cpu_engines_compute_in_fp32_alongside_gpu_engines(zoo: Zoo, tmp_path: Path) -> None:
    full = ScheduleRequest(name="full")
    request = ExportRequest(
        model=str(zoo.checkpoint("llama")), out=tmp_path / "b", schedule=full, max_length=MAX_LENGTH, targets=("cpu", "cuda"),
        quantize="int8",
    )  # fmt: skip
    assert export(request).dtype == "float16"
    prompt = [9, 8, 7, 6, 5]
    decoder = skipdecode.load(tmp_path / "b", target="cpu").decoder([len(prompt)], 2)
    assert_gives_the_references_logits(decoder, zoo.model("llama"), [prompt], 2, 0.05)


def test_graphs_that_were_written_only_to_be_compiled_are_removed(zoo: Zoo) -> None:
    layers = [f"layer_{layer:03d}.onnx" for layer in range(LAYERS)]
    variants = [f"v{count}.onnx" for count in range(2, LAYERS + 1)]
    found = sorted(path.name for path in (zoo.bundle("llama") / "graphs").iterdir())
    assert found == ["embed.onnx", "head.onnx", *layers, *variants, "weights.safetensors"]


def test_weight_bytes_count_layers_and_head_but_not_rotary_tables(zoo: Zoo) -> None:
    bones = build_skeleton(zoo.model("llama").config)
    (target,) = manifests.read(zoo.bundle("llama")).targets
    assert target.segment_weight_bytes == tuple(4 * numbers for numbers in bones.layer_parameters)
    head = 4 * (VOCABULARY + 1) * bones.hidden_size  # a row for each token, and the norm
    assert head <= target.head_weight_bytes < head + 64, "the head also has a few indices"
