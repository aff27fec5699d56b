"""The rotary embedding that a layer's graph is traced with."""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any

import torch

from skipdecode.exporter.architectures import declared_setting, layer_kind


def rotary_base(config: Any, layer: int) -> float | None:
    """The rotary base of `layer` where it has its own; 0: the layer rotates nothing; None: the model's base."""
    kind = layer_kind(config, layer)
    if config.model_type == "lara_mini" and kind == "full_attention":
        return 0
    if config.model_type == "cohere_compass_text" and config.rope_parameters[kind] is None:
        return 0
    bases: list[float] | None = declared_setting(config, "layer_rope_theta")
    if config.model_type == "muse_glimmer_text" and bases and bases[layer]:
        return None  # only whether there is one is read
    return bases[layer] if bases else None


def rotary_for_base(config: Any, rotary: torch.nn.Module | None, base: float | None) -> torch.nn.Module | None:
    """A new frozen rotary module of the model's kind, with another base where one is given; None: nothing is rotated."""
    if rotary is None or base == 0:
        return None
    if base is not None:
        config = copy.copy(config)
        config.rope_parameters = {**config.rope_parameters, "rope_theta": base}
    frozen: torch.nn.Module = freeze_rotary(type(rotary)(config))
    return frozen


def freeze_rotary(rotary: Any) -> Any:
    """Fix the rotary module at its initial frequencies; `check_supported` refuses rows long enough to need others.

    With `dynamic` and `longrope` the module would look at the row's length in every pass, which cannot be traced.
    """
    kinds, scaling = rotary.rope_type, rotary.config.rope_parameters
    rotary.rope_type = dict.fromkeys(kinds, "default") if isinstance(kinds, dict) else "default"  # some have one per layer kind
    if hasattr(rotary, "recomposition_frequencies"):  # merges positions in time, height and width, which are equal for text
        rotary.forward = MethodType(_rotate_by_one_position, rotary)
    if "short_mscale" in scaling:  # Phi MoE reads the scaling from its configuration in every pass
        rotary.config = copy.copy(rotary.config)
        rotary.config.rope_parameters = {**scaling, "rope_type": "default", "attention_factor": scaling["short_mscale"]}
    return rotary


def _rotate_by_one_position(
    self: Any, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [B,S,D] of positions [B,S], or [3,B,S] in a model's own forward pass.

    transformers merges cosines and sines of three positions, which no pass fuses with the rotation.
    """
    kind = f"{layer_type}_" if hasattr(self, f"{layer_type}_inv_freq") else ""
    positions = position_ids[0] if position_ids.ndim == 3 else position_ids
    angles = positions[..., None].float() * getattr(self, f"{kind}inv_freq").float()
    angles, factor = torch.cat((angles, angles), dim=-1), getattr(self, f"{kind}attention_scaling")
    return (angles.cos() * factor).to(x.dtype), (angles.sin() * factor).to(x.dtype)
