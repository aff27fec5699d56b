"""Skipping in torch: each layer applied to `hidden[:, :cap(l)]`. The oracle of the parity tests, and what fine-tuning uses.

A schedule never rises, so the positions that compute a layer are a prefix and a whole pass is a slice: no mask, no gather
(SkipDecode, arXiv 2307.02628, section 3). Skipped positions cost nothing, forward or backward. Rows whose prompts are shorter are
computed as far as the longest, and what that is too much is left out: no earlier position reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from skipdecode.errors import CapacityError, ModelNotSupportedError, ScheduleError
from skipdecode.exporter.architectures import decoder_parts, key_sources, returns_tuple
from skipdecode.exporter.prompt_length import PromptEnds, PromptLength
from skipdecode.model import check_sources
from skipdecode.schedule import Anchor, Schedule


@contextmanager
def skip_schedule(model: torch.nn.Module, schedule: Schedule, *, prompt_length: PromptLength = 0) -> Iterator[torch.nn.Module]:
    """Inside, `model(input_ids, use_cache=False)` computes layer `l` at its first `cap(l)` positions only.

    Works in training and evaluation; gradients flow through the computed positions. `input_ids` is [B,S] int64, whole rows in one
    pass: positions are counted from its start, which a cache of earlier tokens would shift.

    Args:
        model: any decoder that the exporter takes, also inside peft's adapters, DistributedDataParallel, FSDP or torch.compile.
        schedule: its `num_layers` must be the model's.
        prompt_length: tokens `0 .. prompt_length - 1` of a row are its prompt (padding before it is counted), which a schedule
            anchored at the generated tokens runs at full depth. One number for every row of every pass, or one a row ([B] int),
            or `"labels"`: each pass's labels [B,S] say it, as trainers give them, in which the prompt's tokens are -100.
            Ignored by an absolute anchor.

    Raises:
        ModelNotSupportedError: there is no decoder of transformers in `model`, or one that the exporter does not take, or its
            attention is flex_attention.
        ScheduleError: the schedule was made for another depth, or skips a layer whose keys and values others read, or
            `prompt_length` is none of these. Raised by the model: a cache that holds tokens, several sequences in a row, counts
            of another number of rows, no labels, a mixture's loss that balances experts beside an attention mask.
    """
    decoder = _decoder(model)
    parts = decoder_parts(decoder)
    depth = len(parts.layers)
    if schedule.num_layers != depth:
        raise ScheduleError(f"the schedule is for {schedule.num_layers} layers, the model has {depth}", "build it anew")
    check_sources(key_sources(decoder.config), schedule)
    ends = PromptEnds(prompt_length if schedule.anchor is Anchor.GENERATED else 0)
    caps = {index: cap for index in range(depth) if (cap := schedule.cap(index)) is not None}
    with ExitStack() as undo:
        for index, cap in caps.items():
            layer = parts.layers[index]
            sliced = _sliced(layer.forward, ends, cap, returns_tuple(decoder, layer))
            undo.callback(_uncover, layer, vars(layer).get("forward"))
            layer.forward = sliced
        if caps:
            _check_masks(decoder)
            hooks: list[tuple[torch.nn.Module, Any]] = [(decoder, ends.read_labels), (decoder, _check_balance)]
            hooks += [(parts.owner, ends.check_read), (parts.owner, _check_whole)]
            for module, hook in hooks:
                undo.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield model


def _uncover(layer: torch.nn.Module, own: Any) -> None:
    """Give back the `forward` that the layer had beside its class's; None: it had none."""
    if own is None:
        del layer.forward
    else:
        layer.forward = own


def _decoder(model: torch.nn.Module) -> PreTrainedModel:
    """The model of transformers that others may have wrapped."""
    found = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if found is None:
        raise ModelNotSupportedError(f"{type(model).__name__} is no model of transformers", "give one, or what wraps one")
    return found


def _check_masks(decoder: PreTrainedModel) -> None:
    """Refuse attention whose masks have no positions to cut."""
    if decoder.config._attn_implementation == "flex_attention":
        raise ModelNotSupportedError(
            "flex_attention's masks are not cut to the positions that a layer computes",
            'load the model with attn_implementation="sdpa"', where="skip_schedule",
        )  # fmt: skip


def _check_balance(decoder: torch.nn.Module, _: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a mixture's auxiliary loss where it spreads one mask over all layers' positions, which are not the same."""
    asked = kwargs.get("output_router_logits")
    asked = getattr(decoder.config, "output_router_logits", False) if asked is None else asked
    if asked and kwargs.get("attention_mask") is not None:
        raise ScheduleError(
            "the loss that balances experts takes as many positions of every layer",
            "set output_router_logits=False, or leave the attention mask out", where="skip_schedule",
        )  # fmt: skip


def _check_whole(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse what would be computed by wrong positions without a word: after a cache, or packed rows."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Cache) and (past := int(value.get_seq_length())):
            raise ScheduleError(
                f"positions count from the start of a pass, and a cache holds {past} earlier tokens",
                "generate with use_cache=False, or export the model and run the bundle", where="skip_schedule",
            )  # fmt: skip
    positions = kwargs.get("position_ids")
    if positions is not None and (positions.diff(dim=-1) < 0).any():
        raise ScheduleError(
            "positions count from the start of a row, and position_ids begin anew within one",
            "train without packing: one sequence a row", where="skip_schedule",
        )  # fmt: skip


def _sliced(forward: Any, ends: PromptEnds, cap: int, in_tuple: bool) -> Any:
    """`forward`, computing each row's prompt and `cap` more positions, and passing the later ones through unchanged.

    `in_tuple`: it returns a tuple of that, and perhaps of the attention's weights, which nothing reads.
    """

    def sliced_forward(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        length = hidden.shape[1]
        if ends.shortest + cap >= length:
            return forward(hidden, *args, **kwargs)
        out = hidden
        if end := min(ends.longest + cap, length):
            args = tuple(_prefix(value, length, end) for value in args)
            kwargs = {name: (_PREFIXES.get(name) or _prefix)(value, length, end) for name, value in kwargs.items()}
            head = forward(hidden[:, :end], *args, **kwargs)
            after = ends.computed(head[0] if in_tuple else head, hidden[:, :end], cap)
            out = torch.cat([after, hidden[:, end:]], dim=1)
        return (out, None) if in_tuple else out

    return sliced_forward


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
}


@torch.no_grad()  # type: ignore[untyped-decorator]
def greedy_tokens(model: Any, schedule: Schedule, prompt: list[int], max_new_tokens: int) -> tuple[list[int], torch.Tensor]:
    """Greedy decoding of one prompt by whole passes, no KV buffer: slow, and obviously right.

    Returns:
        The new token ids, and their logits [max_new_tokens, V] in the model's dtype.

    Raises:
        CapacityError: the prompt is empty.
    """
    if not prompt:
        raise CapacityError("the prompt is empty", "give at least one token")
    ids, rows = list(prompt), []
    with skip_schedule(model, schedule, prompt_length=len(prompt)):
        for _ in range(max_new_tokens):
            rows.append(model(torch.tensor([ids]), use_cache=False).logits[0, -1])
            ids.append(int(rows[-1].argmax()))
    return ids[len(prompt) :], torch.stack(rows)
