"""Which Hugging Face decoders are supported, where each keeps its parts, and what kinds of layers it has."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from skipdecode.errors import ModelNotSupportedError
from skipdecode.exporter.config_json import config_origin
from skipdecode.exporter.refused_models import REASONS
from skipdecode.model import KeyValueSizes

# mixtures of experts, whose layers choose a few of many MLPs per token; Granite 4, Jamba and Nemotron-H may have no experts
MIXTURES = (
    "afmoe", "aria_text", "axk1", "axk2", "bailing_hybrid", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1",
    "ernie4_5_moe", "exaone_moe", "flex_olmo", "flint", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt_oss", "granitemoe",
    "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "hunyuan_v1_moe", "hy_v3", "jamba", "kimi_linear", "kolibri1",
    "laguna", "lara_mini", "lfm2_moe", "llama4_text", "mellum", "mimo_v2_flash", "minimax_m2", "mistral4", "mixtral",
    "nemotron_h", "olmoe", "phimoe", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "sarvam_mla", "sarvam_moe",
    "solar_open",
)  # fmt: skip
# models whose keys and values are expanded from one latent (DeepSeek-V2, arXiv 2405.04434, section 2.1)
LATENT = (
    "axk1", "axk2", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa",
    "kimi_linear", "minicpm3", "mistral4", "sarvam_mla", "youtu",
)  # fmt: skip
# models without attention: each layer is only a Mamba block
STATE_ONLY = ("falcon_mamba", "mamba", "mamba2")
# models with layers other than attention -> transformers' names of those kinds; Granite 4 may have attention layers only
HYBRIDS = {
    # Gated DeltaNet
    **dict.fromkeys(("lara_mini", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), ("linear_attention",)),
    **dict.fromkeys(("bailing_hybrid", "kimi_linear"), ("linear_attention",)),  # Kimi Delta Attention
    **dict.fromkeys(("bamba", "granitemoehybrid"), ("linear_attention",)),  # Mamba-2, as in Nemotron-H and Falcon-H1 below
    **dict.fromkeys(("jamba", *STATE_ONLY), ("linear_attention",)),  # Mamba; mamba2 has Mamba-2
    "nemotron_h": ("linear_attention", "mlp", "moe"),  # a layer is one of these or attention
    "recurrent_gemma": ("linear_attention",),  # Griffin's recurrent block
    "falcon_h1": ("hybrid",),  # Mamba-2 and attention in parallel
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), ("conv",)),
}
# models whose layers may differ in number and size of KV heads, or read the keys and values of other layers
VARYING_KV = ("gemma3n_text", "gemma4_text", "gemma4_unified_text")
# models older than transformers' attention interface (see own_attention), or that rotate by a stored table (CodeGen, GPT-J)
OWN_ATTENTION = ("bloom", "codegen", "falcon", "gpt_neo", "gptj", "mpt", "xglm")
# models that apply their final norm, which has no weights, between embedding and layers too
NORM_ON_BOTH_ENDS = ("nanochat",)
# models whose attention sees only `index_topk` tokens that an indexer chooses -> a pattern of the indexer's parameters; no bundle
# needs them, since `check_supported` refuses rows of more than `index_topk` tokens
INDEXED = dict.fromkeys(("axk2", "deepseek_v32", "glm_moe_dsa"), r"\.indexer\.")
# the activation of Gemma 4's experts, where those of most models have SwiGLU
EXPERTS_GELU = "gelu_pytorch_tanh"
# models whose checkpoints may hold experts as MXFP4, which is dequantised as it is read
MXFP4_EXPERTS = ("gpt_oss",)
# model type -> names in the base model: (owner of the layers, layers, final norms and projections in order, rotary)
_PARTS = {
    "opt": ("decoder", "layers", ("final_layer_norm", "project_out"), None),
    **dict.fromkeys(("bloom", "codegen", "gpt2", "gpt_bigcode", "gpt_neo", "gptj"), ("", "h", ("ln_f",), None)),
    **dict.fromkeys(("biogpt", "xglm"), ("", "layers", ("layer_norm",), None)),
    "falcon": ("", "h", ("ln_f",), "rotary_emb"),
    **dict.fromkeys(("bamba", "falcon_h1"), ("", "layers", ("final_layernorm",), "rotary_emb")),
    "modernbert-decoder": ("", "layers", ("final_norm",), "rotary_emb"),
    "mpt": ("", "blocks", ("norm_f",), None),
    "persimmon": ("", "layers", ("final_layernorm",), "rotary_emb"),
    "gpt_neox": ("", "layers", ("final_layer_norm",), "rotary_emb"),
    "phi": ("", "layers", ("final_layernorm",), "rotary_emb"),
    **dict.fromkeys(
        (
            "apertus", "apertus1p5_text", "arcee", "bitnet", "cohere", "cohere2", "cohere_compass_text", "cwm", "ernie4_5",
            "exaone", "exaone4", "gemma", "gemma2", "gemma3_text", "gemma4_text", "gemma4_unified_text", "glm", "glm4",
            "granite", "granite_swa", "helium", "hunyuan_v1_dense", "hyperclovax", "internlm3", "iquestcoder", "jais2",
            "llama", "minicpm3", "ministral", "ministral3", "mistral", "muse_glimmer_text", "nanochat", "nemotron", "olmo",
            "olmo2", "olmo3", "olmo_hybrid", "phi3", "qwen2", "qwen3", "qwen3_5_text", "seed_oss", "smollm3", "stablelm",
            "starcoder2", "vaultgemma", "youtu", *MIXTURES,
        ),
        ("", "layers", ("norm",), "rotary_emb"),
    ),
    "gemma3n_text": ("", "layers", ("altup_unembed_projections", "norm"), "rotary_emb"),
    "jamba": ("", "layers", ("final_layernorm",), None),
    "kimi_linear": ("", "layers", ("norm",), None),
    "recurrent_gemma": ("", "layers", ("final_norm",), None),
    **dict.fromkeys(("nemotron_h", *STATE_ONLY), ("", "layers", ("norm_f",), None)),
    **dict.fromkeys(("lfm2", "lfm3"), ("", "layers", ("embedding_norm",), "rotary_emb")),
    "lfm2_moe": ("", "layers", ("embedding_norm",), "pos_emb"),
}  # fmt: skip
SUPPORTED = tuple(_PARTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderParts:
    """The pieces of a decoder that become separate graphs."""

    owner: torch.nn.Module  # the module whose forward runs embedding, layers and final norm
    layers: torch.nn.ModuleList  # its L layers, layer 0 nearest the embedding
    final_names: tuple[str, ...]  # its modules after the last layer, in order
    rotary: torch.nn.Module | None  # gives cos and sin [B,S,rotary D]
    prefix: str  # of the layers' parameter names, such as "model.layers."


def register_language_model(config: Any) -> None:
    """Register with AutoModelForCausalLM a model that transformers 5.24 has only inside vision-language models."""
    if config.model_type in ("mistral4", "muse_glimmer_text"):
        from skipdecode.exporter import text_models

        text_models.register()


def decoder_parts(model: torch.nn.Module, kind: str | None = None) -> DecoderParts:
    """Find the parts of a causal language model.

    Args:
        kind: its entry in `SUPPORTED`, where `model.config.model_type` is another.

    Raises:
        ModelNotSupportedError: the architecture is not in `SUPPORTED`.
    """
    config: Any = model.config
    if kind is None:
        check_known(config)
    owner_name, layers_name, final_names, rotary_name = _PARTS[kind or config.model_type]
    base = base_name(model)
    owner = getattr(model, base, model)  # a model without a head is its own base
    owner = getattr(owner, owner_name) if owner_name else owner
    present_names = tuple(name for name in final_names if getattr(owner, name, None) is not None)
    path = ".".join(part for part in (base, owner_name, layers_name) if part)
    return DecoderParts(
        owner=owner,
        layers=getattr(owner, layers_name),
        final_names=present_names,
        rotary=getattr(owner, rotary_name) if rotary_name else None,
        prefix=f"{path}.",
    )


def base_name(model: torch.nn.Module) -> str:
    """The attribute under which a model with a head holds the model without it.

    Llama 4's `base_model_prefix` belongs to its vision-language model.
    """
    return "model" if model.config.model_type == "llama4_text" else model.base_model_prefix


def decoder_layers(model: torch.nn.Module) -> torch.nn.ModuleList:
    """The L decoder layers of `model`, layer 0 nearest the embedding."""
    return decoder_parts(model).layers


def check_known(config: Any) -> None:
    """Raise ModelNotSupportedError unless the architecture is in `SUPPORTED`."""
    if config.model_type in REASONS:
        raise unsupported_error(config, REASONS[config.model_type], "docs/models.md says which models can be exported")
    if config.model_type not in _PARTS:
        raise unsupported_error(config, "is not among the supported architectures", f"choose one of {', '.join(SUPPORTED)}")


def unsupported_error(config: Any, why: str, remedy: str = "docs/limits.md says what can be exported") -> ModelNotSupportedError:
    """The error that refuses a configuration; `why` completes a sentence that starts with the model type."""
    return ModelNotSupportedError(f"{config.model_type} {why}", remedy, where=config_origin(config))


def layer_config(config: Any, layer: int) -> Any:
    """The configuration of `layer`; in some models the number and size of heads differ between layers."""
    return config.per_layer_config[layer] if getattr(config, "is_heterogeneous", False) else config


def layer_configs(config: Any) -> list[Any]:
    """One `layer_config` for each kind of layer."""
    kinds = layer_kinds(config) if config.model_type in VARYING_KV else None
    return [layer_config(config, kinds.index(kind)) for kind in sorted({*kinds})] if kinds else [config]


def num_heads(config: Any) -> int:
    """NH, the query heads of layers without a number of their own; 0: the model has no attention."""
    heads: int = 0 if config.model_type in STATE_ONLY else config.num_attention_heads
    return heads


def layer_keys(config: Any, layer: int) -> KeyValueSizes:
    """KVH and D of a layer's keys; narrower values are widened to D. Both are 0 where the model has no attention."""
    settings = layer_config(config, layer)
    if settings.model_type in STATE_ONLY:
        return KeyValueSizes(num_heads=0, head_size=0)
    heads: int = settings.num_attention_heads
    if settings.model_type in LATENT:
        return KeyValueSizes(num_heads=heads, head_size=settings.qk_nope_head_dim + settings.qk_rope_head_dim)
    size = getattr(settings, "head_dim", None) or settings.hidden_size // heads
    # Falcon checks this first
    one_kv_head = declared_setting(settings, "multi_query") and not declared_setting(settings, "new_decoder_architecture")
    if one_kv_head:
        return KeyValueSizes(num_heads=1, head_size=size)
    kv_heads = declared_setting(settings, "num_key_value_heads") or declared_setting(settings, "num_kv_heads") or heads
    if settings.model_type == "mimo_v2_flash" and layer_kind(settings, layer) == "sliding_attention":
        kv_heads *= 2  # its layers do so, too
    return KeyValueSizes(num_heads=kv_heads, head_size=size)


def key_source(config: Any, layer: int) -> int | None:
    """The layer whose keys and values `layer` reads: the last of the same kind that has its own. None: it has its own."""
    shared = declared_setting(config, "num_kv_shared_layers") if config.model_type in VARYING_KV else 0
    first = config.num_hidden_layers - (shared or 0)
    kinds = layer_kinds(config)
    if layer < first or kinds is None:
        return None
    return max(below for below in range(first) if kinds[below] == kinds[layer])


def key_sources(config: Any) -> set[int]:
    """The layers whose keys and values others read."""
    sources = (key_source(config, layer) for layer in range(config.num_hidden_layers))
    return {source for source in sources if source is not None}


def returns_tuple(config: Any) -> bool:
    """Whether layers return a tuple that starts with the hidden state; attention weights or chosen tokens may follow."""
    return config.model_type in ("bamba", "bloom", "falcon", "falcon_h1", "glm_moe_dsa", "gpt_neo", "mpt")


def expands_latents(layer: torch.nn.Module) -> bool:
    """Whether the layer's attention expands keys and values from a latent; transformers would cache only the latent."""
    return hasattr(getattr(layer, "self_attn", None), "expand_kv")


def has_narrow_values(layer: torch.nn.Module) -> bool:
    """Whether the layer's values have fewer numbers a head than its keys, where its attention expands no latent."""
    attention = getattr(layer, "self_attn", None)
    return 0 < getattr(attention, "v_head_dim", 0) < getattr(attention, "head_dim", 0)


def attention_window(config: Any, layer: int) -> int | None:
    """Tokens that a query of `layer` attends to, its own included (transformers' `sliding_window`); None: no limit."""
    if config.model_type == "gpt_neo":
        return config.window_size if config.attention_layers[layer] == "local" else None
    # ModernBERT derives it from `local_attention`
    derived = config.model_type == "modernbert-decoder"
    window: int | None = config.sliding_window if derived else declared_setting(config, "sliding_window")
    # Qwen2 MoE writes 0 for no window
    if window is None or (window == 0 and declared_setting(config, "use_sliding_window") is False):
        return None
    return window if layer_kind(config, layer) in (None, "sliding_attention") else None


def layer_kinds(config: Any) -> list[str] | None:
    """transformers' `layer_types`, a kind per layer ("sliding_attention", "full_attention", ..); None: layers are alike."""
    kinds: list[str] | None = config.layer_types if config.model_type in HYBRIDS else declared_setting(config, "layer_types")
    return kinds


def has_experts(config: Any) -> bool:
    """Whether any layer is a mixture of experts."""
    if config.model_type == "nemotron_h":
        return "moe" in (layer_kinds(config) or ())
    if config.model_type == "gemma4_text":
        return bool(config.enable_moe_block)
    if config.model_type == "jamba":
        return any(count > 1 for count in config.layers_num_experts)
    return config.model_type in MIXTURES and (config.model_type != "granitemoehybrid" or bool(config.num_local_experts))


def experts_per_token_setting(config: Any) -> str:
    """The name of the setting for the number of experts per token."""
    return {"aria_text": "moe_topk", "gemma4_text": "top_k_experts"}.get(config.model_type, "num_experts_per_tok")


def experts_per_token(config: Any) -> int | list[int]:
    """The number of experts per token; Hunyuan may have a list with a number per layer."""
    count: int | list[int] = getattr(config, experts_per_token_setting(config))
    return count


def positions_setting(config: Any) -> str:
    """The name of the setting that holds how many positions the model has."""
    return "max_seq_len" if config.model_type == "mpt" else "max_position_embeddings"


def layer_kind(config: Any, layer: int) -> str | None:
    """The entry of `layer_kinds` for `layer`."""
    kinds = layer_kinds(config)
    return None if kinds is None else kinds[layer]


def declared_setting(config: Any, name: str) -> Any:
    """A setting that this type of model declares, be it by another name (`attribute_map`), else None.

    config.json may hold others that the model's code never reads.
    """
    declared = {field.name for field in fields(config)}
    return getattr(config, name) if config.attribute_map.get(name, name) in declared else None
