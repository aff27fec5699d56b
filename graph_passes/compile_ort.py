"""Compile a lowered graph for ONNX Runtime's CPU provider: optimised once, weights prepacked, ready to be mapped."""

from __future__ import annotations

import os
from pathlib import Path

import onnx_ir as ir
import onnxruntime as ort

_COPY_BYTES = 16 << 20


def compile_ort(source: Path, engine: Path) -> list[Path]:
    """Write `engine` (an ORT graph) and beside it `<name>.bin` with its prepacked weights.

    Args:
        source: the lowered graph, its weights by reference below its own folder.
        engine: `.onnx` path to write.

    Returns:
        The files written. Where a weight was prepacked, its plain copy in the `.bin` is a hole in the file: ORT writes both and
        reads the prepacked one, so each weight takes disk once.
    """
    weights = engine.with_suffix(".bin")
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.optimized_model_filepath = str(engine)
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.optimized_model_external_initializers_file_name", weights.name)
    options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
    options.add_session_config_entry("session.save_external_prepacked_constant_initializers", "1")
    ort.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])
    if not weights.exists():
        return [engine]
    _punch(weights, _dead_ranges(engine))
    return [engine, weights]


def _dead_ranges(engine: Path) -> list[tuple[int, int]]:
    """(offset, end) of the weights whose prepacked form is stored too."""
    import onnx

    model = onnx.load(engine, load_external_data=False)
    ranges = []
    for tensor in model.graph.initializer:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        if any(key.startswith("prepacked") for key in entries):
            ranges.append((int(entries["offset"]), int(entries["offset"]) + int(entries["length"])))
    return sorted(ranges)


def _punch(path: Path, dead: list[tuple[int, int]]) -> None:
    """Rewrite `path` with holes for the `dead` byte ranges."""
    sparse = path.with_suffix(".sparse")
    size = path.stat().st_size
    with path.open("rb") as old, sparse.open("wb") as new:
        new.truncate(size)
        position = 0
        for start, end in [*dead, (size, size)]:
            old.seek(position)
            new.seek(position)
            while position < start:
                chunk = old.read(min(_COPY_BYTES, start - position))
                new.write(chunk)
                position += len(chunk)
            position = max(position, end)
    os.replace(sparse, path)


def save_graph(model: ir.Model, path: Path) -> None:
    """Save a graph; weights that lie in `weights.safetensors` stay there."""
    ir.save(model, path)
