"""Where each prompt of a batch ends: a schedule anchored at the generated tokens counts positions from there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import torch

from skipdecode.errors import ScheduleError, shortened

PromptLength: TypeAlias = int | Sequence[int] | torch.Tensor | Literal["labels"]
_IGNORED_LABEL = -100  # transformers' label for tokens that the loss ignores, such as a prompt's


class PromptEnds:
    """Where each row's prompt ends, for all passes or, when read from labels, for the current one.

    Attributes:
        shortest, longest: the first and the last of these ends, in tokens from the start of the pass.
    """

    def __init__(self, prompt_length: PromptLength) -> None:
        self.shortest = self.longest = 0
        self._ends = torch.zeros((), dtype=torch.int64)  # [] or [B]
        self._from_labels, self._labels_read = isinstance(prompt_length, str) and prompt_length == "labels", False
        if not self._from_labels:
            self._set(_as_counts(prompt_length))

    def read_labels(self, labels: torch.Tensor | None, length: int | None) -> None:
        """Before a model runs, find each prompt's end: the first token that is learned. A row without one is all prompt.

        Args:
            labels: those of the pass.
            length: its tokens per row, if they are known.

        Raises:
            ScheduleError: labels that are not [B,S], such as those of its last tokens only (`logits_to_keep`).
        """
        if self._from_labels and labels is not None:
            if labels.ndim != 2 or length not in (None, labels.shape[1]):
                passed = "" if length is None else f" in rows of {length} tokens"
                raise ScheduleError(
                    f"labels of shape {[*labels.shape]} do not say where prompts end{passed}",
                    "label every token, or give the prompts' lengths in tokens", where="skip_schedule",
                )  # fmt: skip
            learned = labels != _IGNORED_LABEL
            self._set(torch.where(learned.any(dim=1), learned.int().argmax(dim=1), labels.shape[1]))
            self._labels_read = True

    def check_labels_read(self) -> None:
        """Before the layers run: raises ScheduleError if the ends come from labels and this pass was given none."""
        if self._from_labels and not self._labels_read:
            raise ScheduleError(
                'prompt_length="labels", but the model was called without labels=...',
                "call it with labels, or give the prompts' lengths in tokens", where="skip_schedule",
            )  # fmt: skip
        self._labels_read = False

    def keep_computed(self, outputs: torch.Tensor, inputs: torch.Tensor, cap: int) -> torch.Tensor:
        """`outputs` for a row's prompt and `cap` more tokens, `inputs` for later ones; both [B,S,H] or [N,B,S,H].

        Args:
            outputs: the layer's output.
            inputs: its input.
        """
        rows, length = outputs.shape[-3:-1]
        if self._ends.ndim and len(self._ends) != rows:
            message = f"prompt_length has {len(self._ends)} counts, but the batch has {rows} rows"
            raise ScheduleError(message, "give one per row", where="skip_schedule")
        if self.shortest == self.longest and length <= self.longest + cap:
            return outputs
        ends = self._ends.to(outputs.device).reshape(-1, 1) + cap
        positions = torch.arange(length, device=outputs.device)
        return torch.where((positions < ends)[..., None], outputs, inputs)

    def _set(self, ends: torch.Tensor) -> None:
        self._ends, self.shortest, self.longest = ends, int(ends.min()), int(ends.max())


def _as_counts(prompt_length: Any) -> torch.Tensor:
    """`prompt_length` as an integer tensor, [] or [B].

    Raises:
        ScheduleError: not a count of tokens, or one per row.
    """
    try:
        counts = torch.as_tensor(prompt_length).clone()  # the caller may change its own during the block
    except (TypeError, ValueError, RuntimeError):
        counts = torch.empty(0)
    if counts.dtype not in (torch.int64, torch.int32) or counts.ndim > 1 or not counts.numel() or counts.min() < 0:
        remedy = 'give a count of tokens, one per row, or "labels"'
        raise ScheduleError(shortened(f"prompt_length={prompt_length!r}", 100), remedy, where="skip_schedule")
    return counts
