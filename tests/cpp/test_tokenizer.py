"""Text in C++ (ONNX Runtime GenAI's tokenizers) compared with Hugging Face's tokenizers, token by token."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from skipdecode import text
from skipdecode.exporter.export import ExportRequest, export
from tests.cpp.conftest import Driver

ROOT = Path(__file__).parents[2]
VOCABULARY = 1500
CORPUS = [
    "The Mill is a coffee shop.", " leading and trailing ", "  two   and\t tabs \t\n", "line\nbreaks\r\n\n\n here", "",
    "Café £30 -- naïve “quotes” …", "日本語のテキスト、한국어, русский", "🙂 🇫🇷 e\u0301 \U0001f469\u200d\U0001f467",
    "\u200bzero\u00a0width", "don't I'LL we've 12345 3.14 1,000", "x" * 300, "def f(x):\n    return x  # comment",
    "https://example.org/?a=1&b=2", "ﬁ ligature Å Å", "ALL CAPS And MiXeD", "…" * 10, "tab\tseparated\tvalues",
]  # fmt: skip
SPECIAL = ["</s> and <s> inside", "a</s>b", "<|begin_of_text|>hello<|eot|>"]
_GPT4_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K_SPLIT = "|".join((
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+",
))  # fmt: skip


def _trained(tokenizer: Tokenizer, specials: list[str], **options: object) -> Tokenizer:
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=specials, show_progress=False, **options)
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "examples/e2e/sample.csv", "docs/bundle.md")]
    tokenizer.train_from_iterator([*texts, *CORPUS], trainer)
    return tokenizer


def opt_family() -> tuple[Tokenizer, dict[str, str]]:
    """Byte-level BPE with a `</s>` in front."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    _trained(tokenizer, ["<s>", "<pad>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.post_processor = processors.TemplateProcessing(single="</s> $A", special_tokens=[("</s>", 2)])
    return tokenizer, {"bos_token": "</s>", "eos_token": "</s>", "pad_token": "<pad>"}


def llama_family() -> tuple[Tokenizer, dict[str, str]]:
    """SentencePiece's BPE as transformers converts it (add_eos_token): spaces are characters, unknown characters are bytes."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    # no entry of Llama's vocabulary crosses words, or joins letters with digits or punctuation
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split("▁", "merged_with_next"), pre_tokenizers.Split(Regex(r"[^\p{L}\p{M}▁]"), "isolated"),
    ])  # fmt: skip
    _trained(tokenizer, ["<unk>", "<s>", "</s>", *byte_tokens], limit_alphabet=120)
    # the bytes are ordinary entries of the vocabulary, not special ones
    written = {**json.loads(tokenizer.to_str()), "pre_tokenizer": None}
    written["added_tokens"] = [token for token in written["added_tokens"] if not token["content"].startswith("<0x")]
    tokenizer = Tokenizer.from_str(json.dumps(written))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    return tokenizer, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def _byte_level(split: str, specials: list[str]) -> Tokenizer:
    """Byte-level BPE over a pattern, as in Llama 3 and gpt-oss."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(split), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    return _trained(tokenizer, specials, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


def llama3_family() -> tuple[Tokenizer, dict[str, str]]:
    """Byte-level BPE over GPT-4's pattern."""
    tokenizer = _byte_level(_GPT4_SPLIT, ["<|begin_of_text|>", "<|end_of_text|>"])
    tokenizer.add_special_tokens([AddedToken("<|eot|>", special=True)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 0)]
    )
    return tokenizer, {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}


def gpt_oss_family() -> tuple[Tokenizer, dict[str, str]]:
    """Byte-level BPE over o200k's pattern, which depends on the case of letters, with nothing around a text."""
    tokenizer = _byte_level(_O200K_SPLIT, ["<|startoftext|>", "<|return|>"])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer, {"bos_token": "<|startoftext|>", "eos_token": "<|return|>"}


FAMILIES: dict[str, Callable[[], tuple[Tokenizer, dict[str, str]]]] = {
    "opt": opt_family,
    "llama": llama_family,
    "llama3": llama3_family,
    "gpt_oss": gpt_oss_family,
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tokenizer]:
    """A bundle with the family's tokenizer, saved by transformers, and the tokenizer that transformers uses."""
    folder = tmp_path_factory.mktemp(request.param)
    tokenizer, names = FAMILIES[request.param]()
    saved = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    saved.save_pretrained(folder / "checkpoint")
    config = transformers.OPTConfig(
        num_hidden_layers=4, hidden_size=32, ffn_dim=32, num_attention_heads=2, word_embed_proj_dim=32, vocab_size=2000,
        max_position_embeddings=64,
    )  # fmt: skip
    assert len(saved) <= config.vocab_size, "one size for all families: their models are traced once"
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "checkpoint")
    export(ExportRequest(model=str(folder / "checkpoint"), out=folder / "engines"))
    return folder / "engines", Tokenizer.from_file(str(folder / "checkpoint" / "tokenizer.json"))


def test_ids_and_text_match_hugging_face(family: tuple[Path, Tokenizer], driver: Driver) -> None:
    bundle, tokenizer = family
    found = driver.ask(command="tokenize", bundle=bundle, texts=[*CORPUS, *SPECIAL])
    ids = {text: tokenizer.encode(text).ids for text in [*CORPUS, *SPECIAL]}
    assert dict(zip(ids, found["ids"], strict=True)) == ids
    texts = {text: tokenizer.decode(ids[text], skip_special_tokens=True) for text in CORPUS}
    assert dict(zip(CORPUS, found["texts"], strict=False)) == texts


def _edited(bundle: Path, out: Path, name: str, change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of the bundle in which a JSON file is changed and the manifest updated to match."""
    shutil.copytree(bundle, out)
    data = json.loads((out / name).read_text(encoding="utf-8"))
    change(data)
    (out / name).write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    manifest = json.loads((out / "bundle.json").read_text())
    (entry,) = [file for file in manifest["files"] if file["path"] == name]
    entry["size"] = (out / name).stat().st_size
    (out / "bundle.json").write_text(json.dumps(manifest))
    return out


def test_a_tokenizer_whose_samples_differ_is_refused(family: tuple[Path, Tokenizer], tmp_path: Path, driver: Driver) -> None:
    def change(data: dict[str, Any]) -> None:
        data["samples"][3]["ids"][0] += 1

    bundle = _edited(family[0], tmp_path / "engines", "tokenization.json", change)
    refused = driver.ask(command="tokenize", bundle=bundle, texts=[])["error"]
    assert "'12345 3.14 1,000 9th' differently from Hugging Face" in refused


@pytest.mark.parametrize("family", ["opt"], indirect=True)
@pytest.mark.parametrize("left", ["another", "nothing"])
def test_another_bundles_tokenizer_is_not_taken_for_the_loaded_bundles(
    family: tuple[Path, Tokenizer], tmp_path: Path, left: str
) -> None:
    bundle, driver = shutil.copytree(family[0], tmp_path / "engines"), Driver()
    asked: dict[str, Any] = {"command": "tokenize", "bundle": bundle, "texts": ["a"]}
    assert driver.ask(**asked)["texts"] == ["a"]
    bundle.rename(tmp_path / "before")
    if left == "another":
        shutil.copytree(family[0], bundle)
    assert driver.ask(**asked) == {"code": 1, "error": f"{bundle}: was replaced since it was loaded; load it again"}
    driver.close()


def test_streamed_text_is_the_same_text(family: tuple[Path, Tokenizer], driver: Driver) -> None:
    bundle, tokenizer = family
    found = driver.ask(command="tokenize", bundle=bundle, texts=CORPUS)
    assert [text.lstrip() for text in found["streamed"]] == [
        tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=True).lstrip() for text in CORPUS
    ]


def _pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = text.Tokenizer(tokenizer).stream()
    return [*(stream.put(token) for token in ids), stream.end()]


def test_pieces_match_pythons_even_where_a_text_ends_inside_a_character(family: tuple[Path, Tokenizer], driver: Driver) -> None:
    bundle, tokenizer = family
    texts = [tokenizer.encode(text, add_special_tokens=False).ids for text in CORPUS]
    ids = [whole[:length] for whole in texts for length in (len(whole), len(whole) // 2, len(whole) - 1) if length > 0]
    found = driver.ask(command="tokenize", bundle=bundle, texts=[], ids=ids)
    assert found["pieces"] == [_pieces(tokenizer, row) for row in ids]


def _any_ids(seed: int) -> list[list[int]]:
    """Ids as a model writes them at a high temperature: bytes (the first entries), special tokens, ids without an entry."""
    chance = random.Random(seed)
    lengths = [chance.randint(1, 25) for _ in range(200)]
    return [[chance.randrange(300 if chance.random() < 0.6 else 2000) for _ in range(length)] for length in lengths]


def test_bytes_that_are_not_text_lose_nothing_of_what_follows(family: tuple[Path, Tokenizer], driver: Driver) -> None:
    bundle, tokenizer = family
    ids = _any_ids(0)
    expected = [tokenizer.decode(row, skip_special_tokens=True) for row in ids]
    assert sum("\ufffd" in text.rstrip("\ufffd") for text in expected) > 20 and any("\0" in text for text in expected)
    found = driver.ask(command="tokenize", bundle=bundle, texts=[], ids=ids)
    assert found["whole"] == expected
    assert found["pieces"] == [_pieces(tokenizer, row) for row in ids]


def _of_bytes(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """The ids of single bytes, which byte-level BPE writes in an alphabet of its own."""
    alphabet = bytes_to_unicode()
    fallback = tokenizer.token_to_id("<0x0A>") is not None
    found = [tokenizer.token_to_id(f"<0x{byte:02X}>" if fallback else alphabet[byte]) for byte in data]
    assert all(id_ is not None for id_ in found)
    return [id_ for id_ in found if id_ is not None]


def test_bytes_form_a_character_exactly_where_unicode_says_so(family: tuple[Path, Tokenizer], driver: Driver) -> None:
    """Overlong forms, surrogates, beyond U+10FFFF and cut off: at the edge of each range and next to it."""
    bundle, tokenizer = family
    seconds = (0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0)
    leads = (0x80, 0xBF, 0xC0, 0xC1, 0xC2, 0xDF, 0xE0, 0xE1, 0xEC, 0xED, 0xEE, 0xEF, 0xF0, 0xF1, 0xF3, 0xF4, 0xF5, 0xFF)
    texts = [
        bytes([lead, second, *rest]) for lead in leads for second in seconds for rest in (b"", b"\x80", b"\x80\xbf", b"\xbfa")
    ]
    ids = [_of_bytes(tokenizer, text) for text in texts]
    expected = [tokenizer.decode(row, skip_special_tokens=True) for row in ids]
    assert driver.ask(command="tokenize", bundle=bundle, texts=[], ids=ids)["whole"] == expected
    assert sum("\ufffd" not in text for text in expected) > 20


@pytest.mark.parametrize("family", ["opt"], indirect=True)
def test_an_unknown_decoder_is_left_to_genai(family: tuple[Path, Tokenizer], tmp_path: Path, driver: Driver) -> None:
    decoder = {"type": "Replace", "pattern": {"Regex": "[x]"}, "content": "y"}
    bundle = _edited(family[0], tmp_path / "engines", "tokenizer.json", lambda data: data.update(decoder=decoder))
    words = family[1].encode("The Mill is a shop.").ids
    end = family[1].token_to_id("</s>")
    found = driver.ask(command="tokenize", bundle=bundle, texts=[], ids=[words, [*words, end], [end], [end, end]])
    assert found["whole"] == ["The Mill is a shop.", "The Mill is a shop.", "", ""]


@pytest.mark.parametrize("family", ["opt"], indirect=True)
@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
        {"type": "Metaspace", "replacement": "e", "prepend_scheme": "never", "split": True},
        {"type": "Metaspace", "replacement": "e", "prepend_scheme": "first", "split": True},
        {"type": "Strip", "content": "e", "start": 0, "stop": 1},
        {"type": "Strip", "content": "o", "start": 2, "stop": 0},
        {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "th"}, "content": "tth"}, {"type": "Fuse"}]},
    ],
)
def test_other_decoders_are_followed(
    family: tuple[Path, Tokenizer], tmp_path: Path, driver: Driver, decoder: dict[str, Any]
) -> None:
    bundle = _edited(family[0], tmp_path / "engines", "tokenizer.json", lambda data: data.update(decoder=decoder))
    tokenizer = Tokenizer.from_file(str(bundle / "tokenizer.json"))
    ids = _any_ids(1)
    found = driver.ask(command="tokenize", bundle=bundle, texts=[], ids=ids)
    assert found["whole"] == [tokenizer.decode(row, skip_special_tokens=True) for row in ids]


@pytest.mark.parametrize("family", ["opt"], indirect=True)
@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.pop("decoder"),
        lambda data: data.update(decoder={}),
        lambda data: data["model"]["vocab"].update(word="x"),
    ],
)
def test_a_tokenizer_json_that_decoding_cannot_use_is_refused_in_one_line(
    family: tuple[Path, Tokenizer], tmp_path: Path, driver: Driver, change: Callable[[dict[str, Any]], object]
) -> None:
    bundle = _edited(family[0], tmp_path / "engines", "tokenizer.json", change)
    refused = driver.ask(command="tokenize", bundle=bundle, texts=[])["error"]
    assert "tokenizer.json: cannot be read (" in refused and refused.endswith("; export the model again")


@pytest.mark.parametrize("family", ["opt"], indirect=True)
def test_a_tokenizer_json_that_memory_does_not_hold_is_not_called_damaged(family: tuple[Path, Tokenizer], tmp_path: Path) -> None:
    def change(data: dict[str, Any]) -> None:
        data["added_tokens"].append({**data["added_tokens"][0], "id": 1999, "content": "x" * 3_000_000})

    bundle = _edited(family[0], tmp_path / "engines", "tokenizer.json", change)
    (tmp_path / "malloc.c").write_text(
        "#include <stddef.h>\n"
        "void *__libc_malloc(size_t);\n"
        "void *malloc(size_t size) { return size > 3500000 && size < 4500000 ? NULL : __libc_malloc(size); }\n"
    )
    library = tmp_path / "malloc.so"
    subprocess.run(["gcc", "-shared", "-fPIC", tmp_path / "malloc.c", "-o", library], check=True, timeout=60)
    driver = Driver(LD_PRELOAD=str(library))
    answer = driver.ask(command="tokenize", bundle=bundle, texts=[])
    driver.close()
    assert answer == {"code": 3, "error": "out of memory; ask for fewer rows or tokens, or free some"}


def test_a_bundle_without_a_tokenizer_and_a_missing_library_are_reported(
    conformance_bundle: Callable[[str], Path], family: tuple[Path, Tokenizer]
) -> None:
    driver, missing = Driver(), "/nowhere/libonnxruntime-genai.so"
    refused = driver.ask(command="tokenize", bundle=conformance_bundle("opt"), texts=["a"], genai_library=missing)
    assert refused["error"].endswith("the bundle has no tokenizer; give token ids"), "which no library could change"
    refused = driver.ask(command="tokenize", bundle=family[0], texts=["a"], genai_library=missing)
    assert refused["error"].startswith("ONNX Runtime GenAI, whose tokenizers this library uses, cannot be loaded (/nowhere/")
    assert refused["error"].endswith("install it, set LD_LIBRARY_PATH, or name it in skd_tokenizer_create")
    refused = driver.ask(command="tokenize", bundle=conformance_bundle("opt"), texts=["a"])
    assert refused["error"].endswith("the bundle has no tokenizer; give token ids")
    refused = driver.ask(command="tokenize", bundle=family[0], texts=["ab\0cd"])
    assert refused["error"] == "the text holds a NUL character, which would end it; leave it out"
    assert driver.ask(command="tokenize", bundle=family[0], texts=["a"])["texts"] == ["a"]
    driver.close()
