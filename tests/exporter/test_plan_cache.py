"""What an export takes over from the bundle that it replaces."""

from __future__ import annotations

from pathlib import Path

from skipdecode.exporter.plan_cache import link_or_copy


def test_a_known_plan_is_one_file_under_two_names_and_one_that_is_gone_is_built(tmp_path: Path) -> None:
    plan, path = tmp_path / "old.plan", tmp_path / "new.plan"
    assert not link_or_copy(plan, path) and not path.exists()
    plan.write_bytes(b"kernels")
    assert link_or_copy(plan, path) and path.samefile(plan)
