"""What all commands share: every error that a user can cause is one line and exit status 2."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn, TextIO

from skipdecode.errors import CapacityError, SkipDecodeError

BAD_INPUT = 2
INTERRUPTED = 130
_NO_TMPDIR = "No usable temporary directory"  # Python's words, as in a container of which everything but volumes is read-only
_TMPDIR_REMEDY = "set TMPDIR to a writable folder"
_REMEDY = "free space, check permissions, or add --debug to see where it happened"


class Parser(argparse.ArgumentParser):
    """A command's argument parser: errors are one line, and the epilog is printed verbatim."""

    def __init__(self, *, prog: str, description: str, epilog: str | None) -> None:
        super().__init__(prog, description=description, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        complain(f"{self.prog}: {' '.join(message.split())}; see {self.prog} --help")
        raise SystemExit(BAD_INPUT)


def folder(name: str) -> Path:
    """The path that an argument names; argparse's `type` for folders."""
    if not name:  # Path("") is the current folder
        raise argparse.ArgumentTypeError("is empty; name a folder")
    return Path(name)


def guarded(action: Callable[[], int], *, debug: bool) -> int:
    """Run a command and return its exit status; an error that a user can cause is printed as one line."""
    _make_streams_print_anything()
    try:
        with _ending_when_terminated():
            status = action()
        sys.stdout.flush()  # a reader that has gone must show here, not when Python shuts down
        return status
    except SkipDecodeError as error:
        complain(traceback.format_exc().rstrip() if debug else error)
        return BAD_INPUT
    except MemoryError as error:
        line = CapacityError(f"no memory is left ({str(error) or 'no reason given'})", "free some, or ask for less")
        complain(traceback.format_exc().rstrip() if debug else line)
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _reader_left():
            _drop_unwritable(sys.stdout)
            return 0
        _drop_unwritable(sys.stdout)
        if debug:
            complain(traceback.format_exc().rstrip())
            return BAD_INPUT
        where = os.fsdecode(error.filename) if error.filename else ""
        remedy = _TMPDIR_REMEDY if _NO_TMPDIR in str(error) else _REMEDY
        complain(SkipDecodeError(f"cannot continue ({error.strerror or error})", remedy, where=where))
        return BAD_INPUT


@contextlib.contextmanager
def _ending_when_terminated() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP end the command as errors do, so that temporary files go, some of which take gigabytes.

    skip-export has handlers of its own, and keeps them.
    """

    def end(number: int, frame: FrameType | None) -> NoReturn:
        for each in handled:  # another one while files are removed would leave the rest of them
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)  # as shells report a process that a signal ended

    numbers = (signal.SIGTERM, signal.SIGHUP) if threading.current_thread() is threading.main_thread() else ()  # as Python asks
    handled = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    for number in handled:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def reader_may_leave() -> Iterator[None]:
    """Print inside this block. If nobody reads standard output any more, what is left is discarded and the command goes on."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        if not _reader_left():
            raise
        _drop_unwritable(sys.stdout)


def check_writable(path: Path, option: str) -> None:
    """Raise CapacityError if the file that `option` names could not be written once the work is done."""
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise CapacityError("cannot be written", "name a file in a writable folder", where=f"{option} {path}")


def complain(error: SkipDecodeError | str) -> None:
    """Print a line on standard error if that can be written; whether it can does not change the exit status."""
    if sys.stderr is None:  # closed, and arguments are parsed before `_make_streams_print_anything`
        return
    with contextlib.suppress(OSError):  # nowhere to report it but the exit status
        print(error, file=sys.stderr)
    _drop_unwritable(sys.stderr)


def _make_streams_print_anything() -> None:
    """Escape characters that a stream cannot encode; replace a closed stream with one that discards everything."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _reader_left() -> bool:
    """Whether nobody reads an output any more: a broken connection of the command's own raises the same error."""
    outputs = select.poll()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a stream without a file descriptor
            outputs.register(stream.fileno(), 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in outputs.poll(0))


def _drop_unwritable(stream: TextIO) -> None:
    """Discard what cannot be written, or Python complains when it flushes at exit."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
