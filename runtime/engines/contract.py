"""Check that an engine's inputs and outputs are those that its manifest calls for (runtime/bindings.py).

Otherwise ONNX Runtime would report a mismatch only at the first run and in its own words, or write past the end of an array.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from skipdecode import bindings
from skipdecode.engines.ort import OrtEngine, Tensor
from skipdecode.errors import BundleError, shortened
from skipdecode.kv_buffer import key_shapes, keys_read, state_shapes
from skipdecode.model import Model

_ANY = None  # a size that differs from run to run: rows, tokens, slots
_IDS = ("int64", (_ANY, _ANY))

Tensors = Mapping[str, Tensor]  # by name


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """What an engine may read, and must write."""

    inputs: Tensors
    outputs: Tensors

    def check(self, engine: OrtEngine, path: Path) -> None:
        """Refuse an engine whose inputs or outputs differ, because its file was swapped or the manifest edited.

        Args:
            path: the engine's file.

        Raises:
            BundleError: an input or output is unknown or differs, or an output is missing.
        """
        for kind, tensors, wanted in (("input", engine.inputs, self.inputs), ("output", engine.outputs, self.outputs)):
            for name, tensor in tensors.items():
                if name not in wanted or not _matches(tensor, wanted[name]):
                    calls_for = f"calls for {_text(*wanted[name])}" if name in wanted else "calls for none of that name"
                    raise _contract_error(
                        f"its {kind} {shortened(name, 80)!r} is {_text(*tensor)}, bundle.json {calls_for}", path
                    )
        missing = [name for name in self.outputs if name not in engine.outputs]
        if missing:
            raise _contract_error(f"has no output {missing[0]!r}", path)


def embed_contract(model: Model, floats: str) -> Contract:
    """The contract of the embedding; `floats` is the dtype of hidden states, keys and values."""
    inputs = {bindings.INPUT_IDS: _IDS, bindings.POSITION_IDS: _IDS, bindings.TIED_WEIGHT: _tied(model, floats)}
    return Contract(inputs=inputs, outputs={bindings.HIDDEN: _hidden(model, floats)})


def segment_contract(model: Model, floats: str, layers: Sequence[int]) -> Contract:
    """The contract of the engine that computes `layers`."""
    past: dict[str, Tensor] = {}
    for layer in layers:
        past |= _keys(model, layer, floats)
        past |= {name: ("float32", (_ANY, *shape)) for name, shape in state_shapes(model, layer).items()}
    lengths = {name: ("int32", (_ANY,)) for name in (bindings.SEQLENS_K, bindings.TOTAL_SEQUENCE_LENGTH)}
    present = {bindings.present(name): tensor for name, tensor in past.items()}
    read = {bindings.present(name): _keys(model, source, floats)[name] for source, name in keys_read(model, layers)}
    hidden = _hidden(model, floats)
    return Contract(
        inputs={bindings.HIDDEN: hidden, bindings.POSITION_IDS: _IDS, **lengths, **past, **read},
        outputs={bindings.HIDDEN_OUT: hidden, **present},
    )


def _keys(model: Model, layer: int, floats: str) -> dict[str, Tensor]:
    """The inputs for the keys and values of `layer`, with any number of slots."""
    return {name: (floats, (_ANY, heads, _ANY, size)) for name, (heads, _, size) in key_shapes(model, layer, 0).items()}


def head_contract(model: Model, floats: str) -> Contract:
    """The contract of the head, which makes logits from the last hidden states."""
    hidden, last = _hidden(model, floats), ("int64", (_ANY,))
    inputs = {bindings.HIDDEN: hidden, bindings.LAST: last, bindings.TIED_WEIGHT: _tied(model, floats)}
    return Contract(inputs=inputs, outputs={bindings.LOGITS: ("float32", (_ANY, model.vocab_size))})


def _hidden(model: Model, floats: str) -> Tensor:
    return floats, (_ANY, _ANY, model.hidden_size)


def _tied(model: Model, floats: str) -> Tensor:
    return floats, (bindings.tied_rows(model.vocab_size), _ANY)


def _matches(tensor: Tensor, wanted: Tensor) -> bool:
    (dtype, shape), (wanted_dtype, wanted_shape) = tensor, wanted
    if (dtype, len(shape)) != (wanted_dtype, len(wanted_shape)):
        return False
    return all(_ANY in (size, other) or size == other for size, other in zip(shape, wanted_shape, strict=True))


def _text(dtype: str, shape: tuple[int | None, ...]) -> str:
    """The tensor as messages show it: float32 [?,?,64]."""
    return f"{dtype} [{','.join('?' if size is _ANY else str(size) for size in shape)}]"


def _contract_error(what: str, path: Path) -> BundleError:
    return BundleError(what, "export the model again", where=str(path))
