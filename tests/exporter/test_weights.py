"""Weights without a checkpoint."""

from __future__ import annotations

import torch

from skipdecode.exporter.weights import random_source

SHAPE = (1500, 1000)  # more than one generator draws


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
