"""What every Triton kernel here shares: programmatic dependent launch (PDL), and the device's properties.

A decode step is hundreds of kernels of a few microseconds. Launched normally, each begins when the last block of its
predecessor has ended, and the GPU idles for a microsecond or two in between. With PDL (Hopper and later) a kernel
starts early, does what does not depend on its predecessor (loads weights), and waits at `gdc_wait` for the rest. The
rule that keeps this correct: **every** kernel launched with `**pdl()` calls `gdc_wait` (under `PDL: tl.constexpr`)
before it reads or writes anything another kernel touches, weights excepted.
Exceptions: `_down` in `moe/vector.py` reads the routing, `_products` in `quantized/expert_hopper.py` the sorted pairs,
and the decode attention kernels their plan, before they wait. The kernel that wrote it has ended by then: the kernel in
between launches its dependents only after its own wait.
"""

from __future__ import annotations

import functools
import os
import threading
from typing import Any

import torch
import triton
from triton.backends.nvidia.driver import CudaLauncher
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
"""Kernels run in Triton's interpreter on the CPU: for tests."""


_assumed: list[int] = []


def assume_device(arch: int, multiprocessors: int) -> None:
    """Use these properties instead of the device's: for a process that compiles for a GPU it must not open.

    To be called before the functions below.
    """
    _assumed[:] = arch, multiprocessors


def compiles_only() -> bool:
    """Whether this process compiles for a GPU that it must not open."""
    return bool(_assumed)


@functools.cache
def has_pdl() -> bool:
    """Whether the current device supports programmatic dependent launch."""
    return arch() >= 90


@functools.cache
def arch() -> int:
    """The current device's compute capability, times ten; 0 without one."""
    if _assumed:
        return _assumed[0]
    if INTERPRETED or not torch.cuda.is_available():
        return 0
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


@functools.cache
def pdl() -> dict[str, Any]:
    """Keyword arguments of a launch: `kernel[grid](..., **pdl())`. The kernel takes `PDL: tl.constexpr`."""
    return {"PDL": True, "launch_pdl": True} if has_pdl() else {"PDL": False}


compiled: list[str] = []
"""Kernels compiled, or loaded from Triton's cache on disk, since `watch_compiles`: while requests run there should be
none."""


def watch_compiles() -> None:
    """Record compilations in `compiled` from now on."""

    def record(*_: Any, repr: str, **__: Any) -> None:
        compiled.append(repr)

    compiled.clear()
    triton.knobs.runtime.jit_post_compile_hook = record


class SafeLauncher(CudaLauncher):
    """Triton's kernel launcher, created by one thread at a time.

    Triton compiles it as an extension module, and all of them have one name. Loading such a module again makes Python
    fill the module of that name loaded last with its functions, so a second thread that loads one between the first
    thread's load and its function lookup would give the first thread the launcher of another kernel.
    """

    _lock = threading.Lock()

    def __init__(self, *args: Any) -> None:
        with self._lock:
            super().__init__(*args)


def let_threads_launch() -> None:
    """Allow several threads to launch kernels for the first time."""
    triton.runtime.driver.active.launcher_cls = SafeLauncher


@functools.cache
def num_sms() -> int:
    """Multiprocessors of the current device; a small number in the interpreter."""
    if _assumed:
        return _assumed[1]
    return 4 if INTERPRETED else torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


__all__ = [
    "INTERPRETED", "SafeLauncher", "arch", "assume_device", "compiled", "compiles_only",
    "gdc_launch_dependents", "gdc_wait", "has_pdl",
    "let_threads_launch", "num_sms", "pdl", "watch_compiles",
]  # fmt: skip
