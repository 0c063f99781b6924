"""Less memory for a process that serves a model and does nothing else with torch."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import sys
import types

logger = logging.getLogger(__name__)

FOR_COMPILERS = "torch._meta_registrations"
"""Shapes of operations for torch's compilers, in Python: 18 MiB with what it imports (torch 2.13). Nothing that runs
operations needs it."""
M_ARENA_MAX = -8
"""`mallopt`'s number of the setting."""


def import_lean_torch() -> None:
    """Import torch without what only `torch.compile` and fake tensors need; with it if that fails, or if it is imported
    already."""
    if "torch" in sys.modules:
        return
    sys.modules[FOR_COMPILERS] = types.ModuleType(FOR_COMPILERS)
    try:
        import torch

        del torch._meta_registrations
    except Exception as error:
        logger.info("torch is imported with its compilers (%s: %s)", type(error).__name__, error)
    finally:
        del sys.modules[FOR_COMPILERS]  # what needs it can import it
    import torch


def share_one_heap() -> None:
    """Let all threads allocate from one heap: with a heap for each, what one frees the others cannot use."""
    with contextlib.suppress(AttributeError, OSError):  # not glibc
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
