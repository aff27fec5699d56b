"""Return memory that only loading needed to the system."""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LIBC = ctypes.CDLL(None)
_DONTNEED = 4  # MADV_DONTNEED
_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \S+ *(.*)$", re.MULTILINE)

Region = tuple[int, int]  # addresses of its first byte and of the byte after its last

_lock = threading.Lock()


@contextmanager
def loading(bundle: Path) -> Iterator[None]:
    """Load engines of `bundle` inside this block, whose end releases the memory that only loading needed.

    The engines must be alive at its end. Loads in several threads wait for one another. Only files mapped inside the block are
    released: another thread may unmap its own engines' files at any time, and what it gets at the same addresses afterwards
    would be zeroed. The heap is released only with glibc, mapped files only on Linux.
    """
    with _lock:
        before = mapped_regions(bundle)
        yield
        if hasattr(_LIBC, "malloc_trim"):
            _LIBC.malloc_trim(0)  # OPT-1.3B in int4: 170 of 230 MiB, which glibc would otherwise keep
        for start, end in _without(mapped_regions(bundle), before):
            # as much as the bundle: ONNX Runtime packs quantised weights only to find them equal to the stored ones
            _LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _DONTNEED)


def mapped_regions(bundle: Path) -> list[Region]:
    """Where this process has mapped the bundle's files, in ascending order."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    folder = f"{bundle.resolve()}/"
    return [(int(start, 16), int(end, 16)) for start, end, path in _MAPPING.findall(maps) if path.startswith(folder)]


def _without(regions: list[Region], others: list[Region]) -> Iterator[Region]:
    """The parts of `regions` outside all of `others`; both ascend, and the system may have merged regions of both."""
    for start, end in regions:
        for other_start, other_end in others:
            if other_start < end and start < other_end:
                if start < other_start:
                    yield start, other_start
                start = max(start, other_end)
        if start < end:
            yield start, end
