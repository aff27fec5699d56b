"""examples:
  skip-export opt-6.7b --schedule linear --out engines/
  skip-export ./my-llama --schedule linear --speedup 3 --max-variants 6 --out engines/
  skip-export ./my-gpt2 --schedule table:layers.json --anchor absolute --out engines/
  skip-export opt-1.3b --random-weights --out engines/      (latency work, no checkpoint needed)
  skip-export ./my-llama --target cpu --target tensorrt-rtx:sm89 --out engines/      (TensorRT plans too, no GPU needed)

exit status: 0 done, 2 bad input (one line: what, where, what to do)
"""

from __future__ import annotations

import argparse
from pathlib import Path

from skipdecode.cli import Parser, folder
from skipdecode.exporter.request import DEFAULT_MAX_LENGTH, QUANTIZED_BITS, ExportRequest
from skipdecode.graph_passes.compile_tensorrt import BuilderOptions
from skipdecode.graph_passes.quantization import BLOCK_SIZES, METHODS
from skipdecode.schedule import Anchor
from skipdecode.schedule_builders import DEFAULT_SPAN, DEFAULT_SPEEDUP, SCHEDULES, ScheduleRequest

_DEFAULTS = ExportRequest(model="", out=Path())


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the options; a wrong one is reported in one line and ends the process with exit status 2."""
    return _parser().parse_args(argv)


def request_of(options: argparse.Namespace) -> ExportRequest:
    """The export request that the options describe."""
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


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="skip-export",
        description="Turn a Hugging Face decoder into a bundle of precompiled engines that skip layers by position.",
        epilog=__doc__,
    )
    parser.add_argument(
        "model", metavar="MODEL", help="the folder of a checkpoint or peft adapter, a hub id, or opt-SIZE (opt-6.7b)"
    )
    parser.add_argument("--out", type=folder, required=True, metavar="DIR", help="the bundle's folder, to be created")
    _add_schedule(parser)
    parser.add_argument("--max-batch", type=int, default=_DEFAULTS.max_batch, metavar="N", help="most rows at once (%(default)s)")
    parser.add_argument(
        "--max-length",
        type=int,
        metavar="N",
        help=f"most tokens per row, prompt included (the model's maximum, but at most {DEFAULT_MAX_LENGTH})",
    )
    parser.add_argument(
        "--dtype",
        choices=["auto", "fp32", "fp16", "bf16"],
        default=_DEFAULTS.dtype,
        help="auto (the default): fp32 if cpu is the only target; with a GPU target the checkpoint's own, fp16 instead of fp32, "
        "and always bf16 for Gemma 2, Gemma 3 and GLM-4",
    )
    _add_quantization(parser)
    parser.add_argument(
        "--target", action="append", metavar="T", help="cpu (default), cuda, tensorrt-rtx[:sm86,sm89], tensorrt; repeatable"
    )
    _add_builder(parser)
    parser.add_argument("--random-weights", action="store_true", help="use random weights; MODEL needs only a configuration")
    parser.add_argument("--slim", action="store_true", help="leave out files that the targets do not read")
    parser.add_argument("--force", action="store_true", help="replace DIR if it is a bundle, with everything in it")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    parser.add_argument("--debug", action="store_true", help="show a traceback on errors")
    return parser


def _add_schedule(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("schedule: how many layers each position computes")
    group.add_argument(
        "--schedule", default=_DEFAULTS.schedule.name, metavar="NAME", help=f"{', '.join(SCHEDULES)} (%(default)s)"
    )
    group.add_argument(
        "--speedup",
        type=float,
        metavar="X",
        help="the model's layer count / the mean layer count over the span "
        f"({DEFAULT_SPEEDUP:g} unless --max-layers or --min-layers is given)",
    )
    group.add_argument("--max-layers", type=int, metavar="N", help="layers at position 0")
    group.add_argument("--min-layers", type=int, metavar="N", help="layers from the end of the span on")
    group.add_argument(
        "--warmup-layers",
        type=int,
        default=_DEFAULTS.schedule.warmup_layers,
        metavar="W",
        help="how many of the first layers every position computes (%(default)s); the model's layer count means early exit",
    )
    group.add_argument("--span", type=int, metavar="N", help=f"positions until --min-layers is reached ({DEFAULT_SPAN})")
    group.add_argument("--alpha", type=float, metavar="A", help="decay per position, --schedule power only")
    group.add_argument(
        "--anchor",
        choices=[a.value for a in Anchor],
        default=_DEFAULTS.schedule.anchor.value,
        help="count positions from the first generated token, or (absolute) the first prompt token (%(default)s)",
    )
    group.add_argument("--max-variants", type=int, metavar="N", help="round layer counts up to at most N distinct ones")


def _add_quantization(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quantize", choices=[*QUANTIZED_BITS], default=_DEFAULTS.quantize, help="weights only (%(default)s)")
    parser.add_argument(
        "--quantize-method",
        choices=[*METHODS],
        default=_DEFAULTS.quantize_method,
        help="rtn: round to nearest; k-quant: a slower search for the least error (%(default)s)",
    )
    parser.add_argument(
        "--quantize-block",
        type=int,
        choices=BLOCK_SIZES,
        default=_DEFAULTS.quantize_block,
        help="inputs that share one scale (%(default)s); int8 TensorRT plans have one scale per output instead",
    )


def _add_builder(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("TensorRT's builder (--target tensorrt, tensorrt-rtx)")
    group.add_argument("--workspace", type=int, metavar="MIB", help="GPU memory that a kernel may use (all of it)")
    group.add_argument("--optimization-level", type=int, metavar="N", help="0 (fastest build) to 5 (fastest plan) (3)")
