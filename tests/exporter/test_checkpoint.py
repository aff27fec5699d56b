"""Checkpoints as they are found: safetensors and `.bin`, sharded, of vision models, tied, quantised, hostile."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from skipdecode.errors import ModelNotSupportedError
from skipdecode.exporter.checkpoint import CheckpointSource
from skipdecode.exporter.config_json import allowing_empty_weights
from skipdecode.exporter.model_names import load_config
from skipdecode.exporter.skeleton import build_skeleton
from skipdecode.exporter.weights import TensorSource
from tests.exporter.quantised_checkpoints import source
from tests.models import CONFIGS, LAYERS, RELATIVES, VARIATIONS
from tests.zoo import Zoo

State = dict[str, torch.Tensor]


def in_shards(state: State, folder: Path, pattern: str, save: Callable[[State, Path], object]) -> None:
    """Write two files and their index, as save_pretrained does."""
    names = list(state)
    files = {name: pattern.format(1 + (2 * index >= len(names))) for index, name in enumerate(names)}
    for file in set(files.values()):
        save({name: state[name].clone() for name in names if files[name] == file}, folder / file)
    index = {"metadata": {}, "weight_map": files}
    (folder / f"{pattern.replace('-{:05d}-of-00002', '')}.index.json").write_text(json.dumps(index))


def _folder(config: Any, folder: Path) -> Path:
    config.save_pretrained(folder)
    return folder


def _in_either_form(model: Any, folder: Path) -> Iterator[tuple[Path, TensorSource]]:
    """Yield a model's `.bin` and its safetensors file, each with the source that reads it."""
    for name, save in (("pytorch_model.bin", torch.save), ("model.safetensors", save_file)):
        file = _folder(model.config, folder / name) / name
        save(dict(model.state_dict()), file)
        yield file, source(file.parent)


def _read_all(folder: Path, config: Any, caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings once every parameter is read."""
    skeleton = build_skeleton(config)
    read = CheckpointSource(folder, skeleton)
    for name, shape in skeleton.shapes.items():
        read(name, shape)
    caplog.clear()
    read.warn_of_unread()
    return caplog.messages


@pytest.mark.parametrize("name", CONFIGS | RELATIVES | VARIATIONS)
def test_nothing_that_transformers_saves_is_left_out(name: str, zoo: Zoo, caplog: pytest.LogCaptureFixture) -> None:
    folder = zoo.checkpoint(name)
    assert _read_all(folder, load_config(str(folder))[0], caplog) == []


@pytest.mark.parametrize("name", ["deepseek_v3", "kimi_linear"])  # the names in their files differ
def test_empty_weights_are_neither_required_nor_warned_of(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with allowing_empty_weights():
        model = transformers.AutoModelForCausalLM.from_config(RELATIVES[name](n_shared_experts=0))
    empty = {name for name, tensor in model.state_dict().items() if not tensor.numel()}
    model.save_pretrained(tmp_path)
    config, _ = load_config(str(tmp_path))
    assert len(empty) == 3 * LAYERS and not empty & {*build_skeleton(config).shapes}
    assert _read_all(tmp_path, config, caplog) == []


def test_an_indexer_that_would_choose_all_tokens_is_left_out(zoo: Zoo) -> None:
    config = load_config(str(zoo.checkpoint("deepseek_v32")))[0]
    assert not [name for name in build_skeleton(config).shapes if "indexer" in name]
    assert [name for name in load_file(zoo.checkpoint("deepseek_v32") / "model.safetensors") if "indexer" in name]


def test_layers_and_biases_that_config_json_has_no_place_for_are_warned_of(
    zoo: Zoo, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = _folder(CONFIGS["llama"](), tmp_path)
    state = load_file(zoo.checkpoint("llama") / "model.safetensors")
    beside = {
        "model.layers.0.self_attn.q_proj.bias": torch.ones(3),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3),
    }
    beside["model.layers.0.self_attn.k_proj.bias"] = torch.zeros(3)  # AutoGPTQ writes one for each matrix
    for spelled in ("", "language_model."):  # the text part of a vision model
        save_file({f"{spelled}{key}": value for key, value in (state | beside).items()}, folder / "model.safetensors")
        (warning,) = _read_all(folder, CONFIGS["llama"](), caplog)
        assert f"lacks 1 of this checkpoint's layer tensors (first: {spelled}model.layers.0.self_attn.q_proj.bias)" in warning
    shallower = CONFIGS["llama"]()
    shallower.num_hidden_layers -= 1
    (warning,) = _read_all(zoo.checkpoint("llama"), shallower, caplog)
    assert f"lacks 9 of this checkpoint's layer tensors (first: model.layers.{shallower.num_hidden_layers}." in warning


@pytest.mark.parametrize(
    ("name", "beside"),
    [
        ("gpt2", "h.0.attn.bias"),
        ("gpt_neo", "transformer.h.0.attn.attention.bias"),
        ("gpt_bigcode", "transformer.h.0.attn.bias"),
        ("deepseek_v3", "model.layers.6.eh_proj.weight"),
        ("glm4_moe", "model.layers.6.eh_proj.weight"),
    ],
)
def test_stored_masks_and_multi_token_prediction_layers_are_left_out_silently(
    name: str, beside: str, zoo: Zoo, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = (CONFIGS | RELATIVES)[name]()
    if "eh_proj" in beside:
        config.num_nextn_predict_layers = 1
    state = load_file(zoo.checkpoint(name) / "model.safetensors")
    save_file({**state, beside: torch.ones(3)}, _folder(config, tmp_path) / "model.safetensors")
    assert _read_all(tmp_path, config, caplog) == []


@pytest.mark.parametrize("name", ["opt", "llama", "gpt2", "gpt_neox"])
@pytest.mark.parametrize("form", ["bin", "bin in shards", "safetensors in shards", "base model's names"])
def test_a_checkpoint_is_read_in_every_form_that_hugging_face_writes(name: str, form: str, zoo: Zoo, tmp_path: Path) -> None:
    model = zoo.model(name)
    folder, state = _folder(model.config, tmp_path / "model"), model.state_dict()
    if form == "bin":
        torch.save(state, folder / "pytorch_model.bin")
    elif form == "bin in shards":
        in_shards(state, folder, "pytorch_model-{:05d}-of-00002.bin", torch.save)
    elif form == "safetensors in shards":
        in_shards(state, folder, "model-{:05d}-of-00002.safetensors", save_file)
    else:  # the names in OPT's and GPT-2's checkpoints on the hub
        renamed = {key.removeprefix(f"{model.base_model_prefix}."): value for key, value in state.items()}
        torch.save(renamed, folder / "pytorch_model.bin")
    read = source(folder)
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(read(key, tuple(parameter.shape)), parameter.data, rtol=0, atol=0)


def test_a_file_is_unmapped_with_the_tensor_that_was_read_from_it(zoo: Zoo, tmp_path: Path) -> None:
    """Otherwise the whole checkpoint would count in an export's peak memory."""
    for file, read in _in_either_form(zoo.model("llama"), tmp_path):
        held = read("model.norm.weight", (64,))
        assert str(file) in Path("/proc/self/maps").read_text()
        del held
        assert str(file) not in Path("/proc/self/maps").read_text()


def test_a_file_that_vanishes_while_it_is_read_is_an_unreadable_checkpoint(zoo: Zoo, tmp_path: Path) -> None:
    for file, read in _in_either_form(zoo.model("llama"), tmp_path):
        file.unlink()
        with pytest.raises(ModelNotSupportedError, match="cannot be read"):
            read("model.norm.weight", (64,))


def test_a_tied_embedding_may_be_stored_as_the_head_only_and_must_not_differ_from_it(zoo: Zoo, tmp_path: Path) -> None:
    model = zoo.model("qwen2")
    folder, state = _folder(model.config, tmp_path / "model"), dict(model.state_dict())
    head = state["lm_head.weight"].clone()
    save_file({key: value for key, value in state.items() if key != "model.embed_tokens.weight"}, folder / "model.safetensors")
    torch.testing.assert_close(source(folder)("model.embed_tokens.weight", tuple(head.shape)), head, rtol=0, atol=0)
    save_file({**state, "lm_head.weight": head + 1}, folder / "model.safetensors")
    with pytest.raises(ModelNotSupportedError, match=r"differs from model\.embed_tokens\.weight.*tie_word_embeddings"):
        source(folder)("model.embed_tokens.weight", tuple(head.shape))


def test_quantised_weights_without_their_scales_are_refused(zoo: Zoo, tmp_path: Path) -> None:
    model = zoo.model("llama")
    folder, state = _folder(model.config, tmp_path / "model"), dict(model.state_dict())
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**state, name: state[name].to(torch.float8_e4m3fn)}, folder / "model.safetensors")
    with pytest.raises(ModelNotSupportedError, match="float8_e4m3fn; give an unquantised"):
        source(folder)(name, tuple(state[name].shape))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"weight_map": []}',
        '{"weight_map": {"a": 5}}',
        '{"weight_map": {"a": ["a.safetensors"]}}',
        json.dumps({"weight_map": {"a": "a" * 5000}}),
        "[" * 100_000,
    ],
)
def test_a_malformed_shard_index_is_reported_by_name(text: str, tmp_path: Path) -> None:
    folder = _folder(CONFIGS["llama"](), tmp_path / "model")
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelNotSupportedError, match=r"index\.json: is not a shard index; download the checkpoint again"):
        source(folder)


def test_a_tensor_in_two_shards_must_be_the_same_in_both(zoo: Zoo, tmp_path: Path) -> None:
    """One of them may be left from another version; transformers takes the last shard's, whatever the index says."""
    model = zoo.model("llama")
    folder, state = _folder(model.config, tmp_path / "model"), dict(model.state_dict())
    in_shards(state, folder, "model-{:05d}-of-00002.safetensors", save_file)
    name, last = "model.embed_tokens.weight", folder / "model-00002-of-00002.safetensors"
    rest = load_file(last)
    save_file({**rest, name: state[name]}, last)
    torch.testing.assert_close(source(folder)(name, tuple(state[name].shape)), state[name], rtol=0, atol=0)
    save_file({**rest, name: state[name] + 1}, last)
    with pytest.raises(ModelNotSupportedError, match=r"00002\.safetensors: model\.embed.* differs from the one in .*00001"):
        source(folder)(name, tuple(state[name].shape))


class _Hostile:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


def test_a_bin_that_is_not_plain_tensors_is_refused_and_none_of_its_code_runs(zoo: Zoo, tmp_path: Path) -> None:
    model = zoo.model("llama")
    folder, state = _folder(model.config, tmp_path / "model"), model.state_dict()
    weights, trace = folder / "pytorch_model.bin", tmp_path / "was here"
    torch.save({**state, "extra": _Hostile(trace)}, weights)
    whole = weights.read_bytes()
    for content, says in (
        (whole, "cannot be read as plain tensors"),
        (whole[: len(whole) // 2], "cannot be read as plain tensors"),
        (b"x", "cannot be read as plain tensors"),
        (b"", "cannot be read as plain tensors"),
    ):
        weights.write_bytes(content)
        with pytest.raises(ModelNotSupportedError, match=says) as caught:
            source(folder)
        assert "\n" not in str(caught.value)
    torch.save(state, weights, _use_new_zipfile_serialization=False)  # as before torch 1.6
    with pytest.raises(ModelNotSupportedError, match="cannot be read as plain tensors"):
        source(folder)
    name, some = next((name, tensor) for name, tensor in state.items() if tensor.ndim == 2)
    others = ({3: some}, {name: some.to_sparse()}, {name: some.to("meta")})
    for content in ({"state_dict": state}, *({**state, **other} for other in others)):
        torch.save(content, weights)
        with pytest.raises(ModelNotSupportedError, match="not a flat dict of tensors"):
            source(folder)
    assert not trace.exists()


def test_weights_in_float64_are_read(zoo: Zoo, tmp_path: Path) -> None:
    folder, name = _folder(zoo.model("llama").config, tmp_path / "model"), "model.norm.weight"
    kept = load_file(zoo.checkpoint("llama") / "model.safetensors")
    save_file({key: tensor.double() for key, tensor in kept.items()}, folder / "model.safetensors")
    read = source(folder)(name, tuple(kept[name].shape))
    assert torch.equal(read.float(), kept[name])
