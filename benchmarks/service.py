"""Runs the C++ service."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAM = Path(__file__).parents[1] / "build" / "cpp" / "release" / "cpp_service" / "skd_service"


@contextmanager
def serving(bundle: Path, *options: str, program: Path = PROGRAM) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Serve a bundle on a free port of this machine, and end the service afterwards; gives its process and its address."""
    with subprocess.Popen([program, bundle, "--port", "0", *options], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server, server.stdout.readline().split()[-1]
        finally:
            server.terminate()
            server.wait(timeout=60)
