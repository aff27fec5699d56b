"""What may be given as a prompt, and its token ids."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from numbers import Integral
from operator import index
from typing import Any

from skipdecode.errors import CapacityError
from skipdecode.text import Tokenizer

Prompts = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]

_REMEDY = "give a text or a list of whole numbers, or a list of these"


def encode(prompts: Prompts, tokenizer: Tokenizer | None, bundle: str) -> list[list[int]]:
    """Token ids of each prompt; `bundle` names the bundle in errors.

    Raises:
        CapacityError: a prompt is neither text nor token ids, or is text that is not UTF-8 or that no tokenizer is there for.
    """
    try:
        is_single = isinstance(prompts, (str, bytes)) or (len(prompts) and _is_number(prompts[0]))
        prompt_list: list[Any] = [prompts] if is_single else list(prompts)
    except (TypeError, KeyError) as error:
        raise CapacityError(f"{reprlib.repr(prompts)} is not a prompt", _REMEDY) from error
    return [_encode_one(prompt, f"prompt {number}", tokenizer, bundle) for number, prompt in enumerate(prompt_list)]


def _encode_one(prompt: Any, where: str, tokenizer: Tokenizer | None, bundle: str) -> list[int]:
    if isinstance(prompt, bytes):  # iterates as numbers, which are not ids
        raise _prompt_error(prompt, where)
    if not isinstance(prompt, str):
        try:
            return [index(token) for token in prompt]
        except TypeError as error:
            raise _prompt_error(prompt, where) from error
    if tokenizer is None:
        raise CapacityError("the bundle has no tokenizer", "give token ids", where=bundle)
    return tokenizer.encode(prompt)


def _prompt_error(prompt: Any, where: str) -> CapacityError:
    return CapacityError(f"{reprlib.repr(prompt)} is neither text nor token ids", _REMEDY, where=where)


def _is_number(value: Any) -> bool:
    """Whether `value` is a single number, numpy's and torch's included. Their arrays of ids are not, nor is numpy's text."""
    return isinstance(value, Integral) or (getattr(value, "ndim", None) == 0 and not isinstance(value, str))
