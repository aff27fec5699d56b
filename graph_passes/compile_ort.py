"""Compile a lowered graph for ONNX Runtime's CPU provider: optimised once, weights prepacked, ready to be mapped."""

from __future__ import annotations

import errno
from pathlib import Path

import onnxruntime as ort

from skipdecode.engines.ort import use_threads
from skipdecode.errors import TargetError

# How ONNX Runtime says that it could not write weights, and the graph; its errors have no errno.
_NOT_WRITTEN = ("Failed to write", "Protobuf serialization failed")
_MIN_VERSION = (1, 32)  # older versions store no packed weights of `MatMulNBits`, and read them as NaN if told to store them


def check_packs_quantised() -> None:
    """Refuse an ONNX Runtime that cannot store packed quantised weights.

    Raises:
        TargetError: it names the version to install.
    """
    if tuple(map(int, ort.__version__.split(".")[:2])) < _MIN_VERSION:
        needed = ".".join(map(str, _MIN_VERSION))
        raise TargetError(
            f"onnxruntime {ort.__version__} cannot store packed quantised weights",
            f"install onnxruntime {needed} or newer to export for cpu",
            where="--quantize",
        )


def compile_ort(source: Path, engine: Path) -> None:
    """Write `engine` (an ORT graph) and next to it `<name>.bin` with its prepacked weights, including quantised ones.

    Args:
        source: the lowered graph, its weights by reference below its own folder.
        engine: `.onnx` path to write.

    The `.bin` holds each weight twice, plain and prepacked. ORT reads the plain copy at load (zeroing it changes the results) and
    keeps only the prepacked one mapped.

    Raises:
        OSError: the engine could not be written; mostly the disk is full.
    """
    weights = engine.with_suffix(".bin")
    use_threads(None)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.optimized_model_filepath = str(engine)
    options.use_per_session_threads = False
    options.add_session_config_entry("session.optimized_model_external_initializers_file_name", weights.name)
    options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
    options.add_session_config_entry("session.save_external_prepacked_constant_initializers", "1")
    try:
        ort.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ORT's exceptions have no common base but this
        if not any(text in str(error) for text in _NOT_WRITTEN):
            raise
        raise OSError(errno.EIO, "ONNX Runtime could not write an engine", str(engine)) from error
