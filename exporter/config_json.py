"""A checkpoint's files of settings, and what transformers says of a config.json that it does not take, as one line."""

from __future__ import annotations

import errno
import json
import linecache
import os
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from skipdecode.errors import ModelNotSupportedError


@contextmanager
def taking_config(where: str) -> Iterator[None]:
    """Inside, transformers reads a configuration, or makes the modules that it tells of, and nothing of ours is called.

    Raises:
        ModelNotSupportedError: what transformers raises, which depends on the setting that is wrong.
        OSError: as it is: a file or the network, and no setting.
    """
    try:
        with allowing_empty_weights():
            warnings.simplefilter("ignore", FutureWarning)  # that settings have other names by now
            yield
    except OSError:
        raise
    except Exception as error:
        raise ModelNotSupportedError(
            f"transformers does not take its config.json ({reason(error)})",
            "correct that setting, or name a model that transformers knows by itself",
            where=where,
        ) from error


@contextmanager
def allowing_empty_weights() -> Iterator[None]:
    """Inside, torch does not warn of weights without numbers: of 0 shared experts, or inputs for each of 0 layers."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Initializing zero-element tensors")
        yield


def check_permitted(path: Path) -> None:
    """Raises ModelNotSupportedError where this user may not read a checkpoint's file, which libraries say as of a damaged one."""
    if not os.access(path, os.R_OK):
        raise ModelNotSupportedError(f"cannot be read ({os.strerror(errno.EACCES)})", "check its permissions", where=str(path))


def read_bytes(path: Path) -> bytes:
    """A checkpoint's file.

    Raises:
        ModelNotSupportedError: it cannot be read.
    """
    check_permitted(path)
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelNotSupportedError(f"cannot be read ({error.strerror})", "download it again", where=str(path)) from error


def read_settings(path: Path) -> dict[str, Any]:
    """A checkpoint's file of settings; {} where there is none.

    Raises:
        ModelNotSupportedError: it cannot be read, or is no JSON object.
    """
    try:
        settings = json.loads(read_bytes(path)) if path.exists() else {}
    except (ValueError, RecursionError) as error:
        raise ModelNotSupportedError(f"is not JSON ({error})", "repair the checkpoint's file", where=str(path)) from error
    if not isinstance(settings, dict):
        raise ModelNotSupportedError("is not a JSON object", "repair the checkpoint's file", where=str(path))
    return settings


def place(config: Any) -> str:
    """Where a configuration is from, as the user named it."""
    return getattr(config, "_name_or_path", "") or "model"


def first_line(error: Exception) -> str:
    """Of what an error says, or its kind where it says nothing."""
    said = error.args[0] if isinstance(error, KeyError) and error.args else error  # which quotes what it says
    return (str(said).strip() or type(error).__name__).splitlines()[0]


def reason(error: Exception) -> str:
    """Of a library's error the line that says most, and of the model's code the line that failed, which names the setting."""
    from huggingface_hub.errors import StrictDataclassError

    line = first_line(error)
    if isinstance(error, StrictDataclassError):  # which names its check, then the exception and what is wrong
        line = str(error).rstrip().rpartition("\n")[2].partition(": ")[2]
    elif isinstance(error, KeyError) and " " not in line:
        line = f"'{line}' is not found"
    return line[:160] + _failing_line(error)


def _failing_line(error: Exception) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).name.startswith("modeling_")]
    if not frames:
        return ""
    first, last = frames[-1].lineno or 0, frames[-1].end_lineno or 0  # a call's arguments may stand on lines of their own
    line = " ".join(linecache.getline(frames[-1].filename, number).strip() for number in range(first, last + 1))
    return "" if not line or line.startswith("raise ") else f", in `{line[:120]}`"
