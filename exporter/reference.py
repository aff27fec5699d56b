"""Skipping in torch: each layer applied to `hidden[:, :cap(l)]`. The oracle of the parity tests, and what fine-tuning uses.

A schedule never rises, so the positions that compute a layer are a prefix and a whole pass is a slice: no mask, no gather
(SkipDecode, arXiv 2307.02628, section 3). Skipped positions cost nothing, forward or backward. Rows with shorter prompts are
computed as far as the row with the longest one, and the surplus is discarded: no earlier position reads it.
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
from skipdecode.exporter.sliced_forward import install_sliced_forward
from skipdecode.exporter.supported import check_causal
from skipdecode.model import check_sources
from skipdecode.schedule import Anchor, Schedule


@contextmanager
def skip_schedule(model: torch.nn.Module, schedule: Schedule, *, prompt_length: PromptLength = 0) -> Iterator[torch.nn.Module]:
    """Inside, `model(input_ids, use_cache=False)` computes layer `l` at its first `cap(l)` positions only.

    Works in training and evaluation; gradients flow through the computed positions. `input_ids` is [B,S] int64, whole rows in one
    pass: positions are counted from the start of the pass, so a cache of earlier tokens would shift them. A nested block takes
    the outer one's place until it ends. In a group of several processes each layer computes at least one position, even if no
    row needs it.

    Args:
        model: any decoder that the exporter takes, also inside peft's adapters, DistributedDataParallel, FSDP or torch.compile.
            If it also sees or hears, its text part skips.
        schedule: its `num_layers` must be the model's.
        prompt_length: tokens `0 .. prompt_length - 1` of a row are its prompt, padding in front included; a schedule anchored at
            the generated tokens runs them at full depth. One number for every row of every pass, or one per row ([B] int), or
            `"labels"`: read it from each pass's labels [B,S], in which trainers set the prompt's tokens to -100. Ignored with
            an absolute anchor.

    Raises:
        ModelNotSupportedError: `model` contains no decoder of transformers, or one that the exporter does not take, or its
            attention is flex_attention or sees later tokens.
        ScheduleError: `schedule` is not a Schedule, is for another depth, or skips a layer whose keys and values others read, or
            `prompt_length` is none of the above. Raised by the model's call: the cache holds tokens, a row holds several
            sequences, the counts are for another number of rows, labels are missing, a mixture is asked for the loss that
            balances its experts, or the model is a DataParallel replica.
    """
    if not isinstance(schedule, Schedule):
        raise ScheduleError(f"{schedule!r} is not a Schedule", "make one with build_schedule", where="skip_schedule")
    whole_model, decoder = _find_decoder(model)
    kind, _ = DECODERS.get(type(decoder.config).model_type, (None, {}))
    parts = decoder_parts(decoder, kind)
    depth = len(parts.layers)
    if schedule.num_layers != depth:
        raise ScheduleError(
            f"the schedule is for {schedule.num_layers} layers, but the model has {depth}", "rebuild it for this model"
        )
    check_sources(key_sources(decoder.config), schedule)
    block = SkipBlock(PromptEnds(prompt_length if schedule.anchor is Anchor.GENERATED else 0))
    caps = {index: cap for index in range(depth) if (cap := schedule.cap(index)) is not None}
    if caps:
        check_causal(decoder.config)
        _check_masks(decoder)
    with ExitStack() as cleanup:
        cleanup.callback(block.end)
        for outer in open_blocks(parts.owner):
            outer.enclose(block)
        for index, cap in caps.items():
            cleanup.callback(install_sliced_forward(parts.layers[index], block, cap, returns_tuple(decoder.config)))
        hooks = ((whole_model, block.before_model), (parts.owner, block.before_layers)) if caps else ()
        for module, hook in hooks:
            cleanup.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield model


def _find_decoder(model: torch.nn.Module) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The transformers model, which may be wrapped in other modules, and its text part: itself unless it also sees or hears."""
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    if not models:
        raise ModelNotSupportedError(
            f"{type(model).__name__} is not a transformers model", "give one, or a module that wraps one"
        )
    text_type = type(models[0].config.get_text_config()).model_type
    return models[0], next((module for module in models if type(module.config).model_type == text_type), models[0])


def _check_masks(decoder: PreTrainedModel) -> None:
    """Refuse flex_attention, whose masks are not tensors that could be cut to a prefix of positions."""
    if decoder.config._attn_implementation == "flex_attention":
        raise ModelNotSupportedError(
            "flex_attention's masks cannot be cut to the positions that a layer computes",
            'load the model with attn_implementation="sdpa"', where="skip_schedule",
        )  # fmt: skip


@torch.no_grad()  # type: ignore[untyped-decorator]
def greedy_tokens(model: Any, schedule: Schedule, prompt: list[int], max_new_tokens: int) -> tuple[list[int], torch.Tensor]:
    """Greedy decoding of one prompt by whole passes, without a KV buffer: slow, and obviously right.

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
