"""Helpers that run small graphs, so that results before and after a pass can be compared."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from skipdecode.engines.ort import use_threads
from skipdecode.graph_passes.quantization import Quantization
from skipdecode.graph_passes.quantize_weights import QuantizeWeightsPass

Array = np.ndarray[Any, np.dtype[Any]]


def run_model(model: ir.Model, feeds: dict[str, Array]) -> list[Array]:
    """All outputs, computed by ONNX Runtime; `feeds` may hold more than the graph takes."""
    use_threads(None)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.use_per_session_threads = False
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")  # rows stay fp32, not int8
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options)
    return session.run(None, {value.name: feeds[value.name] for value in session.get_inputs()})


def with_shapes(text: str) -> ir.Model:
    """The graph of `text`, with the shape of every value inferred from its inputs."""
    model = ir.from_onnx_text(text)
    ir.passes.common.ShapeInferencePass()(model)
    return model


def replaced(text: str, *changes: tuple[str, str]) -> str:
    """`text` with each `(old, new)` applied in order; each `old` must occur exactly once, lest another graph be tested."""
    for old, new in changes:
        assert text.count(old) == 1, f"{text.count(old)} times in the graph: {old!r}"
        text = text.replace(old, new)
    return text


def with_parameters(text: str, arrays: dict[str, Array]) -> ir.Model:
    """The graph of `text`, whose inputs named in `arrays` become parameters `layer.NAME` (text cannot hold a dotted name)."""
    model = ir.from_onnx_text(text)
    for name, array in arrays.items():
        value = next(value for value in model.graph.inputs if value.name == name)
        model.graph.inputs.remove(value)
        value.name = f"layer.{name}"
        value.const_value = ir.tensor(array, name=value.name)
        model.graph.register_initializer(value)
    return model


def attention_feeds(kv_heads: int) -> dict[str, Array]:
    """Inputs of GroupQueryAttention: two rows of one token and width 32, after 4 and 2 of 8 slots; heads of size 16."""
    rng = np.random.default_rng(1)
    past = {name: rng.standard_normal((2, kv_heads, 8, 16)).astype(np.float32) for name in ("past_key", "past_value")}
    x = rng.standard_normal((2, 1, 32)).astype(np.float32)
    return {"x": x, **past, "seqlens_k": np.array([4, 2], np.int32), "total": np.array([5], np.int32)}


def quantised(weight: Array, how: Quantization) -> Array:
    """The matrix [N,K] that the quantised operator multiplies by in place of `weight`."""
    outputs, inputs = weight.shape
    text = f"""<ir_version: 10, opset_import: ["" : 24]>
    g (float[B,{inputs}] x, float[{outputs},{inputs}] weight) => (float[B,{outputs}] y)
    {{ turned = Transpose <perm = [1, 0]> (weight)  y = MatMul (x, turned) }}"""
    model = with_parameters(text, {"weight": weight})
    QuantizeWeightsPass(how)(model)
    model.graph[0].attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", 0)  # exact activations
    (found,) = run_model(model, {"x": np.eye(inputs, dtype=np.float32)})
    return found.T


def relative_error(found: Array, expected: Array) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
