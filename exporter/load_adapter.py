"""Reads a peft adapter: its configuration and its weights."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from skipdecode.errors import ModelNotSupportedError
from skipdecode.exporter.adapter_config import MERGE
from skipdecode.exporter.checkpoint import TEXT_PART_NAMES
from skipdecode.exporter.config_json import check_permitted, first_line

_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_PREFIX = "base_model.model."  # of names in these files
# an embedding or a head that peft saved as a whole, for it was trained, or is of another size than the base model's
_WHOLE = re.compile(r"(embed_tokens|wte|embed_in|word_embeddings|lm_head|embed_out)(\.token_adapter)?(\.base_layer)?\.weight$")
# names under which peft writes these again if they are of another size
_TWICE = (".modules_to_save.weight", ".original_module.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """An adapter in memory; it is small."""

    folder: Path
    config: Any  # peft's
    weights: dict[str, torch.Tensor]  # by the names of the model that was trained

    def vocabulary(self, size: int) -> int:
        """The rows of embedding and head, which are not the base model's `size` if tokens were added.

        Raises:
            ModelNotSupportedError: only one of them has other rows.
        """
        sizes = {match[1]: len(value) for name, value in self.weights.items() if (match := _WHOLE.search(name))}
        rows = {*sizes.values()}
        if rows - {size} and (len(sizes), len(rows)) != (2, 1):
            found = " and ".join(f"{name} for {count} tokens" for name, count in sizes.items())
            remedy = "save it with embedding and head (peft's modules_to_save)"
            raise self.error(f"holds {found}, its base model {size}", remedy)
        return rows.pop() if rows else size

    def of_text_part(self, model: torch.nn.Module) -> tuple[dict[str, torch.Tensor], Any]:
        """The weights for the text part of a model that also sees or hears, by its own names, and a configuration to match.

        Which modules to wrap is taken from the weights: patterns of names were written for the whole model.

        Args:
            model: the text part.
        """
        from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING

        config = copy.copy(self.config)
        patterns = [*(getattr(config, "rank_pattern", None) or ()), *(getattr(config, "alpha_pattern", None) or ())]
        if getattr(config, "target_parameters", None) or any("." in pattern for pattern in patterns):
            raise self.error("names parameters of a model that also sees or hears", MERGE)
        infix = f".{PEFT_TYPE_TO_PREFIX_MAPPING[config.peft_type]}"
        known = {path for path, _ in model.named_modules()}
        weights, config.target_modules = {}, set()
        for whole, value in self.weights.items():
            name = _in_text_part(whole.removeprefix(_PREFIX))
            module = name.rpartition(".")[0].split(infix)[0]
            if module in known:
                weights[_PREFIX + name] = value
                config.target_modules |= {module} if infix in name else set()
        config.exclude_modules = config.layers_to_transform = config.layers_pattern = None
        return weights, config

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Inside, only peft runs, so any error is blamed on the adapter; what is raised depends on what is wrong with it."""
        try:
            yield
        except Exception as error:
            lines = str(error).splitlines()  # a model's load_state_dict begins with "Error(s) in loading"
            telling = next((line.strip() for line in lines if "size mismatch" in line), first_line(error))
            remedy = "check its settings and base_model_name_or_path, or save it again"
            raise self.error(f"peft rejects it ({telling})", remedy) from error

    def error(self, what: str, remedy: str) -> ModelNotSupportedError:
        """An error that names the adapter's folder."""
        return ModelNotSupportedError(what, remedy, where=str(self.folder))


def load_adapter(folder: Path) -> Adapter:
    """Read the adapter in a folder.

    Raises:
        ModelNotSupportedError: it has no weights, cannot be read, or trains a prompt instead of weights.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # which peft imports, and which warns of kernels unused here
    from peft import PeftConfig, load_peft_weights

    empty = Adapter(folder=folder, config=None, weights={})
    file = next((folder / name for name in _WEIGHTS if (folder / name).is_file()), None)
    if file is None:  # peft would look for it on the hub
        raise empty.error(f"holds no {' or '.join(_WEIGHTS)}", "save the adapter again")
    check_permitted(file)
    with empty.blamed():
        config = PeftConfig.from_pretrained(str(folder))
        weights = load_peft_weights(str(folder), device="cpu")
    if config.is_prompt_learning:
        raise empty.error(f"trains a prompt ({config.peft_type.value}), not weights", "give one that peft can merge")
    return Adapter(folder=folder, config=config, weights={n: v for n, v in weights.items() if not n.endswith(_TWICE)})


def _in_text_part(name: str) -> str:
    """The name in the text part of a tensor of the whole model."""
    for pattern, replacement in TEXT_PART_NAMES.items():
        changed = re.sub(pattern, replacement, name)
        if changed != name:
            return changed
    return name
