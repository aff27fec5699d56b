"""skip-export where it has no need of torch and transformers, which take seconds to import, nor of onnx_ir: half a second."""

from __future__ import annotations

import sys

_PROGRAM = """
import sys
from skipdecode.exporter import command
try:
    raise SystemExit(command.main())
finally:
    assert not {"torch", "transformers", "onnx_ir"} & {*sys.modules}
"""
SKIP_EXPORT = [sys.executable, "-c", _PROGRAM]  # a traceback where one of them was imported
