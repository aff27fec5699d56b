"""JSON to frozen dataclasses, strictly: exactly the declared keys, with values of exactly the declared types."""

from __future__ import annotations

import dataclasses
import enum
import reprlib
import types
import typing
from typing import Any


class MalformedError(ValueError):
    """JSON that does not match its declaration; the message says where, and what is there."""


def decode(kind: Any, data: Any, where: str = "") -> Any:
    """Convert parsed JSON to a value of type `kind`.

    Args:
        kind: a frozen dataclass, a tuple of items of one kind, an enum of strings, int, str, or a union of one of these and None.
        data: what `json.loads` gives.
        where: the path from the root to `data`, for messages.

    Raises:
        MalformedError: an unknown or missing key, or a value of another type.
    """
    if dataclasses.is_dataclass(kind):
        return _decode_object(kind, data, where)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        if not isinstance(data, list):
            raise _malformed_error(where, "a list", data)
        return tuple(decode(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(data))
    if origin is types.UnionType:
        return None if data is None else decode(arguments[0], data, where)
    if issubclass(kind, enum.Enum):
        known = [member.value for member in kind]
        if data not in known:
            raise _malformed_error(where, " or ".join(known), data)
        return kind(data)
    if type(data) is not kind:
        raise _malformed_error(where, {int: "a whole number", str: "a string"}[kind], data)
    return data


def _decode_object(kind: Any, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise _malformed_error(where, "an object", data)
    hints = typing.get_type_hints(kind)
    mismatched = sorted(set(data) ^ set(hints))
    if mismatched:
        word = "unknown" if mismatched[0] in data else "missing"
        key = reprlib.repr(mismatched[0])
        raise MalformedError(f"{where or 'the manifest'} has {word} key {key}")
    return kind(**{name: decode(hint, data[name], f"{where}.{name}".lstrip(".")) for name, hint in hints.items()})


def _malformed_error(where: str, wanted: str, data: Any) -> MalformedError:
    shown = reprlib.repr(data)  # short, and safe on deeply nested data
    return MalformedError(f"{where or 'the manifest'} is {shown}, not {wanted}")
