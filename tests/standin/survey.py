"""`python -m tests.standin.survey FOLDER [NAME ..]`: what onnxruntime-gpu does with every architecture's cuda engines.

Needs no GPU. Prints a line each for fp16 and bf16: how many kernels and other nodes a step of 6 layers at full depth has, or what
is wrong. The bundles stay in FOLDER. Takes a quarter of an hour.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import transformers

from skipdecode.errors import SkipDecodeError
from skipdecode.exporter.export import ExportRequest, export
from skipdecode.schedule_builders import ScheduleRequest
from tests.models import CONFIGS, MAX_LENGTH, RELATIVES
from tests.standin import driver
from tests.zoo import Zoo


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:] or [*CONFIGS, *RELATIVES, "reading_others"]
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    (folder / "libraries").mkdir(parents=True)
    driver.build_runtime(folder / "libraries")
    zoo = Zoo(folder)
    for name in names:
        for dtype in ("fp16", "bf16"):
            print(f"{name:24} {dtype:6} {_result(zoo, folder, name, dtype)}", flush=True)


def _result(zoo: Zoo, folder: Path, name: str, dtype: str) -> str:
    out = folder / f"{name}.{dtype}"
    schedule = ScheduleRequest(name="step", max_layers=6, min_layers=4, warmup_layers=3, span=6, max_variants=2)
    try:
        export(
            ExportRequest(
                model=str(zoo.checkpoint(name)), out=out, schedule=schedule, targets=("cuda",), dtype=dtype, max_length=MAX_LENGTH
            )
        )
    except SkipDecodeError as error:
        return str(error)
    done = driver.ask_provider(folder / "libraries", out)
    if done.returncode:
        return done.stderr.strip().splitlines()[-1]
    answer = json.loads(done.stdout)
    if "error" in answer:
        return str(answer["error"])
    others = answer["kernels"].count("no kernel")
    return f"{len(answer['kernels']) - others} kernels, {others} others, {answer['graphs']} graphs {' '.join(answer['warnings'])}"


if __name__ == "__main__":
    main()
