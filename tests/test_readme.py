"""What the README says is true: its Python runs, its options exist, its links lead somewhere."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import skipdecode
from skipdecode.cli import inspect, run, validate
from skipdecode.exporter.export import ExportRequest, export
from skipdecode.schedule_builders import ScheduleRequest
from tests.runtime.validation.conftest import measure_once
from tests.zoo import Zoo

ROOT = Path(__file__).parent.parent
E2E = ROOT / "examples" / "e2e"
ROWS = f"""
import sys, pathlib, transformers
sys.path.insert(0, {str(E2E)!r})
from data import prompt, read_pairs
tokenizer = transformers.AutoTokenizer.from_pretrained("my-llama")
rows = []
for attributes, sentence in read_pairs(pathlib.Path({str(E2E / "sample.csv")!r}))[:16]:
    asked, said = tokenizer(prompt(attributes))["input_ids"], tokenizer(" " + sentence)["input_ids"]
    rows.append({{"input_ids": asked + said, "labels": [-100] * len(asked) + said}})
"""
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_first_python_example_runs_on_the_demos_bundle(tmp_path: Path) -> None:
    schedule = ScheduleRequest(speedup=2, span=48)
    export(ExportRequest(model=str(E2E / "model"), out=tmp_path / "demo", schedule=schedule))
    code = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)[0]
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "Clowns" in done.stdout


def test_the_training_pages_script_trains_a_model_that_can_be_exported(tmp_path: Path) -> None:
    (tmp_path / "my-llama").symlink_to(E2E / "model")
    page = (ROOT / "docs" / "training.md").read_text("utf-8")
    (script,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    code = ROWS + script.replace("report_to=[]", "report_to=[], use_cpu=True, max_steps=2, logging_steps=1")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("'loss'") == 2
    command = re.findall(r"^    skip-export (.*)$", page, flags=re.MULTILINE)[0]
    arguments = [Path(sys.executable).parent / "skip-export", *command.split()]
    subprocess.run(arguments, cwd=tmp_path, capture_output=True, timeout=300, check=True)
    assert skipdecode.load(tmp_path / "engines").generate("name[Clowns] =>", max_new_tokens=4).sequences[0].text


def test_every_call_that_the_training_page_names_as_skipdecodes_exists() -> None:
    page = (ROOT / "docs" / "training.md").read_text("utf-8")
    names = re.findall(r"`skipdecode\.(\w+)\(", page)
    assert "full_depth" in names
    assert not [name for name in names if not hasattr(skipdecode, name)]


@pytest.mark.parametrize("command", ["skip-export", "skip-run", "skip-validate", "skip-inspect"])
def test_every_option_in_the_table_of_commands_is_in_the_help(command: str) -> None:
    row = next(line for line in README.splitlines() if line.startswith(f"| `{command}"))
    page = subprocess.run(
        [Path(sys.executable).parent / command, "--help"], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    options = set(re.findall(r"--[a-z-]+", row)) | {"--quiet", "--debug"}
    assert len(options) > 3
    assert not {option for option in options if option not in page}
    assert "examples:" in page


def test_json_output_has_the_documented_keys(
    zoo: Zoo, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measure_once(monkeypatch)
    bundle = str(zoo.bundle("opt"))

    def printed(main: Callable[[list[str]], int], *options: str) -> Any:
        assert main([bundle, *options, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    documented = json.loads(re.findall(r"^    (\{.*?\n.*\}\})$", README, flags=re.MULTILINE)[0])
    ran = printed(run.main, "--token-ids", "5,6", "--max-new-tokens", "3")
    assert ran["sequences"][0]["text"] is None, "the bundle has no tokenizer"
    for one, other in (
        (ran, documented),
        (ran["timings"], documented["timings"]),
        (ran["sequences"][0], documented["sequences"][0]),
    ):
        assert one.keys() == other.keys()
    shortest = ("--batch", "1", "--context", "8", "--prompt-tokens", "4", "--new-tokens", "2")
    for command, result in (("inspect", printed(inspect.main)), ("validate", printed(validate.main, *shortest))):
        keys = re.findall(rf"^`skip-{command} --json`[^:]*: (.*?)\.$", README, flags=re.MULTILINE | re.DOTALL)[0]
        assert re.findall(r"`(\w+)`", re.sub(r"\(.*?\)", "", keys)) == list(result)


def test_every_link_leads_to_a_file_and_a_heading() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/README.md"), ROOT / "benchmarks" / "README.md"]
    link = re.compile(r"[\w/`]\]\(([^)#:]*)(?:#([^)]+))?\)")
    links = [(page, *found) for page in pages for found in link.findall(page.read_text("utf-8"))]
    assert len(links) > 50
    for page, path, heading in links:
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name}: {path}"
        assert not heading or heading in _headings(target), f"{page.name}: {path}#{heading}"


def _headings(page: Path) -> set[str]:
    """A page's headings as GitHub names them in links: lower case, no punctuation, hyphens for spaces."""
    titles = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
