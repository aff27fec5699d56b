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
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")  # rows as they are, not in int8
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options)
    return session.run(None, {value.name: feeds[value.name] for value in session.get_inputs()})


def with_shapes(text: str) -> ir.Model:
    """The text's graph, whose values have the shapes that follow from its inputs'."""
    model = ir.from_onnx_text(text)
    ir.passes.common.ShapeInferencePass()(model)
    return model


def with_parameters(text: str, arrays: dict[str, Array]) -> ir.Model:
    """The text's inputs of these names become parameters `layer.NAME` (text cannot hold a dotted name)."""
    model = ir.from_onnx_text(text)
    for name, array in arrays.items():
        value = next(value for value in model.graph.inputs if value.name == name)
        model.graph.inputs.remove(value)
        value.name = f"layer.{name}"
        value.const_value = ir.tensor(array, name=value.name)
        model.graph.register_initializer(value)
    return model
