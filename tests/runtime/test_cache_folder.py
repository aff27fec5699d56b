"""Where what can be made again is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from skipdecode.cache_folder import cache_folder


def test_it_is_where_the_user_says_else_at_home_else_where_temporary_files_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder("kernels") == tmp_path / "skipdecode" / "kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder("kernels") == tmp_path / ".cache" / "skipdecode" / "kernels"
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("os.getuid", lambda: 54321)  # of no user that the system knows
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    found = cache_folder("kernels")
    assert found.relative_to(tmp_path).parts[0].startswith("skipdecode-") and found == cache_folder("kernels")
