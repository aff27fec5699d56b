"""The figures of a bundle: bytes follow from its dtype, each target's number format and the longest run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from skipdecode import manifest as manifests
from skipdecode.bundle_facts import facts
from skipdecode.schedule import Schedule
from tests.manifests import make_manifest

SCHEDULE = Schedule(name="table", num_layers=6, warmup_layers=1, layers=(5, 4, 4, 2))
SLOT = 2 * 2 * 4  # numbers in a slot: keys and values of 2 heads of size 4


def test_a_narrow_target_has_half_the_bytes_with_skipping_and_without(tmp_path: Path) -> None:
    made = make_manifest(SCHEDULE, tmp_path)
    cuda = dataclasses.replace(made.targets[0], name="cuda", weights="fp16", machine="any", cpu_features=())
    figures = facts(dataclasses.replace(made, dtype="float16", targets=(*made.targets, cuda)))
    assert figures["weights_bytes"] == 2 * figures["model"]["parameters"] == 200
    wide, narrow = figures["targets"]
    for name in ("kv_bytes_per_row", "kv_bytes_per_row_without_skipping"):
        assert figures[name] == wide[name] == 2 * narrow[name]
    assert narrow["kv_bytes_per_row_without_skipping"] == 6 * 32 * SLOT * 2
    alone = facts(dataclasses.replace(made, dtype="float16", targets=(cuda,)))
    assert (alone["kv_bytes_per_row"], alone["targets"]) == (narrow["kv_bytes_per_row"], [narrow])


def test_a_row_of_an_odd_length_has_a_slot_for_its_last_token(tmp_path: Path) -> None:
    limits = manifests.Limits(max_length=33, max_batch=4)
    figures = facts(dataclasses.replace(make_manifest(SCHEDULE, tmp_path), limits=limits))
    assert (figures["kv_prompt_tokens"], figures["kv_bytes_per_row_without_skipping"]) == (16, 6 * 33 * SLOT * 4)
