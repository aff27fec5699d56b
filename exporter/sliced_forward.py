"""A layer's `forward` inside `skip_schedule`, and how it gets there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed

from skipdecode.errors import ScheduleError
from skipdecode.exporter.skip_block import SkipBlock

_CHOICE = "prev_topk_indices"  # [B,S,K] int32, the tokens that GLM-5's layer below has chosen to attend to; returned, too


class SlicedForward:
    """A layer's `forward` that computes each row's prompt and `cap` more positions, and passes the later ones through unchanged.

    An object and no closure, so that a deep copy of the model has its own.

    Args:
        in_tuple: the layer returns a tuple of that, and perhaps of the attention's weights, which nothing reads, or of its
            choice of tokens, which the one above may take over.
    """

    def __init__(self, layer: torch.nn.Module, block: SkipBlock, cap: int, in_tuple: bool) -> None:
        self.block, self.own = block, vars(layer).get("forward")
        self._layer, self._cap, self._in_tuple = layer, cap, in_tuple

    def __call__(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """`hidden` is [B,S,H], or Gemma 3n's streams [N,B,S,H]."""
        length, ends = hidden.shape[-2], self.block.ends
        if not self.block.skips or ends.shortest + self._cap >= length:
            return self._forward(hidden, *args, **kwargs)
        out = hidden
        if end := max(min(ends.longest + self._cap, length), _least()):
            args = tuple(_prefix(value, length, end) for value in args)
            kwargs = {name: (_PREFIXES.get(name) or _prefix)(value, length, end) for name, value in kwargs.items()}
            first = hidden[..., :end, :]
            head = self._forward(first, *args, **kwargs)
            after = ends.computed(head[0] if self._in_tuple else head, first, self._cap)
            out = torch.cat([after, hidden[..., end:, :]], dim=-2)
        return (out, self._choice(hidden) if _CHOICE in kwargs else None) if self._in_tuple else out

    def _choice(self, hidden: torch.Tensor) -> torch.Tensor:
        """All tokens: what a layer that skips some positions has chosen for the rest would be no choice of theirs."""
        config, length = self._layer.self_attn.config, hidden.shape[1]
        if "shared" in config.indexer_types and length > config.index_topk:
            raise ScheduleError(
                f"layers take over which {config.index_topk} tokens one below attends to, and a pass has {length}",
                f"cut rows to {config.index_topk} tokens, which are all", where="skip_schedule",
            )  # fmt: skip
        return _all_tokens(len(hidden), length, hidden.device)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.own is not None:
            return self.own(*args, **kwargs)
        # its class now: FSDP gives it another one inside the block
        return type(self._layer).forward(self._layer, *args, **kwargs)


def cover(layer: torch.nn.Module, block: SkipBlock, cap: int, in_tuple: bool) -> Callable[[], None]:
    """Let `layer` run as `SlicedForward` says; returns what gives its own `forward` back."""
    sliced = layer.forward = SlicedForward(layer, block, cap, in_tuple)

    def uncover() -> None:
        # another's over it goes on through this one, which does nothing more
        if vars(layer).get("forward") is not sliced:
            return
        own = sliced.own
        while isinstance(own, SlicedForward) and own.block.ended:  # of a block that this one outlasted
            own = own.own
        if own is None:
            del layer.forward
        else:
            layer.forward = own

    return uncover


def _least() -> int:
    """Positions that every process of a group computes, and drops where they are too many.

    Another process's rows may compute the layer: all have to gather its shards then, and give its weights gradients.
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


# keys and values [B,KVH,S,D] that the layer reads of others, which are computed at all positions, by their kind;
# ALiBi: BLOOM's biases [B*NH,1,S], Falcon's None; MPT's [NH,1,P] of P positions, the last of which its attention takes itself
_PREFIXES = {
    "shared_kv_states": lambda value, _, cap: {kind: tuple(part[:, :, :cap] for part in pair) for kind, pair in value.items()},
    "alibi": lambda value, _, cap: None if value is None else value[..., :cap],
    "position_bias": lambda value, *_: value,
    _CHOICE: lambda value, _, cap: None if value is None else _all_tokens(len(value), cap, value.device),
}
