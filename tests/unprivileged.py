"""How a test starts a process to which file permissions apply, even where root runs the tests."""

from __future__ import annotations

import os

UNPRIVILEGED = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []  # a command's prefix
