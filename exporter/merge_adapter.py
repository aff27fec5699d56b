"""Merges a peft adapter into its base model's weights while they are read, one module at a time."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import torch

from skipdecode.errors import shortened
from skipdecode.exporter.adapter_config import MERGE
from skipdecode.exporter.load_adapter import blaming_adapter, load_adapter
from skipdecode.exporter.skeleton import Skeleton, meta_model
from skipdecode.exporter.weights import TensorSource

logger = logging.getLogger(__name__)

_NAME = "default"  # peft's, of a model's only adapter


class AdaptedSource:
    """A base model's tensors, with an adapter merged into them.

    peft puts the adapter on a model of placeholders. To merge a module, it is copied with its stored weights in the placeholders'
    place, and the copy does what `merge_and_unload` does. Merged weights are float32.

    Raises:
        ModelNotSupportedError: the adapter cannot be read, does not fit the model, or is of a kind that peft cannot merge; on
            reading, that it changes tied weights differently.
    """

    def __init__(self, stored: TensorSource, adapter: Path, skeleton: Skeleton) -> None:
        self._stored, self._adapter, self._skeleton = stored, load_adapter(adapter), skeleton
        for warning in self._adapter.warnings:  # here, since `load_config` loads it, too
            logger.warning("%s: peft warns: %s", adapter, shortened(warning, 200))
        model = meta_model(skeleton.config, torch.float32)
        self._names = _fill_with_placeholders(model)
        self._put_on(model)
        self._wrappers = _outermost_wrappers(model)
        self._needed = {self._names[value] for value in model.parameters() if value in self._names}  # of the stored ones
        self._own = {name: value for name, value in model.named_parameters() if value not in self._names}
        self._merged: tuple[str, torch.nn.Module] | None = None  # the module that was merged last, of which a bias may come next

    def __call__(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Parameter `name`, merged, or as it is stored."""
        first, *others = [parameter for parameter, kept in self._skeleton.canonical.items() if kept == name]
        value = self._read(first, shape)
        for other in others:
            if not torch.equal(value, self._read(other, shape)):
                raise self._adapter.error(
                    f"does not change {first} and {other} alike, which its base model ties",
                    "save that with tie_word_embeddings false and a head of its own, and set base_model_name_or_path to it",
                )
        return value

    def _read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        from peft.utils.other import ModulesToSaveWrapper

        path = next((path for path in self._wrappers if name.startswith(f"{path}.")), None)
        replaced = name not in self._needed or (path is not None and isinstance(self._wrappers[path], ModulesToSaveWrapper))
        if replaced and name.startswith(self._skeleton.parts.prefix):
            self._stored(name, shape)  # a layer's weights that are never read would be reported as unknown
        if path is not None:
            value: torch.Tensor = self._merge(path).state_dict()[name.removeprefix(f"{path}.")]
            return value
        if name in self._own:  # an embedding that peft saved as a whole
            return self._own[name].detach()
        return self._stored(self._skeleton.canonical[name], shape)

    def _merge(self, path: str) -> torch.nn.Module:
        """The module at `path`, merged."""
        from peft.utils.other import ModulesToSaveWrapper

        wrapper = self._wrappers[path]
        if isinstance(wrapper, ModulesToSaveWrapper):
            module: torch.nn.Module = wrapper.modules_to_save[_NAME]
            return module
        if self._merged is None or self._merged[0] != path:
            loaded = {id(value): self._load(value) for value in wrapper.parameters() if value in self._names}
            with blaming_adapter(self._adapter.folder):
                self._merged = path, _unwrap(copy.deepcopy(wrapper, loaded))
        return self._merged[1]

    def _load(self, placeholder: torch.Tensor) -> torch.nn.Parameter:
        name = self._skeleton.canonical[self._names[placeholder]]
        return torch.nn.Parameter(self._stored(name, self._skeleton.shapes[name]).float(), requires_grad=False)

    def _put_on(self, model: Any) -> None:
        """Have peft wrap the model's modules, with the adapter's weights in them."""
        from peft import get_peft_model, set_peft_model_state_dict

        adapter, config = self._adapter, self._adapter.config
        weights = adapter.weights
        if hasattr(self._skeleton.config, "whole_type"):
            weights, config = adapter.of_text_part(model)
        model.name_or_path = config.base_model_name_or_path  # without it, peft warns
        with blaming_adapter(adapter.folder):
            wrapped = get_peft_model(model, config, _NAME, low_cpu_mem_usage=True)
            result: Any = set_peft_model_state_dict(wrapped, weights, low_cpu_mem_usage=True)
        missing = [name for name, value in wrapped.named_parameters() if value.is_meta]
        if missing or result.unexpected_keys:
            what = f"lacks {missing[0]}" if missing else f"holds {result.unexpected_keys[0]}, which its base model lacks"
            raise adapter.error(what, f"check base_model_name_or_path, or {MERGE}")


def _fill_with_placeholders(model: torch.nn.Module) -> dict[torch.nn.Parameter, str]:
    """Give parameters a device, to which peft moves an adapter's weights, but no memory; returns their names."""
    names: dict[torch.nn.Parameter, str] = {}
    for path, parameter in list(model.named_parameters(remove_duplicate=False)):
        placeholder = torch.nn.Parameter(torch.zeros(()).expand(parameter.shape), requires_grad=False)
        owner, _, key = path.rpartition(".")
        setattr(model.get_submodule(owner), key, placeholder)
        names[placeholder] = path
    return names


def _outermost_wrappers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The modules that peft has put in place of the model's, by their paths in the model."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    wrappers: dict[str, torch.nn.Module] = {}
    for path, module in model.named_modules():
        if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)) and not any(path.startswith(f"{o}.") for o in wrappers):
            wrappers[path] = module
    return wrappers


@torch.no_grad()  # type: ignore[untyped-decorator]
def _unwrap(wrapper: Any) -> torch.nn.Module:
    """Merge a wrapped module, as peft's `BaseTuner.merge_and_unload` does."""
    if hasattr(wrapper, "unload_and_optionally_merge_module"):
        module: torch.nn.Module = wrapper.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
        return module
    wrapper.merge()
    module = wrapper.get_base_layer()
    return module
