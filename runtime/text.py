"""Text in and out, by the tokenizer that the checkpoint came with."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Iterable
from pathlib import Path

import tokenizers

from skipdecode.errors import BundleError, CapacityError

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what bytes decode to that are no character, or not one yet


def is_utf8(path: Path) -> bool:
    """Whether libraries that are not written in Python can be given a path, whose bytes may be any but 0."""
    return os.fsencode(path).decode(errors="replace") == str(path)


class Tokenizer:
    """A `tokenizer.json`: it encodes as the file says, special tokens included."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        tokenizer.no_truncation()
        tokenizer.no_padding()

    @classmethod
    def of(cls, bundle: Path) -> Tokenizer | None:
        """The bundle's tokenizer; None where the checkpoint had none.

        Raises:
            BundleError: a tokenizer.json that cannot be read.
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
            CapacityError: it holds what no UTF-8 can, as an argument of other bytes does.
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
        """For one row's tokens as they come."""
        return TextStream(self)


class TextStream:
    """One row's text as it is made, whole characters at a time.

    tokenizers' own DecodeStream raises where a byte that was given already (`<0x0A>`) turns out to be the first of invalid ones.
    Text is decoded from the last given piece on, because what a token looks like depends on the one before it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # of the last piece that was given, and those that came since
        self._given = 0  # how many of them are in that piece

    def put(self, token: int) -> str:
        """Take the next id; the text that is whole with it, or nothing."""
        self._ids.append(token)
        piece = self._rest()
        if not piece or piece.endswith(_INCOMPLETE):
            return ""
        self._ids, self._given = self._ids[self._given :], len(self._ids) - self._given
        return piece

    def end(self) -> str:
        """What waited for more bytes of a character."""
        piece, self._given = self._rest(), len(self._ids)
        return piece

    def _rest(self) -> str:
        return self._tokenizer.decode(self._ids)[len(self._tokenizer.decode(self._ids[: self._given])) :]
