"""The process's memory after loading."""

from __future__ import annotations

import subprocess
import sys
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


def test_file_pages_that_loading_read_are_not_resident_afterwards(shipped: Path) -> None:
    generator = skipdecode.load(shipped)
    files = process_memory.mapped_regions(shipped)
    assert files, "nothing of the bundle is mapped: this test checks nothing"
    assert _smaps(files, "Rss") == 0
    assert len(generator.generate([[5, 6, 7]], max_new_tokens=4, ignore_eos=True).sequences[0].token_ids) == 4


def test_loading_releases_no_pages_that_were_mapped_before(shipped: Path) -> None:
    """Their owner may unmap them in another thread at that moment, and something else may be mapped there by then."""
    first = skipdecode.load(shipped)
    first.generate([[5, 6, 7]], max_new_tokens=4, ignore_eos=True)
    files = process_memory.mapped_regions(shipped)
    resident = _smaps(files, "Rss")
    second = skipdecode.load(shipped)
    assert resident > 0
    assert _smaps(files, "Rss") == resident
    assert _smaps(list(process_memory._without(process_memory.mapped_regions(shipped), files)), "Rss") == 0
    assert second.manifest == first.manifest


_PAGES = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6)), max_size=5).map(
    lambda gaps: [(start, start + size) for start, size in accumulate(gaps, lambda last, gap: (sum(last) + gap[0], gap[1]))]
)


@given(_PAGES, _PAGES)
def test_new_pages_are_those_outside_all_others(regions: list[tuple[int, int]], others: list[tuple[int, int]]) -> None:
    found = [page for start, end in process_memory._without(regions, others) for page in range(start, end)]
    old = {page for start, end in others for page in range(start, end)}
    assert found == [page for start, end in regions for page in range(start, end) if page not in old]


def test_quantised_weights_in_use_are_file_pages_that_processes_share(shipped: Path) -> None:
    generator = skipdecode.load(shipped)
    generator.generate([[5, 6, 7]], max_new_tokens=4, ignore_eos=True)
    files = process_memory.mapped_regions(shipped)
    assert _smaps(files, "Rss") >= sum(generator.target.segment_weight_bytes)
    assert _smaps(files, "Anonymous") == 0


def test_long_prompts_take_memory_once_and_not_once_per_segment(shipped: Path) -> None:
    code = """
import sys, psutil, skipdecode
generator = skipdecode.load(sys.argv[1], threads=2)
before = psutil.Process().memory_info().rss
generator.generate([[5] * 250] * 8, max_new_tokens=2, ignore_eos=True)
print(psutil.Process().memory_info().rss - before)
"""
    grown = int(subprocess.run([sys.executable, "-c", code, str(shipped)], check=True, capture_output=True, text=True).stdout)
    assert grown <= 30 * MIB  # 11 MiB; 55 with an arena for each of 17 engines
