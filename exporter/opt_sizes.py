"""OPT's short names and their configurations, kept here so that `opt-6.7b --random-weights` needs no network."""

from __future__ import annotations

from typing import Any

# Zhang et al. 2022 (arXiv 2205.01068), table 1: layers, width, heads
_SIZES = {
    "125m": (12, 768, 12), "350m": (24, 1024, 16), "1.3b": (24, 2048, 32), "2.7b": (32, 2560, 32), "6.7b": (32, 4096, 32),
    "13b": (40, 5120, 40), "30b": (48, 7168, 56), "66b": (64, 9216, 72),
}  # fmt: skip


def opt_hub_id(model: str) -> str | None:
    """The hub id of an OPT model, given its short name (`opt-6.7b`) or the id itself; None: not an OPT model."""
    size = model.lower().removeprefix("facebook/").removeprefix("opt-")
    return f"facebook/opt-{size}" if size in _SIZES and "opt-" in model.lower() else None


def opt_config(hub_id: str) -> Any:
    """transformers' configuration for a hub id that `opt_hub_id` returned."""
    from transformers import OPTConfig

    layers, width, heads = _SIZES[hub_id.removeprefix("facebook/opt-")]
    post_norm = hub_id == "facebook/opt-350m"
    return OPTConfig(
        num_hidden_layers=layers, hidden_size=width, ffn_dim=4 * width, num_attention_heads=heads,
        do_layer_norm_before=not post_norm, word_embed_proj_dim=512 if post_norm else width, name_or_path=hub_id,
    )  # fmt: skip
