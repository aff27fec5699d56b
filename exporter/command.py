"""The `skip-export` command, which Ctrl-C ends in one piece from its first moment on: torch alone takes seconds to import."""

from __future__ import annotations

import sys

from skipdecode.cli import BAD_INPUT
from skipdecode.errors import TargetError
from skipdecode.exporter.packages import check_packages
from skipdecode.exporter.signals import ending_on_signals


def main(argv: list[str] | None = None) -> int:
    """Read the options, import what exports, and run it: neither help nor a mistyped option waits for torch."""
    with ending_on_signals() as check:
        try:
            check_packages()
        except TargetError as error:
            print(error, file=sys.stderr)
            return BAD_INPUT
        from skipdecode.exporter.options import parse

        options = parse(argv)
        from skipdecode.exporter import cli

        check()
        return cli.run(options, check)


if __name__ == "__main__":
    sys.exit(main())
