"""examples:
  skip-export opt-6.7b --schedule linear --out engines/
  skip-export ./my-llama --schedule linear --speedup 3 --max-variants 6 --out engines/
  skip-export ./my-gpt2 --schedule table:layers.json --anchor absolute --out engines/
  skip-export opt-1.3b --random-weights --out engines/      (latency work, no checkpoint needed)
  skip-export ./my-llama --target cpu --target tensorrt-rtx:sm89 --out engines/      (plans too, compiled without a GPU)

exit status: 0 done, 2 bad input (one line: what, where, what to do)
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from skipdecode.cli import Parser, guarded
from skipdecode.exporter.export import export
from skipdecode.exporter.layout import Report
from skipdecode.exporter.request import QUANTIZED_BITS, ExportRequest
from skipdecode.exporter.targets import OVERFLOW_FP16
from skipdecode.graph_passes.compile_tensorrt import BuilderOptions
from skipdecode.graph_passes.quantize_weights import BLOCK_SIZES, METHODS
from skipdecode.manifest import Manifest
from skipdecode.schedule import Anchor
from skipdecode.schedule_builders import DEFAULT_SPAN, SCHEDULES, ScheduleRequest, disagreements

_DEFAULTS = ExportRequest(model="", out=Path())
_WARNING = "skip-export: warning: "


def run(argv: list[str] | None, check_signals: Callable[[], None]) -> int:
    """Parse, export, and return the exit status.

    Args:
        check_signals: called now and then, of `ending_on_signals`.
    """
    options = _parser().parse_args(argv)
    return guarded(lambda: _export(options, check_signals), debug=options.debug)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="skip-export",
        description="Turn a Hugging Face decoder into a bundle of precompiled engines that skip layers by position.",
        epilog=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="a local checkpoint folder, a hub id, or opt-SIZE (opt-6.7b)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the bundle's folder")
    _add_schedule(parser)
    parser.add_argument("--max-batch", type=int, default=_DEFAULTS.max_batch, metavar="N", help="rows (%(default)s)")
    parser.add_argument(
        "--max-length", type=int, metavar="N", help="tokens of a row, prompt and generated (the model's, at most 2048)"
    )
    parser.add_argument(
        "--dtype",
        choices=["auto", "fp32", "fp16", "bf16"],
        default=_DEFAULTS.dtype,
        help="auto: fp32; with a GPU's target the checkpoint's, where that is fp32 fp16, for Gemma 2, Gemma 3 and GLM-4 bf16",
    )
    _add_quantization(parser)
    parser.add_argument(
        "--target", action="append", metavar="T", help="cpu (default), cuda, tensorrt-rtx[:sm86,sm89], tensorrt; repeatable"
    )
    _add_builder(parser)
    parser.add_argument("--random-weights", action="store_true", help="a known architecture without its checkpoint")
    parser.add_argument("--slim", action="store_true", help="leave out what the targets do not read")
    parser.add_argument("--force", action="store_true", help="replace DIR where it is a bundle")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    parser.add_argument("--debug", action="store_true", help="traceback on errors")
    return parser


def _add_schedule(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("schedule: how many layers each position computes")
    group.add_argument(
        "--schedule", default=_DEFAULTS.schedule.name, metavar="NAME", help=f"{', '.join(SCHEDULES)} (%(default)s)"
    )
    group.add_argument(
        "--speedup", type=float, metavar="X", help="mean layer count over the span is L / X (2 where no end is given)"
    )
    group.add_argument("--max-layers", type=int, metavar="N", help="layers at position 0")
    group.add_argument("--min-layers", type=int, metavar="N", help="layers from the span's end on")
    group.add_argument(
        "--warmup-layers",
        type=int,
        default=_DEFAULTS.schedule.warmup_layers,
        metavar="W",
        help="first layers that all positions compute (%(default)s); L: early exit",
    )
    group.add_argument("--span", type=int, metavar="N", help=f"positions until min-layers is reached ({DEFAULT_SPAN})")
    group.add_argument("--alpha", type=float, metavar="A", help="decay per position, --schedule power only")
    group.add_argument(
        "--anchor",
        choices=[a.value for a in Anchor],
        default=_DEFAULTS.schedule.anchor.value,
        help="where positions are counted from",
    )
    group.add_argument("--max-variants", type=int, metavar="N", help="round layer counts up to at most N levels")


def _add_quantization(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quantize", choices=[*QUANTIZED_BITS], default=_DEFAULTS.quantize, help="weight-only (%(default)s)")
    parser.add_argument(
        "--quantize-method",
        choices=[*METHODS],
        default=_DEFAULTS.quantize_method,
        help="round to nearest, or a slower search (%(default)s)",
    )
    parser.add_argument(
        "--quantize-block",
        type=int,
        choices=BLOCK_SIZES,
        default=_DEFAULTS.quantize_block,
        help="inputs that share one scale (%(default)s); not of int8 plans, where an output's do",
    )


def _add_builder(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("TensorRT's builder (--target tensorrt, tensorrt-rtx)")
    group.add_argument("--workspace", type=int, metavar="MIB", help="GPU memory that a kernel may use (all)")
    group.add_argument("--optimization-level", type=int, metavar="N", help="0 (builds fastest) to 5 (runs fastest) (3)")


def _export(options: argparse.Namespace, check_signals: Callable[[], None]) -> int:
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging as transformers_logging

    hub_logging.set_verbosity_error()  # it tells each time that it asks again
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    request = _request(options)
    with _progress(options.quiet) as show, _showing_warnings(options.quiet):

        def report(what: str, done: float) -> None:
            check_signals()
            show(what, done)

        manifest = export(request, report)
    if not options.quiet:
        for warning in (*disagreements(request.schedule, manifest.schedule), *_warnings(manifest, request)):
            print(f"{_WARNING}{warning}", file=sys.stderr)
        print(_summary(manifest, options.out))
    return 0


def _request(options: argparse.Namespace) -> ExportRequest:
    return ExportRequest(
        model=options.model,
        out=options.out,
        schedule=ScheduleRequest(
            name=options.schedule,
            speedup=options.speedup,
            max_layers=options.max_layers,
            min_layers=options.min_layers,
            warmup_layers=options.warmup_layers,
            span=options.span,
            alpha=options.alpha,
            max_variants=options.max_variants,
            anchor=Anchor(options.anchor),
        ),
        max_batch=options.max_batch,
        max_length=options.max_length,
        targets=tuple(options.target or _DEFAULTS.targets),
        dtype=options.dtype,
        quantize=options.quantize,
        quantize_method=options.quantize_method,
        quantize_block=options.quantize_block,
        builder=BuilderOptions(workspace_mib=options.workspace, optimization_level=options.optimization_level),
        random_weights=options.random_weights,
        slim=options.slim,
        force=options.force,
    )


def _warnings(manifest: Manifest, request: ExportRequest) -> Iterator[str]:
    if manifest.schedule.cap(0) is not None:
        yield "without layer 0 an untuned model breaks (perplexity 9 -> 3227); use --warmup-layers 1"
    last = max(manifest.model.key_sources, default=-1)
    if request.schedule.warmup_layers <= last == manifest.schedule.warmup_layers - 1:
        yield f"{last + 1} warm-up layers, since later layers read the keys and values of layer {last} and below"
    schedule, longest = manifest.schedule, manifest.limits.max_length
    # the last token is not fed, nor, of a prompt of one, the two before position 0
    fed = longest - (3 if schedule.anchor is Anchor.GENERATED else 2)
    if schedule.layers_at(max(0, fed)) > schedule.layers[-1]:
        yield (
            f"the schedule comes down over {schedule.span} positions, and a row has at most {longest} (--max-length): none gets "
            f"to {schedule.layers[-1]} layers"
        )
    if manifest.dtype == "float16" and manifest.model.model_type in OVERFLOW_FP16:
        yield f"{manifest.model.model_type} is known to overflow in fp16; use --dtype bf16"


@contextmanager
def _showing_warnings(quiet: bool) -> Iterator[None]:
    """Inside, what the exporter logs as a warning is one of the command's own."""
    handler = logging.NullHandler() if quiet else logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter(f"{_WARNING}%(message)s"))
    logger = logging.getLogger("skipdecode")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


@contextmanager
def _progress(quiet: bool) -> Iterator[Report]:
    """A progress bar on standard error, only where that is a terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda what, done: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=1.0)
        yield lambda what, done: bar.update(task, description=what, completed=done)


def _summary(manifest: Manifest, out: Path) -> str:
    schedule, size = manifest.schedule, sum(file.size for file in manifest.files)
    return (
        f"{out}: {manifest.model.name}, {schedule.num_layers} layers, schedule {schedule.name} "
        f"{schedule.layers[0]} -> {schedule.layers[-1]} over {schedule.span} positions "
        f"({schedule.num_layers / schedule.mean_layers:.2f}x fewer layers), {len(manifest.variants)} variants, "
        f"{len(manifest.segments)} segments, {size / 2**20:,.0f} MiB"
    )
