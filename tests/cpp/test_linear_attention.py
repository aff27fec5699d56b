"""Layers whose state has one size: the C++ runtime gives what Python's gives, also for prompts of two passes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import skipdecode
from skipdecode.schedule import Anchor
from tests.conformance.record import OPTIONS, clear_prompts, run
from tests.cpp.conftest import LONG, Driver

LENGTHS = {"ragged": [2, 7, 1, 3], "long": [3, LONG]}  # of prompts


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("anchor", Anchor)
def test_both_runtimes_give_the_same(anchor: Anchor, lengths: str, hybrid_bundles: dict[Anchor, Path], driver: Driver) -> None:
    generator = skipdecode.load(hybrid_bundles[anchor])
    prompts, logits = clear_prompts(generator, LENGTHS[lengths], 5e-3)
    asked = {"bundle": hybrid_bundles[anchor], "prompts": prompts}
    for options in OPTIONS.values():
        chosen = {**options, "ignore_eos": True}  # ended rows ride along in Python and are freed in C++
        assert driver.ask(command="generate", **asked, **chosen) == run(generator, prompts, chosen)
    found = driver.ask(command="logits", **asked, max_new_tokens=17, ignore_eos=True)["logits"]
    np.testing.assert_allclose(np.array(found)[:, :16], logits, atol=1e-3, rtol=0)
