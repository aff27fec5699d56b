"""How much CPU time and memory the control group of this process, a container's or a pod's, leaves it.

What Linux reports about the machine takes neither into account. Files as in https://docs.kernel.org/admin-guide/cgroup-v2.html,
and in cgroup-v1 next to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_MEMBERSHIP = Path("/proc/self/cgroup")
_HIERARCHIES = Path("/sys/fs/cgroup")


def cpu_quota() -> float | None:
    """CPU time that may be used, in cores: 1.5 is 150 ms in every 100 ms; None: no limit."""
    quotas = [_quota(*_words(folder / "cpu.max")) for folder in _groups("")]
    for folder in _groups("cpu"):
        quotas.append(_quota(*_words(folder / "cpu.cfs_quota_us"), *_words(folder / "cpu.cfs_period_us")))
    return min((quota for quota in quotas if quota is not None), default=None)


def free_memory() -> int | None:
    """Bytes that may still be allocated, including file pages that the kernel would drop to make room; None: no limit."""
    free = [_free_bytes(folder, "memory.max", "memory.current", "") for folder in _groups("")]
    free += [_free_bytes(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_") for folder in _groups("memory")]
    return min((count for count in free if count is not None), default=None)


def _groups(controller: str) -> Iterator[Path]:
    """The folders of the process's group and of the groups that contain it.

    Args:
        controller: one of version 1's; empty for version 2's only hierarchy.
    """
    for line in _lines(_MEMBERSHIP):
        _, controllers, path = [*line.split(":", 2), "", "", ""][:3]
        if not path or controller not in controllers.split(","):
            continue
        top = _HIERARCHIES / controller
        group = top / path.lstrip("/")
        # a container may see its own group as the top one, but its path as on the host
        yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(top) and folder.is_dir())


def _quota(quota: str = "max", period: str = "0") -> float | None:
    return None if quota == "max" or int(quota) < 0 or not int(period) else int(quota) / int(period)


def _free_bytes(folder: Path, limit_file: str, usage_file: str, prefix: str) -> int | None:
    limit, used = _words(folder / limit_file), _words(folder / usage_file)
    if not used or limit in ([], ["max"]):
        return None
    counts = dict(line.split(" ", 1) for line in _lines(folder / "memory.stat") if line)
    files = sum(int(counts.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
    return max(0, int(limit[0]) - int(used[0]) + files)


def _words(file: Path) -> list[str]:
    return " ".join(_lines(file)).split()


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="surrogateescape").split("\n")  # a group's name may be any bytes
    except OSError:  # another version of control groups, or another system
        return []
