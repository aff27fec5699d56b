"""Which architectures can be exported, and that each of them runs."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest
import transformers
from safetensors.torch import load_file, save_file

import skipdecode
from skipdecode import manifest as manifests
from skipdecode.errors import ModelNotSupportedError, ScheduleError
from skipdecode.exporter.architectures import SUPPORTED, layer_keys
from skipdecode.exporter.config_json import allowing_empty_weights
from skipdecode.exporter.export import ExportRequest, export
from skipdecode.exporter.reference import skip_schedule
from skipdecode.exporter.skeleton import build_skeleton
from skipdecode.schedule import Anchor
from skipdecode.schedule_builders import ScheduleRequest, build_schedule
from tests.agreement import assert_gives_the_references_logits, assert_mostly_gives_the_references_logits
from tests.models import CONFIGS, EACH_RELATIVE, EVERY_PATH, LAYERS, LEAST_LAYERS, MAX_LENGTH, RELATIVES, VARIATIONS
from tests.zoo import Zoo

RAGGED = [[9, 8, 7, 6, 5, 4, 3, 17, 23], [5, 6, 7], [11]]
NEW = 6


def test_every_supported_architecture_has_a_test_model() -> None:
    assert {make().model_type for make in (CONFIGS | RELATIVES).values()} == {*SUPPORTED}
    assert {*EVERY_PATH} < {*RELATIVES}


@pytest.mark.parametrize("name", EACH_RELATIVE)
def test_a_relatives_ragged_batch_gives_the_references_logits_under_either_anchor(name: str, zoo: Zoo) -> None:
    generator, model = skipdecode.load(zoo.bundle(name)), zoo.model(name)
    least = LEAST_LAYERS.get(name, 2)
    for anchor in Anchor:
        asked = ScheduleRequest(name="linear", max_layers=5, min_layers=least, warmup_layers=least - 1, span=5, anchor=anchor)
        schedule = build_schedule(asked, LAYERS)
        decoder = generator.decoder([len(prompt) for prompt in RAGGED], NEW, schedule)
        assert_gives_the_references_logits(decoder, model, RAGGED, NEW, 1e-3)


def test_experts_written_out_as_products_give_the_references_logits_and_are_prepacked(zoo: Zoo) -> None:
    generator = skipdecode.load(zoo.bundle("gemma4_moe"))
    schedule = build_schedule(ScheduleRequest(name="linear", max_layers=5, min_layers=2, span=5), LAYERS)
    decoder = generator.decoder([len(prompt) for prompt in RAGGED], NEW, schedule)
    assert_gives_the_references_logits(decoder, zoo.model("gemma4_moe"), RAGGED, NEW, 1e-3)
    graph = onnx.load(zoo.bundle("gemma4_moe") / "targets/cpu/segment_000.onnx", load_external_data=False).graph
    multiplied = {node.input[1] for node in graph.node if node.op_type == "MatMul"}
    weights = [weight for weight in graph.initializer if weight.name in multiplied]
    assert len(weights) > 2 * 4 and all("prepacked_0" in {entry.key for entry in weight.external_data} for weight in weights)


def test_quantised_experts_with_biases_and_clamps_mostly_give_the_references_logits(zoo: Zoo, tmp_path: Path) -> None:
    """Without one of the biases, or the sinks, half of all logits would be off by 0.13 or more."""
    schedule = ScheduleRequest(name="linear", max_layers=5, min_layers=2, span=5)
    model = str(zoo.checkpoint("gpt_oss"))
    export(ExportRequest(model=model, out=tmp_path / "bundle", schedule=schedule, max_length=MAX_LENGTH, quantize="int8"))
    decoder = skipdecode.load(tmp_path / "bundle").decoder([len(prompt) for prompt in RAGGED], NEW)
    assert_mostly_gives_the_references_logits(decoder, zoo.model("gpt_oss"), RAGGED, NEW, 0.06)


def _assert_agrees(config: Any, folder: Path) -> None:
    """A two-layer model agrees with its bundle at full depth."""
    config.num_hidden_layers, config.initializer_range = 2, 0.5
    _assert_exports(transformers.AutoModelForCausalLM.from_config(config).eval(), folder)


def _assert_exports(model: Any, folder: Path) -> None:
    model.save_pretrained(folder / "checkpoint")
    _assert_gives_logits(model, folder)


def _assert_gives_logits(model: Any, folder: Path) -> None:
    """The bundle of `folder`'s checkpoint gives the torch model's logits."""
    full = ScheduleRequest(name="full")
    export(ExportRequest(model=str(folder / "checkpoint"), out=folder / "bundle", schedule=full, max_length=MAX_LENGTH))
    decoder = skipdecode.load(folder / "bundle").decoder([len(RAGGED[0])], NEW)
    assert_gives_the_references_logits(decoder, model, RAGGED[:1], NEW, 1e-3)


def test_layers_that_differ_only_by_a_number_are_traced_separately(tmp_path: Path) -> None:
    """Some of GPT-2's descendants divide the attention scores of layer l by l + 1."""
    config = CONFIGS["gpt2"]()
    config.scale_attn_by_inverse_layer_idx = True
    _assert_agrees(config, tmp_path)


def test_layers_with_their_own_rotary_bases_may_share_a_segment(tmp_path: Path) -> None:
    config = RELATIVES["granite_swa"]()
    config.layer_rope_theta, config.layer_types = config.layer_rope_theta[:2], ["full_attention"] * 2
    assert config.layer_rope_theta[0] != config.layer_rope_theta[1]
    _assert_agrees(config, tmp_path)


def test_rotary_scalings_that_depend_on_the_runs_length_are_exact_up_to_the_original_length(tmp_path: Path) -> None:
    longrope = {"short_factor": [1.0 + index / 4 for index in range(8)], "long_factor": [9.0] * 8}
    for name, scaling in (
        ("llama", {"rope_type": "dynamic", "factor": 2.0}),
        ("phi3", {"rope_type": "longrope", **longrope, "factor": 4.0, "original_max_position_embeddings": MAX_LENGTH}),
        (
            "phimoe",
            {
                "rope_type": "longrope", **longrope, "factor": 4.0, "original_max_position_embeddings": MAX_LENGTH,
                "short_mscale": 1.25, "long_mscale": 7.0,
            },
        ),
    ):  # fmt: skip
        config = (CONFIGS | RELATIVES)[name]()
        config.rope_parameters = {"rope_theta": 100.0, "partial_rotary_factor": 1.0, **scaling}
        _assert_agrees(config, tmp_path / name)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("falcon", {"new_decoder_architecture": False, "multi_query": True}),  # the 7b
        (
            "falcon",
            {"new_decoder_architecture": False, "multi_query": False, "num_kv_heads": 4, "parallel_attn": False, "bias": True},
        ),
        ("gpt_bigcode", {"multi_query": False}),
    ],
)
def test_models_of_one_kind_may_share_keys_and_values_among_all_heads_or_none(
    name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    config = RELATIVES[name]()
    for key, value in settings.items():
        setattr(config, key, value)
    _assert_agrees(config, tmp_path)


def test_smollm3s_windows_are_those_of_its_layers_whatever_use_sliding_window_says(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"]
    for used in (False, True):
        config = RELATIVES["smollm3"](num_hidden_layers=2, use_sliding_window=used, sliding_window=5, layer_types=kinds)
        _assert_agrees(config, tmp_path / str(used))


def test_granite_4_may_have_no_experts_and_no_positions_and_mamba_in_the_place_of_attention(tmp_path: Path) -> None:
    dense = {"num_local_experts": 0, "position_embedding_type": None, "embedding_multiplier": 3.0, "attention_multiplier": 0.1}
    mamba = {"mamba_n_heads": 4, "mamba_d_state": 16, "time_step_limit": (0.4, 0.8)}  # some steps are outside
    for kinds in (["attention", "attention"], ["mamba", "attention"]):
        settings = {**dense, **mamba, "num_hidden_layers": 2, "layer_types": kinds}
        _assert_agrees(RELATIVES["granitemoehybrid"](**settings), tmp_path / kinds[0])


def test_nemotron_hs_experts_may_be_of_another_width_than_its_layers(tmp_path: Path) -> None:
    _assert_agrees(VARIATIONS["nemotron_h_latent"](), tmp_path)


def test_a_model_may_have_no_shared_experts_and_its_checkpoint_none_of_their_empty_weights(tmp_path: Path) -> None:
    config = RELATIVES["deepseek_v3"](n_shared_experts=0)
    config.num_hidden_layers, config.initializer_range = 2, 0.5
    with allowing_empty_weights():
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path / "checkpoint")
    held = load_file(tmp_path / "checkpoint" / "model.safetensors")
    assert any(not tensor.numel() for tensor in held.values())
    save_file({name: held[name] for name in held if held[name].numel()}, tmp_path / "checkpoint" / "model.safetensors")
    _assert_gives_logits(model, tmp_path)
    graphs = [ir.load(path).graph for path in (tmp_path / "bundle" / "graphs").glob("layer_*.onnx")]
    assert len(graphs) == 2 and all(math.prod(each.shape) for graph in graphs for each in graph.initializers.values())


def test_a_transformers_version_that_computes_states_differently_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace would leave the state out."""
    config = RELATIVES["nemotron_h"]()
    build_skeleton(config)
    monkeypatch.delattr("transformers.models.nemotron_h.modeling_nemotron_h.mamba2_chunk_scan")
    with pytest.raises(
        ModelNotSupportedError, match=r"NemotronHMamba2Mixer of transformers .* does not call mamba2_chunk_scan; install"
    ):
        build_skeleton(config)


def test_layers_that_read_others_keys_and_values_may_be_skipped_but_the_layers_they_read_may_not(
    zoo: Zoo, tmp_path: Path
) -> None:
    model, bundle = zoo.model("reading_others"), tmp_path / "bundle"
    asked = ScheduleRequest(name="linear", max_layers=6, min_layers=4, span=4)  # and 1 warm-up layer, where 3 are needed
    checkpoint = str(zoo.checkpoint("reading_others"))
    export(ExportRequest(model=checkpoint, out=bundle, schedule=asked, max_length=MAX_LENGTH, segment_bytes=1))
    generator = skipdecode.load(bundle)
    own = generator.manifest.schedule
    assert (own.warmup_layers, own.layers[-1]) == (3, 4)
    for anchor in Anchor:
        decoder = generator.decoder([len(prompt) for prompt in RAGGED], NEW, dataclasses.replace(own, anchor=anchor))
        assert [{*arrays} for arrays in decoder.kv.layers[3:]] == 3 * [set()], "they have KV buffers"
        assert_gives_the_references_logits(decoder, model, RAGGED, NEW, 1e-3)
    skipping = dataclasses.replace(own, warmup_layers=2)
    with pytest.raises(ScheduleError, match=r"skips layer 2, whose keys .* later layers read .*; give 3 warm-up layers or more"):
        generator.generate([[5, 6]], schedule=skipping)
    with pytest.raises(ScheduleError, match="skips layer 2"), skip_schedule(model, skipping):
        pass


def test_layers_without_a_kv_buffer_are_segments_of_their_own_so_that_prompts_can_bypass_them(zoo: Zoo, tmp_path: Path) -> None:
    _assert_exports(zoo.model("reading_others"), tmp_path)
    assert manifests.read(tmp_path / "bundle").segments == ((0, 1, 2), (3, 4, 5))


def test_falcon_h1_may_have_no_norm_in_its_mamba(tmp_path: Path) -> None:
    _assert_agrees(RELATIVES["falcon_h1"](mamba_rms_norm=False), tmp_path)


def test_recurrent_gemmas_embedding_has_a_factor_in_bf16(tmp_path: Path) -> None:
    """The root of 72, as wide as its channels are in published models."""
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1, "block_types": ["recurrent", "attention"]}
    _assert_agrees(RELATIVES["recurrent_gemma"](hidden_size=72, lru_width=None, **heads), tmp_path)


def test_layers_of_one_segment_share_their_linear_biases(zoo: Zoo, tmp_path: Path) -> None:
    bundle = _assert_one_segment_agrees(zoo, "bloom", tmp_path)
    graph = onnx.load(bundle / "targets/cpu/segment_000.onnx", load_external_data=False).graph
    biases = [node.input[10] for node in graph.node if node.op_type == "GroupQueryAttention"]
    assert len(biases) == LAYERS and len(set(biases)) == 1 and biases[0]


def test_a_model_that_transformers_knows_needs_none_of_the_code_that_came_with_it(tmp_path: Path) -> None:
    """Phi-3's checkpoints name their own code, though transformers has long had the model."""
    config = CONFIGS["phi3"]()
    config.auto_map = {"AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}
    _assert_agrees(config, tmp_path)


@pytest.mark.parametrize(
    ("name", "strays"),
    [
        ("llama", {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}),
        ("mistral", {"sliding_window": 5, "use_sliding_window": False}),
        ("lfm2", {"hidden_act": "gelu", "layer_types": ["conv", "full_attention"]}),  # its convolutions have no activation
    ],
)
def test_settings_of_other_architectures_are_ignored(name: str, strays: dict[str, Any], tmp_path: Path) -> None:
    """A Llama's config.json may have been a Mistral's; transformers keeps such keys, and its Llama attends to all tokens."""
    config = (CONFIGS | RELATIVES)[name]()
    for key, value in strays.items():
        setattr(config, key, value)
    _assert_agrees(config, tmp_path)


def test_buffers_that_a_checkpoint_stores_are_read_from_it(tmp_path: Path) -> None:
    """Apertus' activation has two; its class in transformers would fill in others."""
    config = RELATIVES["apertus"]()
    config.num_hidden_layers, config.initializer_range = 2, 0.5
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for layer, module in enumerate(model.model.layers):
        module.mlp.act_fn.beta.fill_(0.8 + layer / 10)
    _assert_exports(model, tmp_path)


def test_layers_of_one_segment_may_rotate_by_different_frequencies(zoo: Zoo, tmp_path: Path) -> None:
    """Gemma 3's layers with a window and its others do: in one graph each kind needs its own rotary table."""
    _assert_one_segment_agrees(zoo, "gemma3", tmp_path)


def _assert_one_segment_agrees(zoo: Zoo, name: str, folder: Path) -> Path:
    """A full-depth bundle, one segment of all layers, gives the reference's logits; returns the bundle."""
    model = str(zoo.checkpoint(name))
    made = export(ExportRequest(model=model, out=folder / "bundle", schedule=ScheduleRequest(name="full"), max_length=48))
    assert made.segments == (tuple(range(LAYERS)),)
    decoder = skipdecode.load(folder / "bundle").decoder([len(prompt) for prompt in RAGGED], NEW)
    assert_gives_the_references_logits(decoder, zoo.model(name), RAGGED, NEW, 1e-3)
    return folder / "bundle"


def test_latent_keys_are_as_wide_as_their_two_parts_whatever_qk_head_dim_says() -> None:
    """No layer of transformers reads it."""
    config = RELATIVES["youtu"]()
    config.qk_head_dim *= 2
    assert layer_keys(config, 0).head_size == config.qk_nope_head_dim + config.qk_rope_head_dim


@pytest.mark.parametrize(
    ("name", "scaling"),
    [
        ("hunyuan_v1_dense", {"alpha": 1000.0, "factor": 1.0}),  # as in its checkpoints: `alpha` sets the frequencies once
        ("llama", {"factor": 2.0}),  # its frequencies change only beyond max_position_embeddings, 64
    ],
)
def test_a_dynamic_scaling_is_exact_beyond_an_original_length_that_it_ignores(
    name: str, scaling: dict[str, float], tmp_path: Path
) -> None:
    config = (CONFIGS | RELATIVES)[name]()
    original = {"original_max_position_embeddings": len(RAGGED[0]) + 1}  # below MAX_LENGTH; the run is longer
    config.rope_parameters = {"rope_theta": 100.0, "rope_type": "dynamic", **scaling, **original}
    _assert_agrees(config, tmp_path)
