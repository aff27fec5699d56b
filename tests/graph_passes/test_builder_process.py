"""Each builder runs in a process of its own: what is reported when it fails, and how it ends."""

from __future__ import annotations

import dataclasses
import io
import os
import subprocess
import sys
import threading
from pathlib import Path

import onnx_ir as ir
import pytest

from skipdecode.errors import TargetError
from skipdecode.graph_passes import compile_tensorrt
from skipdecode.graph_passes.compile_tensorrt import BuilderOptions, PlanRequest, Profile, build_in_process
from tests.processes import children, ends, proc_file, within

DECODE = Profile(batch=(1, 1, 4), tokens=(1, 1, 1))


def _graph(folder: Path) -> Path:
    """The smallest graph that a plan can be built from."""
    text = """<ir_version: 10, opset_import: ["" : 24]> g (float16[B,S,64] x) => (float16[B,S,64] y) { y = Add (x, x) }"""
    ir.save(ir.from_onnx_text(text), folder / "x.onnx")
    return folder / "x.onnx"


def _replace_builder(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a shell script instead of the builder's process."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))


@pytest.mark.parametrize(
    ("status", "says"),
    [
        (1, r"x\.plan: the tensorrt-rtx builder failed \(MemoryError: 3 GiB\); export for cuda, which needs no builder$"),
        (2, r"^x\.plan: the parser refused it$"),
        (4, r"x\.plan: the tensorrt-rtx builder failed \(no output\); export for cuda, .*"),
    ],
)
def test_the_last_line_of_a_failed_builders_output_is_reported(
    status: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {
        1: "Traceback (most recent call last):\n  File x\nMemoryError: 3 GiB\n",
        2: "a warning\nx.plan: the parser refused it",
    }
    (tmp_path / "said").write_text(said.get(status, ""))
    _replace_builder(f"cat > {tmp_path}/asked; cat {tmp_path}/said >&2; exit {status}", tmp_path, monkeypatch)
    with pytest.raises(TargetError, match=says):
        build_in_process(
            PlanRequest(target="tensorrt-rtx", source="", plan=str(tmp_path / "x.plan"), profiles=(DECODE,)), threading.Event()
        )


def test_the_whole_request_reaches_the_builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = PlanRequest(
        target="tensorrt-rtx", source="x.onnx", plan="x.plan", profiles=(DECODE,), capabilities=("sm86", "sm89"),
        options=BuilderOptions(workspace_mib=64, optimization_level=1), timing_cache="timing.cache",
    )  # fmt: skip
    _replace_builder(f"cat > {tmp_path}/asked", tmp_path, monkeypatch)
    build_in_process(request, threading.Event())
    built: list[PlanRequest] = []
    monkeypatch.setattr(sys, "stdin", io.StringIO((tmp_path / "asked").read_text()))
    monkeypatch.setattr(compile_tensorrt, "end_with", lambda parent: None)
    monkeypatch.setattr(compile_tensorrt, "build_plan", built.append)
    assert compile_tensorrt._main() == 0
    (made,) = built
    assert dataclasses.replace(made, capabilities=tuple(made.capabilities)) == request


def test_a_builder_is_killed_when_it_is_no_longer_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _replace_builder("exec sleep 600", tmp_path, monkeypatch)
    stop = threading.Event()
    stop.set()
    with pytest.raises(TargetError, match="the tensorrt-rtx builder was killed"):
        build_in_process(PlanRequest(target="tensorrt-rtx", source="", plan="x.plan", profiles=(DECODE,)), stop)


def test_a_builder_that_makes_no_progress_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _replace_builder("exec sleep 600", tmp_path, monkeypatch)
    monkeypatch.setattr(compile_tensorrt, "_STANDSTILL_S", 1)
    says = r"^x\.plan: the tensorrt-rtx builder made no progress for 1 s, probably for lack of memory; free some$"
    with pytest.raises(TargetError, match=says):
        build_in_process(PlanRequest(target="tensorrt-rtx", source="", plan="x.plan", profiles=(DECODE,)), threading.Event())


def test_a_builder_is_waited_for_though_the_exporter_was_paused_for_longer_than_a_builder_may_stand_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = sys.executable
    _replace_builder("kill -STOP $PPID; sleep 1.5; kill -CONT $PPID; sleep 0.4", tmp_path, monkeypatch)
    code = f"""
import sys, threading
from skipdecode.graph_passes import compile_tensorrt
sys.executable, compile_tensorrt._STANDSTILL_S = {sys.executable!r}, 1
request = compile_tensorrt.PlanRequest(target="tensorrt-rtx", source="", plan="x.plan", profiles=())
compile_tensorrt.build_in_process(request, threading.Event())
"""
    subprocess.run([python, "-c", code], check=True, timeout=60)


def test_a_builder_that_uses_the_cpu_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = sys.executable
    _replace_builder(f"exec {python} -c 'import time\nwhile time.process_time() < 1.5: pass'", tmp_path, monkeypatch)
    monkeypatch.setattr(compile_tensorrt, "_STANDSTILL_S", 1)
    build_in_process(PlanRequest(target="tensorrt-rtx", source="", plan="x.plan", profiles=(DECODE,)), threading.Event())


def test_a_builder_ends_with_an_exporter_that_is_killed(tmp_path: Path) -> None:
    source, plan = _graph(tmp_path), tmp_path / "x.plan"
    os.mkfifo(plan)  # nobody reads the FIFO, so writing the plan blocks for ever
    code = f"""
import threading
from skipdecode.graph_passes.compile_tensorrt import PlanRequest, Profile, build_in_process
profile = Profile(batch={DECODE.batch}, tokens={DECODE.tokens})
request = PlanRequest(
    target="tensorrt-rtx", source="{source}", plan="{plan}", profiles=(profile,), capabilities=("sm89",)
)
build_in_process(request, threading.Event())
"""
    with subprocess.Popen([sys.executable, "-c", code]) as exporter:
        try:
            assert within(60, lambda: children(exporter.pid))
            (builder,) = children(exporter.pid)
            assert within(60, lambda: proc_file(builder, "wchan") in ("wait_for_partner", "0")), (
                "the builder has not reached the write (wchan is 0 where the kernel hides it)"
            )
        finally:
            exporter.kill()
    assert ends(builder)


@pytest.mark.parametrize(
    ("name", "says"), [("SEGV", "ended by signal 11"), ("KILL", "was killed, probably for lack of memory; free some")]
)
def test_the_signal_that_ended_a_builder_is_reported(
    name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _replace_builder(f"kill -{name} $$", tmp_path, monkeypatch)
    with pytest.raises(TargetError, match=rf"x\.plan: the tensorrt-rtx builder {says}"):
        build_in_process(PlanRequest(target="tensorrt-rtx", source="", plan="x.plan", profiles=(DECODE,)), threading.Event())


def test_a_full_disk_is_an_oserror(tmp_path: Path) -> None:
    request = PlanRequest(
        target="tensorrt-rtx", source=str(_graph(tmp_path)), plan="/dev/full", profiles=(DECODE,), capabilities=("sm89",)
    )
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        build_in_process(request, threading.Event())


def test_a_file_in_the_working_directory_does_not_shadow_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("raise RuntimeError('the user has a json.py')\n")
    monkeypatch.chdir(tmp_path)
    test_a_parser_error_in_the_builder_process_is_one_line(tmp_path)


def test_a_parser_error_in_the_builder_process_is_one_line(tmp_path: Path) -> None:
    request = PlanRequest(
        target="tensorrt-rtx", source=str(tmp_path / "none.onnx"), plan=str(tmp_path / "x.plan"), profiles=(DECODE,)
    )
    with pytest.raises(TargetError, match=r"x\.plan: tensorrt-rtx's parser refused it") as caught:
        build_in_process(request, threading.Event())
    assert "\n" not in str(caught.value)
