"""Which configurations are refused, and that those next to them are not."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from skipdecode.errors import ModelNotSupportedError
from skipdecode.exporter.architectures import SUPPORTED
from skipdecode.exporter.model_names import DECODERS
from skipdecode.exporter.refused_models import REASONS
from skipdecode.exporter.supported import check_supported
from tests.models import CONFIGS, LAYERS, MAX_LENGTH, RELATIVES


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("llama", {"per_layer_config": {1: {"num_key_value_heads": 1}}}, "llama has settings for individual layers"),
        ("gemma4_text", {"per_layer_config": {1: {"intermediate_size": 32}}}, "gemma4_text has settings for individual layers"),
        ("gemma4_text", {"per_layer_config": {1: {"skip": ["mlp"]}}}, "gemma4_text has settings for individual layers"),
        ("gemma4_text", {"global_head_dim": 20}, "has heads of size 20"),
        ("gemma4_text", {"attention_k_eq_v": True, "num_global_key_value_heads": 3}, "4 heads, not a multiple of its 3"),
        ("mimo_v2_flash", {"num_key_value_heads": 4}, "4 heads, not a multiple of its 8"),  # in layers with a window
        ("gemma4_text", {"num_kv_shared_layers": 4}, "num_kv_shared_layers is 4 in its config.json; write 0 to 3"),
        ("gemma4_text", {"num_kv_shared_layers": -1}, "num_kv_shared_layers is -1 in its config.json; write 0 to 3"),
        ("gemma4_text", {"num_kv_shared_layers": 7}, "num_kv_shared_layers is 7 in its config.json; write 0 to 3"),
        (
            "gemma4_text",
            {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "hidden_activation": "silu"},
            "has experts with silu, but ours have gelu_pytorch_tanh",
        ),
        ("gemma4_text", {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5}, "top_k_experts is 5 .*; write 1 to 4"),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "attends to later tokens"),
        ("modernbert-decoder", {"local_attention": 0}, "half of local_attention.* is -1 .*; write a whole number, 1 or more"),
    ],
)
def test_layers_with_settings_of_their_own_and_sizes_that_nothing_can_compute_are_refused(
    name: str, settings: dict[str, Any], says: str
) -> None:
    make = (CONFIGS | RELATIVES)[name]
    config = make(**settings) if name in RELATIVES else type(make())(**{**make().to_dict(), **settings})
    with pytest.raises(ModelNotSupportedError, match=says):
        check_supported(config, MAX_LENGTH)


def test_models_that_were_looked_at_are_refused_for_a_reason() -> None:
    assert not {*REASONS} & {*SUPPORTED, *DECODERS} and {*REASONS} <= {*CONFIG_MAPPING}
    for name in ("zamba2", "mllama_text_model", "rwkv"):
        with pytest.raises(ModelNotSupportedError, match=f"^model: {name} {REASONS[name]}; docs/models.md says which"):
            check_supported(CONFIG_MAPPING[name](), MAX_LENGTH)


def test_values_wider_than_keys_are_refused() -> None:
    """A KV buffer has one size for both."""
    config = RELATIVES["minicpm3"]()
    config.v_head_dim = config.qk_head_dim
    check_supported(config, 48)
    config.v_head_dim += 1
    with pytest.raises(ModelNotSupportedError, match="has values of 25 numbers a head, more than its keys"):
        check_supported(config, 48)


def test_falcons_linear_biases_and_lengths_beyond_mpts_own_are_refused() -> None:
    config = RELATIVES["falcon"]()
    config.alibi = True
    with pytest.raises(ModelNotSupportedError, match="linear attention biases"):
        check_supported(config, 48)
    config = RELATIVES["mpt"]()
    check_supported(config, config.max_seq_len)
    with pytest.raises(ModelNotSupportedError, match="the model has 2048 positions"):
        check_supported(config, config.max_seq_len + 1)


@pytest.mark.parametrize("factor", [4.0, 0.5])
def test_yarn_reaches_its_factor_times_the_original_length_whatever_the_positions_in_config_json(factor: float) -> None:
    """Qwen's model cards tell to add it, and leave max_position_embeddings as it is; 0.5: the model's own positions stay."""
    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": 32}
    settings = {**CONFIGS["qwen3"]().to_dict(), "rope_parameters": None, "rope_scaling": scaling, "max_position_embeddings": 40}
    config, longest = type(CONFIGS["qwen3"]())(**settings), 128 if factor > 1 else 40
    check_supported(config, longest)
    with pytest.raises(ModelNotSupportedError, match=f"the model has {longest} positions"):
        check_supported(config, longest + 1)
    config.rope_parameters["factor"] = "4.0"  # which transformers refuses when the model is built
    check_supported(config, 40)


def test_yarn_gives_a_model_with_a_table_of_positions_no_more_of_them() -> None:
    config = CONFIGS["opt"]()
    config = type(config)(
        **{**config.to_dict(), "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}
    )
    with pytest.raises(ModelNotSupportedError, match="the model has 64 positions"):
        check_supported(config, 65)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("llama", {"is_causal": False}, "attends to later tokens"),
        ("llama", {"head_dim": 20}, "has heads of size 20, but ONNX Runtime's attention takes multiples of 8"),
        ("gemma3", {"layer_types": ["chunked_attention"] * LAYERS}, "has layers of chunked_attention, which cannot be exported"),
        ("bloom", {"slow_but_exact": True, "pretraining_tp": 2}, "leaves out biases"),
        ("qwen3_5_text", {"linear_num_value_heads": 5}, "linear_num_value_heads is 5 .*; write a multiple of 2"),
        ("qwen3_5_text", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1 .*; write a whole number, 2 or more"),
        ("qwen3_5_text", {"hidden_act": "gelu"}, "has convolutions with gelu, but ONNX's have silu"),
        ("nemotron_h", {"mamba_hidden_act": "relu"}, "has convolutions with relu, but ONNX's have silu"),
        ("nemotron_h", {"mamba_num_heads": 3}, "mamba_num_heads is 3 .*; write a multiple of 2"),
        ("bamba", {"mamba_d_state": 0}, "mamba_d_state is 0 .*; write a whole number, 1 or more"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "has experts with silu, but ONNX Runtime's have relu2"),
        ("lfm2", {"conv_L_cache": 1}, "conv_L_cache is 1 .*; write a whole number, 2 or more"),
        ("recurrent_gemma", {"conv1d_width": 1}, "conv1d_width is 1 .*; write a whole number, 2 or more"),
        ("recurrent_gemma", {"lru_width": 42}, "lru_width is 42 .*; write a multiple of 4, the value of num_attention_heads"),
        ("recurrent_gemma", {"attention_window_size": 0}, "attention_window_size is 0 .*; write a whole number, 1 or more"),
        (
            "llama4_text",
            {"attention_chunk_size": 47},
            "attends in chunks of 47 tokens, but --max-length is 48; export with .* 47",
        ),
        (
            "deepseek_v32",
            {"index_topk": 47},
            "attends to 47 tokens that it chooses, but --max-length is 48; export with .* 47 or less",
        ),
        ("axk2", {"index_topk": 47}, "attends to 47 tokens that it chooses, but --max-length is 48"),
        ("deepseek_v32", {"index_topk": 0}, "index_topk is 0 .*; write a whole number, 1 or more"),
        ("llama4_text", {"attention_chunk_size": 0}, "attention_chunk_size is 0 .*; write a whole number, 1 or more"),
        ("llama4_text", {"floor_scale": 0}, "floor_scale is 0 in its config.json; write a number above 0"),
        (
            "llama4_text",
            {"num_experts_per_tok": 2},
            "gives each of a token's 2 experts a different input, which no operator does",
        ),
    ],
)
def test_settings_that_no_engine_could_follow_are_refused(name: str, settings: dict[str, Any], message: str) -> None:
    """Unrefused, the first would be exported as if it were not there, and the second would fail when it runs."""
    config = (CONFIGS | RELATIVES)[name]()
    check_supported(config, 48)
    for key, value in settings.items():
        setattr(config, key, value)
    with pytest.raises(ModelNotSupportedError, match=message):
        check_supported(config, 48)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("bloom", {"slow_but_exact": False, "pretraining_tp": 4}),  # as in its largest model
        ("bloom", {"slow_but_exact": True, "pretraining_tp": 1}),
        ("gemma4_text", {"use_bidirectional_attention": "vision"}),  # only among the parts of an image
        ("mixtral", {"num_experts_per_tok": 5}),  # all of them
        ("hunyuan_v1_moe", {"moe_topk": [3, 3, 1, 5, 3, 3]}),  # each layer's own
        ("mixtral", {"hidden_act": "swish"}),
        ("qwen3_5_text", {"hidden_act": "swish"}),
        ("deepseek_v3", {"num_experts_per_tok": 4}),  # all in the groups that are chosen
        ("deepseek_v3", {"topk_group": 4, "num_experts_per_tok": 8}),
    ],
)
def test_settings_next_to_those_that_are_refused_are_accepted(name: str, settings: dict[str, Any]) -> None:
    config = RELATIVES[name]()
    for key, value in settings.items():
        setattr(config, key, value)
    check_supported(config, 48)


def test_a_rotary_scaling_of_only_one_kind_of_layer_is_refused_too() -> None:
    config = CONFIGS["gemma3"]()
    check_supported(config, 48)
    config.rope_parameters["full_attention"] |= {"rope_type": "longrope", "original_max_position_embeddings": 16}
    with pytest.raises(ModelNotSupportedError, match="beyond 16 tokens"):
        check_supported(config, 48)


def test_a_factor_for_long_runs_is_refused_whatever_the_scaling_is_called() -> None:
    """As Phi MoE's."""
    config = RELATIVES["phimoe"]()
    config.rope_parameters |= {"short_mscale": 1.25, "long_mscale": 7.0, "original_max_position_embeddings": 48}
    check_supported(config, 48)
    config.rope_parameters["original_max_position_embeddings"] = 47
    with pytest.raises(
        ModelNotSupportedError, match="beyond 47 tokens, but --max-length is 48; export with --max-length 47 or less"
    ):
        check_supported(config, 48)
