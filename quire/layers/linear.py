"""Matrix products split over tensor-parallel ranks.

Column-parallel layers keep some of the output features, row-parallel ones some of the input features and sum their
results over the ranks: column then row costs one all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from quire.distributed.collectives import all_reduce, is_shared
from quire.distributed.groups import Ranks
from quire.errors import ConfigError
from quire.kernels.weights.base import Weight
from quire.layers.build_context import BuildContext
from quire.layers.matrices import MatrixPart, formats_of, make_matrix, matrix_targets
from quire.layers.norm import RMSNorm, halves
from quire.loading.weights import AnyTarget, Target
from quire.quantization.formats.base import Format
from quire.quantization.formats.on_load import OnLoadFormat


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
    activation = "silu"
    normed = True
    """Whether its input comes from a norm that is fused with it (`norm_linear`)."""
    weight: Weight

    def __init__(
        self, build: BuildContext, in_features: int, parts: Sequence[FusedPart], bias: bool, transposed: bool = False
    ) -> None:
        """`transposed`: the checkpoint holds [in, out], as GPT-2's does."""
        super().__init__()
        self.ops = build.ops
        whole = slice(0, in_features)
        self.parts = tuple(
            MatrixPart(part.name, (part.rows, in_features), part.keep, whole, part.arrange, transposed)
            for part in parts
        )
        height = sum(part.height for part in self.parts)
        self.bias = build.parameter(height) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.linear(x, self.weight, self.bias)

    def norm_linear(
        self, norm: RMSNorm, x: torch.Tensor | None, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(the product with the normed stream, the stream); the stream is residual + x, either of which may be None."""
        return self.ops.norm_linear(
            x, residual, norm.weight, norm.eps, self.weight, self.bias, self.gated, self.activation
        )

    def create_weights(self, build: BuildContext, owner: str) -> None:
        """Make the matrix in the formats of its parts."""
        self.formats: list[Format | None] = formats_of(build, owner, self.parts)
        self.weight = make_matrix(build, self.parts, self.formats, sum(part.height for part in self.parts))

    def targets(self) -> dict[str, list[AnyTarget]]:
        """Each part's rows of the weight and of the bias."""
        collected = matrix_targets(self.weight, self.parts, self.formats)
        start = 0
        for part in self.parts:
            stop = start + part.height
            if self.bias is not None:
                bias = Target(self.bias[start:stop], part.shape[:1], (part.rows,), part.arrange)
                collected.setdefault(f"{part.name}.bias", []).append(bias)
            start = stop
        return collected


class ArrangedLinear(FusedLinear):
    """Parts that are reordered (`FusedPart.arrange`): their rows while loading; where these are in few bits, the
    outputs are."""

    order: torch.Tensor | None = None

    def create_weights(self, build: BuildContext, owner: str) -> None:
        """Make the matrix in the formats of its parts."""
        plain = tuple(replace(part, arrange=None) for part in self.parts)
        formats = formats_of(build, owner, plain)
        if any(each is not None and not isinstance(each, OnLoadFormat) for each in formats):
            rows = torch.arange(sum(part.height for part in plain)).split([part.height for part in plain])
            pairs = zip(rows, self.parts, strict=True)
            self.order = torch.cat([part.arrange(own) if part.arrange else own for own, part in pairs]).to(build.device)
            self.parts = plain
        super().create_weights(build, owner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        return out if self.order is None else out[:, self.order]

    def norm_linear(
        self, norm: RMSNorm, x: torch.Tensor | None, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, stream = super().norm_linear(norm, x, residual)
        return (out if self.order is None else out[:, self.order]), stream


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
        return cls(range(query.start, query.stop), kv_heads_of(config.num_kv_heads, ranks), config.head_dim)

    @property
    def rows(self) -> slice:
        """The rows of a whole Q projection that this rank keeps."""
        return slice(self.query.start * self.dim, self.query.stop * self.dim)

    @property
    def kv_rows(self) -> slice:
        """The rows of a whole K or V projection that this rank keeps."""
        return slice(self.kv.start * self.dim, self.kv.stop * self.dim)


def kv_heads_of(total: int, ranks: Ranks) -> range:
    """The rank's share of so many KV heads; if there are more ranks, several hold the same one."""
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
        names: tuple[str, str, str] | str = ("q_proj", "k_proj", "v_proj"),
        interleaved: int = 0,
    ) -> None:
        """`names`: of three matrices, or of one that has all q, then all k, then all v heads. `interleaved`: the
        first dimensions of each head, if dimension 2i is rotated with 2i + 1: q and k are reordered to rotate i with
        i + half, as the kernels do. Their rows are, while loading; where these are in few bits, the outputs are."""
        config = build.config
        heights = [config.num_heads * heads.dim, *[config.num_kv_heads * heads.dim] * 2]
        super().__init__(
            build, config.hidden_size, _parts(names, heights, (heads.rows, heads.kv_rows, heads.kv_rows)), bias
        )
        self.heads = heads
        self.interleaved = interleaved
        self.order: torch.Tensor | None = None

    def create_weights(self, build: BuildContext, owner: str) -> None:
        """Make the matrix in the formats of its parts."""
        if self.interleaved:
            formats = formats_of(build, owner, self.parts)
            is_one = len(self.parts) == 1
            if is_one or any(each is not None and not isinstance(each, OnLoadFormat) for each in formats):
                rotated = (len(self.heads.query) + len(self.heads.kv)) * self.heads.dim
                rows = torch.arange(rotated + len(self.heads.kv) * self.heads.dim, device=build.device)
                rows[:rotated] = halves(self.heads.dim, self.interleaved, rows[:rotated])
                self.order = rows
            else:
                arrange = partial(halves, self.heads.dim, self.interleaved)
                *rotated_parts, v = self.parts
                self.parts = (*(replace(part, arrange=arrange) for part in rotated_parts), v)
        super().create_weights(build, owner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        return out if self.order is None else out[:, self.order]

    def norm_linear(
        self, norm: RMSNorm, x: torch.Tensor | None, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, stream = super().norm_linear(norm, x, residual)
        return (out if self.order is None else out[:, self.order]), stream


def _parts(names: Sequence[str] | str, heights: Sequence[int], keeps: Sequence[slice]) -> list[FusedPart]:
    """Parts that are matrices of their own, or consecutive rows of one."""
    if not isinstance(names, str):
        return [FusedPart(*part) for part in zip(names, heights, keeps, strict=True)]
    total = sum(heights)
    if all(keep == slice(0, height) for keep, height in zip(keeps, heights, strict=True)):
        return [FusedPart(names, total, slice(0, total))]
    starts = [sum(heights[:i]) for i in range(len(heights))]
    return [
        FusedPart(names, total, slice(start + keep.start, start + keep.stop))
        for start, keep in zip(starts, keeps, strict=True)
    ]


class GateUpLinear(FusedLinear):
    """A gated MLP's two input projections as one product: the rank's gate features, then its up features.

    Yields silu(gate) * up, or another activation of the two.
    """

    gated = True

    def __init__(
        self,
        build: BuildContext,
        bias: bool,
        names: tuple[str, str] | str = ("gate_proj", "up_proj"),
        width: int | None = None,
        activation: str = "silu",
    ) -> None:
        """`names`: of two matrices, or of one that has both. `width`: the MLP's, if not the model's intermediate_size.
        `activation`: one of `gates.GATES`."""
        self.activation = activation
        width = width or build.config.intermediate_size
        keep = build.ranks.slice(width, "MLP features")
        super().__init__(build, build.config.hidden_size, _parts(names, (width, width), (keep, keep)), bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.gated_linear(x, self.weight, self.bias, self.activation)


class RowParallelLinear(nn.Module):
    """One matrix; each rank holds an equal share of the input features, and the partial results are summed."""

    weight: Weight

    def __init__(
        self, build: BuildContext, name: str, in_features: int, out_features: int, bias: bool, transposed: bool = False
    ) -> None:
        super().__init__()
        self.ops = build.ops
        self.ranks = build.ranks
        columns = build.ranks.slice(in_features, f"{name} inputs")
        self.part = MatrixPart(
            name, (out_features, in_features), slice(0, out_features), columns, transposed=transposed
        )
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

    def create_weights(self, build: BuildContext, owner: str) -> None:
        """Make the matrix in its format."""
        self.formats: list[Format | None] = formats_of(build, owner, [self.part])
        self.weight = make_matrix(build, [self.part], self.formats, self.part.height)

    def targets(self) -> dict[str, list[AnyTarget]]:
        """The rank's columns of the weight, and the whole bias."""
        collected = matrix_targets(self.weight, [self.part], self.formats)
        if self.bias is not None:
            collected[f"{self.part.name}.bias"] = [Target(self.bias, tuple(self.bias.shape))]
        return collected


class ReplicatedLinear(nn.Module):
    """One matrix, whole on every rank."""

    weight: Weight

    def __init__(self, build: BuildContext, name: str, in_features: int, out_features: int) -> None:
        super().__init__()
        self.ops = build.ops
        self.part = MatrixPart(name, (out_features, in_features), slice(0, out_features), slice(0, in_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.linear(x, self.weight)

    def create_weights(self, build: BuildContext, owner: str) -> None:
        """Make the matrix in its format."""
        self.formats: list[Format | None] = formats_of(build, owner, [self.part])
        self.weight = make_matrix(build, [self.part], self.formats, self.part.height)

    def targets(self) -> dict[str, list[AnyTarget]]:
        """The weight, whole."""
        return matrix_targets(self.weight, [self.part], self.formats)
