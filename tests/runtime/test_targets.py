"""Which of a bundle's targets is chosen, and engines that were made elsewhere."""

from __future__ import annotations

import dataclasses
import platform
from pathlib import Path
from typing import Any

import onnxruntime
import pytest

from skipdecode.cpu import cpu_features
from skipdecode.errors import TargetError
from skipdecode.schedule import full_depth
from skipdecode.targets import choose_target, load_engines
from tests.manifests import make_manifest


@pytest.mark.parametrize(
    ("names", "chosen"), [(("cuda", "cpu"), "cpu"), (("tensorrt", "cuda"), "tensorrt"), (("cpu", "cuda"), "cpu")]
)
def test_unasked_it_is_cpu_or_where_there_is_none_the_first(names: tuple[str, ...], chosen: str, tmp_path: Path) -> None:
    made = make_manifest(full_depth(6), tmp_path)
    targets = tuple(dataclasses.replace(made.targets[0], name=name) for name in names)
    manifest = dataclasses.replace(made, targets=targets)
    assert choose_target(manifest, tmp_path, None).name == chosen
    for name in names:
        assert choose_target(manifest, tmp_path, name).name == name


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"library": "openvino"}, "this version runs no engines of openvino for cpu; export with --target cpu too"),
        ({"name": "rocm"}, "this version runs no engines of onnxruntime for rocm"),
        ({"library_version": "1.0.0"}, "the engines were compiled by onnxruntime 1.0.0"),
        ({"machine": "vax"}, "weights are laid out for vax with .*; this CPU differs; export the model on this machine"),
        ({"cpu_features": ("sve9",)}, "weights are laid out for .* with sve9; this CPU differs"),
    ],
    ids=["library", "device", "version", "machine", "instructions"],
)
def test_engines_of_another_library_or_cpu_are_refused_before_any_is_loaded(
    changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    manifest = make_manifest(full_depth(6), tmp_path)
    here = {"library_version": onnxruntime.__version__, "machine": platform.machine(), "cpu_features": cpu_features()}
    with pytest.raises(TargetError, match=says):
        load_engines(manifest, tmp_path, dataclasses.replace(manifest.targets[0], **{**here, **changes}), None, None)
