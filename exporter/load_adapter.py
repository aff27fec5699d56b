"""Reads a peft adapter: its configuration and its weights."""

from __future__ import annotations

import copy
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from skipdecode.errors import ModelNotSupportedError
from skipdecode.exporter.adapter_config import MERGE
from skipdecode.exporter.checkpoint import FORMATS, TEXT_PART_NAMES
from skipdecode.exporter.checkpoint_folder import ADAPTER_CONFIG
from skipdecode.exporter.config_json import check_permitted, reason

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
    warnings: tuple[str, ...] = ()  # what peft warns of in its settings

    def vocabulary(self, size: int) -> int:
        """The rows of embedding and head, which are not the base model's `size` if tokens were added.

        Raises:
            ModelNotSupportedError: only one of them has other rows.
        """
        whole = ((_WHOLE.search(name), value.shape) for name, value in self.weights.items())
        sizes = {match[1]: shape[0] for match, shape in whole if match and len(shape) == 2}
        rows = {*sizes.values()}
        if rows - {size} and (len(sizes), len(rows)) != (2, 1):
            found = " and ".join(f"{name} for {count} tokens" for name, count in sizes.items())
            remedy = "save it with embedding and head (peft's modules_to_save)"
            raise self.error(f"holds {found}, its base model {size}", remedy)
        return rows.pop() if rows else size

    def error(self, what: str, remedy: str) -> ModelNotSupportedError:
        """An error that names the adapter's folder."""
        return ModelNotSupportedError(what, remedy, where=str(self.folder))

    def of_text_part(self, model: torch.nn.Module) -> tuple[dict[str, torch.Tensor], Any]:
        """The weights for the text part of a model that also sees or hears, by its own names, and a configuration to match.

        Which modules to wrap is taken from the weights: patterns of names were written for the whole model.

        Args:
            model: the text part.
        """
        config = copy.copy(self.config)
        if config.peft_type != "LORA":
            raise self.error(f"is for a model that also sees or hears, but not LoRA ({config.peft_type.value})", MERGE)
        if config.target_parameters or any("." in pattern for pattern in (*config.rank_pattern, *config.alpha_pattern)):
            raise self.error("names parameters of a model that also sees or hears", MERGE)
        named = {_in_text_part(name.removeprefix(_PREFIX)): value for name, value in self.weights.items()}
        # also what belongs to modules that the text part lacks, which peft then reports
        weights = {name: value for name, value in named.items() if name.startswith(_beginnings(model))}
        config.target_modules = {path for path, _ in model.named_modules()} & {name.split(".lora_")[0] for name in weights}
        config.exclude_modules = config.layers_to_transform = config.layers_pattern = None
        if not config.target_modules:
            raise self.error("changes nothing in the part that reads text", "export its base model")
        return {_PREFIX + name: value for name, value in weights.items()}, config


@contextmanager
def blaming_adapter(folder: Path) -> Iterator[None]:
    """Inside, only peft runs, so any error is blamed on the adapter; what is raised depends on what is wrong with it."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of what training would need
            yield
    except Exception as error:
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            raise
        lines = str(error).splitlines()  # a model's load_state_dict begins with "Error(s) in loading"
        telling = next((line.strip() for line in lines if "size mismatch" in line), reason(error))
        remedy = "check its settings and base_model_name_or_path, or save it again"
        raise ModelNotSupportedError(f"peft rejects it ({telling})", remedy, where=str(folder)) from error


def load_adapter(folder: Path) -> Adapter:
    """Read the adapter in a folder; its weights become float32, in which they are merged.

    Raises:
        ModelNotSupportedError: it has no weights, or cannot be read.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # which peft imports, and which warns of kernels unused here
    from peft import PeftConfig

    with blaming_adapter(folder), warnings.catch_warnings(record=True, action="always") as warned:
        config = PeftConfig.from_pretrained(str(folder))
    files = ((file_format, folder / name) for file_format, name in zip(FORMATS, _WEIGHTS, strict=True))
    found = next((pair for pair in files if pair[1].is_file()), None)
    if found is None:
        remedy = f"save the adapter again; if the folder holds a whole model, remove {ADAPTER_CONFIG}"
        raise ModelNotSupportedError(f"holds no {' or '.join(_WEIGHTS)}", remedy, where=str(folder))
    file_format, file = found
    check_permitted(file)
    weights = {name: _widened(file_format.read(file, name)) for name in file_format.names(file) if not name.endswith(_TWICE)}
    broken = next((name for name, value in weights.items() if not value.isfinite().all()), None)
    if broken is not None:
        raise ModelNotSupportedError(f"{broken} holds nan or infinity", "save the adapter again", where=str(file))
    return Adapter(folder=folder, config=config, weights=weights, warnings=tuple(str(each.message) for each in warned))


def _widened(value: torch.Tensor) -> torch.Tensor:
    return value.float() if value.is_floating_point() else value


def _beginnings(model: torch.nn.Module) -> tuple[str, ...]:
    """How the names of a model's parameters begin: `model.layers.`, `model.embed_tokens.`, `lm_head.`."""
    paths = (name.split(".")[:-1] for name, _ in model.named_parameters(remove_duplicate=False))
    return tuple({f"{'.'.join(path[:2])}." for path in paths})


def _in_text_part(name: str) -> str:
    """The name in the text part of a tensor of the whole model."""
    for pattern, replacement in TEXT_PART_NAMES.items():
        changed = re.sub(pattern, replacement, name)
        if changed != name:
            return changed
    return name
