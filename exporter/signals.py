"""Ctrl-C, SIGTERM and SIGHUP end an export the way errors do; otherwise they would leave tens of GB of a half-written bundle."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_clearing_up: list[bool] = []  # one entry per `uninterrupted` block that the main thread is in


@contextmanager
def ending_on_signals() -> Iterator[Callable[[], None]]:
    """Inside, these signals raise SystemExit: at once, or at the next check while torch or an `uninterrupted` block is at work.

    Torch calls Python from C++, which turns an exception into another error or ends the process, and from finalizers, where
    Python drops exceptions.

    Yields:
        The check, to be called now and then: it raises if a signal has arrived.
    """
    received: list[int] = []

    def check() -> None:
        if received:
            raise SystemExit(128 + received[0])  # as shells report a process that a signal ended

    def stop(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if not _clearing_up and not _is_in_torch(frame):
            check()

    handled = [number for number in _ENDING_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]  # nohup
    previous_handlers = {number: signal.signal(number, stop) for number in handled}
    previous_hook = sys.unraisablehook
    # a SystemExit dropped by a finalizer is not reported: `check` raises it again
    sys.unraisablehook = lambda dropped: None if received and dropped.exc_type is SystemExit else previous_hook(dropped)
    try:
        yield check
    finally:
        sys.unraisablehook = previous_hook
        for number, handler in previous_handlers.items():
            signal.signal(number, signal.SIG_IGN if received else handler)  # the process is ending, which takes torch a second
        check()  # also if an interrupted library turned the SystemExit into another error


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Inside, these signals wait for the next check: pressing Ctrl-C again during clean-up must not leave tens of GB behind.

    Masking them would not help: another thread of the process would receive them, and Python would run the handler all the same.
    """
    _clearing_up.append(True)
    try:
        yield
    finally:
        _clearing_up.pop()


def _is_in_torch(frame: FrameType | None) -> bool:
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] == "torch":
            return True
        frame = frame.f_back
    return False
