"""What each quantisation method makes of a matrix's numbers."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from skipdecode.graph_passes.quantization import METHODS, Quantization
from tests.graph_passes.running import Array, quantised, relative_error


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("least", [0.0, 0.01, 0.015, 0.02])
def test_the_search_keeps_numbers_of_one_sign(least: float, sign: int, bits: int) -> None:
    """Blocks whose levels would have to begin away from zero, up to blocks of a single number."""
    weight = sign * np.random.default_rng(0).uniform(least, 0.02, (24, 64)).astype(np.float32)
    found = quantised(weight, Quantization(bits=bits, method="k-quant"))
    assert relative_error(found, weight) < (0.05 if bits == 4 else 0.003)


def test_the_search_leaves_a_smaller_error_than_rounding() -> None:
    """Weights whose blocks are not centred on 0, with an odd number of blocks a row."""
    rng = np.random.default_rng(2)
    weight = (rng.standard_normal((40, 160)) + 0.5 * rng.standard_normal((40, 1))).astype(np.float32)
    errors = {}
    for method, quantise in METHODS.items():
        parts = quantise(weight, 4, 32)
        assert parts["weight"].shape == (40, 5, 16) and parts["scales"].shape == (200,)
        assert "zero_points" not in parts or parts["zero_points"].shape == (40, 3)
        found = quantised(weight, Quantization(bits=4, method=method))
        errors[method] = relative_error(found, weight)
    assert errors["k-quant"] < 0.9 * errors["rtn"], errors


@pytest.mark.parametrize("method", METHODS)
def test_a_row_of_zeros_stays_zero_without_a_warning(method: str) -> None:
    """Embeddings have such a row for the padding token."""
    weight = np.random.default_rng(0).standard_normal((24, 64)).astype(np.float32)
    weight[7] = 0
    found = quantised(weight, Quantization(bits=4, method=method))
    assert not found[7].any() and found.any()


def test_what_a_program_logs_stays_as_it_was() -> None:
    """Importing ONNX Runtime's quantiser calls logging.basicConfig, unless the root logger has a handler."""
    code = """
import logging, numpy as np
from skipdecode.graph_passes.quantization import METHODS
METHODS["rtn"](np.ones((8, 32), np.float32), 4, 32)
print(logging.getLogger().level == logging.WARNING, logging.getLogger().handlers)"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "True []\n"


def test_quantising_some_rows_at_a_time_gives_the_same_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime's quantiser ends the process on a table of 2**31 numbers, such as Gemma 4's per-layer inputs."""
    from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, DefaultWeightOnlyQuantizer

    weight = np.random.default_rng(0).standard_normal((2500, 64)).astype(np.float32)
    for bits in (4, 8):
        config = DefaultWeightOnlyQuantConfig(block_size=32, is_symmetric=True, accuracy_level=4, bits=bits)
        whole, scales, _ = DefaultWeightOnlyQuantizer(config).qbits_block_quant(np.ascontiguousarray(weight.T))
        rows, quantise = [], DefaultWeightOnlyQuantizer.qbits_block_quant

        def counted(self: Any, turned: Array, rows: list[int] = rows, quantise: Any = quantise) -> Any:
            rows.append(turned.shape[1])
            return quantise(self, turned)

        with monkeypatch.context() as patch:
            patch.setattr(DefaultWeightOnlyQuantizer, "qbits_block_quant", counted)
            parts = METHODS["rtn"](weight, bits, 32)
        assert rows == [*[256] * 9, 196]
        np.testing.assert_array_equal(parts["weight"], whole)
        np.testing.assert_array_equal(parts["scales"], scales.reshape(-1))
