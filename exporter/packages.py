"""Check the packages that only exporting needs: those of the extra `export`, at least as new as pyproject.toml requires."""

from __future__ import annotations

import re
from importlib import metadata

from skipdecode.errors import TargetError

_ASKED_FOR = re.compile(r"""([\w.-]+)>=([\d.]+)\s*;\s*extra\s*==\s*['"]export['"]""")


def check_packages() -> None:
    """Refuse missing and outdated packages, without importing any.

    Nothing is checked where skipdecode itself is not installed: its metadata lists the requirements.

    Raises:
        TargetError: packages are missing, or older than the oldest with which exports are correct.
    """
    try:
        lines = metadata.requires("skipdecode") or []
    except metadata.PackageNotFoundError:
        return
    wanted = {found[1]: found[2] for found in map(_ASKED_FOR.fullmatch, lines) if found}
    versions = {name: _version(name) for name in wanted}
    missing = ", ".join(name for name, version in versions.items() if version is None)
    if missing:
        raise TargetError(f"exporting needs {missing}", "pip install 'skipdecode[export]'")
    old = [
        f"{name} {has} is older than {wanted[name]}" for name, has in versions.items() if _numbers(has) < _numbers(wanted[name])
    ]
    if old:
        raise TargetError(", ".join(old), "pip install --upgrade 'skipdecode[export]'")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str | None) -> list[int]:
    """2.13.0+cpu -> [2, 13, 0]."""
    found = re.match(r"\d+(\.\d+)*", version or "")
    return [int(number) for number in found[0].split(".")] if found else []
