"""Runs a small graph, before and after a pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from skipdecode.engines.ort import use_threads

Array = np.ndarray[Any, np.dtype[Any]]


def run_model(model: ir.Model, feeds: dict[str, Array]) -> list[Array]:
    """All outputs, by ONNX Runtime; `feeds` may hold more than the graph takes."""
    use_threads(None)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.use_per_session_threads = False
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options)
    return session.run(None, {value.name: feeds[value.name] for value in session.get_inputs()})
