"""The turn-around between two steps: its host version compared with runtime/sampling.py, and its kernel compiled by nvcc."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skipdecode.errors import TargetError
from skipdecode.plugins import turnaround
from skipdecode.sampling import Sampling, choose_tokens
from skipdecode.turn_around import KERNEL, SkdSampling, SkdTurnaround

Array = np.ndarray[Any, np.dtype[Any]]


class Batch:
    """A batch's state in numpy arrays, and the structure that points to them."""

    def __init__(self, rows: int, vocabulary: int, kept_steps: int, stop_ids: tuple[int, ...] = ()) -> None:
        self.logits = np.zeros((rows, vocabulary), np.float32)
        self.row_ids = np.arange(rows, dtype=np.int64)[::-1].copy()
        self.stop_ids = np.array(stop_ids, dtype=np.int64)
        self.steps, self.seqlens_k, self.finished = (np.zeros(rows, np.int32) for _ in range(3))
        self.input_ids, self.position_ids = np.zeros(rows, np.int64), np.full(rows, 6, np.int64)
        self.tokens = np.full((kept_steps, rows), -1, np.int64)
        self.sampling = (SkdSampling * rows)()
        names = [name for name, kind in SkdTurnaround._fields_ if kind is ctypes.c_void_p and name != "sampling"]
        places = {name: getattr(self, name).ctypes.data for name in names} | {"sampling": ctypes.addressof(self.sampling)}
        self.state = SkdTurnaround(rows=rows, vocabulary=vocabulary, kept_steps=kept_steps, stop_count=len(stop_ids), **places)

    def turn(self, library: ctypes.CDLL, sampling: Sampling | list[Sampling], logits: Array) -> Array:
        self.logits[:] = logits
        each = sampling if isinstance(sampling, list) else [sampling] * len(logits)
        self.sampling[:] = [SkdSampling.of(one) for one in each]
        library.skd_turnaround_host(ctypes.byref(self.state))
        return self.input_ids


def _logits(rng: np.random.Generator, rows: int, vocabulary: int) -> Iterator[Array]:
    """Logits that are sharp, flat, full of equal numbers, and zeros of both signs."""
    yield rng.normal(0, 6, (rows, vocabulary)).astype(np.float32)
    yield rng.normal(0, 0.5, (rows, vocabulary)).astype(np.float32)
    yield rng.integers(-2, 3, (rows, vocabulary)).astype(np.float32)
    yield np.where(rng.random((rows, vocabulary)) < 0.5, -0.0, 0.0).astype(np.float32)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(do_sample=True, seed=2**63 + 5),
        Sampling(do_sample=True, temperature=0.3, seed=1),
        Sampling(do_sample=True, temperature=1e-320, seed=2),
        Sampling(do_sample=True, temperature=1.7, top_k=1, seed=2),
        Sampling(do_sample=True, top_k=40, seed=3),
        Sampling(do_sample=True, top_k=10**6, seed=4),
        Sampling(do_sample=True, top_p=0.9, seed=5),
        Sampling(do_sample=True, top_p=1e-9, seed=6),
        Sampling(do_sample=True, temperature=1.3, top_k=20, top_p=0.8, seed=7),
    ],
    ids=str,
)
@pytest.mark.parametrize("vocabulary", [1, 99, 2048, 50272])
def test_it_chooses_what_the_runtime_chooses(sampling: Sampling, vocabulary: int, turnaround_library: ctypes.CDLL) -> None:
    rng, rows = np.random.default_rng(vocabulary), 3
    batch = Batch(rows, vocabulary, kept_steps=4)
    for step, logits in enumerate(_logits(rng, rows, vocabulary)):
        expected = choose_tokens(logits, sampling, batch.row_ids, step)
        assert batch.turn(turnaround_library, sampling, logits).tolist() == expected.tolist(), step
        assert batch.tokens[step].tolist() == expected.tolist()


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_from_nan_or_infinite_logits_it_takes_the_first_whatever_the_sampling(
    bad: float, turnaround_library: ctypes.CDLL
) -> None:
    logits = np.full((1, 9), 0.5, np.float32)
    logits[0, 8] = bad
    sampling = Sampling(do_sample=True, top_k=3, top_p=0.9)
    assert choose_tokens(logits, sampling, np.zeros(1, np.int64), 0).tolist() == [8]
    assert Batch(1, 9, kept_steps=1).turn(turnaround_library, sampling, logits).tolist() == [8]


def test_a_top_k_beyond_a_c_int_keeps_all_tokens() -> None:
    assert [SkdSampling.of(Sampling(do_sample=True, top_k=top_k)).top_k for top_k in (5, 2**31, 2**32 + 1)] == [
        5, 2**31 - 1, 2**31 - 1,
    ]  # fmt: skip


def test_greedy_sampling_reads_no_other_setting_and_numpys_true_counts_as_1() -> None:
    assert bytes(SkdSampling.of(Sampling(seed=None))) == bytes(SkdSampling())  # type: ignore[arg-type]
    assert SkdSampling.of(Sampling(do_sample=np.bool_(True))).do_sample == 1  # type: ignore[arg-type]


def test_it_makes_the_next_steps_inputs(turnaround_library: ctypes.CDLL) -> None:
    batch = Batch(2, 5, kept_steps=3)
    batch.turn(turnaround_library, Sampling(), np.eye(2, 5, 3, dtype=np.float32))
    assert (batch.input_ids.tolist(), batch.position_ids.tolist(), batch.seqlens_k.tolist()) == ([3, 4], [7, 7], [1, 1])
    assert batch.steps.tolist() == [1, 1] and batch.tokens.T.tolist() == [[3, -1, -1], [4, -1, -1]]


def test_a_row_that_has_reached_a_stop_id_repeats_it_while_the_others_go_on(turnaround_library: ctypes.CDLL) -> None:
    batch = Batch(2, 6, kept_steps=3, stop_ids=(2, 5))
    for likeliest in ([1, 5], [3, 4], [2, 0]):
        batch.turn(turnaround_library, Sampling(), np.eye(6, dtype=np.float32)[likeliest])
    assert batch.tokens.T.tolist() == [[1, 3, 2], [5, 5, 5]]
    assert batch.finished.tolist() == [1, 1] and batch.position_ids.tolist() == [9, 9]


def test_each_row_is_sampled_with_its_own_settings_and_step(turnaround_library: ctypes.CDLL) -> None:
    each = [Sampling(), Sampling(do_sample=True, seed=3), Sampling(do_sample=True, temperature=2.0, top_k=9, top_p=0.9, seed=4)]
    logits = np.random.default_rng(0).normal(0, 2, (3, 200)).astype(np.float32)
    batch = Batch(3, 200, kept_steps=1)
    batch.steps[:] = steps = [7, 0, 2]
    expected = [
        int(choose_tokens(logits[row : row + 1], each[row], batch.row_ids[row : row + 1], step)[0])
        for row, step in enumerate(steps)
    ]
    assert batch.turn(turnaround_library, each, logits).tolist() == expected
    assert batch.steps.tolist() == [8, 1, 3] and batch.tokens.tolist() == [expected]


def test_only_the_last_steps_that_fit_are_kept(turnaround_library: ctypes.CDLL) -> None:
    batch = Batch(1, 6, kept_steps=2)
    for likeliest in (1, 2, 3, 4, 5):
        batch.turn(turnaround_library, Sampling(), np.eye(1, 6, likeliest, dtype=np.float32))
    assert batch.steps.tolist() == [5] and batch.tokens.T.tolist() == [[5, 4]]


def test_the_kernel_run_on_host_threads_has_no_races_and_chooses_what_the_host_version_chooses(tmp_path: Path) -> None:
    source, program = Path(__file__).parent / "kernel_on_threads.cc", tmp_path / "kernel"
    flags = ["-O1", "-std=c++17", "-fsanitize=thread", "-pthread", "-Wall", "-Werror"]
    subprocess.run(["c++", *flags, "-o", str(program), str(source)], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_kernel_is_compiled_for_each_architecture_and_reports_a_missing_gpu(tmp_path: Path) -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not on the PATH")
    library = turnaround.build(tmp_path / "turnaround.so", device=True)
    built = (tmp_path / "turnaround.so").read_bytes()
    assert all(f"sm_{architecture}".encode() in built for architecture in turnaround.ARCHITECTURES)
    batch = Batch(1, 4, kept_steps=1)
    assert batch.turn(library, Sampling(), np.eye(1, 4, 2, dtype=np.float32)).tolist() == [2]
    if not Path("/dev/nvidia0").exists():
        library.skd_turnaround_error.restype = ctypes.c_char_p
        code = library.skd_turnaround_launch(ctypes.byref(batch.state), None)
        assert code and b"CUDA" in library.skd_turnaround_error(code)


def test_the_shipped_ptx_is_built_from_the_sources(tmp_path: Path) -> None:
    assert turnaround.PTX.read_text(encoding="utf-8").splitlines()[0] == turnaround.ptx_heading(), "run make ptx"
    if shutil.which("ptxas") is None:
        pytest.skip("ptxas is not on the PATH")
    for architecture in ("75", "86", "89", "90", "120"):
        command = ["ptxas", f"-arch=sm_{architecture}", str(turnaround.PTX), "-o", str(tmp_path / "kernel.cubin")]
        subprocess.run(command, check=True)
        assert KERNEL.encode() in (tmp_path / "kernel.cubin").read_bytes()


def test_a_missing_compiler_is_reported_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TargetError, match="needs nvcc, which is not on the PATH; install it"):
        turnaround.build(tmp_path / "turnaround.so", device=True)
