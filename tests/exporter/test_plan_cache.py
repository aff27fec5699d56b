"""What an export takes over from the bundle that it replaces."""

from __future__ import annotations

import dataclasses
import errno
import os
from importlib import metadata
from pathlib import Path

import onnx_ir as ir
import pytest

from skipdecode.exporter.plan_cache import TIMING_CACHE, KnownPlan, content_key, keep_timings, take_over
from skipdecode.graph_passes import compile_tensorrt
from skipdecode.graph_passes.compile_tensorrt import BuilderOptions, PlanRequest, Profile

GRAPH = """<ir_version: 10, opset_import: ["" : 24]> g (float16[B,S,64] x) => (float16[B,S,64] y) { y = Add (x, x) }"""
REQUEST = PlanRequest(
    target="tensorrt-rtx", source="x.onnx", plan="x.plan", profiles=(Profile(batch=(1, 1, 4), tokens=(1, 1, 1)),)
)


def _key(version: str = "1.7", gpu: str = "", graph: str = GRAPH, **changes: object) -> str:
    request = dataclasses.replace(REQUEST, **changes)  # type: ignore[arg-type]
    return content_key(request, ir.from_onnx_text(graph), version, ("sm89", gpu))


@pytest.mark.parametrize(
    "changes",
    [
        {"version": "1.8"},
        {"gpu": "NVIDIA L4"},
        {"graph": GRAPH.replace("Add", "Mul")},
        {"profiles": (Profile(batch=(1, 1, 8), tokens=(1, 1, 1)),)},
        {"options": BuilderOptions(workspace_mib=64)},
        {"options": BuilderOptions(optimization_level=1)},
        {"capabilities": ("sm86",)},
    ],
    ids=str,
)
def test_a_plan_of_other_inputs_has_another_key(changes: dict[str, object]) -> None:
    assert _key(**changes) != _key()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "setting",
    [
        "tf32=False",
        "config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)",
        "config.max_aux_streams = 0",
        "ProfilingVerbosity.DETAILED",
    ],
)
def test_a_plan_built_with_another_setting_has_another_key(setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans built without REQUIRE_USER_ALLOCATION cannot be captured."""
    key, builder = _key(), Path(compile_tensorrt.__file__).read_text()
    assert builder.count(setting) == 1
    changed = tmp_path / "compile_tensorrt.py"
    changed.write_text(builder.replace(setting, ""))
    monkeypatch.setattr(compile_tensorrt, "__file__", str(changed))
    assert _key() != key


def test_a_plan_configured_by_another_polygraphy_has_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    key = _key()
    monkeypatch.setattr(metadata, "version", {"polygraphy": "0.0.1"}.__getitem__)
    assert _key() != key


def test_a_plans_path_is_not_part_of_its_key() -> None:
    assert _key(source="other/x.onnx", plan="other/x.plan", timing_cache="timing.cache") == _key()


def test_a_known_plan_is_hard_linked_and_one_that_is_gone_is_not_taken_over(tmp_path: Path) -> None:
    plan, path = tmp_path / "old.plan", tmp_path / "new.plan"
    plan.write_bytes(b"kernels")
    known = KnownPlan.at(plan)
    assert take_over(known, path) and path.samefile(plan)
    path.unlink()
    plan.unlink()
    assert not take_over(known, path) and not path.exists()


def test_a_known_plan_is_copied_where_the_file_system_has_no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(plan: Path, path: Path) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(plan))

    monkeypatch.setattr(os, "link", link)
    plan, path = tmp_path / "old.plan", tmp_path / "new.plan"
    plan.write_bytes(b"kernels")
    known = KnownPlan.at(plan)
    assert take_over(known, path) and path.read_bytes() == b"kernels"
    _replace(plan)
    assert not take_over(known, path) and not path.exists()


def test_a_plan_that_another_export_has_replaced_is_not_taken_over(tmp_path: Path) -> None:
    """It has the same name and may have the same size, though it is of another checkpoint."""
    plan, path = tmp_path / "old.plan", tmp_path / "new.plan"
    plan.write_bytes(b"kernels")
    known = KnownPlan.at(plan)
    _replace(plan)
    assert not take_over(known, path) and not path.exists()


def _replace(plan: Path) -> None:
    other = plan.with_name("other.plan")
    other.write_bytes(b"others'")
    other.replace(plan)


def test_the_timing_cache_of_the_bundle_that_is_replaced_is_kept(tmp_path: Path) -> None:
    replaced, partial = tmp_path / "bundle", tmp_path / "partial"
    for folder in (replaced, partial):
        (folder / "targets" / "tensorrt").mkdir(parents=True)
    kept = Path(keep_timings(replaced, partial, "targets/tensorrt"))
    assert kept == partial / "targets" / "tensorrt" / TIMING_CACHE and not kept.exists(), "nothing is known yet"
    (replaced / "targets" / "tensorrt" / TIMING_CACHE).write_bytes(b"timings")
    assert Path(keep_timings(replaced, partial, "targets/tensorrt")).read_bytes() == b"timings"
