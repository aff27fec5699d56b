"""Reads a checkpoint's JSON settings, and reports in one line why transformers rejects a config.json."""

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

from skipdecode.errors import ModelNotSupportedError, shortened


@contextmanager
def blaming_config(where: str) -> Iterator[None]:
    """Inside, transformers reads a configuration or builds modules from it, so any error is blamed on config.json.

    Must not enclose code of this project, whose faults would be blamed on the checkpoint.

    Raises:
        ModelNotSupportedError: in place of whatever transformers raises, which depends on the wrong setting.
        OSError: unchanged, since it comes from a file or the network, not from a setting.
    """
    try:
        with allowing_empty_weights():
            warnings.simplefilter("ignore", FutureWarning)  # of renamed settings
            yield
    except OSError:
        raise
    except Exception as error:
        raise ModelNotSupportedError(
            f"transformers rejects its config.json ({reason(error)})",
            "correct that setting, or name a model that transformers supports without remote code",
            where=where,
        ) from error


@contextmanager
def allowing_empty_weights() -> Iterator[None]:
    """Inside, torch does not warn of empty weights: of 0 shared experts, or of per-layer inputs of 0 layers."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Initializing zero-element tensors")
        yield


def check_permitted(path: Path) -> None:
    """Raise ModelNotSupportedError if this user may not read the file, which libraries would report as damaged."""
    if not os.access(path, os.R_OK):
        raise ModelNotSupportedError(f"cannot be read ({os.strerror(errno.EACCES)})", "check its permissions", where=str(path))


def read_bytes(path: Path) -> bytes:
    """The content of a checkpoint's file.

    Raises:
        ModelNotSupportedError: the file cannot be read.
    """
    check_permitted(path)
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelNotSupportedError(f"cannot be read ({error.strerror})", "download it again", where=str(path)) from error


def read_settings(path: Path) -> dict[str, Any]:
    """The settings in a checkpoint's JSON file; {} if there is no such file.

    Raises:
        ModelNotSupportedError: the file cannot be read, or is not a JSON object.
    """
    try:
        settings = json.loads(read_bytes(path)) if path.exists() else {}
    except (ValueError, RecursionError) as error:
        raise ModelNotSupportedError(f"is not JSON ({error})", "repair the checkpoint's file", where=str(path)) from error
    if not isinstance(settings, dict):
        raise ModelNotSupportedError("is not a JSON object", "repair the checkpoint's file", where=str(path))
    return settings


def config_origin(config: Any) -> str:
    """Where a configuration comes from, as the user named it."""
    return getattr(config, "_name_or_path", "") or "model"


def first_line(error: Exception) -> str:
    """The first line of an error's message, shortened, or the error's type if the message is empty."""
    message = error.args[0] if isinstance(error, KeyError) and error.args else error  # str() of a KeyError quotes the message
    return shortened((str(message).strip() or type(error).__name__).splitlines()[0], 200)


def reason(error: Exception) -> str:
    """The most telling line of a library's error, and the line of the model's code that failed, which names the setting."""
    from huggingface_hub.errors import StrictDataclassError

    line = first_line(error)
    if isinstance(error, StrictDataclassError):  # which ends in "<exception>: <what is wrong>"
        line = shortened(str(error).rstrip().rpartition("\n")[2].partition(": ")[2], 200)
    elif isinstance(error, KeyError) and " " not in line:
        line = f"'{line}' is not found"
    return line + _failing_line(error)


def _failing_line(error: Exception) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).name.startswith("modeling_")]
    if not frames:
        return ""
    first, last = frames[-1].lineno or 0, frames[-1].end_lineno or 0  # a call may span several lines
    line = " ".join(linecache.getline(frames[-1].filename, number).strip() for number in range(first, last + 1))
    return "" if not line or line.startswith("raise ") else f", in `{shortened(line, 120)}`"
