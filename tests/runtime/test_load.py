"""Loading a bundle: what is refused, and the pool of threads that all engines of a process share."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import skipdecode
from skipdecode import generate
from skipdecode import manifest as manifests
from skipdecode.engines import ort
from skipdecode.errors import BundleError, CapacityError, TargetError
from skipdecode.schedule import full_depth
from tests.manifests import make_manifest
from tests.models import LAYERS
from tests.zoo import Zoo


def test_a_target_that_the_bundle_lacks_is_refused_with_those_it_has(zoo: Zoo) -> None:
    with pytest.raises(TargetError, match="choose from cpu"):
        skipdecode.load(zoo.bundle("llama"), target="cuda")


@pytest.mark.parametrize("threads", [0, -1, 1 << 16])
def test_the_number_of_threads_is_limited_by_the_machines_cores(zoo: Zoo, threads: int) -> None:
    with pytest.raises(CapacityError, match=rf"^--threads: {threads}: this machine has \d+ cores; choose 1\.\."):
        skipdecode.load(zoo.bundle("llama"), threads=threads)


def test_a_second_load_that_wants_another_pool_is_warned_that_the_first_one_stays(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bundle = zoo.bundle("llama")
    skipdecode.load(bundle)
    monkeypatch.setattr(ort, "_pool_threads", 7)
    for same in (None, 7 if (os.cpu_count() or 1) >= 7 else None):
        skipdecode.load(bundle, threads=same)
    assert caplog.messages == []
    skipdecode.load(bundle, threads=1)
    assert caplog.messages == ["threads=1 has no effect: this process's first load created a pool of 7"]


@pytest.mark.parametrize("chunk", [0, -1])
def test_a_chunk_without_tokens_is_refused(chunk: int, zoo: Zoo) -> None:
    with pytest.raises(CapacityError, match=rf"^--prefill-chunk: {chunk} is not a positive count; choose 1 or more$"):
        skipdecode.load(zoo.bundle("llama"), prefill_chunk=chunk)


def test_a_folder_whose_name_is_not_utf8_is_refused(zoo: Zoo, tmp_path: Path) -> None:
    bundle = tmp_path / os.fsdecode(b"b\xfcn")
    bundle.symlink_to(zoo.bundle("llama"))
    with pytest.raises(
        BundleError, match=r"is not UTF-8, the only encoding that ONNX Runtime's Python package takes; rename the folder$"
    ):
        skipdecode.load(bundle)


def test_a_changed_byte_is_found_only_when_hashes_are_checked(tmp_path: Path) -> None:
    manifests.write(make_manifest(full_depth(LAYERS), tmp_path), tmp_path)
    (tmp_path / "head.onnx").write_bytes(b"HEAD.onnx")
    with pytest.raises(BundleError, match=r"head\.onnx: its contents are not what the manifest says"):
        skipdecode.load(tmp_path, check_hashes=True)
    with pytest.raises(TargetError, match="the engines were compiled by"):
        skipdecode.load(tmp_path)


@pytest.mark.parametrize("fails", [False, True])
def test_a_bundle_that_is_replaced_while_it_is_loaded_is_refused(
    fails: bool, zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its engines would come from two bundles."""
    bundle = shutil.copytree(zoo.bundle("llama"), tmp_path / "bundle")
    load_engines = generate.load_engines

    def replaced(*given: Any) -> Any:
        engines = load_engines(*given)
        bundle.rename(tmp_path / "old")
        shutil.copytree(zoo.bundle("llama"), bundle, copy_function=shutil.copy)
        if fails:
            raise BundleError("has 1690 bytes, not 1691", "export the model again", where="head.onnx")
        return engines

    monkeypatch.setattr(generate, "load_engines", replaced)
    with pytest.raises(BundleError, match=f"^{re.escape(str(bundle))}: was replaced while it was loaded; load it again$"):
        skipdecode.load(bundle)
    monkeypatch.undo()
    assert skipdecode.load(bundle).generate([5, 6, 7, 20], max_new_tokens=2).sequences


@pytest.mark.parametrize("name", ["a\0b", "\ud800"], ids=ascii)
def test_a_name_that_no_file_can_have_is_reported_in_one_line(name: str) -> None:
    with pytest.raises(BundleError, match=r"bundle\.json: cannot be read \(.*\); export the model again$") as caught:
        skipdecode.load(name)
    assert "\n" not in str(caught.value)


def test_a_process_that_created_a_pool_first_is_refused(zoo: Zoo) -> None:
    code = "import onnxruntime, skipdecode, sys; onnxruntime.set_global_thread_pool_sizes(1, 1); skipdecode.load(sys.argv[1])"
    run = subprocess.run([sys.executable, "-c", code, str(zoo.bundle("llama"))], capture_output=True, text=True, check=False)
    assert "TargetError: something else in this process has made ONNX Runtime's shared thread pool first" in run.stderr


@pytest.mark.parametrize(
    ("words", "refused"), [("session load", False), ("load session", True), ("load session sharing_the_pool", False)]
)
def test_sessions_of_ones_own_made_after_a_load_have_to_share_its_pool(words: str, refused: bool, zoo: Zoo) -> None:
    code = """
import sys, onnxruntime, skipdecode
options = onnxruntime.SessionOptions()
options.use_per_session_threads = "sharing_the_pool" not in sys.argv
for what in sys.argv[2:4]:
    if what == "load":
        generator = skipdecode.load(sys.argv[1])
    else:
        own = onnxruntime.InferenceSession(f"{sys.argv[1]}/graphs/layer_000.onnx", options, providers=["CPUExecutionProvider"])
generator.generate([[5, 6, 7]], max_new_tokens=3)
"""
    command = [sys.executable, "-c", code, str(zoo.bundle("llama")), *words.split()]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert bool(run.returncode) is refused
    assert ("must be false when using a global thread pool" in run.stderr) is refused
