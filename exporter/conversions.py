"""What transformers makes of a checkpoint's tensors while it loads them: new names, and all experts' matrices in one tensor.

A file has `experts.3.up_proj.weight`, the model `experts.gate_up_proj` [E,2I,H]; transformers itself says which becomes which.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from skipdecode.errors import ModelNotSupportedError
from skipdecode.exporter.dequantize import Read


def converted(stored: Mapping[str, Read], config: Any) -> dict[str, Read]:
    """Tensors that a file holds under other names or in pieces, by the model's parameter names; read when asked for.

    Raises:
        ModelNotSupportedError: when read: pieces that do not fit together.
    """
    rules = get_checkpoint_conversion_mapping(config.model_type) or []
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    found: dict[str, Read] = {}
    pieces: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))  # parameter -> pattern -> names in order
    for name in sorted(stored, key=_by_numbers):
        parameter, pattern = rename_source_key(name, renamings, converters)
        if pattern is not None:
            pieces[parameter][pattern].append(name)
        elif parameter != name:
            found[parameter] = stored[name]
    for parameter, names in pieces.items():
        converter = next(rule for rule in converters if names.keys() <= {*rule.source_patterns})
        found[parameter] = partial(_convert, converter, parameter, names, stored, config)
    return found


def _convert(
    converter: WeightConverter, parameter: str, names: Mapping[str, list[str]], stored: Mapping[str, Read], config: Any
) -> torch.Tensor:
    for pattern, keys in names.items():
        for key in keys:
            converter.add_tensor(parameter, key, pattern, stored[key])
    try:
        tensors: dict[str, torch.Tensor] = converter.convert(parameter, config=config)
    except RuntimeError as error:  # of torch.stack and torch.cat
        raise ModelNotSupportedError(f"{parameter} cannot be put together ({error})", "download the checkpoint again") from error
    return tensors[parameter]


def _by_numbers(name: str) -> list[Any]:
    """Expert 10 after expert 9."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
