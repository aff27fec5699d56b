"""Every kind of layer that the cuda target supports: its numbers on a CPU, and what the real onnxruntime-gpu does with it.

The provider loads on stand-ins for CUDA and its driver (tests/standin). It decides which nodes it runs, chooses kernels and makes
every call that it would make to a GPU, but nothing is computed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

from skipdecode import manifest as manifests
from skipdecode.decoder import Decoder
from skipdecode.device import HostDevice
from skipdecode.engines import ort as engines_ort
from skipdecode.exporter.export import ExportRequest, export
from skipdecode.graph_passes.conventions import NORMS, scales_last_axis_only
from skipdecode.graph_passes.replace_maximum import ReplaceMaximumPass
from skipdecode.graph_passes.slice_uneven_splits import SliceUnevenSplitsPass
from skipdecode.graph_passes.widen_graph import WidenGraphPass
from skipdecode.schedule_builders import ScheduleRequest
from skipdecode.targets import load_device_engines
from tests.agreement import assert_gives_the_references_logits, assert_mostly_gives_the_references_logits
from tests.models import LAYERS, MAX_LENGTH
from tests.standin import driver
from tests.zoo import Zoo

PROMPTS = [[9, 8, 7, 6, 5, 4, 3], [5, 6]]
NEW = 8
# among them: heads turned in part, norms of heads, softcaps, linear biases, sinks, rotary bases, latents, streams, keys of two
# sizes and of other layers, five kinds of states, norms with a scale per group or head
DENSE = (
    "gpt_neox", "qwen3", "gemma2", "bloom", "granite_swa", "minicpm3", "gemma3n_text", "reading_others", "mamba", "lfm2",
    "qwen3_5_text", "falcon_h1", "cohere", "modernbert-decoder", "recurrent_gemma", "xglm",
)  # fmt: skip
# routers inside the operator and outside, with softmaxes, sigmoids, groups and biases; experts with a bias, without a gate
MIXTURES = (
    "mixtral",
    "qwen2_moe",
    "gpt_oss",
    "deepseek_v3",
    "minimax_m2",
    "phimoe",
    "nemotron_h",
    "lara_mini",
    "kimi_linear",
    "llama4_text",
)
ENGINES = (  # `make survey` has those of every architecture
    *((name, "fp16", "none") for name in ("opt", "llama", *DENSE, *MIXTURES)),
    *((name, "bf16", "none") for name in ("apertus", "phimoe", "nemotron_h", "qwen3_5_text")),  # some operators lack kernels
    *((name, "fp16", "int4") for name in ("opt", "qwen3_5_text")),
    ("opt", "fp16", "int8"),
)


@pytest.fixture(scope="module")
def bundle(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str, str], Path]:
    """Gives a model's bundle for cuda, made on first use: two variants, few segments."""
    schedule = ScheduleRequest(name="step", max_layers=6, min_layers=4, warmup_layers=3, span=6, max_variants=2)
    folder = tmp_path_factory.mktemp("cuda")

    @cache
    def made(name: str, dtype: str, quantize: str) -> Path:
        out = folder / f"{name}-{dtype}-{quantize}"
        request = ExportRequest(
            model=str(zoo.checkpoint(name)), out=out, schedule=schedule, targets=("cuda",), dtype=dtype, quantize=quantize,
            max_batch=4, max_length=MAX_LENGTH,
        )  # fmt: skip
        export(request)
        return out

    return made


def _decoder(bundle: Path) -> Decoder:
    made = manifests.read(bundle)
    engines_ort.use_threads(None)
    engines = load_device_engines(made, bundle, made.targets[0], HostDevice(), None)
    return Decoder(engines, made.model, made.schedule, [len(prompt) for prompt in PROMPTS], NEW, prefill_chunk=4)


@pytest.mark.parametrize("name", DENSE)
def test_fp16_engines_agree_with_the_reference(name: str, bundle: Callable[[str, str, str], Path], zoo: Zoo) -> None:
    model = zoo.model(name).half().float()
    assert_gives_the_references_logits(_decoder(bundle(name, "fp16", "none")), model, PROMPTS, NEW, 0.02)


def test_the_graphs_of_a_cuda_bundle_can_be_widened_to_fp32_for_a_cpu(bundle: Callable[[str, str, str], Path]) -> None:
    """A bundle for both targets has narrow standard graphs; one for only a CPU does not."""
    for name in ("opt", "llama", *DENSE, *MIXTURES):
        for path in (bundle(name, "fp16", "none") / "graphs").glob("[!v]*.onnx"):
            WidenGraphPass()(ir.load(path))  # raises if anything stays narrow


@pytest.mark.parametrize("name", ["falcon_h1", "cohere"])
def test_no_norm_has_a_scale_per_group_or_head(name: str, bundle: Callable[[str, str, str], Path]) -> None:
    """CUDA's kernels would use the first group's scale for all; a CPU's use each group's own."""
    graphs = [ir.load(path).graph for path in (bundle(name, "fp16", "none") / "targets" / "cuda").glob("*.onnx")]
    norms = [node for graph in graphs for node in graph if node.op_type in NORMS]
    assert norms and all(scales_last_axis_only(node) for node in norms)


def test_one_product_makes_query_key_and_value_though_a_checkpoint_has_them_head_by_head(
    bundle: Callable[[str, str, str], Path],
) -> None:
    graphs = [ir.load(path).graph for path in (bundle("bloom", "fp16", "none") / "targets" / "cuda").glob("segment_*.onnx")]
    attentions = [node for graph in graphs for node in graph if node.op_type == "GroupQueryAttention"]
    assert len(attentions) == LAYERS and all(node.inputs[1] is node.inputs[2] is None for node in attentions)


@pytest.mark.parametrize(
    ("name", "lowering"),
    [("falcon_h1", SliceUnevenSplitsPass), ("deepseek_v3", SliceUnevenSplitsPass), ("phimoe", ReplaceMaximumPass)],
)
def test_no_node_reads_host_memory_in_a_cuda_graph_or_needs_cudnn(
    name: str, lowering: type[ir.passes.InPlacePass], bundle: Callable[[str, str, str], Path]
) -> None:
    engines = [ir.load(path) for path in (bundle(name, "fp16", "none") / "targets" / "cuda").glob("*.onnx")]
    assert engines and not any(lowering()(engine).modified for engine in engines)


@pytest.mark.parametrize("name", MIXTURES)
def test_fp16_mixtures_mostly_agree(name: str, bundle: Callable[[str, str, str], Path], zoo: Zoo) -> None:
    model = zoo.model(name).half().float()
    assert_mostly_gives_the_references_logits(_decoder(bundle(name, "fp16", "none")), model, PROMPTS, NEW, 0.02)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the stand-in libraries that onnxruntime-gpu runs on."""
    driver.provider()  # skips before anything is built
    return driver.build_runtime(tmp_path_factory.mktemp("cuda"))


@pytest.fixture(scope="module")
def answers(bundle: Callable[[str, str, str], Path], libraries: Path) -> dict[tuple[str, str, str], dict[str, Any]]:
    """What `tests.standin.provider` reports for each of ENGINES."""
    done = driver.ask_provider(libraries, *(bundle(*each) for each in ENGINES))
    assert done.returncode == 0, done.stderr
    return dict(zip(ENGINES, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("engines", ENGINES, ids="-".join)
def test_the_cuda_provider_runs_every_node_and_steps_become_graphs(
    engines: tuple[str, str, str], answers: dict[tuple[str, str, str], dict[str, Any]]
) -> None:
    answer = answers[engines]
    assert "error" not in answer, answer["error"]
    assert (answer["graphs"], answer["warnings"]) == (2, []), "both variants' steps"
    assert answer["kernels"][-1] == "skd_turnaround_kernel"


def test_a_layers_kernels_are_few(answers: dict[tuple[str, str, str], dict[str, Any]]) -> None:
    """A layer's are norm, query key value, attention, output, norm, gate, its activation, up, product, down."""
    kernels = answers["llama", "fp16", "none"]["kernels"]
    once = ["_GatherKernel", "Cast", "cublasGemmEx", "the last sum", "the last norm", "skd_turnaround_kernel"]
    assert len(kernels) <= 6 * 11 + len(once)
    assert sum("flash_fwd" in kernel for kernel in kernels) == 6, "one attention per layer, in one part"
    assert sum(kernel == "cublasGemmEx" for kernel in kernels) == 5 * 6 + 1
    assert "no kernel" not in kernels, "copies cost the host more than kernels do"


def test_cutlass_multiplies_quantised_weights_where_the_environment_asks_for_it_and_its_tiles_fit(
    bundle: Callable[[str, str, str], Path],
    answers: dict[tuple[str, str, str], dict[str, Any]],
    libraries: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not a layer's product with 96 inputs, nor in int4 the one with 96 outputs, nor the head's with 99."""
    monkeypatch.setenv("ORT_FPA_INTB_GEMM", "1")
    kinds = ("int8", "int4")
    done = driver.ask_provider(libraries, *(bundle("opt", "fp16", kind) for kind in kinds))
    asked = map(json.loads, done.stdout.splitlines())
    assert [_by_cutlass(answer) for answer in asked] == [3 * LAYERS, 2 * LAYERS], done.stderr
    assert [_by_cutlass(answers["opt", "fp16", kind]) for kind in kinds] == [0, 0]


def _by_cutlass(answer: dict[str, Any]) -> int:
    return sum("fpA_intB" in kernel or "GemmFpAIntB" in kernel for kernel in answer["kernels"])
