"""Quantised checkpoints are read as the numbers that they stand for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file

from skipdecode.exporter import cli, command, dequantize, reference_run
from skipdecode.exporter.checkpoint_folder import Checkpoint
from skipdecode.exporter.export import ExportRequest, export
from skipdecode.exporter.layout import Report
from skipdecode.exporter.model_names import load_config
from skipdecode.exporter.skeleton import build_skeleton
from skipdecode.manifest import Manifest
from tests.exporter.quantised_checkpoints import (
    WEIGHTS,
    Store,
    assert_reads,
    assert_refused,
    assert_runs,
    awq,
    bitnet,
    compressed,
    gptq,
    in_fp8,
    modelopt,
    rewritten,
    source,
)
from tests.zoo import Zoo, edit_config

KEY = "model.layers.1.self_attn.k_proj"  # [32,64] in the tests' Llama


def _by_transformers(folder: Path) -> Any:
    """The model as transformers dequantises it, where it can, in fp32."""
    config = transformers.AutoConfig.from_pretrained(folder)
    config.quantization_config["dequantize"] = True
    return transformers.AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32).eval()


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "deepseek_v3"])
def test_matrices_in_fp8_are_read_as_transformers_dequantises_them(name: str, zoo: Zoo, tmp_path: Path) -> None:
    folder = in_fp8(zoo.checkpoint(name), tmp_path / "in_fp8", (16, 8))
    model = _by_transformers(folder)
    assert_reads(folder, model.state_dict())
    assert_runs(folder, model)


@pytest.mark.parametrize("block", [(24, 40), (128, 128), None], ids=["smaller ones at the end", "one block", "no blocks"])
def test_a_number_in_fp8_is_scaled_by_the_block_it_lies_in(block: tuple[int, int] | None, zoo: Zoo, tmp_path: Path) -> None:
    folder, name = in_fp8(zoo.checkpoint("llama"), tmp_path / "in_fp8", block), f"{KEY}.weight"
    state = load_file(folder / "model.safetensors")
    matrix, scales = state[name].float(), state[f"{name}_scale_inv"]
    read = source(folder)(name, tuple(matrix.shape))
    for row, column in ((0, 0), (23, 39), (24, 40), (31, 63)):
        scale = scales[row // block[0], column // block[1]] if block else scales
        assert read[row, column] == matrix[row, column] * scale


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"k_proj.weight_scale_inv": torch.ones(3, 4)},
            r"cannot be put together \(torch.float8_e4m3fn \(32, 64\) and torch.float32",
        ),
        ({"k_proj.weight_scale_inv": torch.ones(2, 8, dtype=torch.uint8)}, "cannot be put together"),
        ({"k_proj.weight": torch.ones(32, 64, dtype=torch.int8)}, r"cannot be put together \(torch.int8"),
        ({"k_proj.weight": torch.ones(32).to(torch.float8_e4m3fn)}, r"cannot be put together"),
        ({"k_proj.weight_scale_inv": None}, "k_proj.weight is torch.float8_e4m3fn; give an unquantised checkpoint"),
    ],
    ids=["too many scales", "scales of another dtype", "four bits", "a vector", "no scales"],
)
def test_mismatched_fp8_matrices_and_scales_give_a_one_line_error(
    change: dict[str, torch.Tensor | None], says: str, zoo: Zoo, tmp_path: Path
) -> None:
    folder, prefix = in_fp8(zoo.checkpoint("llama"), tmp_path / "in_fp8", (16, 8)), KEY.removesuffix("k_proj")
    changed = {prefix + name: tensor for name, tensor in change.items()}
    assert_refused(folder, changed, says, f"{KEY}.weight", (32, 64))


DOWN = "model.layers.2.mlp.experts.down_proj"


@pytest.fixture
def in_mxfp4(zoo: Zoo, tmp_path: Path) -> Path:
    """A gpt-oss checkpoint as OpenAI writes it: bf16, the experts' matrices as blocks of 32 4-bit numbers with exponents."""
    folder = shutil.copytree(zoo.checkpoint("gpt_oss"), tmp_path / "in_mxfp4")
    quantised = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    edit_config(folder, dtype="bfloat16", quantization_config=quantised)
    state = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    torch.manual_seed(0)
    for name in [name for name in state if name.endswith("_proj") and ".experts." in name]:
        experts, inputs, outputs = state.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        state[f"{name}_blocks"] = torch.randint(256, (*shape, 16), dtype=torch.uint8)
        state[f"{name}_scales"] = torch.randint(121, 125, shape, dtype=torch.uint8)  # exponents -6 to -3
    save_file(state, folder / "model.safetensors")
    return folder


def test_experts_in_mxfp4_are_read_as_transformers_dequantises_them(in_mxfp4: Path) -> None:
    model = _by_transformers(in_mxfp4)
    assert_reads(in_mxfp4, model.state_dict())
    assert_runs(in_mxfp4, model)


@pytest.mark.parametrize(
    ("part", "change", "says"),
    [
        ("scales", lambda scales: scales[:, :-1].contiguous(), r"cannot be put together \(torch.uint8 \(5, 64, 3, 16\)"),
        ("scales", lambda scales: scales.float(), "cannot be put together"),
        ("blocks", lambda blocks: blocks[..., 0].contiguous(), "cannot be put together"),
        ("scales", lambda scales: None, f"lacks {DOWN}; "),
    ],
    ids=["too few scales", "scales of another dtype", "no blocks", "no scales"],
)
def test_mismatched_blocks_and_scales_give_a_one_line_error(part: str, change: Any, says: str, in_mxfp4: Path) -> None:
    name, state = f"{DOWN}_{part}", load_file(in_mxfp4 / "model.safetensors")
    assert_refused(in_mxfp4, {name: change(state[name])}, says, DOWN, (5, 96, 64))


@pytest.mark.parametrize("name", WEIGHTS)
def test_what_llm_compressor_writes_is_read_as_transformers_dequantises_it(name: str, zoo: Zoo, tmp_path: Path) -> None:
    folder = compressed(zoo.checkpoint("llama"), tmp_path / "compressed", name)
    assert_reads(folder, _by_transformers(folder).state_dict(), 2**-8 if name == "NVFP4" else 0)  # transformers rounds to bf16


@pytest.mark.parametrize("name", ["W4A16", "AWQ", "BitNet"])
def test_int4_of_a_4_bit_checkpoint_is_as_close_to_it_as_int8(name: str, zoo: Zoo, tmp_path: Path) -> None:
    """Embedding and head, unquantised in the checkpoint, are in int8 as the inputs are: in 4 bits the error is 0.1 or more."""
    folder = tmp_path / "quantised"
    if name in PACKED:
        settings, store = PACKED[name]
        rewritten(zoo.checkpoint("llama"), folder, settings, store([]))
    else:
        compressed(zoo.checkpoint("llama"), folder, name)
    assert_runs(folder, reference_run._load(Checkpoint(folder), torch.float32), "int4", 0.03)


@pytest.mark.parametrize(("options", "warned"), [([], True), (["--quantize", "int4"], False), (["--quiet"], False)])
def test_a_4_bit_checkpoint_that_becomes_fp32_is_warned_of_without_being_read_again(
    options: list[str],
    warned: bool,
    zoo: Zoo,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = compressed(zoo.checkpoint("llama"), tmp_path / "compressed", "W4A16")

    def export_and_lose(request: ExportRequest, report: Report) -> Manifest:
        made = export(request, report)
        shutil.rmtree(folder)  # as if it were on a hub that has become unreachable
        return made

    monkeypatch.setattr(cli, "export", export_and_lose)
    assert command.main([str(folder), "--out", str(tmp_path / "bundle"), "--max-length", "48", *options]) == 0
    warning = "the checkpoint's weights of 4 bits or less are widened for cpu; --quantize int4 keeps them"
    assert (f"skip-export: warning: {warning}\n" in capsys.readouterr().err) is warned


def test_experts_that_were_stored_quantised_are_joined(zoo: Zoo, tmp_path: Path) -> None:
    name = "W4A16, asymmetric"
    folder = compressed(zoo.checkpoint("qwen3_moe"), tmp_path / "compressed", name)
    read, state = source(folder), load_file(folder / "model.safetensors")
    experts = read("model.layers.2.mlp.experts.down_proj", (5, 64, 48))
    for expert in range(5):
        stem = f"model.layers.2.mlp.experts.{expert}.down_proj.weight"
        scheme = QuantizationScheme(targets=[], weights=QuantizationArgs(**WEIGHTS[name][1]))
        parts = {key.rpartition(".")[2]: part for key, part in state.items() if key.startswith(stem)}
        whole = BaseCompressor.get_value_from_registry("pack-quantized").decompress(parts, scheme)["weight"]
        torch.testing.assert_close(experts[expert], whole, rtol=0, atol=0)


PACKED: dict[str, tuple[dict[str, Any], Callable[[list[torch.Tensor]], Store]]] = {
    "GPTQ": ({"quant_method": "gptq", "bits": 4}, partial(gptq, 4)),
    "GPTQ, inputs in groups by activation": (
        {"quant_method": "gptq", "bits": 4, "desc_act": True},
        partial(gptq, 4, shuffled=True),
    ),
    "GPTQ in int8, second layout": (
        {"quant_method": "gptq", "bits": 8, "checkpoint_format": "gptq_v2"},
        partial(gptq, 8, layout="gptq_v2"),
    ),
    "GPTQ, second layout by its other name": (
        {"quant_method": "gptq", "bits": 4, "format": "gptq_v2"},
        partial(gptq, 4, layout="gptq_v2"),
    ),
    "AutoRound, the last group shorter": (
        {"quant_method": "auto-round", "bits": 4, "group_size": 40, "packing_format": "auto_round:auto_gptq"},
        partial(gptq, 4, size=40),
    ),
    "GPTQ in two bits": ({"quant_method": "gptq", "bits": 2}, partial(gptq, 2)),
    "AWQ": ({"quant_method": "awq", "bits": 4, "version": "gemm"}, awq),
    "AutoRound": ({"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_gptq"}, partial(gptq, 4)),
    "AutoRound, zero points as they are": (
        {"quant_method": "auto-round", "bits": 2, "packing_format": "auto_round"},
        partial(gptq, 2, layout="gptq_v2"),
    ),
    "AutoRound, as AWQ packs": ({"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_awq"}, awq),
    "BitNet": ({"quant_method": "bitnet", "linear_class": "autobitlinear"}, bitnet),
    "BitNet, divided by its scales": ({"quant_method": "bitnet"}, partial(bitnet, divides=True)),
    "ModelOpt's FP8": ({"quant_method": "modelopt", "quant_algo": "FP8"}, partial(modelopt, "FP8")),
    "ModelOpt's NVFP4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, partial(modelopt, "NVFP4")),
}


@pytest.mark.parametrize("name", PACKED)
def test_what_other_tools_write_is_read_as_the_numbers_that_it_stands_for(name: str, zoo: Zoo, tmp_path: Path) -> None:
    torch.manual_seed(0)
    numbers: list[torch.Tensor] = []
    settings, store = PACKED[name]
    folder = rewritten(zoo.checkpoint("llama"), tmp_path / "packed", settings, store(numbers))
    names = [key for key in load_file(zoo.checkpoint("llama") / "model.safetensors") if "_proj" in key]
    expected = dict(zoo.model("llama").state_dict()) | dict(zip(names, numbers, strict=True))
    assert_reads(folder, expected)
    model = reference_run._load(Checkpoint(folder), torch.float32)
    assert all(torch.equal(tensor, expected[key]) for key, tensor in model.state_dict().items())


@pytest.mark.parametrize("algorithm", ["FP8", "NVFP4"])
def test_settings_that_an_older_modelopt_wrote_into_a_file_of_its_own_are_read(algorithm: str, zoo: Zoo, tmp_path: Path) -> None:
    store = modelopt(algorithm, [])
    torch.manual_seed(0)
    newer = rewritten(zoo.checkpoint("llama"), tmp_path / "newer", {"quant_method": "modelopt", "quant_algo": algorithm}, store)
    older = shutil.copytree(newer, tmp_path / "older")
    edit_config(older, quantization_config=None)
    settings = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    (older / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": settings}))
    read, shapes = source(newer), build_skeleton(load_config(str(newer))[0]).shapes
    assert_reads(older, {name: read(name, shape).float() for name, shape in shapes.items()})


@pytest.mark.parametrize("settings", [{"quant_algo": None, "kv_cache_quant_algo": "FP8"}, None])
def test_a_modelopt_file_that_says_nothing_of_weights_leaves_them_as_they_are(settings: object, zoo: Zoo, tmp_path: Path) -> None:
    folder = shutil.copytree(zoo.checkpoint("llama"), tmp_path / "model")
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": settings}))
    assert_reads(folder, zoo.model("llama").state_dict())


def test_zero_points_in_int8_or_in_words_that_the_rows_do_not_fill_are_read() -> None:
    torch.manual_seed(0)
    levels, zeros, scales = torch.randint(16, (12, 64)), torch.randint(16, (12, 2)), torch.rand(12, 2)

    def packed(numbers: torch.Tensor) -> torch.Tensor:  # eight along the last axis
        return (numbers.unflatten(-1, (-1, 8)) << torch.arange(0, 32, 4)).sum(-1).to(torch.int32)

    stored = {
        "weight_packed": packed(levels), "weight_scale": scales, "weight_shape": torch.tensor([12, 64]),
        "weight_zero_point": packed(torch.nn.functional.pad(zeros.T, (0, 4))).T,
    }  # fmt: skip
    expected = (levels - zeros.repeat_interleave(32, 1)) * scales.repeat_interleave(32, 1)
    torch.testing.assert_close(dequantize._packed(stored, None), expected, rtol=0, atol=0)
    stored["weight_g_idx"] = torch.full((64,), -1)  # groups in order, as older versions write it
    torch.testing.assert_close(dequantize._packed(stored, None), expected, rtol=0, atol=0)
    stored["weight_zero_point"] = (zeros - 8).to(torch.int8)  # levels are stored without a sign, these zero points with one
    torch.testing.assert_close(dequantize._packed(stored, None), expected, rtol=0, atol=0)
    for wrong in ({"weight_g_idx": torch.arange(64) // 32 - 1}, {"weight_zero_point": stored["weight_zero_point"][:, :1]}):
        with pytest.raises(ValueError):
            dequantize._packed(stored | wrong, None)


def test_a_group_size_that_a_matrix_does_not_have_is_not_taken_for_it() -> None:
    config = SimpleNamespace(quantization_config={"quant_method": "auto-round", "group_size": 40})
    groups = dequantize._groups_by_size(64, 2, config)
    assert groups is not None and groups.tolist() == [0] * 40 + [1] * 24
    assert dequantize._groups_by_size(64, 4, config) is None


def test_gpt2s_transposed_matrices_are_unpacked_transposed(zoo: Zoo, tmp_path: Path) -> None:
    """A square one would fit either way."""
    folder = shutil.copytree(zoo.checkpoint("gpt2"), tmp_path / "packed")
    edit_config(folder, quantization_config={"quant_method": "gptq", "bits": 8})
    state = load_file(folder / "model.safetensors")
    stem, numbers = "transformer.h.1.attn.c_proj.", list[torch.Tensor]()
    square = state.pop(f"{stem}weight")
    assert square.shape[0] == square.shape[1]
    state |= {stem + end: part.contiguous() for end, part in gptq(8, numbers)(square.T).items()}
    save_file(state, folder / "model.safetensors")
    assert torch.equal(source(folder)(f"{stem}weight", tuple(square.shape)), numbers[0].T)


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("W4A16", {"weight_packed": torch.ones(32, 7, dtype=torch.int32)}, "cannot be put together .*: 3 bits"),
        ("W4A16", {"weight_packed": torch.ones(32, 32, dtype=torch.int16)}, "cannot be put together .*torch.int16"),
        ("MXFP4", {"weight_scale": torch.ones(32, 3, dtype=torch.uint8)}, "cannot be put together .*torch.uint8"),
        ("NVFP4", {"weight_global_scale": torch.ones(2)}, "cannot be put together"),
        ("W4A16", {"weight_scale": torch.ones(32, 3)}, "cannot be put together"),
        ("W4A16", {"weight_scale": torch.ones(31, 2)}, "cannot be put together"),
        ("W4A16", {"weight_scale": torch.ones(32, 2, dtype=torch.int32)}, "cannot be put together"),
        ("W4A16", {"weight_scale": torch.ones(32, 0)}, "cannot be put together"),
        ("W4A16", {"weight_shape": None}, "cannot be put together"),
        ("W4A16", {"weight_shape": torch.tensor([0, 0])}, "cannot be put together"),
        ("W4A16", {"weight_g_idx": torch.full((64,), 2)}, "cannot be put together"),
        ("W4A16", {"weight_g_idx": torch.zeros(3)}, "cannot be put together"),
        ("W4A16, asymmetric", {"weight_zero_point": torch.ones(3, 4, dtype=torch.int32)}, "cannot be put together"),
        ("W8A8, a row", {"weight": torch.ones(32, 64, dtype=torch.uint8)}, "cannot be put together"),
        ("FP8, a block", {"weight_scale": torch.ones(3, 2)}, "cannot be put together .*blocks of 16 x 32"),
        ("FP8, a row", {"weight_scale": torch.ones(3, 2)}, "cannot be put together .*block_structure is None"),
        ("W8A8, a row", {"weight_scale": None}, "k_proj.weight is torch.int8; give an unquantised checkpoint"),
    ],
)  # fmt: skip
def test_mismatched_parts_give_a_one_line_error(
    name: str, change: dict[str, torch.Tensor | None], says: str, zoo: Zoo, tmp_path: Path
) -> None:
    folder = compressed(zoo.checkpoint("llama"), tmp_path / "compressed", name)
    changed = {f"{KEY}.{end}": tensor for end, tensor in change.items()}
    assert_refused(folder, changed, says, f"{KEY}.weight", (32, 64))
