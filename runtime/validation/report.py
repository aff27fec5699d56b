"""The report: one HTML file with its data, styles and chart library inside, so that it opens offline."""

from __future__ import annotations

import html
import json
import math
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from skipdecode.errors import CapacityError
from skipdecode.whole_file import write_whole


def write_report(result: dict[str, Any], path: Path) -> None:
    """Write the result of `validate` as a page, whose charts Observable Plot draws when it opens.

    Raises:
        CapacityError: the file cannot be written.
    """
    page = Template(_asset("report.html")).substitute(
        title=html.escape(f"{result['bundle']['model']['name']}: skip-validate"),
        style=_asset("report.css"),
        # "</script" would end the element, and "<!--" would change what ends it
        data=as_json(_without_texts(result)).replace("<", "\\u003c"),
        libraries=_asset("d3.min.js") + "\n" + _asset("plot.umd.min.js"),
        script=_asset("report.js"),
    )
    try:
        write_whole(path, page)
    except OSError as error:
        raise CapacityError(f"cannot be written ({error.strerror})", "choose another file", where=f"--report {path}") from error


def as_json(result: dict[str, Any]) -> str:
    """The result as JSON. NaN and infinity, which JSON lacks, become null."""
    return json.dumps(_finite(result), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _without_texts(result: dict[str, Any]) -> dict[str, Any]:
    """The result without the generated answers, which no chart shows."""
    targets = [
        {**target, "quality": [{k: v for k, v in row.items() if k != "texts"} for row in target["quality"]]}
        if target.get("quality")
        else target
        for target in result["targets"]
    ]
    return {**result, "targets": targets}


def _asset(name: str) -> str:
    return (files("skipdecode.validation") / "assets" / name).read_text(encoding="utf-8")
