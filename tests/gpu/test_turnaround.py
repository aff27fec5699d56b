"""The turn-around's kernel on a GPU: what its host version chooses, which tests/plugins holds against the runtime."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from skipdecode.memory import DeviceMemory
from skipdecode.plugins import turnaround
from skipdecode.sampling import Sampling, choose_tokens

ROWS, STEPS = 5, 3


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    loaded = turnaround.build(tmp_path_factory.mktemp("device") / "turnaround.so", device=True)
    loaded.skd_turnaround_error.restype = ctypes.c_char_p
    return loaded


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
def test_it_chooses_what_the_runtime_chooses(sampling: Sampling, vocabulary: int, library: ctypes.CDLL) -> None:
    memory, rng = DeviceMemory("cuda", "float16"), np.random.default_rng(vocabulary)
    arrays = {
        "logits": np.zeros((ROWS, vocabulary), np.float32), "row_ids": np.arange(ROWS, dtype=np.int64),
        "stop_ids": np.array([-1], dtype=np.int64), "steps": np.zeros(ROWS, np.int32), "input_ids": np.zeros(ROWS, np.int64),
        "position_ids": np.zeros(ROWS, np.int64), "seqlens_k": np.zeros(ROWS, np.int32), "finished": np.zeros(ROWS, np.int32),
        "tokens": np.zeros((ROWS, STEPS), np.int64),
    }  # fmt: skip
    twins = {name: memory.result(array) for name, array in arrays.items()}
    state = turnaround.TurnAround(
        rows=ROWS, vocabulary=vocabulary, max_steps=STEPS, stop_count=1,
        **{name: twin.pointer for name, (twin, _) in twins.items()},
    )  # fmt: skip
    how = turnaround.Sampling.of(sampling)
    expected = []
    for step in range(STEPS):
        logits = rng.normal(0, 4, (ROWS, vocabulary)).astype(np.float32)
        expected.append(choose_tokens(logits, sampling, arrays["row_ids"], step).tolist())
        twins["logits"][0].owner.update_inplace(logits)
        code = library.skd_turnaround_launch(ctypes.byref(state), ctypes.byref(how), None)
        assert code == 0, library.skd_turnaround_error(code)
    receive = twins["tokens"][1]
    assert receive is not None
    receive()
    assert arrays["tokens"].T.tolist() == expected
