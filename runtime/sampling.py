"""From logits to tokens: greedy, or sampled with a random number generator that any language can reproduce."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np

from skipdecode.errors import CapacityError, shortened
from skipdecode.memory import FloatArray, IntArray

_MASK = (1 << 64) - 1
_BINS, _BINS_PER_NAT = 1024, 16  # tokens 64 nats below the likeliest are next to impossible and share the last bin


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is chosen from the logits.

    Raises:
        CapacityError: a value is out of its range.
    """

    do_sample: bool = False  # False: greedy, and the other fields are ignored
    temperature: float = 1.0  # above 0; divides the logits
    top_k: int = 0  # how many of the likeliest tokens to keep; 0: all
    top_p: float = 1.0  # in (0, 1]; keeps the fewest likeliest tokens whose probabilities reach this sum; 1: all
    seed: int = 0  # any integer

    def __post_init__(self) -> None:
        if not self.do_sample:
            return
        for name, kind, is_valid, remedy in _RANGES:
            value = getattr(self, name)
            number = _as_number(value, kind)  # numpy's narrow numbers would overflow below
            if number is None or not is_valid(number):
                raise CapacityError(f"{_short_text(value)} is out of range", remedy, where=f"--{name.replace('_', '-')}")
            object.__setattr__(self, name, number)


# checked after conversion to a Python int or float, in which a tiny positive fraction may have become 0.0
_RANGES: tuple[tuple[str, type[float], Callable[[float], bool], str], ...] = (
    ("temperature", float, lambda heat: heat > 0, "choose a number above 0 that fits in a float"),
    ("top_k", int, lambda k: k >= 0, "choose 0 (all) or more"),
    ("top_p", float, lambda p: 0 < p <= 1, "choose a number in (0, 1]"),
    ("seed", int, lambda seed: True, "choose a whole number"),
)


def _short_text(value: Any) -> str:
    """The given value as text of at most 40 characters."""
    try:
        return shortened(str(value), 40)
    except ValueError:  # Python converts at most 4300 digits to text
        return f"a number of {value.bit_length()} bits"


def _as_number(value: Any, kind: type[float]) -> float | None:
    """`value` as a Python int or float; None if it is not an integer or a real number, or too large for a float."""
    if not isinstance(value, Integral if kind is int else Real):
        return None
    try:
        return kind(value)
    except OverflowError:
        return None


def choose_tokens(logits: FloatArray, sampling: Sampling, rows: IntArray, step: int) -> IntArray:
    """Choose each row's next token.

    Args:
        logits: [B, V] float32.
        rows: [B] int64, the user's row numbers, so that a row's tokens do not depend on the order of the batch.
        step: 0 for the token after the prompt.

    Returns:
        [B] int64.
    """
    if not sampling.do_sample:
        likeliest: IntArray = logits.argmax(axis=1)
        return likeliest
    draws = (uniform(sampling.seed, int(row), step) for row in rows)
    return np.array([_choose(line, sampling, draw) for line, draw in zip(logits, draws, strict=True)], dtype=np.int64)


def _choose(logits: FloatArray, sampling: Sampling, draw: float) -> int:
    """Choose one row's token from its logits [V].

    Sorting a vocabulary takes longer than many a decode step. So tokens are binned by their logits, and only those bins are
    sorted that hold the k-th token, the end of what top-p keeps, or the draw.
    """
    top = logits.max()
    if not np.isfinite(top):
        return int(logits.argmax())
    steepness = min(_BINS_PER_NAT / sampling.temperature, 1e30)  # a temperature near 0 would overflow fp32
    with np.errstate(over="ignore", invalid="ignore"):
        bins = np.fmin((top - logits) * np.float32(steepness), _BINS - 1).astype(np.intp)
    if not 0 < sampling.top_k < len(logits):
        return _draw(logits, bins, top, sampling, draw)
    ids = _likeliest(logits, bins, sampling.top_k)
    return int(ids[_draw(logits[ids], bins[ids], top, sampling, draw)])


def _likeliest(logits: FloatArray, bins: IntArray, count: int) -> IntArray:
    """Ids of the `count` likeliest tokens, ascending; of equally likely ones the lower ids."""
    cut = int(np.searchsorted(np.bincount(bins).cumsum(), count))
    above = np.flatnonzero(bins < cut)
    return np.sort(np.concatenate([above, _sorted_bin(logits, bins, cut)[: count - len(above)]]))


def _sorted_bin(logits: FloatArray, bins: IntArray, which: int) -> IntArray:
    """Indices of the tokens in bin `which`, likeliest first; of equally likely ones the lower index first."""
    members = np.flatnonzero(bins == which)
    return members[np.argsort(-logits[members], kind="stable")]


def _draw(logits: FloatArray, bins: IntArray, top: np.float32, sampling: Sampling, draw: float) -> int:
    """The index of the token that `draw`, in [0, 1), falls on among the tokens that top-p keeps."""
    mass = logits.astype(np.float64)  # each probability divided by the likeliest token's
    with np.errstate(over="ignore"):
        mass -= float(top)
        mass /= sampling.temperature  # near 0, all but the likeliest become -inf
        np.exp(mass, out=mass)
    mass_at_end = np.bincount(bins, weights=mass).cumsum()  # the cumulative mass at each bin's end
    sorted_bins: dict[int, IntArray] = {}  # those sorted so far

    def first_beyond(limit: float) -> tuple[int, float]:
        """The first token, likeliest first, at which the cumulative mass exceeds `limit`, and that mass."""
        which = int(np.searchsorted(mass_at_end, limit, side="right"))
        if which not in sorted_bins:
            sorted_bins[which] = _sorted_bin(logits, bins, which)
        members = sorted_bins[which]
        cumulative = (mass_at_end[which - 1] if which else 0.0) + mass[members].cumsum()
        place = min(int(np.searchsorted(cumulative, limit, side="right")), len(members) - 1)
        # both sum the same numbers in different orders, and rounding must not lift the mass above the bin's end
        return int(members[place]), float(min(cumulative[place], mass_at_end[which]))

    kept_mass = float(mass_at_end[-1])
    if sampling.top_p < 1:
        _, kept_mass = first_beyond(float(np.nextafter(sampling.top_p * kept_mass, 0)))  # reaching top_p is enough
    token, _ = first_beyond(min(draw * kept_mass, float(np.nextafter(kept_mass, 0))))
    return token


def uniform(seed: int, row: int, step: int) -> float:
    """A number in [0, 1): the top 53 bits of a value that splitmix64 (Steele et al. 2014) has mixed twice.

    The value starts at `seed` times splitmix64's increment, plus `row * 2^32 + step`. Each time the increment is added and the
    sum mixed; the second time starts from the first result.
    """
    value = (seed * 0x9E3779B97F4A7C15 + (row << 32) + step) & _MASK
    for _ in range(2):
        value = (value + 0x9E3779B97F4A7C15) & _MASK
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
        value ^= value >> 31
    return float((value >> 11) * 2.0**-53)
