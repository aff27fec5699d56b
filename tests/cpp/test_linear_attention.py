"""Layers whose state has one size: the C++ runtime gives what Python's gives, also for prompts of two passes."""

from __future__ import annotations

from pathlib import Path

import pytest

from skipdecode.schedule import Anchor
from tests.cpp.conftest import LENGTHS, Driver, assert_gives_what_python_gives
from tests.zoo import Zoo


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("anchor", Anchor)
def test_both_runtimes_give_the_same(anchor: Anchor, lengths: str, hybrid_bundles: dict[Anchor, Path], driver: Driver) -> None:
    assert_gives_what_python_gives(driver, hybrid_bundles[anchor], LENGTHS[lengths])


def test_both_runtimes_give_the_same_of_a_model_without_attention(zoo: Zoo, driver: Driver) -> None:
    assert_gives_what_python_gives(driver, zoo.bundle("mamba"), LENGTHS["ragged"])
