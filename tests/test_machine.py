"""How many compiles at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jitmx.machine import compiles_at_once

GB = 1 << 30


def machine(root: Path, *, free: int = 64 * GB, groups: str = "0::/\n", **limits: str) -> int:
    """The answer on a machine with these tables; `limits` maps paths below the control groups to their contents."""
    proc, cgroups = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal:       99 kB\nMemAvailable:   {free // 1024} kB\n")
    (proc / "self" / "cgroup").write_text(groups)
    for path, text in limits.items():
        (cgroups / path).parent.mkdir(parents=True, exist_ok=True)
        (cgroups / path).write_text(text)
    return compiles_at_once(proc, cgroups)


@pytest.fixture(autouse=True)
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))


def test_there_are_as_many_as_cores(tmp_path: Path) -> None:
    assert machine(tmp_path) == 16


def test_there_are_no_more_than_memory_is_free_for(tmp_path: Path) -> None:
    assert machine(tmp_path, free=5 * GB) == 5


def test_there_is_always_one(tmp_path: Path) -> None:
    assert machine(tmp_path, free=GB // 8, **{"cpu.max": "10000 100000\n"}) == 1


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/\n", {"memory.max": f"{8 * GB}\n", "memory.current": f"{2 * GB}\n"}, 6),
        ("0::/\n", {"memory.max": "max\n", "memory.current": f"{2 * GB}\n"}, 16),
        ("0::/\n", {"cpu.max": "400000 100000\n"}, 4),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 16),
        ("0::/a/b\n", {"a/cpu.max": "300000 100000\n", "a/b/cpu.max": "max 100000\n"}, 3),
        (
            "4:memory:/job\n1:cpu,cpuacct:/job\n",
            {
                "memory/job/memory.limit_in_bytes": f"{4 * GB}",
                "memory/job/memory.usage_in_bytes": f"{GB}",
                "cpu/cpu.cfs_quota_us": "-1",
                "cpu/cpu.cfs_period_us": "100000",
            },
            3,
        ),
        ("1:cpu:/job\n", {"cpu/job/cpu.cfs_quota_us": "200000", "cpu/job/cpu.cfs_period_us": "100000"}, 2),
        ("0::/\n", {"memory.max": "nonsense", "memory.current": "", "cpu.max": "0 0"}, 16),
    ],
)
def test_a_container_gets_what_is_left_to_it(
    tmp_path: Path, groups: str, limits: dict[str, str], expected: int
) -> None:
    assert machine(tmp_path, groups=groups, **limits) == expected


def test_without_tables_only_cores_count(tmp_path: Path) -> None:
    assert compiles_at_once(tmp_path / "nowhere", tmp_path / "nowhere") == 16


def test_this_machine_has_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert 1 <= compiles_at_once() <= len(os.sched_getaffinity(0))
