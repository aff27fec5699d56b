"""examples:
  skip-validate engines/                                        (is it intact, and how fast)
  skip-validate engines/ --reference ./opt-1.3b                 (every variant against the torch reference)
  skip-validate engines/ --batch 1,8 --context 128,1024 --report report.html
  skip-validate engines/ --slo "p99_token_ms<=30" --slo "decode_gain>=1.8"        (a gate: exit 1 where one does not hold)
  skip-validate engines/ --eval dev.jsonl --speedup 2,3,4       (BLEU and ROUGE-L against speedup)
  skip-validate engines/ --json > new.json; skip-validate engines/ --baseline new.json

--baseline assumes an idle machine: first compare two runs of one bundle, which should not differ

a run that was killed resumes when the same command is given again

exit status: 0 all holds, 1 a validation did not hold, 2 bad input (one line: what, where, what to do)
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from skipdecode.cli import Parser, check_writable, complain, folder, guarded, reader_may_leave
from skipdecode.errors import CapacityError, TargetError
from skipdecode.text import printable
from skipdecode.validation.baseline import read_baseline
from skipdecode.validation.quality import read_examples
from skipdecode.validation.slo import NAMES, SECOND_TOKEN, check_measured, parse_slo
from skipdecode.validation.validate import Progress, ValidateRequest, validate
from skipdecode.validation.workload import read_requests

DOES_NOT_HOLD = 1


def main(argv: list[str] | None = None) -> int:
    """The `skip-validate` command."""
    options = _parser().parse_args(argv)
    return guarded(lambda: _validate(options), debug=options.debug)


def _parser() -> argparse.ArgumentParser:
    objectives = "\n".join(f"  {name:<16} {meaning}" for name, meaning in NAMES.items())
    parser = Parser(
        prog="skip-validate",
        description="Check whether a bundle is correct, fast enough and good enough: offline, with a report.",
        epilog=f"objectives of --slo (operators <= >= < >):\n{objectives}\n\n{__doc__}",
    )
    parser.add_argument("bundle", type=folder, metavar="DIR", help="the folder that skip-export wrote")
    parser.add_argument("--target", metavar="T", help="where to run (every target that runs on this machine)")
    parser.add_argument("--threads", type=_count, metavar="N", help="size of the thread pool (one thread per usable core)")
    correct = parser.add_argument_group("is it correct")
    correct.add_argument("--reference", metavar="MODEL", help="the exported model, to compare every variant with in torch")
    fast = parser.add_argument_group("is it fast enough")
    fast.add_argument("--batch", type=_counts, action="extend", metavar="N,..", help="rows (1,4)")
    fast.add_argument("--context", type=_counts, action="extend", metavar="N,..", help="valid tokens per row (32,512)")
    fast.add_argument("--prompt-tokens", type=_count, metavar="N", help="prompt tokens per row of the workload (64)")
    fast.add_argument("--new-tokens", type=_count, metavar="N", help="new tokens per row, --eval too (span + 1, 64 at least)")
    fast.add_argument("--workload", type=Path, metavar="F", help='JSONL of real lengths: {"prompt_tokens": 37, "new_tokens": 64}')
    fast.add_argument("--slo", action="append", default=[], metavar="'NAME<=X'", help="an objective (names below); repeatable")
    fast.add_argument("--baseline", type=Path, metavar="F", help="an earlier --json result to compare with")
    good = parser.add_argument_group("is it good enough")
    good.add_argument("--eval", type=Path, metavar="F", help='JSONL: {"prompt": "...", "references": ["...", "..."]}')
    good.add_argument(
        "--speedup",
        type=_speedups,
        action="extend",
        default=[],
        metavar="X,..",
        help="more speedups for --eval, as close as the bundle's variants allow",
    )
    parser.add_argument("--report", type=Path, metavar="F", help="write one self-contained HTML page")
    parser.add_argument("--json", action="store_true", help="print one JSON object on standard output")
    parser.add_argument("--quiet", action="store_true", help="print only what does not hold")
    parser.add_argument("--debug", action="store_true", help="show a traceback on errors")
    return parser


def _validate(options: argparse.Namespace) -> int:
    request = _request(options)
    with _progress(options.quiet) as progress:
        result, forget = validate(request, progress)
    from skipdecode.validation.report import write_report

    if options.report is not None:
        write_report(result, options.report)
    if result["resumed"] and not options.quiet:
        complain(f"skip-validate: {result['resumed']} measurements come from an earlier run that was stopped")
    with reader_may_leave():  # the exit status is that of the validation all the same
        _print(result, options)
    for line in _failures(result):
        complain(printable(line))
    forget()
    return 0 if result["holds"] else DOES_NOT_HOLD


def _print(result: dict[str, Any], options: argparse.Namespace) -> None:
    from skipdecode.validation.report import as_json
    from skipdecode.validation.terminal import show

    if options.json:
        print(as_json(result))
    elif not options.quiet:
        show(result)


def _request(options: argparse.Namespace) -> ValidateRequest:
    """Read and check everything that the options name."""
    _require("rich", None)
    slos = tuple(map(parse_slo, options.slo))
    requests = tuple(read_requests(options.workload)) if options.workload else None
    new_tokens = [request.new_tokens for request in requests] if requests else [options.new_tokens or 2]
    given = {"--reference": options.reference is not None, "--eval": options.eval is not None, SECOND_TOKEN: max(new_tokens) > 1}
    check_measured(list(slos), {name for name, is_given in given.items() if is_given}, in_workload=requests is not None)
    if options.speedup and options.eval is None:
        raise CapacityError("has no effect without --eval", "add --eval FILE.jsonl, or leave it out", where="--speedup")
    if requests and options.prompt_tokens is not None:
        raise CapacityError("has no effect with --workload", "leave one of them out", where="--prompt-tokens")
    if requests and options.new_tokens is not None and options.eval is None:
        raise CapacityError("has no effect with --workload unless --eval is given", "leave one of them out", where="--new-tokens")
    if options.eval is not None:
        _require("sacrebleu", "--eval")
        _require("rouge_score", "--eval")
    if options.report is not None:
        check_writable(options.report, "--report")
    return ValidateRequest(
        bundle=options.bundle,
        target=options.target,
        threads=options.threads,
        reference=options.reference,
        batches=tuple(options.batch) if options.batch else None,
        contexts=tuple(options.context) if options.context else None,
        requests=requests,
        prompt_tokens=options.prompt_tokens,
        new_tokens=options.new_tokens,
        examples=tuple(read_examples(options.eval)) if options.eval else None,
        examples_path=options.eval,
        speedups=tuple(options.speedup),
        slos=slos,
        baseline=read_baseline(options.baseline) if options.baseline else None,
    )


def _failures(result: dict[str, Any]) -> Iterator[str]:
    """A line for each validation that did not hold."""
    if not result["integrity"]["holds"]:
        yield f"does not hold: {result['integrity']['what']}"
    for target in result["targets"]:
        for variant in target.get("parity") or ():
            if not variant["holds"]:
                yield f"does not hold: {target['name']} {variant['name']} {_fault(variant)}"
        for row in target.get("plans") or ():
            if not row["holds"]:
                yield (
                    f"does not hold: {target['name']} {row['name']} ({row['pass']}): {row['output']} differs from ONNX "
                    f"Runtime's by {row['relative_error']:.2g} of its largest value"
                )
    for row in result["slo"]:
        if not row["holds"]:
            yield f"does not hold: {row['slo']} on {row['target']}: measured {row['measured']}"


def _fault(variant: dict[str, Any]) -> str:
    """What is wrong with a variant that does not match the reference."""
    error = variant[variant["judged_by"]]
    if not math.isfinite(variant["relative_error"]):
        return "gives logits that are NaN or infinite"
    if not math.isfinite(error):  # see parity's `median_error`
        return "gives all tokens the same logit"
    return f"differs from the reference by {error:.2g} of {variant['bound_of']} (at most {variant['bound']:.3g})"


def _require(module: str, option: str | None) -> None:
    if importlib.util.find_spec(module) is None:
        raise TargetError(f"needs {module}", "pip install 'skipdecode[validate]'", where=option or "skip-validate")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive count")
    return int(text)


def _counts(text: str) -> list[int]:
    return [_count(item.strip()) for item in text.split(",")]


def _speedups(text: str) -> list[float]:
    try:
        return [float(item) for item in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: write numbers separated by commas: 2,3,4") from error


@contextmanager
def _progress(quiet: bool) -> Iterator[Progress]:
    """Show what is being measured on standard error, only if that is a terminal."""
    if quiet or not sys.stderr.isatty():
        silent: Callable[[str], None] = lambda what: None  # noqa: E731
        yield silent
        return
    from rich.console import Console

    with Console(stderr=True).status("checking") as status:
        yield lambda what: status.update(what)


if __name__ == "__main__":
    sys.exit(main())
