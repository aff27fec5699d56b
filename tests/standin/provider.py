"""`python -m tests.standin.provider BUNDLE ..`: the real onnxruntime-gpu runs cuda bundles on stand-ins for CUDA and its driver.

Needs onnxruntime-gpu's folder first on PYTHONPATH, and the libraries of `driver.build_runtime` on LD_LIBRARY_PATH. Prints a line
of JSON for each bundle: `error`, or `graphs`, how many routes became graphs; `kernels`, those of a step at full depth as a GPU
would run them, in their order; and `warnings`.
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
    warnings = _Warnings()
    logging.getLogger("skipdecode").addHandler(warnings)
    for bundle in sys.argv[1:]:
        warnings.lines.clear()
        try:
            answer = {**_run(Path(bundle)), "warnings": warnings.lines}
        except SkipDecodeError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _run(bundle: Path) -> dict[str, Any]:
    generator = skipdecode.load(bundle, target="cuda")

    def twice(**given: Any) -> int:
        for _ in range(2):  # the second time, steps run as graphs
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
