"""Weights on their way into a bundle, and those of a model without a checkpoint."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from skipdecode.errors import TargetError
from skipdecode.exporter.weights import WEIGHTS, random_source, write_weights

SHAPE = (1500, 1000)  # more than one generator draws


def _write(folder: Path, given: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    write_weights(folder, {"w": tuple(given.shape)}, dtype, lambda name, shape: given, lambda done: None)
    return load_file(folder / WEIGHTS)["w"]


def test_a_number_that_fp16_cannot_hold_is_refused(tmp_path: Path) -> None:
    for kept in (torch.float32, torch.bfloat16):
        given = torch.tensor([1.0, -98304.0], dtype=kept)
        with pytest.raises(TargetError, match="--dtype: w holds 98304, fp16 at most 65504; choose --dtype bf16"):
            _write(tmp_path, given, torch.float16)
        torch.testing.assert_close(_write(tmp_path, given, torch.bfloat16).float(), given.float())
    largest = torch.tensor([65504.0, -65504.0, 65519.0])  # which rounds down
    assert _write(tmp_path, largest, torch.float16).tolist() == [65504.0, -65504.0, 65504.0]


def test_what_the_checkpoint_has_infinite_stays_infinite(tmp_path: Path) -> None:
    given = torch.tensor([1.0, -math.inf])
    assert _write(tmp_path, given, torch.float16).tolist() == [1.0, -math.inf]


def test_random_weights_depend_on_their_names_alone() -> None:
    source = random_source()
    first, other = source("one", SHAPE), source("two", SHAPE)
    assert torch.equal(random_source()("one", SHAPE), first)
    assert not torch.equal(other, first) and not torch.equal(random_source(1)("one", SHAPE), first)


def test_random_weights_are_normal_and_no_block_repeats() -> None:
    drawn = random_source()("one", SHAPE)
    assert abs(drawn.mean()) < 1e-4 and abs(drawn.std() - 0.02) < 1e-4
    assert drawn.unique().numel() > 0.8 * drawn.numel()  # normal numbers in fp32 do meet


def test_random_norms_leave_what_they_are_given() -> None:
    source = random_source()
    assert bool((source("norm.weight", (8,)) == 1).all()) and not source("norm.bias", (8,)).any()
