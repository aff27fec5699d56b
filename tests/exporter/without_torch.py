"""skip-export for what it does without torch, transformers and onnx_ir: half a second, where importing them takes seconds."""

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
SKIP_EXPORT = [sys.executable, "-c", _PROGRAM]  # ends with a traceback if one of them was imported
