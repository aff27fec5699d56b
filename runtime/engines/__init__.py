"""Engines: compiled segments, embeddings and heads. One module per library; here, what the runtime asks of all of them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from skipdecode import bindings
from skipdecode.device import Call
from skipdecode.memory import Array, Memory
from skipdecode.turn_around import TurnAround

# From 1.29 on ONNX Runtime's packages report process, machine and model to their vendor, and leave a database in the user's cache
# folder, unless this is set before they are imported.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


class Engine(Protocol):
    """A compiled segment, embedding or head."""

    def bind(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> Call:
        """Bind contiguous arrays by name and return what runs the engine on them; the caller keeps the arrays alive.

        Inputs that this engine does not read are ignored. An output may be the same memory as an input.

        Args:
            inputs, outputs: shapes and dtypes as in `bindings`, floats in the engine's float type.

        Raises:
            CapacityError, TargetError: raised by the returned call, if memory runs out, or if the device or its library fails.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingEngine:
    """An engine that takes some of its weights as inputs, because it shares them with another engine."""

    engine: Engine
    weights: Mapping[str, Array]

    def bind(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> Call:
        """As `Engine.bind`, for all other inputs."""
        return self.engine.bind({**inputs, **self.weights}, outputs)


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive layers that every step computes together or not at all, compiled as one engine."""

    layers: tuple[int, ...]  # lowest first
    engine: Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """The loaded engines of one target."""

    embed: Engine
    segments: tuple[Segment, ...]  # lowest first
    head: Engine
    memory: Memory  # what they read and write
    slots: tuple[int, ...] | None = None  # of each layer's KV buffer, if engines are built for one number; None: any
    max_prompt_tokens: int | None = None  # per pass over a prompt, then of one row; None: any number of tokens and rows
    turn_around: TurnAround | None = None  # between two steps on the device; None: tokens are chosen on the host
    after_run: Call = lambda: None  # saves what the engines have compiled, for the next start


def bind_segment(engine: Engine, inputs: Mapping[str, Array], hidden: Array, states: Iterable[Mapping[str, Array]]) -> Call:
    """Bind a segment's engine so that hidden state and each layer's arrays, named as its inputs, are updated in place."""
    arrays = {name: array for state in states for name, array in state.items()}
    written = {bindings.present(name): array for name, array in arrays.items()}
    return engine.bind({**inputs, **arrays}, {bindings.HIDDEN_OUT: hidden, **written})
