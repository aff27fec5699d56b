"""A loaded bundle and its generation loop: prefill, then for each step choose tokens, feed them, run the segments."""

from __future__ import annotations

import logging
import time
from collections import abc
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from skipdecode import manifest as manifests
from skipdecode.decoder import Decoder
from skipdecode.device_loop import DeviceLoop
from skipdecode.errors import CapacityError
from skipdecode.generation import Generation, Row, Step, Streamer, Timings, check_rows
from skipdecode.host_loop import host_tokens
from skipdecode.kv_buffer import have_room
from skipdecode.model import check_sources
from skipdecode.prefill import PREFILL_CHUNK
from skipdecode.prompts import Prompts, encode
from skipdecode.sampling import Sampling
from skipdecode.schedule import Schedule, full_depth
from skipdecode.targets import choose_target, load_engines
from skipdecode.text import Tokenizer
from skipdecode.trace import Trace

logger = logging.getLogger(__name__)


class Generator:
    """A bundle loaded on one target. Use `load` to make one; the arguments are the same.

    Use it from one thread at a time. On a device, a stream may take over the buffers of one that has not ended, which then
    raises CapacityError at its next step.

    Attributes:
        path: the bundle's folder, as it was given.
        manifest: what `bundle.json` says.
        target: the target whose engines are loaded.
        engines: these engines, to be bound to arrays.
        tokenizer: None where the bundle has none.
        load_s: seconds that loading took.

    Raises:
        BundleError, TargetError, CapacityError: as `load`.
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
        """Generate tokens for one prompt, or for a batch of prompts, which may differ in length.

        The generator stays usable after an error, unless the device failed.

        Args:
            prompts: text or token ids, one prompt or a list of them.
            max_new_tokens: tokens to generate per row, 1 or more.
            do_sample: False: greedy. True: sampled with `temperature`, `top_k`, `top_p` and `seed`, as in `Sampling`.
            schedule: None: the bundle's. "full": every layer at every position, the baseline. Or a schedule for this model's
                depth that computes or skips each of the bundle's segments as a whole.
            streamer: its `put` gets each step's tokens [B] int64, never the prompt's; ended rows repeat their last token.
            ignore_eos: continue after end-of-sequence tokens (for measuring).

        Returns:
            Token ids and text of each row, the layer count of each decode step, and timings.

        Raises:
            CapacityError: an empty prompt, text for a bundle without a tokenizer, an id outside the vocabulary, too many rows
                or tokens, a sampling value out of range, or too little memory; an unknown schedule, or one that is for another
                depth or divides a segment of the bundle.
            ScheduleError: the schedule skips layers whose keys and values other layers read.
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
    ) -> abc.Generator[Step, None, None]:
        """Yield the prefill's tokens, then each decode step's; they are also appended to `rows`, whose `text` is not set.

        A stream that has not ended keeps its memory until its `close()` is called or nothing refers to it any more.

        Args:
            rows: new ones with their prompts. Set a row's `finish_reason` between two steps to end it.
            max_new_tokens, schedule, ignore_eos: as in `generate`.
            sampling: how tokens are chosen.

        Raises:
            CapacityError, ScheduleError, TargetError: as `generate`, raised while iterating; CapacityError also when another
                generation has taken over the buffers on a device.
        """
        resolved = self._resolve_schedule(schedule)
        new = check_rows(rows, max_new_tokens, self.manifest)
        stop_ids = () if ignore_eos else self.manifest.model.eos_token_ids
        try:
            for row_numbers, tokens, layers in self._tokens(rows, new, sampling, resolved, stop_ids):
                token_ids: list[int | None] = [None] * len(rows)
                for number, token in zip(row_numbers, tokens, strict=True):
                    if rows[number].finish_reason is None:
                        token_ids[number] = token
                        _append(rows[number], token, stop_ids, new)
                yield Step(tuple(token_ids), layers)
                if all(row.finish_reason is not None for row in rows):
                    return
        finally:  # also when the caller abandons the stream early
            self.engines.after_run()

    def _tokens(
        self, rows: list[Row], new: int, sampling: Sampling, schedule: Schedule, stop_ids: Sequence[int]
    ) -> Iterator[tuple[list[int], list[int], int | None]]:
        """The tokens of each step as `host_tokens` yields them, from the loop on the host or on the device."""
        order = np.array(sorted(range(len(rows)), key=lambda row: -len(rows[row].prompt_ids)))  # as Decoder wants them
        row_numbers = order.tolist()
        prompts = [rows[number].prompt_ids for number in row_numbers]
        lengths = [len(prompt) for prompt in prompts]
        if self.engines.turn_around is None or self._trace is not None:  # a trace has to wait for each step
            return host_tokens(self.decoder(lengths, new, schedule), prompts, rows, new, sampling, order, self._trace)
        steps = self._reused_or_new_loop(lengths, new, schedule).tokens(prompts, new, sampling, order, stop_ids)
        return ((row_numbers, tokens, layers) for tokens, layers in steps)

    def _reused_or_new_loop(self, prompt_lengths: Sequence[int], new: int, schedule: Schedule) -> DeviceLoop:
        """The previous loop with its buffers and graphs if it has room for this generation, else a new one."""
        loop, rows, longest = self._kept_loop, len(prompt_lengths), max(prompt_lengths)
        if loop is not None and (len(loop.decoder.kv.lengths), loop.decoder.schedule) == (rows, schedule):
            fits = have_room(loop.decoder.slots, loop.decoder.slots_for(longest, new))
            if fits and new <= loop.max_steps:
                return loop
        if loop is not None:
            loop.wait()  # for steps that were enqueued before all rows had ended
        loop = self._kept_loop = None  # release its memory before allocating more
        self._kept_loop = self.device_loop(prompt_lengths, new, schedule)
        return self._kept_loop

    def device_loop(self, prompt_lengths: Sequence[int], new: int, schedule: Schedule) -> DeviceLoop:
        """A loop of decode steps on the device, for engines that have a turn-around; arguments as in `decoder`."""
        assert self.engines.turn_around is not None
        return DeviceLoop(
            self.decoder(prompt_lengths, new, schedule), self.engines.turn_around,
            stop_count=len(self.manifest.model.eos_token_ids), max_steps=new, graphs=self._cuda_graphs,
        )  # fmt: skip

    def decoder(self, prompt_lengths: Sequence[int], new: int, schedule: Schedule | None = None) -> Decoder:
        """A decoder on this bundle's engines, to run step by step; arguments as in `Decoder`. `schedule` None: the bundle's."""
        resolved = self._resolve_schedule(schedule)
        return Decoder(self.engines, self.manifest.model, resolved, prompt_lengths, new, self._prefill_chunk)

    def encode(self, prompts: Prompts) -> list[list[int]]:
        """Token ids of each prompt.

        Raises:
            CapacityError: a prompt is neither text nor token ids, or is text that is not UTF-8, or text for a bundle without a
                tokenizer.
        """
        return encode(prompts, self.tokenizer, str(self.path))

    def _resolve_schedule(self, schedule: Schedule | str | None) -> Schedule:
        if schedule is None:
            return self.manifest.schedule
        if isinstance(schedule, Schedule):
            self._check_schedule(schedule)
            return schedule
        if schedule != "full":
            raise CapacityError(
                f"unknown schedule {schedule!r}", "choose full, or leave it out for the bundle's own", where="--schedule"
            )
        return full_depth(self.manifest.model.num_layers)

    def _check_schedule(self, schedule: Schedule) -> None:
        depth = self.manifest.model.num_layers
        if schedule.num_layers != depth:
            raise CapacityError(f"the schedule is for {schedule.num_layers} layers, but the model has {depth}", "choose another")
        if any(len({schedule.cap(layer) for layer in layers}) > 1 for layers in self.manifest.segments):
            raise CapacityError("the schedule cuts through a segment of this bundle", "export the model with that schedule")
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

    For target cuda, sets environment variables of this process that CUDA's libraries read (docs/cuda.md), unless they are set.

    Args:
        bundle: the bundle's folder.
        target: where the engines run: cpu, cuda, tensorrt-rtx or tensorrt. None: cpu, or the bundle's first target if it has
            no cpu.
        threads: size of the one thread pool that all engines of the process share. None: one thread per usable core. The
            first load in a process decides; later ones change nothing.
        check_hashes: also compare every file's SHA-256, which reads the whole bundle.
        prefill_chunk: prompt tokens per pass; the memory for a prompt's attention grows with `prefill_chunk` x prompt length.
        cuda_graphs: on a GPU, replay each step as one CUDA graph. False: make its calls one by one.
        trace: records where all runs spend their time; `Trace.write` ends it.

    Raises:
        BundleError: the bundle is missing, damaged or of another format version, or was replaced during the load: load it again.
        TargetError: the bundle has no such target, or its engines are for another library version, CPU or GPU.
        CapacityError: `prefill_chunk` below 1, `threads` below 1 or above the machine's cores, or too little memory.
    """
    return Generator(
        Path(bundle), target=target, threads=threads, check_hashes=check_hashes, prefill_chunk=prefill_chunk,
        cuda_graphs=cuda_graphs, trace=trace,
    )  # fmt: skip


def _append(row: Row, token: int, stop_ids: Sequence[int], max_new_tokens: int) -> None:
    row.token_ids.append(token)
    if token in stop_ids:
        row.finish_reason = "stop"
    elif len(row.token_ids) == max_new_tokens:
        row.finish_reason = "length"
