"""The C++ runtime gives the tokens, layers and logits that cases.json records; tests/conformance asks the same of Python."""

from __future__ import annotations

import dataclasses
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
        logits = driver.ask(command="session", **asked, max_new_tokens=17, ignore_eos=True)["logits"]
        wanted = np.array(case["expected"]["logits"])
        np.testing.assert_allclose(np.array(logits)[:, :16, :SHOWN], wanted, atol=tolerance(case["bundle"]), rtol=0)


@pytest.mark.parametrize("name", ["llama", "llama-absolute", "opt-early-exit", "gpt2-few-variants"])
def test_another_schedule_on_the_same_bundle_gives_pythons_tokens_and_layers(
    name: str, conformance_bundle: Callable[[str], Path], driver: Driver
) -> None:
    bundle = conformance_bundle(name)
    generator = skipdecode.load(bundle)
    own = generator.manifest.schedule
    schedule = dataclasses.replace(own, layers=(own.variants[0],) * 2 + (own.variants[-1],))
    prompts = [[5, 6, 7, 8], [9], [12, 3]]
    expected = generator.generate(prompts, max_new_tokens=12, schedule=schedule, ignore_eos=True)
    assert expected.layers != generator.generate(prompts, max_new_tokens=12, ignore_eos=True).layers
    asked = {"bundle": bundle, "prompts": prompts, "max_new_tokens": 12, "ignore_eos": True}
    found = driver.ask(command="session", **asked, schedule=list(schedule.layers))
    assert found["token_ids"] == [row.token_ids for row in expected.sequences]
    assert found["layers"] == list(expected.layers)


def test_a_schedule_that_cuts_through_a_segment_is_refused(conformance_bundle: Callable[[str], Path], driver: Driver) -> None:
    bundle = conformance_bundle("gpt2-few-variants")
    between = skipdecode.load(bundle).manifest.schedule.variants[-1] + 1
    found = driver.ask(command="session", bundle=bundle, prompts=[[5]], schedule=[between])
    assert found["error"] == (
        "the schedule cuts through a segment of this bundle; choose other layer counts, or export the model with them"
    )


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
