"""The target `tensorrt`: the package's own bindings without libraries, and TensorRT-RTX in their place."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tensorrt_rtx

from skipdecode import manifest as manifests
from skipdecode.cuda_driver import Gpu
from skipdecode.errors import SkipDecodeError
from skipdecode.exporter import feasible, tensorrt_target
from skipdecode.exporter.export import export
from skipdecode.exporter.targets import parse_targets
from skipdecode.graph_passes.compile_tensorrt import BuilderOptions
from tests.exporter.plan_requests import longer_checkpoint, plan_request
from tests.standin import package
from tests.zoo import Zoo


def _as_tensorrt(patch: pytest.MonkeyPatch) -> None:
    """TensorRT-RTX in this process as the package `tensorrt`."""
    named = SimpleNamespace(**{**vars(tensorrt_rtx), "__name__": "tensorrt", "__version__": package.VERSIONS[-1]})
    patch.setitem(sys.modules, "tensorrt", named)


def _at_hand(patch: pytest.MonkeyPatch, name: str = "a GPU", memory_bytes: int = 1 << 30) -> None:
    for module in (feasible, tensorrt_target):
        patch.setattr(module, "gpu_at_hand", lambda: Gpu(name=name, capability="sm89", memory_bytes=memory_bytes))


@pytest.mark.parametrize(
    ("target", "gpus"),
    [
        ("tensorrt-rtx", ("sm80 and later", "")),
        ("tensorrt-rtx:sm86,sm89", ("sm86 sm89", "")),
        ("tensorrt", ("sm89", "NVIDIA L4")),
    ],
)
def test_plans_are_for_the_gpus_that_are_named_or_the_one_at_hand_or_all_that_the_library_serves(
    target: str, gpus: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _as_tensorrt(monkeypatch)
    _at_hand(monkeypatch, name="NVIDIA L4")
    assert tensorrt_target._gpus(*parse_targets([target])) == gpus


@pytest.mark.parametrize("version", package.VERSIONS)
def test_without_a_gpu_the_tensorrt_target_is_refused_before_anything_is_written(version: str, zoo: Zoo, tmp_path: Path) -> None:
    out = tmp_path / "outs" / "bundle"
    done = package.export(package.bindings(version, tmp_path / "package"), zoo.checkpoint("opt"), out)
    assert (done.returncode, done.stderr) == (2, "tensorrt found no GPU to build on; build with --target tensorrt-rtx:smNN\n")
    assert not out.parent.exists()


def test_bindings_without_their_libraries_say_which_one_is_missing(zoo: Zoo, tmp_path: Path) -> None:
    environment = package.bindings(package.VERSIONS[-1], tmp_path / "package", libraries=False)
    done = package.export(environment, zoo.checkpoint("opt"), tmp_path / "outs" / "bundle")
    says = r"--target: tensorrt cannot be loaded \(lib\S+\.so\.11: cannot open .*\); docs/tensorrt\.md says where to get it\n"
    assert done.returncode == 2 and re.fullmatch(says, done.stderr), done.stderr
    assert not (tmp_path / "outs").exists()


@pytest.mark.parametrize("model", ["llama", "lfm2"])
def test_a_row_that_the_gpu_at_hand_cannot_hold_is_refused_with_a_length_that_it_can(
    zoo: Zoo, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _as_tensorrt(monkeypatch)
    wanted = {"targets": ("tensorrt",), "max_length": 600, "model": str(longer_checkpoint(zoo, model, tmp_path))}
    weights, config = 2 * sum(weight.numel() for weight in zoo.model(model).parameters()), zoo.model(model).config
    kinds = getattr(config, "layer_types", ["full_attention"] * config.num_hidden_layers)
    head_size = config.hidden_size // config.num_attention_heads
    slot = 4 * kinds.count("full_attention") * config.num_key_value_heads * head_size
    states = kinds.count("conv") and 4 * kinds.count("conv") * config.hidden_size * (config.conv_L_cache - 1)

    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))  # what is checked next

    def refused(slots: int) -> str:
        _at_hand(monkeypatch, memory_bytes=weights + states + slots * slot)
        with pytest.raises(SkipDecodeError) as caught:
            export(plan_request(zoo, model, tmp_path / "outs" / "bundle", **wanted))
        return str(caught.value)

    says = (
        r"--max-length: a row of 600 tokens takes \d MiB on top of \d MiB of weights, but the GPU \(a GPU\) has \d MiB; choose "
    )
    fitting = ((599, "512 or less"), (512, "512 or less"), (200, "128 or less"), (100, "--quantize int4, or a larger GPU"))
    for slots, remedy in fitting:
        assert re.fullmatch(says + remedy, refused(slots))
    assert "MiB are free, but the bundle needs" in refused(600)
    weights, wanted["quantize"] = weights * 5 // 16, "int4"
    assert re.fullmatch(says + "a larger GPU", refused(100))
    assert "MiB are free, but the bundle needs" in refused(600)


@pytest.mark.parametrize("version", package.VERSIONS)
def test_the_tensorrt_target_builds_with_what_each_version_of_the_package_has(version: str, zoo: Zoo, tmp_path: Path) -> None:
    environment = package.builder(version, tmp_path / "package")
    done = package.export(
        environment, zoo.checkpoint("llama"), tmp_path / "bundle", "--slim", "--quantize", "int4", "--workspace", 64
    )
    assert done.returncode == 0, done.stderr
    (target,) = manifests.read(tmp_path / "bundle").targets
    assert (target.name, target.library, target.library_version) == ("tensorrt", "tensorrt", version)
    assert (target.machine, target.weights) == ("sm89", "int4"), "the GPU at hand"


def test_the_tensorrt_target_keeps_its_timing_cache_and_the_plans_of_the_same_gpu(
    zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorRT-RTX stands in for the libraries; its cache has no timings."""
    environment = package.builder(package.VERSIONS[-1], tmp_path / "package")
    monkeypatch.setenv("PYTHONPATH", environment["PYTHONPATH"])  # for the builders' processes
    _as_tensorrt(monkeypatch)
    out = tmp_path / "bundle"
    cache, plan = (out / "targets" / "tensorrt" / name for name in ("timing.cache", "head.plan"))

    def built(gpu: str, **options: int) -> int:
        _at_hand(monkeypatch, name=gpu)
        wanted = {"targets": ("tensorrt",), "slim": True, "force": True, "builder": BuilderOptions(**options)}
        export(plan_request(zoo, "opt", out, **wanted))
        return plan.stat().st_ino

    first, kept = built("one"), cache.read_bytes()
    assert kept and {file.path for file in manifests.read(out).files if "timing" in file.path} == {
        "targets/tensorrt/timing.cache"
    }
    assert built("one") == first
    other = built("one", workspace_mib=64, optimization_level=1)
    assert other != first, "built with other options"
    assert built("another", workspace_mib=64, optimization_level=1) != other, "built on another GPU"
    assert cache.read_bytes() == kept
