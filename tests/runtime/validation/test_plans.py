"""Plans, run by the library's stand-in, compared with ONNX Runtime's results."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from safetensors.numpy import load_file

from skipdecode.cli import validate
from skipdecode.errors import BundleError
from skipdecode.schedule import Anchor
from skipdecode.validation import validate as validation
from skipdecode.validation.plans import measure_plans
from tests.runtime import device

QUICK = ["--batch", "1", "--context", "16", "--prompt-tokens", "8", "--new-tokens", "6", "--target", "tensorrt-rtx"]


def test_every_plan_agrees_in_a_prompts_pass_and_in_a_step(
    gpu_bundle: Callable[[Anchor], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    generator = device.load(gpu_bundle(Anchor.ABSOLUTE), "tensorrt-rtx", None, monkeypatch)
    assert validate.main([str(generator.path), *QUICK, "--json"]) == 0
    (target,) = json.loads(capsys.readouterr().out)["targets"]
    segments = len(generator.manifest.segments)
    assert [row["pass"] for row in target["plans"]] == ["prompt", "step"] * segments
    assert all(row["holds"] and row["relative_error"] < 0.02 for row in target["plans"])


def test_a_plan_that_computes_something_else_is_found(
    gpu_bundle: Callable[[Anchor], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(gpu_bundle(Anchor.GENERATED), bundle)
    generator = device.load(bundle, "tensorrt-rtx", None, monkeypatch)
    before = measure_plans(generator)
    assert before is not None and all(row["holds"] for row in before)
    # changes not the plans but what they are compared with: the standard graphs' weights
    weights = bundle / "graphs" / "weights.safetensors"
    name = next(name for name in load_file(weights) if "layers.1." in name and "v_proj.weight" in name)
    graph = ir.load(bundle / "graphs" / "layer_001.onnx").graph
    tensor = graph.initializers[name].const_value
    assert isinstance(tensor, ir.ExternalTensor) and tensor.offset is not None
    data = bytearray(weights.read_bytes())
    half = np.frombuffer(data, np.float16, tensor.size, tensor.offset)
    data[tensor.offset : tensor.offset + tensor.nbytes] = (half * np.float16(1.2)).tobytes()
    (tmp_path / "changed").write_bytes(data)
    (tmp_path / "changed").rename(weights)  # a new file, since the engines have the old one mapped
    after = measure_plans(generator)
    assert after is not None
    broken = {row["name"] for row in after if not row["holds"]}
    assert broken == {f"segment_{index:03d}" for index, layers in enumerate(generator.manifest.segments) if 1 in layers}


@pytest.mark.parametrize("holds", [True, False])
def test_a_plan_that_differs_is_named_and_exit_is_1(
    holds: bool, gpu_bundle: Callable[[Anchor], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    generator = device.load(gpu_bundle(Anchor.ABSOLUTE), "tensorrt-rtx", None, monkeypatch)
    row = {"name": "segment_001", "pass": "step", "output": "hidden", "relative_error": 0.25}
    rows = [{**row, "name": "segment_000", "holds": True}, {**row, "holds": holds}]
    for name in ("measure_cell", "measure_workload", "_gb_per_s"):
        monkeypatch.setattr(validation, name, lambda *_: None)
    monkeypatch.setattr(validation, "measure_plans", lambda *_: rows)
    assert validate.main([str(generator.path), *QUICK, "--quiet"]) == (0 if holds else 1)
    line = "does not hold: tensorrt-rtx segment_001 (step): hidden differs from ONNX Runtime's by 0.25 of its largest value"
    assert capsys.readouterr().err.splitlines() == ([] if holds else [line])


def test_a_slim_bundle_has_nothing_to_compare_with(gpu_bundle: Callable[[Anchor], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    generator = device.load(gpu_bundle(Anchor.GENERATED), "tensorrt-rtx", None, monkeypatch)
    variants = tuple(dataclasses.replace(variant, graph=None) for variant in generator.manifest.variants)
    generator.manifest = dataclasses.replace(generator.manifest, variants=variants)
    assert measure_plans(generator) is None


def test_plans_are_not_compared_with_the_graphs_of_a_bundle_that_replaced_theirs(
    gpu_bundle: Callable[[Anchor], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bundle = shutil.copytree(gpu_bundle(Anchor.GENERATED), tmp_path / "bundle")
    generator = device.load(bundle, "tensorrt-rtx", None, monkeypatch)
    bundle.rename(tmp_path / "old")
    shutil.copytree(gpu_bundle(Anchor.ABSOLUTE), bundle)
    with pytest.raises(BundleError, match=r"bundle: was replaced after it was loaded; validate it again$"):
        measure_plans(generator)
