"""Thin products compiled by processes of their own, for a first start.

Threads share Python's lock, which Triton's front end holds for a good part of a compilation; processes do not. They
are forks of this one, so nothing is imported again. They know the card by its description and never call it, which a
fork could not, and leave what they made in Triton's cache on disk, whence this process loads it.

Once all is compiled a stamp is left beside the tuning tables: the next start asks nobody.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from quire.kernels.triton import launch
from quire.kernels.triton.tuning import Job, entry_of
from quire.paths import cache_dir

logger = logging.getLogger(__name__)

EACH = 2
"""Compilations a process takes at least."""
MOST = 12
PATIENCE = 60.0
"""Seconds; compilers that take longer are given up."""


class Compilers:
    """Processes at work; none where everything has been compiled before."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = jobs
        self.is_needed = not _stamp(jobs).exists()
        """Whether something may not have been compiled yet."""
        self._processes: list[Fork] = []
        if self.is_needed and len(jobs) > EACH:
            count = min(MOST, len(jobs) // EACH, max(1, (os.cpu_count() or 1) * 3 // 4))
            arch, sms = _card()
            self._processes = [Fork(functools.partial(compile_jobs, arch, sms, jobs[i::count])) for i in range(count)]

    def wait(self) -> None:
        """Until all are done, or late. What one could not do is done when it is needed."""
        deadline = time.monotonic() + PATIENCE
        failed = [process for process in self._processes if not process.wait(deadline)]
        if failed:
            logger.warning("%d of %d compilers failed; this start takes longer", len(failed), len(self._processes))
        elif self._processes:
            self._leave_stamp()

    def _leave_stamp(self) -> None:
        stamp = _stamp(self._jobs)  # the cache may have been made only now
        try:
            stamp.parent.mkdir(parents=True, exist_ok=True)
            stamp.touch()
        except OSError:
            pass  # a cache that cannot be written costs the next start these seconds again


class Fork:
    """This process over again, doing one thing and ending."""

    def __init__(self, task: Callable[[], object]) -> None:
        self._pid = os.fork()
        if self._pid:
            return
        status = 1
        try:
            task()
            status = 0
        finally:
            os._exit(status)  # nothing of the parent's is flushed, closed or run a second time

    def wait(self, deadline: float) -> bool:
        """Whether it did what it was to do; one that is late is stopped."""
        while not (ended := os.waitpid(self._pid, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
                return False
            time.sleep(0.01)
        return ended[1] == 0


def _stamp(jobs: Sequence[Job]) -> Path:
    """Names what was compiled: which jobs, from which sources, by which Triton, into which cache."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps(sorted(map(encode, jobs), key=str)).encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    cache = Path(triton.knobs.cache.dir)
    known = cache.stat().st_ino if cache.exists() else 0  # a cache that was emptied is another one
    digest.update(f"{triton.__version__} {torch.__version__} {cache} {known}".encode())
    return cache_dir() / "compiled" / digest.hexdigest()


def encode(job: Job) -> dict[str, Any]:
    """A job as plain data."""
    dtype = str(job.dtype).removeprefix("torch.")
    return {
        "shape": list(job.shape), "rows": job.rows, "dtype": dtype, "config": entry_of(job.config),
        "residual": job.residual,
    }  # fmt: skip


def _card() -> tuple[int, int]:
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor, launch.num_sms()


class DescribedDriver:
    """A card that is known, not there: enough to compile for it."""

    def __init__(self, arch: int) -> None:
        self._target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_jobs(arch: int, multiprocessors: int, jobs: Sequence[Job]) -> None:
    """Compile for a card that this process must not call."""
    triton.runtime.driver.set_active(DescribedDriver(arch))
    launch.describe(arch, multiprocessors)
    for job in jobs:
        job.compile()
