"""Real plans, built by TensorRT-RTX's own parser and builder without a GPU and checked by the kernels that the builder lists."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import tensorrt_rtx as trt
import torch
import transformers

from skipdecode.bindings import TIED_WEIGHT
from skipdecode.engines import tensorrt, tensorrt_library
from skipdecode.errors import TargetError
from skipdecode.exporter import export  # its graphs, which tests/conftest.py keeps
from skipdecode.exporter.checkpoint import CheckpointSource
from skipdecode.exporter.skeleton import build_skeleton
from skipdecode.exporter.weights import write_weights
from skipdecode.graph_passes import compile_tensorrt
from skipdecode.graph_passes.avoid_unit_scale import AvoidUnitScalePass
from skipdecode.graph_passes.compile_tensorrt import BuilderOptions, PlanRequest, Profile
from skipdecode.graph_passes.drop_unused_inputs import DropUnusedInputsPass
from skipdecode.graph_passes.freeze_slots import FreezeSlotsPass
from skipdecode.graph_passes.pack_products import PackProductsPass
from skipdecode.graph_passes.quantization import Quantization
from skipdecode.graph_passes.quantize_plan_experts import QuantizePlanExpertsPass
from skipdecode.graph_passes.quantize_plan_weights import QuantizePlanWeightsPass
from skipdecode.graph_passes.share_tied_weight import ShareTiedWeightPass
from skipdecode.graph_passes.slice_gathers import SliceGathersPass
from skipdecode.graph_passes.split_products import SplitProductsPass
from skipdecode.graph_passes.split_table import SplitTablePass
from skipdecode.graph_passes.stitch import stitch
from skipdecode.graph_passes.turn_queries_into_tokens import TurnQueriesIntoTokensPass
from skipdecode.graph_passes.write_out_attention import WriteOutAttentionPass
from skipdecode.graph_passes.write_out_convolution import WriteOutConvolutionPass
from skipdecode.graph_passes.write_out_experts import WriteOutExpertsPass
from skipdecode.graph_passes.write_out_linear_attention import WriteOutLinearAttentionPass
from tests.graph_passes.engine_layers import EngineLayer, built_layers
from tests.models import CONFIGS
from tests.zoo import Zoo

DECODE = Profile(batch=(1, 1, 4), tokens=(1, 1, 1))
PREFILL = Profile(batch=(1, 1, 1), tokens=(1, 8, 16))
SLOTS = 48
PER_LAYER = "model.embed_tokens_per_layer.weight"
CAPPED = "gemma2"  # caps its attention logits, which no fused kernel supports


Part = Callable[..., ir.Model]


def lowering(slots: int) -> tuple[ir.passes.PassBase, ...]:
    attention = WriteOutAttentionPass(slots=slots), TurnQueriesIntoTokensPass(slots=slots)
    return FreezeSlotsPass(slots=slots), *attention, AvoidUnitScalePass(), DropUnusedInputsPass()


LOWERING = lowering(SLOTS)


@pytest.fixture(scope="module")
def part(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Part:
    """Standard graphs of tiny models by architecture, part (or layers to stitch) and dtype, each made on first use."""

    @functools.cache
    def made(name: str, what: str | tuple[int, ...] = (0,), dtype: torch.dtype = torch.float16) -> ir.Model:
        skeleton = build_skeleton(transformers.AutoConfig.from_pretrained(zoo.checkpoint(name)), dtype)
        source = CheckpointSource(zoo.checkpoint(name), skeleton)
        weights = write_weights(tmp_path_factory.mktemp(name), skeleton.shapes, dtype, source, lambda count: None)
        if isinstance(what, tuple):
            layers = export.layer_graphs(skeleton, weights)
            return stitch([layers[layer] for layer in what], name="segment")
        return export.outer_graphs(skeleton, weights)[("embed", "head").index(what)]

    return made


def build(graph: ir.Model, folder: Path, *passes: ir.passes.PassBase, capability: str = "sm89") -> tuple[EngineLayer, ...]:
    lowered = graph.clone()
    ir.passes.Sequential(*passes)(lowered)
    source, plan = folder / "lowered.onnx", folder / "engine.plan"
    ir.save(lowered, source, external_data="lowered.bin")
    profiles = (DECODE, PREFILL) if graph.graph.name != "head" else (DECODE,)
    request = PlanRequest(target="tensorrt-rtx", source=str(source), plan=str(plan), profiles=profiles,
                          capabilities=(capability,))  # fmt: skip
    layers = built_layers(request)
    assert plan.stat().st_size > 10_000
    return layers


def copies_of_whole_buffers(layers: tuple[EngineLayer, ...]) -> list[str]:
    """Kernels that copy a whole KV buffer: an in-place one has `present` among its inputs, a copying one reads `past`."""
    return [layer.name for layer in layers if any(name.startswith("past_") for name in layer.inputs)]


def assert_updates_in_place(layers: tuple[EngineLayer, ...], of: int = 0) -> None:
    updated = {name for layer in layers for name in layer.outputs if name.startswith("present_")}
    assert updated == {f"present_{kind}.{of}{profile}" for kind in ("key", "value") for profile in ("", " [profile 1]")}
    assert copies_of_whole_buffers(layers) == []


# Mistral's layer is Llama's; MiniCPM3 expands keys and values from a latent; BLOOM and MPT add biases to their scores
@pytest.mark.parametrize("name", [*(name for name in CONFIGS if name not in (CAPPED, "mistral")), "minicpm3", "bloom", "mpt"])
def test_each_architectures_layer_has_fused_attention_and_updates_its_buffers_in_place(
    name: str, part: Part, tmp_path: Path
) -> None:
    layers = build(part(name), tmp_path, *LOWERING)
    assert_updates_in_place(layers)
    attention = [layer for layer in layers if "_mha_" in layer.name]
    assert ["gemv" in layer.name for layer in attention] == [True, False], "one kernel per profile: decode, prefill"


@pytest.mark.parametrize("name", [CAPPED, "granite_swa"])
def test_attention_without_a_fused_kernel_updates_its_buffers_in_place_too(name: str, part: Part, tmp_path: Path) -> None:
    layers = build(part(name), tmp_path, *LOWERING)
    assert_updates_in_place(layers)
    assert [layer.name for layer in layers if "_mha_" in layer.name] == []


@pytest.mark.parametrize(
    ("slots", "kernels"),
    [(24576 - 16, ["gemv_mha", "gemm_mha"]), (24576 - 8, ["gemm_mha", "gemm_mha"]), (32768, ["gemm_mha"] * 2)],
)
def test_a_step_over_many_slots_uses_the_kernel_for_prompts(slots: int, kernels: list[str], part: Part, tmp_path: Path) -> None:
    layers = build(part("llama_long"), tmp_path, *lowering(slots))
    assert_updates_in_place(layers)
    found = [layer.name for layer in layers if "_mha_" in layer.name]
    assert all(kernel in name for kernel, name in zip(kernels, found, strict=True)), found


def test_the_kernel_for_one_token_refuses_more_slots(part: Part, tmp_path: Path) -> None:
    slots = 24576 - 8
    with pytest.raises(TargetError, match="Attention operation was not supported by a dedicated kernel"):
        build(part("llama_long"), tmp_path, FreezeSlotsPass(slots=slots), AvoidUnitScalePass(), DropUnusedInputsPass())


@pytest.mark.parametrize("segment", [(1, 3, 4), (2, 5), (3, 4), (5,)], ids=str)
def test_layers_that_read_other_layers_keys_build_with_those_layers_and_without(
    segment: tuple[int, ...], part: Part, tmp_path: Path
) -> None:
    """Layers 3 and 4 read layer 1's keys, layer 5 reads layer 2's; the first of them in a plan gets the fused kernel."""
    layers = build(part("reading_others", segment), tmp_path, *LOWERING)
    source = 2 if segment[-1] == 5 else 1
    if source in segment:
        assert_updates_in_place(layers, source)
    else:
        assert not [name for layer in layers for name in layer.outputs if name.startswith("present_")]
    fused = [layer for layer in layers if "_mha_" in layer.name]
    assert ["gemv" in layer.name for layer in fused] == [True, False], "one kernel per profile: decode, prefill"
    assert {f"present_key.{source}", f"present_value.{source}"} <= {*fused[0].inputs}, "a step reads the buffers in place"


@pytest.mark.parametrize("name", ["opt-350m", "llama"])
def test_embedding_and_head_build_too(name: str, part: Part, tmp_path: Path) -> None:
    for what in ("embed", "head"):
        assert build(part(name, what), tmp_path, DropUnusedInputsPass())


def written_out(layers: tuple[EngineLayer, ...]) -> list[str]:
    """Kernels that only write stored levels out as floats."""
    return [layer.name for layer in layers if "Cast" in layer.name and not layer.inputs]


@pytest.mark.parametrize("how", [Quantization(bits=8), Quantization(bits=4), Quantization(bits=4, method="k-quant")], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["opt", "llama", "persimmon"])
def test_quantised_matrices_are_multiplied_as_they_are_stored(
    name: str, dtype: torch.dtype, how: Quantization, part: Part, tmp_path: Path
) -> None:
    quantising = (SliceGathersPass(), PackProductsPass(), QuantizePlanWeightsPass(how))
    layers = build(part(name, (0,), dtype), tmp_path, *LOWERING, *quantising)
    assert_updates_in_place(layers)
    assert written_out(layers) == []
    products = [layer for layer in layers if "CastMulCastFc" in layer.name]
    assert len(products) == 2 * 4, "per profile: query, key and value; attention output; up, and gate; down"


def test_an_8_bit_matrix_in_blocks_would_be_written_out_in_each_step(tmp_path: Path) -> None:
    """This is why 8-bit weights have one scale per output."""
    rng = np.random.default_rng(0)
    levels, scales = rng.integers(-127, 128, (64, 64), dtype=np.int8), np.full((2, 64), 0.01, np.float16)
    graph = ir.from_onnx_text("""<ir_version: 10, opset_import: ["" : 24]>
    g (float16[B,S,64] x, int8[64,64] levels, float16[2,64] scales) => (float16[B,S,64] y)
    { weight = DequantizeLinear <axis = 0, block_size = 32> (levels, scales)  y = MatMul (x, weight) }""")
    for name, array in (("levels", levels), ("scales", scales)):
        value = next(value for value in graph.graph.inputs if value.name == name)
        graph.graph.inputs.remove(value)
        value.const_value = ir.tensor(array, name=name)
        graph.graph.register_initializer(value)
    assert len(written_out(build(graph, tmp_path, DropUnusedInputsPass()))) == 2, "one per profile"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "in_a_step", "in_a_prompt"), [("qwen3_5_text", 4, 13), ("bamba", 2, 4)])
def test_a_step_of_linear_attention_inverts_nothing(
    name: str, in_a_step: int, in_a_prompt: int, dtype: torch.dtype, part: Part, tmp_path: Path
) -> None:
    """A step has one token, whose inverse is 1. Only products with the state and of one query and key remain."""
    written_out = (
        WriteOutConvolutionPass(),
        WriteOutLinearAttentionPass(max_tokens=PREFILL.tokens[2]),
    )
    layers = build(part(name, (0,), dtype), tmp_path, *LOWERING, *written_out)
    of_states = [layer.name for layer in layers if layer.name.startswith("node_MatMul")]
    in_prompts = [name for name in of_states if "[profile 1]" in name]
    assert (len(of_states) - len(in_prompts), len(in_prompts)) == (in_a_step, in_a_prompt)
    states = {name for layer in layers for name in layer.outputs if name.startswith("present_")}
    assert {"present_conv_state.0", "present_recurrent_state.0"} <= states


@pytest.mark.parametrize("name", ["mamba2", "bamba"])
def test_the_product_in_front_of_a_convolution_is_one_kernel_in_steps_and_in_prompts(
    name: str, part: Part, tmp_path: Path
) -> None:
    """Otherwise its matrix would be stored once as a whole, for steps, and once in parts."""
    linear = WriteOutConvolutionPass(), WriteOutLinearAttentionPass(max_tokens=PREFILL.tokens[2])
    layers = build(part(name), tmp_path, *LOWERING, SplitProductsPass(), *linear)
    merged = [layer.name for layer in layers if layer.name.count("node_MatMul") == 3]
    assert ["[profile 1]" in kernel for kernel in merged] == [False, True], [layer.name for layer in layers]


@pytest.mark.parametrize("how", [None, Quantization(bits=8), Quantization(bits=4)], ids=str)
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_a_mixtures_step_looks_up_experts_in_the_kernel_that_multiplies_by_them(
    name: str, how: Quantization | None, part: Part, tmp_path: Path
) -> None:
    quantising = (QuantizePlanWeightsPass(how), QuantizePlanExpertsPass(how)) if how else ()
    layers = build(part(name), tmp_path, *LOWERING, WriteOutExpertsPass(), *quantising)
    in_a_step = [layer.name for layer in layers if layer.name.endswith("_myl0") or "_myl0_" in layer.name]
    assert sum("Gath" in each and "MulSum" in each for each in in_a_step) == 2, "up and gate; down"
    assert written_out(layers) == [each for each in written_out(layers) if "_myl1_" in each], "in prompts only"
    experts = sum(path.stat().st_size for path in tmp_path.glob("lowered.bin"))
    assert (tmp_path / "engine.plan").stat().st_size < 1.2 * experts + 8_000_000, "experts are stored once, alongside the kernels"


def test_a_split_table_builds(part: Part, tmp_path: Path) -> None:
    """The table of per-layer inputs, 99 x 144 here."""
    layers = build(part("reading_others", "embed"), tmp_path, DropUnusedInputsPass(), SplitTablePass(max_elements=10_000))
    assert len(ir.load(tmp_path / "lowered.onnx").graph.initializers.keys() & {f"{PER_LAYER}.{first}" for first in (0, 50)}) == 2
    assert layers


def test_a_tied_weight_is_read_in_place(part: Part, tmp_path: Path) -> None:
    """TensorRT-RTX 1.7.1 makes a padded copy of a weight with 99 rows, an odd number, in each step (a kernel `MoveConc`)."""
    readers = {}
    for what in ("embed", "head"):
        layers = build(part("qwen2", what), tmp_path, DropUnusedInputsPass(), ShareTiedWeightPass("model.embed_tokens.weight"))
        readers[what] = [layer.name for layer in layers if TIED_WEIGHT in layer.inputs]
    assert [len(found) for found in readers.values()] == [1, 1], readers
    assert "Gath" in readers["embed"][0] and "Gemm" in readers["head"][0]


def test_bfloat16_builds_the_same_kernels(part: Part, tmp_path: Path) -> None:
    layers = build(part("qwen3", (0,), torch.bfloat16), tmp_path, *LOWERING)
    assert copies_of_whole_buffers(layers) == []
    assert sum("_mha_" in layer.name for layer in layers) == 2


def test_a_scale_of_one_would_copy_the_key_buffer_in_each_step(part: Part, tmp_path: Path) -> None:
    layers = build(part("opt"), tmp_path, FreezeSlotsPass(slots=SLOTS))
    assert copies_of_whole_buffers(layers), "without copies AvoidUnitScalePass is no longer needed"


def test_the_builders_config_has_the_requested_limits() -> None:
    log = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    polygraphy = tensorrt_library.polygraphy("tensorrt-rtx", "backend.trt")
    found = []
    for options in (BuilderOptions(), BuilderOptions(workspace_mib=64, optimization_level=1)):
        request = PlanRequest(
            target="tensorrt-rtx", source="", plan="", profiles=(), options=options, capabilities=("sm86", "sm89")
        )
        config = compile_tensorrt._create_config(trt, polygraphy, builder, network, request)
        found.append((config.get_memory_pool_limit(trt.MemoryPoolType.WORKSPACE), config.builder_optimization_level))
        made_for = [config.get_compute_capability(index) for index in range(config.num_compute_capabilities)]
        assert made_for == [trt.ComputeCapability.SM86, trt.ComputeCapability.SM89]
        assert config.max_aux_streams == 0, "a captured graph holds the work of one stream"
        assert config.get_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION), "otherwise CUDA graphs cannot capture its plans"
    assert found[0][1] == 3 and found[0][0] > 1 << 30
    assert found[1] == (64 << 20, 1)


def test_an_input_that_the_parser_ignores_is_an_error(part: Part, tmp_path: Path) -> None:
    """TensorRT-RTX 1.7.1 ignores `nonpad_kv_seqlen`, an input of Attention-24."""
    graph = part("llama").clone()
    lengths = ir.Value(name="lengths", shape=ir.Shape(["B"]), type=ir.TensorType(ir.DataType.INT64))
    graph.graph.inputs.append(lengths)
    attention = next(node for node in graph.graph if node.op_type == "Attention")
    attention.resize_inputs(7)
    attention.replace_input_with(6, lengths)
    with pytest.raises(TargetError, match=r"engine\.plan: tensorrt-rtx ignored an input \(Unused Input: lengths"):
        build(graph, tmp_path, *LOWERING)
    assert not (tmp_path / "engine.plan").exists()


@pytest.mark.parametrize("kind", ["key", "value"])
def test_a_buffer_that_is_not_updated_in_place_is_an_error(kind: str, part: Part, tmp_path: Path) -> None:
    graph = part("llama").clone()
    scatter = next(node for node in graph.graph if node.outputs[0].name == f"present_{kind}.0")
    past = scatter.inputs[0]
    assert past is not None
    doubled = ir.node("Add", [past, past])
    doubled.outputs[0].shape, doubled.outputs[0].type = past.shape, past.type
    graph.graph.insert_before(scatter, doubled)
    scatter.replace_input_with(0, doubled.outputs[0])
    with pytest.raises(TargetError, match=rf"the KV update of past_{kind}\.0 is not in place"):
        build(graph, tmp_path, *LOWERING)


def test_the_parsers_reason_for_refusing_is_reported(part: Part, tmp_path: Path) -> None:
    graph = part(CAPPED)
    with pytest.raises(TargetError, match=r"parser refused it: .*[Ss]oftcap"):
        build(graph, tmp_path, FreezeSlotsPass(slots=SLOTS))


def test_single_precision_has_no_fused_attention_and_is_not_built(part: Part, tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="could not build it"):
        build(part("llama", (0,), torch.float32), tmp_path, *LOWERING)


def test_where_only_the_oldest_gpu_cannot_multiply_in_single_precision_the_error_says_to_leave_it_out(
    part: Part, tmp_path: Path
) -> None:
    linear = WriteOutConvolutionPass(), WriteOutLinearAttentionPass(max_tokens=16)
    with pytest.raises(TargetError, match=r"FP32 GEMM is not supported.*; leave sm75 out of --target$"):
        build(part("qwen3_5_text"), tmp_path, *LOWERING, *linear, capability="sm75")


def test_a_builder_out_of_memory_is_reported_as_such(part: Part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_log = tensorrt.make_log

    def without_memory(*given: Any, **named: Any) -> Any:
        log = make_log(*given, **named)
        log.first_error = lambda: "Unexpected exception std::bad_alloc"  # what TensorRT-RTX 1.7.1 logged under `ulimit -v`
        return log

    monkeypatch.setattr(tensorrt, "make_log", without_memory)
    with pytest.raises(TargetError, match=r"could not build it \(Unexpected exception std::bad_alloc\); free some memory$"):
        build(part("llama", (0,), torch.float32), tmp_path, *LOWERING)
