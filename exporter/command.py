"""The `skip-export` command. Ctrl-C ends it cleanly from the start, even during the seconds that importing torch takes.

Neither help nor the report of a mistyped option, folder, hub id or target waits for torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from skipdecode.cli import BAD_INPUT, guarded
from skipdecode.errors import TargetError
from skipdecode.exporter.packages import check_packages
from skipdecode.exporter.signals import ending_on_signals


def main(argv: list[str] | None = None) -> int:
    """Read and check the options, import the exporter, and run it."""
    with ending_on_signals() as check_signals:
        try:
            check_packages()
        except TargetError as error:
            print(error, file=sys.stderr)
            return BAD_INPUT
        from skipdecode.exporter.options import parse

        options = parse(argv)
        return guarded(lambda: _run(options, check_signals), debug=options.debug)


def _run(options: argparse.Namespace, check_signals: Callable[[], None]) -> int:
    from skipdecode.exporter.check_request import check_request
    from skipdecode.exporter.options import request_of

    request = request_of(options)
    with _progress(options.quiet) as show:

        def report(what: str, done: float) -> None:
            check_signals()
            show(what, done)

        check_request(request)
        _check_hub(request.model, report)
        report("importing torch and transformers", 0.0)
        from skipdecode.exporter import cli

        manifest = cli.run(request, report, quiet=options.quiet)
    if not options.quiet:
        cli.print_result(manifest, request)
    return 0


def _check_hub(model: str, report: Callable[[str, float], None]) -> None:
    """Refuse a hub id that the hub does not serve; short OPT names need no hub until their weights are downloaded."""
    report(f"looking for {model}", 0.0)
    from huggingface_hub.utils import logging

    from skipdecode.exporter.adapter_config import base_model

    logging.set_verbosity_error()  # a refusal is one line
    base_model(model)


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str, float], None]]:
    """A progress bar on standard error, if that is a terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda what, done: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=1.0)
        yield lambda what, done: bar.update(task, description=what, completed=done)


if __name__ == "__main__":
    sys.exit(main())
