"""What the validation tests share: a real bundle with a tokenizer, measured with little effort."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skipdecode.exporter import reference_run
from skipdecode.exporter.export import ExportRequest, export
from skipdecode.schedule_builders import ScheduleRequest
from skipdecode.validation.samples import Effort
from tests.once import made_once, shared_folder

MODEL = Path(__file__).parents[3] / "examples" / "e2e" / "model"
QUICK = ["--batch", "1", "--context", "16", "--prompt-tokens", "8", "--new-tokens", "6"]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model at 2x with few variants."""

    def make(out: Path) -> None:
        schedule = ScheduleRequest(speedup=2, span=24, max_variants=3)
        export(ExportRequest(model=str(MODEL), out=out, schedule=schedule, max_batch=4, max_length=128))

    return made_once(shared_folder(tmp_path_factory) / "validated", make)


@pytest.fixture
def eval_file(tmp_path: Path) -> Path:
    path = tmp_path / "eval.jsonl"
    asked = [
        ("name[The Mill], food[Italian] =>", ["The Mill serves Italian food."]),
        ("name[Blue Spice] =>", ["Blue Spice is a restaurant."]),
    ]
    path.write_text("".join(json.dumps({"prompt": prompt, "references": texts}) + "\n" for prompt, texts in asked))
    return path


@pytest.fixture(scope="session", autouse=True)
def little_effort(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One round of everything, and a cache folder of the tests' own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        measure_once(patch)
        yield


def measure_once(patch: pytest.MonkeyPatch) -> None:
    """One round of everything that `skip-validate` measures."""
    for place in ("latency.DECODE", "latency.PREFILL", "workload.EFFORT"):
        patch.setattr(f"skipdecode.validation.{place}", Effort(rounds=1, seconds=0.0))


def answer_here(request: dict[str, Any], out: Path) -> None:
    """Do what `parity._run_reference` does, but in this process: each new one would load torch again."""
    reference_run.answer(json.loads(json.dumps(request)), out)
