"""Text from tokens as they arrive."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from skipdecode.errors import CapacityError
from skipdecode.text import Tokenizer


def _byte_level() -> Tokenizer:
    """GPT-2's and Llama 3's kind: a token is some bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = {("h", "e"): "he", ("\u0120", "w"): "\u0120w", ("\u00c3", "\u00a9"): "\u00c3\u00a9"}
    vocabulary = {token: index for index, token in enumerate([*letters, *merged.values()])}
    backend = Backend(models.BPE(vocab=vocabulary, merges=list(merged)))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>"])
    return Tokenizer(backend)


def _byte_fallback() -> Tokenizer:
    """Llama 2's and Gemma's kind: words, and a token for each byte."""
    tokens = [*(f"<0x{byte:02X}>" for byte in range(256)), "\u2581h", "\u2581w", "he", "\u2581", "\u65e5"]
    backend = Backend(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[], byte_fallback=True))
    spaces = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(spaces)
    backend.add_special_tokens(["</s>"])
    return Tokenizer(backend)


BYTE_LEVEL, BYTE_FALLBACK = _byte_level(), _byte_fallback()


def _streamed(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = tokenizer.stream()
    return [*(stream.put(token) for token in ids), stream.end()]


@given(st.lists(st.integers(0, 259), max_size=12))
def test_the_pieces_of_byte_level_tokens_make_up_the_whole_text(ids: list[int]) -> None:
    assert "".join(_streamed(BYTE_LEVEL, ids)) == BYTE_LEVEL.decode(ids)


@given(st.lists(st.integers(0, 261), max_size=12))
def test_any_tokens_can_be_streamed_with_byte_fallback(ids: list[int]) -> None:
    streamed, whole = "".join(_streamed(BYTE_FALLBACK, ids)), BYTE_FALLBACK.decode(ids)
    assert streamed == whole or "\N{REPLACEMENT CHARACTER}" in whole  # bytes that were text may become part of an invalid run


@pytest.mark.parametrize(
    ("tokens", "pieces"),
    [
        (["\u2581h", "<0xF0>", "<0x9F>", "<0x99>", "<0x82>", "\u2581w"], ["h", "", "", "", "\U0001f642", " w", ""]),
        (["\u2581h", "<0x0A>", "<0xE2>", "\u2581w"], ["h", "\n", "", "\N{REPLACEMENT CHARACTER} w", ""]),
        (["\u2581h", "<0xF0>", "<0x9F>"], ["h", "", "", "\N{REPLACEMENT CHARACTER}" * 2]),
        (["</s>", "\u2581h", "</s>", "\u2581w"], ["", "h", "", " w", ""]),
    ],
    ids=["a character of four bytes", "a newline before a broken one", "broken at the end", "special tokens"],
)
def test_a_piece_comes_when_its_characters_are_complete(tokens: list[str], pieces: list[str]) -> None:
    ids = [BYTE_FALLBACK._tokenizer.token_to_id(token) for token in tokens]
    assert _streamed(BYTE_FALLBACK, ids) == pieces


def test_a_token_is_decoded_with_those_of_the_last_piece_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding all of a long text again for each of its tokens would take longer and longer."""
    decode, given = Tokenizer.decode, []
    monkeypatch.setattr(Tokenizer, "decode", lambda self, ids: (given.append(len(ids)), decode(self, ids))[1])
    assert "".join(_streamed(BYTE_LEVEL, BYTE_LEVEL.encode("hehe!" * 9))) == "hehe!" * 9
    assert max(given) == 2


def test_text_that_is_not_utf_8_is_refused_in_one_line() -> None:
    with pytest.raises(CapacityError, match=r"^prompt: 'a.udcff' is not UTF-8; write it in UTF-8$"):
        BYTE_LEVEL.encode("a\udcff")


def test_text_is_encoded_whole_although_the_tokenizer_file_truncates_and_pads() -> None:
    backend = Backend.from_str(BYTE_LEVEL._tokenizer.to_str())
    whole = BYTE_LEVEL.encode("abc")
    backend.enable_truncation(2)
    backend.enable_padding(length=5)
    assert len(backend.encode("abc").ids) == 5
    assert Tokenizer(backend).encode("abc") == whole
    assert len(whole) == 3
