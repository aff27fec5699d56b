"""A mixture's tensors as they lie in files, and as the model has them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import skipdecode
from skipdecode.errors import ModelNotSupportedError
from skipdecode.exporter import reference_run
from skipdecode.exporter.checkpoint import checkpoint_source
from skipdecode.exporter.export import ExportRequest, export
from skipdecode.exporter.graphs import skeleton
from skipdecode.exporter.model_names import load_config
from skipdecode.exporter.weights import TensorSource
from skipdecode.schedule_builders import ScheduleRequest
from tests.agreement import assert_gives_the_references_logits
from tests.conftest import MAX_LENGTH, RELATIVES, Zoo

UP = "model.layers.3.block_sparse_moe.experts.1.w3.weight"


def _source(folder: Path) -> TensorSource:
    return checkpoint_source(folder, skeleton(transformers.AutoConfig.from_pretrained(folder)))


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "phimoe", "granitemoe", "ernie4_5_moe", "minimax_m2", "deepseek_v3"])
def test_every_parameter_is_read_as_transformers_loads_it(name: str, zoo: Zoo) -> None:
    stored = load_file(zoo.checkpoint(name) / "model.safetensors").keys()
    expected = zoo.model(name).state_dict()
    assert not stored >= expected.keys()  # else there is nothing to convert
    bones = skeleton(transformers.AutoConfig.from_pretrained(zoo.checkpoint(name)))
    source = checkpoint_source(zoo.checkpoint(name), bones)
    for parameter, shape in bones.shapes.items():
        assert torch.equal(source(parameter, shape), expected[parameter]), parameter


def test_the_eleventh_expert_comes_after_the_tenth(tmp_path: Path) -> None:
    config = RELATIVES["mixtral"]()
    config.num_hidden_layers, config.num_local_experts = 1, 12
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    value = model.state_dict()["model.layers.0.mlp.experts.down_proj"]
    assert torch.equal(_source(tmp_path)("model.layers.0.mlp.experts.down_proj", tuple(value.shape)), value)


def test_experts_that_do_not_fit_together_are_one_line(zoo: Zoo, tmp_path: Path) -> None:
    state = load_file(zoo.checkpoint("mixtral") / "model.safetensors")
    transformers.AutoConfig.from_pretrained(zoo.checkpoint("mixtral")).save_pretrained(tmp_path)
    for change, says in (({UP: torch.zeros(7, 64)}, "cannot be put together"), ({UP: None}, "has shape|cannot be put together")):
        changed = {name: tensor for name, tensor in (state | change).items() if tensor is not None}
        save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises(ModelNotSupportedError, match=says) as caught:
            _source(tmp_path)("model.layers.3.mlp.experts.gate_up_proj", (5, 256, 64))
        assert "\n" not in str(caught.value)


def _in_fp8(checkpoint: Path, folder: Path, block: tuple[int, int] | None) -> Path:
    """A checkpoint as DeepSeek writes it: matrices in FP8, a scale for each block of them, or with None for each of them."""
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    quantised = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": block}
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16", "quantization_config": quantised}))
    state = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    torch.manual_seed(0)
    for name in [name for name, tensor in state.items() if "_proj" in name and tensor.ndim == 2]:
        blocks = [-(-size // length) for size, length in zip(state[name].shape, block or state[name].shape, strict=True)]
        state[name] = torch.randn(state[name].shape).to(torch.float8_e4m3fn)
        state[f"{name}_scale_inv"] = 0.02 + 0.1 * torch.rand(blocks if block else ())
    save_file(state, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "deepseek_v3"])
def test_matrices_in_fp8_are_read_as_transformers_dequantises_them(name: str, zoo: Zoo, tmp_path: Path) -> None:
    folder = _in_fp8(zoo.checkpoint(name), tmp_path / "in_fp8", (16, 8))
    model = reference_run._load(folder, torch.float32)
    bones = skeleton(load_config(str(folder))[0])
    source, expected = checkpoint_source(folder, bones), model.state_dict()
    for parameter, shape in bones.shapes.items():
        assert torch.equal(source(parameter, shape).float(), expected[parameter]), parameter
    export(ExportRequest(model=str(folder), out=tmp_path / "b", schedule=ScheduleRequest(name="full"), max_length=MAX_LENGTH))
    decoder = skipdecode.load(tmp_path / "b").decoder([9], 3)
    assert_gives_the_references_logits(decoder, model, [[9, 8, 7, 6, 5, 4, 3, 17, 23]], 3, 1e-3)


@pytest.mark.parametrize("block", [(24, 40), (128, 128), None], ids=["smaller ones at the end", "one block", "no blocks"])
def test_a_number_in_fp8_is_scaled_by_the_block_it_lies_in(block: tuple[int, int] | None, zoo: Zoo, tmp_path: Path) -> None:
    folder, name = _in_fp8(zoo.checkpoint("llama"), tmp_path / "in_fp8", block), "model.layers.1.self_attn.k_proj.weight"
    state = load_file(folder / "model.safetensors")
    matrix, scales = state[name].float(), state[f"{name}_scale_inv"]
    read = checkpoint_source(folder, skeleton(load_config(str(folder))[0]))(name, tuple(matrix.shape))
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
def test_a_matrix_in_fp8_and_scales_that_do_not_fit_together_are_one_line(
    change: dict[str, torch.Tensor | None], says: str, zoo: Zoo, tmp_path: Path
) -> None:
    folder, prefix = _in_fp8(zoo.checkpoint("llama"), tmp_path / "in_fp8", (16, 8)), "model.layers.1.self_attn."
    state = load_file(folder / "model.safetensors") | {prefix + name: tensor for name, tensor in change.items()}
    save_file({name: tensor for name, tensor in state.items() if tensor is not None}, folder / "model.safetensors")
    with pytest.raises(ModelNotSupportedError, match=says) as caught:
        checkpoint_source(folder, skeleton(load_config(str(folder))[0]))(f"{prefix}k_proj.weight", (32, 64))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [128, [0, 128], [128], "128"])
def test_a_block_size_that_is_none_is_one_line(size: Any, zoo: Zoo, tmp_path: Path) -> None:
    config = json.loads((zoo.checkpoint("llama") / "config.json").read_text())
    quantised = {"quant_method": "fp8", "weight_block_size": size}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": quantised}))
    with pytest.raises(ModelNotSupportedError, match=r"block_size|config\.json") as caught:
        load_config(str(tmp_path))
    assert "\n" not in str(caught.value)


DOWN = "model.layers.2.mlp.experts.down_proj"


@pytest.fixture
def in_mxfp4(zoo: Zoo, tmp_path: Path) -> Path:
    """gpt-oss' checkpoint as OpenAI writes it: bf16, the experts' matrices as blocks of 32 numbers of 4 bits and exponents."""
    folder = shutil.copytree(zoo.checkpoint("gpt_oss"), tmp_path / "in_mxfp4")
    config = json.loads((folder / "config.json").read_text())
    quantised = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16", "quantization_config": quantised}))
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
    model = reference_run._load(in_mxfp4, torch.float32)
    bones = skeleton(transformers.AutoConfig.from_pretrained(in_mxfp4))
    source, expected = checkpoint_source(in_mxfp4, bones), model.state_dict()
    for parameter, shape in bones.shapes.items():
        assert torch.equal(source(parameter, shape).float(), expected[parameter]), parameter
    full = ScheduleRequest(name="full")
    export(ExportRequest(model=str(in_mxfp4), out=in_mxfp4.parent / "bundle", schedule=full, max_length=MAX_LENGTH))
    decoder = skipdecode.load(in_mxfp4.parent / "bundle").decoder([9], 3)
    assert_gives_the_references_logits(decoder, model, [[9, 8, 7, 6, 5, 4, 3, 17, 23]], 3, 1e-3)


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
def test_blocks_and_scales_that_do_not_fit_together_are_one_line(part: str, change: Any, says: str, in_mxfp4: Path) -> None:
    state = load_file(in_mxfp4 / "model.safetensors")
    changed = change(state.pop(f"{DOWN}_{part}"))
    save_file(state if changed is None else {**state, f"{DOWN}_{part}": changed}, in_mxfp4 / "model.safetensors")
    with pytest.raises(ModelNotSupportedError, match=says) as caught:
        _source(in_mxfp4)(DOWN, (5, 96, 64))
    assert "\n" not in str(caught.value)
