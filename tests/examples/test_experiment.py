"""The paper's table: it is what the results file says, and the script that made it runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from skipdecode.validation.samples import Effort

E2E = Path(__file__).parents[2] / "examples" / "e2e"
RESULTS = json.loads((E2E / "results" / "testset.json").read_text(encoding="utf-8"))


@pytest.fixture
def experiment(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(E2E))
    import experiment as module

    monkeypatch.setattr(module, "EFFORT", Effort(rounds=1, seconds=0.0))
    return module


def test_the_table_in_the_readme_is_that_of_the_results(experiment: ModuleType) -> None:
    readme = (E2E / "README.md").read_text(encoding="utf-8")
    lines = experiment.table(RESULTS["rows"])
    assert len(lines) > 30
    assert not [line for line in lines if line not in readme]


def test_the_goals_of_the_experiment_hold_on_the_test_set() -> None:
    lost = {row["speedup"]: row["bleu_loss"]["value"] for row in RESULTS["rows"] if row["title"] == "trained with skipping"}
    assert lost[2] <= 1 and lost[4] <= 3
    assert RESULTS["inputs"] == 630


def test_the_experiment_runs(experiment: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "skip").symlink_to(E2E / "model")
    (tmp_path / "data.csv").write_text('mr,ref\n"name[Cotto]",Cotto is here.\n"name[Cotto]",It is Cotto.\nname[Mill],The Mill.\n')
    monkeypatch.setattr(experiment, "SPEEDUPS", (1, 2))
    out = tmp_path / "out.json"
    arguments = ["--models", str(tmp_path), "--data", str(tmp_path / "data.csv"), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["experiment.py", *arguments])
    experiment.main()
    rows = json.loads(out.read_text())["rows"]
    assert [(row["title"], row["speedup"]) for row in rows] == [
        ("trained with skipping", 1), ("trained with skipping", 2), ("the same, `power` schedule", 2)
    ]  # fmt: skip
    assert rows[1]["mean_layers"] < rows[0]["mean_layers"] == 24
