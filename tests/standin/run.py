"""`python -m tests.standin.run BUNDLE [WORD ..]`, with the stand-in for the driver on LD_LIBRARY_PATH: run a bundle's plans.

Reads a JSON list of `generate`'s arguments from standard input. Prints JSON: for each its rows' tokens and layers, the bytes
taken after it (on the GPU and pinned), and the streams, events and modules made by then; for all together how many steps
were launched as a graph, how many events were made, and how many kernels ran in another context.

Words:
    plain: without graphs.
    anew: the bundle is loaded again for each.
    full: the GPU's memory is taken.
    without_pinned, without_graphs, without_contexts: there is no memory for these.
    callback, upload: engines also call the host, or copy from its pinned memory, as CUDA's uneven Split does.
    allocating: plans are of a version that allocates while they run.
    old: the driver is of a CUDA before 13.
    host_pages: the GPU reads the host's memory when a copy's turn comes, as a GH200.
    killed: a signal ends the process.
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import skipdecode
from skipdecode import manifest as manifests
from skipdecode.engines import tensorrt_library
from skipdecode.errors import SkipDecodeError
from tests.standin.tensorrt import RtxContext, library

_CALL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_driver = ctypes.CDLL("libcuda.so.1")
_kept: list[Any] = []  # what a stream or a graph may still call


def enqueue(stream: int, work: Callable[[], None]) -> None:
    call, nothing, on = _CALL(lambda _: work()), _CALL(lambda _: None), ctypes.c_void_p(stream)
    _kept.extend((call, nothing))
    assert _driver.standin_launch(on, call, None) == 0
    if "callback" in sys.argv:
        assert _driver.cuLaunchHostFunc(on, nothing, None) == 0
    if "upload" in sys.argv:
        pinned = ctypes.c_void_p()
        assert _driver.cuMemAllocHost_v2(ctypes.byref(pinned), 16) == 0
        assert _driver.cuMemcpyHtoDAsync_v2(ctypes.c_void_p((pinned.value or 0) + 8), pinned, ctypes.c_size_t(8), on) == 0


def main() -> None:
    bundle = Path(sys.argv[1])
    RtxContext.allocates = "allocating" in sys.argv
    logging.basicConfig(format="%(message)s")
    ctypes.c_int.in_dll(_driver, "standin_old").value = "old" in sys.argv
    ctypes.c_int.in_dll(_driver, "standin_reads_host_pages").value = "host_pages" in sys.argv
    target = next(each.name for each in manifests.read(bundle).targets if each.name in tensorrt_library.LIBRARIES)
    stands_in = library(bundle, enqueue, target)
    tensorrt_library.library = lambda target: stands_in
    load = partial(skipdecode.load, bundle, target=target, cuda_graphs="plain" not in sys.argv)
    generator = load()
    if "full" in sys.argv:
        _driver.standin_fill()
    for what in {"without_pinned", "without_graphs", "without_contexts"}.intersection(sys.argv):
        ctypes.c_int.in_dll(_driver, f"standin_{what}").value = 1
    _driver.standin_taken.restype = ctypes.c_size_t
    answers, taken, objects = [], [], []
    for request in json.load(sys.stdin):
        if "anew" in sys.argv:
            del generator
            gc.collect()
            generator = load()
        made = generator.generate(request.pop("prompts"), **request)
        answers.append({"tokens": [row.token_ids for row in made.sequences], "layers": made.layers})
        taken.append(_driver.standin_taken())
        objects.append(_driver.standin_objects())
    counts = {"replayed": _driver.standin_replayed(), "events": _driver.standin_events()}
    counts["elsewhere"] = ctypes.c_int.in_dll(_driver, "standin_kernels_of_nothing").value
    json.dump({"generations": answers, "taken": taken, "objects": objects, **counts}, sys.stdout)
    if "killed" in sys.argv:
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    try:
        main()
    except SkipDecodeError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
