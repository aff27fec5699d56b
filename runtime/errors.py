"""The errors a user can cause. Each prints as one line: what is wrong, where, and what to do about it."""

from __future__ import annotations


def shortened(text: str, most: int) -> str:
    """A text from outside this project, for a line; where it has more than `most` characters, it is cut and ends in "..."."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


class SkipDecodeError(Exception):
    """Base of every error a user can cause; the command line prints it and exits 2.

    Args:
        what: what is wrong, with the value that was given.
        remedy: what to do about it; printed last.
        where: the file, field or option concerned; printed first. Empty if `what` names it.
    """

    def __init__(self, what: str, remedy: str = "", *, where: str = "") -> None:
        self.what, self.where, self.remedy = what, where, remedy
        super().__init__(what, remedy, where)

    def __str__(self) -> str:
        line = f"{self.where}: {self.what}" if self.where else self.what
        line = f"{line}; {self.remedy}" if self.remedy else line
        return " ".join(line.split())


class ScheduleError(SkipDecodeError):
    """A schedule that cannot be constructed: it rises, leaves its range, or cannot reach the requested speedup."""


class ModelNotSupportedError(SkipDecodeError):
    """A checkpoint that cannot be exported faithfully, or cannot be read."""


class BundleError(SkipDecodeError):
    """A bundle that is missing, damaged or of another format version, or an output folder that cannot be written."""


class TargetError(SkipDecodeError):
    """A target, library or compute capability that is missing or does not fit."""


class CapacityError(SkipDecodeError):
    """A request that cannot be met.

    It exceeds what the bundle was exported for (rows, length, vocabulary) or the available memory, has an option or value that
    is malformed or out of range, or names a file that cannot be read or written.
    """
