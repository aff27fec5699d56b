"""A hub of models over HTTP: folders ORG/NAME below one folder, as huggingface_hub asks for them (HF_ENDPOINT)."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

_COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hub:
    url: str
    sent: set[str] = field(default_factory=set)  # downloaded files: ORG/NAME/FILE
    held: threading.Event = field(default_factory=threading.Event)  # set once half of the held file is sent


@contextmanager
def serving(folder: Path, *, hold: str = "", gated: bool = False) -> Iterator[Hub]:
    """Serve the models in `folder` on loopback.

    Args:
        hold: of files with this name only the first half is sent, and nothing more until the context ends.
        gated: every request is refused as for a gated model.
    """
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(send=True)

        def do_HEAD(self) -> None:
            self._answer(send=False)

        def _answer(self, *, send: bool) -> None:
            parts = urlsplit(self.path).path.strip("/").split("/")
            asked = parts[:2] == ["api", "models"]  # else ORG/NAME/resolve/REVISION/FILE
            model = folder.joinpath(*(parts[2:4] if asked else parts[:2]))
            if gated:
                self._reply(403, b"", {"X-Error-Code": "GatedRepo"})
            elif not model.is_dir():
                self._reply(404, b"", {"X-Error-Code": "RepoNotFound"})
            elif asked:
                content = _tree(model) if "tree" in parts else _info(model)
                self._reply(200, json.dumps(content).encode(), {"Content-Type": "application/json"})
            else:
                self._file(model.joinpath(*parts[4:]), send)

        def _file(self, path: Path, send: bool) -> None:
            if not path.is_file():
                self._reply(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": _COMMIT})
                return
            content = path.read_bytes()
            held = send and path.name == hold
            if send:
                hub.sent.add(str(path.relative_to(folder)))
            headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": _COMMIT}
            self._reply(200, content, headers, send=send and not held)
            if held:
                self.wfile.write(content[: len(content) // 2])
                hub.held.set()
                over.wait()
                self.close_connection = True

        def _reply(self, status: int, content: bytes, headers: dict[str, str], *, send: bool = True) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if send:
                self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: pytest's output is not a server's log."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub = Hub(url=f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        over.set()
        server.shutdown()
        thread.join()
        server.server_close()


def _files(model: Path) -> list[Path]:
    return sorted(path for path in model.rglob("*") if path.is_file())


def _info(model: Path) -> dict[str, object]:
    names = [{"rfilename": str(path.relative_to(model))} for path in _files(model)]
    return {"id": "/".join(model.parts[-2:]), "sha": _COMMIT, "siblings": names}


def _tree(model: Path) -> list[dict[str, object]]:
    return [
        {"type": "file", "path": str(path.relative_to(model)), "size": path.stat().st_size, "oid": _COMMIT}
        for path in _files(model)
    ]
