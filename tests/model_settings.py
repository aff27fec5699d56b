"""What the tests' models have in common, and what sets each of the relatives apart (`tests.models`)."""

from __future__ import annotations

from typing import Any

LAYERS, VOCABULARY, MAX_LENGTH = 6, 99, 48
SIZES = {
    "num_hidden_layers": LAYERS,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
}
GATED = {**SIZES, "intermediate_size": 96}
GROUPED = {**GATED, "num_key_value_heads": 2}
IDS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
# caps so low that the scores and logits of such small models reach them
CAPPED = {"head_dim": 16, "query_pre_attn_scalar": 4, "attn_logit_softcapping": 1.0, "final_logit_softcapping": 1.0}
_BY_POSITION = {  # Ministral 3 scales its queries by their position, from the original length on
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 4, "llama_4_scaling_beta": 0.1,
    "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
_EXPERTS = {"moe_intermediate_size": 48, "num_experts_per_tok": 3}
_ROUTED = {**_EXPERTS, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_group": 4, "topk_group": 2}
_ONE_GROUP = {"n_group": 1, "topk_group": 1}
_SHARED = {"num_experts": 8, "shared_expert_intermediate_size": 32, "head_dim": 16}
# layers of one kind, so that one trace serves all; what sets two kinds apart is tested with other models
_ALL_MIXED = {"mlp_layer_types": ["sparse"] * LAYERS}
_ALL_WINDOWED = {"layer_types": ["sliding_attention"] * LAYERS, "sliding_window": 5}
# attention whose keys and values are expanded from a latent
_LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 40, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}  # fmt: skip
# two layers of linear attention, then one of attention; keys have half as many heads as values, of another size
_DELTA_NET = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"] * (LAYERS // 3),
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24,
}  # fmt: skip
# Mamba-2, in which every two heads share keys
_MAMBA = {
    "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_expand": 2, "mamba_chunk_size": 4,
}  # fmt: skip
_CONVS = {"layer_types": ["conv", "conv", "full_attention"] * (LAYERS // 3)}
# layers that see all tokens have another number and size of heads
_GLOBAL_HEADS = {
    "head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "sliding_window": 5,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * (LAYERS // 3), "final_logit_softcapping": 30.0,
}  # fmt: skip
_THREE_POSITIONS = {  # positions in time, height and width, which are equal in text
    "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 2, 1],
    "mrope_interleaved": True,
}  # fmt: skip
# The same parts in another order, number or setting: architecture -> its settings on top of `GROUPED`.
SETTINGS: dict[str, dict[str, Any]] = {
    "afmoe": {
        **_EXPERTS,
        "num_experts": 5,
        "num_shared_experts": 1,
        "num_dense_layers": 0,
        "head_dim": 16,
        "sliding_window": 5,
        "route_scale": 2.5,
    },
    "apertus": {},
    "apertus1p5_text": {"output_vocab_size": 90},  # the head leaves out the tokens of images and sound
    "arcee": {},
    "aria_text": {"moe_num_experts": 5, "moe_topk": 3, "moe_num_shared_experts": 2, "intermediate_size": 48},
    "axk1": {**_ROUTED, **_LATENT, "n_routed_experts": 8, **_ALL_MIXED},
    # queries and the output's gate are one product; norms have gates; without groups of experts
    "axk2": {
        **_EXPERTS,
        **_LATENT,
        **_ALL_MIXED,
        "n_routed_experts": 8,
        "routed_scaling_factor": 2.5,
        "index_topk": MAX_LENGTH,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "gated_norm_rank": 8,
    },
    # head_dim is that of its linear attention; transformers then sets it to the size of the rotary part
    "bailing_hybrid": {
        **_ROUTED,
        **_LATENT,
        **_ALL_MIXED,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_experts": 8,
        "head_dim": 8,
        "layer_types": _DELTA_NET["layer_types"],
    },
    "bamba": {**_MAMBA, "attn_layer_indices": [2, 5]},
    "biogpt": {},
    "bitnet": {},
    "bloom": {},
    "codegen": {"rotary_dim": 16},
    "cohere": {"use_qk_norm": True},
    "cohere2": {"sliding_window": 5},
    "cohere2_moe": {
        "head_dim": 16,
        "num_experts": 5,
        "num_shared_experts": 1,
        "expert_selection_fn": "sigmoid",
        "sliding_window": 5,
    },
    # layers that see all tokens have no rotary embedding
    "cohere_compass_text": {
        "head_dim": 16,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [4, 2, 2]},
            "full_attention": None,
        },
    },
    "cwm": {"head_dim": 16, "sliding_window": 5},
    "deepseek_v2": {
        **_EXPERTS,
        **_LATENT,
        "n_routed_experts": 8,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
    },
    "deepseek_v32": {
        **_ROUTED,
        **_LATENT,
        **_ALL_MIXED,
        "n_routed_experts": 8,
        "index_topk": MAX_LENGTH,
        "index_n_heads": 2,
        "index_head_dim": 16,
    },
    # some layers reuse the tokens that a layer below has chosen
    "glm_moe_dsa": {
        **_ROUTED,
        **_LATENT,
        **_ALL_MIXED,
        "n_routed_experts": 8,
        "index_topk": MAX_LENGTH,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk_freq": 2,
    },
    "deepseek_v3": {**_ROUTED, **_LATENT, "n_routed_experts": 8, "first_k_dense_replace": 0},
    "dots1": {**_ROUTED, "n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 0},
    "ernie4_5": {"head_dim": 16},
    "ernie4_5_moe": {
        "moe_intermediate_size": 48,
        "moe_k": 3,
        "moe_num_experts": 5,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 0,
    },
    "exaone": {},
    "exaone4": {"sliding_window": 5},
    "exaone_moe": {**_ROUTED, "num_experts": 8, "sliding_window": 5, **_ALL_MIXED},
    "falcon_h1": {
        **_MAMBA,
        "mamba_d_ssm": None,
        "mamba_rms_norm": True,
        "ssm_multipliers": [0.5, 0.7, 1.2, 0.9, 1.1],
        "key_multiplier": 0.6,
    },
    "falcon_mamba": {"state_size": 16, "use_bias": True},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False},
    "flex_olmo": {"num_experts_per_tok": 3, "num_experts": 5},
    "flint": {**_EXPERTS, **_SHARED, "mlp_only_layers": [], **_ALL_WINDOWED},
    "gemma": {"head_dim": 32},
    # some layers have sparse gates; all but two read the keys and values of other layers
    "gemma3n_text": {
        "head_dim": 16,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
        "vocab_size_per_layer_input": VOCABULARY - 8,
        "hidden_size_per_layer_input": 24,
        "num_kv_shared_layers": 4,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.95, 0.0] * (LAYERS // 2),
    },
    "gemma4_text": {
        **_GLOBAL_HEADS,
        "attention_k_eq_v": False,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 24,
    },
    "gemma4_unified_text": _GLOBAL_HEADS,
    "glm": {"head_dim": 32},
    "glm4": {"head_dim": 16},
    "glm4_moe": {**_ROUTED, **_ONE_GROUP, "n_routed_experts": 8, "head_dim": 32, "use_qk_norm": True, "first_k_dense_replace": 0},
    "glm4_moe_lite": {**_EXPERTS, **_LATENT, "n_routed_experts": 8, "v_head_dim": 24, **_ALL_MIXED},  # values as wide as keys
    "gpt_bigcode": {},
    # layers alternate between all tokens and a window of them
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]], "window_size": 5},
    # a limit low enough to matter; rotary scaling is yarn by default
    "gpt_oss": {"num_local_experts": 5, "num_experts_per_tok": 3, "head_dim": 16, "sliding_window": 5, "swiglu_limit": 0.7},
    "gptj": {"num_attention_heads": 2, "rotary_dim": 16},  # half of each head
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.1, "logits_scaling": 2.0},
    # each layer has its own rotary base; 0: no rotary embedding
    "granite_swa": {
        "sliding_window": 5,
        "layer_types": ["full_attention", "sliding_attention"] * (LAYERS // 2),
        "layer_rope_theta": [100.0, 10000.0] * (LAYERS // 2),
        "embedding_multiplier": 3.0,
    },
    "granitemoe_swa": {"num_local_experts": 5, "num_experts_per_tok": 3, **_ALL_WINDOWED, "layer_rope_theta": [0] * LAYERS},
    "granitemoe": {"num_local_experts": 5, "num_experts_per_tok": 3},
    "granitemoehybrid": {
        "num_local_experts": 5,
        "num_experts_per_tok": 3,
        "shared_intermediate_size": 32,
        "position_embedding_type": "rope",
        "layer_types": ["full_attention"] * LAYERS,
    },
    "granitemoeshared": {"num_local_experts": 5, "num_experts_per_tok": 3, "shared_intermediate_size": 32},
    "helium": {"head_dim": 16},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"num_experts": 5, "moe_topk": 3, "head_dim": 16},
    "hy_v3": {**_EXPERTS, "num_experts": 8, "head_dim": 16, **_ALL_MIXED},
    "hyperclovax": {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.1, "logits_scaling": 2.0},
    "internlm3": {"head_dim": 16},
    "iquestcoder": {"head_dim": 16},
    "jais2": {},
    # layers of each kind with experts, and without
    "jamba": {
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "attn_layer_period": 3,
        "attn_layer_offset": 2,
        "mamba_d_state": 16,
        "mamba_dt_rank": 8,
    },
    # its attention has no rotary embedding
    "kimi_linear": {
        **_ROUTED,
        **_LATENT,
        **_DELTA_NET,
        "q_lora_rank": None,
        "num_experts": 8,
        "linear_num_heads": 2,
        "linear_head_dim": 24,
        **_ALL_MIXED,
    },
    "kolibri1": {**_EXPERTS, **_SHARED, **_ALL_WINDOWED},
    # layers with a window have twice as many heads, and other rotary frequencies
    "laguna": {
        **_EXPERTS,
        **_SHARED,
        **_ALL_MIXED,
        "sliding_window": 5,
        "layer_types": ["full_attention", "sliding_attention"] * (LAYERS // 2),
        "num_attention_heads_per_layer": [4, 8] * (LAYERS // 2),
        "moe_routed_scaling_factor": 2.5,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    # layers that see all tokens have no rotary embedding
    "lara_mini": {
        **_DELTA_NET,
        **_EXPERTS,
        **_SHARED,
        "layer_types": ["linear_attention", "sliding_attention", "full_attention"] * (LAYERS // 3),
        "sliding_window": 5,
    },
    "lfm2": {**_CONVS, "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {**_EXPERTS, **_CONVS, "num_experts": 5, "num_dense_layers": 0},
    "lfm3": {
        **_CONVS,
        "layer_types": ["conv", "sliding_attention", "full_attention"] * (LAYERS // 3),
        "sliding_window": 5,
        "head_dim": 16,
    },
    # every second layer has no rotary embedding, sees all tokens and scales its queries by position
    "llama4_text": {
        "num_local_experts": 5,
        "head_dim": 16,
        "intermediate_size_mlp": 80,
        "no_rope_layer_interval": 2,
        "floor_scale": 4,
        "attn_scale": 0.5,
    },
    "mamba": {"state_size": 8},
    "mamba2": {"num_heads": 4, "head_dim": 32, "state_size": 16, "n_groups": 2, "chunk_size": 4},
    "mellum": {**_EXPERTS, "num_local_experts": 5, "head_dim": 16, "sliding_window": 5},
    # layers with a window have attention sinks and twice as many key/value heads; values are narrower than keys
    "mimo_v2_flash": {
        **_ROUTED,
        **_ONE_GROUP,
        "n_routed_experts": 8,
        "num_key_value_heads": 1,
        "head_dim": 48,
        "v_head_dim": 32,
        "sliding_window": 5,
        "layer_types": ["full_attention", "sliding_attention"] * (LAYERS // 2),
        "mlp_layer_types": ["sparse"] * LAYERS,
    },
    "minimax_m2": {"num_local_experts": 5, "num_experts_per_tok": 3, "head_dim": 32},
    "minicpm3": {**_LATENT, "q_lora_rank": None},
    "ministral": {"head_dim": 16, "sliding_window": 5},
    "ministral3": {"head_dim": 16, "rope_parameters": _BY_POSITION},
    "mistral4": {
        **_ROUTED,
        **_LATENT,
        "n_routed_experts": 8,
        "rope_parameters": {**_BY_POSITION, "partial_rotary_factor": 1 / 3},
    },
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 5, "intermediate_size": 128},
    # layers that see all tokens have no rotary embedding; a factor and a cap low enough to matter
    "muse_glimmer_text": {
        "head_dim": 16,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
        "layer_rope_theta": [10000.0, 0] * (LAYERS // 2),
        "final_logit_softcapping": 1.0,
    },
    "modernbert-decoder": {"local_attention": 10},  # twice the window
    "mpt": {"attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.7}},
    "nanochat": {},
    "nemotron": {"head_dim": 32},
    "nemotron_h": {
        **_ROUTED,
        "layers_block_type": [kind for other in ("mlp", "moe") for kind in ("linear_attention", other, "full_attention")],
        "n_routed_experts": 8,
        "moe_shared_expert_intermediate_size": 32,
        "head_dim": 16,
        "mamba_num_heads": 4,
        "mamba_head_dim": 24,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 4,
    },
    "olmo": {"clip_qkv": 0.5},
    "olmo2": {},
    "olmo3": {"sliding_window": 5},
    "olmoe": {"num_experts": 5, "num_experts_per_tok": 3, "clip_qkv": 0.5},
    "persimmon": {},
    "phi": {"qk_layernorm": True},
    "phimoe": {"num_local_experts": 5},
    "olmo_hybrid": {**_DELTA_NET, "linear_allow_neg_eigval": True},
    # more channels than the hidden state has numbers; a window and a cap low enough to matter
    "recurrent_gemma": {"lru_width": 96, "attention_window_size": 5, "logits_soft_cap": 3.0, "w_init_variance_scale": 0.1},
    "qwen2_moe": {**_EXPERTS, "num_experts": 5, "shared_expert_intermediate_size": 32, "mlp_only_layers": [1]},
    "qwen3_5_moe_text": {**_DELTA_NET, **_EXPERTS, **_SHARED, "rope_parameters": _THREE_POSITIONS},
    "qwen3_5_text": {**_DELTA_NET, "head_dim": 16, "rope_parameters": _THREE_POSITIONS},
    "qwen3_moe": {**_EXPERTS, "num_experts": 5, "head_dim": 16, "norm_topk_prob": True},
    "qwen3_next": {**_DELTA_NET, **_EXPERTS, **_SHARED},
    "sarvam_mla": {**_ROUTED, **_LATENT, "q_lora_rank": None, "n_routed_experts": 8, "first_k_dense_replace": 0},
    "sarvam_moe": {**_ROUTED, "n_routed_experts": 8, "head_dim": 16, "first_k_dense_replace": 0},
    "seed_oss": {"head_dim": 16},
    "smollm3": {},  # every fourth layer has no rotary embedding
    "solar_open": {**_ROUTED, "n_routed_experts": 8, "head_dim": 16},
    "stablelm": {"qk_layernorm": True, "use_parallel_residual": True},
    "starcoder2": {"sliding_window": 5},
    "vaultgemma": {**CAPPED, "sliding_window": 5},
    "xglm": {"pad_token_id": 4, "ffn_dim": 96},  # position 2 has no embedding
    "youtu": {**_LATENT, "rope_interleave": False},
}
