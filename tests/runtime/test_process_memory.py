"""The process's memory around loading."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import skipdecode
from skipdecode import process_memory
from skipdecode.exporter.export import ExportRequest, export
from skipdecode.schedule_builders import ScheduleRequest

MIB = 1 << 20
MODEL = Path(__file__).parents[2] / "examples" / "e2e" / "model"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model in int4: weights large enough to be mapped."""
    out = tmp_path_factory.mktemp("shipped") / "bundle"
    schedule = ScheduleRequest(name="linear", speedup=2)
    export(ExportRequest(model=str(MODEL), out=out, schedule=schedule, quantize="int4", max_length=256, slim=True))
    return out


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _smaps(regions: list[tuple[int, int]], field: str) -> int:
    """Bytes of `field` over the mappings that touch any of `regions`."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        name, *words = line.split()
        if "-" in name and not name.endswith(":"):
            first, last = (int(word, 16) for word in name.split("-"))
            inside = any(first < end and last > start for start, end in regions)
        elif inside and name == f"{field}:":
            total += int(words[0]) << 10
    return total


def test_new_memory_in_use_goes_into_huge_pages_with_its_content() -> None:
    if not process_memory._allowed():
        pytest.skip("this system has no transparent huge pages, or they are switched off")
    before = process_memory.anonymous_regions()
    memory = mmap.mmap(-1, 16 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    array = np.frombuffer(memory, dtype=np.uint32)
    array[:] = np.arange(len(array))
    start, last = _address(memory), _address(memory) + len(memory)
    runs = process_memory.full_blocks(before)
    inside = [(max(start, first), min(last, end)) for first, end in runs if first < last and end > start]
    assert sum(end - first for first, end in inside) >= 12 * MIB  # the first and the last one may be shared with others
    process_memory.collapse(inside)
    assert _smaps([(start, last)], "AnonHugePages") >= 12 * MIB
    assert (array == np.arange(len(array))).all()


def test_memory_that_nobody_uses_and_memory_of_before_stay_as_they_are() -> None:
    older = mmap.mmap(-1, 8 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    older.write(b"\1" * len(older))
    before = process_memory.anonymous_regions()
    unused = mmap.mmap(-1, 64 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    runs = process_memory.full_blocks(before)
    for memory in (older, unused):
        start = _address(memory)
        assert not [run for run in runs if run[0] < start + len(memory) and run[1] > start]


@pytest.mark.parametrize(
    ("others", "parts"),
    [
        ([], [(10, 20)]),
        ([(0, 5), (25, 30)], [(10, 20)]),
        ([(8, 12), (14, 16), (19, 40)], [(12, 14), (16, 19)]),
        ([(10, 20)], []),
        ([(5, 30)], []),
    ],
)
def test_a_region_is_cut_by_those_that_were_there(others: list[tuple[int, int]], parts: list[tuple[int, int]]) -> None:
    assert list(process_memory._without((10, 20), others)) == parts


def test_what_packing_read_of_the_files_is_not_resident_after_loading(shipped: Path) -> None:
    generator = skipdecode.load(shipped)
    files = process_memory._regions(lambda _, path: path.startswith(f"{shipped.resolve()}/"))
    assert files, "nothing of the bundle is mapped: this test checks nothing"
    assert _smaps(files, "Rss") == 0
    assert len(generator.generate([[5, 6, 7]], max_new_tokens=4, ignore_eos=True).sequences[0].token_ids) == 4


def test_long_prompts_take_memory_once_and_not_once_a_segment(shipped: Path) -> None:
    code = """
import sys, psutil, skipdecode
generator = skipdecode.load(sys.argv[1], threads=2)
before = psutil.Process().memory_info().rss
generator.generate([[5] * 250] * 8, max_new_tokens=2, ignore_eos=True)
print(psutil.Process().memory_info().rss - before)
"""
    grown = int(subprocess.run([sys.executable, "-c", code, str(shipped)], check=True, capture_output=True, text=True).stdout)
    assert grown <= 30 * MIB  # 11 MiB; 55 with an arena for each of 17 engines
