"""The CPU: a device like any other."""

from __future__ import annotations

import functools
import logging
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Set
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

CGROUP = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
DEVICES = Path("/sys/devices")
NO_LIMIT = 1 << 62
FAST_SHARE = 0.6
"""Cores with at least this share of the fastest one's speed are fast."""
CORES_SECONDS = 5.0
"""How often a running engine looks which cores it has."""


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
        """Free memory, limited to what this process and its control groups may still allocate."""
        return min(_available(), _left_in_cgroup(), _left_of_rlimits())

    def total_memory(self) -> int:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def usable_memory(self) -> int:
        """Total memory, limited to what this process and its control groups may have."""
        return min(self.total_memory(), _cgroup_limit(), _rlimit())

    def memory_limits(self) -> str:
        """What limits this process to less than the machine's memory, in words; empty: nothing does."""
        found = []
        if (limit := _cgroup_limit()) < self.total_memory():
            found.append(f"its container has {limit / 2**30:.2f} GiB")
        if (left := _left_of_rlimits()) < _available():
            found.append(f"ulimit leaves {left / 2**30:.2f} GiB")
        return ", ".join(found)

    def why_slow(self) -> str:
        """Why this processor is several times slower than others would be, in one line; empty: it is not."""
        flags = cpu_flags()
        if platform.machine() in ("x86_64", "AMD64") and flags and "avx2" not in flags:
            return "this processor has no AVX2: quire runs, several times slower than on one that has it"
        return ""


def set_threads(wanted: int = 0) -> None:
    """Compute on `wanted` threads; 0: OMP_NUM_THREADS, else as many as this process has cores."""
    if wanted:
        torch.set_num_threads(wanted)
    elif not os.environ.get("OMP_NUM_THREADS") and torch.get_num_threads() > (cores := usable_cores()):
        torch.set_num_threads(cores)


def usable_cores() -> int:
    """Cores this process should compute on: those of its affinity, of a hybrid chip the fast ones, and no more than the
    quotas of its control groups allow.

    Half a core counts as one: a thread that has used up its quota is stopped until the next period, and with it all
    others that wait for it.
    """
    allowed = _allowed_cores()
    return max(1, math.ceil(min(len(fast_cores(allowed)), _cpu_quota())))


def _allowed_cores() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def fast_cores(allowed: Set[int]) -> Set[int]:
    """Of the cores in `allowed`, the performance cores, each once if it runs two threads; all if they are alike.

    One slow core among fast ones would be waited for at the end of every product.
    """
    speeds = {core: _speed(core) for core in allowed}
    known = {core: speed for core, speed in speeds.items() if speed is not None}
    fast = {core for core, speed in known.items() if speed >= FAST_SHARE * max(known.values())}
    if len(known) < len(allowed) or fast == allowed:
        return allowed
    return {core for core in fast if min(_siblings(core) & fast, default=core) == core}


def _speed(core: int) -> float | None:
    """How fast a core is, in a unit of its chip; None: the system does not say."""
    for kind, speed in (("cpu_core", 1.0), ("cpu_atom", 0.5)):  # Intel's hybrid chips
        if core in _core_list(DEVICES / kind / "cpus"):
            return speed
    try:
        return float((DEVICES / "system" / "cpu" / f"cpu{core}" / "cpu_capacity").read_text())  # Arm's
    except (OSError, ValueError):
        return None


def _siblings(core: int) -> Set[int]:
    """The threads of the core that this thread is one of."""
    return _core_list(DEVICES / "system" / "cpu" / f"cpu{core}" / "topology" / "thread_siblings_list")


def _core_list(path: Path) -> Set[int]:
    """A list as the kernel writes it: 0-3,8."""
    try:
        parts = [part.partition("-") for part in path.read_text().strip().split(",") if part]
        return {core for first, _, last in parts for core in range(int(first), int(last or first) + 1)}
    except (OSError, ValueError):
        return frozenset()


class CoreWatch:
    """Follows the cores of this process: a container's quota or affinity can change while it runs."""

    def __init__(self, wanted: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        """`wanted`: the configured number of threads, which stays."""
        self._follows = not wanted and not os.environ.get("OMP_NUM_THREADS")
        self._most = self._last = torch.get_num_threads()
        self._clock = clock
        self._looked_at = clock()

    def tick(self) -> None:
        """To be called now and then; looks at most every CORES_SECONDS."""
        if not self._follows or self._clock() - self._looked_at < CORES_SECONDS:
            return
        self._looked_at = self._clock()
        if torch.get_num_threads() != self._last:
            self._follows = False  # the program has chosen another number
            return
        threads = min(self._most, usable_cores())
        if threads != self._last:
            logger.info("this process may use %d cores now: %d threads instead of %d", threads, threads, self._last)
            torch.set_num_threads(threads)
            self._last = threads


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


def _left_of_rlimits() -> int:
    """What the limits of this process (ulimit -v, -d) leave it."""
    try:
        import resource

        sizes = Path("/proc/self/statm").read_text().split()
    except (ImportError, OSError):  # not Linux
        return NO_LIMIT
    page, left = os.sysconf("SC_PAGE_SIZE"), NO_LIMIT
    for limit, pages in ((resource.RLIMIT_AS, sizes[0]), (resource.RLIMIT_DATA, sizes[5])):
        most = resource.getrlimit(limit)[0]
        if most != resource.RLIM_INFINITY:
            left = min(left, max(0, most - int(pages) * page))
    return left


def _rlimit() -> int:
    """Bytes of address space that this process may have."""
    try:
        import resource
    except ImportError:
        return NO_LIMIT
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    return NO_LIMIT if most == resource.RLIM_INFINITY else most


def _memory_groups() -> list[tuple[Path, bool]]:
    """Folders of the control groups that limit this process's memory, and whether each is of version 2."""
    groups = [(CGROUP, True), (CGROUP / "memory", False)]
    try:
        lines = OWN_CGROUPS.read_text().splitlines()
    except OSError:
        return groups
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = CGROUP / "memory" if controllers else CGROUP
        place = root / path.lstrip("/")
        groups += [(each, not controllers) for each in (place, *place.parents) if each.is_relative_to(root)]
    return list(dict.fromkeys(groups))


def _group_limit(group: Path, is_v2: bool) -> int:
    try:
        return min(NO_LIMIT, int((group / ("memory.max" if is_v2 else "memory.limit_in_bytes")).read_text()))
    except (OSError, ValueError):  # no such group, or no limit ("max")
        return NO_LIMIT


def _cgroup_limit() -> int:
    return min(_group_limit(group, is_v2) for group, is_v2 in _memory_groups())


def _left_in_cgroup() -> int:
    """What the groups may still allocate. Files they have read count as used, and are dropped when memory is short."""
    left = NO_LIMIT
    for group, is_v2 in _memory_groups():
        if (limit := _group_limit(group, is_v2)) == NO_LIMIT:
            continue
        cached, used = "inactive_file " if is_v2 else "total_inactive_file ", 0
        try:
            used = int((group / ("memory.current" if is_v2 else "memory.usage_in_bytes")).read_text())
            lines = (group / "memory.stat").read_text().splitlines()
            used -= next((int(line.split()[1]) for line in lines if line.startswith(cached)), 0)
        except (OSError, ValueError):
            pass
        left = min(left, max(0, limit - used))
    return left
