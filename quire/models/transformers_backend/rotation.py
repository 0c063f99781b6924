"""Rotations that attention does while it writes keys, in place of the library's, which take ten kernels a layer.

Nearly all models call a function `apply_rotary_pos_emb` of their own file. A copy of a layer's `forward` in which that
name stands for `Deferral` leaves queries and keys as they are, and attention rotates them. Whether that is the same
(some models norm after the rotation, or pair other dimensions) is compared in the first step, layer by layer.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

_NAME = "apply_rotary_pos_emb"


class Rotation:
    """Cosines and sines of a step's tokens, [1, tokens, rotary_dim] each."""

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor) -> None:
        self.cos, self.sin = cos, sin
        half = cos.shape[-1] // 2
        self.table = torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=-1).float()
        """As `Ops.prepare_qkv` takes it, with a row for each token of the step."""
        self.order = torch.arange(cos.shape[1], device=cos.device)
        """The tokens' rows of the table."""

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """x [1, heads, tokens, head_dim], rotated as `Ops.prepare_qkv` does."""
        half = self.table.shape[-1] // 2
        if 2 * half > x.shape[-1]:
            return torch.full_like(x, float("nan"))
        cos, sin = self.table[:, :half], self.table[:, half:]
        first, second = x[..., :half].float(), x[..., half : 2 * half].float()
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
        return torch.cat([turned, x[..., 2 * half :]], dim=-1)


class HoldsRotation(Protocol):
    """Where a rotation is left for attention."""

    rotation: Rotation | None


class Deferral:
    """Stands for `apply_rotary_pos_emb`: leaves the rotation to attention."""

    def __init__(self, step: HoldsRotation) -> None:
        self._step = step
        self._last: Rotation | None = None

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if cos.dim() != 3 or cos.shape[0] != 1 or cos.shape != sin.shape or cos.shape[-1] % 2:
            raise ValueError(f"rotations of shape {tuple(cos.shape)} cannot be deferred")
        last = self._last
        if last is None or last.cos is not cos or last.sin is not sin:  # the same for many layers
            last = self._last = Rotation(cos, sin)
        self._step.rotation = last
        return q, k

    def forget(self) -> None:
        """Drop the tensors of a step that is done."""
        self._last = None


def deferred_forward(module: nn.Module, deferral: Deferral) -> Callable[..., Any] | None:
    """The module's `forward`, with rotations deferred; None if it has none that are known."""
    forward = inspect.unwrap(type(module).forward)
    if not isinstance(forward, types.FunctionType):
        return None
    if _NAME not in forward.__code__.co_names or _NAME not in forward.__globals__:
        return None
    changed = {**forward.__globals__, _NAME: deferral}
    copy = types.FunctionType(forward.__code__, changed, forward.__name__, forward.__defaults__, forward.__closure__)
    copy.__kwdefaults__ = forward.__kwdefaults__
    return types.MethodType(copy, module)
