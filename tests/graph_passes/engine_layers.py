"""The kernels of a plan, read from its builder's log because an inspector would need a GPU to load the plan."""

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

    name: str  # contains `[profile 1]` if the kernel belongs to the second profile
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def built_layers(request: PlanRequest) -> tuple[EngineLayer, ...]:
    """Build `request.plan` and return the kernels that the builder lists in its log."""
    messages: list[str] = []
    make_log = tensorrt.make_log

    def recording_log(trt: Any, **named: Any) -> Any:
        log = make_log(trt, **named)
        log_message = log.log
        log.log = lambda severity, message: (messages.append(message), log_message(severity, message))
        return log

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensorrt, "make_log", recording_log)
        build_plan(request)
    return tuple(layer for message in messages for line in message.splitlines() for layer in _listed(line))


def _listed(line: str) -> list[EngineLayer]:
    match = re.match(r"Name: (.*?), LayerType: .*?Inputs: (.*?)(?:, Constants: .*?)?, Outputs: (.*)", line)
    if not match:
        return []
    inputs, outputs = (tuple(re.findall(r"Name: ([^,]*),", part)) for part in match.groups()[1:])
    return [EngineLayer(name=match.group(1), inputs=inputs, outputs=outputs)]
