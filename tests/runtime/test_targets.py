"""Which of a bundle's targets is chosen, and how engines and plans made elsewhere are refused."""

from __future__ import annotations

import dataclasses
import os
import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import pytest

import skipdecode
from skipdecode import manifest as manifests
from skipdecode import targets
from skipdecode.cpu import cpu_features
from skipdecode.device import HostDevice
from skipdecode.engines import tensorrt_library
from skipdecode.errors import CapacityError, TargetError
from skipdecode.schedule import Anchor, full_depth
from skipdecode.targets import choose_target, load_engines
from tests.manifests import make_manifest
from tests.runtime import device
from tests.zoo import Zoo

Bundles = Callable[[Anchor], Path]


@pytest.mark.parametrize(
    ("names", "chosen"), [(("cuda", "cpu"), "cpu"), (("tensorrt", "cuda"), "tensorrt"), (("cpu", "cuda"), "cpu")]
)
def test_the_default_is_cpu_or_else_the_first_target(names: tuple[str, ...], chosen: str, tmp_path: Path) -> None:
    made = make_manifest(full_depth(6), tmp_path)
    targets = tuple(dataclasses.replace(made.targets[0], name=name) for name in names)
    manifest = dataclasses.replace(made, targets=targets)
    assert choose_target(manifest, tmp_path, None).name == chosen
    for name in names:
        assert choose_target(manifest, tmp_path, name).name == name


def test_a_bundle_of_no_targets_is_refused(tmp_path: Path) -> None:
    manifest = dataclasses.replace(make_manifest(full_depth(6), tmp_path), targets=())
    with pytest.raises(TargetError, match="target 'cpu' is not in this bundle; choose from none"):
        choose_target(manifest, tmp_path, None)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"library": "openvino"}, "this version does not run openvino engines for cpu; export with --target cpu too"),
        ({"name": "rocm"}, "this version does not run onnxruntime engines for rocm"),
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


class _Gpu(HostDevice):
    capability = "sm86"


class _OldGpu(HostDevice):
    capability = "sm75"


@pytest.mark.parametrize(
    ("built_for", "gpu", "version", "says"),
    [
        (
            "sm89", _Gpu, "1.0.0",
            r"were built by tensorrt-rtx \S+, but 1\.0\.0 is installed; .* --target tensorrt-rtx:sm89 --force$",
        ),
        ("sm86 sm89", _Gpu, "1.0.0", r"but 1\.0\.0 is installed; .* --target tensorrt-rtx:sm86,sm89 --force$"),
        ("sm80 and later", _Gpu, "1.0.0", r"but 1\.0\.0 is installed; .* --target tensorrt-rtx --force$"),
        (
            "sm89", _Gpu, None,
            r"are for sm89, but this GPU is sm86; .*:sm86 --force, or with --target cuda if that is not supported$",
        ),
        (
            "sm80 and later", _OldGpu, None,
            r"are for sm80 and later, but this GPU is sm75; .* --target tensorrt-rtx:sm75 --force, or",
        ),
    ],
)  # fmt: skip
def test_plans_for_another_version_or_gpu_are_refused_with_what_rebuilds_them(
    built_for: str, gpu: type[HostDevice], version: str | None, says: str, gpu_bundle: Bundles, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    bundle = shutil.copytree(gpu_bundle(Anchor.GENERATED), tmp_path / "bundle", copy_function=os.link)
    (bundle / "bundle.json").unlink()
    made = manifests.read(gpu_bundle(Anchor.GENERATED))
    plans = [dataclasses.replace(target, machine=built_for) for target in made.targets if target.name == "tensorrt-rtx"]
    manifests.write(dataclasses.replace(made, targets=tuple(plans)), bundle)
    monkeypatch.setattr("skipdecode.targets.CudaDevice", gpu)
    if version:
        monkeypatch.setattr(tensorrt_library.library("tensorrt-rtx"), "__version__", version)
    with pytest.raises(TargetError, match=says) as caught:
        skipdecode.load(bundle, target="tensorrt-rtx")
    assert "\n" not in str(caught.value)


def test_plans_that_tensorrt_built_on_another_gpu_are_refused(tensorrt_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device.stand_in(tensorrt_bundle, monkeypatch, "tensorrt")
    monkeypatch.setattr("skipdecode.targets.CudaDevice", _Gpu)
    says = r"the plans are for sm89, but this GPU is sm86; export the model again with --target tensorrt --force$"
    with pytest.raises(TargetError, match=says):
        skipdecode.load(tensorrt_bundle, target="tensorrt")


def test_kernels_are_kept_for_each_kind_of_gpu_and_each_bundle(tmp_path: Path) -> None:
    for name, content in (("one", "{}"), ("copy", "{}"), ("other", "{ }")):
        (tmp_path / name).mkdir()
        (tmp_path / name / manifests.MANIFEST).write_text(content)
    one, copy, other, elsewhere = (
        targets._kernel_file(tmp_path / name, gpu)
        for name, gpu in (("one", "H100"), ("copy", "H100"), ("other", "H100"), ("one", "L4"))
    )
    assert one == copy and len({one, other, elsewhere}) == 3


def test_engines_that_do_not_fit_in_memory_are_reported_in_one_line(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(targets, "OrtEngine", load)
    with pytest.raises(CapacityError, match=r"opt\.bundle: does not fit in memory; free some memory$"):
        skipdecode.load(zoo.bundle("opt"))


def test_without_a_gpu_plans_are_refused_in_one_line(gpu_bundle: Bundles) -> None:
    if shutil.which("nvidia-smi"):
        pytest.skip("there may be a GPU here")
    with pytest.raises(TargetError, match="there is no NVIDIA driver here; choose a machine with a GPU, or another --target"):
        skipdecode.load(gpu_bundle(Anchor.GENERATED), target="tensorrt-rtx")
