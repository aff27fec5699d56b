"""The systems that are compared, one small class each, run in its own process by `worker.py`.

Each has `generate(prompts, tokens) -> Run`. It takes prompts of one length and greedily generates exactly `tokens` tokens a row,
with a time stamp for each step.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_time import engine_time


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One generate call."""

    token_ids: tuple[int, ...]  # of the first row
    token_s: tuple[float, ...]  # when each step's new tokens came, in seconds since the call
    total_s: float
    layers: tuple[int, ...] = ()  # that each decode step computed; this runtime only

    @property
    def decode_ms(self) -> float:
        """Milliseconds a decode step; the first token comes from prefill."""
        return 1e3 * (self.token_s[-1] - self.token_s[0]) / (len(self.token_s) - 1)


Prompts = list[list[int]]


class SkipDecode:
    """This runtime on one bundle, with the bundle's own schedule."""

    def __init__(self, bundle: Path, threads: int) -> None:
        import skipdecode

        self._generator = skipdecode.load(bundle, threads=threads)

    def generate(self, prompts: Prompts, tokens: int) -> Run:
        clock = Clock()
        result = self._generator.generate(prompts, max_new_tokens=tokens, ignore_eos=True, streamer=clock)
        return clock.run(result.sequences[0].token_ids, layers=result.layers)

    def outside_engines_us(self, prompts: Prompts, tokens: int) -> dict[str, float]:
        """Microseconds a decode step spent outside engine calls, from one extra run with timed engine calls."""
        with engine_time() as counted:
            clock = Clock(lambda: (counted.seconds, counted.calls))
            self._generator.generate(prompts, max_new_tokens=tokens, ignore_eos=True, streamer=clock)
        steps = list(zip(clock.stamps, clock.notes, clock.stamps[1:], clock.notes[1:], strict=False))
        outside = [1e6 * ((t1 - t0) - (e1[0] - e0[0])) for t0, e0, t1, e1 in steps]
        return {
            "median": statistics.median(outside),
            "mean": statistics.fmean(outside),
            "engine_calls_per_step": (clock.notes[-1][1] - clock.notes[0][1]) / len(steps),
        }


class Transformers:
    """Hugging Face transformers: eager, KV cache, its default attention (sdpa)."""

    def __init__(self, checkpoint: Path, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        torch.set_num_threads(threads)
        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()

    def generate(self, prompts: Prompts, tokens: int) -> Run:
        ids, clock = self._torch.tensor(prompts), Clock()
        out = self._model.generate(
            ids, attention_mask=self._torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
            use_cache=True, stopping_criteria=[clock.stop],
        )  # fmt: skip
        return clock.run(out[0, ids.shape[1] :].tolist())


class TorchCompile(Transformers):
    """The same model on a static cache, its decode step compiled by torch; prefill is eager."""

    def __init__(self, checkpoint: Path, threads: int) -> None:
        from transformers import StaticCache

        super().__init__(checkpoint, threads)
        self._cache_of = StaticCache
        self._step = self._torch.compile(self._model.forward, dynamic=False)
        self._caches: dict[tuple[int, int], Any] = {}  # by rows and positions

    def generate(self, prompts: Prompts, tokens: int) -> Run:
        key = (len(prompts), len(prompts[0]) + tokens)
        if key not in self._caches:
            self._caches[key] = self._cache_of(config=self._model.config, max_cache_len=key[1])
            for _ in range(2):  # the second call compiles again
                self._generate(prompts, tokens, self._caches[key])
        return self._generate(prompts, tokens, self._caches[key])

    def _generate(self, prompts: Prompts, tokens: int, cache: Any) -> Run:
        torch, clock, token_ids = self._torch, Clock(), []
        ids, length = torch.tensor(prompts), len(prompts[0])
        positions, forward = torch.arange(length)[None], self._model.forward
        cache.reset()
        with torch.no_grad():
            for step in range(tokens):
                out = forward(ids, position_ids=positions, use_cache=True, logits_to_keep=1, cache=cache)
                ids, positions, forward = out.logits[:, -1:].argmax(-1), torch.tensor([[length + step]]), self._step
                token_ids.append(int(ids[0]))
                clock.put(None)
        return clock.run(token_ids)


class CTranslate2:
    """CTranslate2 on a converted model."""

    def __init__(self, folder: Path, threads: int, compute_type: str) -> None:
        import ctranslate2

        self._tokens = json.loads((folder / "vocabulary.json").read_text(encoding="utf-8"))
        self._generator = ctranslate2.Generator(
            str(folder), device="cpu", compute_type=compute_type, inter_threads=1, intra_threads=threads
        )

    def generate(self, prompts: Prompts, tokens: int) -> Run:
        clock = Clock()
        result = self._generator.generate_batch(
            [[self._tokens[token] for token in prompt] for prompt in prompts],
            max_length=tokens, min_length=tokens, beam_size=1, sampling_topk=1,
            include_prompt_in_result=False, callback=lambda step: step.batch_id == len(prompts) - 1 and clock.put(step),
        )  # fmt: skip
        return clock.run(result[0].sequences_ids[0])


class Clock:
    """A streamer that time-stamps each token, and stores what `note` returns then."""

    def __init__(self, note: Callable[[], Any] = lambda: None) -> None:
        self.stamps: list[float] = []
        self.notes: list[Any] = []
        self._note = note
        self._started = time.perf_counter()

    def put(self, value: Any) -> bool:
        self.notes.append(self._note())
        self.stamps.append(time.perf_counter() - self._started)
        return False  # CTranslate2 would stop at True

    def end(self) -> None:
        pass

    def stop(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        """Stamp as a stopping criterion of transformers, whose streamers take only one row."""
        self.put(None)
        return input_ids.new_zeros(len(input_ids), dtype=bool)

    def run(self, token_ids: Sequence[int], layers: tuple[int, ...] = ()) -> Run:
        total = time.perf_counter() - self._started
        assert len(token_ids) == len(self.stamps), "a peer stopped early"
        return Run(token_ids=tuple(token_ids), token_s=tuple(self.stamps), total_s=total, layers=layers)
