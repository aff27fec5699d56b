"""What all commands share: one line and exit status 2 for every error that a user can cause."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from skipdecode.errors import SkipDecodeError

BAD_INPUT = 2
INTERRUPTED = 130
_REMEDY = "free space, check permissions, or see with --debug where it was"


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {' '.join(message.split())}; see {self.prog} --help", file=sys.stderr)
        raise SystemExit(BAD_INPUT)


def guarded(action: Callable[[], int], *, debug: bool) -> int:
    """Run a command; print a user's error as one line and return the exit status."""
    _make_streams_print_anything()
    try:
        status = action()
        sys.stdout.flush()  # a reader that went away must show here, not when Python shuts down
        return status
    except SkipDecodeError as error:
        if debug:
            raise
        print(error, file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader went away
        _drop_unwritable()
        return 0
    except OSError as error:
        if debug:
            raise
        _drop_unwritable()
        where = os.fsdecode(error.filename) if error.filename else ""
        print(SkipDecodeError(f"cannot go on ({error.strerror or error})", _REMEDY, where=where), file=sys.stderr)
        return BAD_INPUT


def _make_streams_print_anything() -> None:
    """A text's letters that the terminal has not are escaped; what was closed takes everything and keeps nothing."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _drop_unwritable() -> None:
    """Keep Python from complaining when it flushes at its end what cannot be written."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
