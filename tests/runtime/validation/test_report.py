"""The report in a real browser: every chart is drawn, nothing is on the console, and no request leaves the page."""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

from skipdecode.cli.validate import main
from skipdecode.validation import parity
from skipdecode.validation.report import as_json, write_report
from tests.runtime.validation.conftest import MODEL, answer_here

CHARTS = {"staircase", "positions", "latency", "prefill", "roofline", "quality", "memory"}
_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
          "--disable-component-update", "--disable-sync")  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("needs Debian's chromium and chromium-driver")
    options = Options()
    options.binary_location = chromium
    for flag in _FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with webdriver.Chrome(options=options, service=Service(driver)) as opened:
        yield opened


@pytest.fixture(scope="module")
def report(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with everything measured, an objective missed and an earlier run to compare with."""
    folder = tmp_path_factory.mktemp("report")
    examples, path = folder / "eval.jsonl", folder / "report.html"
    examples.write_text(
        json.dumps({"prompt": "name[The Mill] =>", "references": ["</script><!--<script><b>The Mill", "A mill."]})
    )
    (folder / "lengths.jsonl").write_text('{"prompt_tokens": 8, "new_tokens": 6}\n' * 2)
    sizes = ["--workload", str(folder / "lengths.jsonl"), "--batch", "1,2", "--context", "8,16", "--quiet"]
    with (folder / "old.json").open("w") as out, contextlib.redirect_stdout(out):
        assert main([str(trained), *sizes, "--json"]) == 0
    old = (folder / "old.json").read_text()
    (folder / "old.json").write_text(json.dumps({**json.loads(old), "machine": {**json.loads(old)["machine"], "cores": 99}}))
    options = [
        "--reference",
        str(MODEL),
        "--eval",
        str(examples),
        "--new-tokens",
        "24",
        "--slo",
        "bleu>=101",
        "--slo",
        "max_logit_error<=1e-12",
        "--slo",
        "p99_token_ms<=0.001",
        "--baseline",
        str(folder / "old.json"),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parity, "_run_reference", answer_here)
        assert main([str(trained), *sizes, *options, "--report", str(path)]) == 1
    return path


def test_a_small_figure_of_an_objective_is_not_shown_as_zero(browser: webdriver.Chrome, report: Path) -> None:
    browser.get(report.as_uri())
    cell = browser.find_element("xpath", "//td[contains(., 'max_logit_error')]/following-sibling::td[2]")
    assert 1e-9 < float(cell.text) < 1e-3


def test_every_chart_is_drawn_in_light_and_dark_without_console_messages(browser: webdriver.Chrome, report: Path) -> None:
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        browser.get(report.as_uri())
        assert browser.get_log("browser") == []
        charts = _charts(browser)
        assert set(charts) == CHARTS
        for name, chart in charts.items():
            assert chart["marks"] >= 2 and chart["width"] > 300 and chart["height"] > 100, (name, chart)
            assert "NaN" not in chart["html"] and "undefined" not in chart["html"], name
        paper, ink = _colors(browser)
        assert abs(sum(paper) - sum(ink)) > 450, "text stands out from the page"
        assert (sum(paper) > sum(ink)) == (scheme == "light")


def test_the_page_says_what_does_not_hold_and_compares_with_the_baseline(browser: webdriver.Chrome, report: Path) -> None:
    browser.get(report.as_uri())
    text = browser.execute_script("return document.body.innerText")
    for words in ("does not hold", "bleu>=101", "Against the baseline", "Is it correct?", "v24", "first token that differs"):
        assert words in text, words
    assert "0.001 of the largest logit" in text
    assert "Differs: cores: 99, now" in text
    assert re.search(r"p99_token_ms<=0\.001\s+cpu\s+\d+\.\d+ \(of \d+\)\s+does not hold", text)
    assert re.search(r"p99 of \d+ tokens", text)
    assert "undefined" not in text and "NaN" not in text


def test_the_page_makes_no_network_requests(browser: webdriver.Chrome, report: Path) -> None:
    browser.get_log("performance")
    browser.get(report.as_uri())
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    assert [url for url in asked if not url.startswith("data:")] == [report.as_uri()]


def test_missing_measurements_are_named_and_the_rest_is_drawn(browser: webdriver.Chrome, trained: Path, tmp_path: Path) -> None:
    path = tmp_path / "bare.html"
    assert main([str(trained), "--batch", "1", "--context", "8", "--new-tokens", "1", "--report", str(path), "--quiet"]) == 0
    browser.get(path.as_uri())
    assert browser.get_log("browser") == []
    assert set(_charts(browser)) == CHARTS - {"quality", "positions"}
    text = browser.execute_script("return document.body.innerText")
    assert "add --eval FILE.jsonl" in text and "add --reference MODEL" in text


def test_bleu_names_its_tokenizer_where_it_is_not_sacrebleus_default(
    browser: webdriver.Chrome, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, examples = tmp_path / "report.html", tmp_path / "eval.jsonl"
    sizes = ["--batch", "1", "--context", "8", "--new-tokens", "4"]
    for reference, name in (("カフェです。", "BLEU (char)"), ("A mill.", "BLEU")):
        examples.write_text(json.dumps({"prompt": "name[The Mill] =>", "references": [reference]}))
        assert main([str(trained), *sizes, "--eval", str(examples), "--report", str(path)]) == 0
        assert f"mean layers  {name}  " in re.sub(" {2,}", "  ", capsys.readouterr().out)
        browser.get(path.as_uri())
        assert browser.get_log("browser") == []
        text = browser.execute_script("return document.body.innerText")
        assert re.search(rf"mean layers a step\s+{re.escape(name)}\s+ROUGE-L", text)
        assert f"{name} with the schedule" in text


def test_a_first_batch_of_one_token_is_drawn_next_to_longer_ones(
    browser: webdriver.Chrome, trained: Path, tmp_path: Path
) -> None:
    (tmp_path / "lengths.jsonl").write_text('{"prompt_tokens": 4, "new_tokens": 1}\n{"prompt_tokens": 4, "new_tokens": 5}\n')
    path, lengths = tmp_path / "report.html", str(tmp_path / "lengths.jsonl")
    assert main([str(trained), "--batch", "1", "--context", "8", "--workload", lengths, "--report", str(path), "--quiet"]) == 0
    browser.get(path.as_uri())
    assert browser.get_log("browser") == []
    assert set(_charts(browser)) == CHARTS - {"quality", "positions"}


def test_nan_and_infinity_are_drawn_and_are_null_in_json(
    browser: webdriver.Chrome, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parity, "_run_reference", answer_here)
    sizes = ["--batch", "1", "--context", "8", "--new-tokens", "4", "--json"]
    assert main([str(trained), *sizes, "--reference", str(MODEL)]) == 0
    result = json.loads(capsys.readouterr().out)
    broken = result["targets"][0]["parity"][0]
    broken |= {"holds": False, "relative_error": math.nan, "max_logit_error": math.inf}
    result["resumed"] = 3
    write_report(result, tmp_path / "report.html")
    browser.get((tmp_path / "report.html").as_uri())
    assert browser.get_log("browser") == []
    assert set(_charts(browser)) == CHARTS - {"quality"}
    text = browser.execute_script("return document.body.innerText")
    assert "does not hold" in text and "; 3 measurements come from an earlier run that was stopped" in text
    strict = json.loads(as_json(result), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert strict["targets"][0]["parity"][0]["relative_error"] is None


def _charts(browser: webdriver.Chrome) -> dict[str, Any]:
    """Charts by name: how many marks were drawn, size and markup."""
    script = """
        return Object.fromEntries([...document.querySelectorAll("[data-chart]")].map((figure) => {
            const svg = [...figure.querySelectorAll("svg")].sort((a, b) => b.clientWidth - a.clientWidth)[0];
            const marks = figure.querySelectorAll("svg rect, svg path, svg circle").length;
            return [figure.dataset.chart, {marks, width: svg.clientWidth, height: svg.clientHeight, html: svg.outerHTML}];
        }));"""
    return dict(browser.execute_script(script))


def _colors(browser: webdriver.Chrome) -> tuple[list[int], list[int]]:
    """Red, green and blue of the page and of its text."""
    script = """
        const style = getComputedStyle(document.body);
        return [style.backgroundColor, style.color].map((color) => color.match(/\\d+/g).slice(0, 3).map(Number));"""
    paper, ink = browser.execute_script(script)
    return paper, ink
