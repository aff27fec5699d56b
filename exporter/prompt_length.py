"""Where each prompt of a batch ends: a schedule anchored at the generated tokens counts positions from there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import torch

from skipdecode.errors import ScheduleError

PromptLength: TypeAlias = int | Sequence[int] | torch.Tensor | Literal["labels"]
_NOT_LEARNED = -100  # transformers' label for tokens that the loss ignores, such as a prompt's


class PromptEnds:
    """Where each row's prompt ends, for all passes or, when read from labels, for the current one.

    Attributes:
        shortest, longest: the first and the last of these ends, in tokens from the start of the pass.
    """

    def __init__(self, given: PromptLength) -> None:
        self.shortest = self.longest = 0
        self._ends = torch.zeros((), dtype=torch.int64)  # [] or [B]
        self._in_labels, self._read = isinstance(given, str) and given == "labels", False
        if not self._in_labels:
            self._set(_counts(given))

    def read_labels(self, labels: torch.Tensor | None) -> None:
        """Before a model runs, find each prompt's end: the first token that is learned. A row without one is all prompt.

        Raises:
            ScheduleError: labels that are not [B,S].
        """
        if self._in_labels and labels is not None:
            if labels.ndim != 2:
                raise ScheduleError(
                    f"labels of shape {[*labels.shape]} do not say where prompts end", "give the counts of tokens",
                    where="skip_schedule",
                )  # fmt: skip
            learned = labels != _NOT_LEARNED
            self._set(torch.where(learned.any(dim=1), learned.int().argmax(dim=1), labels.shape[1]))
            self._read = True

    def check_read(self) -> None:
        """Before the layers run: raises ScheduleError if the ends come from labels and this pass was given none."""
        if self._in_labels and not self._read:
            raise ScheduleError(
                'prompt_length="labels", and the model was called without labels=...',
                "call it with them, or give the counts of tokens", where="skip_schedule",
            )  # fmt: skip
        self._read = False

    def computed(self, after: torch.Tensor, before: torch.Tensor, cap: int) -> torch.Tensor:
        """`after` for a row's prompt and `cap` more tokens, `before` for later ones; both [B,S,H] or [N,B,S,H].

        Args:
            after: the layer's output.
            before: its input.
        """
        rows, length = after.shape[-3:-1]
        if self._ends.ndim and len(self._ends) != rows:
            message = f"prompt_length has {len(self._ends)} counts, the batch {rows} rows"
            raise ScheduleError(message, "give one a row", where="skip_schedule")
        if self.shortest == self.longest and length <= self.longest + cap:
            return after
        ends = self._ends.to(after.device).reshape(-1, 1) + cap
        positions = torch.arange(length, device=after.device)
        return torch.where((positions < ends)[..., None], after, before)

    def _set(self, ends: torch.Tensor) -> None:
        self._ends, self.shortest, self.longest = ends, int(ends.min()), int(ends.max())


def _counts(given: Any) -> torch.Tensor:
    """`prompt_length` as an integer tensor, [] or [B].

    Raises:
        ScheduleError: not a count of tokens, or one per row.
    """
    try:
        counts = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        counts = torch.empty(0)
    if counts.dtype not in (torch.int64, torch.int32) or counts.ndim > 1 or not counts.numel() or counts.min() < 0:
        what = 'give a count of tokens, one a row, or "labels"'
        raise ScheduleError(f"prompt_length={given!r}"[:100], what, where="skip_schedule")
    return counts
