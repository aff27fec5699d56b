"""The Python runtime gives what cases.json records; tests/cpp/test_conformance.py asks the same of the C++ runtime."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import skipdecode
from tests.conformance.cases import CASES, tolerance
from tests.conformance.record import SHOWN, logits_of, run


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_the_python_runtime_conforms(case: dict[str, Any], conformance_bundle: Callable[[str], Path]) -> None:
    generator = skipdecode.load(conformance_bundle(case["bundle"]))
    found = run(generator, case["prompts"], case["options"])
    assert found == {key: value for key, value in case["expected"].items() if key != "logits"}
    if "logits" in case["expected"]:
        logits = logits_of(generator, case["prompts"])[..., :SHOWN]
        np.testing.assert_allclose(logits, np.array(case["expected"]["logits"]), atol=tolerance(case["bundle"]), rtol=0)
