"""What exporting needs beyond what runs bundles: the packages of the extra `export`, as new as pyproject.toml asks for."""

from __future__ import annotations

import re
from importlib import metadata

from skipdecode.errors import TargetError

_ASKED_FOR = re.compile(r"""([\w.-]+)>=([\d.]+)\s*;\s*extra\s*==\s*['"]export['"]""")


def check_packages() -> None:
    """Nothing is imported for it. Where this package is not installed itself, nobody says what it needs.

    Raises:
        TargetError: packages that are missing, or older than what exports are right with.
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
    """Of 2.13.0+cpu 2, 13 and 0."""
    found = re.match(r"\d+(\.\d+)*", version or "")
    return [int(number) for number in found[0].split(".")] if found else []
