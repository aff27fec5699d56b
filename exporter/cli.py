"""What `skip-export` runs, and what it prints."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers.utils import logging as transformers_logging

from skipdecode.cli import complain
from skipdecode.exporter.export import export
from skipdecode.exporter.layout import Report
from skipdecode.exporter.request import ExportRequest
from skipdecode.exporter.targets import OVERFLOW_FP16
from skipdecode.manifest import Manifest
from skipdecode.schedule import Anchor
from skipdecode.schedule_builders import unmet_requests

_WARNING = "skip-export: warning: "


def run(request: ExportRequest, report: Report, *, quiet: bool) -> Manifest:
    """Export, printing warnings on standard error unless `quiet`; raises what `export` raises."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    with _showing_warnings(quiet):
        return export(request, report)


def print_result(manifest: Manifest, request: ExportRequest) -> None:
    """Print a summary of the bundle in one line, and on standard error whatever a user may not expect of it."""
    for warning in (*unmet_requests(request.schedule, manifest.schedule), *_warnings(manifest, request)):
        complain(f"{_WARNING}{warning}")  # the bundle is there, whether or not this can be written
    print(_summary(manifest, request.out))


def _warnings(manifest: Manifest, request: ExportRequest) -> Iterator[str]:
    if manifest.schedule.cap(0) is not None:
        yield "without layer 0 an untuned model breaks; use --warmup-layers 1"
    sources = manifest.model.key_sources
    if sources and request.schedule.warmup_layers <= (last := max(sources)) == manifest.schedule.warmup_layers - 1:
        yield f"{last + 1} warm-up layers, since later layers read the keys and values of layer {last} and below"
    schedule, longest = manifest.schedule, manifest.limits.max_length
    # the last position that a row reaches: its last token is never fed; with anchor `generated`, position 0 feeds the row's
    # second token or a later one, because a prompt has at least one
    last_position = longest - (3 if schedule.anchor is Anchor.GENERATED else 2)
    if schedule.layers_at(max(0, last_position)) > schedule.layers[-1]:
        yield (
            f"the schedule falls over {schedule.span} positions, but a row has at most {longest} (--max-length): none reaches "
            f"{schedule.layers[-1]} layers"
        )
    if manifest.dtype == "float16" and manifest.model.model_type in OVERFLOW_FP16:
        yield f"{manifest.model.model_type} is known to overflow in fp16; use --dtype bf16"
    if not request.random_weights and "tokenizer.json" not in {file.path for file in manifest.files}:
        yield f"{request.model} has no tokenizer, so the bundle takes only token ids; save one there and export again to use text"


@contextmanager
def _showing_warnings(quiet: bool) -> Iterator[None]:
    """Inside, warnings that the exporter logs are printed as warnings of the command."""
    handler = logging.NullHandler() if quiet else logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter(f"{_WARNING}%(message)s"))
    logger = logging.getLogger("skipdecode")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _summary(manifest: Manifest, out: Path) -> str:
    schedule, size = manifest.schedule, sum(file.size for file in manifest.files)
    return (
        f"{out}: {manifest.model.name}, {schedule.num_layers} layers, schedule {schedule.name} "
        f"{schedule.layers[0]} -> {schedule.layers[-1]} over {schedule.span} positions "
        f"({schedule.num_layers / schedule.mean_layers:.2f}x fewer layers), {len(manifest.variants)} variants, "
        f"{len(manifest.segments)} segments, {size / 2**20:,.0f} MiB"
    )
