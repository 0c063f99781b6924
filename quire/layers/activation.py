"""Activations of plain (ungated) MLPs, by the names configs use."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from quire.errors import UnsupportedModelError

_gelu_tanh = partial(F.gelu, approximate="tanh")

_KNOWN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_fast": _gelu_tanh,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "silu": F.silu,
}


def activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function a config calls `name`."""
    if name not in _KNOWN:
        raise UnsupportedModelError(f"activation {name!r} is not implemented; known: {', '.join(sorted(_KNOWN))}")
    return _KNOWN[name]
