"""A `skip_schedule` block: whether it skips, where the prompts of a pass end, and which passes it refuses."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import Cache, StaticCache
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from skipdecode.errors import ScheduleError
from skipdecode.exporter.prompt_length import PromptEnds


class SkipBlock:
    """One `skip_schedule` block. It skips until it ends, except while a block nested in it is open.

    A deep copy of a model has its own block, which ends together with the block that it was copied from.
    """

    def __init__(self, ends: PromptEnds, copied_from: SkipBlock | None = None) -> None:
        self.ends = ends
        self._copied_from, self._ended = copied_from, False
        self._nested: list[SkipBlock] = []

    @property
    def ended(self) -> bool:
        """Whether it has ended: its layers run unchanged, and its checks do nothing."""
        return self._ended or (self._copied_from is not None and self._copied_from.ended)

    @property
    def skips(self) -> bool:
        """Whether layers currently compute only the positions that the schedule gives them."""
        return not self.ended and all(inner.ended for inner in self._nested)

    def end(self) -> None:
        """End this block and its copies."""
        self._ended = True

    def enclose(self, inner: SkipBlock) -> None:
        """Pause until `inner` ends."""
        self._nested = [*(block for block in self._nested if not block.ended), inner]

    def before_model(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a pass: read its labels, and refuse what would silently be computed wrongly."""
        if self.skips:
            _check_process(model)
            _check_balance(model, kwargs)
            self.ends.read_labels(kwargs.get("labels"), _tokens_per_row(args, kwargs))

    def before_layers(self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a pass's layers: refuse likewise, by arguments that only the module that runs the layers is given."""
        if self.skips:
            self.ends.check_labels_read()
            _check_cache(args, kwargs)
            _check_positions(kwargs.get("position_ids"), kwargs.get("attention_mask"))

    def __deepcopy__(self, memo: dict[int, Any]) -> SkipBlock:
        block = memo[id(self)] = SkipBlock(copy.deepcopy(self.ends, memo), copied_from=self)
        for inner in self._nested:
            block.enclose(copy.deepcopy(inner, memo))
        return block

    def __getstate__(self) -> dict[str, Any]:
        if not self.ended:
            remedy = "use save_pretrained, or do it after the block"
            raise ScheduleError("a model cannot be pickled inside the block", remedy, where="skip_schedule")
        return vars(self)


def open_blocks(owner: torch.nn.Module) -> list[SkipBlock]:
    """The blocks around the layers of `owner`, found by their `before_layers` hooks: unlike `forward`, nobody replaces a hook."""
    owners = (getattr(hook, "__self__", None) for hook in owner._forward_pre_hooks.values())
    return [block for block in owners if isinstance(block, SkipBlock)]


def _tokens_per_row(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """S of the ids [B,S] or embeddings [B,S,H] that a model is called with; None: it is given neither."""
    given = (*args[:1], kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
    return next((each.shape[1] for each in given if each is not None), None)


def _check_process(model: torch.nn.Module) -> None:
    """Refuse a DataParallel replica: its layers' `forward` would run the layers on the first GPU."""
    if getattr(model, "_is_replica", False):
        raise ScheduleError(
            "DataParallel's copies of a model do not skip", "start one process per GPU with torchrun", where="skip_schedule"
        )


def _check_balance(model: torch.nn.Module, kwargs: dict[str, Any]) -> None:
    """Refuse the loss that balances a mixture's experts.

    It expects the same number of positions from every layer, and would count positions whose results a row discards.
    """
    balances = kwargs.get("output_router_logits")
    balances = getattr(model.config.get_text_config(), "output_router_logits", False) if balances is None else balances
    if balances:
        raise ScheduleError(
            "the loss that balances experts needs the same positions from every layer and row",
            "set output_router_logits=False, in TRL's settings router_aux_loss_coef=0.0", where="skip_schedule",
        )  # fmt: skip


def _check_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Cache) and (contents := _cache_contents(value)):
            raise ScheduleError(
                f"positions count from the start of a pass, but a cache holds {contents}",
                "generate with use_cache=False, or export the model and run the bundle", where="skip_schedule",
            )  # fmt: skip


def _cache_contents(cache: Cache) -> str:
    """What `cache` holds, in words; empty: nothing. Any layer tells: a schedule may skip the lower ones from a row's start."""
    if isinstance(cache, StaticCache):
        return "slots for later tokens"  # which masks cover as well
    layers = getattr(cache, "self_attention_cache", cache).layers  # a pair with one for cross-attention has none of its own
    past = max((int(layer.get_seq_length()) for layer in layers if isinstance(layer, CacheLayerMixin)), default=0)
    if past:
        return f"{past} earlier tokens"
    states = [layer for layer in layers if isinstance(layer, LinearAttentionCacheLayerMixin)]
    return "states of earlier tokens" if any(any(layer.has_previous_state.values()) for layer in states) else ""


def _check_positions(positions: torch.Tensor | None, mask: Any) -> None:
    """Refuse rows of several sequences; the `position_ids` of padding do not matter."""
    if positions is None:
        return
    if positions.ndim == 3:  # time, height and width, which images repeat; with a fourth, text positions, in front
        if len(positions) < 4:
            return
        positions = positions[0]
    if isinstance(mask, torch.Tensor) and mask.ndim == 2:
        seen = mask[:, -positions.shape[-1] :].bool()
        before = positions.masked_fill(~seen, -1).cummax(dim=-1).values[..., :-1]
        restarts = seen[:, 1:] & (positions[..., 1:] <= before)
    else:  # without a mask nothing is padding; one of another shape does not tell, so equal positions may be padding
        restarts = positions.diff(dim=-1) < (1 if mask is None else 0)
    if restarts.any():
        raise ScheduleError(
            "positions count from the start of a row, but position_ids restart within one",
            "train without packing: one sequence per row", where="skip_schedule",
        )  # fmt: skip
