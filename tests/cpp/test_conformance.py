"""The C++ runtime gives the tokens, layers and logits that cases.json records; tests/conformance asks the same of Python."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import skipdecode
from tests.conformance.cases import CASES, tolerance
from tests.conformance.record import OPTIONS, SHOWN, run
from tests.cpp.conftest import Driver


# Python's tests run alongside these and begin with the first bundle. Going from both ends, each traces half of the models
@pytest.mark.parametrize("case", CASES[::-1], ids=lambda case: case["name"])
def test_the_cpp_runtime_conforms(case: dict[str, Any], conformance_bundle: Callable[[str], Path], driver: Driver) -> None:
    asked = {"bundle": conformance_bundle(case["bundle"]), "prompts": case["prompts"]}
    found = driver.ask(command="generate", **asked, **case["options"])
    assert found == {key: value for key, value in case["expected"].items() if key != "logits"}
    if "logits" in case["expected"]:
        logits = driver.ask(command="logits", **asked, max_new_tokens=17, ignore_eos=True)["logits"]
        wanted = np.array(case["expected"]["logits"])
        np.testing.assert_allclose(np.array(logits)[:, :16, :SHOWN], wanted, atol=tolerance(case["bundle"]), rtol=0)


def test_in_int8_both_runtimes_give_the_same_results_on_one_processor(
    conformance_bundle: Callable[[str], Path], driver: Driver
) -> None:
    """Exactly the same, including drawn tokens, which differ from processor to processor and so cannot be in cases.json."""
    bundle = conformance_bundle("qwen3-int8")
    generator = skipdecode.load(bundle)
    for case in (case for case in CASES if case["bundle"] == "qwen3-int8"):
        for options in OPTIONS.values():
            found = driver.ask(command="generate", bundle=bundle, prompts=case["prompts"], **options)
            assert found == run(generator, case["prompts"], options)
