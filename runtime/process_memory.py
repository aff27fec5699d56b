"""The process's memory around loading engines: what only loading needed goes back, what stays goes into huge pages.

ONNX Runtime packs quantised weights into memory of its own, and a decode step reads all of it: in pages of 4 KiB that is a walk
through the page table every 4 KiB, twice as deep in a virtual machine. Weights that are mapped are the file system's affair.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import numpy as np

Region = tuple[int, int]  # addresses of its first byte and of the one behind its last

_LIBC = ctypes.CDLL(None)
_PAGE, _HUGE = 4 << 10, 2 << 20  # bytes; where pages have other sizes, memory is left as it is
_RESIDENT = 0.9  # of a huge page's pages, or it would take memory that nobody has asked for (stacks, a heap's reserve)
_DONTNEED, _COLLAPSE = 4, 25  # advice of madvise; the second one since Linux 6.1
_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (....) \S+ \S+ \S+ *(.*)$", re.MULTILINE)


@contextmanager
def loading(bundle: Path) -> Iterator[None]:
    """Around loading the engines of `bundle`. Does nothing where the system is not Linux with glibc."""
    before, folder = anonymous_regions(), f"{bundle.resolve()}/"
    yield
    if hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)  # 157 MiB of 1.3 GiB with 19 engines; glibc would keep it
    for start, end in _regions(lambda _, path: path.startswith(folder)):
        _advise(start, end, _DONTNEED)  # 157 MiB of scales that packing read; who reads them again gets them from the file
    Thread(target=collapse, args=(full_blocks(before),), name="huge pages", daemon=True).start()  # can take seconds


def anonymous_regions() -> list[Region]:
    """Private writable memory that no file stands behind."""
    return _regions(lambda rights, path: rights.startswith("rw") and rights.endswith("p") and path in ("", "[heap]"))


def full_blocks(before: Sequence[Region]) -> list[Region]:
    """Runs of huge pages' size in memory that is not in `before`, and of which nearly all is in use. None where not allowed."""
    if not _allowed():
        return []
    return [run for region in anonymous_regions() for part in _without(region, before) for run in _full(part)]


def collapse(regions: Sequence[Region]) -> None:
    """Put memory into huge pages; its content stays. What the system refuses stays as it is."""
    for start, end in regions:
        _advise(start, end, _COLLAPSE)


def _allowed() -> bool:
    """Whether there are huge pages of the size known here, and the administrator has not switched them off."""
    try:
        enabled, size = ((_SETTINGS / name).read_text(encoding="ascii") for name in ("enabled", "hpage_pmd_size"))
    except OSError:
        return False
    return "[never]" not in enabled and int(size) == _HUGE


def _regions(wanted: Callable[[str, str], bool]) -> list[Region]:
    """Mappings of this process whose rights (rwxp) and path are `wanted`."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return [(int(start, 16), int(end, 16)) for start, end, rights, path in _MAPPING.findall(maps) if wanted(rights, path)]


def _without(region: Region, others: Sequence[Region]) -> Iterator[Region]:
    """The parts of a region that are in none of `others`, which are in order."""
    start, end = region
    for other_start, other_end in others:
        if other_end <= start or other_start >= end:
            continue
        if other_start > start:
            yield start, other_start
        start = other_end
    if start < end:
        yield start, end


def _full(region: Region) -> Iterator[Region]:
    """The runs of whole huge pages in a region of which nearly all pages are in memory."""
    first, end = -(-region[0] // _HUGE), region[1] // _HUGE
    if first >= end:
        return
    pages = _HUGE // _PAGE
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
        pagemap.seek(8 * pages * first)
        entries = np.frombuffer(pagemap.read(8 * pages * (end - first)), dtype=np.uint64)
    share = (entries >> np.uint64(63)).reshape(-1, pages).mean(axis=1)
    edges = np.flatnonzero(np.diff(np.concatenate(([False], share >= _RESIDENT, [False])).astype(np.int8)))
    for run_start, run_end in edges.reshape(-1, 2).tolist():
        yield (first + run_start) * _HUGE, (first + run_end) * _HUGE


def _advise(start: int, end: int, advice: int) -> None:
    _LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), advice)
