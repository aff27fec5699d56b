"""The `skip-export` command, which Ctrl-C ends in one piece from its first moment on: torch alone takes seconds to import.

Neither help nor a mistyped option, folder or target waits for torch.
"""

from __future__ import annotations

import argparse
import sys

from skipdecode.cli import BAD_INPUT, guarded
from skipdecode.errors import TargetError
from skipdecode.exporter.packages import check_packages
from skipdecode.exporter.signals import ending_on_signals


def main(argv: list[str] | None = None) -> int:
    """Read the options and check them, import what exports, and run it."""
    with ending_on_signals() as check:
        try:
            check_packages()
        except TargetError as error:
            print(error, file=sys.stderr)
            return BAD_INPUT
        from skipdecode.exporter.options import parse

        options = parse(argv)
        if status := guarded(lambda: _check(options), debug=options.debug):
            return status
        from skipdecode.exporter import cli

        check()
        return cli.run(options, check)


def _check(options: argparse.Namespace) -> int:
    from skipdecode.exporter.check_request import check_request
    from skipdecode.exporter.options import request_of

    check_request(request_of(options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
