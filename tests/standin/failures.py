"""`python -m tests.standin.failures BUNDLE`, with the stand-in for the driver on LD_LIBRARY_PATH: its calls fail in turn.

First a bundle is loaded by a process that has no stream and kernel yet. Then bundles are loaded and generate tokens; the driver's
first call fails, then its second, and so on. After a lack of memory the same is asked for again. Prints JSON:

    first_loads: what exists after each load that failed.
    before: what exists after a bundle without failures.
    lives: by how calls fail, for each call that is the first to do so (or each fifth): the errors, whether all tokens are right,
        and what exists after the bundle.
"""

from __future__ import annotations

import ctypes
import json
import logging
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import skipdecode
from skipdecode import manifest as manifests
from skipdecode.engines import tensorrt_library
from skipdecode.errors import CapacityError, SkipDecodeError
from tests.standin.run import enqueue
from tests.standin.tensorrt import library

OUT_OF_MEMORY, UNKNOWN = 2, 999  # CUresult
ALL = 2**31 - 1
WAYS = {"no memory, once": (1, OUT_OF_MEMORY, 1), "another reason, from then on": (ALL, UNKNOWN, 5)}
_driver = ctypes.CDLL("libcuda.so.1")
_driver.standin_alive.restype = ctypes.c_char_p


def _set(**values: int) -> None:
    for name, value in values.items():
        ctypes.c_int.in_dll(_driver, f"standin_{name}").value = value


def _repair() -> None:
    _set(calls_left=-1)


def _alive() -> str:
    alive: bytes = _driver.standin_alive()
    return alive.decode()


class _Life:
    """A bundle is loaded and generates tokens twice; the second time, steps are graphs."""

    def __init__(self, load: Callable[[], skipdecode.Generator]) -> None:
        self.tokens: list[Any] = []
        self.errors: list[str] = []
        generator = self._ask("load", load)
        for _ in range(0 if generator is None else 2):
            made = self._ask("generate", partial(generator.generate, [9, 8, 7], max_new_tokens=4, ignore_eos=True))
            self.tokens.append(made and made.sequences[0].token_ids)

    def _ask(self, name: str, call: Callable[[], Any]) -> Any:
        """What `call` returns, the second time if there was no memory for it the first time; None: it failed otherwise."""
        try:
            return call()
        except SkipDecodeError as error:
            self.errors.append(f"{name}: {type(error).__name__}")
            if not isinstance(error, CapacityError):
                return None
            _repair()
        return call()


def _failed_loads(load: Callable[[], skipdecode.Generator]) -> list[str]:
    left = []
    for works in (0, 1, 1, 0):  # no stream, no module, twice no kernel
        _set(calls_left=works, failures_left=1, failure=OUT_OF_MEMORY)
        try:
            load()
        except CapacityError:
            left.append(_alive())
        _repair()
    return left


def _lives(load: Callable[[], skipdecode.Generator], whole: _Life, count: int, result: int, stride: int) -> list[Any]:
    lives: list[Any] = []
    while True:
        _set(calls_left=stride * len(lives), failures_left=count, failure=result)
        life = _Life(load)
        _repair()
        if ctypes.c_int.in_dll(_driver, "standin_failures_left").value == count:
            return lives
        lives.append([life.errors, life.tokens == whole.tokens, _alive()])


def main() -> None:
    bundle = Path(sys.argv[1])
    logging.disable(logging.WARNING)  # that there are no graphs
    target = next(each.name for each in manifests.read(bundle).targets if each.name in tensorrt_library.LIBRARIES)
    stands_in = library(bundle, enqueue, target)
    tensorrt_library.library = lambda target: stands_in
    load = partial(skipdecode.load, bundle, target=target)
    first_loads = _failed_loads(load)
    whole = _Life(load)
    before = _alive()
    lives = {way: _lives(load, whole, *failing) for way, failing in WAYS.items()}
    json.dump({"first_loads": first_loads, "before": before, "lives": lives}, sys.stdout)


if __name__ == "__main__":
    main()
