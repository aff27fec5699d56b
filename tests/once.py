"""What pytest's processes make once and share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    """A folder that is the same in all of pytest's processes."""
    own = factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


def made_once(path: Path, make: Callable[[Path], object]) -> Path:
    """`path`, which the first process that asks for it makes, under another name at first; others wait."""
    if not path.exists():
        with FileLock(f"{path}.lock"):
            if not path.exists():
                partial = path.with_name(f"{path.name}.partial")
                make(partial)
                partial.rename(path)
    return path
