"""How tokens are chosen."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from skipdecode.errors import CapacityError
from skipdecode.sampling import Sampling, choose_tokens, uniform

# splitmix64 as `uniform` describes it; computed once, so that every runtime can be held to it
EXPECTED = [0.6524484863740322, 0.27623358227789463, 0.7498324788715559, 0.36818951565166946]
LOGITS = np.log(np.array([[0.5, 0.3, 0.15, 0.05]], dtype=np.float32))


def _draw(sampling: Sampling, count: int = 4000) -> np.ndarray:
    rows = np.repeat(LOGITS, count, axis=0)
    return choose_tokens(rows, sampling, np.arange(count), 0)


def test_greedy_takes_the_likeliest_and_the_lower_id_of_equals() -> None:
    logits = np.array([[0.0, 2.0, 2.0], [3.0, 1.0, 2.0]], dtype=np.float32)
    assert choose_tokens(logits, Sampling(), np.arange(2), 0).tolist() == [1, 0]


def test_samples_follow_the_probabilities() -> None:
    shares = np.bincount(_draw(Sampling(do_sample=True)), minlength=4) / 4000
    np.testing.assert_allclose(shares, [0.5, 0.3, 0.15, 0.05], atol=0.03)


def test_top_k_and_top_p_keep_the_likeliest_only() -> None:
    assert set(_draw(Sampling(do_sample=True, top_k=2))) == {0, 1}
    assert set(_draw(Sampling(do_sample=True, top_p=0.75))) == {0, 1}
    assert set(_draw(Sampling(do_sample=True, top_p=0.4))) == {0}


def test_a_mass_of_exactly_top_p_is_enough() -> None:
    equal = np.zeros((50, 2), dtype=np.float32)
    assert {*choose_tokens(equal, Sampling(do_sample=True, top_p=0.5), np.arange(50), 0).tolist()} == {0}


@pytest.mark.parametrize("top_k", [1, 2, 7, 49, 50, 90])
def test_top_k_keeps_the_lower_ids_among_equal_logits(top_k: int) -> None:
    logits = np.random.default_rng(top_k).integers(0, 4, (200, 50)).astype(np.float32)
    tokens = choose_tokens(logits, Sampling(do_sample=True, top_k=top_k, temperature=50.0), np.arange(200), 0)
    places = [np.argsort(-row, kind="stable").tolist().index(token) for row, token in zip(logits, tokens, strict=True)]
    assert max(places) < top_k and len({*places}) > min(top_k, 50) * 0.6


@pytest.mark.parametrize("logits", [[np.nan] * 9, [0.5] * 8 + [np.nan], [0.5] * 8 + [np.inf], [np.inf] * 9], ids=str)
@pytest.mark.parametrize("changes", [{}, {"top_k": 3}, {"top_p": 0.5}, {"temperature": 1e-320}], ids=str)
def test_some_token_is_chosen_from_nan_or_infinite_logits(logits: list[float], changes: dict[str, float]) -> None:
    rows = np.array([logits], dtype=np.float32)
    (token,) = choose_tokens(rows, Sampling(do_sample=True, **changes), np.arange(1), 0)
    assert 0 <= token < 9 and (token == 8 or logits != [0.5] * 8 + [np.inf])


@pytest.mark.parametrize(
    "changes", [{}, {"top_p": 0.3}, {"top_p": 0.999}, {"temperature": 30.0}, {"temperature": 30.0, "top_p": 0.9}]
)
def test_the_choice_is_the_same_as_from_a_sorted_vocabulary(changes: dict[str, float]) -> None:
    """For peaked and for flat distributions."""
    logits = np.random.default_rng(0).normal(0, 3, (40, 6000)).astype(np.float32)
    sampling = Sampling(do_sample=True, seed=5, **changes)
    tokens = choose_tokens(logits, sampling, np.arange(40), 3)
    for row, (line, token) in enumerate(zip(logits, tokens.tolist(), strict=True)):
        order = np.argsort(-line, kind="stable")
        mass = np.exp((line[order].astype(np.float64) - line.max()) / sampling.temperature)
        kept = mass * (np.cumsum(mass) - mass < sampling.top_p * mass.sum())
        assert token == order[np.searchsorted(np.cumsum(kept), uniform(5, row, 3) * kept.sum(), side="right")], row


@pytest.mark.parametrize("top_p", [1.0, 1 - 1e-15, 0.9, 0.5])
def test_a_draw_close_to_1_takes_one_of_the_kept_tokens(top_p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skipdecode.sampling.uniform", lambda *_: 1 - 2**-53)
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 1, (60, 6000)).astype(np.float32)
    logits[rng.random(logits.shape) < 0.5] = -np.inf
    tokens = choose_tokens(logits, Sampling(do_sample=True, top_p=top_p), np.arange(60), 0)
    for line, token in zip(logits, tokens.tolist(), strict=True):
        likelier = np.sort(line[line > line[token]].astype(np.float64))
        mass = np.exp(line.astype(np.float64) - line.max()).sum()
        assert line[token] > -np.inf and np.exp(likelier - line.max()).sum() < top_p * mass


@pytest.mark.parametrize("temperature", [5e-324, 1e-320, 1e-300, 1e-9])
def test_a_temperature_close_to_0_is_greedy(temperature: float) -> None:
    assert set(_draw(Sampling(do_sample=True, temperature=temperature), count=20)) == {0}


@pytest.mark.parametrize("kind", [Fraction, np.float32, np.float16])
def test_numbers_of_any_type_act_like_pythons_own(kind: Callable[[float], Any]) -> None:
    of_a_kind = Sampling(do_sample=True, temperature=kind(0.5), top_p=kind(0.75))
    assert _draw(of_a_kind).tolist() == _draw(Sampling(do_sample=True, temperature=0.5, top_p=0.75)).tolist()


def test_a_low_temperature_sharpens() -> None:
    assert (_draw(Sampling(do_sample=True, temperature=0.1)) == 0).mean() > 0.97


def test_a_rows_tokens_do_not_depend_on_the_batch_around_it() -> None:
    sampling, logits = Sampling(do_sample=True, seed=3), np.repeat(LOGITS, 5, axis=0)
    together = choose_tokens(logits, sampling, np.arange(5), 7)
    alone = [choose_tokens(LOGITS, sampling, np.array([row]), 7)[0] for row in range(5)]
    assert together.tolist() == alone


def test_the_generator_gives_the_documented_numbers() -> None:
    # other runtimes must repeat these
    assert [uniform(0, 0, 0), uniform(1, 0, 0), uniform(0, 1, 0), uniform(0, 0, 1)] == pytest.approx(EXPECTED, abs=0)


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": 0.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}, {"temperature": float("nan")},
        {"temperature": None}, {"top_k": 2.5}, {"top_p": "0.9"}, {"seed": 1.5}, {"seed": None},
        # in range, but not as a float
        {"temperature": 10**400}, {"temperature": Fraction(1, 10**400)}, {"temperature": np.longdouble("1e-400")},
        {"top_p": Fraction(1, 10**400)}, {"temperature": 10**5000}, {"top_k": -(10**5000)},
    ],
    ids=lambda bad: next(iter(bad)),
)  # fmt: skip
def test_values_out_of_range_are_refused_in_one_line(bad: dict[str, Any]) -> None:
    with pytest.raises(CapacityError, match="choose") as caught:
        Sampling(do_sample=True, **bad)
    assert len(str(caught.value)) < 120
    Sampling(**bad)  # greedy reads none of them
