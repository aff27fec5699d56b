"""Work in a process of its own: its memory goes with it, it can be ended at any moment, and it ends with whoever asked for it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def command_of(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of this package; a file of the user's folder is not taken for a module (-P)."""
    return [sys.executable, "-P", "-m", module, *arguments]


def end_with(parent: int) -> None:
    """Be killed when the process `parent` is (on Linux), rather than work for minutes on what nobody waits for.

    Called by the child.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # when the thread that made this process ends: it waits for it
    if os.getppid() != parent:
        sys.exit(f"process {parent}, which asked for this, is gone")
