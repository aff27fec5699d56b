"""The paper's table has the values of the results files, and the script that made it runs."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from skipdecode.validation.samples import Effort

E2E = Path(__file__).parents[2] / "examples" / "e2e"
SHORT, LONG = (json.loads((E2E / "results" / name).read_text("utf-8")) for name in ("testset.json", "testset_longer.json"))


@pytest.fixture
def experiment(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(E2E))
    import experiment as module

    monkeypatch.setattr(module, "EFFORT", Effort(rounds=1, seconds=0.0))
    return module


def test_the_table_in_the_readme_has_the_values_of_the_results_files(experiment: ModuleType) -> None:
    readme = (E2E / "README.md").read_text(encoding="utf-8")
    lines = [*experiment.table(SHORT["rows"]), *experiment.table(LONG["rows"])]
    assert len(lines) > 50
    assert not [line for line in lines if line not in readme]


@pytest.mark.parametrize(("results", "title"), [(SHORT, "trained with skipping"), (LONG, "trained with skipping, longer")])
def test_the_goals_of_the_experiment_hold_on_the_test_set(results: dict[str, Any], title: str) -> None:
    lost = {row["speedup"]: row["bleu_loss"]["value"] for row in results["rows"] if row["title"] == title}
    assert lost[2] <= 1 and lost[4] <= 3
    assert results["inputs"] == 630


def test_longer_training_loses_nothing_against_a_model_that_was_trained_as_long_without_skipping() -> None:
    behind = {row["speedup"]: row["bleu_behind"]["value"] for row in LONG["rows"] if row["model"] == "skip_longer"}
    assert len(behind) == 5 and max(behind.values()) <= 0


def test_every_model_in_the_folder_has_its_rows_in_the_table(
    experiment: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "skip").symlink_to(E2E / "model")
    (tmp_path / "data.csv").write_text('mr,ref\n"name[Cotto]",Cotto is here.\n"name[Cotto]",It is Cotto.\nname[Mill],The Mill.\n')
    (tmp_path / "full").symlink_to(E2E / "model_without_skipping")
    lines = [dataclasses.replace(line, speedups=line.speedups[:2]) for line in experiment.LINES]
    monkeypatch.setattr(experiment, "LINES", lines)
    out = tmp_path / "out.json"
    arguments = ["--models", str(tmp_path), "--data", str(tmp_path / "data.csv"), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["experiment.py", *arguments])
    experiment.main()
    rows = json.loads(out.read_text())["rows"]
    assert [(row["title"], row["speedup"]) for row in rows] == [
        ("trained with skipping", 1), ("trained with skipping", 2),
        ("the same, `power` schedule", 2), ("the same, `power` schedule", 3),
        ("trained without skipping", 1), ("trained without skipping", 2),
    ]  # fmt: skip
    assert rows[1]["mean_layers"] < rows[0]["mean_layers"] == 24
    assert rows[0]["bleu_behind"]["value"] == pytest.approx(rows[4]["bleu"]["value"] - rows[0]["bleu"]["value"])
    assert "bleu_behind" not in rows[4]
    assert experiment.table(rows)[-1].split(" | ")[5].startswith("| ")  # the column "behind" is empty


def test_decoding_of_truncated_models_is_compared_with_one_that_has_all_layers(experiment: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "kept12").mkdir()
    options = argparse.Namespace(models=tmp_path, only="kept12")
    cells = list(experiment._cells(options))
    with pytest.raises(SystemExit, match="has truncated models alone; train the one that they are compared with, too"):
        experiment._whole_model(options, cells)
    (tmp_path / "full").mkdir()
    assert experiment._whole_model(options, cells) == "full"
