"""What the kernel reports about other processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path


def children(process: int) -> list[int]:
    return [int(word) for word in proc_file(process, f"task/{process}/children").split()]


def proc_file(process: int, file: str) -> str:
    """The text of a file in the process's folder in /proc; empty if the process is gone."""
    try:
        return Path(f"/proc/{process}/{file}").read_text()
    except OSError:
        return ""


def within(seconds: float, holds: Callable[[], object]) -> bool:
    ends = time.monotonic() + seconds
    while not (found := holds()) and time.monotonic() < ends:
        time.sleep(0.05)
    return bool(found)


def ends(process: int) -> bool:
    """Whether the process ends by itself within a minute; if not, it is killed."""
    ended = within(60, lambda: "State:\tZ" in (status := proc_file(process, "status")) or not status)
    if not ended:
        os.kill(process, signal.SIGKILL)
    return ended
