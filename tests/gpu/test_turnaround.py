"""The turn-around's kernel on a GPU chooses what its host version chooses, which tests/plugins compares with the runtime."""

from __future__ import annotations

import ctypes
import dataclasses
import shutil

import numpy as np
import pytest

from skipdecode.cuda import CudaDevice
from skipdecode.memory import DeviceMemory
from skipdecode.plugins import turnaround
from skipdecode.sampling import Sampling, choose_tokens
from skipdecode.turn_around import SkdSampling, SkdTurnaround, TurnAround

ROWS, STEPS = 5, 3


@pytest.fixture(scope="module")
def device() -> CudaDevice:
    return CudaDevice()


@pytest.fixture(scope="module", params=["ptx", "nvcc"])
def run(request: pytest.FixtureRequest, device: CudaDevice, tmp_path_factory: pytest.TempPathFactory) -> TurnAround:
    """The kernel from the package's PTX, and through the C interface of the library that nvcc builds."""
    if request.param == "ptx":
        return device.turn_around()
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not on the PATH")
    library = turnaround.build(tmp_path_factory.mktemp("device") / "turnaround.so", device=True)
    library.skd_turnaround_error.restype = ctypes.c_char_p

    def launch(state: SkdTurnaround) -> None:
        code = library.skd_turnaround_launch(ctypes.byref(state), ctypes.c_void_p(device.stream))
        assert code == 0, library.skd_turnaround_error(code)

    return launch


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(do_sample=True, temperature=1.2, seed=3),
        Sampling(do_sample=True, top_k=40, top_p=0.9, seed=4),
    ],
    ids=str,
)
@pytest.mark.parametrize("vocabulary", [99, 50272])
@pytest.mark.parametrize("ends", [False, True])
def test_it_chooses_what_the_runtime_chooses_and_repeats_the_token_that_ends_a_row(
    ends: bool, sampling: Sampling, vocabulary: int, device: CudaDevice, run: TurnAround
) -> None:
    memory, rng = DeviceMemory(device, "float16"), np.random.default_rng(vocabulary)
    each = [dataclasses.replace(sampling, seed=sampling.seed + row) for row in range(ROWS)]
    arrays = {
        "logits": np.zeros((ROWS, vocabulary), np.float32), "row_ids": np.arange(ROWS, dtype=np.int64),
        "sampling": np.frombuffer(b"".join(bytes(SkdSampling.of(one)) for one in each), np.uint8),
        "stop_ids": np.array([-1], dtype=np.int64), "steps": np.zeros(ROWS, np.int32), "input_ids": np.zeros(ROWS, np.int64),
        "position_ids": np.zeros(ROWS, np.int64), "seqlens_k": np.zeros(ROWS, np.int32), "finished": np.zeros(ROWS, np.int32),
    }  # fmt: skip
    twins = {name: memory.twin(array) for name, array in arrays.items()}
    tokens, bound_tokens, receive = memory.result((STEPS, ROWS), np.int64)
    state = SkdTurnaround(
        rows=ROWS, vocabulary=vocabulary, kept_steps=STEPS, stop_count=1, tokens=bound_tokens.pointer,
        **{name: twin.pointer for name, (twin, _) in twins.items()},
    )  # fmt: skip
    logits = rng.normal(0, 4, (STEPS, ROWS, vocabulary)).astype(np.float32)
    logits[-1] = rng.integers(-2, 3, (ROWS, vocabulary))  # more equal logits than the kernel compares with each other
    expected = np.array(
        [
            [choose_tokens(part[row : row + 1], each[row], arrays["row_ids"][row : row + 1], step)[0] for row in range(ROWS)]
            for step, part in enumerate(logits)
        ]
    )
    if ends:
        stop = arrays["stop_ids"][0] = expected[0, 1]
        twins["stop_ids"][1]()
        for row in range(ROWS):
            expected[np.argmax(expected[:, row] == stop) :, row] = stop if stop in expected[:, row] else expected[:, row]
    for step in range(STEPS):
        arrays["logits"][:] = logits[step]
        twins["logits"][1]()
        run(state)
    receive()
    assert tokens.tolist() == expected.tolist()
    assert not ends or (tokens[:, 1] == tokens[0, 1]).all()
