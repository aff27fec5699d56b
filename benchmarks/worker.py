"""A process for each system, so that thread pools do not collide and memory can be told apart."""

from __future__ import annotations

import functools
import multiprocessing
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from multiprocessing.connection import Connection
from typing import Any

import psutil

_SPAWN = multiprocessing.get_context("spawn")


class Worker:
    """A long-lived process that holds one object and answers one method call at a time.

    Args:
        patience_s: how long creating the object, and each answer, may take; None: no limit.
    """

    def __init__(self, make: Callable[..., Any], *args: Any, patience_s: float | None = None) -> None:
        self._patience_s = patience_s
        self._pipe, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_serve, args=(theirs, make, args), daemon=True)
        self._process.start()
        theirs.close()
        self._answer()

    def call(self, method: str, *args: Any) -> Any:
        self._pipe.send((method, args))
        return self._answer()

    def memory_mib(self) -> dict[str, float]:
        """Resident memory: rss (all), pss (shared pages divided among processes), uss (this process only)."""
        info = psutil.Process(self._process.pid).memory_full_info()
        return {name: round(getattr(info, name) / 2**20, 1) for name in ("rss", "pss", "uss")}

    def close(self) -> None:
        self._pipe.close()
        self._process.join(timeout=10)
        if self._process.is_alive():
            self._process.kill()

    def _answer(self) -> Any:
        if not self._pipe.poll(self._patience_s):
            self._process.kill()
            raise TimeoutError(f"no answer in {self._patience_s:.0f} s")
        return _value(*self._pipe.recv())


def in_process(function: Callable[..., Any], *args: Any, shared: bool = False) -> Any:
    """Call `function` in a fresh process, so that nothing it loads stays; with `shared`, in one that all such calls share."""
    with nullcontext(_shared_pool()) if shared else _pool() as pool:
        return _value(*pool.submit(_try_call, function, args).result())


def _pool() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(max_workers=1, mp_context=_SPAWN)


_shared_pool = functools.cache(_pool)


def _try_call(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[bool, Any]:
    """Whether the call failed, and its value or traceback: not every exception can be sent to another process."""
    try:
        return False, function(*args)
    except Exception:
        return True, traceback.format_exc()


def _value(failed: bool, value: Any) -> Any:
    if failed:
        raise RuntimeError(f"a worker failed:\n{value}")
    return value


def _serve(pipe: Connection, make: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        instance = make(*args)
        pipe.send((False, None))
        while True:
            method, arguments = pipe.recv()
            pipe.send((False, getattr(instance, method)(*arguments)))
    except EOFError:
        return
    except Exception:
        pipe.send((True, traceback.format_exc()))
