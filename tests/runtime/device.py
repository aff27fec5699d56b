"""GPU targets on the CPU: the runtime's own code, with `HostDevice` in place of the GPU."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

import skipdecode
from skipdecode import generate
from skipdecode import manifest as manifests
from skipdecode.device import HostDevice
from skipdecode.engines import tensorrt, tensorrt_library
from skipdecode.engines.ort import use_threads
from skipdecode.targets import load_device_engines, plan_engines
from skipdecode.turn_around import TurnAround
from tests.standin.tensorrt import library


def turn_around(host: ctypes.CDLL) -> TurnAround:
    """The turn-around's host version."""
    return lambda state: host.skd_turnaround_host(ctypes.byref(state))


def stand_in(bundle: Path, patch: pytest.MonkeyPatch, target: str = "tensorrt-rtx") -> Any:
    """Replace a TensorRT target's library by its stand-in, for the plans of one bundle, and return the stand-in."""
    stands_in = library(bundle, lambda stream, work: work(), target)
    patch.setattr(tensorrt_library, "library", lambda target: stands_in)
    return stands_in


def load(bundle: Path, target: str, run: TurnAround | None, patch: pytest.MonkeyPatch) -> generate.Generator:
    """Load a bundle as `skipdecode.load` does on a machine with a GPU. Without `run`, tokens are chosen on the host."""
    made = manifests.read(bundle)
    wanted = next(each for each in made.targets if each.name == target)
    use_threads(None)
    device = HostDevice()
    if target == "cuda":
        engines = load_device_engines(made, bundle, wanted, device, run)
    else:
        stand_in(bundle, patch, target)
        shared = tensorrt.PlanRuntime(target, device)
        engines = plan_engines(made, bundle, wanted, device, run, lambda path: tensorrt.TensorRTEngine(path, shared))
    patch.setattr(generate, "load_engines", lambda *_: engines)
    return skipdecode.load(bundle, target=target)
