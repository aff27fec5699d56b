"""Decode steps whose tokens are chosen on the host: feed the tokens, climb, choose the next ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from skipdecode.decoder import Decoder
from skipdecode.generation import Row
from skipdecode.memory import HostMemory, IntArray
from skipdecode.sampling import Sampling, choose_tokens
from skipdecode.trace import Trace, traced


def host_tokens(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    rows: Sequence[Row],
    new: int,
    sampling: Sampling,
    order: IntArray,
    trace: Trace | None,
) -> Iterator[tuple[list[int], list[int], int | None]]:
    """Yield each step's row numbers, one token for each, and the layer count; first the prefill's, whose count is None.

    Rows that have ended stay in the batch until they are half of it, because dropping them moves the keys and values of others.

    Args:
        prompts: as in `Decoder.prefill`.
        rows: the user's rows; the caller sets `finish_reason` on those that have ended.
        new: tokens per row.
        order: [B] int64, the user's row numbers in the decoder's order, longest prompt first.
    """
    row_numbers = order.tolist()
    traced(trace, "prefill", decoder.prefill)(prompts)
    decode_step = traced(trace, "decode step", decoder.decode_step, result="layers")
    choose = traced(trace, "choose tokens", choose_tokens)
    tokens = choose(decoder.logits, sampling, order, 0).tolist()
    yield row_numbers, tokens, None
    for step in range(1, new):
        if len(row_numbers) > 1 and isinstance(decoder.memory, HostMemory):
            unfinished = [index for index, number in enumerate(row_numbers) if rows[number].finish_reason is None]
            if 2 * len(unfinished) <= len(row_numbers):
                decoder.keep_rows(unfinished)
                order, tokens = order[unfinished], [tokens[i] for i in unfinished]
                row_numbers = order.tolist()
        layers = decode_step(tokens)
        tokens = choose(decoder.logits, sampling, order, step).tolist()
        yield row_numbers, tokens, layers
