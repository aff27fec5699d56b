"""Where a Hugging Face decoder keeps its parts, and which models can be exported faithfully."""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields
from typing import Any

import torch

from skipdecode.errors import ModelNotSupportedError
from skipdecode.exporter.config_json import place
from skipdecode.exporter.config_numbers import check_numbers
from skipdecode.manifest import LinearAttention

# mixtures of experts, whose layers choose a few of many MLPs for each token; Granite 4's may have none
MIXTURES = (
    "afmoe", "axk1", "cohere2_moe", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo", "flint",
    "glm4_moe", "glm4_moe_lite", "gpt_oss", "granitemoe", "granitemoehybrid", "granitemoeshared", "hunyuan_v1_moe", "hy_v3",
    "kolibri1", "laguna", "mellum", "minimax_m2", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe",
    "qwen3_next", "solar_open",
)  # fmt: skip
# those of them that choose as ONNX Runtime's operator does, the K largest of a softmax; other routers have nodes that count rows,
# which its CUDA provider leaves to the CPU
SOFTMAX_ROUTED = (
    "flex_olmo", "granitemoe", "granitemoehybrid", "granitemoeshared", "hunyuan_v1_moe", "mellum", "mixtral", "olmoe",
    "qwen2_moe", "qwen3_moe",
)  # fmt: skip
# those whose keys and values are expanded from one latent (DeepSeek-V2, arXiv 2405.04434, section 2.1)
LATENT = ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu")
# those that have layers with linear attention (Gated DeltaNet) between those with attention
LINEAR_ATTENTION = ("olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
# older than transformers' interface for attention (see own_attention); their layers return attention weights as well
OWN_ATTENTION = ("bloom", "codegen", "falcon", "gpt_neo", "gptj", "mpt")
# those with what has been run on a CPU alone
CPU_ALONE = {
    **dict.fromkeys(LATENT, "keys and values that are expanded from a latent"),
    **dict.fromkeys(("bloom", "mpt"), "linear biases on its attention (ALiBi)"),
    **dict.fromkeys(("flint", "gpt_oss"), "attention sinks"),
    **dict.fromkeys(LINEAR_ATTENTION, "layers with linear attention"),
}
# those whose experts a checkpoint may hold as MXFP4, which are dequantised as they are read
IN_MXFP4 = ("gpt_oss",)
# model type -> names in the base model: (owner of the layers, layers, final norms and projections in order, rotary)
_PARTS = {
    "opt": ("decoder", "layers", ("final_layer_norm", "project_out"), None),
    **dict.fromkeys(("bloom", "codegen", "gpt2", "gpt_bigcode", "gpt_neo", "gptj"), ("", "h", ("ln_f",), None)),
    "biogpt": ("", "layers", ("layer_norm",), None),
    "falcon": ("", "h", ("ln_f",), "rotary_emb"),
    "mpt": ("", "blocks", ("norm_f",), None),
    "persimmon": ("", "layers", ("final_layernorm",), "rotary_emb"),
    "gpt_neox": ("", "layers", ("final_layer_norm",), "rotary_emb"),
    "phi": ("", "layers", ("final_layernorm",), "rotary_emb"),
    **dict.fromkeys(
        (
            "apertus", "arcee", "cohere", "cohere2", "cwm", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm",
            "glm4", "granite", "helium", "hunyuan_v1_dense", "hyperclovax", "internlm3", "iquestcoder", "jais2", "llama",
            "minicpm3", "ministral", "ministral3", "mistral", "nemotron", "olmo", "olmo2", "olmo3", "olmo_hybrid", "phi3",
            "qwen2", "qwen3", "qwen3_5_text", "seed_oss", "smollm3", "stablelm", "starcoder2", "vaultgemma", "youtu", *MIXTURES,
        ),
        ("", "layers", ("norm",), "rotary_emb"),
    ),
}  # fmt: skip
SUPPORTED = tuple(_PARTS)
# settings that are read here and that transformers takes from some models as they are
_COUNTS = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "num_kv_heads", "head_dim", "qk_head_dim",
    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank", "vocab_size", "max_position_embeddings", "max_seq_len",
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim",
)  # fmt: skip
_MOST_LAYERS = 4096  # the deepest published has 1000 (DeepNet, arXiv 2203.00555); a slip of the pen would be built for hours


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderParts:
    """The pieces of a decoder that become separate graphs."""

    owner: torch.nn.Module  # the module whose forward runs embedding, layers and final norm
    layers_name: str  # its ModuleList of L layers
    final_names: tuple[str, ...]  # its modules after the last layer, in order
    rotary: torch.nn.Module | None  # gives cos and sin [B, S, rotary D]
    prefix: str  # of the layers' parameter names: "model.layers."


def decoder_parts(model: torch.nn.Module) -> DecoderParts:
    """Find the parts of a causal language model.

    Raises:
        ModelNotSupportedError: an architecture that is not in `SUPPORTED`.
    """
    config: Any = model.config
    if config.model_type not in _PARTS:
        raise unsupported(config, "is not among the architectures that are tested")
    owner_name, layers_name, final_names, rotary_name = _PARTS[config.model_type]
    owner = getattr(model, model.base_model_prefix)
    owner = getattr(owner, owner_name) if owner_name else owner
    present = tuple(name for name in final_names if getattr(owner, name, None) is not None)
    path = ".".join(part for part in (model.base_model_prefix, owner_name, layers_name) if part)
    return DecoderParts(
        owner=owner,
        layers_name=layers_name,
        final_names=present,
        rotary=getattr(owner, rotary_name) if rotary_name else None,
        prefix=f"{path}.",
    )


def decoder_layers(model: torch.nn.Module) -> torch.nn.ModuleList:
    """The L decoder layers of `model`, layer 0 nearest the embedding."""
    parts = decoder_parts(model)
    layers: torch.nn.ModuleList = getattr(parts.owner, parts.layers_name)
    return layers


def unsupported(config: Any, why: str) -> ModelNotSupportedError:
    return ModelNotSupportedError(
        f"{config.model_type} {why}",
        f"supported are {', '.join(SUPPORTED)}",
        where=place(config),
    )


def check_single_stack(config: Any) -> None:
    """Refuse encoder-decoders: of the whole configuration, since what they call their text part may be a supported decoder.

    Raises:
        ModelNotSupportedError: an encoder-decoder.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise unsupported(config, "is an encoder-decoder, which has no single stack of layers to skip")


def check_supported(config: Any, max_length: int) -> None:
    """Refuse, before anything is written, what could not be exported faithfully.

    Raises:
        ModelNotSupportedError: sizes that are none, numbers that nothing can be computed with, attention to later tokens, layers
            without attention, experts that are not SwiGLU, values wider than keys, heads that are no multiple of 8, BLOOM by
            slices, ALiBi in bf16, a rotary scaling that `max_length` tokens would exceed, or an architecture that is not tested.
    """
    if config.model_type not in _PARTS:
        raise unsupported(config, "is not among the architectures that are tested")
    _check_counts(config)
    check_numbers(config)
    if config.model_type in MIXTURES and (config.model_type != "granitemoehybrid" or config.num_local_experts):
        _check_experts(config)
    if getattr(config, "use_bidirectional_attention", False) or not getattr(config, "is_causal", True):
        raise unsupported(config, "attends to later tokens, which generating one after another cannot")
    linear = {"linear_attention"} if config.model_type in LINEAR_ATTENTION else set()
    other = {*(_declared(config, "layer_types") or ())} - {"full_attention", "sliding_attention"} - linear
    if other:
        raise unsupported(config, f"has layers of {' and '.join(sorted(other))}, and a layer's state is keys and values here")
    if linear:
        _check_linear_attention(config)
    if (_declared(config, "v_head_dim") or 0) > key_sizes(config)[1]:
        raise unsupported(config, f"has values of {config.v_head_dim} a head, more than its keys, and a KV buffer holds both")
    if key_sizes(config)[1] % 8:
        raise unsupported(config, f"has heads of {key_sizes(config)[1]}, and ONNX Runtime's attention takes multiples of 8")
    if config.model_type == "bloom" and config.slow_but_exact and config.pretraining_tp > 1:
        raise unsupported(config, "with slow_but_exact multiplies slices and leaves out biases")
    if config.model_type == "falcon" and config.alibi:
        raise unsupported(
            config, "has linear biases on its attention (ALiBi) in bf16, which are rounded as no operator rounds them"
        )
    _check_rotary(config, max_length)
    longest = _declared(config, "max_seq_len") or getattr(config, "max_position_embeddings", None)  # MPT's name, the others'
    if longest and max_length > longest:
        raise ModelNotSupportedError(f"--max-length {max_length}: the model has {longest} positions", f"choose {longest} or less")


def _check_counts(config: Any) -> None:
    for name in _COUNTS:
        value = getattr(config, name, None)
        if value is None and not (name == "qk_head_dim" and config.model_type in LATENT):
            continue
        if not isinstance(value, int) or value < 1:
            raise _no_count(config, name, value)
    if config.num_hidden_layers > _MOST_LAYERS:
        raise _no_count(config, "num_hidden_layers", config.num_hidden_layers, f"write {_MOST_LAYERS} or less")
    for window in (attention_window(config, layer) for layer in range(config.num_hidden_layers)):
        if window is not None and window < 1:
            raise _no_count(config, "window_size" if config.model_type == "gpt_neo" else "sliding_window", window)
    heads, (key_heads, _) = config.num_attention_heads, key_sizes(config)
    if heads % key_heads:
        raise ModelNotSupportedError(
            f"its config.json has {heads} heads, no multiple of the {key_heads} that their keys have", "correct that setting",
            where=place(config),
        )  # fmt: skip


def _check_experts(config: Any) -> None:
    """What a router is told: more than there is to choose from fails where it is traced, and uneven groups mix tokens.

    And what its experts are, which is one operator's.
    """
    name = "num_experts" if hasattr(config, "num_experts") else "num_local_experts"
    experts = getattr(config, name)
    if experts is None or experts < 1:
        raise _no_count(config, name, experts)
    chosen, groups = config.num_experts_per_tok, getattr(config, "n_group", None)
    each = chosen if isinstance(chosen, list) else [chosen]  # Hunyuan's may be one a layer
    if not all(isinstance(count, int) and 1 <= count <= experts for count in each):
        raise _no_count(config, "num_experts_per_tok", chosen, f"write 1 to {experts}, the number of experts")
    if groups is not None and (groups < 1 or experts % groups):
        raise _no_count(config, "n_group", groups, f"write a divisor of {experts}, the number of experts")
    if groups and not 1 <= (config.topk_group or 1) <= groups:
        raise _no_count(config, "topk_group", config.topk_group, f"write 1 to {groups}, which n_group is")
    if config.hidden_act not in ("silu", "swish"):
        raise unsupported(config, f"has experts with {config.hidden_act}, where ONNX Runtime's have silu")


def _check_linear_attention(config: Any) -> None:
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    if values % keys:
        remedy = f"write a multiple of {keys}, which linear_num_key_heads is"
        raise _no_count(config, "linear_num_value_heads", values, remedy)
    if config.linear_conv_kernel_dim < 2:
        raise _no_count(config, "linear_conv_kernel_dim", config.linear_conv_kernel_dim, "write 2 or more")
    if config.hidden_act not in ("silu", "swish"):
        raise unsupported(config, f"has convolutions with {config.hidden_act}, where ONNX's have silu")


def _no_count(config: Any, name: str, value: object, remedy: str = "write a whole number from 1 on") -> ModelNotSupportedError:
    spelled = config.attribute_map.get(name, name)
    return ModelNotSupportedError(f"{spelled} is {value!r} in its config.json", remedy, where=place(config))


def key_sizes(config: Any) -> tuple[int, int]:
    """Heads of a layer's keys and the size D of each; its values are as many, and as wide or widened."""
    heads: int = config.num_attention_heads
    if config.model_type in LATENT:
        return heads, config.qk_head_dim
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    one_for_all = _declared(config, "multi_query") and not _declared(config, "new_decoder_architecture")  # Falcon asks it first
    if one_for_all:
        return 1, size
    return _declared(config, "num_key_value_heads") or _declared(config, "num_kv_heads") or heads, size


def linear_states(config: Any) -> LinearAttention | None:
    """What layers with linear attention keep of a row; None: the model has none."""
    if config.model_type not in LINEAR_ATTENTION:
        return None
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    heads, size = config.linear_num_value_heads, config.linear_value_head_dim
    return LinearAttention(
        layers=tuple(index for index, kind in enumerate(config.layer_types) if kind == "linear_attention"),
        conv_state=(2 * keys + heads * size, config.linear_conv_kernel_dim - 1),  # of queries, keys and values
        recurrent_state=(heads, config.linear_key_head_dim, size),
    )


def expands_latents(layer: torch.nn.Module) -> bool:
    """Whether the layer's attention expands keys and values from a latent, which alone transformers would cache."""
    return hasattr(getattr(layer, "self_attn", None), "expand_kv")


def attention_window(config: Any, layer: int) -> int | None:
    """Tokens that a query of `layer` attends to, itself included (transformers' `sliding_window`); None: all before it."""
    if config.model_type == "gpt_neo":
        return config.window_size if config.attention_layers[layer] == "local" else None
    window: int | None = _declared(config, "sliding_window")
    if window is None or _declared(config, "use_sliding_window") is False:
        return None
    return window if layer_kind(config, layer) in (None, "sliding_attention") else None


def layer_kind(config: Any, layer: int) -> str | None:
    """What transformers' `layer_types` says of `layer`: "sliding_attention", "full_attention"; None: the layers are alike."""
    kinds = _declared(config, "layer_types")
    return None if kinds is None else kinds[layer]


def _declared(config: Any, name: str) -> Any:
    """A setting that this kind of model has; config.json may hold others, left from other kinds, which its code never reads."""
    return getattr(config, name) if name in {field.name for field in fields(config)} else None


def _check_rotary(config: Any, max_length: int) -> None:
    """A scaling that has other frequencies or factors for runs beyond the original length is exact only below it.

    A `dynamic` one is beyond the model's own length, which `check_supported` allows no run, whatever original length it names.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    for scaling in (rope, *(kind for kind in rope.values() if isinstance(kind, dict))):  # some have one a kind of layer
        if scaling.get("rope_type") != "longrope" and "long_mscale" not in scaling:
            continue
        name = "original_max_position_embeddings"
        original = getattr(config, name, None) or scaling.get(name)
        if not isinstance(original, int):
            raise _no_count(config, name, original)
        if max_length > original:
            raise ModelNotSupportedError(
                f"{config.model_type} changes its rotary frequencies beyond {original} tokens, --max-length is {max_length}",
                f"export with --max-length {original} or less",
            )


def settled(rotary: Any) -> Any:
    """The rotary module with the frequencies that it starts with, which no run outgrows (`check_supported`).

    With `dynamic` and `longrope` it would ask each time how long the run is, which cannot be traced.
    """
    kinds, scaling = rotary.rope_type, rotary.config.rope_parameters
    rotary.rope_type = dict.fromkeys(kinds, "default") if isinstance(kinds, dict) else "default"  # some have one a kind of layer
    if hasattr(rotary, "recomposition_frequencies"):  # of three positions, in time and place, which are one in text
        rotary.recomposition_frequencies = lambda frequencies: torch.cat((frequencies[0], frequencies[0]), dim=-1)
    if "short_mscale" in scaling:  # Phi MoE asks its configuration
        rotary.config = copy.copy(rotary.config)
        rotary.config.rope_parameters = {**scaling, "rope_type": "default", "attention_factor": scaling["short_mscale"]}
    return rotary
