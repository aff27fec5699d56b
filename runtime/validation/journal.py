"""What a validation has measured so far, from which a run that was killed resumes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from skipdecode.cache_folder import cache_folder
from skipdecode.errors import CapacityError


class Journal:
    """A JSONL file in the user's cache folder: one line per finished measurement, with its checksum. Removed when all is done.

    Args:
        identity: everything that the measurements depend on; each identity has its own file.

    Raises:
        CapacityError: the folder cannot be created or written.
    """

    def __init__(self, identity: dict[str, Any]) -> None:
        key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:24]
        self.path = cache_folder("validate") / f"{key}.jsonl"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch()
        except OSError as error:
            raise self._write_error(error) from error
        self._done: dict[str, Any] = dict(_read(self.path))
        self.resumed = len(self._done)

    def once(self, name: str, measure: Callable[[], Any]) -> Any:
        """The result of `measure`, as JSON stores it; read from the file if an earlier run got that far.

        Raises:
            CapacityError: the file cannot be written.
        """
        if name not in self._done:
            entry = json.loads(json.dumps([name, measure()]))
            line = json.dumps([*entry, _checksum(entry)])
            try:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(f"\n{line}\n")  # the first newline ends a line torn by an earlier kill
            except OSError as error:
                raise self._write_error(error) from error
            self._done[name] = entry[1]
        return self._done[name]

    def finish(self) -> None:
        """Delete the file: the next run measures everything again."""
        self.path.unlink(missing_ok=True)

    def _write_error(self, error: OSError) -> CapacityError:
        remedy = "free space there, or set XDG_CACHE_HOME to a writable folder"
        return CapacityError(f"cannot be written ({error.strerror})", remedy, where=str(self.path.parent))


def _read(path: Path) -> list[tuple[str, Any]]:
    entries = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            *entry, checksum = json.loads(line)
            name, value = entry
            if checksum == _checksum(entry):  # a damaged number can still be valid JSON
                entries.append((name, value))
        except (ValueError, TypeError, RecursionError):  # torn by a kill, or not written by this class
            continue
    return entries


def _checksum(entry: list[Any]) -> str:
    """The checksum of a name and its measurement, both as read back from JSON."""
    return hashlib.sha256(json.dumps(entry).encode()).hexdigest()[:8]
