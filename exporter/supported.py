"""Refuse configurations that cannot be exported faithfully, in one line and before anything is written."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

from skipdecode.errors import ModelNotSupportedError
from skipdecode.exporter.architectures import (
    EXPERTS_GELU,
    HYBRIDS,
    INDEXED,
    STATE_ONLY,
    VARYING_KV,
    attention_window,
    check_known,
    declared_setting,
    experts_per_token,
    experts_per_token_setting,
    has_experts,
    layer_configs,
    layer_keys,
    layer_kinds,
    positions_setting,
    unsupported_error,
)
from skipdecode.exporter.config_json import config_origin
from skipdecode.exporter.config_numbers import check_numbers

# settings that the export reads and that transformers does not check for every model
_COUNTS = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "num_kv_heads", "head_dim",
    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank", "vocab_size", "max_position_embeddings", "max_seq_len",
)  # fmt: skip
# settings of layers that keep states: kernels of convolutions; heads with the groups that share queries and keys, or channels
# with the number of their blocks; other sizes
_KERNELS = ("linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel", "conv_L_cache", "conv1d_width")
_HEADS_AND_GROUPS = (
    ("linear_num_value_heads", "linear_num_key_heads"), ("mamba_n_heads", "mamba_n_groups"), ("mamba_num_heads", "n_groups"),
    ("num_heads", "n_groups"), ("lru_width", "num_attention_heads"),
)  # fmt: skip
_STATE_SIZES = (
    "linear_key_head_dim", "linear_value_head_dim", "mamba_d_head", "mamba_head_dim", "mamba_d_state", "ssm_state_size",
    "mamba_d_ssm", "mamba_expand", "mamba_dt_rank", "linear_num_heads", "linear_head_dim", "state_size", "expand",
    "time_step_rank",
)  # fmt: skip
_WINDOW_NAMES = {"gpt_neo": "window_size", "modernbert-decoder": "sliding_window (by default half of local_attention)"}
_MAX_LAYERS = 4096  # the deepest published has 1000 (DeepNet, arXiv 2203.00555); a typo would build for hours


def check_single_stack(config: Any) -> None:
    """Refuse encoder-decoders, by the whole configuration: their text part by itself may be a supported decoder.

    Raises:
        ModelNotSupportedError: an encoder-decoder.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise unsupported_error(config, "is an encoder-decoder, which has no single stack of layers to skip")


def check_supported(config: Any, max_length: int) -> None:
    """Refuse, before anything is written, what could not be exported faithfully.

    Raises:
        ModelNotSupportedError: sizes that are not positive whole numbers, settings for only some layers, numbers that nothing can
            be computed with, attention to later tokens, layers of other kinds, experts with an activation other than the
            operator's, values wider than keys, heads whose size is not a multiple of 8, BLOOM computed in slices, ALiBi in bf16,
            several experts per token in Llama 4, an untested architecture, or a `max_length` beyond the model's positions, the
            original length of a rotary scaling, a chunk of attention or an indexer's number of tokens.
    """
    check_known(config)
    _check_per_layer_settings(config)
    for layer_settings in layer_configs(config):
        _check_counts(layer_settings)
        check_numbers(layer_settings)
        if config.model_type not in STATE_ONLY:
            _check_heads(layer_settings)
    if has_experts(config):
        _check_experts(config)
    check_causal(config)
    known_kinds = {"full_attention", "sliding_attention", *HYBRIDS.get(config.model_type, ())}
    if config.model_type == "llama4_text":
        _check_llama_4(config, max_length)
        known_kinds.add("chunked_attention")
    if config.model_type in INDEXED:
        _check_whole_numbers(config, ("index_topk",), required=True)
        num_chosen = config.index_topk
        _check_length(max_length, num_chosen, f"{config.model_type} attends to {num_chosen} tokens that it chooses")
        known_kinds.add("indexed_attention")
    unknown = {*(layer_kinds(config) or ())} - known_kinds
    if unknown:
        raise unsupported_error(config, f"has layers of {' and '.join(sorted(unknown))}, which cannot be exported")
    if config.model_type in HYBRIDS:
        _check_states(config)
    if config.model_type in VARYING_KV:
        _check_shared_keys(config)
    if config.model_type == "gemma3n_text":
        _check_streams(config)
    if config.model_type == "bloom" and config.slow_but_exact and config.pretraining_tp > 1:
        raise unsupported_error(config, "with slow_but_exact multiplies in slices and leaves out biases")
    if config.model_type == "falcon" and config.alibi:
        raise unsupported_error(
            config, "has linear attention biases (ALiBi) in bf16, rounded in a way that no operator reproduces"
        )
    _check_rotary(config, max_length)
    positions = _positions(config)
    if positions and max_length > positions:
        raise ModelNotSupportedError(
            f"--max-length {max_length}: the model has {positions} positions", f"choose {positions} or less"
        )


def _positions(config: Any) -> int | None:
    """The positions that the model is made for.

    yarn stretches the original length by a factor. Whoever adds it to a config.json, as Qwen's model cards tell to, leaves
    `max_position_embeddings` as it is, and transformers does not read that then.
    """
    positions: int | None = getattr(config, positions_setting(config), None)
    rope = getattr(config, "rope_parameters", None) or {}
    original, factor = (rope.get(name) for name in ("original_max_position_embeddings", "factor"))
    stretched = rope.get("rope_type") == "yarn" and "rope_theta" in rope  # which transformers adds only where a model rotates
    if positions and stretched and isinstance(original, int) and isinstance(factor, (int, float)):
        return max(positions, int(original * factor))
    return positions


def check_causal(config: Any) -> None:
    """Raises ModelNotSupportedError if tokens attend to later ones."""
    both_ways = getattr(config, "use_bidirectional_attention", None) not in (None, False, "vision")  # "vision": within images
    if both_ways or not getattr(config, "is_causal", True):
        raise unsupported_error(config, "attends to later tokens, which do not exist yet when tokens are generated one by one")


def _check_llama_4(config: Any, max_length: int) -> None:
    """Refuse lengths beyond Llama 4's first chunk, where chunked attention differs from full, and several experts per token."""
    size = config.attention_chunk_size
    _check_whole_numbers(config, ("attention_chunk_size",))
    if size is not None and "chunked_attention" in (layer_kinds(config) or ()):
        _check_length(max_length, size, f"{config.model_type} attends in chunks of {size} tokens")
    if config.num_experts_per_tok != 1:
        raise unsupported_error(
            config, f"gives each of a token's {config.num_experts_per_tok} experts a different input, which no operator does"
        )


def _check_counts(config: Any) -> None:
    _check_whole_numbers(config, _COUNTS)
    if config.num_hidden_layers > _MAX_LAYERS:
        raise _bad_setting(config, "num_hidden_layers", config.num_hidden_layers, f"write {_MAX_LAYERS} or less")
    for window in (attention_window(config, layer) for layer in range(config.num_hidden_layers)):
        if window is not None and window < 1:
            raise _bad_setting(config, _WINDOW_NAMES.get(config.model_type, "sliding_window"), window)


def _check_per_layer_settings(config: Any) -> None:
    """Refuse per-layer settings, except heads' sizes and counts in architectures whose layers read them per layer."""
    if not getattr(config, "is_heterogeneous", False):
        return
    heads_only = config.per_layer_attributes <= {"head_dim", "num_key_value_heads"}
    skipping = any(getattr(layer_settings, "skip", None) for layer_settings in config.per_layer_config)
    if config.model_type not in VARYING_KV or skipping or not heads_only:
        raise unsupported_error(
            config, "has settings for individual layers (per_layer_config), which its layers are not built from"
        )


def _check_shared_keys(config: Any) -> None:
    """Refuse a `num_kv_shared_layers` that leaves a layer without one of its kind below whose keys and values it could read."""
    kinds, shared = layer_kinds(config) or [], config.num_kv_shared_layers or 0
    unshared = kinds[: max(0, len(kinds) - shared)]
    if shared < 0 or {*kinds} - {*unshared}:
        limit = next(count for count in reversed(range(len(kinds))) if {*kinds[: len(kinds) - count]} == {*kinds})
        raise _bad_setting(
            config, "num_kv_shared_layers", shared, f"write 0 to {limit}, which leave a layer of each kind to read from"
        )


def _check_streams(config: Any) -> None:
    """Refuse Gemma 3n's sizes below 1, an active stream that does not exist, and shares of zeroed gates outside [0, 1)."""
    _check_whole_numbers(
        config, ("altup_num_inputs", "laurel_rank", "hidden_size_per_layer_input", "vocab_size_per_layer_input"), required=True
    )
    active, count = config.altup_active_idx, config.altup_num_inputs
    if not 0 <= active < count:
        raise _bad_setting(config, "altup_active_idx", active, f"write 0 to {count - 1}, below altup_num_inputs")
    if not all(0 <= part < 1 for part in config.activation_sparsity_pattern):
        raise _bad_setting(config, "activation_sparsity_pattern", config.activation_sparsity_pattern, "write numbers in [0, 1)")


def _check_heads(config: Any) -> None:
    """Refuse heads that keys do not divide evenly, values wider than keys, and head sizes that are not multiples of 8."""
    heads, keys = config.num_attention_heads, layer_keys(config, 0)
    for kv_heads in sorted({layer_keys(config, layer).num_heads for layer in range(config.num_hidden_layers)}):
        if heads % kv_heads:
            raise ModelNotSupportedError(
                f"its config.json has {heads} heads, not a multiple of its {kv_heads} key/value heads",
                "correct that setting", where=config_origin(config),
            )  # fmt: skip
    if (declared_setting(config, "v_head_dim") or 0) > keys.head_size:
        raise unsupported_error(
            config, f"has values of {config.v_head_dim} numbers a head, more than its keys, and a KV buffer holds both"
        )
    if keys.head_size % 8:
        raise unsupported_error(config, f"has heads of size {keys.head_size}, but ONNX Runtime's attention takes multiples of 8")


def _check_whole_numbers(config: Any, names: Iterable[str], *, required: bool = False, minimum: int = 1) -> None:
    """Refuse settings that are not whole numbers from `minimum` on, and, if `required`, missing ones."""
    for name in names:
        value = getattr(config, name, None)
        if value is None and not required:
            continue
        if not isinstance(value, int) or value < minimum:
            raise _bad_setting(config, name, value, f"write a whole number, {minimum} or more")


def _check_experts(config: Any) -> None:
    """Refuse a router that chooses more experts than there are, uneven groups of experts, and an activation without an operator.

    Choosing more than there are fails in the trace, and uneven groups mix tokens.
    """
    names = ("num_experts", "moe_num_experts", "num_local_experts")
    name = next((name for name in names if hasattr(config, name)), names[-1])
    _check_whole_numbers(config, (name,), required=True)
    experts = getattr(config, name)
    chosen, groups = experts_per_token(config), getattr(config, "n_group", None)
    counts = chosen if isinstance(chosen, list) else [chosen]  # Hunyuan may have one number per layer
    if not all(isinstance(count, int) and 1 <= count <= experts for count in counts):
        raise _bad_setting(config, experts_per_token_setting(config), chosen, f"write 1 to {experts}, the number of experts")
    if groups is not None and (groups < 1 or experts % groups):
        raise _bad_setting(config, "n_group", groups, f"write a divisor of {experts}, the number of experts")
    chosen_groups = getattr(config, "topk_group", None)
    if groups and chosen_groups is not None and not 1 <= chosen_groups <= groups:
        raise _bad_setting(config, "topk_group", chosen_groups, f"write 1 to {groups}, the value of n_group")
    if groups and config.model_type != "deepseek_v2":  # there experts of other groups weigh 0; elsewhere any could be chosen
        limit = (chosen_groups or 1) * (experts // groups)
        if any(count > limit for count in counts):
            raise _bad_setting(
                config, "num_experts_per_tok", chosen, f"write 1 to {limit}, the number of experts in topk_group groups"
            )
    activation, expected, whose = getattr(config, "hidden_act", "silu"), "silu", "ONNX Runtime's"  # LFM2 has only silu
    if config.model_type == "nemotron_h":  # its experts have no gate
        activation, expected = config.mlp_hidden_act, "relu2"
    elif config.model_type == "gemma4_text":
        activation, expected, whose = config.hidden_activation, EXPERTS_GELU, "ours"
    if activation != expected and (activation, expected) != ("swish", "silu"):
        raise unsupported_error(config, f"has experts with {activation}, but {whose} have {expected}")


def _check_states(config: Any) -> None:
    """Refuse heads that share queries and keys unevenly, and convolutions that the operator does not compute."""
    _check_whole_numbers(config, (*_STATE_SIZES, *chain(*_HEADS_AND_GROUPS)))
    _check_whole_numbers(config, _KERNELS, minimum=2)
    for heads, groups in _HEADS_AND_GROUPS:
        count, num_groups = getattr(config, heads, None), getattr(config, groups, None)
        if count and num_groups and count % num_groups:
            raise _bad_setting(config, heads, count, f"write a multiple of {num_groups}, the value of {groups}")
    # Nemotron-H has a setting of its own, short convolutions have none
    activation = declared_setting(config, "mamba_hidden_act") or declared_setting(config, "hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise unsupported_error(config, f"has convolutions with {activation}, but ONNX's have silu")


def _bad_setting(
    config: Any, name: str, value: object, remedy: str = "write a whole number, 1 or more"
) -> ModelNotSupportedError:
    spelled = config.attribute_map.get(name, name)
    return ModelNotSupportedError(f"{spelled} is {value!r} in its config.json", remedy, where=config_origin(config))


def _check_rotary(config: Any, max_length: int) -> None:
    """Refuse lengths beyond the original one of a rotary scaling that uses other frequencies or factors there.

    `dynamic` needs no check: whatever original length it names, it changes only beyond the model's own length, and
    `check_supported` allows no run that long.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    for scaling in (rope, *(kind for kind in rope.values() if isinstance(kind, dict))):  # some models have one per kind of layer
        if scaling.get("rope_type") != "longrope" and "long_mscale" not in scaling:
            continue
        name = "original_max_position_embeddings"
        original = getattr(config, name, None) or scaling.get(name)
        if not isinstance(original, int):
            raise _bad_setting(config, name, original)
        _check_length(max_length, original, f"{config.model_type} changes its rotary frequencies beyond {original} tokens")


def _check_length(max_length: int, max_allowed: int, why: str) -> None:
    if max_length > max_allowed:
        raise ModelNotSupportedError(
            f"{why}, but --max-length is {max_length}", f"export with --max-length {max_allowed} or less"
        )
