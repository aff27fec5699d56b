"""What `make demo` shows: export the shipped model with a 2x schedule, then generate at full depth and with the schedule."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

from data import SPAN, prompt

import skipdecode
from skipdecode.generate import Generator
from skipdecode.generation import Generation

HERE = Path(os.path.relpath(Path(__file__).parent))
BUNDLE = Path("demo")
PROMPTS, ROUNDS = 4, 7


def main() -> None:
    schedule = ["--schedule", "linear", "--speedup", "2", "--span", str(SPAN)]
    command = ["skip-export", str(HERE / "model"), *schedule, "--out", str(BUNDLE), "--force"]
    print("$", " ".join(command), flush=True)
    subprocess.run([str(Path(sys.executable).parent / command[0]), *command[1:]], check=True)
    model = skipdecode.load(BUNDLE)
    with (HERE / "sample.csv").open(encoding="utf-8", newline="") as lines:
        prompts = [prompt(row["mr"]) for row in csv.DictReader(lines)][:PROMPTS]
    for text in prompts:
        full, skipped = (model.generate(text, max_new_tokens=SPAN, schedule=name) for name in ("full", None))
        print(f"\n{text}")
        print(f"  full depth: {_text(full)}\n              {_layers(full)}")
        print(f"  2x        : {_text(skipped)}\n              {_layers(skipped)}")
    print(f"\n{_gain(model, prompts[0])}")


def _text(result: Generation) -> str:
    return (result.sequences[0].text or "").strip()


def _layers(result: Generation) -> str:
    return "layers per step: " + " ".join(map(str, result.layers))


def _gain(model: Generator, text: str) -> str:
    """Decode time over the schedule's whole span, taking turns; the least of a few rounds, because the machine may be shared."""
    seconds: dict[str | None, list[float]] = {"full": [], None: []}
    layers: dict[str | None, float] = {}
    for _ in range(ROUNDS):
        for schedule, times in seconds.items():
            result = model.generate(text, max_new_tokens=SPAN + 1, schedule=schedule, ignore_eos=True)
            times.append(result.timings.decode_s)
            layers[schedule] = sum(result.layers) / len(result.layers)
    full, skipped = min(seconds["full"]), min(seconds[None])
    return (
        f"decoding {SPAN} tokens, batch 1: {full * 1e3:.1f} ms at full depth ({layers['full']:.0f} layers), "
        f"{skipped * 1e3:.1f} ms with the schedule ({layers[None]:.1f} layers a step): {full / skipped:.2f}x faster"
    )


if __name__ == "__main__":
    main()
