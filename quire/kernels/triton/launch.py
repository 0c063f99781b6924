"""What every Triton kernel here shares: programmatic dependent launch, and whether a GPU is there at all.

A decode step is hundreds of kernels of a few microseconds. Launched the usual way, each begins when the last block of
the one before has ended, and the card idles for a microsecond or two in between. With programmatic dependent launch
(Hopper and later) a kernel starts early, does what does not depend on its predecessor (reads weights), and waits at
`gdc_wait` for the rest. The rule that keeps it right: **every** kernel launched with `**pdl()` calls `gdc_wait` (under
`PDL: tl.constexpr`) before it reads or writes anything another kernel touches, weights excepted.
One exception: `moe_vector._down` reads the routing before it waits, since the kernel that wrote it had ended when the
one in between passed its own wait, and that one lets its successor start only after that.
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
"""Kernels run in Python on the CPU: for tests."""


_described: list[int] = []


def describe(arch: int, multiprocessors: int) -> None:
    """For a process that compiles for a card and never opens it; before anything else is asked here."""
    _described[:] = arch, multiprocessors


@functools.cache
def has_pdl() -> bool:
    """Whether the current device starts dependent kernels early."""
    if _described:
        return _described[0] >= 90
    return not INTERPRETED and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


@functools.cache
def pdl() -> dict[str, Any]:
    """Keyword arguments of a launch: `kernel[grid](..., **pdl())`. The kernel takes `PDL: tl.constexpr`."""
    return {"PDL": True, "launch_pdl": True} if has_pdl() else {"PDL": False}


compiled: list[str] = []
"""Kernels compiled, or loaded from Triton's own cache, since `watch_compiles`: there should be none on the way of a
request."""


def watch_compiles() -> None:
    """From here on `compiled` is kept."""

    def note(*_: Any, repr: str, **__: Any) -> None:
        compiled.append(repr)

    compiled.clear()
    triton.knobs.runtime.jit_post_compile_hook = note


class SafeLauncher(CudaLauncher):
    """What hands a kernel its arguments, made by one thread at a time.

    Triton builds it as a little extension module, and all of them have one name. To Python a module of that kind which
    is loaded once more *is* the one of that name loaded last: it puts the old functions into it. Between another
    thread's loading and its taking the function out, that gives it a launcher of some other kernel.
    """

    _making = threading.Lock()

    def __init__(self, *args: Any) -> None:
        with self._making:
            super().__init__(*args)


def let_threads_launch() -> None:
    """From here on several threads may launch kernels for the first time."""
    triton.runtime.driver.active.launcher_cls = SafeLauncher


@functools.cache
def num_sms() -> int:
    """Multiprocessors of the current device; a small number in the interpreter."""
    if _described:
        return _described[1]
    return 4 if INTERPRETED else torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


__all__ = [
    "INTERPRETED", "SafeLauncher", "compiled", "describe", "gdc_launch_dependents", "gdc_wait", "has_pdl",
    "let_threads_launch", "num_sms", "pdl", "watch_compiles",
]  # fmt: skip
