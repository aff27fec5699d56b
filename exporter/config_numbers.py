"""Checks the numbers of a configuration that a model computes with; bad ones make every logit NaN, or are meaningless."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from skipdecode.errors import ModelNotSupportedError
from skipdecode.exporter.config_json import config_origin

_POSITIVE = (  # they divide frequencies and logits, multiply scores and embeddings, or clamp experts' rows
    "rope_theta", "factor", "short_factor", "long_factor", "low_freq_factor", "high_freq_factor", "attention_factor",
    "original_max_position_embeddings", "partial_rotary_factor", "attn_logit_softcapping", "final_logit_softcapping",
    "query_pre_attn_scalar", "softmax_scale", "attention_multiplier", "embedding_multiplier", "logits_scaling", "logit_scale",
    "scale_emb", "dim_model_base", "swiglu_limit", "floor_scale", "logits_soft_cap",
)  # fmt: skip
# numbers under roots, clamps (0: none), a rotary base (0: no rotation), and factors of experts' weights: an engine chooses the
# experts with the largest weights, so a negative factor would choose others
_NOT_NEGATIVE = (
    "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon", "clip_qkv", "route_scale",
    "layer_rope_theta", "routed_scaling_factor", "router_scaling_factor", "moe_routed_scaling_factor",
)  # fmt: skip


def check_numbers(config: Any) -> None:
    """Refuse numbers that no norm, score, logit or rotary embedding can be computed with.

    Raises:
        ModelNotSupportedError: a setting is out of its range, or NaN or infinite without being so by default.
    """
    defaults = {field.name: field.default for field in fields(config)}
    for name, setting in config.to_dict().items():
        if (name not in defaults and name != "rope_parameters") or getattr(config, name) == defaults.get(name):
            continue  # not a setting of this type of model, whose code never reads it, or left at its default
        for path, number in _numbers((name,), setting):
            remedy = _remedy(path[-1], number)
            if remedy:
                raise ModelNotSupportedError(
                    f"{'.'.join(path)} is {number!r} in its config.json", remedy, where=config_origin(config)
                )
            if path[-1] == "partial_rotary_factor":
                _check_rotary_part(config, number)


def _numbers(path: tuple[str, ...], setting: Any) -> Iterator[tuple[tuple[str, ...], float]]:
    """The path and value of each number in a setting, which may be a list, or a dictionary with an entry per kind of layer."""
    if isinstance(setting, dict):
        for name, inner in setting.items():
            yield from _numbers((*path, str(name)), inner)
    elif isinstance(setting, (list, tuple)):
        for inner in setting:
            yield from _numbers(path, inner)
    elif isinstance(setting, (int, float)) and not isinstance(setting, bool):
        yield path, setting


def _remedy(name: str, number: float) -> str | None:
    if isinstance(number, float):
        number = ctypes.c_float(number).value  # 0 or infinite where fp32 cannot hold the number
        if not math.isfinite(number) and not (name == "time_step_limit" and number > 0):  # Mamba's steps may be unbounded
            return "write a finite number"
    if name in _POSITIVE and number <= 0:
        return "write a number above 0"
    if name in _NOT_NEGATIVE and number < 0:
        return "write 0 or more"
    return None


def _check_rotary_part(config: Any, factor: float) -> None:
    """Refuse a rotated part of fewer than two numbers a head, or of more than the head has.

    transformers broadcasts a part of one number, which the engines would reject only when they run.
    """
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if not 2 <= size * factor <= size:
        raise ModelNotSupportedError(
            f"partial_rotary_factor is {factor!r} in its config.json",
            f"write {2 / size:.3g} to 1, since the {size} numbers of a head are rotated in pairs",
            where=config_origin(config),
        )
