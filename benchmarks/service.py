"""Starts the C++ service."""

from __future__ import annotations

import subprocess
from pathlib import Path

_SERVICE = Path(__file__).parents[1] / "build" / "cpp" / "release" / "cpp_service" / "skd_service"


def start(bundle: Path, *options: str) -> tuple[subprocess.Popen[str], str]:
    """Serve a bundle on a free port of this machine; returns the process and its address. It listens already."""
    server = subprocess.Popen([str(_SERVICE), str(bundle), "--port", "0", *options], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    return server, server.stdout.readline().split()[-1]
