"""Check the packages that only exporting needs: those of the extra `export`, at least as new as pyproject.toml requires."""

from __future__ import annotations

import re
from importlib import metadata

from skipdecode.errors import TargetError

_REQUIREMENT = re.compile(r"""([\w.-]+)>=([\d.]+)\s*;\s*extra\s*==\s*['"]export['"]""")


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
    required = {match[1]: match[2] for match in map(_REQUIREMENT.fullmatch, lines) if match}
    versions = {name: _version(name) for name in required}
    missing = ", ".join(name for name, version in versions.items() if version is None)
    if missing:
        raise TargetError(f"exporting needs {missing}", "pip install 'skipdecode[export]'")
    outdated = [
        f"{name} {version} is older than {required[name]}"
        for name, version in versions.items()
        if _version_numbers(version) < _version_numbers(required[name])
    ]
    if outdated:
        raise TargetError(", ".join(outdated), "pip install --upgrade 'skipdecode[export]'")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _version_numbers(version: str | None) -> list[int]:
    """2.13.0+cpu -> [2, 13, 0]."""
    match = re.match(r"\d+(\.\d+)*", version or "")
    return [int(number) for number in match[0].split(".")] if match else []
