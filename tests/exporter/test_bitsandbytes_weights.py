"""Weights that bitsandbytes itself has stored, directly and through transformers."""

from __future__ import annotations

import functools
import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from bitsandbytes import functional
from bitsandbytes.backends.default.ops import _dequantize_4bit_compute
from bitsandbytes.backends.utils import _get_4bit_code
from safetensors.torch import load_file

from skipdecode.exporter import bitsandbytes_weights
from skipdecode.graph_passes.kept_levels import kept_levels
from tests.exporter.quantised_checkpoints import assert_reads, assert_refused, assert_runs, source
from tests.graph_passes.running import relative_error
from tests.graph_passes.test_kept_levels import restored
from tests.zoo import Zoo

KEY = "model.layers.1.self_attn.k_proj.weight"  # [32,64] in the tests' Llama
WAYS: dict[str, dict[str, Any]] = {
    "NF4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "NF4, its scales quantised as well": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
    },
    "FP4, its bytes stored as bf16": {"load_in_4bit": True, "bnb_4bit_quant_storage": torch.bfloat16},
    "LLM.int8()": {"load_in_8bit": True},
}
Quantised = Callable[[str, str], tuple[Path, Any]]


@pytest.fixture(scope="module", autouse=True)
def _computed_by_torch() -> Iterator[None]:
    """Have bitsandbytes dequantise with its torch code: 0.50.2's AVX-512 code takes wrong scales where blocks cross rows."""

    def generic(
        weight: torch.Tensor, absmax: torch.Tensor, block: int, kind: str, shape: Any, dtype: torch.dtype
    ) -> torch.Tensor:
        code = _get_4bit_code(kind, weight.device)
        found: torch.Tensor = _dequantize_4bit_compute(weight.view(torch.uint8).flatten(), absmax, code, block, shape, dtype)
        return found

    library = torch.library.Library("bitsandbytes", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it was registered before
        library.impl("dequantize_4bit", generic, "CPU", allow_override=True)
    yield
    library._destroy()


@pytest.fixture(scope="module")
def quantised(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Quantised:
    """Gives a checkpoint as transformers quantises it, and its dequantised model; by architecture and way, made once."""
    make = transformers.AutoModelForCausalLM.from_pretrained

    @functools.cache
    def made(name: str, way: str) -> tuple[Path, Any]:
        folder, how = tmp_path_factory.mktemp("bitsandbytes") / "quantised", transformers.BitsAndBytesConfig(**WAYS[way])
        make(zoo.checkpoint(name), quantization_config=how, device_map="cpu", dtype=torch.float32).save_pretrained(folder)
        return folder, make(folder, device_map="cpu", dtype=torch.float32).dequantize()

    return made


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_what_bitsandbytes_stores_is_read_as_transformers_dequantises_it(name: str, way: str, quantised: Quantised) -> None:
    folder, model = quantised(name, way)
    assert any(key.endswith(("SCB", "absmax")) for key in load_file(folder / "model.safetensors"))
    assert_reads(folder, model.state_dict(), 2**-22 if way == "LLM.int8()" else 0)  # transformers multiplies by 1 / 127


def test_gpt2s_matrices_are_transposed_back(quantised: Quantised) -> None:
    """bitsandbytes' layers store them as [N,K]; a square one would fit either way."""
    assert_runs(*quantised("gpt2", "NF4"))


def test_int8_keeps_the_levels_of_llm_int8(quantised: Quantised) -> None:
    folder, _ = quantised("llama", "LLM.int8()")
    matrix = source(folder)(KEY, (32, 64)).numpy()
    found = kept_levels(matrix, bits=8, block=32)
    assert found is not None and found.rows.all() and relative_error(restored(found), matrix) < 1e-6


def test_an_older_config_that_does_not_name_the_method_is_read(quantised: Quantised, tmp_path: Path) -> None:
    folder, model = quantised("llama", "NF4")
    copied = shutil.copytree(folder, tmp_path / "older")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]["quant_method"]
    (copied / "config.json").write_text(json.dumps(config))
    assert_reads(copied, model.state_dict())


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("shape", "block"), [((24, 40), 64), ((3, 50), 64), ((3, 5), 64), ((130, 128), 64), ((130, 128), 256)])
def test_blocks_may_cross_rows_and_the_last_may_be_partial(shape: tuple[int, int], block: int, nested: bool, kind: str) -> None:
    """Also with an odd count of numbers, and with more scales than fit in one block of scales."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    packed, state = functional.quantize_4bit(matrix, blocksize=block, compress_statistics=nested, quant_type=kind)
    tensors = {"weight": packed} | {f"weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
    found = bitsandbytes_weights.dequantise_4_bit(tensors)
    torch.testing.assert_close(found, functional.dequantize_4bit(packed, state), rtol=0, atol=0)
    assert 0 < (found - matrix).norm() / matrix.norm() < 0.25


def _state(**changes: Any) -> torch.Tensor:
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [32, 64]}
    state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.1}
    return torch.tensor([*json.dumps(state | changes).encode()], dtype=torch.uint8)


STATE = "quant_state.bitsandbytes__nf4"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({STATE: None}, "cannot be put together"),
        ({STATE: torch.tensor([*b"[1"], dtype=torch.uint8)}, "cannot be put together"),
        ({STATE: torch.tensor([*b"[1]"], dtype=torch.uint8)}, "cannot be put together"),
        ({STATE: torch.tensor([1.5])}, "cannot be put together"),
        ({STATE: _state(shape=[32, 65])}, r"cannot be put together .*: \[32, 65\] in blocks of 64"),
        ({STATE: _state(shape=2048)}, "cannot be put together"),
        ({STATE: _state(shape=[-32, -64])}, "cannot be put together"),
        ({STATE: _state(shape=[64, 32])}, r"k_proj.weight has shape \(64, 32\), config.json says \(32, 64\)"),
        ({STATE: _state(blocksize=0)}, "cannot be put together"),
        ({STATE: _state(blocksize="64")}, "cannot be put together"),
        ({STATE: _state(nested_blocksize=1)}, "cannot be put together"),
        ({STATE: _state(nested_offset=None)}, "cannot be put together"),
        ({"quant_map": None}, "cannot be put together"),
        ({"quant_map": torch.ones(15)}, "cannot be put together"),
        ({"absmax": torch.ones(31, dtype=torch.uint8)}, "cannot be put together"),
        ({"absmax": torch.ones(32)}, "cannot be put together"),  # not codes
        ({"absmax": None}, r"k_proj.weight has shape \(1024, 1\)"),
    ],
)  # fmt: skip
def test_mismatched_4_bit_parts_give_a_one_line_error(
    change: dict[str, torch.Tensor | None], says: str, quantised: Quantised, tmp_path: Path
) -> None:
    folder, _ = quantised("llama", "NF4, its scales quantised as well")
    _assert_refused(folder, tmp_path, {f"{KEY}.{end}": tensor for end, tensor in change.items()}, says)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({KEY: torch.ones(32, 64)}, "cannot be put together .*torch.float32"),
        ({KEY: torch.ones(2048, dtype=torch.int8)}, "cannot be put together"),
        ({KEY.replace("weight", "SCB"): torch.ones(31)}, "cannot be put together"),
        ({KEY.replace("weight", "weight_format"): torch.tensor(1, dtype=torch.uint8)}, "cannot be put together"),
    ],
)
def test_mismatched_8_bit_parts_give_a_one_line_error(
    change: dict[str, torch.Tensor | None], says: str, quantised: Quantised, tmp_path: Path
) -> None:
    folder, _ = quantised("llama", "LLM.int8()")
    _assert_refused(folder, tmp_path, change, says)


def _assert_refused(checkpoint: Path, folder: Path, change: dict[str, torch.Tensor | None], says: str) -> None:
    assert change.keys() <= load_file(checkpoint / "model.safetensors").keys()
    assert_refused(shutil.copytree(checkpoint, folder / "changed"), change, says, KEY, (32, 64))
