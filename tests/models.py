"""The tests' models: a tiny one of every supported architecture, and of some a second one with other settings."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import transformers

from tests.model_settings import CAPPED, GATED, GROUPED, IDS, LAYERS, SETTINGS, SIZES, VOCABULARY
from tests.model_settings import MAX_LENGTH as MAX_LENGTH

_OPT = {**SIZES, **IDS, "ffn_dim": 96, "word_embed_proj_dim": 64, "init_std": 0.1}

CONFIGS: dict[str, Callable[[], Any]] = {
    "opt": lambda: transformers.OPTConfig(**_OPT),
    "opt-350m": lambda: transformers.OPTConfig(**{**_OPT, "word_embed_proj_dim": 32, "do_layer_norm_before": False}),
    "gpt2": lambda: transformers.GPT2Config(
        n_layer=LAYERS, n_embd=64, n_head=4, vocab_size=VOCABULARY, n_positions=64, initializer_range=0.1
    ),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**GATED, **IDS),
    "llama": lambda: transformers.LlamaConfig(**GROUPED, **IDS),
    "mistral": lambda: transformers.MistralConfig(**GROUPED, **IDS, sliding_window=None),
    "qwen2": lambda: transformers.Qwen2Config(**GROUPED, **IDS, tie_word_embeddings=True),  # as in the small ones
    "qwen3": lambda: transformers.Qwen3Config(**GROUPED, **IDS, head_dim=32),
    "gemma2": lambda: transformers.Gemma2Config(**GROUPED, **IDS, **CAPPED),
    "gemma3": lambda: transformers.Gemma3TextConfig(**GROUPED, **IDS, head_dim=16, sliding_window=7),  # but in the last layer
    "phi3": lambda: transformers.Phi3Config(**GROUPED, **IDS),
}
RELATIVES: dict[str, Callable[[], Any]] = {
    name: functools.partial(transformers.AutoConfig.for_model, name, **{**GROUPED, **IDS, **more})
    for name, more in SETTINGS.items()
}
# Relatives that, with the variations below and the tests that name a model, take every branch of exporter, passes and runtime
# that all relatives take (coverage.py, 2026-11-29), two whose layers differ in their heads, and one that scales queries by
# position. `make survey` runs the others; some of those (Mixtral, LFM2, Falcon-H1, ..) also run for cuda and tensorrt-rtx by
# default.
EVERY_PATH = (
    "aria_text", "bloom", "codegen", "deepseek_v2", "falcon", "flex_olmo", "gemma3n_text", "glm4", "glm4_moe", "gpt_bigcode",
    "gpt_neo", "gpt_oss", "gptj", "kimi_linear", "laguna", "lara_mini", "llama4_text", "mamba", "mimo_v2_flash", "ministral3",
    "modernbert-decoder", "mpt", "nanochat", "olmo_hybrid", "qwen3_5_text", "recurrent_gemma", "stablelm", "vaultgemma",
    "xglm",
)  # fmt: skip
EACH_RELATIVE = [pytest.param(name, marks=() if name in EVERY_PATH else pytest.mark.survey) for name in RELATIVES]
# models of the architectures above with other settings
VARIATIONS: dict[str, Callable[[], Any]] = {
    # more positions than TensorRT's one-token kernel takes, and enough query heads that some may be turned into tokens
    "llama_long": lambda: transformers.LlamaConfig(
        **{**GROUPED, **IDS, "num_attention_heads": 8, "head_dim": 16, "max_position_embeddings": 32768}
    ),
    # layers 3 and 4 read the keys and values of layer 1, layer 5 those of layer 2: 3 warm-up layers
    "reading_others": functools.partial(
        RELATIVES["gemma4_text"], num_kv_shared_layers=3, use_double_wide_mlp=True, initializer_range=0.1,
        max_position_embeddings=1200,  # room for prompts of two passes
    ),
    # experts alongside each layer's own MLP, with GELU
    "gemma4_moe": functools.partial(
        RELATIVES["gemma4_text"], enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=64,
        hidden_size_per_layer_input=0,
    ),
    # hybrids without experts
    "nemotron_h_dense": functools.partial(
        RELATIVES["nemotron_h"], layers_block_type=["linear_attention", "mlp", "full_attention"] * (LAYERS // 3)
    ),
    "nemotron_h_without_mamba": functools.partial(
        RELATIVES["nemotron_h"], layers_block_type=["mlp", "full_attention"] * (LAYERS // 2)
    ),
    # experts of another width than the layers
    "nemotron_h_latent": functools.partial(
        RELATIVES["nemotron_h"], layers_block_type=["moe", "full_attention"] * (LAYERS // 2), moe_latent_size=32
    ),
}  # fmt: skip

LEAST_LAYERS = {"gemma3n_text": 3, "reading_others": 4}  # in a schedule, else 2: layers that others read are never skipped
