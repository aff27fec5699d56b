"""The kernels of a plan, as its builder lists them while it builds (an inspector would need a GPU to load the plan)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest

from skipdecode.engines import tensorrt
from skipdecode.graph_passes.compile_tensorrt import PlanRequest, build_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLayer:
    """A kernel of a built engine."""

    name: str  # `[profile 1]` in it: of the second profile
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def built_layers(request: PlanRequest) -> tuple[EngineLayer, ...]:
    """Builds `request.plan`, listening to all that the builder says."""
    said: list[str] = []
    make_log = tensorrt.make_log

    def listening(trt: Any, **named: Any) -> Any:
        log = make_log(trt, **named)
        told = log.log
        log.log = lambda severity, message: (said.append(message), told(severity, message))
        return log

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensorrt, "make_log", listening)
        build_plan(request)
    return tuple(layer for message in said for line in message.splitlines() for layer in _listed(line))


def _listed(line: str) -> list[EngineLayer]:
    match = re.match(r"Name: (.*?), LayerType: .*?Inputs: (.*?)(?:, Constants: .*?)?, Outputs: (.*)", line)
    if not match:
        return []
    inputs, outputs = (tuple(re.findall(r"Name: ([^,]*),", part)) for part in match.groups()[1:])
    return [EngineLayer(name=match.group(1), inputs=inputs, outputs=outputs)]
