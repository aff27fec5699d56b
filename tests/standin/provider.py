"""`python -m tests.standin.provider BUNDLE ..`: the real onnxruntime-gpu runs cuda bundles on stand-ins for CUDA and its driver.

With onnxruntime-gpu's folder first on PYTHONPATH, the libraries of `driver.build_runtime` on LD_LIBRARY_PATH. On standard output
a line of JSON for each bundle: `error`, or how many routes became `graphs`, the `kernels` of a step at full depth as a GPU would
run them, in their order, and `said`, what was warned of.
"""

from __future__ import annotations

import ctypes
import json
import logging
import sys
from pathlib import Path
from typing import Any

import skipdecode
from skipdecode.errors import SkipDecodeError

_PROMPTS = [[9, 8, 7, 6, 5], [5, 6]]


def main() -> None:
    said = _Said()
    logging.getLogger("skipdecode").addHandler(said)
    for bundle in sys.argv[1:]:
        said.lines.clear()
        try:
            answer = {**_run(Path(bundle)), "said": said.lines}
        except SkipDecodeError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


class _Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _run(bundle: Path) -> dict[str, Any]:
    generator = skipdecode.load(bundle, target="cuda")

    def twice(**given: Any) -> int:
        for _ in range(2):  # the second time steps are graphs
            generator.generate(_PROMPTS, max_new_tokens=12, ignore_eos=True, **given)
        loop = generator._kept_loop
        assert loop is not None
        return loop.graphs

    graphs = twice()
    twice(schedule="full")
    driver = ctypes.CDLL("libcuda.so.1")
    driver.standin_captured.restype = ctypes.c_char_p
    return {"graphs": graphs, "kernels": driver.standin_captured().decode().splitlines()}


if __name__ == "__main__":
    main()
