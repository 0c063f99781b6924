"""Recurrent layers: gated delta net and Mamba 2, between their input and output products.

Heads are split over the tensor-parallel ranks, and with them states, convolution channels and gates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quire.distributed.collectives import all_reduce, is_shared
from quire.errors import ConfigError
from quire.kernels.states import DeltaNet, Mamba, Mamba2, ShortConv
from quire.layers.attention.base import AttentionInputs
from quire.layers.build_context import BuildContext
from quire.layers.caches import StateCache, StatePart, StateView
from quire.layers.linear import FusedLinear, FusedPart, RowParallelLinear
from quire.loading.weights import Target


def _float32(build: BuildContext, size: int) -> nn.Parameter:
    return nn.Parameter(build.memory.zeros((size,), torch.float32), requires_grad=False)


def _negative_exp(log: torch.Tensor) -> torch.Tensor:
    return -log.float().exp()


def _taps_first(weight: torch.Tensor) -> torch.Tensor:
    """[channels, 1, taps] -> [taps, channels]."""
    return weight.squeeze(1).t()


def _cache(heads: int, shape: tuple[int, int], channels: int, taps: int, dtype: torch.dtype) -> StateCache:
    """A state for each head, and the ring of the convolution's inputs in pieces of some channels."""
    piece = math.gcd(*shape)
    ring = (taps, piece)  # taps - 1 inputs before a token, and the token's own
    return StateCache((StatePart(heads, shape, torch.float32), StatePart(channels // piece, ring, dtype)))


def _size(kept: slice) -> int:
    return kept.stop - kept.start


def kept_rows(starts: Sequence[int], keeps: Sequence[slice]) -> list[slice]:
    """Parts of a whole that begin at `starts`, of which a rank keeps some: as slices of the whole."""
    return [slice(start + keep.start, start + keep.stop) for start, keep in zip(starts, keeps, strict=True)]


class Recurrence(nn.Module):
    """What all kinds have: the weights of the convolution."""

    group = 0
    """The cache group that the states are in."""
    conv_name = "conv1d"
    """Of the convolution in checkpoints."""
    spec: DeltaNet | Mamba | Mamba2 | ShortConv

    @property
    def in_width(self) -> int:
        """Features of the input product."""
        return self.spec.in_width

    @property
    def shape(self) -> tuple[object, ...]:
        """Equal for layers that the same kernels serve."""
        return (type(self).__name__, *self.spec.sizes, tuple(self.conv.shape), self.conv.dtype)

    def __init__(
        self, build: BuildContext, layer: int, taps: int, kept: Sequence[slice], total: int, bias: bool = False
    ) -> None:
        """kept: the convolution's channels of this rank, out of `total`."""
        super().__init__()
        self.ops = build.ops
        self.layer = layer
        self.kept = kept
        self.total = total
        channels = sum(_size(keep) for keep in kept)
        self.conv = build.parameter(taps, channels)
        self.bias = build.parameter(channels) if bias else None

    def targets(self) -> dict[str, list[Target]]:
        """The rank's channels."""
        taps = len(self.conv)
        collected: dict[str, list[Target]] = {}
        start = 0
        for keep in self.kept:
            stop = start + _size(keep)
            weight = Target(self.conv[:, start:stop], (self.total, 1, taps), (keep,), _taps_first)
            collected.setdefault(f"{self.conv_name}.weight", []).append(weight)
            if self.bias is not None:
                bias = Target(self.bias[start:stop], (self.total,), (keep,))
                collected.setdefault(f"{self.conv_name}.bias", []).append(bias)
            start = stop
        return collected


class _HeadRecurrence(Recurrence):
    """With the decay and the bias of the time step of each head."""

    def __init__(
        self,
        build: BuildContext,
        layer: int,
        taps: int,
        kept: Sequence[slice],
        total: int,
        bias: bool,
        heads: slice,
        all_heads: int,
    ) -> None:
        """heads: those of this rank."""
        super().__init__(build, layer, taps, kept, total, bias)
        self.heads = heads
        self.all_heads = all_heads
        self.decay = _float32(build, _size(heads))
        self.dt_bias = _float32(build, _size(heads))

    def targets(self) -> dict[str, list[Target]]:
        """The rank's channels and heads."""
        return super().targets() | {
            "A_log": [Target(self.decay, (self.all_heads,), (self.heads,), _negative_exp)],
            "dt_bias": [Target(self.dt_bias, (self.all_heads,), (self.heads,))],
        }


class DeltaNetHeads:
    """The heads of a gated delta net that this rank has, as slices of the rows of whole projections."""

    def __init__(self, build: BuildContext, key_heads: int, value_heads: int, key_dim: int, value_dim: int) -> None:
        if value_heads % key_heads:
            raise ConfigError(
                f"{value_heads} value heads cannot share {key_heads} key heads", "linear_num_value_heads", value_heads
            )
        self.all_key_heads, self.all_value_heads = key_heads, value_heads
        self.key_dim, self.value_dim = key_dim, value_dim
        keys = build.ranks.slice(key_heads, "key heads of the delta net")
        repeat = value_heads // key_heads
        self.key = keys
        self.value = slice(keys.start * repeat, keys.stop * repeat)
        self.key_rows = slice(keys.start * key_dim, keys.stop * key_dim)
        self.value_rows = slice(self.value.start * value_dim, self.value.stop * value_dim)

    @property
    def key_size(self) -> int:
        """Features of q, and of k, on all ranks."""
        return self.all_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Features of v, and of z, on all ranks."""
        return self.all_value_heads * self.value_dim

    def qkv_rows(self) -> list[slice]:
        """The rank's rows of q, k and v in a matrix that has all q, then all k, then all v."""
        starts = (0, self.key_size, 2 * self.key_size)
        return kept_rows(starts, (self.key_rows, self.key_rows, self.value_rows))

    def cache(self, taps: int, dtype: torch.dtype) -> StateCache:
        """What a row keeps on this rank. `dtype`: of the activations."""
        channels = 2 * _size(self.key_rows) + _size(self.value_rows)
        return _cache(_size(self.value), (self.key_dim, self.value_dim), channels, taps, dtype)

    def qkvz_by_head(self, rows: torch.Tensor) -> torch.Tensor:
        """q | k | v | z of the rank's heads, from rows that are ordered by key head: its q, k, v and z."""
        repeat = self.all_value_heads // self.all_key_heads
        widths = [self.key_dim, self.key_dim, repeat * self.value_dim, repeat * self.value_dim]
        parts = rows.unflatten(0, (-1, sum(widths))).split(widths, dim=1)
        return torch.cat([part.flatten(0, 1) for part in parts])

    def ba_by_head(self, rows: torch.Tensor) -> torch.Tensor:
        """b | a of the rank's heads, from rows that are ordered by key head: its b and a."""
        repeat = self.all_value_heads // self.all_key_heads
        return torch.cat([part.flatten(0, 1) for part in rows.unflatten(0, (-1, 2 * repeat)).split(repeat, dim=1)])


class DeltaNetRecurrence(_HeadRecurrence):
    """Convolution, gates, gated delta rule and gated norm; see `DeltaNet`."""

    spec: DeltaNet

    def __init__(self, build: BuildContext, heads: DeltaNetHeads, layer: int, taps: int) -> None:
        """`layer`: its index in the whole model."""
        total = 2 * heads.key_size + heads.value_size
        super().__init__(build, layer, taps, heads.qkv_rows(), total, False, heads.value, heads.all_value_heads)
        self.norm = build.parameter(heads.value_dim)
        self.spec = DeltaNet(
            _size(heads.key),
            _size(heads.value),
            heads.key_dim,
            heads.value_dim,
            self.conv,
            self.decay,
            self.dt_bias,
            self.norm,
            build.config.norm_eps,
        )

    def forward(self, projected: torch.Tensor, states: StateView, inputs: AttentionInputs) -> torch.Tensor:
        """[tokens, value heads * value_dim] from the products [tokens, q | k | v | z | b | a]."""
        return self.ops.delta_net(projected, self.spec, states, inputs.of(self.group))

    def targets(self) -> dict[str, list[Target]]:
        """The rank's channels and heads; the norm, which all heads share."""
        return super().targets() | {"norm.weight": [Target(self.norm, tuple(self.norm.shape))]}


class Mamba2Heads:
    """The heads and groups of a Mamba 2 mixer that this rank has.

    With fewer groups than ranks, several ranks hold the same one.
    """

    def __init__(self, build: BuildContext, heads: int, groups: int, head_dim: int, state_dim: int) -> None:
        if heads % groups:
            raise ConfigError(f"{heads} Mamba heads cannot share {groups} groups", "n_groups", groups)
        ranks = build.ranks
        self.all_heads, self.all_groups, self.head_dim, self.state_dim = heads, groups, head_dim, state_dim
        self.heads = ranks.slice(heads, "Mamba heads")
        if groups >= ranks.tp_size:
            self.groups = ranks.slice(groups, "Mamba groups")
        else:
            first = self.heads.start * groups // heads
            if (self.heads.stop - 1) * groups // heads != first:
                raise ConfigError(
                    f"{groups} Mamba groups cannot be split evenly over {ranks.tp_size} tensor-parallel ranks",
                    "tensor_parallel_size",
                    ranks.tp_size,
                )
            self.groups = slice(first, first + 1)
        self.inner = slice(self.heads.start * head_dim, self.heads.stop * head_dim)
        self.shared = slice(self.groups.start * state_dim, self.groups.stop * state_dim)

    @property
    def inner_size(self) -> int:
        """Features of x, and of the gate, on all ranks."""
        return self.all_heads * self.head_dim

    @property
    def shared_size(self) -> int:
        """Features of B, and of C, on all ranks."""
        return self.all_groups * self.state_dim

    def channels(self, first: int = 0) -> list[slice]:
        """The rank's channels of x, B and C where all of them begin at `first`."""
        starts = (first, first + self.inner_size, first + self.inner_size + self.shared_size)
        return kept_rows(starts, (self.inner, self.shared, self.shared))

    def cache(self, taps: int, dtype: torch.dtype) -> StateCache:
        """What a row keeps on this rank. `dtype`: of the activations."""
        channels = _size(self.inner) + 2 * _size(self.shared)
        return _cache(_size(self.heads), (self.state_dim, self.head_dim), channels, taps, dtype)

    def parts(self, name: str) -> list[FusedPart]:
        """The rank's rows of the input projection: z | x | B | C | dt."""
        after = 2 * self.inner_size + 2 * self.shared_size
        total = after + self.all_heads
        last = slice(after + self.heads.start, after + self.heads.stop)
        return [FusedPart(name, total, keep) for keep in (self.inner, *self.channels(self.inner_size), last)]


class Mamba2Recurrence(_HeadRecurrence):
    """Convolution, selective scan, gate and norm; see `Mamba2`."""

    spec: Mamba2

    def __init__(
        self,
        build: BuildContext,
        heads: Mamba2Heads,
        layer: int,
        taps: int,
        bias: bool,
        dt_limit: tuple[float, float],
        norm_groups: int,
    ) -> None:
        """`norm_groups`: equal parts of the inner features that are normed each by itself; 1: all at once."""
        total = heads.inner_size + 2 * heads.shared_size
        super().__init__(build, layer, taps, heads.channels(), total, bias, heads.heads, heads.all_heads)
        self.ranks = build.ranks
        self.all_inner, self.inner = heads.inner_size, heads.inner
        if norm_groups > 1 and norm_groups % build.ranks.tp_size:
            raise ConfigError(
                f"a norm over {norm_groups} groups cannot be split over {build.ranks.tp_size} ranks",
                "tensor_parallel_size",
                build.ranks.tp_size,
            )
        self.norm_groups = max(norm_groups // build.ranks.tp_size, 1)
        self.norm_over_ranks = norm_groups == 1 and is_shared(build.ranks)
        self.eps = build.config.norm_eps
        self.skip = _float32(build, _size(heads.heads))
        self.norm = build.parameter(_size(heads.inner))
        self.spec = Mamba2(
            _size(heads.heads),
            _size(heads.groups),
            heads.head_dim,
            heads.state_dim,
            self.conv,
            self.bias,
            self.decay,
            self.dt_bias,
            self.skip,
            dt_limit,
        )

    def forward(self, projected: torch.Tensor, states: StateView, inputs: AttentionInputs) -> torch.Tensor:
        """[tokens, heads * head_dim] from the products [tokens, z | x | B | C | dt]."""
        raw = self.ops.mamba2(projected, self.spec, states, inputs.of(self.group))
        gate = projected[:, : self.spec.width]
        if not self.norm_over_ranks:
            return self.ops.gated_norm(raw, gate, self.norm, self.norm_groups, self.eps)
        gated = raw.float() * nn.functional.silu(gate.float())
        squares = all_reduce(gated.square().sum(-1, keepdim=True), self.ranks) / self.all_inner
        return (gated * torch.rsqrt(squares + self.eps) * self.norm).to(raw.dtype)

    def targets(self) -> dict[str, list[Target]]:
        """The rank's channels and heads."""
        return super().targets() | {
            "D": [Target(self.skip, (self.all_heads,), (self.heads,))],
            "norm.weight": [Target(self.norm, (self.all_inner,), (self.inner,))],
        }


@dataclass(frozen=True)
class Mamba2Settings:
    """The sizes of a model's Mamba 2 mixers; families name the fields of their configs differently."""

    heads: int
    groups: int
    head_dim: int
    state_dim: int
    taps: int
    conv_bias: bool
    bias: bool
    """Of the input and output products."""
    dt_limit: tuple[float, float]
    norm_groups: int
    """Equal parts of the inner features that are normed each by itself."""

    def of_rank(self, build: BuildContext) -> Mamba2Heads:
        """The heads of this rank."""
        return Mamba2Heads(build, self.heads, self.groups, self.head_dim, self.state_dim)

    def cache(self, build: BuildContext) -> StateCache:
        """What a row keeps in a layer on this rank."""
        return self.of_rank(build).cache(self.taps, build.dtype)


def time_step_limit(raw: Mapping[str, Any]) -> tuple[float, float]:
    """The least and largest time step in a config, where JSON's lack of an infinity is worked around in two ways."""
    limits = raw.get("time_step_limit") or (0.0, "inf")
    low, high = (each["__float__"] if isinstance(each, Mapping) else each for each in limits)
    return float(low), float(high)


class Mamba2Mixer(nn.Module):
    """A Mamba 2 mixer with its input and output products."""

    def __init__(self, build: BuildContext, layer: int, settings: Mamba2Settings) -> None:
        super().__init__()
        size = build.config.hidden_size
        heads = settings.of_rank(build)
        self.in_proj = FusedLinear(build, size, heads.parts("in_proj"), settings.bias)
        self.recurrence = Mamba2Recurrence(
            build, heads, layer, settings.taps, settings.conv_bias, settings.dt_limit, settings.norm_groups
        )
        self.out_proj = RowParallelLinear(build, "out_proj", heads.inner_size, size, settings.bias)

    def forward(self, projected: torch.Tensor, states: StateView, inputs: AttentionInputs) -> torch.Tensor:
        """What `out_proj` takes, from what `in_proj` gives."""
        return self.recurrence(projected, states, inputs)
