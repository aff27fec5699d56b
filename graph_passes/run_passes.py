"""Run passes in order. A graph that a pass does not understand becomes an error that names the graph and the pass."""

from __future__ import annotations

import traceback
from collections.abc import Iterable

import onnx_ir as ir

from skipdecode.errors import ModelNotSupportedError, SkipDecodeError


def run_passes(model: ir.Model, passes: Iterable[ir.passes.PassBase]) -> None:
    """Apply in-place passes to a graph.

    Raises:
        ModelNotSupportedError: a pass met a pattern that it does not know, or left something that it should have replaced.
        SkipDecodeError, OSError, MemoryError: as raised inside a pass.
    """
    for each in passes:
        try:
            ir.passes.Sequential(each)(model)
        except ir.passes.PassError as error:
            cause = _unwrapped(error)
            if isinstance(cause, (SkipDecodeError, OSError, MemoryError)):
                raise cause from error
            raise ModelNotSupportedError(
                f"{type(each).__name__} does not know this graph ({_reason(cause)})",
                "report the model's config.json, or choose another --target", where=str(model.graph.name),
            ) from error  # fmt: skip


def _unwrapped(error: BaseException) -> BaseException:
    """What was raised inside a pass, without onnx-ir's errors around it."""
    while isinstance(error, (ir.passes.PassError, ir.passes.InvariantError)) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _reason(error: BaseException) -> str:
    """What the error says; of a bare `assert` its source line."""
    frames = traceback.extract_tb(error.__traceback__)
    return str(error) or (frames[-1].line if frames else None) or type(error).__name__
