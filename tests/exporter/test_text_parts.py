"""The text part of a vision or audio model: its configuration, its weights, and what it computes."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from skipdecode.exporter import reference_run
from skipdecode.exporter.checkpoint import CheckpointSource
from skipdecode.exporter.checkpoint_folder import Checkpoint
from skipdecode.exporter.model_names import load_config
from skipdecode.exporter.reference import skip_schedule
from skipdecode.exporter.skeleton import build_skeleton
from skipdecode.schedule_builders import ScheduleRequest, build_schedule
from tests.exporter.quantised_checkpoints import source
from tests.models import CONFIGS, LAYERS, RELATIVES


@pytest.mark.parametrize("text", ["language_model.model.", "model.language_model."])
def test_the_text_part_of_a_vision_model_is_read(text: str, tmp_path: Path) -> None:
    text_part = {**CONFIGS["gemma3"]().to_dict(), "model_type": "gemma3_text"}
    eye = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
    config = transformers.Gemma3Config(
        text_config=text_part, vision_config={**eye, "patch_size": 14}, mm_tokens_per_image=4,
        image_token_index=95, boi_token_index=96, eoi_token_index=97,
    )  # fmt: skip
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    config.save_pretrained(tmp_path)
    spelled = {key.replace("model.language_model.", text): value.contiguous() for key, value in model.state_dict().items()}
    save_file({key: value for key, value in spelled.items() if key != "lm_head.weight"}, tmp_path / "model.safetensors")
    read = source(tmp_path)
    for key, parameter in model.model.language_model.named_parameters():
        torch.testing.assert_close(read(f"model.{key}", tuple(parameter.shape)), parameter.data, rtol=0, atol=0)
    ids = torch.tensor([[5, 6, 7, 8]])
    reference = reference_run._load(Checkpoint(tmp_path), torch.float32)
    torch.testing.assert_close(reference(ids).logits, model(input_ids=ids).logits)


_EYE = {"depth": 1, "hidden_size": 32, "embed_dim": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}
_EYE |= {"num_hidden_layers": 1, "num_attention_heads": 2}
_EAR = {"encoder_layers": 1, "d_model": 32, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "output_dim": 64}
_HALF_ROTARY = {"mrope_section": [1, 2, 1], "partial_rotary_factor": 0.5}
# vision models -> the decoder that their text part is, and its settings on top of that decoder's
_VISION_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Glm4v": ("glm4", {"rope_parameters": _HALF_ROTARY}),
    "Glm4vMoe": ("glm4_moe", {"rope_parameters": _HALF_ROTARY}),
    "Qwen2VL": ("qwen2", {}),
    "Qwen2_5_VL": ("qwen2", {}),
    "Qwen2_5Omni": ("qwen2", {}),
    "Qwen3VL": ("qwen3", {}),
    "Qwen3VLMoe": ("qwen3_moe", {"norm_topk_prob": False}),  # its router ignores it
    "Qwen3OmniMoe": ("qwen3_moe", {"num_experts": 5}),
    "CohereCompass": ("cohere_compass_text", {"rope_parameters": RELATIVES["cohere_compass_text"]().rope_parameters}),
    "Ernie4_5_VLMoe": (
        "ernie4_5_moe",
        {
            "moe_intermediate_size": [48, 32],  # of experts for text and for images
            "mlp_layer_types": ["dense", "dense", *["sparse"] * (LAYERS - 2)],
            "rope_parameters": {"mrope_section": [2, 2, 4]},
        },
    ),
    "GlmOcr": ("glm4", {}),
    "HunYuanVL": (
        "hunyuan_v1_dense",
        {"rope_parameters": {"rope_type": "xdrope", "alpha": 1000.0, "factor": 1.0, "mrope_section": [2] * 4}},
    ),
    "PaddleOCRVL": ("llama", {"use_bias": True}),
}


def vision_model(kind: str) -> Any:
    """A vision model with weights large enough that a mistake shows."""
    text, more = _VISION_MODELS[kind]
    rotary = more.get("rope_parameters", {})
    if "full_attention" not in rotary:  # there is not one for each kind of layer
        rotary = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 3, 3], **rotary}
    settings = {**(CONFIGS | RELATIVES)[text]().to_dict(), "head_dim": 16, "tie_word_embeddings": False, **more}
    settings = {**settings, "rope_parameters": rotary}
    settings.pop("model_type")
    if "Omni" in kind:
        thinker = getattr(transformers, f"{kind}ThinkerConfig")(text_config=settings, vision_config=_EYE, audio_config=_EAR)
        config = getattr(transformers, f"{kind}Config")(thinker_config=thinker.to_dict(), enable_audio_output=False)
    else:
        config = getattr(transformers, f"{kind}Config")(text_config=settings, vision_config=_EYE, image_token_id=95)
    return _with_large_weights(getattr(transformers, f"{kind}ForConditionalGeneration"), config)


def _with_large_weights(model_class: Any, config: Any) -> Any:
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    return model


def _assert_text_part_is_read(model: Any, folder: Path, text: str) -> None:
    """It loads as the decoder `text` and gives the whole model's logits, whose positions in time and space are equal in text."""
    assert load_config(str(folder))[0].model_type == text
    read, reference = source(folder), reference_run._load(Checkpoint(folder), torch.float32)
    for key, parameter in reference.named_parameters():
        torch.testing.assert_close(read(key, tuple(parameter.shape)), parameter.data, rtol=0, atol=0)
    ids = torch.tensor([[5, 6, 7, 8, 3, 9]])
    torch.testing.assert_close(reference(ids).logits, model(input_ids=ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", _VISION_MODELS)
def test_the_text_part_of_a_vision_model_is_read_as_its_decoder(kind: str, tmp_path: Path) -> None:
    model = vision_model(kind)
    model.save_pretrained(tmp_path)  # under the names of checkpoints on the hub
    _assert_text_part_is_read(getattr(model, "thinker", model), tmp_path, _VISION_MODELS[kind][0])


def _phi_4() -> Any:
    """Its text part and the whole have one configuration."""
    longrope = {"rope_type": "longrope", "short_factor": [1.0 + index / 4 for index in range(6)], "long_factor": [9.0] * 6}
    text = {**CONFIGS["phi3"]().to_dict(), "rope_parameters": {**longrope, "rope_theta": 100.0, "partial_rotary_factor": 0.75}}
    text |= {"original_max_position_embeddings": 48, "tie_word_embeddings": True}
    text.pop("model_type")
    eye = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_token_id": 95}
    ear = {"hidden_size": 32, "intermediate_size": 32, "num_blocks": 1, "num_attention_heads": 2, "input_size": 8}
    ear |= {"nemo_conv_channels": 8, "ext_pw_out_channel": 32, "audio_token_id": 96}
    eye |= {"crop_size": 28, "image_size": 28, "patch_size": 14}
    config = transformers.Phi4MultimodalConfig(**text, vision_config=eye, audio_config=ear)
    return _with_large_weights(transformers.Phi4MultimodalForCausalLM, config)


def _granite(kind: str) -> Any:
    eye = {"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
    eye |= {"patch_size": 14, "out_hidden_size": 64}
    more: dict[str, Any] = {}
    if kind == "Granite4Vision":
        eye["model_type"] = "siglip_vision_model"
        more = {
            "image_token_index": 95,
            "downsample_rate": "1/2",
            "deepstack_layer_map": [[0, 0]],
            "spatial_target_layers": [1] * 4,
        }
    text = {name: value for name, value in RELATIVES["granite"]().to_dict().items() if name != "model_type"}
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=eye, **more)
    return _with_large_weights(getattr(transformers, f"{kind}ForConditionalGeneration"), config)


def _emu_3() -> Any:
    text = {name: value for name, value in CONFIGS["llama"]().to_dict().items() if name != "model_type"}
    pictures = {"base_channels": 32, "num_res_blocks": 1, "codebook_size": 4, "embed_dim": 4, "latent_channels": 4}
    pictures |= {"hidden_size": 32, "channel_multiplier": [1, 1], "attn_resolutions": [4]}
    words = {**{f"<|visual token {index:06}|>": 90 + index for index in range(4)}, "<image>": 95}
    config = transformers.Emu3Config(text_config=text, vq_config=pictures, vocabulary_map=words)
    return _with_large_weights(transformers.Emu3ForConditionalGeneration, config)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (_phi_4, "phi3"),
        (partial(_granite, "Granite4Vision"), "granite"),
        (partial(_granite, "GraniteDocling"), "granite"),
        (_emu_3, "llama"),
    ],
)
def test_the_text_parts_of_other_models_are_read_as_their_decoders(make: Callable[[], Any], text: str, tmp_path: Path) -> None:
    model = make()
    model.save_pretrained(tmp_path)
    _assert_text_part_is_read(model, tmp_path, text)


@pytest.mark.parametrize("kind", ["HunYuanVL", "PaddleOCRVL"])
def test_a_text_part_may_have_its_settings_among_the_whole_models(kind: str, tmp_path: Path) -> None:
    """As on the hub, where PaddleOCR-VL has a head of its own, and transformers' text part would not."""
    model = vision_model(kind)
    model.config.tie_word_embeddings = model.config.text_config.tie_word_embeddings = False
    untied = _with_large_weights(type(model), model.config)
    untied.save_pretrained(tmp_path)
    nested = json.loads((tmp_path / "config.json").read_text())
    flat = {**nested.pop("text_config"), **nested, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(flat))
    _assert_text_part_is_read(untied, tmp_path, _VISION_MODELS[kind][0])
    (tmp_path / "config.json").write_text(json.dumps({**flat, "tie_word_embeddings": True}))
    assert load_config(str(tmp_path))[0].tie_word_embeddings


@pytest.mark.parametrize("turned", [False, True])
def test_qwen3_vls_experts_may_be_transposed_or_not(turned: bool, tmp_path: Path) -> None:
    """On the hub they are [E,H,2I] and [E,I,H], as in transformers 4; transformers 5 saves them as its model has them."""
    model = vision_model("Qwen3VLMoe")
    model.config.save_pretrained(tmp_path)
    state = {key: value.mT.contiguous() if turned and ".experts." in key else value for key, value in model.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    assert any(tensor.ndim == 3 for tensor in state.values())
    _assert_text_part_is_read(model, tmp_path, "qwen3_moe")


def test_qwen3_vls_experts_may_be_one_tensor_each(tmp_path: Path) -> None:
    """As llm-compressor writes them; transformers' rules for the whole model do not merge them."""
    model = vision_model("Qwen3VLMoe")
    model.config.save_pretrained(tmp_path)
    state = {}
    for key, value in model.state_dict().items():
        if ".experts." not in key:
            state[key] = value
            continue
        path, _, kind = key.rpartition(".")
        for number, expert in enumerate(value):
            names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
            parts = zip(names, expert.chunk(len(names)), strict=True)
            state |= {f"{path}.{number}.{name}.weight": part.clone() for name, part in parts}
    save_file(state, tmp_path / "model.safetensors")
    _assert_text_part_is_read(model, tmp_path, "qwen3_moe")


@pytest.mark.parametrize("names", ["model.language_model.", "model."])
def test_a_text_part_may_have_the_names_of_any_transformers_version(names: str, tmp_path: Path) -> None:
    model = vision_model("Qwen3VL")
    model.config.save_pretrained(tmp_path)
    state = {key.replace("model.language_model.", names): value.contiguous() for key, value in model.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    _assert_text_part_is_read(model, tmp_path, "qwen3")


def test_the_text_part_of_mistral_3_may_be_mistral_4(tmp_path: Path) -> None:
    """transformers has its language model only under another name."""
    eye = {"model_type": "pixtral", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    eye |= {"image_size": 28, "patch_size": 14, "head_dim": 16}
    text = {**RELATIVES["mistral4"]().to_dict(), "initializer_range": 0.2}
    config = transformers.Mistral3Config(text_config=text, vision_config=eye, image_token_index=95)
    model = transformers.Mistral3ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    _assert_text_part_is_read(model, tmp_path, "mistral4")


@pytest.mark.parametrize("names", ["model.text_model.", "model.language_model.model."])
def test_a_text_part_may_have_the_names_of_smolvlm_and_hyperclova_x(names: str, tmp_path: Path) -> None:
    eye = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
    text = {**CONFIGS["llama"]().to_dict(), "initializer_range": 0.2}
    config = transformers.SmolVLMConfig(text_config=text, vision_config={**eye, "patch_size": 14}, image_token_id=95)
    model = transformers.SmolVLMForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    assert "model.text_model.layers.0.self_attn.q_proj.weight" in state and "lm_head.weight" in state
    if names != "model.text_model.":
        head = state.pop("lm_head.weight")
        state = {key.replace("model.text_model.", names): value for key, value in state.items()}
        save_file({**state, "model.language_model.lm_head.weight": head}, tmp_path / "model.safetensors")
    _assert_text_part_is_read(model, tmp_path, "llama")


@pytest.mark.parametrize("kind", ["Glm4v", "Qwen2_5_VL", "Qwen3VLMoe", "Ernie4_5_VLMoe", "HunYuanVL", "Phi4Multimodal"])
def test_inside_skip_schedule_a_vision_model_computes_what_its_text_part_computes(kind: str, tmp_path: Path) -> None:
    model = _phi_4() if kind == "Phi4Multimodal" else vision_model(kind)
    ids = torch.tensor([[5, 6, 7, 8, 3, 9, 11, 12], [9, 8, 7, 6, 5, 4, 3, 2]])
    model.save_pretrained(tmp_path)
    if kind == "HunYuanVL":  # as on the hub; its text part's configuration then names the whole model
        settings = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**settings.pop("text_config"), **settings}))
        model = type(model).from_pretrained(tmp_path)
        assert model.config.text_config.model_type == model.config.model_type
    alone, mask = reference_run._load(Checkpoint(tmp_path), torch.float32), torch.ones_like(ids)
    labels = torch.where(torch.arange(8) < torch.tensor([[3], [5]]), -100, ids)
    schedule = build_schedule(ScheduleRequest(name="linear", max_layers=5, min_layers=2, span=3), LAYERS)
    with skip_schedule(alone, schedule, prompt_length=[3, 5]):
        wanted = alone(ids, attention_mask=mask, use_cache=False).logits
    assert not torch.allclose(alone(ids, attention_mask=mask).logits, wanted, atol=1e-3)
    with skip_schedule(model, schedule, prompt_length="labels"):
        found = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).logits
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "text", "eye"),
    [
        ("Llava", "mamba2", {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14}),
        ("QianfanOCR", "qwen3", {"image_size": [28, 28], "patch_size": [14, 14]}),
    ],
)
def test_names_that_only_the_whole_model_has_are_mapped_to_its_text_part(
    kind: str, text: str, eye: dict[str, Any], tmp_path: Path
) -> None:
    """Those of a decoder without a module called `model`, and those that transformers writes for Qianfan-OCR."""
    eye = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, **eye}
    settings = {"text_config": (CONFIGS | RELATIVES)[text](), "vision_config": eye, "image_token_id": 95}
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(getattr(transformers, f"{kind}Config")(**settings)).eval()
    model.save_pretrained(tmp_path)
    _assert_text_part_is_read(model, tmp_path, text)


def test_the_text_part_of_llama_4_is_read(tmp_path: Path) -> None:
    """transformers has a language model for it, in which experts are stored the same way."""
    eye = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
    eye |= {"patch_size": 14, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
    text = {**RELATIVES["llama4_text"]().to_dict(), "initializer_range": 0.2}
    model = transformers.Llama4ForConditionalGeneration(transformers.Llama4Config(text_config=text, vision_config=eye)).eval()
    model.save_pretrained(tmp_path)
    assert "language_model.model.layers.0.feed_forward.experts.gate_up_proj" in load_file(tmp_path / "model.safetensors")
    _assert_text_part_is_read(model.language_model, tmp_path, "llama4_text")  # the whole fails without an image


@pytest.mark.parametrize("own_head", [False, True])
def test_a_head_that_only_the_whole_model_ties_is_tied_where_the_checkpoint_has_none(own_head: bool, tmp_path: Path) -> None:
    eye = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
    whole = {"vision_config": {**eye, "model_type": "clip_vision_model", "patch_size": 14}, "image_token_index": 95}
    config = transformers.LlavaConfig(text_config=CONFIGS["llama"](), **whole, tie_word_embeddings=True)
    state = dict(transformers.LlavaForConditionalGeneration(config).state_dict())
    head = state.pop("lm_head.weight")
    config.save_pretrained(tmp_path)
    save_file({**state, "lm_head.weight": head + 1} if own_head else state, tmp_path / "model.safetensors")
    skeleton = build_skeleton(load_config(str(tmp_path))[0])
    assert ("lm_head.weight" in skeleton.shapes) is own_head
    name = skeleton.canonical["lm_head.weight"]
    torch.testing.assert_close(CheckpointSource(tmp_path, skeleton)(name, tuple(head.shape)), head + own_head, rtol=0, atol=0)
