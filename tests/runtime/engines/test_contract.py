"""Engines that do not match their manifest."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import skipdecode
from skipdecode.errors import BundleError
from skipdecode.manifest import MANIFEST
from tests.zoo import Zoo


def _swap(*places: Any) -> Callable[[dict[str, Any]], None]:
    """Exchange two of the target's engines: a key, or the index of a segment."""

    def swap(manifest: dict[str, Any]) -> None:
        target = manifest["targets"][0]
        (one, a), (other, b) = [(target, place) if isinstance(place, str) else (target["segments"], place) for place in places]
        one[a], other[b] = other[b], one[a]

    return swap


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: m["model"].update(hidden_size=32), "'hidden' is float32 [?,?,64], bundle.json calls for float32 [?,?,32]"),
        (lambda m: m["model"].update(num_kv_heads=1), "is float32 [?,2,?,16], bundle.json calls for float32 [?,1,?,16]"),
        (lambda m: m["model"].update(vocab_size=98), "'logits' is float32 [?,99], bundle.json calls for float32 [?,98]"),
        (_swap("embed", "head"), "bundle.json calls for none of that name"),
        (_swap(1, 2), "'past_key.2' is float32 [?,2,?,16], bundle.json calls for none of that name"),
    ],
    ids=["width", "heads", "vocabulary", "embedding and head", "two segments"],
)  # fmt: skip
def test_an_engine_of_another_shape_is_refused_when_it_is_loaded(
    change: Callable[[dict[str, Any]], None], says: str, zoo: Zoo, tmp_path: Path
) -> None:
    bundle = shutil.copytree(zoo.bundle("llama"), tmp_path / "bundle")
    manifest = json.loads((bundle / MANIFEST).read_text())
    change(manifest)
    (bundle / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(BundleError) as caught:
        skipdecode.load(bundle)
    assert says in str(caught.value) and str(caught.value).endswith("; export the model again")
