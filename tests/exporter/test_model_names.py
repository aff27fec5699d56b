"""From a hub id to a bundle, over HTTP, with repositories laid out as they are on the hub."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import tokenizers
import torch
import transformers
from rich.filesize import decimal
from safetensors.torch import load_file, save_file

import skipdecode
from skipdecode.errors import ModelNotSupportedError
from skipdecode.exporter.hub_errors import explain
from skipdecode.exporter.model_names import fetch_checkpoint, load_config
from skipdecode.exporter.reference import greedy_tokens
from skipdecode.schedule import full_depth
from tests.exporter.test_checkpoint import in_shards
from tests.exporter.test_merge_adapter import adapt
from tests.exporter.without_torch import SKIP_EXPORT
from tests.models import CONFIGS, LAYERS, VOCABULARY
from tests.processes import children, ends
from tests.standin import hub
from tests.zoo import Zoo, edit_settings

_COMMAND = [str(Path(sys.executable).parent / "skip-export")]
_E2E = Path(__file__).parents[2] / "examples" / "e2e" / "model"
_FETCH_SETTINGS = "from skipdecode.exporter.hub_config import fetch_config; print(fetch_config('org/llama').parent.name)"


def _export(url: str, home: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return _run(_COMMAND, url, home, *arguments)


def _refuse(url: str, home: Path, model: str, out: Path) -> subprocess.CompletedProcess[str]:
    """Ask for a model before torch is imported, except for OPT's short names, whose configurations are built in."""
    return _run(_COMMAND if model.startswith("opt-") else SKIP_EXPORT, url, home, model, "--out", out)


def _run(command: list[str], url: str, home: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [*command, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=_with_hub(url, home))


def _with_hub(url: str, home: Path) -> dict[str, str]:
    return {**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"}


def _write_opt_as_on_the_hub(folder: Path) -> None:
    """Write half precision in `.bin` shards under the base model's names, and a tokenizer from before tokenizer.json."""
    words = json.loads((_E2E / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    folder.mkdir(parents=True)
    (folder / "vocab.json").write_text(json.dumps(words["vocab"]), encoding="utf-8")
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in words["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]), encoding="utf-8")
    end = {"__type": "AddedToken", "content": "</s>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": True}
    settings = {"errors": "replace", "bos_token": end, "eos_token": end, "unk_token": end, "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "tokenizer_class": "GPT2Tokenizer"}))
    config = CONFIGS["opt"]()
    config.vocab_size = len(words["vocab"])
    torch.manual_seed(0)
    model = transformers.OPTForCausalLM(config).half()
    model.config.save_pretrained(folder)
    state = {name.removeprefix("model."): value for name, value in model.state_dict().items()}
    in_shards(state, folder, "pytorch_model-{:05d}-of-00002.bin", torch.save)
    (folder / "flax_model.msgpack").write_bytes(b"large")


def test_opt_as_it_is_on_the_hub_gives_transformers_tokens(tmp_path: Path) -> None:
    folder = tmp_path / "hub" / "facebook" / "opt-tiny"
    _write_opt_as_on_the_hub(folder)
    with hub.serving(tmp_path / "hub") as served:
        done = _export(served.url, tmp_path / "home", "facebook/opt-tiny", "--out", tmp_path / "bundle", "--max-length", 48)
    assert done.returncode == 0, done.stderr
    assert {path for path in served.sent if path.endswith((".bin", ".msgpack"))} == {
        f"facebook/opt-tiny/pytorch_model-0000{shard}-of-00002.bin" for shard in (1, 2)
    }
    text = "name[Clowns], area[riverside] =>"
    row = skipdecode.load(tmp_path / "bundle").generate(text, max_new_tokens=8, schedule="full", ignore_eos=True).sequences[0]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    asked = tokenizer(text, return_tensors="pt")
    wanted = model.generate(**asked, max_new_tokens=8, min_new_tokens=8, do_sample=False)[0].tolist()
    assert [*row.prompt_ids, *row.token_ids] == wanted
    assert row.prompt_ids[0] == 2, "OPT's prompts begin with </s>"


def test_weights_in_other_formats_are_not_downloaded(zoo: Zoo, tmp_path: Path) -> None:
    folder = tmp_path / "hub" / "org" / "both"
    zoo.model("llama").save_pretrained(folder)
    (folder / "original").mkdir()
    for other in ("pytorch_model.bin", "consolidated.safetensors", "original/consolidated.00.pth", "original/params.json"):
        (folder / other).write_bytes(b"large")
    with hub.serving(tmp_path / "hub") as served:
        done = _export(served.url, tmp_path / "home", "org/both", "--out", tmp_path / "bundle")
    assert done.returncode == 0, done.stderr
    assert {Path(path).name for path in served.sent} == {"config.json", "generation_config.json", "model.safetensors"}


@pytest.mark.parametrize("save", [save_file, torch.save])
def test_where_config_json_names_no_dtype_it_is_that_of_the_weights(save: Callable[..., None], zoo: Zoo, tmp_path: Path) -> None:
    folder = tmp_path / "hub" / "org" / "llama"
    zoo.model("llama").config.save_pretrained(folder)
    edit_settings(folder / "config.json", dtype=None)
    weights = {name: value.bfloat16() for name, value in zoo.model("llama").state_dict().items()}
    save(weights, folder / ("model.safetensors" if save is save_file else "pytorch_model.bin"))
    assert load_config(str(folder))[0].dtype == torch.bfloat16
    with hub.serving(tmp_path / "hub") as served:
        done = _export(served.url, tmp_path / "home", "org/llama", "--target", "cuda", "--out", tmp_path / "bundle")
        refused = _export(served.url, tmp_path / "home", "org/llama", "--target", "tensorrt-rtx:sm75", "--out", tmp_path / "rtx")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "bundle" / "bundle.json").read_text())["dtype"] == "bfloat16"
    assert (refused.returncode, refused.stderr) == (2, "--target: sm75 has no bf16; leave sm75 out, or choose --dtype fp16\n")


def test_where_neither_config_json_nor_a_weight_names_a_dtype_there_is_none(zoo: Zoo, tmp_path: Path) -> None:
    zoo.model("llama").config.save_pretrained(tmp_path)
    edit_settings(tmp_path / "config.json", dtype=None)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    assert load_config(str(tmp_path))[0].dtype is None


def test_settings_are_fetched_without_a_word(tmp_path: Path) -> None:
    CONFIGS["llama"]().save_pretrained(tmp_path / "hub" / "org" / "llama")
    with hub.serving(tmp_path / "hub") as served:
        done = _run([sys.executable, "-c", _FETCH_SETTINGS], served.url, tmp_path / "home")
    assert (done.returncode, done.stdout, done.stderr) == (0, "snapshots\n", "")


def test_the_progress_of_a_download_is_reported(zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zoo.model("llama").save_pretrained(tmp_path / "hub" / "org" / "llama")
    reported: list[str] = []
    with hub.serving(tmp_path / "hub") as served:
        for name, value in _with_hub(served.url, tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        folder = fetch_checkpoint("org/llama", reported.append).folder
    size = decimal(sum(path.stat().st_size for path in folder.iterdir()))
    assert reported[-1] == f"downloading org/llama, {size} of {size}"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_download_ends_with_the_export_that_waits_for_it(number: signal.Signals, status: int, zoo: Zoo, tmp_path: Path) -> None:
    zoo.model("llama").save_pretrained(tmp_path / "hub" / "org" / "llama")
    with hub.serving(tmp_path / "hub", hold="model.safetensors") as served:
        command = [*_COMMAND, "org/llama", "--out", str(tmp_path / "bundle")]
        environment = _with_hub(served.url, tmp_path / "home")
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as exporter:
            try:
                assert served.held.wait(120)
                (download,) = children(exporter.pid)
                exporter.send_signal(number)
                printed = exporter.communicate(timeout=60)[1]
            finally:
                exporter.kill()
        assert (exporter.returncode, printed) == (status, "")
        assert ends(download)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_size": "64"}, "Field 'hidden_size' expected int, got str"),
        ({"tie_word_embeddings": None}, "Field 'tie_word_embeddings' expected bool, got NoneType"),
        ({"num_attention_heads": 7}, "hidden size .64. is not a multiple of the number of attention heads .7."),
        ({"num_attention_heads": 0, "head_dim": None}, "by zero"),
        ({"layer_types": ["full_attention"]}, "must be equal to the number of `layer_types` .1."),
        ({"dtype": "auto"}, "no attribute 'auto'"),
        ({"id2label": 5}, "has no attribute .items."),
    ],
)
def test_a_config_json_that_transformers_rejects_gives_one_line(changes: dict[str, object], says: str, tmp_path: Path) -> None:
    config = CONFIGS["llama"]()
    config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ModelNotSupportedError, match=says) as caught:
        load_config(str(tmp_path))
    assert "\n" not in str(caught.value)
    assert "Error" not in str(caught.value)


def test_an_encoder_decoder_is_refused_though_its_decoder_is_supported(tmp_path: Path) -> None:
    decoder = transformers.GPT2Config(add_cross_attention=True, is_decoder=True)
    whole = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(transformers.ViTConfig(), decoder)
    for config in (whole, transformers.AutoConfig.for_model("musicgen")):
        config.save_pretrained(tmp_path)
        with pytest.raises(ModelNotSupportedError, match=f"{config.model_type} is an encoder-decoder"):
            load_config(str(tmp_path))


@pytest.mark.parametrize("name", ["org/nothing", "opt-1.3b"])
def test_a_model_that_the_hub_lacks_gives_one_line(name: str, tmp_path: Path) -> None:
    (tmp_path / "hub").mkdir()
    with hub.serving(tmp_path / "hub") as served:
        done = _refuse(served.url, tmp_path / "home", name, tmp_path / "bundle")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert ("--random-weights" in done.stderr) is (name == "opt-1.3b"), "only OPT's sizes can do without the hub"
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize("name", ["org/llama", "opt-1.3b"])
def test_a_gated_model_gives_one_line_that_says_how_to_get_it(name: str, tmp_path: Path) -> None:
    """org/llama is refused its config.json; opt-1.3b, whose configuration is built in, its weights."""
    with hub.serving(tmp_path, gated=True) as served:
        done = _refuse(served.url, tmp_path / "home", name, tmp_path / "bundle")
    expected = f"{name}: is a gated model that you have no access to; request access on its page on the hub, and log in"
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and done.stderr.startswith(expected), done.stderr


@pytest.mark.parametrize("name", ["org/llama", "opt-1.3b"])
def test_a_model_that_an_offline_machine_lacks_gives_one_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = _refuse("http://127.0.0.1:9", tmp_path / "home", name, tmp_path / "bundle")
    what = "is neither a folder nor, with its weights, in huggingface_hub's cache"
    expected = f"{name}: {what}; name a checkpoint folder, or unset HF_HUB_OFFLINE"
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and done.stderr.startswith(expected), done.stderr


@pytest.mark.parametrize("offline", [True, False])
def test_a_model_of_which_only_settings_are_cached_gives_one_line_that_blames_the_network(
    offline: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    CONFIGS["llama"]().save_pretrained(tmp_path / "hub" / "org" / "llama")
    with hub.serving(tmp_path / "hub") as served:
        _run([sys.executable, "-c", _FETCH_SETTINGS], served.url, tmp_path / "home")
    if offline:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = _export("http://127.0.0.1:9", tmp_path / "home", "org/llama", "--out", tmp_path / "bundle")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    expected = (
        "is neither a folder nor, with its weights, in" if offline else "is not a folder, and cannot be read from the hub ("
    )
    assert done.stderr.startswith(f"org/llama: {expected}"), done.stderr


def test_shards_with_names_of_their_own_are_found_in_the_cache(zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "hub" / "org" / "llama"
    zoo.model("llama").config.save_pretrained(folder)
    in_shards(zoo.model("llama").state_dict(), folder, "part-{:05d}-of-00002.safetensors", save_file)
    (folder / "part.safetensors.index.json").rename(folder / "model.safetensors.index.json")
    with hub.serving(tmp_path / "hub") as served:
        for name, value in _with_hub(served.url, tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        fetched = fetch_checkpoint("org/llama")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fetch_checkpoint("org/llama") == fetched and len(list(fetched.folder.glob("part-*"))) == 2


def test_a_model_of_only_gguf_files_gives_one_line(tmp_path: Path) -> None:
    (tmp_path / "hub" / "org" / "model-GGUF").mkdir(parents=True)
    (tmp_path / "hub" / "org" / "model-GGUF" / "model.Q4_K_M.gguf").write_bytes(b"GGUF")
    with hub.serving(tmp_path / "hub") as served:
        done = _refuse(served.url, tmp_path / "home", "org/model-GGUF", tmp_path / "bundle")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith(
        "org/model-GGUF: holds no config.json; name a checkpoint that transformers can load (for GGUF files,"
    )


def test_a_model_that_there_is_no_room_for_gives_one_line(zoo: Zoo, tmp_path: Path) -> None:
    """Here its cache cannot be made; a full disk also fails with an errno of the system's."""
    zoo.model("llama").save_pretrained(tmp_path / "hub" / "org" / "llama")
    (tmp_path / "home").touch()
    with hub.serving(tmp_path / "hub") as served:
        done = _refuse(served.url, tmp_path / "home", "org/llama", tmp_path / "bundle")
    expected = "org/llama: cannot be saved in huggingface_hub's cache (Not a directory: "
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and done.stderr.startswith(expected), done.stderr
    full = "cannot be saved in huggingface_hub's cache (No space left on device)"
    assert explain(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))[0] == full


@pytest.mark.parametrize(("own_tokenizer", "weights"), [(False, "adapter_model.safetensors"), (True, "adapter_model.bin")])
def test_an_adapter_on_the_hub_is_merged_into_its_base_model(own_tokenizer: bool, weights: str, zoo: Zoo, tmp_path: Path) -> None:
    base, adapter = (tmp_path / "hub" / "org" / name for name in ("llama", "adapter"))
    shutil.copytree(zoo.checkpoint("llama"), base)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    model = zoo.model("llama")
    if own_tokenizer:
        model.resize_token_embeddings(VOCABULARY + 2)
    adapted = adapt(model, lora, adapter)
    if weights.endswith(".bin"):
        torch.save(load_file(adapter / "adapter_model.safetensors"), adapter / weights)
        (adapter / "adapter_model.safetensors").unlink()
    edit_settings(adapter / "adapter_config.json", base_model_name_or_path="org/llama")
    for folder in (base, adapter) if own_tokenizer else (base,):
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({folder.name: 5, "[UNK]": 6}, unk_token="[UNK]"))
        tokenizer.save(str(folder / "tokenizer.json"))
    with hub.serving(tmp_path / "hub") as served:
        done = _export(served.url, tmp_path / "home", "org/adapter", "--out", tmp_path / "bundle")
    assert done.returncode == 0 and str(tmp_path / "bundle") in done.stdout, done.stderr
    bundle = skipdecode.load(tmp_path / "bundle")
    assert bundle.manifest.model.vocab_size == (VOCABULARY + 2 if own_tokenizer else VOCABULARY)
    made = bundle.generate([[5, 6, 7]], max_new_tokens=8, schedule="full", ignore_eos=True).sequences[0]
    assert list(made.token_ids) == greedy_tokens(adapted.merge_and_unload(), full_depth(LAYERS), [5, 6, 7], 8)[0]
    assert list(made.token_ids) != greedy_tokens(zoo.model("llama"), full_depth(LAYERS), [5, 6, 7], 8)[0]
    assert bundle.generate("adapter" if own_tokenizer else "llama", max_new_tokens=1).sequences[0].prompt_ids == [5]


def test_a_gated_base_model_gives_one_line_that_says_how_to_get_it(tmp_path: Path) -> None:
    (adapter := tmp_path / "adapter").mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "org/llama"}))
    with hub.serving(tmp_path, gated=True) as served:
        done = _refuse(served.url, tmp_path / "home", str(adapter), tmp_path / "bundle")
    what = (
        "its base model org/llama is a gated model that you have no access to; request access on its page on the hub, and log in"
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith(f"{adapter}/adapter_config.json: {what}") and "or set base_model_name_or_path" in done.stderr


def test_a_hub_that_cannot_be_reached_gives_one_line(tmp_path: Path) -> None:
    done = _refuse("http://127.0.0.1:9", tmp_path / "home", "org/model", tmp_path / "bundle")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr.startswith("org/model: is not a folder, and cannot be read from the hub"), done.stderr
