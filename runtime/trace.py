"""Where a run spends its time, as a trace that Perfetto and chrome://tracing open.

It shows steps, the engines inside them, and inside those ONNX Runtime's own profile, operator by operator. Profiling costs a few
microseconds per operator; skip-validate measures without it.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from skipdecode.errors import CapacityError
from skipdecode.whole_file import write_whole

if TYPE_CHECKING:
    import onnxruntime as ort

P = ParamSpec("P")
T = TypeVar("T")


class Trace:
    """Collects where the runs of one thread spend their time.

    Pass it to `load`. `write` ends the engines' profiles and merges them.
    """

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": 1, "tid": 1, "args": {"name": "skipdecode"}},
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "loop, engines, operators"}},
        ]
        self._folder = tempfile.TemporaryDirectory(prefix="skipdecode-trace-")
        self._sessions: list[ort.InferenceSession] = []
        self._numbers = count()  # for the profiles' names, which ONNX Runtime tells apart only by the millisecond

    def profile(self, options: ort.SessionOptions) -> None:
        """Switch on the profile of a session that is about to be created with `options`."""
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(self._folder.name) / f"session{next(self._numbers)}")

    def follow(self, session: ort.InferenceSession) -> None:
        """Let `write` merge the profile of `session`."""
        self._sessions.append(session)

    @contextmanager
    def record(self, name: str, kind: str) -> Iterator[dict[str, Any]]:
        """Record the time spent inside this block; what is put into the dict that it yields is recorded with it."""
        facts: dict[str, Any] = {}
        began = time.time_ns()
        try:
            yield facts
        finally:
            self._add(name, kind, began / 1e3, (time.time_ns() - began) / 1e3, facts)

    def write(self, path: str | Path) -> None:
        """Write the trace (Trace Event Format, JSON; times in microseconds) and end the engines' profiles.

        Raises:
            CapacityError: `path` cannot be written, or the temporary folder had no room for the engines' profiles.
        """
        try:
            for session in self._sessions:
                self._add_operators(session)
        finally:
            self._sessions.clear()
            self._folder.cleanup()
        try:
            write_whole(Path(path), json.dumps({"traceEvents": self._events, "displayTimeUnit": "ns"}))
        except OSError as error:
            raise CapacityError(
                f"cannot be written ({error.strerror})", "name another file", where=f"--profile {path}"
            ) from error

    def _add_operators(self, session: ort.InferenceSession) -> None:
        # on the clock of time.time_ns (seen on Linux; the documentation names the monotonic one)
        start_us = session.get_profiling_start_time_ns() / 1e3
        for event in _read_profile(Path(session.end_profiling())):
            if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
                facts = {key: event["args"][key] for key in ("op_name", "input_type_shape", "output_type_shape")}
                name = event["name"].removesuffix("_kernel_time")
                self._add(name, "operator", start_us + event["ts"], event["dur"], facts)

    def _add(self, name: str, kind: str, start_us: float, duration_us: float, facts: dict[str, Any]) -> None:
        self._events.append(
            {"ph": "X", "name": name, "cat": kind, "pid": 1, "tid": 1, "ts": start_us, "dur": duration_us, "args": facts}
        )


def _read_profile(path: Path) -> list[dict[str, Any]]:
    """The events that ONNX Runtime wrote to `path`; where it cannot write them, it says nothing."""
    try:
        profile: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CapacityError(
            "a profile is not whole", "free space there, or set TMPDIR to a folder with more", where=str(path.parent)
        ) from error
    return profile


def traced(
    trace: Trace | None, name: str, call: Callable[P, T], *, kind: str = "loop", result: str | None = None
) -> Callable[P, T]:
    """`call`, recorded in `trace` each time it is made; without a trace `call` itself.

    Args:
        result: the name under which to record what `call` returns; None: it is not recorded.
    """
    if trace is None:
        return call

    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with trace.record(name, kind) as facts:
            returned = call(*args, **kwargs)
            if result is not None:
                facts[result] = returned
        return returned

    return run
