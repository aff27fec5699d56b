"""Reads a checkpoint's tensors by the model's parameter names, from safetensors or torch's `.bin`, in one file or sharded.

Each tensor is read through its own memory mapping, which is closed with the tensor. The pages of a mapping that stays open would
add up to the whole model.
"""

from __future__ import annotations

import json
import logging
import pickle
from collections import ChainMap, defaultdict
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
from skipdecode.exporter.conversions import convert_lazily
from skipdecode.exporter.dequantize import dequantise_lazily
from skipdecode.exporter.skeleton import Skeleton
from skipdecode.exporter.weights import IR_TYPES

logger = logging.getLogger(__name__)

# for models that also see: names of the text part's weights, as transformers 4 and 5 write them -> names in the text model;
# the last line is for Idefics and SmolVLM, and for models that also speak (`_possible_names`)
TEXT_PART_NAMES = {
    "^model.language_model.model": "model", "^model.language_model.lm_head": "lm_head",
    "^language_model.model": "model", "^model.language_model": "model", "^language_model.lm_head": "lm_head",
    "^model.text_model": "model", "^thinker.": "",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Format:
    file: str  # an unsharded checkpoint's; `file`.index.json lists shards
    names: Callable[[Path], list[str]]
    read: Callable[[Path, str], torch.Tensor]


class CheckpointSource:
    """Tensors of a local checkpoint folder, read on demand.

    Stored copies of tied tensors must be equal, and so must copies in several shards.

    Raises:
        ModelNotSupportedError: no weights, an unreadable file, or a parameter that is missing, has another shape or is quantised.
    """

    def __init__(self, checkpoint: Path, skeleton: Skeleton) -> None:
        self._checkpoint, self._skeleton = checkpoint, skeleton
        self._format, files = weight_files(checkpoint)
        self._files: dict[str, list[Path]] = defaultdict(list)
        for file in files:
            for name in self._format.names(file):
                self._files[name].append(file)
        self._unread = set(self._files)
        stored = dequantise_lazily({name: partial(self._read_stored, name) for name in self._files}, skeleton.config)
        # what conversions make of a tensor goes before the tensor itself, which another name may find: ERNIE 4.5 VL's routers
        self._readers = ChainMap(convert_lazily(stored, skeleton.config, skeleton.shapes), stored)
        self._base = skeleton.parts.prefix.split(".")[0]

    def __call__(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Parameter `name`, in the dtype of the file."""
        readers = self._readers
        tied = [parameter for parameter, kept in self._skeleton.canonical.items() if kept == name]
        matches = (self._stored_name(parameter) for parameter in tied)
        names = [key for key in matches if key is not None]
        where = str(self._checkpoint)
        if not names:
            raise ModelNotSupportedError(f"the checkpoint lacks {name}", "check that it is a causal language model", where=where)
        value = _check_tensor(readers[names[0]](), names[0], shape, self._files.get(names[0], [self._checkpoint])[0])
        for other in names[1:]:
            if not torch.equal(value, readers[other]()):
                raise ModelNotSupportedError(
                    f"{other} differs from {names[0]}, though config.json ties them",
                    "set tie_word_embeddings to false there (in its text_config, if it has one)",
                    where=where,
                )
        return value

    def _stored_name(self, parameter: str) -> str | None:
        """The name under which a parameter is found, among converted tensors if it is there; None: it is not found."""
        names = [*_possible_names(parameter, self._base)]
        return next((name for readers in self._readers.maps for name in names if name in readers), None)

    def warn_of_unread(self) -> None:
        """Warn, once all parameters are read, of layers' weights and biases that the checkpoint holds but the model lacks."""
        layer_prefixes = tuple(_possible_names(self._skeleton.parts.prefix, self._base))
        unread = [name for name in self._unread if name.startswith(layer_prefixes) and name.endswith((".weight", ".bias"))]
        unread = sorted(name for name in unread if not self._skeleton.ignores(name) and not self._adds_nothing(name))
        if unread:
            message = "%s: the model in config.json lacks %d of this checkpoint's layer tensors (first: %s); they are left out"
            logger.warning(message, self._checkpoint, len(unread), unread[0])

    def _adds_nothing(self, name: str) -> bool:
        """Whether the tensor is empty (0 shared experts) or a bias of zeros, such as AutoGPTQ wrote for every matrix."""
        value = self._read_stored(name)
        return not value.numel() or (name.endswith(".bias") and not value.any())

    def _read_stored(self, name: str) -> torch.Tensor:
        """Read a tensor; if several shards hold it, they must agree."""
        self._unread.discard(name)
        first, *others = self._files[name]
        value = self._format.read(first, name)
        for other in others:
            if not torch.equal(value, self._format.read(other, name)):
                raise ModelNotSupportedError(
                    f"{name} differs from the one in {first.name}", "download the checkpoint again", where=str(other)
                )
        return value


def lacks_head(checkpoint: Path) -> bool:
    """Whether a folder holds weights but none for the head."""
    try:
        file_format, files = weight_files(checkpoint)
        return not any(name.endswith("lm_head.weight") for file in files for name in file_format.names(file))
    except ModelNotSupportedError:  # no weights, as for `--random-weights`, or unreadable ones, reported on reading
        return False


def stored_dtype(checkpoint: Path) -> torch.dtype | None:
    """The dtype of a folder's first weight that is not quantised, as transformers takes where config.json names none."""
    try:
        file_format, files = weight_files(checkpoint)
        dtypes = (file_format.read(file, name).dtype for file in files for name in file_format.names(file))
        return next((dtype for dtype in dtypes if dtype in IR_TYPES), None)
    except ModelNotSupportedError:  # as in `lacks_head`
        return None


def _possible_names(name: str, base: str) -> Iterator[str]:
    """The names that a parameter may have in a file; `base`: the attribute of the model without its head ("model")."""
    short = name.removeprefix(f"{base}.")
    yield name
    yield short  # saved from the model without its head
    yield f"language_model.{name}"  # text part of a multimodal model, as transformers 4 wrote it
    yield f"{base}.language_model.{short}"  # as transformers 5 writes it
    yield f"{base}.language_model.{name}"  # HyperCLOVA X's
    yield f"{base}.text_model.{short}"  # Idefics' and SmolVLM's
    yield f"{base}.text_model.{name}"  # Emu3's
    if base != "model":
        yield f"model.language_model.{short}"
        yield f"language_model.model.{short}"
    yield f"thinker.{name}"  # text part of Qwen Omni
    yield name.replace("lm_head.", "embed_out.")  # GPT-NeoX


def _check_tensor(value: torch.Tensor, name: str, shape: tuple[int, ...], file: Path) -> torch.Tensor:
    if tuple(value.shape) != shape:
        raise ModelNotSupportedError(
            f"{name} has shape {tuple(value.shape)}, config.json says {shape}",
            "check that config.json belongs to this checkpoint",
            where=str(file),
        )
    if value.dtype not in (*IR_TYPES, torch.float64):
        raise ModelNotSupportedError(f"{name} is {value.dtype}", "give an unquantised checkpoint", where=str(file))
    return value


def weight_files(checkpoint: Path) -> tuple[_Format, list[Path]]:
    """The format and the files of the weights, looked for in the same order as transformers does.

    Raises:
        ModelNotSupportedError: there are no weights, a shard is missing, or a file may not be read.
    """
    for file_format in FORMATS:
        whole, index = checkpoint / file_format.file, checkpoint / f"{file_format.file}.index.json"
        if whole.is_file() or index.is_file():
            files = [whole] if whole.is_file() else _shards(checkpoint, index)
            for file in files:
                check_permitted(file)
            return file_format, files
    names = " or ".join(file_format.file for file_format in FORMATS)
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
    with _open_safetensors(file) as handle:
        return list(handle.keys())


def _read_safetensors(file: Path, name: str) -> torch.Tensor:
    with _open_safetensors(file) as handle:
        value: torch.Tensor = handle.get_tensor(name)
    return value


@contextmanager
def _open_safetensors(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as handle:
            yield handle
    except (SafetensorError, OSError) as error:
        raise ModelNotSupportedError(f"cannot be read ({error})", "download the checkpoint again", where=str(file)) from error


def _load_bin(file: Path) -> dict[str, torch.Tensor]:
    """Map the tensors of a `.bin` file, with an unpickler that builds tensors and runs no code.

    Raises:
        ModelNotSupportedError: it holds anything else, is damaged, or has torch's format before 1.6, which cannot be mapped.
    """
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, pickle.UnpicklingError, ValueError, EOFError, OSError, KeyError, AttributeError) as error:
        raise ModelNotSupportedError(
            f"cannot be read as plain tensors ({first_line(error).split('. ')[0]})",
            "download it again, or, if you trust it, `AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)`",
            where=str(file),
        ) from error
    if not isinstance(tensors, dict) or not all(isinstance(name, str) and _is_plain(value) for name, value in tensors.items()):
        raise ModelNotSupportedError("is not a flat dict of tensors", "give a file that save_pretrained wrote", where=str(file))
    return tensors


def _is_plain(value: Any) -> bool:
    """Whether the value is a dense tensor with its data in memory, neither sparse nor meta."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and value.device.type == "cpu"


FORMATS = (
    _Format(file="model.safetensors", names=_names_in_safetensors, read=_read_safetensors),
    _Format(file="pytorch_model.bin", names=lambda file: list(_load_bin(file)), read=lambda file, name: _load_bin(file)[name]),
)
