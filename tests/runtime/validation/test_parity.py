"""When a difference from the reference is a failure."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from skipdecode import manifest as manifests
from skipdecode.validation import parity
from tests.zoo import Zoo


@pytest.mark.parametrize(
    ("weights", "error", "holds"),
    [
        ("fp32", 0.9e-3, True),
        ("fp32", 1.1e-3, False),
        ("fp32", math.nan, False),
        ("int4", 0.5, None),
        ("int4", math.nan, False),
        ("int4", math.inf, False),
    ],
)
def test_exact_weights_are_held_to_a_thousandth_and_others_to_numbers(
    weights: str, error: float, holds: bool | None, zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, fake in (("_ask", None), ("load_file", {}), ("_compare", {"relative_error": error})):
        monkeypatch.setattr(parity, name, lambda *_, fake=fake: fake)
    manifest = manifests.read(zoo.bundle("opt"))
    generator: Any = SimpleNamespace(manifest=manifest, target=SimpleNamespace(weights=weights))
    rows = parity.measure_parity(generator, "")
    assert [row["name"] for row in rows] == [variant.name for variant in manifest.variants]
    assert all(row["holds"] is holds for row in rows)
