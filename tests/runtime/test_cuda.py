"""Whole generations with plans through NVIDIA's cuda-python, on a stand-in for the GPU's driver."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skipdecode import manifest as manifests
from skipdecode.device_loop import STEPS_AHEAD
from skipdecode.schedule import Anchor
from tests.runtime import device
from tests.standin import package

ROOT = Path(__file__).parents[2]
PROMPTS = [[5, 6], [9, 8, 7, 6, 5, 4, 3], [11, 4, 50]]
REQUESTS: list[dict[str, Any]] = [
    {"prompts": PROMPTS, "max_new_tokens": 14, "ignore_eos": True},
    {"prompts": PROMPTS, "max_new_tokens": 14, "ignore_eos": True, "do_sample": True, "top_k": 20, "seed": 7},
    {"prompts": PROMPTS[:1], "max_new_tokens": 9, "ignore_eos": True},
    {"prompts": PROMPTS, "max_new_tokens": 14, "ignore_eos": True, "schedule": "full"},
]


def _run(libcuda: Path, bundle: Path, requests: list[dict[str, Any]], *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.standin.run", str(bundle), *options]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(libcuda)}
    return subprocess.run(
        command, input=json.dumps(requests), capture_output=True, text=True, cwd=ROOT, env=environment, check=False
    )


@pytest.mark.parametrize("anchor", Anchor, ids=str)
def test_generations_are_the_same_as_the_host_loops(
    anchor: Anchor, libcuda: Path, gpu_bundle: Callable[[Anchor], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The requests include repeated ones (graphs), other rows and another schedule."""
    requests = [*REQUESTS, *REQUESTS[:2], *REQUESTS[:2]]
    done = _run(libcuda, gpu_bundle(anchor), requests)
    assert done.returncode == 0, done.stderr
    host = device.load(gpu_bundle(anchor), "tensorrt-rtx", None, monkeypatch)
    answers = json.loads(done.stdout)
    assert answers["replayed"] > 0, "no step was a graph"
    assert 0 < answers["events"] <= STEPS_AHEAD + 2, "events are made once and recorded again"
    for answer, request in zip(answers["generations"], requests, strict=True):
        expected = host.generate(**request)
        assert answer["tokens"] == [row.token_ids for row in expected.sequences]
        assert answer["layers"] == list(expected.layers)


def test_steps_of_the_package_tensorrts_plans_become_graphs_too(
    libcuda: Path, tensorrt_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = _run(libcuda, tensorrt_bundle, REQUESTS[:1] * 2)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    expected = device.load(tensorrt_bundle, "tensorrt", None, monkeypatch).generate(**REQUESTS[0])
    assert answers["replayed"] > 0
    for answer in answers["generations"]:
        assert answer["tokens"] == [row.token_ids for row in expected.sequences]


def test_a_gpu_that_reads_host_pages_later_gets_what_they_held_at_the_call(
    libcuda: Path, gpu_bundle: Callable[[Anchor], Path]
) -> None:
    at_once, late = (_run(libcuda, gpu_bundle(Anchor.GENERATED), REQUESTS, *options) for options in ((), ("host_pages",)))
    assert late.returncode == 0, late.stderr
    assert json.loads(late.stdout)["generations"] == json.loads(at_once.stdout)["generations"]


def test_a_library_that_does_not_start_is_reported_in_one_line(
    libcuda: Path, tensorrt_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(libcuda))
    command = [Path(sys.executable).parent / "skip-run", tensorrt_bundle, "--target", "tensorrt", "--token-ids", "5,6"]
    environment = package.bindings(package.VERSIONS[-1], tmp_path)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    says = "tensorrt cannot run a plan (no reason given); its version may need a newer driver: check nvidia-smi\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", says)


def test_a_killed_process_has_stored_the_kernels_that_its_runs_compiled(
    libcuda: Path, gpu_bundle: Callable[[Anchor], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    bundle, folder = gpu_bundle(Anchor.GENERATED), tmp_path / "skipdecode" / "kernels"
    assert _run(libcuda, bundle, REQUESTS[:1], "killed").returncode == -signal.SIGKILL
    (kept,) = folder.iterdir()
    segments = len(manifests.read(bundle).segments)
    assert len({word.split(b":")[0] for word in kept.read_bytes().split()[2:]}) == segments + 2, "segments, embedding and head"
    written = kept.stat().st_ino
    assert _run(libcuda, bundle, REQUESTS[:2], "killed").returncode == -signal.SIGKILL
    assert [each.stat().st_ino for each in folder.iterdir()] == [written], "nothing new is written"
    known, longer = kept.read_bytes(), {"prompts": [[7] * 12], "max_new_tokens": 2, "ignore_eos": True}
    assert _run(libcuda, bundle, [REQUESTS[2], longer, REQUESTS[2]], "killed").returncode == -signal.SIGKILL
    assert {*kept.read_bytes().split()} > {*known.split()}, "kernels for a prompt of another length are added"


def test_without_graphs_a_steps_calls_are_made_one_by_one(libcuda: Path, gpu_bundle: Callable[[Anchor], Path]) -> None:
    with_graphs, without = (
        json.loads(_run(libcuda, gpu_bundle(Anchor.GENERATED), REQUESTS[:1] * 2, *options).stdout) for options in ((), ("plain",))
    )
    assert with_graphs["generations"] == without["generations"] and with_graphs["replayed"] > without["replayed"] == 0


def test_another_context_runs_a_kernel_before_the_first_graph_if_memory_allows(
    libcuda: Path, gpu_bundle: Callable[[Anchor], Path]
) -> None:
    settled, graphs, unsettled = (
        json.loads(_run(libcuda, gpu_bundle(Anchor.GENERATED), REQUESTS[:1] * times, *options).stdout)
        for times, options in ((3, ()), (1, ()), (3, ("without_contexts",)))
    )
    assert settled["elsewhere"] == 1 and settled["replayed"] > graphs["replayed"]
    assert unsettled["elsewhere"] == 0 and unsettled["replayed"] == settled["replayed"]
    assert unsettled["generations"] == settled["generations"]


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("callback", "a step's graph calls the host"),
        ("upload", "a step's graph copies from host memory"),
        ("without_graphs", "CUDA has no memory left for its own use; send fewer rows, shorter prompts, or .* --max-length"),
        ("allocating", "a plan allocates memory while it runs; export the model again"),
    ],
)
def test_a_step_that_a_graph_cannot_repeat_does_not_become_one(
    what: str, says: str, libcuda: Path, gpu_bundle: Callable[[Anchor], Path]
) -> None:
    expected = json.loads(_run(libcuda, gpu_bundle(Anchor.GENERATED), REQUESTS[:1] * 2).stdout)
    done = _run(libcuda, gpu_bundle(Anchor.GENERATED), REQUESTS[:1] * 2, what)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    assert answers["generations"] == expected["generations"] and answers["replayed"] == 0
    assert re.fullmatch(f"decode steps continue without CUDA graphs: {says}\n", done.stderr), done.stderr


def test_a_loop_that_another_replaces_leaves_nothing_behind(libcuda: Path, gpu_bundle: Callable[[Anchor], Path]) -> None:
    """Two shapes take turns, each twice so that there are graphs. No buffer, pinned memory or graph is left."""
    requests = [{**REQUESTS[0], "prompts": PROMPTS[:rows]} for rows in (2, 2, 3, 3)] * 4
    answers = json.loads(_run(libcuda, gpu_bundle(Anchor.GENERATED), requests).stdout)
    taken = answers["taken"][4:]  # by then the engines have allocated their own memory
    assert answers["replayed"] > 0
    assert taken == taken[:4] * 3


def test_smaller_batches_take_no_more_memory_after_larger_ones_than_before(
    libcuda: Path, gpu_bundle: Callable[[Anchor], Path]
) -> None:
    requests = [{**REQUESTS[0], "prompts": PROMPTS[:rows]} for rows in (1, 2, 3, 1)]
    first, second, third, last = json.loads(_run(libcuda, gpu_bundle(Anchor.GENERATED), requests).stdout)["taken"]
    of_a_row = third - second
    assert of_a_row > 0 and last - first < of_a_row / 2, "the rest is what a plan keeps of a shape, without any row's keys"


def test_bundles_loaded_one_after_another_use_the_same_stream_events_and_kernel(
    libcuda: Path, gpu_bundle: Callable[[Anchor], Path]
) -> None:
    requests = REQUESTS[:2] * 3
    answers, once = (
        json.loads(_run(libcuda, gpu_bundle(Anchor.GENERATED), requests, *options).stdout) for options in (("anew",), ())
    )
    assert answers["generations"] == once["generations"]
    assert answers["objects"] == [once["objects"][0]] * len(requests)


def test_whichever_driver_call_fails_the_error_is_a_documented_one_and_nothing_is_left(
    libcuda: Path, gpu_bundle: Callable[[Anchor], Path]
) -> None:
    """Without memory a call may fail once, after which the same can be asked for again; for another reason, all fail."""
    command = [sys.executable, "-m", "tests.standin.failures", str(gpu_bundle(Anchor.GENERATED))]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(libcuda)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    left = "memory 0, pinned 0, contexts 0, streams {}, events {}, modules {}, graphs 0, launchables 0"
    assert found["first_loads"] == [left.format(0, 0, 0), left.format(1, 0, 0), left.format(1, 0, 1), left.format(1, 0, 1)]
    assert found["before"] in [left.format(1, events, 1) for events in range(1, STEPS_AHEAD + 3)]
    once, always = found["lives"].values()
    assert {after for _, _, after in once + always} == {found["before"]}
    assert {(*errors,) for errors, _, _ in once} == {(), ("load: CapacityError",), ("generate: CapacityError",)}
    assert all(right for _, right, _ in once)
    assert {error for errors, _, _ in always for error in errors} == {"load: TargetError", "generate: TargetError"}
    assert all(errors for errors, _, _ in always)


def test_a_driver_older_than_the_kernels_language_is_reported_in_one_line(
    libcuda: Path, gpu_bundle: Callable[[Anchor], Path]
) -> None:
    done = _run(libcuda, gpu_bundle(Anchor.GENERATED), REQUESTS[:1], "old")
    assert (done.returncode, done.stderr) == (2, "the NVIDIA driver is older than CUDA 13; install driver 580 or a later one\n")


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("full", r"the GPU has no room for a buffer of \d+ MiB \(0 MiB are free\); .* --max-length"),
        ("without_pinned", r"the host has no room for 1 MiB of pinned memory; send fewer rows, ask for fewer tokens, or .*"),
    ],
)
def test_where_there_is_no_room_the_error_says_how_much_was_asked_for(
    what: str, says: str, libcuda: Path, gpu_bundle: Callable[[Anchor], Path]
) -> None:
    done = _run(libcuda, gpu_bundle(Anchor.GENERATED), REQUESTS[:1], what)
    assert done.returncode == 2
    assert re.fullmatch(f"{says}\n", done.stderr), done.stderr
