"""A loaded bundle, and the loop: prefill, then for each step pick tokens, feed them, climb."""

from __future__ import annotations

import logging
import reprlib
import time
from collections.abc import Iterator, Sequence
from numbers import Integral
from operator import index
from pathlib import Path
from typing import Any

import numpy as np

from skipdecode import manifest as manifests
from skipdecode.decoder import Decoder
from skipdecode.device_loop import DeviceLoop
from skipdecode.errors import CapacityError
from skipdecode.generation import Generation, Prompts, Row, Step, Streamer, Timings, check_rows
from skipdecode.host_loop import host_tokens
from skipdecode.kv_buffer import have_room
from skipdecode.model import check_sources
from skipdecode.prefill import PREFILL_CHUNK
from skipdecode.sampling import Sampling
from skipdecode.schedule import Schedule, full_depth
from skipdecode.targets import choose_target, load_engines
from skipdecode.text import Tokenizer
from skipdecode.trace import Trace

logger = logging.getLogger(__name__)

_PROMPT = "give a text or a list of whole numbers, or a list of these"


class Generator:
    """A bundle loaded on one target. Calls may follow each other, not overlap: none from several threads at once, and of two
    streams on a device the first is ended by the second.

    Raises:
        BundleError, TargetError, CapacityError: see `load`.
    """

    def __init__(
        self,
        bundle: Path,
        *,
        target: str | None = None,
        threads: int | None = None,
        check_hashes: bool = False,
        prefill_chunk: int = PREFILL_CHUNK,
        cuda_graphs: bool = True,
        trace: Trace | None = None,
    ) -> None:
        if prefill_chunk < 1:
            raise CapacityError(f"{prefill_chunk} is not a positive count", "choose 1 or more", where="--prefill-chunk")
        started = time.perf_counter()
        self._prefill_chunk, self._cuda_graphs, self._trace = prefill_chunk, cuda_graphs, trace
        self.path = bundle
        with manifests.one_bundle(bundle):
            self.manifest = manifests.read(bundle)
            if check_hashes:
                manifests.check_hashes(self.manifest, bundle)
            self.target = choose_target(self.manifest, bundle, target)
            self.engines = load_engines(self.manifest, bundle, self.target, threads, trace)
            self.tokenizer = Tokenizer.of(bundle)
        self.load_s = time.perf_counter() - started
        self._kept_loop: DeviceLoop | None = None

    def generate(
        self,
        prompts: Prompts,
        *,
        max_new_tokens: int = 64,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        schedule: Schedule | str | None = None,
        streamer: Streamer | None = None,
        ignore_eos: bool = False,
    ) -> Generation:
        """Generate for one prompt or a batch whose prompts may differ in length.

        After an error the generator stays usable, unless a device has failed.

        Args:
            prompts: text or token ids, one or several.
            max_new_tokens: tokens a row, 1 or more.
            do_sample: False: greedy. Otherwise `temperature`, `top_k`, `top_p` and `seed` as in `Sampling`.
            schedule: None: the bundle's; "full": every layer at every position, the baseline; or one of this model's depth that
                takes or leaves each of the bundle's segments as a whole.
            streamer: `put` gets each step's tokens [B] int64, never the prompt's; rows that have ended repeat their last token.
            ignore_eos: go on after an end-of-sequence token (for measuring).

        Raises:
            CapacityError: an empty prompt, text without a tokenizer, an id outside the vocabulary, too many rows or tokens,
                sampling out of range, more than memory holds; a schedule of another depth, or through a segment of the bundle.
            ScheduleError: a schedule that skips layers whose keys and values others read.
            TargetError: the device or its library failed.
        """
        sampling = Sampling(do_sample=do_sample, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        if not do_sample and sampling != Sampling(seed=seed):
            logger.warning("temperature, top_k and top_p have no effect: do_sample is False, so the likeliest token is taken")
        rows = [Row(prompt_ids=ids) for ids in self.encode(prompts)]
        layers: list[int] = []
        started, prefill_s = time.perf_counter(), 0.0
        for step in self.stream(rows, max_new_tokens=max_new_tokens, sampling=sampling, schedule=schedule, ignore_eos=ignore_eos):
            if step.layers is None:
                prefill_s = time.perf_counter() - started
            else:
                layers.append(step.layers)
            if streamer is not None:
                streamer.put(np.array([row.token_ids[-1] for row in rows]))
        total = time.perf_counter() - started
        if streamer is not None:
            streamer.end()
        for row in rows:
            row.text = self.tokenizer.decode(row.token_ids) if self.tokenizer else None
        count = sum(len(row.token_ids) for row in rows)
        timings = Timings(load_s=self.load_s, prefill_s=prefill_s, decode_s=total - prefill_s, tokens_per_s=count / total)
        return Generation(sequences=tuple(rows), layers=tuple(layers), timings=timings)

    def stream(
        self,
        rows: list[Row],
        *,
        max_new_tokens: int,
        sampling: Sampling,
        schedule: Schedule | str | None = None,
        ignore_eos: bool = False,
    ) -> Iterator[Step]:
        """Yield the prefill's tokens, then each decode step's; `rows` grow as tokens come, but their `text` is not set.

        Args:
            rows: with their prompts; who sets a row's `finish_reason` between two steps ends it. The others as `generate`'s.

        Raises:
            CapacityError, ScheduleError, TargetError: as `generate`, at the first token; CapacityError also, on a device, where
                another generation has begun meanwhile.
        """
        chosen = self._schedule(schedule)
        new = check_rows(rows, max_new_tokens, self.manifest)
        stop_ids = () if ignore_eos else self.manifest.model.eos_token_ids
        try:
            for places, found, layers in self._tokens(rows, new, sampling, chosen, stop_ids):
                newest: list[int | None] = [None] * len(rows)
                for place, token in zip(places, found, strict=True):
                    if rows[place].finish_reason is None:
                        newest[place] = token
                        _append(rows[place], token, stop_ids, new)
                yield Step(tuple(newest), layers)
                if all(row.finish_reason is not None for row in rows):
                    return
        finally:  # also of a stream that is left before its end
            self.engines.after_run()

    def _tokens(
        self, rows: list[Row], new: int, sampling: Sampling, schedule: Schedule, stop_ids: Sequence[int]
    ) -> Iterator[tuple[list[int], list[int], int | None]]:
        """As `host_tokens`, of the loop on the host or on the device."""
        order = np.array(sorted(range(len(rows)), key=lambda row: -len(rows[row].prompt_ids)))  # see Decoder
        places = order.tolist()
        prompts = [rows[place].prompt_ids for place in places]
        lengths = [len(prompt) for prompt in prompts]
        if self.engines.turn_around is None or self._trace is not None:  # a trace wants each step waited for
            return host_tokens(self.decoder(lengths, new, schedule), prompts, rows, new, sampling, order, self._trace)
        steps = self._loop(lengths, new, schedule).tokens(prompts, new, sampling, order, stop_ids)
        return ((places, tokens, layers) for tokens, layers in steps)

    def _loop(self, prompt_lengths: Sequence[int], new: int, schedule: Schedule) -> DeviceLoop:
        """The last loop, with its buffers and graphs, where it has room for this; else a new one."""
        kept, rows, longest = self._kept_loop, len(prompt_lengths), max(prompt_lengths)
        if kept is not None and (len(kept.decoder.kv.lengths), kept.decoder.schedule) == (rows, schedule):
            fits = have_room(kept.decoder.slots, kept.decoder.slots_for(longest, new))
            if fits and new <= kept.max_steps:
                return kept
        if kept is not None:
            kept.wait()  # steps that nobody waited for, after a row's end
        kept = self._kept_loop = None  # its memory is free before more is taken
        self._kept_loop = self.device_loop(prompt_lengths, new, schedule)
        return self._kept_loop

    def device_loop(self, prompt_lengths: Sequence[int], new: int, schedule: Schedule) -> DeviceLoop:
        """A decoder's steps on the device, where the engines' turn-around is; `Decoder`'s arguments."""
        assert self.engines.turn_around is not None
        return DeviceLoop(
            self.decoder(prompt_lengths, new, schedule), self.engines.turn_around,
            stop_count=len(self.manifest.model.eos_token_ids), max_steps=new, graphs=self._cuda_graphs,
        )  # fmt: skip

    def decoder(self, prompt_lengths: Sequence[int], new: int, schedule: Schedule | None = None) -> Decoder:
        """A decoder of this bundle's engines, to go step by step; `Decoder`'s arguments, schedule None for the bundle's."""
        chosen = self._schedule(schedule)
        return Decoder(self.engines, self.manifest.model, chosen, prompt_lengths, new, self._prefill_chunk)

    def encode(self, prompts: Prompts) -> list[list[int]]:
        """Token ids of each prompt.

        Raises:
            CapacityError: neither text nor token ids; text, but the bundle has no tokenizer.
        """
        try:
            one = isinstance(prompts, (str, bytes)) or (len(prompts) and _is_number(prompts[0]))
            several: list[Any] = [prompts] if one else list(prompts)
        except (TypeError, KeyError) as error:
            raise CapacityError(f"{reprlib.repr(prompts)} is no prompt", _PROMPT) from error
        return [self._encode(prompt, f"prompt {number}") for number, prompt in enumerate(several)]

    def _encode(self, prompt: Any, where: str) -> list[int]:
        if isinstance(prompt, bytes):  # numbers, but no ids
            raise _neither(prompt, where)
        if not isinstance(prompt, str):
            try:
                return [index(token) for token in prompt]
            except TypeError as error:
                raise _neither(prompt, where) from error
        if self.tokenizer is None:
            raise CapacityError("the bundle has no tokenizer", "give token ids", where=str(self.path))
        return self.tokenizer.encode(prompt)

    def _schedule(self, schedule: Schedule | str | None) -> Schedule:
        if schedule is None:
            return self.manifest.schedule
        if isinstance(schedule, Schedule):
            self._check_schedule(schedule)
            return schedule
        if schedule != "full":
            raise CapacityError(f"unknown schedule {schedule!r}", "choose full, or none for the bundle's", where="--schedule")
        return full_depth(self.manifest.model.num_layers)

    def _check_schedule(self, schedule: Schedule) -> None:
        depth = self.manifest.model.num_layers
        if schedule.num_layers != depth:
            raise CapacityError(f"the schedule is for {schedule.num_layers} layers, the model has {depth}", "choose another")
        if any(len({schedule.cap(layer) for layer in layers}) > 1 for layers in self.manifest.segments):
            raise CapacityError("the schedule cuts through a segment of this bundle", "export the model with it")
        check_sources(self.manifest.model.key_sources, schedule)


def load(
    bundle: str | Path,
    *,
    target: str | None = None,
    threads: int | None = None,
    check_hashes: bool = False,
    prefill_chunk: int = PREFILL_CHUNK,
    cuda_graphs: bool = True,
    trace: Trace | None = None,
) -> Generator:
    """Load a bundle that `skip-export` wrote.

    Target cuda sets variables of this process's environment that CUDA's libraries read (docs/cuda.md), unless they are set.

    Args:
        bundle: its folder.
        target: where its engines run: cpu, cuda, tensorrt-rtx, tensorrt; None: cpu, or where it has none, the bundle's first.
        threads: of the process's one pool; None: one for each usable core. The first load of a process decides; later ones
            change nothing.
        check_hashes: also compare every file's SHA-256 (reads the whole bundle).
        prefill_chunk: prompt tokens a pass; what a prompt's attention takes in memory grows with chunk x prompt.
        cuda_graphs: on a GPU, whether a step is replayed as one CUDA graph; False: its calls are made one by one.
        trace: collects what all its runs spend their time on; `Trace.write` ends it.

    Raises:
        BundleError: missing, damaged, or of another format version; or replaced meanwhile: load it again.
        TargetError: no such target, or engines of another library version, CPU or GPU.
        CapacityError: a chunk of no tokens, threads beyond the machine's cores, or memory that does not hold the engines.
    """
    return Generator(
        Path(bundle), target=target, threads=threads, check_hashes=check_hashes, prefill_chunk=prefill_chunk,
        cuda_graphs=cuda_graphs, trace=trace,
    )  # fmt: skip


def _neither(prompt: Any, where: str) -> CapacityError:
    return CapacityError(f"{reprlib.repr(prompt)} is neither text nor token ids", _PROMPT, where=where)


def _is_number(value: Any) -> bool:
    """Also of numpy's and torch's, in which a row of ids is no number, nor is a text of numpy's."""
    return isinstance(value, Integral) or (getattr(value, "ndim", None) == 0 and not isinstance(value, str))


def _append(row: Row, token: int, stop_ids: Sequence[int], max_new_tokens: int) -> None:
    row.token_ids.append(token)
    if token in stop_ids:
        row.finish_reason = "stop"
    elif len(row.token_ids) == max_new_tokens:
        row.finish_reason = "length"
