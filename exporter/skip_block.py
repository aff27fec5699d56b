"""A `skip_schedule` block: whether it skips, where the prompts of a pass end, and which passes it refuses."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import Cache, StaticCache

from skipdecode.errors import ScheduleError
from skipdecode.exporter.prompt_length import PromptEnds


class SkipBlock:
    """One block. It skips until it ends, but while one inside it does.

    A deep copy of a model has a block of its own, which ends with the one that it was copied from.
    """

    def __init__(self, ends: PromptEnds, of: SkipBlock | None = None) -> None:
        self.ends = ends
        self._of, self._ended = of, False
        self._inside: list[SkipBlock] = []

    @property
    def ended(self) -> bool:
        """Whether neither layers nor checks do anything any more."""
        return self._ended or (self._of is not None and self._of.ended)

    @property
    def skips(self) -> bool:
        """Whether layers are cut to their positions now."""
        return not self.ended and all(inner.ended for inner in self._inside)

    def end(self) -> None:
        """Of copies too."""
        self._ended = True

    def enclose(self, inner: SkipBlock) -> None:
        """Pause until `inner` ends."""
        self._inside = [*(block for block in self._inside if not block.ended), inner]

    def before_model(self, model: torch.nn.Module, _: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a pass: take its labels, and refuse what would be computed wrongly without a word."""
        if self.skips:
            _check_process(model)
            _check_balance(model, kwargs)
            self.ends.read_labels(kwargs.get("labels"))

    def before_layers(self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a pass's layers: the same, of what only the module that runs them is given."""
        if self.skips:
            self.ends.check_read()
            _check_cache(args, kwargs)
            _check_positions(kwargs.get("position_ids"), kwargs.get("attention_mask"))

    def __deepcopy__(self, memo: dict[int, Any]) -> SkipBlock:
        block = memo[id(self)] = SkipBlock(copy.deepcopy(self.ends, memo), of=self)
        for inner in self._inside:
            block.enclose(copy.deepcopy(inner, memo))
        return block

    def __getstate__(self) -> dict[str, Any]:
        if not self.ended:
            remedy = "use save_pretrained, or do it after the block"
            raise ScheduleError("a model cannot be pickled inside the block", remedy, where="skip_schedule")
        return vars(self)


def open_blocks(owner: torch.nn.Module) -> list[SkipBlock]:
    """The blocks that the layers of `owner` are in, by their `before_layers` there, which nobody puts anything over."""
    found = (getattr(hook, "__self__", None) for hook in owner._forward_pre_hooks.values())
    return [block for block in found if isinstance(block, SkipBlock)]


def _check_process(model: torch.nn.Module) -> None:
    """Refuse a replica of DataParallel's, whose layers would be the first GPU's."""
    if getattr(model, "_is_replica", False):
        raise ScheduleError(
            "DataParallel's copies of a model do not skip", "start a process a GPU, with torchrun", where="skip_schedule"
        )


def _check_balance(model: torch.nn.Module, kwargs: dict[str, Any]) -> None:
    """Refuse a mixture's auxiliary loss: it takes as many positions of every layer, those too that a row does not keep."""
    asked = kwargs.get("output_router_logits")
    asked = getattr(model.config.get_text_config(), "output_router_logits", False) if asked is None else asked
    if asked:
        raise ScheduleError(
            "the loss that balances experts takes as many positions of every layer and row", "set output_router_logits=False",
            where="skip_schedule",
        )  # fmt: skip


def _check_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Cache) and (held := _held(value)):
            raise ScheduleError(
                f"positions count from the start of a pass, and a cache holds {held}",
                "generate with use_cache=False, or export the model and run the bundle", where="skip_schedule",
            )  # fmt: skip


def _held(cache: Cache) -> str:
    """What `cache` holds: without attention in any layer it does not know of how many tokens."""
    if isinstance(cache, StaticCache):
        return "slots for later tokens"  # which masks have, too
    try:
        past = int(cache.get_seq_length())
    except ValueError:
        return "states of earlier tokens" if cache.has_previous_state() else ""
    return f"{past} earlier tokens" if past else ""


def _check_positions(positions: torch.Tensor | None, mask: Any) -> None:
    """Refuse rows of several sequences; what `position_ids` say of padding does not matter."""
    if positions is None:
        return
    if positions.ndim == 3:  # in time and place, of which an image repeats some; behind those of text, where there are four
        if len(positions) < 4:
            return
        positions = positions[0]
    if isinstance(mask, torch.Tensor) and mask.ndim == 2:
        seen = mask[:, -positions.shape[-1] :].bool()
        before = positions.masked_fill(~seen, -1).cummax(dim=-1).values[..., :-1]
        restarts = seen[:, 1:] & (positions[..., 1:] <= before)
    else:  # without a mask nothing is padding; in one of attention's own shape padding is not told apart
        restarts = positions.diff(dim=-1) < (1 if mask is None else 0)
    if restarts.any():
        raise ScheduleError(
            "positions count from the start of a row, and position_ids begin anew within one",
            "train without packing: one sequence a row", where="skip_schedule",
        )  # fmt: skip
