"""The CPU: a device like any other."""

from __future__ import annotations

import functools
import math
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import torch

CGROUP = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


class CpuPlatform:
    """This machine's processor and memory."""

    device = torch.device("cpu")
    ops = "quire.kernels.cpu.ops.CpuOps"
    attention = "cpu"
    collectives = "gloo"
    pipeline_depth = 0
    max_num_seqs = 256
    max_num_batched_tokens = 512  # half a second for a small model: the longest a prompt delays running requests

    @property
    def has_bfloat16(self) -> bool:
        return bool({"avx512_bf16", "amx_bf16", "bf16"} & cpu_flags())

    def describe(self) -> str:
        name = next(_cpuinfo("model name"), "") or platform.processor() or platform.machine()
        return f"{name.strip()}, {torch.get_num_threads()} threads"

    def free_memory(self) -> int:
        """Free memory, limited to what this process's control group may still allocate."""
        return min(_available(), _left_in_cgroup())

    def total_memory(self) -> int:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def usable_memory(self) -> int:
        """Total memory, limited to what this process's control group may have."""
        return min(self.total_memory(), _cgroup_limit())


def set_threads(wanted: int = 0) -> None:
    """Compute on `wanted` threads; 0: OMP_NUM_THREADS, else as many as this process has cores."""
    if wanted:
        torch.set_num_threads(wanted)
    elif not os.environ.get("OMP_NUM_THREADS") and torch.get_num_threads() > (cores := usable_cores()):
        torch.set_num_threads(cores)


def usable_cores() -> int:
    """Cores this process may use: those of its affinity, and no more than the quotas of its control groups allow.

    Half a core counts as one: a thread that has used up its quota is stopped until the next period, and with it all
    others that wait for it.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(cores, _cpu_quota())))


def _cpu_quota() -> float:
    """Cores that the control groups of this process allow it; infinity: as many as there are."""
    try:
        lines = OWN_CGROUPS.read_text().splitlines()
    except OSError:  # not Linux
        return math.inf
    quota = math.inf
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        read, root = (_quota_v1, CGROUP / controllers) if controllers else (_quota_v2, CGROUP)
        # The group and all it is in. In a container its own path may not be visible: then the root is its group.
        place = root / path.lstrip("/")
        quota = min([quota, *(read(group) for group in (place, *place.parents) if group.is_relative_to(root))])
    return quota


def _quota_v2(group: Path) -> float:
    try:
        quota, period = (group / "cpu.max").read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # no such file, or no limit ("max")
        return math.inf


def _quota_v1(group: Path) -> float:
    try:
        quota = int((group / "cpu.cfs_quota_us").read_text())
        return quota / int((group / "cpu.cfs_period_us").read_text()) if quota > 0 else math.inf
    except (OSError, ValueError, ZeroDivisionError):
        return math.inf


def _cpuinfo(key: str) -> Iterator[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == key:
            yield value


@functools.cache
def cpu_flags() -> set[str]:
    """The instruction sets the processor names."""
    return set((next(_cpuinfo("flags"), "") or next(_cpuinfo("Features"), "")).split())


def _available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2  # macOS reports it only through a subprocess


def _cgroup_limit() -> int:
    try:
        return int((CGROUP / "memory.max").read_text())
    except (OSError, ValueError):  # no such group, or no limit ("max")
        return 1 << 62


def _left_in_cgroup() -> int:
    """What the group may still allocate. Files it has read count as used, and are dropped when memory is short."""
    try:
        used = int((CGROUP / "memory.current").read_text())
        lines = (CGROUP / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):
        return _cgroup_limit()
    cached = next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
    return max(0, _cgroup_limit() - used + cached)
