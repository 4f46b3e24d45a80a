"""How many compiles this machine bears at once: its cores and memory, and what a container leaves of them."""

from __future__ import annotations

import os
from pathlib import Path

# A large kernel takes NVRTC some hundred MB; this leaves room for the largest.
BYTES_PER_COMPILE = 1 << 30


def compiles_at_once(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """As many compiles as there are cores, and no more than there is memory for; at least 1.

    Args:
        proc, cgroups: where the kernel shows its tables.
    """
    cores = float(len(os.sched_getaffinity(0)))
    free = _available(proc)
    for group in _groups(proc, cgroups):
        cores = min(cores, _cpu_quota(group))
        free = min(free, _room(group))
    return max(1, min(int(cores), int(min(free / BYTES_PER_COMPILE, 1e6))))


def _number(path: Path) -> float | None:
    try:
        return float(path.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None


def _available(proc: Path) -> float:
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        return next(float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return float("inf")


def _groups(proc: Path, cgroups: Path) -> list[Path]:
    """The control groups of this process, of either version, and those above them."""
    found = {cgroups, cgroups / "memory", cgroups / "cpu"}
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for mount in [cgroups / name for name in controllers.split(",") if name] or [cgroups]:
            group = mount / path.lstrip("/")
            found |= {place for place in (group, *group.parents) if place.is_relative_to(mount)}
    return sorted(found)


def _cpu_quota(group: Path) -> float:
    """Cores' worth of time that the group may use; infinite where it is not limited."""
    try:
        quota, period = (group / "cpu.max").read_text().split()[:2]
        return float(quota) / float(period)
    except (OSError, ValueError, ZeroDivisionError):
        pass
    share, period_us = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
    return share / period_us if share and period_us and share > 0 else float("inf")


def _room(group: Path) -> float:
    """Bytes that the group may still take; infinite where it is not limited."""
    for limit, usage in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        most, used = _number(group / limit), _number(group / usage)
        if most is not None and used is not None:
            return max(most - used, 0.0)
    return float("inf")
