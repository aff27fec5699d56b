"""Engines on ONNX Runtime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from skipdecode.engines.ort import OrtEngine, use_threads
from skipdecode.errors import TargetError

GRAPH = """
<ir_version: 10, opset_import: ["" : 24]>
main (float[M,K] x, float[L,N] w) => (float[M,N] y) {{
  [{name}] y = MatMul(x, w)
}}
"""


def test_an_error_from_a_node_with_a_long_name_still_says_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "segment_000.onnx"
    ir.save(ir.from_onnx_text(GRAPH.format(name="n" * 1000)), path)
    use_threads(None)
    run = OrtEngine(path).bind(
        {"x": np.zeros((1, 2), np.float32), "w": np.zeros((3, 4), np.float32)}, {"y": np.zeros((1, 4), np.float32)}
    )
    with pytest.raises(TargetError) as raised:
        run()
    assert raised.value.what.startswith("ONNX Runtime stopped (")
    assert "nn...nn" in raised.value.what
    assert raised.value.what.endswith("MatMul dimension mismatch)")
