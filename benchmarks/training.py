"""How much faster is fine-tuning through a schedule than at full depth?

One step is forward, backward and AdamW over a batch of whole sequences, in fp32 on the CPU; full depth and the schedules take
turns within a round. `promised` is the gain if layers were all of a step's work: all layer positions over the computed ones. In
`prompts of 32` and `of 8 to 56` the schedule begins after a prompt of so many tokens; the latter shows what rows cost whose
prompts differ in length.

examples:
  training.py
  training.py --smoke      (tiny models: does it run at all; its figures mean nothing)
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch
import transformers
from machine import facts, write_results
from models import checkpoint_config

from skipdecode.exporter import skip_schedule
from skipdecode.schedule import Anchor, Schedule, full_depth
from skipdecode.schedule_builders import ScheduleRequest, build_schedule
from skipdecode.validation.samples import Effort, Summary, interleave

ROWS, LENGTH, SPEEDUPS = 4, 128, (2, 3, 4, 5)
PROMPTS = {"2x, prompts of 32": [32] * ROWS, "2x, prompts of 8 to 56": [8, 24, 40, 56]}
EFFORT = Effort(rounds=7, seconds=90.0, spread=0.01)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="opt,llama", type=lambda text: text.split(","))
    parser.add_argument("--smoke", action="store_true", help="tiny models, one round, nothing written")
    options = parser.parse_args()
    machine = facts()
    result = {"machine": machine, "rows": ROWS, "length": LENGTH, "models": {}}
    for name in options.models:
        result["models"][name] = measure(name, options.smoke)
        for title, row in result["models"][name].items():
            print(f"{name} {title}: {row['step_s']:.3f} s, {row['gain']:.2f}x ({row['low']:.2f} .. {row['high']:.2f}), "
                  f"promised {row['promised']:.2f}x", flush=True)  # fmt: skip
    if not options.smoke:
        write_results("training", result)


def measure(name: str, tiny: bool) -> dict[str, dict[str, float]]:
    """By schedule: seconds a step, gain over full depth with its interval, and the gain that the layer positions promise."""
    config = checkpoint_config(name, tiny)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(3, config.vocab_size, (ROWS, LENGTH))

    def step(schedule: Schedule, prompts: list[int]) -> float:
        began = time.perf_counter()
        with skip_schedule(model, schedule, prompt_length=prompts):
            model(ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - began

    cases = _cases(config.num_hidden_layers, SPEEDUPS[:1] if tiny else SPEEDUPS)
    times = interleave(
        {title: lambda case=case: step(*case) for title, case in cases.items()},
        Effort(rounds=1, seconds=0.0) if tiny else EFFORT,
    )
    return {title: _row(times["full depth"], times[title], *case) for title, case in cases.items()}


def _cases(depth: int, speedups: tuple[int, ...]) -> dict[str, tuple[Schedule, list[int]]]:
    """Each case's schedule and the length of each row's prompt."""
    cases = {"full depth": (full_depth(depth), [0] * ROWS)}
    for speedup in speedups:
        request = ScheduleRequest(speedup=speedup, span=LENGTH, anchor=Anchor.ABSOLUTE)
        cases[f"{speedup}x"] = build_schedule(request, depth), [0] * ROWS
    for title, counts in PROMPTS.items():
        cases[title] = build_schedule(ScheduleRequest(speedup=2, span=LENGTH - 32), depth), counts
    return cases


def _row(full_s: list[float], step_s: list[float], schedule: Schedule, prompts: list[int]) -> dict[str, Any]:
    gains = Summary.of((np.array(full_s) / np.array(step_s)).tolist())
    caps = map(schedule.cap, range(schedule.num_layers))
    computed = sum(LENGTH if cap is None else sum(min(count + cap, LENGTH) for count in prompts) / ROWS for cap in caps)
    return {
        "step_s": Summary.of(step_s).median, "gain": gains.median, "low": gains.low, "high": gains.high, "rounds": gains.n,
        "promised": schedule.num_layers * LENGTH / computed,
    }  # fmt: skip


if __name__ == "__main__":
    main()
