"""Text in and out, by the tokenizer that the checkpoint came with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import tokenizers
from tokenizers.decoders import DecodeStream

from skipdecode.errors import BundleError


class Tokenizer:
    """A `tokenizer.json`, encoding as transformers does (special tokens added as the file says)."""

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
        """Token ids of `text`."""
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`, special tokens left out."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def stream(self) -> Callable[[int], str]:
        """A function that takes the next id and gives the text that is now whole characters, or nothing."""
        stream = DecodeStream(skip_special_tokens=True)
        return lambda token: stream.step(self._tokenizer, token) or ""
