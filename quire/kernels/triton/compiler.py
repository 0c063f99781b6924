"""Thin products compiled by processes of their own, for a first start.

Threads share Python's lock, which Triton's front end holds for a good part of a compilation; processes do not. They
know the card by its description and never open it, so they take no memory there, and leave what they made in Triton's
cache on disk, whence this process loads it. `python -m quire.kernels.triton.compiler` reads its jobs from stdin.

Once all is compiled a stamp is left beside the tuning tables: the next start asks nobody.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from quire.kernels.triton import launch
from quire.kernels.triton.thin_candidates import Shape
from quire.kernels.triton.tuning import Job, config_of, entry_of
from quire.paths import cache_dir, child_environment

logger = logging.getLogger(__name__)

EACH = 6
"""Compilations that make up for the seconds in which a process imports torch."""
MOST = 6
PATIENCE = 120.0
"""Seconds; compilers that take longer are given up."""


class Compilers:
    """Processes at work; none where everything has been compiled before."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = jobs
        self.is_needed = not _stamp(jobs).exists()
        """Whether something may not have been compiled yet."""
        self._processes: list[subprocess.Popen[str]] = []
        if self.is_needed and len(jobs) > EACH:
            count = min(MOST, len(jobs) // EACH, max(1, (os.cpu_count() or 1) // 2))
            self._processes = [_start(jobs[i::count]) for i in range(count)]

    def wait(self) -> None:
        """Until all are done, or late. What one could not do is done when it is needed."""
        deadline = time.monotonic() + PATIENCE
        failed = [process for process in self._processes if _end(process, deadline) != 0]
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


def _end(process: subprocess.Popen[str], deadline: float) -> int:
    """Its exit code; one that is late is stopped."""
    try:
        return process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait() or 1


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


def _start(jobs: Sequence[Job]) -> subprocess.Popen[str]:
    major, minor = torch.cuda.get_device_capability()
    order = {"arch": 10 * major + minor, "sms": launch.num_sms(), "jobs": [encode(job) for job in jobs]}
    process = subprocess.Popen(
        [sys.executable, "-m", "quire.kernels.triton.compiler"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, env=child_environment(), text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(order))
        process.stdin.close()
    except BrokenPipeError:
        pass  # it could not even start; `wait` will tell
    return process


def encode(job: Job) -> dict[str, Any]:
    """A job as plain data."""
    dtype = str(job.dtype).removeprefix("torch.")
    return {
        "shape": list(job.shape), "rows": job.rows, "dtype": dtype, "config": entry_of(job.config),
        "residual": job.residual,
    }  # fmt: skip


def decode(data: dict[str, Any]) -> Job:
    """…and back."""
    config = config_of(data["config"])
    assert config is not None, data
    return Job(Shape(*data["shape"]), data["rows"], getattr(torch, data["dtype"]), config, data["residual"])


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


def main() -> None:
    """Compile what stdin asks for."""
    order = json.load(sys.stdin)
    triton.runtime.driver.set_active(DescribedDriver(order["arch"]))
    launch.describe(order["arch"], order["sms"])
    for data in order["jobs"]:
        decode(data).compile()


if __name__ == "__main__":
    main()
