"""Catches code that would make the host wait for the device."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "unique", "_unique2"}


class NeverWaits(TorchDispatchMode):
    """Raises on operators whose result's shape or value the host would have to read from the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if name in _WAITING or by_mask:
            raise AssertionError(f"{func} makes the host wait for the device")
        return func(*args, **(kwargs or {}))
