"""A layer's `forward` inside `skip_schedule`, and how it is put there and taken away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed

from skipdecode.errors import ScheduleError
from skipdecode.exporter.skip_block import SkipBlock

_TOPK_INDICES = "prev_topk_indices"  # [B,S,K] int32: tokens that the layer below attends to (GLM-5); a layer returns its own


class SlicedForward:
    """A layer's `forward` that computes each row's prompt and `cap` more positions, and passes the later ones through unchanged.

    An object rather than a closure, so that a deep copy of the model has its own.

    Args:
        returns_tuple: the layer returns a tuple: its hidden states and perhaps attention weights, which nothing reads, or its
            choice of tokens to attend to, which the layer above may take over.
    """

    def __init__(self, layer: torch.nn.Module, block: SkipBlock, cap: int, returns_tuple: bool) -> None:
        self.block, self.replaced = block, vars(layer).get("forward")
        self._layer, self._cap, self._returns_tuple = layer, cap, returns_tuple

    def __call__(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """`hidden` is [B,S,H], or Gemma 3n's streams [N,B,S,H]."""
        length, ends = hidden.shape[-2], self.block.ends
        if not self.block.skips or ends.shortest + self._cap >= length:
            return self._forward(hidden, *args, **kwargs)
        out = hidden
        if end := max(min(ends.longest + self._cap, length), _min_positions()):
            args = tuple(_prefix(value, length, end) for value in args)
            kwargs = {name: (_PREFIX_FUNCTIONS.get(name) or _prefix)(value, length, end) for name, value in kwargs.items()}
            hidden_prefix = hidden[..., :end, :]
            computed = self._forward(hidden_prefix, *args, **kwargs)
            out_prefix = ends.keep_computed(computed[0] if self._returns_tuple else computed, hidden_prefix, self._cap)
            out = torch.cat([out_prefix, hidden[..., end:, :]], dim=-2)
        return (out, self._all_indices(hidden) if _TOPK_INDICES in kwargs else None) if self._returns_tuple else out

    def _all_indices(self, hidden: torch.Tensor) -> torch.Tensor:
        """The choice of tokens that the layer hands on: all tokens, since it has chosen none for the positions that it skips.

        Raises:
            ScheduleError: layers take over choices, and there are more tokens than one chooses.
        """
        config, length = self._layer.self_attn.config, hidden.shape[1]
        if "shared" in config.indexer_types and length > config.index_topk:
            raise ScheduleError(
                f"layers attend to the {config.index_topk} tokens that a layer below chose, but a pass has {length}",
                f"cut rows to {config.index_topk} tokens, so that all are chosen", where="skip_schedule",
            )  # fmt: skip
        return _all_tokens(len(hidden), length, hidden.device)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.replaced is not None:
            return self.replaced(*args, **kwargs)
        # looked up at each call: FSDP changes the layer's class inside the block
        return type(self._layer).forward(self._layer, *args, **kwargs)


def install_sliced_forward(layer: torch.nn.Module, block: SkipBlock, cap: int, returns_tuple: bool) -> Callable[[], None]:
    """Replace the layer's `forward` with a `SlicedForward`; returns a function that restores its own."""
    sliced = layer.forward = SlicedForward(layer, block, cap, returns_tuple)

    def restore() -> None:
        # stays below a `forward` that was put over it, and from now on only passes calls on
        if vars(layer).get("forward") is not sliced:
            return
        replaced = sliced.replaced
        while isinstance(replaced, SlicedForward) and replaced.block.ended:  # of a block that ended before this one
            replaced = replaced.replaced
        if replaced is None:
            del layer.forward
        else:
            layer.forward = replaced

    return restore


def _min_positions() -> int:
    """Positions that a layer computes even if no row needs them, and then discards: 1 in a group of processes, else 0.

    Another process's rows may need the layer, and then all processes have to gather its shards and give its weights gradients.
    """
    return 1 if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1 else 0


def _all_tokens(rows: int, length: int, device: torch.device) -> torch.Tensor:
    return torch.arange(length, dtype=torch.int32, device=device).expand(rows, length, -1)


def _prefix(value: Any, length: int, cap: int) -> Any:
    """The first `cap` of `length` positions of a layer's argument: mask [B,1,S,S], (cos, sin) [B,S,D], positions [B,S]."""
    if isinstance(value, tuple):
        return tuple(_prefix(item, length, cap) for item in value)
    if not isinstance(value, torch.Tensor):
        return value
    if value.ndim == 4:
        return value[..., :cap, :cap]
    for axis in (1, 0):
        if value.ndim > axis and value.shape[axis] == length:
            return value.narrow(axis, 0, cap)
    return value


# arguments that `_prefix` would not cut, or not rightly. `shared_kv_states`: other layers' keys and values [B,KVH,S,D], computed
# at all positions, by kind of layer. ALiBi: BLOOM's [B*NH,1,S], None for Falcon, and MPT's [NH,1,P] for P positions, of which
# its attention takes the last ones itself
_PREFIX_FUNCTIONS = {
    "shared_kv_states": lambda value, _, cap: {kind: tuple(part[:, :, :cap] for part in pair) for kind, pair in value.items()},
    "alibi": lambda value, _, cap: None if value is None else value[..., :cap],
    "position_bias": lambda value, *_: value,
    _TOPK_INDICES: lambda value, _, cap: None if value is None else _all_tokens(len(value), cap, value.device),
}
