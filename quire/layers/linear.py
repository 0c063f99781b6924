"""Matrix products split over tensor-parallel ranks.

Column-parallel layers keep some of the output features, row-parallel ones some of the input features and sum their
results over the ranks: column then row costs one all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from quire.distributed.collectives import all_reduce, is_shared
from quire.distributed.groups import Ranks
from quire.errors import ConfigError
from quire.layers.build_context import BuildContext
from quire.layers.norm import RMSNorm
from quire.loading.weights import Target


@dataclass(frozen=True)
class FusedPart:
    """Output rows of a fused weight, and the checkpoint matrix they come from."""

    name: str
    """The matrix, relative to the module that owns the layer: `q_proj` for `q_proj.weight` and `q_proj.bias`."""
    rows: int
    """Output features of the whole matrix."""
    keep: slice
    """Those this rank keeps."""
    arrange: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Reorders the kept rows of the weight or of the bias."""


class FusedLinear(nn.Module):
    """Parts of several checkpoint matrices that read the same input, as one matrix [sum of kept rows, in]."""

    gated = False

    def __init__(
        self, build: BuildContext, in_features: int, parts: Sequence[FusedPart], bias: bool, transposed: bool = False
    ) -> None:
        """`transposed`: the checkpoint holds [in, out], as GPT-2's does."""
        super().__init__()
        self.ops = build.ops
        self.parts = tuple(parts)
        self.transposed = transposed
        height = sum(part.keep.stop - part.keep.start for part in parts)
        self.weight = build.parameter(height, in_features)
        self.bias = build.parameter(height) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.linear(x, self.weight, self.bias)

    def norm_linear(
        self, norm: RMSNorm, x: torch.Tensor | None, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(the product with the normed stream, the stream); the stream is residual + x, either of which may be None."""
        return self.ops.norm_linear(x, residual, norm.weight, norm.eps, self.weight, self.bias, self.gated)

    def targets(self) -> dict[str, list[Target]]:
        """Each part's rows of the weight and of the bias."""
        collected: dict[str, list[Target]] = {}
        width = self.weight.shape[1]
        start = 0
        for part in self.parts:
            stop = start + part.keep.stop - part.keep.start
            weight = self.weight[start:stop]
            if self.transposed:
                target = Target(weight, (width, part.rows), (slice(None), part.keep), _transpose)
            else:
                target = Target(weight, (part.rows, width), (part.keep,), part.arrange)
            collected.setdefault(f"{part.name}.weight", []).append(target)
            if self.bias is not None:
                bias = Target(self.bias[start:stop], (part.rows,), (part.keep,), part.arrange)
                collected.setdefault(f"{part.name}.bias", []).append(bias)
            start = stop
        return collected


class ColumnParallelLinear(FusedLinear):
    """One matrix; each rank computes an equal share of the output features."""

    def __init__(
        self, build: BuildContext, name: str, in_features: int, out_features: int, bias: bool, transposed: bool = False
    ) -> None:
        part = FusedPart(name, out_features, build.ranks.slice(out_features, f"{name} outputs"))
        super().__init__(build, in_features, (part,), bias, transposed)


@dataclass(frozen=True)
class Heads:
    """The query and KV heads of this rank, as ranges of the whole model's heads."""

    query: range
    kv: range
    dim: int

    @classmethod
    def of_rank(cls, build: BuildContext) -> Heads:
        """An equal share of both; if there are more ranks than KV heads, several ranks hold the same one."""
        config, ranks = build.config, build.ranks
        query = ranks.slice(config.num_heads, "attention heads")
        return cls(range(query.start, query.stop), _kv_heads(config.num_kv_heads, ranks), config.head_dim)

    @property
    def rows(self) -> slice:
        """The rows of a whole Q projection that this rank keeps."""
        return slice(self.query.start * self.dim, self.query.stop * self.dim)

    @property
    def kv_rows(self) -> slice:
        """The rows of a whole K or V projection that this rank keeps."""
        return slice(self.kv.start * self.dim, self.kv.stop * self.dim)


def _kv_heads(total: int, ranks: Ranks) -> range:
    if total >= ranks.tp_size:
        share = ranks.slice(total, "KV heads")
        return range(share.start, share.stop)
    if ranks.tp_size % total:
        raise ConfigError(
            f"{total} KV heads cannot be split evenly over {ranks.tp_size} tensor-parallel ranks; "
            f"use a multiple or a divisor of {total}",
            "tensor_parallel_size",
            ranks.tp_size,
        )
    head = ranks.tp_rank * total // ranks.tp_size
    return range(head, head + 1)


class QKVLinear(FusedLinear):
    """Query, key and value projections as one product: the rank's q heads, then its k heads, then its v heads."""

    def __init__(
        self,
        build: BuildContext,
        heads: Heads,
        bias: bool,
        names: tuple[str, str, str] = ("q_proj", "k_proj", "v_proj"),
    ) -> None:
        config = build.config
        q, k, v = names
        rows, kv_rows = config.num_heads * heads.dim, config.num_kv_heads * heads.dim
        parts = (
            FusedPart(q, rows, heads.rows),
            FusedPart(k, kv_rows, heads.kv_rows),
            FusedPart(v, kv_rows, heads.kv_rows),
        )
        super().__init__(build, config.hidden_size, parts, bias)


class GateUpLinear(FusedLinear):
    """A gated MLP's two input projections as one product: the rank's gate features, then its up features.

    Yields silu(gate) * up.
    """

    gated = True

    def __init__(
        self,
        build: BuildContext,
        bias: bool,
        names: tuple[str, str] = ("gate_proj", "up_proj"),
        width: int | None = None,
    ) -> None:
        """`width`: the MLP's, if not the model's intermediate_size."""
        width = width or build.config.intermediate_size
        keep = build.ranks.slice(width, "MLP features")
        super().__init__(build, build.config.hidden_size, [FusedPart(name, width, keep) for name in names], bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.gated_linear(x, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """One matrix; each rank holds an equal share of the input features, and the partial results are summed."""

    def __init__(
        self, build: BuildContext, name: str, in_features: int, out_features: int, bias: bool, transposed: bool = False
    ) -> None:
        super().__init__()
        self.ops = build.ops
        self.ranks = build.ranks
        self.name = name
        self.shape = (in_features, out_features) if transposed else (out_features, in_features)
        self.keep = build.ranks.slice(in_features, f"{name} inputs")
        self.transposed = transposed
        self.weight = build.parameter(out_features, build.ranks.split(in_features, f"{name} inputs"))
        self.bias = build.parameter(out_features) if bias else None
        # Every rank holds the bias, one adds it: the sum over ranks must have it once.
        self.adds_bias = bias and build.ranks.tp_rank == 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return all_reduce(self.ops.linear(x, self.weight, self.bias if self.adds_bias else None), self.ranks)

    def linear_add(self, stream: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        """The product with x, for the caller to add to the stream; None if it was added in place."""
        if is_shared(self.ranks):
            return self(x)
        return self.ops.linear_add(stream, x, self.weight, self.bias)

    def targets(self) -> dict[str, list[Target]]:
        """The rank's columns of the weight, and the whole bias."""
        if self.transposed:
            weight = Target(self.weight, self.shape, (self.keep,), _transpose)
        else:
            weight = Target(self.weight, self.shape, (slice(None), self.keep))
        collected = {f"{self.name}.weight": [weight]}
        if self.bias is not None:
            collected[f"{self.name}.bias"] = [Target(self.bias, tuple(self.bias.shape))]
        return collected


class ReplicatedLinear(nn.Module):
    """One matrix, whole on every rank."""

    def __init__(self, build: BuildContext, name: str, in_features: int, out_features: int) -> None:
        super().__init__()
        self.ops = build.ops
        self.name = name
        self.weight = build.parameter(out_features, in_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.linear(x, self.weight)

    def targets(self) -> dict[str, list[Target]]:
        """The weight, whole."""
        return {f"{self.name}.weight": [Target(self.weight, tuple(self.weight.shape))]}


def _transpose(weight: torch.Tensor) -> torch.Tensor:
    return weight.t()
