"""Compiles kernels in parallel processes, for a first start.

Threads share the GIL, which Triton's front end holds for much of a compilation; processes do not. They are forked, so
nothing is imported again. A fork cannot use the GPU: it gets the GPU's properties, runs the launches with meta tensors,
and the kernels compiled for them go to Triton's cache on disk, from which this process loads them.

Once everything is compiled a stamp file is written beside the tuning tables; the next start then forks nothing.
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

MIN_TASKS = 2
"""Tasks per process, at least."""
MAX_PROCESSES = 12
TIMEOUT_S = 60.0
"""Processes that take longer are killed."""


class Compilers:
    """The compiler processes; none if everything has been compiled before."""

    def __init__(self, tasks: Sequence[Task], identity: str) -> None:
        """`identity`: everything the tasks' kernels depend on; the stamp's name is a hash of it."""
        self._identity = identity
        self.is_needed = not _stamp(identity).exists()
        """Whether some kernel may not have been compiled yet."""
        self._processes: list[CompilerFork] = []
        if self.is_needed and len(tasks) > MIN_TASKS:
            count = min(MAX_PROCESSES, len(tasks) // MIN_TASKS, max(1, (os.cpu_count() or 1) * 3 // 4))
            logger.info(
                "starting: compiling the kernels of %d tasks in %d processes (first start only)", len(tasks), count
            )
            device = _device()
            self._processes = [
                CompilerFork(functools.partial(compile_tasks, *device, tasks[i::count])) for i in range(count)
            ]

    def wait(self) -> None:
        """Wait until all are done or timed out. Kernels that were not compiled are compiled on first use."""
        deadline = time.monotonic() + TIMEOUT_S
        failed = [process for process in self._processes if not process.wait(deadline)]
        if failed:
            logger.warning(
                "%d of %d compiler processes failed; this start takes longer", len(failed), len(self._processes)
            )
        elif self._processes:
            self._write_stamp()

    def _write_stamp(self) -> None:
        stamp = _stamp(self._identity)  # recomputed: the cache directory may not have existed before
        try:
            stamp.parent.mkdir(parents=True, exist_ok=True)
            stamp.touch()
        except OSError:
            pass  # without a stamp the next start checks again


class CompilerFork:
    """A fork of this process that runs one task and exits."""

    def __init__(self, task: Task) -> None:
        with warnings.catch_warnings():  # Python warns that a fork has no other threads; the task needs none
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pid = os.fork()
        if self._pid:
            return
        status = 1
        try:
            task()
            status = 0
        finally:
            os._exit(status)  # without flushing or closing what belongs to the parent

    def wait(self, deadline: float) -> bool:
        """Whether the task succeeded; past the deadline the process is killed."""
        while not (ended := os.waitpid(self._pid, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
                return False
            time.sleep(0.01)
        return ended[1] == 0


def _stamp(identity: str) -> Path:
    """The stamp of these tasks, these sources, this Triton and this cache directory."""
    digest = hashlib.blake2b(identity.encode(), digest_size=16)
    for source in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(source.read_bytes())
    cache = Path(triton.knobs.cache.dir)
    inode = cache.stat().st_ino if cache.exists() else 0  # a cache that was deleted gets a new one
    digest.update(f"{triton.__version__} {torch.__version__} {cache} {inode}".encode())
    return cache_dir() / "compiled" / digest.hexdigest()


def _device() -> tuple[int, int]:
    """(compute capability, multiprocessors)."""
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor, launch.num_sms()


# In a forked process


def compile_tasks(arch: int, multiprocessors: int, tasks: Sequence[Task]) -> None:
    """Compile what these tasks launch, for a GPU that this process must not use. Patches Triton: for forks only."""
    triton.runtime.driver.set_active(AssumedDriver(arch))
    launch.assume_device(arch, multiprocessors)
    JITFunction.run = _compile_only
    failures: list[Exception] = []
    with MetaTensors():
        for task in tasks:
            try:
                task()
            except Exception as error:  # the other tasks may still succeed
                logger.debug("a kernel could not be compiled ahead of time", exc_info=error)
                failures.append(error)
    if failures:
        raise failures[0]


_run = JITFunction.run


def _compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
    compiled = _run(kernel, *args, grid=grid, warmup=True, **kwargs)
    with contextlib.suppress(Exception):  # fails without CUDA's libraries; the first launch then builds it
        CudaLauncher(compiled.src, compiled.metadata)  # its C extension is cached, too
    return compiled


class AssumedDriver:
    """A Triton driver for a GPU of a given architecture: enough to compile, not to launch."""

    def __init__(self, arch: int) -> None:
        self._target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class MetaTensors(TorchFunctionMode):
    """CUDA tensors become meta tensors, so that no operation calls the GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "device" in kwargs and torch.device(kwargs["device"]).type == "cuda":
            kwargs = kwargs | {"device": "meta"}
        if "pin_memory" in kwargs:
            kwargs = kwargs | {"pin_memory": False}
        args, kwargs = tree_map(_to_meta, (args, kwargs))
        if func is torch.empty_like:
            return args[0].new_empty(args[0].shape)  # torch.empty_like would import sympy, which takes seconds
        return func(*args, **kwargs)


def _to_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_cuda:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("meta")
    return value
