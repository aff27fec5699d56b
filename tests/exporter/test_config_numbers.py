"""Numbers in config.json that no model can compute with."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import transformers

from skipdecode.errors import ModelNotSupportedError
from skipdecode.exporter.architectures import SUPPORTED, layer_configs
from skipdecode.exporter.config_numbers import check_numbers
from skipdecode.exporter.supported import check_supported
from tests.models import CONFIGS, MAX_LENGTH, RELATIVES

NAN, INFINITE = math.nan, math.inf
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": MAX_LENGTH}


def _changed(name: str, path: str, value: Any) -> Any:
    config = copy.deepcopy((CONFIGS | RELATIVES)[name]())
    *outer, last = path.split(".")
    at = config
    for step in outer:
        at = at[step] if isinstance(at, dict) else getattr(at, step)
    if isinstance(at, dict):
        at[last] = value
    else:
        setattr(at, last, value)
    return config


@pytest.mark.parametrize(
    ("name", "path", "values"),
    [
        ("llama", "rope_parameters.rope_theta", (0, 0.0, -10000.0, NAN, INFINITE, -INFINITE)),
        ("llama", "rope_parameters.factor", (0, -2.0, 1e-300, 1e300, NAN, INFINITE)),
        ("llama", "rope_parameters.short_factor", ([1.0, 0.0], [NAN])),
        ("llama", "rope_parameters.attention_factor", (0.0, -1.0)),
        ("llama", "rope_parameters.original_max_position_embeddings", (0, -5)),
        ("gemma3", "rope_parameters.full_attention.rope_theta", (0.0, NAN)),
        ("laguna", "rope_parameters.full_attention.partial_rotary_factor", (0.0, -0.5, NAN, 0.1, 1.5, 1e30)),
        ("phi", "rope_parameters.partial_rotary_factor", (0.0, 0.1, 1.5)),
        ("llama", "rms_norm_eps", (-1e-5, NAN, INFINITE)),
        ("gpt2", "layer_norm_epsilon", (-1e-5, NAN)),
        ("nemotron", "norm_eps", (-1e-5,)),
        ("starcoder2", "norm_epsilon", (-1e-5,)),
        ("gemma2", "attn_logit_softcapping", (0.0, -50.0, NAN)),
        ("gemma2", "final_logit_softcapping", (0.0, -30.0, NAN)),
        ("recurrent_gemma", "logits_soft_cap", (0.0, -30.0, NAN)),
        ("gemma2", "query_pre_attn_scalar", (0, -256)),
        ("granite", "logits_scaling", (0.0, -8.0)),
        ("granite_swa", "layer_rope_theta", ([-1.0, 0.0], [NAN])),
        ("granite", "attention_multiplier", (0.0, -1.0)),
        ("granite", "embedding_multiplier", (0.0, -12.0)),
        ("minicpm3", "scale_emb", (0, -1)),
        ("cohere", "logit_scale", (0.0, NAN)),
        ("llama", "rope_parameters.low_freq_factor", (0.0,)),
        ("llama", "rope_parameters.high_freq_factor", (0.0, -4.0)),
        ("llama", "rope_parameters.long_factor", ([1.0, -1.0],)),
        ("granite", "residual_multiplier", (NAN,)),
        ("minicpm3", "dim_model_base", (0,)),
        ("mpt", "attn_config.softmax_scale", (0.0, NAN)),
        ("olmo", "clip_qkv", (-8.0, NAN)),
        ("gpt_oss", "swiglu_limit", (0.0, -7.0)),  # compiling it kills the process
        ("hy_v3", "router_scaling_factor", (-0.5,)),  # would choose other experts
        ("deepseek_v3", "routed_scaling_factor", (-2.5, INFINITE)),
        ("cohere2_moe", "rope_parameters.rope_theta", (0.0,)),  # no field of its configuration's
        ("mamba2", "time_step_limit", ([NAN, INFINITE], [-INFINITE, 1.0])),
    ],
)
def test_a_number_that_no_model_can_compute_with_is_refused_by_its_settings_name(
    name: str, path: str, values: tuple[Any, ...]
) -> None:
    """Exported, most would make every logit NaN; engines with a rotary part of one number would fail when they run."""
    for value in values:
        says = rf"{path.split('.')[-1]} is \S+ in its config\.json; write "
        with pytest.raises(ModelNotSupportedError, match=says) as caught:
            check_supported(_changed(name, path, value), MAX_LENGTH)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("llama", "rope_parameters.factor", 0.5),
        ("llama", "rope_parameters.mscale_all_dim", 0.0),  # off
        ("llama", "rms_norm_eps", 0.0),
        ("phi", "rope_parameters.partial_rotary_factor", 0.125),  # two of a head's 16 numbers
        ("gemma2", "attn_logit_softcapping", None),
        ("granite", "residual_multiplier", 0.0),
        ("mamba2", "time_step_limit", [0.5, INFINITE]),
        ("laguna", "moe_router_logit_softcapping", 0.0),  # off, its default
        ("gemma3", "rope_parameters.full_attention", LONGROPE),
        ("llama", "logits_scaling", math.nan),  # Granite's, which Llama's code does not read
    ],
)
def test_a_number_that_a_model_can_compute_with_is_accepted(name: str, path: str, value: Any) -> None:
    check_supported(_changed(name, path, value), MAX_LENGTH)


@pytest.mark.parametrize("name", SUPPORTED)
def test_no_default_of_transformers_is_refused(name: str, tmp_path: Path) -> None:
    """One of them is infinite."""
    config = transformers.AutoConfig.for_model(name)
    config.save_pretrained(tmp_path)
    for made in (config, transformers.AutoConfig.from_pretrained(tmp_path)):
        for own in layer_configs(made):
            check_numbers(own)
