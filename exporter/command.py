"""The `skip-export` command, which Ctrl-C ends in one piece from its first moment on: torch alone takes seconds to import."""

from __future__ import annotations

import sys

from skipdecode.exporter.signals import ending_on_signals


def main(argv: list[str] | None = None) -> int:
    """Import the command line, and run it."""
    with ending_on_signals() as check:
        from skipdecode.exporter import cli

        check()
        return cli.run(argv, check)


if __name__ == "__main__":
    sys.exit(main())
