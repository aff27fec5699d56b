"""Converts a checkpoint's tensors as transformers does on loading: new names, and the matrices of all experts in one tensor.

A file's `experts.3.up_proj.weight`, for example, becomes part of the model's `experts.gate_up_proj` [E,2I,H]. The rules are
transformers' own, with a few more for Llama 4.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from skipdecode.errors import ModelNotSupportedError
from skipdecode.exporter.dequantize import Read

_OF_TEXT = ".text_moe."  # in the names of ERNIE 4.5 VL's experts for text, next to those for images


@dataclass(frozen=True, slots=True)
class _Shapes:
    """Stands in for the model, which transformers asks for the sizes of a tensor's parts."""

    shapes: Mapping[str, tuple[int, ...]]

    def get_parameter(self, name: str) -> torch.Tensor:
        """A meta tensor of the parameter's shape; `name` may lack its prefix, or have that of a multimodal model."""
        short_name = name.rpartition("language_model.")[2]
        return torch.empty(next(shape for known, shape in self.shapes.items() if known.endswith(short_name)), device="meta")


def convert_lazily(stored: Mapping[str, Read], config: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Read]:
    """The tensors, by the model's names, that a file holds under other names, split, merged or transposed; read on demand.

    Args:
        shapes: parameter -> shape, in the model.

    Raises:
        ModelNotSupportedError: on reading, where pieces do not fit together.
    """
    model_type = config.model_type
    whole_model = (getattr(config, "whole_type", model_type), getattr(config, "text_part_of", model_type))
    rules = [rule for kind in dict.fromkeys(whole_model) for rule in get_checkpoint_conversion_mapping(kind) or []]
    if model_type not in whole_model:
        # the decoder's own, too, but for what those above convert in another way (ERNIE 4.5 VL's experts)
        known = tuple(pattern for rule in rules for pattern in rule.source_patterns)
        own = get_checkpoint_conversion_mapping(model_type) or []
        rules += [rule for rule in own if not any(pattern.endswith(known) for pattern in rule.source_patterns)]
    if config.model_type == "llama4_text":
        rules += _llama_4_expert_rules()
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    readers: dict[str, Read] = {}
    pieces: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))  # parameter -> pattern -> names in order
    for name in sorted(stored, key=_natural_sort_key):
        parameter, pattern = rename_source_key(name, renamings, converters)
        if pattern is not None:
            pieces[parameter][pattern].append(name)
        elif parameter not in stored:
            readers[parameter] = stored[name]
    context = {"config": config, "model": _Shapes(shapes)}
    for parameter, names in pieces.items():
        converter = next(rule for rule in converters if names.keys() <= {*rule.source_patterns})
        first = converter.target_patterns[0]
        for target in converter.target_patterns:  # where one tensor is split, `parameter` is the first target
            name = parameter.replace(first, target)
            readers[name.replace(_OF_TEXT, ".")] = partial(_convert, converter, parameter, name, names, stored, context)
    return readers


def _llama_4_expert_rules() -> list[WeightConverter]:
    """Rules for one tensor per expert, as llm-compressor writes them; transformers' own rules expect all in one tensor."""
    stack, transpose = MergeModulelist(dim=0), Transpose(1, 2)
    return [
        WeightConverter(
            source_patterns=["experts.*.gate_proj.weight", "experts.*.up_proj.weight"],
            target_patterns="experts.gate_up_proj",
            operations=[stack, Concatenate(dim=1), transpose],
        ),
        WeightConverter(
            source_patterns="experts.*.down_proj.weight", target_patterns="experts.down_proj", operations=[stack, transpose]
        ),
    ]


def whole_model_has_conversion_rules(config: Any) -> bool:
    """Whether the multimodal model whose text part this is has conversion rules, which transformers would not apply here."""
    return bool(get_checkpoint_conversion_mapping(getattr(config, "text_part_of", "")))


def _convert(
    converter: WeightConverter, parameter: str, name: str, names: Mapping[str, list[str]], stored: Mapping[str, Read],
    context: Mapping[str, Any],
) -> torch.Tensor:  # fmt: skip
    """Have transformers convert the stored tensors `names` for `parameter`, and return the tensor `name` of the result."""
    for pattern, keys in names.items():
        for key in keys:
            converter.add_tensor(parameter, key, pattern, stored[key])
    try:
        tensors: dict[str, torch.Tensor] = converter.convert(parameter, **context)
    except RuntimeError as error:  # of torch.stack, torch.cat and torch.split
        raise ModelNotSupportedError(f"{parameter} cannot be put together ({error})", "download the checkpoint again") from error
    return tensors[name]


def _natural_sort_key(name: str) -> list[Any]:
    """A sort key that puts expert 10 after expert 9."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
