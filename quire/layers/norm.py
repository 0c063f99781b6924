"""Norms, whole on every rank."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from quire.layers.build_context import BuildContext
from quire.loading.weights import Target


class RMSNorm(nn.Module):
    """x / rms(x) * weight, fused with the addition to the residual stream."""

    def __init__(self, build: BuildContext, name: str, size: int) -> None:
        super().__init__()
        self.ops = build.ops
        self.name = name
        self.eps = build.config.norm_eps
        self.weight = build.parameter(size)

    def forward(self, x: torch.Tensor | None, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(the normed stream, the stream): residual + x, either of which may be None; written over residual."""
        return self.ops.norm_stream(x, residual, self.weight, self.eps)

    def targets(self) -> dict[str, list[Target]]:
        """The weight, whole."""
        return {f"{self.name}.weight": [Target(self.weight, tuple(self.weight.shape))]}


class ZeroCenteredRMSNorm(RMSNorm):
    """x / rms(x) * (1 + weight). Holds 1 + weight in float32: rounded to 16 bits it would lose most of the weight."""

    def __init__(self, build: BuildContext, name: str, size: int) -> None:
        super().__init__(build, name, size)
        self.weight = nn.Parameter(build.memory.zeros((size,), torch.float32), requires_grad=False)

    def targets(self) -> dict[str, list[Target]]:
        """The weight, whole."""
        return {f"{self.name}.weight": [Target(self.weight, tuple(self.weight.shape), (), _plus_one)]}


def _plus_one(weight: torch.Tensor) -> torch.Tensor:
    return weight.float() + 1.0


class LayerNorm(nn.Module):
    """(x - mean) / deviation * weight + bias."""

    def __init__(self, build: BuildContext, name: str, size: int) -> None:
        super().__init__()
        self.name = name
        self.shape = (size,)
        self.eps = build.config.norm_eps
        self.weight = build.parameter(size)
        self.bias = build.parameter(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.shape, self.weight, self.bias, self.eps)

    def targets(self) -> dict[str, list[Target]]:
        """Weight and bias, whole."""
        return {
            f"{self.name}.weight": [Target(self.weight, self.shape)],
            f"{self.name}.bias": [Target(self.bias, self.shape)],
        }
