"""examples:
  skip-run engines/ --prompt "The weather today"
  skip-run engines/ --prompt "One" --prompt "Two" --max-new-tokens 32 --json
  skip-run engines/ --token-ids 1,2,3 --schedule full      (every layer: the baseline)
  skip-run engines/ --prompt "Hello" --profile trace.json      (steps, engines, operators)
  skip-run engines/ --prompt-file prompt.txt --temperature 0.8 --top-p 0.95 --seed 7

the text of a single prompt is printed as it is generated; a batch, --json and the ids of a bundle without a tokenizer at the end

exit status: 0 done, 2 bad input (one line: what, where, what to do)
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import reprlib
import sys
from pathlib import Path
from typing import Any

from skipdecode.cli import Parser, check_writable, complain, folder, guarded
from skipdecode.errors import CapacityError
from skipdecode.generate import Generator, load
from skipdecode.generation import Generation
from skipdecode.prefill import PREFILL_CHUNK
from skipdecode.trace import Trace


def main(argv: list[str] | None = None) -> int:
    """The `skip-run` command."""
    options = _parser().parse_args(argv)
    return guarded(lambda: _run(options), debug=options.debug)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="skip-run",
        description="Generate with a bundle, from text or token ids.",
        epilog=__doc__,
    )
    parser.add_argument("bundle", type=folder, metavar="DIR", help="the folder that skip-export wrote")
    parser.add_argument("--prompt", dest="prompts", action="append", default=[], metavar="TEXT", help="repeatable: one row each")
    parser.add_argument(
        "--prompt-file", dest="prompts", action="append", type=Path, metavar="F",
        help="a file whose whole text is one prompt, a line break at its end too; repeatable",
    )  # fmt: skip
    parser.add_argument("--token-ids", action="append", default=[], metavar="1,2,3", help="instead of text; repeatable")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="most new tokens per row (%(default)s)")
    parser.add_argument(
        "--temperature", type=float, metavar="X", help="sample at temperature X > 0 (greedy unless a sampling option is given)"
    )
    parser.add_argument("--top-k", type=int, metavar="N", help="sample from the N likeliest tokens")
    parser.add_argument("--top-p", type=float, metavar="P", help="sample from the likeliest tokens with total probability P")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of sampling (%(default)s)")
    parser.add_argument("--schedule", choices=["full"], help="full: every layer at every position, the baseline")
    parser.add_argument("--target", metavar="T", help="where to run (cpu, or the bundle's first target if it has no cpu)")
    parser.add_argument("--no-cuda-graphs", action="store_true", help="on a GPU, launch a step's calls one by one")
    parser.add_argument("--threads", type=int, metavar="N", help="size of the thread pool (one thread per usable core)")
    parser.add_argument(
        "--prefill-chunk", type=int, default=PREFILL_CHUNK, metavar="N",
        help="prompt tokens per pass; fewer take less memory (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--profile", type=Path, metavar="F.json", help="write a trace of where the time goes, which Perfetto opens"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on standard output")
    parser.add_argument("--quiet", action="store_true", help="print only the text")
    parser.add_argument("--debug", action="store_true", help="show a traceback on errors")
    return parser


def _run(options: argparse.Namespace) -> int:
    prompts = _prompts(options)
    if options.profile is not None:
        check_writable(options.profile, "--profile")
    trace = Trace() if options.profile else None
    model = load(
        options.bundle, target=options.target, threads=options.threads, prefill_chunk=options.prefill_chunk,
        cuda_graphs=not options.no_cuda_graphs, trace=trace,
    )  # fmt: skip
    streamer = None
    if len(prompts) == 1 and not options.json and model.tokenizer is not None:
        streamer = _Printer(model)
    sampled = {name: getattr(options, name) for name in ("temperature", "top_k", "top_p") if getattr(options, name) is not None}
    result = model.generate(
        prompts,
        max_new_tokens=options.max_new_tokens,
        do_sample=bool(sampled),
        seed=options.seed,
        schedule=options.schedule,
        streamer=streamer,
        **sampled,
    )
    if trace is not None:
        trace.write(options.profile)
    if options.json:
        print(json.dumps(_as_json(result)))
    else:
        _print(result, streamed=streamer is not None, quiet=options.quiet)
    return 0


def _prompts(options: argparse.Namespace) -> Any:
    """The prompts in the order given: texts, including those of files, or token ids."""
    if bool(options.prompts) == bool(options.token_ids):
        raise CapacityError("give either text or token ids", "use --prompt, --prompt-file or --token-ids", where="skip-run")
    texts = [_read(prompt) if isinstance(prompt, Path) else prompt for prompt in options.prompts]
    return texts or [_ids(text) for text in options.token_ids]


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise CapacityError(f"cannot be read ({error})", "name a UTF-8 text file", where=f"--prompt-file {path}") from error


def _ids(text: str) -> list[int]:
    """The ids in `text`; none if it is blank, which `generate` refuses as an empty prompt."""
    return [_id(item.strip()) for item in text.split(",")] if text.strip() else []


def _id(text: str) -> int:
    number = None
    with contextlib.suppress(ValueError):  # its message talks of bases, or of Python's limit on digits
        number = int(text)
    if number is None or abs(number) >= 2**63:
        raise CapacityError(
            f"{reprlib.repr(text)} is not a whole number below 2**63",
            "write numbers separated by commas: 1,2,3",
            where="--token-ids",
        )
    return number


class _Printer:
    """Prints one row's text as it is generated, in whole characters."""

    def __init__(self, model: Generator) -> None:
        assert model.tokenizer is not None
        self._text = model.tokenizer.stream()

    def put(self, value: Any) -> None:
        print(self._text.put(int(value[0])), end="", flush=True)

    def end(self) -> None:
        print(self._text.end(), flush=True)


def _as_json(result: Generation) -> dict[str, Any]:
    return {
        "sequences": [dataclasses.asdict(row) for row in result.sequences],
        "layers": list(result.layers),
        "timings": dataclasses.asdict(result.timings),
    }


def _print(result: Generation, *, streamed: bool, quiet: bool) -> None:
    for index, row in enumerate(result.sequences):
        if not streamed:
            heading = f"--- {index}: " if len(result.sequences) > 1 else ""
            print(f"{heading}{row.text if row.text is not None else ','.join(map(str, row.token_ids))}")
    if not quiet:
        steps, timings = len(result.layers), result.timings
        mean = f"{sum(result.layers) / steps:.1f} layers a step, " if steps else ""
        complain(f"[{steps} decode steps, {mean}{timings.decode_s * 1e3 / max(1, steps):.2f} ms a step]")


if __name__ == "__main__":
    sys.exit(main())
