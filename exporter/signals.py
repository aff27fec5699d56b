"""Ctrl-C, SIGTERM and SIGHUP end an export as errors do: else they would leave tens of GB of a half-written bundle."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_clearing_up: list[bool] = []  # one for each `uninterrupted` that the main thread is in


@contextmanager
def ending_on_signals() -> Iterator[Callable[[], None]]:
    """Inside, these signals unwind the stack by SystemExit; where torch is at work, at the next check; never what clears up.

    Torch calls Python from C++, which makes another error of an exception or ends the process by it, and from finalizers, in
    which Python drops it.

    Yields:
        A check, that raises where a signal has come: to be called now and then.
    """
    received: list[int] = []

    def check() -> None:
        if received:
            raise SystemExit(128 + received[0])  # what a shell says of a process that a signal ended

    def stop(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if not _clearing_up and not _in_torch(frame):
            check()

    wanted = [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]  # nohup
    before = {number: signal.signal(number, stop) for number in wanted}
    tell = sys.unraisablehook
    # what a finalizer drops `check` raises again, so nothing is told of it
    sys.unraisablehook = lambda dropped: None if received and dropped.exc_type is SystemExit else tell(dropped)
    try:
        yield check
    finally:
        sys.unraisablehook = tell
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if received else handler)  # the process ends, which torch takes a second for
        check()  # also where a library, whose call it interrupted, made another error of it


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Inside, these signals wait for the next check: somebody who presses Ctrl-C again must not leave tens of GB behind.

    Masked they would be taken by another thread of the process, and Python would run their handler all the same.
    """
    _clearing_up.append(True)
    try:
        yield
    finally:
        _clearing_up.pop()


def _in_torch(frame: FrameType | None) -> bool:
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] == "torch":
            return True
        frame = frame.f_back
    return False
