"""`python -m tests.standin.run BUNDLE [plain] [full]`, with the stand-in for the driver on LD_LIBRARY_PATH: plans at work.

On standard input a JSON list of `generate`'s arguments; on standard output their rows' tokens and layers, and how many steps
were launched as a graph, how many events were made. `plain`: without graphs; `full`: on a GPU whose memory is taken.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import skipdecode
from skipdecode.engines import tensorrt
from skipdecode.errors import SkipDecodeError
from tests.standin.tensorrt import library

_CALL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_driver = ctypes.CDLL("libcuda.so.1")
_kept: list[Any] = []  # what a stream or a graph may call


def _enqueue(stream: int, work: Callable[[], None]) -> None:
    call = _CALL(lambda _: work())
    _kept.append(call)
    assert _driver.cuLaunchHostFunc(ctypes.c_void_p(stream), call, None) == 0


def main() -> None:
    bundle = Path(sys.argv[1])
    stands_in = library(bundle, _enqueue)
    tensorrt.library = lambda target: stands_in
    generator = skipdecode.load(bundle, target="tensorrt-rtx", cuda_graphs="plain" not in sys.argv)
    if "full" in sys.argv:
        _driver.standin_fill()
    answers = []
    for request in json.load(sys.stdin):
        made = generator.generate(request.pop("prompts"), **request)
        answers.append({"tokens": [row.token_ids for row in made.sequences], "layers": made.layers})
    json.dump({"generations": answers, "replayed": _driver.standin_replayed(), "events": _driver.standin_events()}, sys.stdout)


if __name__ == "__main__":
    try:
        main()
    except SkipDecodeError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
