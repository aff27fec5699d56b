"""Layers whose state has a fixed size: the C++ runtime agrees with Python's, also for prompts of two passes."""

from __future__ import annotations

from pathlib import Path

import pytest

from skipdecode.schedule import Anchor
from tests.cpp.conftest import LENGTHS, Driver, assert_agrees_with_python
from tests.zoo import Zoo


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("anchor", Anchor)
def test_both_runtimes_give_the_same_results(
    anchor: Anchor, lengths: str, hybrid_bundles: dict[Anchor, Path], driver: Driver
) -> None:
    assert_agrees_with_python(driver, hybrid_bundles[anchor], LENGTHS[lengths])


@pytest.mark.parametrize("name", ["mamba", "recurrent_gemma"])
def test_both_runtimes_give_the_same_results_where_channels_are_heads(name: str, zoo: Zoo, driver: Driver) -> None:
    """The first without attention."""
    assert_agrees_with_python(driver, zoo.bundle(name), LENGTHS["ragged"])
