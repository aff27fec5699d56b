"""Text to token ids and back, with the tokenizer that the checkpoint came with."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Iterable
from pathlib import Path

import tokenizers

from skipdecode.errors import BundleError, CapacityError

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # stands for bytes that are not a character, or not yet a whole one


def is_utf8(path: Path) -> bool:
    """Whether `path`, whose bytes may be any but 0, is UTF-8, which libraries not written in Python require."""
    return os.fsencode(path).decode(errors="replace") == str(path)


def printable(line: str) -> str:
    """A line that a terminal only displays: names come from a bundle and may hold anything, even terminal codes."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)


class Tokenizer:
    """A `tokenizer.json`. Encodes as the file says, special tokens included, but neither truncates nor pads."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        tokenizer.no_truncation()
        tokenizer.no_padding()

    @classmethod
    def of(cls, bundle: Path) -> Tokenizer | None:
        """The bundle's tokenizer; None if the checkpoint had none.

        Raises:
            BundleError: tokenizer.json cannot be read.
        """
        path = bundle / "tokenizer.json"
        if not path.is_file():
            return None
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # tokenizers raises plain Exception
            raise BundleError(f"cannot be read ({error})", "export the model again", where=str(path)) from error

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`.

        Raises:
            CapacityError: `text` cannot be encoded in UTF-8, as with a command-line argument of other bytes.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise CapacityError(f"{reprlib.repr(text)} is not UTF-8", "write it in UTF-8", where="prompt") from error
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`, special tokens left out."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def stream(self) -> TextStream:
        """A `TextStream` for one row."""
        return TextStream(self)


class TextStream:
    """One row's text as its tokens arrive, whole characters at a time.

    tokenizers' own DecodeStream raises if a byte that it has already emitted (`<0x0A>`) turns out to start an invalid sequence.
    Text is decoded from the last emitted piece on, because a token's text depends on the token before it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # those of the last emitted piece, and those after it
        self._emitted_count = 0  # how many of them belong to that piece

    def put(self, token: int) -> str:
        """Take the next id; returns the text that it completes, or an empty string."""
        self._ids.append(token)
        piece = self._pending_text()
        if not piece or piece.endswith(_INCOMPLETE):
            return ""
        self._ids, self._emitted_count = self._ids[self._emitted_count :], len(self._ids) - self._emitted_count
        return piece

    def end(self) -> str:
        """The text that was still waiting for the rest of a character's bytes."""
        return self._pending_text()

    def _pending_text(self) -> str:
        return self._tokenizer.decode(self._ids)[len(self._tokenizer.decode(self._ids[: self._emitted_count])) :]
