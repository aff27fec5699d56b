"""Copied to where Python finds it as the package `tensorrt`: TensorRT-RTX without what the real one (names.json) lacks."""

from __future__ import annotations

import json
from pathlib import Path

import tensorrt_rtx

_real = json.loads(Path(__file__).with_name("names.json").read_text(encoding="utf-8"))
__version__ = _real["version"]

for _name, _members in _real["names"].items():
    if hasattr(tensorrt_rtx, _name):
        globals()[_name] = _value = getattr(tensorrt_rtx, _name)
        for _own in [] if _members is None else set(vars(_value)) - set(_members):
            if not _own.startswith("_"):
                delattr(_value, _own)
