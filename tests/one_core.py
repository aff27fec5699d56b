"""A control group whose quota is one core, as `docker run --cpus 1` makes one."""

from __future__ import annotations

import contextlib
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

_VERSION_1 = Path("/sys/fs/cgroup/cpu")
_PERIOD_US = 100_000


@contextlib.contextmanager
def one_core() -> Iterator[list[str]]:
    """Yield the prefix of commands that run in the group; they must have ended when the context does.

    Skips the test where this machine allows no such group.
    """
    first = _VERSION_1.is_dir()
    group = (_VERSION_1 if first else _VERSION_1.parent) / f"skipdecode-{secrets.token_hex(4)}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"control groups cannot be made here: {error}")
    try:
        try:
            if first:
                (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
                (group / "cpu.cfs_quota_us").write_text(str(_PERIOD_US))
            else:
                (group / "cpu.max").write_text(f"{_PERIOD_US} {_PERIOD_US}")
        except OSError as error:
            pytest.skip(f"no quota can be set here: {error}")
        started_by = ["sh", "-c", f'echo $$ > {group / "cgroup.procs"} && exec "$@"', "sh"]
        if subprocess.run([*started_by, "true"], check=False).returncode:
            pytest.skip("no process can be moved into a control group here")
        yield started_by
    finally:
        group.rmdir()
