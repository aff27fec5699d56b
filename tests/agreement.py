"""What parity tests share: a decoder fed the torch reference's tokens gives its logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from skipdecode.decoder import Decoder
from skipdecode.exporter.reference import greedy_tokens


def assert_gives_the_references_logits(
    decoder: Decoder, model: Any, prompts: Sequence[list[int]], new: int, tolerance: float
) -> None:
    """Step by step and row by row, so that one early difference does not hide the rest.

    Args:
        model: torch's; where the engines are narrow, with weights of their dtype.
        prompts: longest first, of the lengths that the decoder was made for.
        tolerance: of each row's largest logit.
    """
    expected = [greedy_tokens(model, decoder.schedule, prompt, new) for prompt in prompts]
    decoder.prefill(prompts)
    for step in range(new):
        if step:
            decoder.decode_step(np.array([tokens[step - 1] for tokens, _ in expected]))
        for row, (_, logits) in enumerate(expected):
            wanted = logits[step].numpy()
            assert np.abs(decoder.logits[row] - wanted).max() <= tolerance * np.abs(wanted).max(), (row, step)
