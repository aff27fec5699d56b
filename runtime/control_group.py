"""What the control group that this process is in, a container's or a pod's, leaves it of the CPU and of memory.

Linux says neither in what it tells of the machine: https://docs.kernel.org/admin-guide/cgroup-v2.html, and cgroup-v1 beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_MEMBERSHIP = Path("/proc/self/cgroup")
_HIERARCHIES = Path("/sys/fs/cgroup")


def cpu_quota() -> float | None:
    """CPU time that may be used, in cores: 1.5 is 150 ms in every 100 ms; None: all there is."""
    quotas = [_quota(*_words(folder / "cpu.max")) for folder in _groups("")]
    for folder in _groups("cpu"):
        quotas.append(_quota(*_words(folder / "cpu.cfs_quota_us"), *_words(folder / "cpu.cfs_period_us")))
    return min((quota for quota in quotas if quota is not None), default=None)


def free_memory() -> int | None:
    """Bytes that may still be allocated, pages of files that the kernel would drop for them among these; None: no limit."""
    left = [_left(folder, "memory.max", "memory.current", "") for folder in _groups("")]
    left += [_left(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_") for folder in _groups("memory")]
    return min((count for count in left if count is not None), default=None)


def _groups(controller: str) -> Iterator[Path]:
    """The process's group, and those that it is part of; `controller`: of version 1, empty for version 2's only hierarchy."""
    for line in _lines(_MEMBERSHIP):
        _, controllers, path = [*line.split(":", 2), "", "", ""][:3]
        if not path or controller not in controllers.split(","):
            continue
        top = _HIERARCHIES / controller
        group = top / path.lstrip("/")
        # a container may see its own group as the top one, and its path as the host does
        yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(top) and folder.is_dir())


def _quota(quota: str = "max", period: str = "0") -> float | None:
    return None if quota == "max" or int(quota) < 0 or not int(period) else int(quota) / int(period)


def _left(folder: Path, limit: str, usage: str, prefix: str) -> int | None:
    most, used = _words(folder / limit), _words(folder / usage)
    if not used or most in ([], ["max"]):
        return None
    counts = dict(line.split(" ", 1) for line in _lines(folder / "memory.stat") if line)
    files = sum(int(counts.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
    return max(0, int(most[0]) - int(used[0]) + files)


def _words(file: Path) -> list[str]:
    return " ".join(_lines(file)).split()


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="surrogateescape").split("\n")  # a group's name may be any bytes
    except OSError:  # another version, or another system
        return []
