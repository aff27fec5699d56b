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
from transformers import PreTrainedModel

from skipdecode.errors import CapacityError, ModelNotSupportedError, ScheduleError
from skipdecode.exporter.architectures import decoder_parts, key_sources, returns_tuple
from skipdecode.exporter.model_names import DECODERS
from skipdecode.exporter.prompt_length import PromptEnds, PromptLength
from skipdecode.exporter.skip_block import SkipBlock, open_blocks
from skipdecode.exporter.sliced_forward import cover
from skipdecode.exporter.supported import check_causal
from skipdecode.model import check_sources
from skipdecode.schedule import Anchor, Schedule


@contextmanager
def skip_schedule(model: torch.nn.Module, schedule: Schedule, *, prompt_length: PromptLength = 0) -> Iterator[torch.nn.Module]:
    """Inside, `model(input_ids, use_cache=False)` computes layer `l` at its first `cap(l)` positions only.

    Works in training and evaluation; gradients flow through the computed positions. `input_ids` is [B,S] int64, whole rows in one
    pass: positions are counted from its start, which a cache of earlier tokens would shift. A block inside another takes its
    place until it ends. In a group of several processes each layer computes a position where no row has one for it.

    Args:
        model: any decoder that the exporter takes, also inside peft's adapters, DistributedDataParallel, FSDP or torch.compile;
            of one that also sees or hears the text part skips.
        schedule: its `num_layers` must be the model's.
        prompt_length: tokens `0 .. prompt_length - 1` of a row are its prompt (padding before it is counted), which a schedule
            anchored at the generated tokens runs at full depth. One number for every row of every pass, or one a row ([B] int),
            or `"labels"`: each pass's labels [B,S] say it, as trainers give them, in which the prompt's tokens are -100.
            Ignored by an absolute anchor.

    Raises:
        ModelNotSupportedError: there is no decoder of transformers in `model`, or one that the exporter does not take, or its
            attention is flex_attention or sees later tokens.
        ScheduleError: no Schedule, one for another depth, or one that skips a layer whose keys and values others read, or
            `prompt_length` is none of these. Raised by the model: a cache that holds tokens, several sequences in a row, counts
            of another number of rows, no labels, a mixture's loss that balances experts beside an attention mask, a replica of
            DataParallel's.
    """
    if not isinstance(schedule, Schedule):
        raise ScheduleError(f"{schedule!r} is no Schedule", "make one with build_schedule", where="skip_schedule")
    whole, decoder = _decoder(model)
    kind, _ = DECODERS.get(decoder.config.model_type, (None, {}))
    parts = decoder_parts(decoder, kind)
    depth = len(parts.layers)
    if schedule.num_layers != depth:
        raise ScheduleError(f"the schedule is for {schedule.num_layers} layers, the model has {depth}", "build it anew")
    check_sources(key_sources(decoder.config), schedule)
    block = SkipBlock(PromptEnds(prompt_length if schedule.anchor is Anchor.GENERATED else 0))
    caps = {index: cap for index in range(depth) if (cap := schedule.cap(index)) is not None}
    if caps:
        check_causal(decoder.config)
        _check_masks(decoder)
    with ExitStack() as undo:
        undo.callback(block.end)
        for outer in open_blocks(parts.owner):
            outer.enclose(block)
        for index, cap in caps.items():
            undo.callback(cover(parts.layers[index], block, cap, returns_tuple(decoder.config)))
        hooks = ((whole, block.before_model), (parts.owner, block.before_layers)) if caps else ()
        for module, hook in hooks:
            undo.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield model


def _decoder(model: torch.nn.Module) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The model of transformers that others may have wrapped, and of one that also sees or hears its text part."""
    found = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    if not found:
        raise ModelNotSupportedError(f"{type(model).__name__} is no model of transformers", "give one, or what wraps one")
    text = found[0].config.get_text_config().model_type
    return found[0], next((module for module in found if module.config.model_type == text), found[0])


def _check_masks(decoder: PreTrainedModel) -> None:
    """Refuse attention whose masks have no positions to cut."""
    if decoder.config._attn_implementation == "flex_attention":
        raise ModelNotSupportedError(
            "flex_attention's masks are not cut to the positions that a layer computes",
            'load the model with attn_implementation="sdpa"', where="skip_schedule",
        )  # fmt: skip


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
