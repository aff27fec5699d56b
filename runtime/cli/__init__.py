"""What all commands share: one line and exit status 2 for every error that a user can cause."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from skipdecode.errors import SkipDecodeError

BAD_INPUT = 2
INTERRUPTED = 130


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {' '.join(message.split())}; see {self.prog} --help", file=sys.stderr)
        raise SystemExit(BAD_INPUT)


def guarded(action: Callable[[], int], *, debug: bool) -> int:
    """Run a command; print a user's error as one line and return the exit status."""
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
    except BrokenPipeError:  # the reader went away; keep Python from complaining when it flushes
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
