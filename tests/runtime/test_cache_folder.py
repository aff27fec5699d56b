"""Where files that can be rebuilt are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from skipdecode.cache_folder import cache_folder


def test_the_folder_is_the_users_choice_or_in_the_home_or_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder("kernels") == tmp_path / "skipdecode" / "kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder("kernels") == tmp_path / ".cache" / "skipdecode" / "kernels"
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("os.getuid", lambda: 54321)  # a user that the system does not know
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    found = cache_folder("kernels")
    assert found.relative_to(tmp_path).parts[0].startswith("skipdecode-") and found == cache_folder("kernels")
