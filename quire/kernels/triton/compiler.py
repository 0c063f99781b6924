"""Kernels compiled by processes of their own, for a first start.

Threads share Python's lock, which Triton's front end holds for a good part of a compilation; processes do not. They
are forks of this one, so nothing is imported again. A fork cannot use the card: it knows it by its description, goes
through the motions of launching with tensors that are only shapes, and leaves what was compiled for that in Triton's
cache on disk, whence this process loads it.

Once all is compiled a stamp is left beside the tuning tables: the next start asks nobody.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher
from triton.runtime.jit import JITFunction

from quire.kernels.triton import launch
from quire.paths import cache_dir

logger = logging.getLogger(__name__)

Task = Callable[[], object]
"""Launches kernels."""

EACH = 2
"""Tasks a process takes at least."""
MOST = 12
PATIENCE = 60.0
"""Seconds; compilers that take longer are given up."""


class Compilers:
    """Processes at work; none where everything has been compiled before."""

    def __init__(self, tasks: Sequence[Task], identity: str) -> None:
        """`identity`: tells these tasks from others, by what their kernels depend on."""
        self._identity = identity
        self.is_needed = not _stamp(identity).exists()
        """Whether something may not have been compiled yet."""
        self._processes: list[CompilerFork] = []
        if self.is_needed and len(tasks) > EACH:
            count = min(MOST, len(tasks) // EACH, max(1, (os.cpu_count() or 1) * 3 // 4))
            logger.info(
                "starting: compiling the kernels of %d tasks in %d processes, for this first time", len(tasks), count
            )
            card = _card()
            self._processes = [
                CompilerFork(functools.partial(compile_tasks, *card, tasks[i::count])) for i in range(count)
            ]

    def wait(self) -> None:
        """Until all are done, or late. What one could not do is done when it is needed."""
        deadline = time.monotonic() + PATIENCE
        failed = [process for process in self._processes if not process.wait(deadline)]
        if failed:
            logger.warning("%d of %d compilers failed; this start takes longer", len(failed), len(self._processes))
        elif self._processes:
            self._leave_stamp()

    def _leave_stamp(self) -> None:
        stamp = _stamp(self._identity)  # the cache may have been made only now
        try:
            stamp.parent.mkdir(parents=True, exist_ok=True)
            stamp.touch()
        except OSError:
            pass  # a cache that cannot be written costs the next start these seconds again


class CompilerFork:
    """This process over again, doing one thing and ending."""

    def __init__(self, task: Task) -> None:
        with warnings.catch_warnings():  # Python warns of threads that a fork lacks: it waits for none of them
            warnings.simplefilter("ignore", DeprecationWarning)
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


def _stamp(identity: str) -> Path:
    """Names what was compiled: for which tasks, from which sources, by which Triton, into which cache."""
    digest = hashlib.blake2b(identity.encode(), digest_size=16)
    for source in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(source.read_bytes())
    cache = Path(triton.knobs.cache.dir)
    known = cache.stat().st_ino if cache.exists() else 0  # a cache that was emptied is another one
    digest.update(f"{triton.__version__} {torch.__version__} {cache} {known}".encode())
    return cache_dir() / "compiled" / digest.hexdigest()


def _card() -> tuple[int, int]:
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor, launch.num_sms()


# In a fork


def compile_tasks(arch: int, multiprocessors: int, tasks: Sequence[Task]) -> None:
    """Compile what these tasks launch, for a card that this process must not call. Changes Triton: for forks only."""
    triton.runtime.driver.set_active(DescribedDriver(arch))
    launch.describe(arch, multiprocessors)
    JITFunction.run = _compile_only
    failures: list[Exception] = []
    with ShapesOnly():
        for task in tasks:
            try:
                task()
            except Exception as error:  # the others may still be compiled
                logger.debug("a kernel could not be compiled ahead", exc_info=error)
                failures.append(error)
    if failures:
        raise failures[0]


_run = JITFunction.run


def _compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
    compiled = _run(kernel, *args, grid=grid, warmup=True, **kwargs)
    with contextlib.suppress(Exception):  # without CUDA's libraries it cannot be made, and whoever launches makes it
        CudaLauncher(compiled.src, compiled.metadata)  # the piece of C that hands the arguments over is cached, too
    return compiled


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


class ShapesOnly(TorchFunctionMode):
    """Tensors on a card have shapes and no contents: whatever is done with them calls nobody."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "device" in kwargs and torch.device(kwargs["device"]).type == "cuda":
            kwargs = kwargs | {"device": "meta"}
        if "pin_memory" in kwargs:
            kwargs = kwargs | {"pin_memory": False}
        args, kwargs = tree_map(_shape_of, (args, kwargs))
        if func is torch.empty_like:
            return args[0].new_empty(args[0].shape)  # the other way has torch import sympy, which takes seconds
        return func(*args, **kwargs)


def _shape_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_cuda:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("meta")
    return value
