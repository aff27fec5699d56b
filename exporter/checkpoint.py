"""A checkpoint's tensors by the model's parameter names: safetensors or torch's `.bin`, in one file or sharded.

Each tensor is read through a mapping of its own, which goes when the tensor goes: the pages of a mapping that stays open would
add up to the whole model.
"""

from __future__ import annotations

import json
import logging
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from skipdecode.errors import ModelNotSupportedError
from skipdecode.exporter.config_json import check_permitted, first_line
from skipdecode.exporter.conversions import converted
from skipdecode.exporter.dequantize import dequantised
from skipdecode.exporter.graphs import Skeleton
from skipdecode.exporter.weights import IR_TYPES

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Format:
    file: str  # of a checkpoint in one file; with shards, `file`.index.json lists them
    names: Callable[[Path], list[str]]
    read: Callable[[Path, str], torch.Tensor]


class CheckpointSource:
    """Tensors of a local checkpoint folder, read when asked for; of tied ones that are there, and of those in several
    shards, all must be the same.

    Raises:
        ModelNotSupportedError: no weights, an unreadable file, or a parameter that is missing, of another shape or quantised.
    """

    def __init__(self, checkpoint: Path, skeleton: Skeleton) -> None:
        self._checkpoint, self._skeleton = checkpoint, skeleton
        self._form, files = weight_files(checkpoint)
        self._where: dict[str, list[Path]] = defaultdict(list)
        for file in files:
            for name in self._form.names(file):
                self._where[name].append(file)
        self._unread = set(self._where)
        stored = dequantised({name: partial(self._stored, name) for name in self._where}, skeleton.config)
        self._read = stored | converted(stored, skeleton.config, skeleton.shapes)
        self._base = skeleton.parts.prefix.split(".")[0]

    def __call__(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Parameter `name`, in the dtype that the file has."""
        read = self._read
        tied = [parameter for parameter, kept in self._skeleton.canonical.items() if kept == name]
        spelled = (next((key for key in _spellings(parameter, self._base) if key in read), None) for parameter in tied)
        found = [key for key in spelled if key is not None]
        where = str(self._checkpoint)
        if not found:
            raise ModelNotSupportedError(f"the checkpoint lacks {name}", "is it a causal language model?", where=where)
        value = _checked(read[found[0]](), found[0], shape, self._where.get(found[0], [self._checkpoint])[0])
        for other in found[1:]:
            if not torch.equal(value, read[other]()):
                raise ModelNotSupportedError(
                    f"{other} differs from {found[0]}, though config.json ties them",
                    "set tie_word_embeddings to false there (in text_config, where it has one), as transformers takes it",
                    where=where,
                )
        return value

    def warn_of_unread(self) -> None:
        """Tell, once all parameters are read, of weights and biases of layers that none was: a model is made without them."""
        ours = tuple(_spellings(self._skeleton.parts.prefix, self._base))
        left = [name for name in self._unread if name.startswith(ours) and name.endswith((".weight", ".bias"))]
        left = sorted(name for name in left if not self._skeleton.ignores(name) and not self._adds_nothing(name))
        if left:
            said = "%s: config.json describes a model without %d of the layers' tensors there, %s the first: they are left out"
            logger.warning(said, self._checkpoint, len(left), left[0])

    def _adds_nothing(self, name: str) -> bool:
        """Of no numbers, as of 0 shared experts, or a bias of zeros, as AutoGPTQ wrote one for each matrix."""
        value = self._stored(name)
        return not value.numel() or (name.endswith(".bias") and not value.any())

    def _stored(self, name: str) -> torch.Tensor:
        """A tensor that more than one shard may hold."""
        self._unread.discard(name)
        first, *others = self._where[name]
        value = self._form.read(first, name)
        for other in others:
            if not torch.equal(value, self._form.read(other, name)):
                raise ModelNotSupportedError(
                    f"{name} differs from the one in {first.name}", "download the checkpoint again", where=str(other)
                )
        return value


def lacks_head(checkpoint: Path) -> bool:
    """Whether a folder holds weights, and none for the head."""
    try:
        form, files = weight_files(checkpoint)
        return not any(name.endswith("lm_head.weight") for file in files for name in form.names(file))
    except ModelNotSupportedError:  # no weights, as `--random-weights` asks, or unreadable ones, which is told when they are read
        return False


def _spellings(name: str, base: str) -> Iterator[str]:
    """What a parameter may be called in a file; `base`: what a model with a head calls the model without it ("model")."""
    short = name.removeprefix(f"{base}.")
    yield name
    yield short  # saved from the base model, without its head
    yield f"language_model.{name}"  # the text part of a model that also sees, as transformers 4 wrote it
    yield f"{base}.language_model.{short}"  # and as 5 does
    yield f"{base}.language_model.{name}"  # HyperCLOVA X's
    yield f"{base}.text_model.{short}"  # Idefics' and SmolVLM's
    if base != "model":
        yield f"model.language_model.{short}"
        yield f"language_model.model.{short}"
    yield f"thinker.{name}"  # of one that also speaks
    yield name.replace("lm_head.", "embed_out.")  # GPT-NeoX


def _checked(value: torch.Tensor, name: str, shape: tuple[int, ...], file: Path) -> torch.Tensor:
    if tuple(value.shape) != shape:
        raise ModelNotSupportedError(
            f"{name} has shape {tuple(value.shape)}, config.json says {shape}",
            "is config.json the checkpoint's own?",
            where=str(file),
        )
    if value.dtype not in (*IR_TYPES, torch.float64):
        raise ModelNotSupportedError(f"{name} is {value.dtype}", "give an unquantised checkpoint", where=str(file))
    return value


def weight_files(checkpoint: Path) -> tuple[_Format, list[Path]]:
    """The files that hold weights, in the order in which transformers looks for them.

    Raises:
        ModelNotSupportedError: none, not all shards, or one that may not be read.
    """
    for form in _FORMATS:
        whole, index = checkpoint / form.file, checkpoint / f"{form.file}.index.json"
        if whole.is_file() or index.is_file():
            files = [whole] if whole.is_file() else _shards(checkpoint, index)
            for file in files:
                check_permitted(file)
            return form, files
    names = " or ".join(form.file for form in _FORMATS)
    raise ModelNotSupportedError(f"holds no {names}", "name a checkpoint folder, or use --random-weights", where=str(checkpoint))


def _shards(checkpoint: Path, index: Path) -> list[Path]:
    check_permitted(index)
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        files = [checkpoint / name for name in names]
        missing = [name for name, file in zip(names, files, strict=True) if not file.is_file()]
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ModelNotSupportedError("is not a shard index", "download the checkpoint again", where=str(index)) from error
    if missing:
        raise ModelNotSupportedError(f"shard {missing[0]} is missing", "download the checkpoint again", where=str(checkpoint))
    return files


def _names_in_safetensors(file: Path) -> list[str]:
    with _opened(file) as handle:
        return list(handle.keys())


def _read_safetensors(file: Path, name: str) -> torch.Tensor:
    with _opened(file) as handle:
        value: torch.Tensor = handle.get_tensor(name)
    return value


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as handle:
            yield handle
    except (SafetensorError, OSError) as error:
        raise ModelNotSupportedError(f"cannot be read ({error})", "download the checkpoint again", where=str(file)) from error


def _load_bin(file: Path) -> dict[str, torch.Tensor]:
    """Its tensors, mapped, by an unpickler that makes tensors and runs nothing.

    Raises:
        ModelNotSupportedError: anything else inside, damage, or the format that torch wrote before 1.6, which cannot be mapped.
    """
    try:
        found = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, pickle.UnpicklingError, ValueError, EOFError, OSError, KeyError, AttributeError) as error:
        raise ModelNotSupportedError(
            f"cannot be read as plain tensors ({first_line(error).split('. ')[0][:120]})",
            "download it again, or, if you trust it, `AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)`",
            where=str(file),
        ) from error
    if not isinstance(found, dict) or not all(isinstance(name, str) and _is_plain(value) for name, value in found.items()):
        raise ModelNotSupportedError("is no flat list of tensors", "give what save_pretrained writes", where=str(file))
    return found


def _is_plain(value: Any) -> bool:
    """Whether it is a tensor that has all its numbers, one after another."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and value.device.type == "cpu"


_FORMATS = (
    _Format(file="model.safetensors", names=_names_in_safetensors, read=_read_safetensors),
    _Format(file="pytorch_model.bin", names=lambda file: list(_load_bin(file)), read=lambda file, name: _load_bin(file)[name]),
)
