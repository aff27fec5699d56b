"""The CPU and memory that control groups allow, with files as the kernel writes them and with a real group."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from skipdecode import control_group
from skipdecode.control_group import cpu_quota, free_memory
from skipdecode.cpu import usable_cores
from tests.one_core import one_core

Write = Callable[..., None]
STAT = "anon 7\nfile 400\nactive_file 30\ninactive_file 20\ntotal_active_file 3\ntotal_inactive_file 2"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write files of the hierarchies, and the groups that the process is a member of."""
    monkeypatch.setattr(control_group, "_HIERARCHIES", tmp_path)
    monkeypatch.setattr(control_group, "_MEMBERSHIP", tmp_path / "membership")

    def files(membership: str, **texts: str) -> None:
        (tmp_path / "membership").write_text(f"{membership}\n")
        for name, text in texts.items():
            path = tmp_path / name.replace("__", "/").replace("_dot_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")

    return files


def test_the_smallest_quota_of_a_group_and_its_parents_counts(write: Write) -> None:
    write("0::/pods/one", pods__one__cpu_dot_max="max 100000")
    assert cpu_quota() is None
    write("0::/pods/one", pods__cpu_dot_max="250000 100000", pods__one__cpu_dot_max="400000 100000")
    assert cpu_quota() == 2.5
    write("0::/elsewhere")
    assert cpu_quota() is None


def test_version_1_keeps_quota_and_period_in_a_hierarchy_of_its_own(write: Write) -> None:
    member = "3:cpuset:/\n2:cpu,cpuacct:/job\n0::/"
    write(member, cpu__job__cpu_dot_cfs_quota_us="-1", cpu__job__cpu_dot_cfs_period_us="50000")
    assert cpu_quota() is None
    write(member, cpu__job__cpu_dot_cfs_quota_us="75000")
    assert cpu_quota() == 1.5


def test_memory_that_file_pages_take_counts_as_free(write: Write) -> None:
    write("0::/pod", pod__memory_dot_max="max", pod__memory_dot_current="600", pod__memory_dot_stat=STAT)
    assert free_memory() is None
    write("0::/pod", pod__memory_dot_max="1000")
    assert free_memory() == 1000 - 600 + 50
    write("5:memory:/pod", memory__pod__memory_dot_limit_in_bytes="900", memory__pod__memory_dot_usage_in_bytes="600",
          memory__pod__memory_dot_stat=STAT)  # fmt: skip
    assert free_memory() == 900 - 600 + 5
    write("0::/pod", pod__memory_dot_max="500")
    assert free_memory() == 0


def test_a_container_may_see_its_group_as_the_root(write: Write) -> None:
    write("0::/docker/0123", cpu_dot_max="100000 100000", memory_dot_max="1000", memory_dot_current="1", memory_dot_stat="anon 7")
    assert (cpu_quota(), free_memory()) == (1.0, 999)


def test_a_group_may_have_any_name(write: Write, tmp_path: Path) -> None:
    write("0::/a\u2028b\x0cc", cpu_dot_max="100000 100000")
    assert cpu_quota() == 1.0
    (tmp_path / "membership").write_bytes(b"0::/\xff\n")
    assert cpu_quota() == 1.0
    write("what", cpu_dot_max="100000 100000")
    assert cpu_quota() is None
    write("1:cpu:/", cpu__cpu_dot_cfs_quota_us="100000")
    assert cpu_quota() is None, "there is no period"


def test_a_system_without_groups_limits_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_group, "_MEMBERSHIP", tmp_path / "nowhere")
    assert (cpu_quota(), free_memory()) == (None, None)


@pytest.mark.parametrize(("quota", "cores"), [(None, 4), (0.5, 1), (1.5, 1), (3.9, 3), (9.0, 4)])
def test_cores_are_the_whole_cores_that_a_quota_covers_and_at_least_one(
    quota: float | None, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr("skipdecode.cpu.cpu_quota", lambda: quota)
    assert usable_cores() == cores


def test_a_process_whose_quota_is_one_core_uses_one() -> None:
    ask = "from skipdecode.cpu import usable_cores; print(usable_cores())"
    with one_core() as started_by:
        assert subprocess.check_output([*started_by, sys.executable, "-c", ask], text=True) == "1\n"
    assert subprocess.check_output([sys.executable, "-c", ask], text=True) == f"{usable_cores()}\n"
