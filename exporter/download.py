"""Downloads a model's files from the hub in a separate process, so that Ctrl-C ends the download at once.

    python -m skipdecode.exporter.download < request.json

In the exporter's own process, huggingface_hub's threads would go on until their files are there, which can take many minutes.

Request: `name`, and `parent`, the id of the waiting process. Standard output is one JSON object a line: as files arrive
`{"done": ..., "total": ...}` in bytes, then `{"folder": ...}`, or `{"what": ..., "remedy": ...}` for an error.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

from huggingface_hub import model_info, snapshot_download
from huggingface_hub.utils import logging
from tqdm import tqdm

from skipdecode.child_process import command_of, end_with
from skipdecode.errors import ModelNotSupportedError
from skipdecode.exporter.hub_errors import explain

_WANTED_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.safetensors"]
_OTHER_COPIES = ["*/*", "consolidated*"]  # other formats of the same weights in some repositories


def download(name: str, on_progress: Callable[[int, int], None]) -> Path:
    """Download a hub id's config, tokenizer and weights to huggingface_hub's cache: safetensors, or `.bin` if there are none.

    Args:
        on_progress: called with the bytes received and their total; an exception that it raises ends the download.

    Raises:
        ModelNotSupportedError: the hub cannot be reached or does not serve the model, or the disk has no room for it.
    """
    command = command_of("skipdecode.exporter.download")
    # in its own session, so that the terminal's Ctrl-C reaches only the exporter, which kills the download
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            with process.stdin as stdin:
                json.dump({"name": name, "parent": os.getpid()}, stdin)
            for message in map(json.loads, process.stdout):
                if "folder" in message:
                    return Path(message["folder"])
                if "what" in message:
                    raise ModelNotSupportedError(message["what"], message["remedy"], where=name)
                on_progress(message["done"], message["total"])
        except BaseException:
            process.kill()
            raise
    raise ModelNotSupportedError(f"the download ended with status {process.returncode}", "try again", where=name)


def _main() -> int:
    request = json.load(sys.stdin)
    end_with(request["parent"])
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")  # of too little disk space: the error follows soon enough
    try:
        folder = _fetch(request["name"])
    except (OSError, ValueError) as error:
        what, remedy = explain(error)
        _emit(what=what, remedy=remedy)
        return 1
    _emit(folder=str(folder))
    return 0


def _fetch(name: str) -> Path:
    folder = Path(snapshot_download(name, allow_patterns=_WANTED_FILES, ignore_patterns=_OTHER_COPIES, tqdm_class=_bar_class()))
    if not _holds_any(folder, "model*.safetensors", "adapter_model.safetensors"):
        other = ["pytorch_model*.bin", "adapter_model.bin"]
        snapshot_download(name, allow_patterns=other, ignore_patterns=_OTHER_COPIES, tqdm_class=_bar_class())
    if not _holds_any(folder, "*.safetensors", "*.bin"):
        _check_reachable(name)  # else this may be a snapshot of which only the settings were fetched
    return folder


def _check_reachable(name: str) -> None:
    try:
        model_info(name)
    except Exception as error:  # also of huggingface_hub's HTTP client, which snapshot_download would turn into its own
        raise OSError(str(error)) from error


def _holds_any(folder: Path, *patterns: str) -> bool:
    return any(any(folder.glob(pattern)) for pattern in patterns)


def _bar_class() -> Any:
    """A class for huggingface_hub's progress bars that draws nothing; bars that count bytes report their progress."""
    lock, bytes_done = Lock(), 0

    class ProgressBar(tqdm):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            for name in ("name", "disable"):  # arguments of huggingface_hub's own class
                options.pop(name, None)
            super().__init__(*arguments, **options, file=open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115

        def update(self, n: float | None = 1) -> bool | None:
            nonlocal bytes_done
            displayed: bool | None = super().update(n)
            if self.unit == "B" and self.total:
                with lock:  # there is a thread per file; one bar counts bytes received, another bytes written
                    bytes_done = max(bytes_done, int(self.n))
                    _emit(done=bytes_done, total=int(self.total))
            return displayed

    return ProgressBar


def _emit(**message: object) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    sys.exit(_main())
