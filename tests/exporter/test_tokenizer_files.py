"""A checkpoint's settings and tokenizer in a bundle."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
import transformers

from skipdecode.errors import ModelNotSupportedError
from skipdecode.exporter import tokenizer_files
from skipdecode.exporter.export import ExportRequest, export
from skipdecode.exporter.tokenizer_files import copy_settings, copy_tokenizer
from skipdecode.text import Tokenizer
from tests.models import CONFIGS, MAX_LENGTH, RELATIVES
from tests.zoo import Zoo

_E2E = Path(__file__).parents[2] / "examples" / "e2e" / "model"


def test_a_file_that_cannot_be_read_is_not_taken_for_a_full_disk(zoo: Zoo, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    zoo.model("llama").save_pretrained(folder)
    (folder / "tokenizer_config.json").symlink_to("/proc/self/mem")  # reading its first bytes is an input/output error
    with pytest.raises(ModelNotSupportedError, match=r"tokenizer_config\.json: cannot be read .Input/output error."):
        export(ExportRequest(model=str(folder), out=tmp_path / "bundle", max_length=MAX_LENGTH))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_broken_file_is_named_and_nothing_else_is_logged(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (bundle := tmp_path / "bundle").mkdir()
    shutil.copyfile(_E2E / "tokenizer.json", tmp_path / "tokenizer.json")
    (tmp_path / name).write_text("{")
    with pytest.raises(ModelNotSupportedError, match=rf"{re.escape(str(tmp_path / name))}: (cannot be read|is not JSON) "):
        copy_tokenizer(tmp_path, bundle, CONFIGS["llama"](), MAX_LENGTH)
    assert not caplog.records


_END = {"content": "<|im_end|>", "special": True, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}


@pytest.mark.parametrize("file", ["tokenizer_config", "special_tokens_map", "added_tokens"])
def test_tokens_listed_only_next_to_tokenizer_json_are_put_into_it(file: str, tmp_path: Path) -> None:
    shutil.copyfile(_E2E / "tokenizer.json", tmp_path / "tokenizer.json")
    own = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    size = own.get_vocab_size()
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    contents = {
        "tokenizer_config": {**settings, "added_tokens_decoder": {str(size): _END}},
        "special_tokens_map": {"additional_special_tokens": ["<|im_end|>"]},
        "added_tokens": {"<|im_end|>": size},
    }
    for name, content in {"tokenizer_config": settings, file: contents[file]}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    for vocabulary, text in ((size + 1, "yes <|im_end|> no"), (size, "no token without an embedding")):
        bundle = tmp_path / str(vocabulary)
        bundle.mkdir()
        copy_tokenizer(tmp_path, bundle, CONFIGS["llama"]().__class__(vocab_size=vocabulary), MAX_LENGTH)
        made = tokenizers.Tokenizer.from_file(str(bundle / "tokenizer.json"))
        assert (size in made.encode(text).ids) is (vocabulary > size)
        assert made.encode(text).ids == transformers.AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"]
        written = json.loads((bundle / "tokenization.json").read_text())
        assert (size in written["special"]) is (vocabulary > size and file != "added_tokens")


@pytest.mark.parametrize("file", ["tokenizer_config", "special_tokens_map"])
def test_a_token_that_only_the_files_next_to_it_make_special_is_left_out_of_text(file: str, tmp_path: Path) -> None:
    (bundle := tmp_path / "bundle").mkdir()
    own = tokenizers.Tokenizer.from_file(str(_E2E / "tokenizer.json"))
    size = own.get_vocab_size()
    own.add_tokens([tokenizers.AddedToken("<|im_end|>", normalized=False), tokenizers.AddedToken("<tool>", normalized=False)])
    own.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, content in {"tokenizer_config": settings, file: {**settings, "eos_token": "<|im_end|>"}}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    copy_tokenizer(tmp_path, bundle, CONFIGS["llama"]().__class__(vocab_size=size + 2), MAX_LENGTH)
    made, theirs = Tokenizer.of(bundle), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert made is not None
    ids = made.encode("yes <tool> no<|im_end|>")
    assert ids == theirs("yes <tool> no<|im_end|>")["input_ids"]
    assert made.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == "yes <tool> no"
    assert size in json.loads((bundle / "tokenization.json").read_text())["special"]


@pytest.mark.parametrize("taking_spaces", [True, False])
def test_a_token_that_takes_other_spaces_with_it_in_transformers_is_warned_of(
    taking_spaces: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (bundle := tmp_path / "bundle").mkdir()
    own = tokenizers.Tokenizer.from_file(str(_E2E / "tokenizer.json"))
    size = own.get_vocab_size()
    own.add_special_tokens([tokenizers.AddedToken("<|im_end|>", normalized=False)])
    own.save(str(tmp_path / "tokenizer.json"))
    token = {"content": "<|im_end|>", "special": True, "normalized": False, "lstrip": taking_spaces, "rstrip": taking_spaces}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": {size: {**token, "single_word": False}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    copy_tokenizer(tmp_path, bundle, CONFIGS["llama"]().__class__(vocab_size=size + 1), MAX_LENGTH)
    assert len(caplog.messages) == taking_spaces
    assert all("gives other ids: for 'a <|im_end|> b'" in message for message in caplog.messages)


def test_a_tokenizer_json_that_lacks_nothing_is_copied_as_it_is(tmp_path: Path) -> None:
    copy_tokenizer(_E2E, tmp_path, CONFIGS["llama"](), MAX_LENGTH)
    assert (tmp_path / "tokenizer.json").read_bytes() == (_E2E / "tokenizer.json").read_bytes()


def test_tokens_listed_next_to_it_keep_their_ids_in_whatever_order_they_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    size = tokenizers.Tokenizer.from_file(str(_E2E / "tokenizer.json")).get_vocab_size()
    theirs = {size + 1: tokenizers.AddedToken("<|im_end|>"), size: tokenizers.AddedToken("<|im_start|>")}
    loaded = SimpleNamespace(backend_tokenizer=SimpleNamespace(get_added_tokens_decoder=lambda: theirs))
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *args, **kwargs: loaded)
    copy_tokenizer(_E2E, tmp_path, CONFIGS["llama"]().__class__(vocab_size=size + 2), MAX_LENGTH)
    made = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert [made.token_to_id(content) for content in ("<|im_start|>", "<|im_end|>")] == [size, size + 1]
    assert caplog.messages == []


def test_tokens_that_would_get_other_ids_are_left_out_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    size = tokenizers.Tokenizer.from_file(str(_E2E / "tokenizer.json")).get_vocab_size()
    theirs = {size + 1: tokenizers.AddedToken("<|im_end|>", special=True)}
    loaded = SimpleNamespace(backend_tokenizer=SimpleNamespace(get_added_tokens_decoder=lambda: theirs))
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *args, **kwargs: loaded)
    copy_tokenizer(_E2E, tmp_path, CONFIGS["llama"]().__class__(vocab_size=size + 2), MAX_LENGTH)
    assert (tmp_path / "tokenizer.json").read_bytes() == (_E2E / "tokenizer.json").read_bytes()
    (message,) = caplog.messages
    wanted = "tokenizer.json: tokens found only in the files next to it are left out, since their ids would change ('<|im_end|>')"
    assert message == wanted


def test_padding_that_a_tokenizer_was_saved_with_is_not_taken_for_other_ids(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (model := tmp_path / "model").mkdir()
    (bundle := tmp_path / "bundle").mkdir()
    padded = tokenizers.Tokenizer.from_file(str(_E2E / "tokenizer.json"))
    padded.enable_padding(length=32)
    padded.save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    copy_tokenizer(model, bundle, CONFIGS["llama"](), MAX_LENGTH)
    assert caplog.messages == []


_AROUND = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "</s>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
        {"SpecialToken": {"id": "<pad>", "type_id": 0}},
    ],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {text: {"id": text, "ids": [id_], "tokens": [text]} for text, id_ in (("</s>", 2), ("<pad>", 1))},
}


def test_files_for_c_services_give_the_ids_around_a_text_the_length_and_a_class_that_they_know(tmp_path: Path) -> None:
    (model := tmp_path / "model").mkdir()
    (bundle := tmp_path / "bundle").mkdir()
    own = json.loads((_E2E / "tokenizer.json").read_text(encoding="utf-8"))
    cut = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    (model / "tokenizer.json").write_text(json.dumps({**own, "post_processor": _AROUND, "truncation": cut}))
    (model / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend", "eos_token": "</s>"}')
    copy_tokenizer(model, bundle, CONFIGS["opt"](), MAX_LENGTH)
    written = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in bundle.glob("*.json")}
    tokenization = written["tokenization"]
    assert (tokenization["before"], tokenization["after"]) == ([2], [1])
    assert tokenization["special"] == [token["id"] for token in own["added_tokens"] if token["special"]]
    assert all(sample["ids"][0] == 2 and sample["ids"][-1] == 1 for sample in tokenization["samples"])
    assert max(len(sample["ids"]) for sample in tokenization["samples"]) > 3, "whole, though the tokenizer would truncate them"
    assert written["genai_config"] == {"model": {"type": "opt", "context_length": MAX_LENGTH}}
    assert written["tokenizer_config"] == {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}


def test_the_ids_after_a_text_follow_all_of_its_own(tmp_path: Path) -> None:
    (bundle := tmp_path / "bundle").mkdir()
    own = tokenizers.Tokenizer(tokenizers.models.BPE({"▁": 0, "a": 1, "</s>": 2}, []))
    own.normalizer = tokenizers.normalizers.Prepend("▁")  # so that "a" has two ids
    own.post_processor = tokenizers.processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    own.save(str(tmp_path / "tokenizer.json"))
    copy_tokenizer(tmp_path, bundle, CONFIGS["llama"](), MAX_LENGTH)
    written = json.loads((bundle / "tokenization.json").read_text())
    assert (written["before"], written["after"]) == ([], [2])


def test_the_files_of_a_chat_checkpoint_are_copied_into_its_bundle(tmp_path: Path) -> None:
    (model := tmp_path / "model").mkdir()
    (bundle := tmp_path / "bundle").mkdir()
    names = (
        "config.json",
        "generation_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "vocab.json",
        "merges.txt",
    )
    for name in names:
        (model / name).write_text(f'{{"this is": "{name}"}}')
    shutil.copyfile(_E2E / "tokenizer.json", model / "tokenizer.json")
    copy_settings(model, bundle, CONFIGS["llama"]())
    copy_tokenizer(model, bundle, CONFIGS["llama"](), MAX_LENGTH)
    for name in (*names, "tokenizer.json"):
        assert (bundle / name).read_bytes() == (model / name).read_bytes()
    made = json.loads((bundle / "tokenizer_config.json").read_text())
    assert made == {"tokenizer_class": "PreTrainedTokenizerFast"}, "C++ needs one where the checkpoint has none"


@pytest.mark.parametrize("name", ["tekken.json", "tiktoken.model", "hy.tiktoken", "tokenizer.model.v3", "tokenizer_config.json"])
def test_a_tokenizer_in_a_form_that_cannot_be_read_is_warned_of(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (model := tmp_path / "model").mkdir()
    (bundle := tmp_path / "bundle").mkdir()
    (model / name).write_text("{}")
    copy_tokenizer(model, bundle, CONFIGS["mistral"](), MAX_LENGTH)
    (message,) = caplog.messages
    says = f"the bundle takes only token ids: none can be read from {name}; put a tokenizer.json there"
    assert message == f"its tokenizer is left out, so {says}"


def test_a_folder_without_a_tokenizer_is_not_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (bundle := tmp_path / "bundle").mkdir()
    copy_tokenizer(tmp_path, bundle, CONFIGS["mistral"](), MAX_LENGTH)
    assert caplog.messages == [] and list(bundle.iterdir()) == []


def test_mistral_common_where_it_is_installed_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers then names its class for Mistral's models, and opens it for a folder that has tekken.json, too."""
    own = tokenizers.Tokenizer.from_file(str(_E2E / "tokenizer.json"))
    size = own.get_vocab_size()
    opened: list[dict[str, Any]] = []

    class Loaded:
        backend_tokenizer = own

        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": own.encode(text).ids}

    def open_tokenizer(folder: Path, **settings: Any) -> Any:
        opened.append(settings)
        return Loaded() if settings.get("mistral_format") is False else SimpleNamespace()  # of mistral-common

    own.add_special_tokens(["<|im_end|>"])
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", open_tokenizer)
    mapping = transformers.models.auto.tokenization_auto
    monkeypatch.setitem(mapping.TOKENIZER_MAPPING_NAMES, "mistral", "MistralCommonBackend")
    monkeypatch.setitem(mapping.REGISTERED_TOKENIZER_CLASSES, "MistralCommonBackend", type("MistralCommonBackend", (), {}))
    for name in ("tokenizer.json", "tokenizer.model"):
        (model := tmp_path / name.replace(".", "_")).mkdir()
        (bundle := model / "bundle").mkdir()
        shutil.copyfile(_E2E / "tokenizer.json", model / name)
        copy_tokenizer(model, bundle, transformers.MistralConfig(vocab_size=size + 1), MAX_LENGTH)
        made = tokenizers.Tokenizer.from_file(str(bundle / "tokenizer.json"))
        assert made.token_to_id("<|im_end|>") == size
    assert len(opened) == 2 and caplog.messages == []


def test_a_model_without_a_checkpoint_has_its_configuration_and_no_tokenizer(tmp_path: Path) -> None:
    copy_settings(None, tmp_path, CONFIGS["llama"]())
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    assert transformers.AutoConfig.from_pretrained(tmp_path).model_type == "llama"


@pytest.mark.parametrize(("settings", "warned"), [({}, False), ({"add_prefix_space": True}, True)])
def test_a_class_that_transformers_rebuilds_with_other_settings_is_warned_of(
    settings: dict[str, Any], warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (model := tmp_path / "model").mkdir()
    (bundle := tmp_path / "bundle").mkdir()
    shutil.copyfile(_E2E / "tokenizer.json", model / "tokenizer.json")
    written = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", **settings}
    (model / "tokenizer_config.json").write_text(json.dumps(written))
    copy_tokenizer(model, bundle, CONFIGS["llama"]().__class__(vocab_size=2048), MAX_LENGTH)
    warnings = [
        message for message in caplog.messages if message.startswith("tokenizer.json: used as it is, although transformers' GPT2")
    ]
    assert len(warnings) == warned, caplog.messages
    assert not warnings or re.search(r"gives other ids: for '.+' \[(\.\., )?\d.*\] instead of \[(\.\., )?\d.*\]$", warnings[0])


def test_a_setting_with_half_of_a_surrogate_pair_is_kept(tmp_path: Path) -> None:
    """JSON can write one, UTF-8 cannot."""
    (model := tmp_path / "model").mkdir()
    (bundle := tmp_path / "bundle").mkdir()
    shutil.copyfile(_E2E / "tokenizer.json", model / "tokenizer.json")
    (model / "tokenizer_config.json").write_text('{"unk_token": "\\udce9 é"}')
    copy_tokenizer(model, bundle, CONFIGS["llama"](), MAX_LENGTH)
    assert json.loads((bundle / "tokenizer_config.json").read_text(encoding="utf-8"))["unk_token"] == "\udce9 é"


def test_a_tokenizer_without_an_id_for_a_text_gives_one_line(tmp_path: Path) -> None:
    (model := tmp_path / "model").mkdir()
    (bundle := tmp_path / "bundle").mkdir()
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="[UNK]")).save(str(model / "tokenizer.json"))
    with pytest.raises(ModelNotSupportedError, match=r"tokenizer\.json: cannot be read .*Missing \[UNK\] token"):
        copy_tokenizer(model, bundle, CONFIGS["llama"](), MAX_LENGTH)


_BOS, _A, _B = (
    {"SpecialToken": {"id": "<bos>", "type_id": 0}},
    {"Sequence": {"id": "A", "type_id": 0}},
    {"Sequence": {"id": "B", "type_id": 1}},
)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    ("single", "says", "printed"),
    [
        ([_BOS, _A], "its template names '<bos>', which is not among its special_tokens", False),
        ([_B], "index out of bounds", True),  # Rust prints it, too
    ],
)
def test_a_template_that_makes_tokenizers_panic_gives_one_line(
    single: list[Any], says: str, printed: bool, nested: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (model := tmp_path / "model").mkdir()
    (bundle := tmp_path / "bundle").mkdir()
    template = {"type": "TemplateProcessing", "single": single, "pair": [_A, _B], "special_tokens": {}}
    own = json.loads((_E2E / "tokenizer.json").read_text(encoding="utf-8"))
    processor = {"type": "Sequence", "processors": [own["post_processor"], template]} if nested else template
    (model / "tokenizer.json").write_text(json.dumps({**own, "post_processor": processor}))
    with pytest.raises(ModelNotSupportedError, match=rf"tokenizer\.json: cannot be read .{says}") as caught:
        copy_tokenizer(model, bundle, CONFIGS["llama"](), MAX_LENGTH)
    assert "\n" not in str(caught.value)
    assert ("panicked" in capfd.readouterr().err) is printed


def test_a_tokenizer_with_its_own_code_is_copied_as_it_is_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (model := tmp_path / "model").mkdir()
    (bundle := tmp_path / "bundle").mkdir()
    shutil.copyfile(_E2E / "tokenizer.json", model / "tokenizer.json")
    (model / "own.py").write_text(f"raise SystemExit(open({str(tmp_path / 'was here')!r}, 'w'))")
    (model / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": [None, "own.Tokenizer"]}}))
    copy_tokenizer(model, bundle, CONFIGS["llama"](), MAX_LENGTH)
    assert (bundle / "tokenizer.json").read_bytes() == (_E2E / "tokenizer.json").read_bytes()
    assert not (tmp_path / "was here").exists()
    (message,) = caplog.messages
    assert message.startswith("tokenizer.json: used without tokens from the files next to it, which transformers cannot")
    assert "\n" not in message


@pytest.mark.parametrize("settings", [{}, {"tokenizer_class": "BioGptTokenizer"}])
def test_a_tokenizer_that_is_only_python_code_is_left_out_with_a_warning(
    settings: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (model := tmp_path / "model").mkdir()
    (bundle := tmp_path / "bundle").mkdir()
    for name, content in {"vocab.json": '{"a</w>": 0}', "merges.txt": "", "tokenizer_config.json": json.dumps(settings)}.items():
        (model / name).write_text(content)
    copy_tokenizer(model, bundle, RELATIVES["biogpt"](), MAX_LENGTH)
    assert not (bundle / "tokenizer.json").exists() and not (bundle / "tokenization.json").exists()
    (message,) = caplog.messages
    assert message == "its tokenizer is left out: BioGptTokenizer is Python code, of which there is no tokenizer.json"


@pytest.mark.parametrize(
    ("installed", "says"),
    [(True, "cannot be converted .*; put a tokenizer.json there$"), (False, "; `pip install sentencepiece protobuf`$")],
)
def test_a_tokenizer_that_cannot_be_converted_gives_one_line_before_any_weights_are_read(
    installed: bool, says: str, zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_files, "find_spec", lambda name: object() if installed else None)
    folder = tmp_path / "model"
    zoo.model("llama").config.save_pretrained(folder)
    (folder / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ModelNotSupportedError, match=says) as caught:
        export(ExportRequest(model=str(folder), out=tmp_path / "bundle"))
    assert "\n" not in str(caught.value)
    assert installed or "tiktoken" not in str(caught.value)


def test_the_package_for_sentencepiece_is_not_named_for_a_tokenizer_of_another_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_files, "find_spec", lambda name: None)
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).write_text("x")
    with pytest.raises(ModelNotSupportedError, match=r"cannot be converted .*; put a tokenizer\.json there$"):
        copy_tokenizer(tmp_path, tmp_path, CONFIGS["gpt2"](), MAX_LENGTH)
