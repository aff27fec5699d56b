"""The errors a user can cause. Each prints as one line: what is wrong, where, and what to do about it."""

from __future__ import annotations


class SkipDecodeError(Exception):
    """Base of every error a user can cause; the command line prints it and exits 2.

    Args:
        what: the fact that is wrong, with the value that was given.
        remedy: what to do, ending the line.
        where: the file, field or option it concerns; empty where `what` says it.
    """

    def __init__(self, what: str, remedy: str = "", *, where: str = "") -> None:
        self.what, self.where, self.remedy = what, where, remedy
        super().__init__(what, remedy, where)

    def __str__(self) -> str:
        line = f"{self.where}: {self.what}" if self.where else self.what
        line = f"{line}; {self.remedy}" if self.remedy else line
        return " ".join(line.split())


class ScheduleError(SkipDecodeError):
    """A schedule that cannot be constructed: it rises, leaves its range, or asks for a speedup out of reach."""


class ModelNotSupportedError(SkipDecodeError):
    """A checkpoint that cannot be exported faithfully, or cannot be read."""


class BundleError(SkipDecodeError):
    """A bundle that is missing, damaged, of another format version, or an output folder that cannot be written."""


class TargetError(SkipDecodeError):
    """A target, library or compute capability that is missing or does not fit."""


class CapacityError(SkipDecodeError):
    """A request that cannot be met: beyond what the bundle was made for (batch, length, a token id) or what memory holds; an
    option or value that is malformed or out of range; a file of the request's that cannot be read or written."""
