"""TensorRT's library on a machine where it does not start."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import tensorrt_rtx

from skipdecode.device import HostDevice
from skipdecode.engines import tensorrt, tensorrt_library
from skipdecode.errors import TargetError


def test_a_driver_too_old_for_the_library_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def runtime(log: Any) -> None:
        log.log(tensorrt_rtx.ILogger.Severity.ERROR, "CUDA initialization failure with error: 35")
        raise TypeError("pybind11::init(): factory function returned nullptr")

    stands_in = SimpleNamespace(__name__="tensorrt_rtx", ILogger=tensorrt_rtx.ILogger, Runtime=runtime)
    monkeypatch.setattr(tensorrt_library, "library", lambda target: stands_in)
    says = r"^tensorrt_rtx cannot run a plan \(CUDA initialization failure with error: 35\); its version may need a newer driver"
    with pytest.raises(TargetError, match=says):
        tensorrt.PlanRuntime("tensorrt-rtx", HostDevice())
