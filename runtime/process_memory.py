"""What only loading needed of the process's memory goes back to the system."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

_LIBC = ctypes.CDLL(None)
_DONTNEED = 4  # advice of madvise
_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \S+ *(.*)$", re.MULTILINE)

Region = tuple[int, int]  # addresses of its first byte and of the one behind its last


def release_loading_memory(bundle: Path) -> None:
    """Call when the engines of `bundle` are loaded. Does nothing where the system is not Linux with glibc."""
    if hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)  # OPT-1.3B in int4: 170 of 230 MiB, which glibc would keep
    for start, end in mapped_regions(bundle):
        # as much as the bundle: ONNX Runtime packs quantised weights to find them equal to the stored ones
        _LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _DONTNEED)


def mapped_regions(bundle: Path) -> list[Region]:
    """Where this process has mapped the bundle's files."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    folder = f"{bundle.resolve()}/"
    return [(int(start, 16), int(end, 16)) for start, end, path in _MAPPING.findall(maps) if path.startswith(folder)]
