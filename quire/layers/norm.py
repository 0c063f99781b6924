"""Norms, most of them whole on every rank."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from quire.distributed.collectives import all_reduce, is_shared
from quire.layers.build_context import BuildContext
from quire.loading.weights import Target


class RMSNorm(nn.Module):
    """x / rms(x) * weight, fused with the addition to the residual stream."""

    def __init__(self, build: BuildContext, name: str, size: int, eps: float | None = None) -> None:
        """`eps`: the config's if None."""
        super().__init__()
        self.ops = build.ops
        self.name = name
        self.eps = build.config.norm_eps if eps is None else eps
        self.weight = build.parameter(size)

    def forward(self, x: torch.Tensor | None, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(the normed stream, the stream): residual + x, either of which may be None; written over residual."""
        return self.ops.norm_stream(x, residual, self.weight, self.eps)

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        """The norm of x alone, which is left as it is."""
        return self.ops.rms_norm(x, self.weight, self.eps)

    def targets(self) -> dict[str, list[Target]]:
        """The weight, whole."""
        return {f"{self.name}.weight": [Target(self.weight, tuple(self.weight.shape))]}


class WideRMSNorm(nn.Module):
    """RMS norm over all heads of a projection at once, of which each rank has some.

    Where several ranks hold copies of a head (fewer KV heads than ranks), its squares are counted once.
    """

    def __init__(self, build: BuildContext, name: str, size: int, keep: slice) -> None:
        """`size`: features on all ranks, of which this one has `keep`."""
        super().__init__()
        self.ops = build.ops
        self.ranks = build.ranks
        self.name = name
        self.size = size
        self.keep = keep
        self.eps = build.config.norm_eps
        self.weight = build.parameter(keep.stop - keep.start)
        self.copies = len(self.weight) * build.ranks.tp_size // size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not is_shared(self.ranks):
            return self.ops.rms_norm(x, self.weight, self.eps)
        wide = x.float()
        squares = all_reduce(wide.square().sum(-1, keepdim=True), self.ranks) / (self.copies * self.size)
        return (wide * torch.rsqrt(squares + self.eps) * self.weight).to(x.dtype)

    def targets(self) -> dict[str, list[Target]]:
        """The rank's part of the weight."""
        return {f"{self.name}.weight": [Target(self.weight, (self.size,), (self.keep,))]}


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

    def __init__(self, build: BuildContext, name: str, size: int, bias: bool = True) -> None:
        super().__init__()
        self.name = name
        self.shape = (size,)
        self.eps = build.config.norm_eps
        self.weight = build.parameter(size)
        self.bias = build.parameter(size) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.shape, self.weight, self.bias, self.eps)

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        """The same, by the name that RMS norms have for it."""
        return self(x)

    def targets(self) -> dict[str, list[Target]]:
        """Weight and bias, whole."""
        parts = {"weight": self.weight} if self.bias is None else {"weight": self.weight, "bias": self.bias}
        return {f"{self.name}.{key}": [Target(part, self.shape)] for key, part in parts.items()}


class HeadLayerNorm(nn.Module):
    """A layer norm of each head, with a weight of its own and no bias."""

    def __init__(self, build: BuildContext, name: str, kept: range, total: int, dim: int, interleaved: int = 0) -> None:
        """`name`: of a tensor with all heads; or of one for each, `{}` is the head's number. `kept`: the rank's heads.
        `interleaved`: as in `QKVLinear`."""
        super().__init__()
        self.name = name
        self.kept = kept
        self.total = total
        self.dim = dim
        self.arrange = partial(halves, dim, interleaved) if interleaved else None
        self.eps = build.config.norm_eps
        self.weight = build.parameter(len(kept), dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(-1, (len(self.kept), self.dim)).float()
        return (F.layer_norm(heads, (self.dim,), None, None, self.eps) * self.weight).flatten(-2).to(x.dtype)

    def targets(self) -> dict[str, list[Target]]:
        """The weights of the rank's heads."""
        if "{}" in self.name:
            own = dict(zip(self.kept, self.weight, strict=True))
            return {
                self.name.format(head): [Target(own[head], (self.dim,))] if head in own else []
                for head in range(self.total)
            }
        keep = (slice(self.kept.start, self.kept.stop),)
        arrange = self.arrange
        reorder = None if arrange is None else lambda rows: arrange(rows.flatten()).view_as(rows)
        return {self.name: [Target(self.weight, (self.total, self.dim), keep, reorder)]}


def halves(dim: int, rotary: int, rows: torch.Tensor) -> torch.Tensor:
    """Rows of heads with the first `rotary` of each reordered: even ones, then odd ones."""
    heads = rows.unflatten(0, (-1, dim))
    return torch.cat((heads[:, 0:rotary:2], heads[:, 1:rotary:2], heads[:, rotary:]), dim=1).flatten(0, 1)
