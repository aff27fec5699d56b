"""A cell's figures from known times, on a clock that only the passes move."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from skipdecode.schedule import Schedule
from skipdecode.validation import latency
from skipdecode.validation.latency import measure_cell, time_block

BYTES: Any = SimpleNamespace(of=lambda layers, batch, context: layers * 10_000_000)


class Paced:
    """A generator and its decoder or device loop: a prompt takes 0.25 s, a step 0.5 s a layer, waiting for a block 4 s."""

    def __init__(self) -> None:
        self.manifest = SimpleNamespace(
            schedule=Schedule(name="table", num_layers=4, warmup_layers=1, layers=(4, 2)), model=SimpleNamespace(vocab_size=9),
            variants=[SimpleNamespace(num_layers=2), SimpleNamespace(num_layers=4)],
        )  # fmt: skip
        self.engines = SimpleNamespace(turn_around=None)
        self.now = 0.0
        self.rewound: list[tuple[int, int]] = []

    def decoder(self, lengths: list[int], new: int, schedule: Schedule | None = None) -> Paced:
        self.schedule = schedule
        return self

    def prefill(self, prompts: list[list[int]]) -> None:
        self.now += 0.25

    def rewind(self, step: int, length: int) -> None:
        self.rewound.append((step, length))

    def decode_step(self, tokens: Any) -> None:
        assert self.schedule is not None
        self.now += 0.5 * self.schedule.layers_at(self.rewound[-1][0])

    def step(self) -> None:
        self.now += 2

    def wait(self) -> None:
        self.now += 4


@pytest.fixture
def paced(monkeypatch: pytest.MonkeyPatch) -> Any:
    generator = Paced()
    monkeypatch.setattr(latency, "time", SimpleNamespace(perf_counter=lambda: generator.now))
    return generator


def test_a_variant_is_timed_at_its_own_position_on_top_of_the_context(paced: Any) -> None:
    cell = measure_cell(paced, BYTES, batch=2, context=7, gb_per_s=10.0)
    assert cell["prefill_ms"]["median"] == 250
    assert [row["ms"]["median"] for row in cell["variants"]] == [2000, 1000]
    assert {*paced.rewound} == {(0, 7), (1, 7)}


def test_gains_are_over_full_depth_and_shares_of_the_bound_by_the_bytes_read(paced: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "_measure_steps", lambda *_: {4: [4.0, 8.0], 2: [1.0, 4.0]})
    full, half = measure_cell(paced, BYTES, batch=1, context=7, gb_per_s=10.0)["variants"]
    assert (full["bound_ms"], half["bound_ms"]) == (4, 2)
    assert (full["share_of_bound"], half["share_of_bound"]) == (4 / 6, 2 / 2.5)
    assert (half["promised_gain"], half["gain"]["median"]) == (2, 3)


def test_a_blocks_time_and_its_launch_time_are_given_per_step(paced: Any) -> None:
    assert time_block(paced, position=3, context=7, steps=4) == (1e3 * (4 * 2 + 4) / 4, 1e6 * 4 * 2 / 4)
    assert paced.rewound == [(3, 7)]
