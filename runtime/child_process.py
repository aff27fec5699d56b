"""Work in a child process: its memory is released with it, it can be killed at any moment, and it ends with its parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def command_of(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of this package; -P keeps files in the working folder from being taken for modules."""
    return [sys.executable, "-P", "-m", module, *arguments]


def end_with(parent: int) -> None:
    """Have this process killed when `parent` ends (on Linux), rather than work for minutes with nobody waiting.

    Called by the child.

    Args:
        parent: its process id.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # tied to the parent's thread, which waits for this process
    if os.getppid() != parent:
        sys.exit(f"process {parent}, which started this one, has ended")
