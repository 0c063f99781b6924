"""Layers that compute the rows of a step with different LoRA adapters.

An adapter lies in a *slot*. Every adapted layer has the low-rank matrices of all slots; a pass says which slot each of
its tokens has (`AdapterScope`). A pass without adapters takes the layer's own methods. One with adapters takes the
product without its norm fused, and adds the rows' low-rank products before the activation.

`attach_slots` replaces the methods of a model's layers: without adapters nothing here is part of a model.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quire.distributed.collectives import all_reduce, is_shared
from quire.errors import AdapterError
from quire.kernels.adapters import SlotLowRank, SlotTokens
from quire.kernels.weights.base import QuantizedWeight, Weight
from quire.layers.linear import FusedLinear, ReplicatedLinear, RowParallelLinear
from quire.layers.matrices import MatrixPart
from quire.layers.norm import RMSNorm

NORM_VALUES = 1 << 24
"""Values of a matrix that are widened to float32 at a time, to norm its rows."""


class AdapterScope:
    """What the adapted layers of a model read during a pass."""

    tokens: SlotTokens | None = None
    """The slot of each token that the layers are given; None: no token has an adapter."""


@dataclass(frozen=True)
class SlotSpace:
    """The size of the slots."""

    slots: int
    rank: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class MatrixChange:
    """What one adapter does to one matrix of a checkpoint: y += weight * (b @ (a @ x) + bias). Shapes are those of the
    whole matrix, on whichever rank."""

    a: torch.Tensor
    """[rank, in]"""
    b: torch.Tensor
    """[out, rank], with the adapter's scale."""
    bias: torch.Tensor | None = None
    magnitude: torch.Tensor | None = None
    """[out] (DoRA): the changed matrix has rows of these lengths."""
    weight: float = 1.0
    own_bias: torch.Tensor | None = None
    """[out]: a bias in place of the matrix's own."""


@dataclass(frozen=True)
class MatrixSlot:
    """The content of one slot of a layer."""

    a: torch.Tensor
    b: torch.Tensor
    bias: torch.Tensor | None
    factor: torch.Tensor | None
    """[out]: what the layer's own product is multiplied with, its bias excepted."""

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [tensor for tensor in (self.a, self.b, self.bias, self.factor) if tensor is not None]


class MatrixSlots:
    """The slots of one layer: low-rank changes of its matrix, or of the parts of a fused one."""

    bias: torch.Tensor | None = None
    """[slots + 1, out], once an adapter has one; the last row is that of tokens without an adapter…"""
    factor: torch.Tensor | None = None
    """…and the same of `MatrixSlot.factor`."""

    def __init__(self, layer: Any, parts: Sequence[MatrixPart], scope: AdapterScope, space: SlotSpace) -> None:
        self.layer = layer
        self.ops = layer.ops
        self.parts = parts
        self.scope = scope
        self.space = space
        self.order: torch.Tensor | None = getattr(layer, "order", None)
        self.bounds = tuple(itertools.accumulate((part.height for part in parts), initial=0))
        width, height = parts[0].width, self.bounds[-1]
        self.a = torch.zeros(space.slots, len(parts) * space.rank, width, dtype=space.dtype, device=space.device)
        self.b = torch.zeros(space.slots, space.rank, height, dtype=space.dtype, device=space.device)
        self.plain_forward: Callable[[torch.Tensor], torch.Tensor] = layer.forward
        layer.forward = self.forward

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + self.b.nbytes

    # Computing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scope.tokens is None:
            return self.plain_forward(x)
        return self.changed(x.reshape(-1, x.shape[-1]), self.scope.tokens).view(*x.shape[:-1], -1)

    def changed(self, x: torch.Tensor, tokens: SlotTokens) -> torch.Tensor:
        """The layer's result for x [tokens, in]."""
        layer = self.layer
        return self.product(x, layer.weight, getattr(layer, "bias", None), tokens)

    def product(
        self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, tokens: SlotTokens, with_bias: bool = True
    ) -> torch.Tensor:
        """The product with the matrix and the adapters' changes. `with_bias`: of adapters."""
        factor, added = self.factor, self.bias  # once: a thread may be filling another slot
        out = self.ops.linear(x, weight, bias if factor is None else None)
        if self.order is not None:
            out = out[:, self.order].contiguous()
        if factor is not None:
            out = (out * factor[tokens.index]).to(x.dtype)
            if bias is not None:
                out += bias if self.order is None else bias[self.order]
        if added is not None and with_bias:
            out += added[tokens.index]
        self.ops.add_low_rank(out, x, self.low_rank(tokens))
        return out

    def low_rank(self, tokens: SlotTokens) -> SlotLowRank:
        """The slots' low-rank changes, for these tokens."""
        return SlotLowRank(self.a, self.b, tokens, self.bounds)

    @property
    def is_plain(self) -> bool:
        """Whether the slots have low-rank changes alone: no biases, no DoRA, and rows in their order."""
        return self.bias is None and self.factor is None and self.order is None

    # Filling

    def prepare(self, changes: Sequence[Sequence[MatrixChange]]) -> MatrixSlot:
        """A slot's content, in host memory. `changes`: for each part those of the adapters, none if it has none."""
        rank, dtype = self.space.rank, self.space.dtype
        a, b = torch.zeros(self.a.shape[1:], dtype=dtype), torch.zeros(rank, self.bounds[-1], dtype=dtype)
        every = [change for each in changes for change in each]
        has_bias = any(change.bias is not None or change.own_bias is not None for change in every)
        bias = torch.zeros(b.shape[1]) if has_bias else None
        factor = torch.ones(b.shape[1]) if any(change.magnitude is not None for change in every) else None
        for index, (part, each) in enumerate(zip(self.parts, changes, strict=True)):
            rows, at = slice(self.bounds[index], self.bounds[index + 1]), 0
            for change in each:
                own = slice(at, at + len(change.a))
                at = own.stop
                first = change.a[:, part.columns]
                second = _arranged(part, change.b[part.rows].float())
                weight = change.weight
                if change.magnitude is not None:
                    length = _arranged(part, change.magnitude.float()[part.rows])
                    share = length / self._row_norms(rows, first.float(), second)
                    assert factor is not None
                    factor[rows] += weight * (share - 1)
                    second = second * share[:, None]
                a[index * rank + own.start : index * rank + own.stop] = first
                b[own, rows] = (second if weight == 1 else weight * second).t()
                for given, base in ((change.bias, 0.0), (change.own_bias, self._bias(rows))):
                    if given is not None:
                        assert bias is not None
                        bias[rows] += weight * (_arranged(part, given.float()[part.rows]) - base)
        if self.order is not None:
            order = self.order.cpu()
            b, bias, factor = (None if t is None else t[..., order] for t in (b, bias, factor))  # type: ignore[assignment]
        return MatrixSlot(a, b, bias, factor)

    def _bias(self, rows: slice) -> torch.Tensor | float:
        """The matrix's own bias."""
        bias = getattr(self.layer, "bias", None)
        return 0.0 if bias is None else bias[rows].float().cpu()

    def _row_norms(self, rows: slice, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Lengths of the rows of W + b a, for these rows of the layer's matrix."""
        if isinstance(self.layer, RowParallelLinear) and is_shared(ranks := self.layer.ranks):
            raise AdapterError(
                f"DoRA of {self.parts[0].name} with tensor_parallel_size {ranks.tp_size} is not implemented: each rank "
                "has only some columns of the matrix, whose rows are normed"
            )
        weight, step = _dense(self.layer.weight), max(1, NORM_VALUES // a.shape[1])
        norms = []
        for start in range(0, rows.stop - rows.start, step):
            part = slice(start, min(start + step, rows.stop - rows.start))
            own = weight[rows.start + part.start : rows.start + part.stop].float()
            norms.append((own + b[part] @ a).norm(dim=1))
        return torch.cat(norms)

    def write(
        self, slot: int, content: MatrixSlot, copy: Callable[[torch.Tensor, torch.Tensor], None]
    ) -> dict[str, torch.Tensor]:
        """Fill a slot. `copy`: (into, from). Returns tables that are new: to be attributes once the copies have ended,
        since steps read them for all slots."""
        copy(self.a[slot], content.a)
        copy(self.b[slot], content.b)
        made = {}
        for name, neutral in (("bias", 0.0), ("factor", 1.0)):
            value, table = getattr(content, name), getattr(self, name)
            if value is None and table is None:
                continue
            if table is None:
                table = torch.full((self.space.slots + 1, self.bounds[-1]), neutral, device=self.space.device)
                made[name] = table = table.to(self.space.dtype) if name == "bias" else table
            copy(table[slot], torch.full((self.bounds[-1],), neutral) if value is None else value)
        return made

    def clear(self, slot: int) -> None:
        """The slot changes nothing."""
        self.b[slot].zero_()
        for table, neutral in ((self.bias, 0.0), (self.factor, 1.0)):
            if table is not None:
                table[slot].fill_(neutral)


class FusedSlots(MatrixSlots):
    """Of a `FusedLinear`, gated or not, with or without a norm before it."""

    def __init__(self, layer: FusedLinear, scope: AdapterScope, space: SlotSpace) -> None:
        super().__init__(layer, layer.parts, scope, space)
        self.plain_norm_linear = layer.norm_linear
        layer.norm_linear = self.norm_linear  # type: ignore[method-assign]

    def changed(self, x: torch.Tensor, tokens: SlotTokens) -> torch.Tensor:
        layer = self.layer
        activation = layer.activation if layer.gated else ""
        if self.is_plain:
            return self.ops.adapted_linear(x, layer.weight, layer.bias, self.low_rank(tokens), activation=activation)[0]
        out = self.product(x, layer.weight, layer.bias, tokens)
        return self.ops.gate_mul(out, activation) if activation else out

    def norm_linear(
        self, norm: RMSNorm, x: torch.Tensor | None, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.scope.tokens is None:
            return self.plain_norm_linear(norm, x, residual)
        if not self.is_plain:
            normed, stream = norm(x, residual)
            return self.changed(normed, self.scope.tokens), stream
        layer, low = self.layer, self.low_rank(self.scope.tokens)
        activation = layer.activation if layer.gated else ""
        out, carried = self.ops.adapted_linear(
            x, layer.weight, layer.bias, low, (norm.weight, norm.eps), residual, activation
        )
        assert carried is not None
        return out, carried


class RowSlots(MatrixSlots):
    """`RowParallelLinear`: a rank's columns of `a`, and `b` whole. The ranks' results are summed with the base's."""

    def __init__(self, layer: RowParallelLinear, scope: AdapterScope, space: SlotSpace) -> None:
        super().__init__(layer, [layer.part], scope, space)
        self.plain_linear_add = layer.linear_add
        layer.linear_add = self.linear_add  # type: ignore[method-assign]

    def changed(self, x: torch.Tensor, tokens: SlotTokens) -> torch.Tensor:
        layer = self.layer
        is_first = layer.ranks.tp_rank == 0  # biases are added once
        bias = layer.bias if layer.adds_bias else None
        if self.is_plain:
            out, _ = self.ops.adapted_linear(x, layer.weight, bias, self.low_rank(tokens))
        else:
            out = self.product(x, layer.weight, bias, tokens, is_first)
        return all_reduce(out, layer.ranks)

    def linear_add(self, stream: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        if self.scope.tokens is None:
            return self.plain_linear_add(stream, x)
        return self.changed(x, self.scope.tokens)


class WholeSlots(MatrixSlots):
    """Of a `ReplicatedLinear`."""

    def __init__(self, layer: ReplicatedLinear, scope: AdapterScope, space: SlotSpace) -> None:
        super().__init__(layer, [layer.part], scope, space)


def make_slots(layer: object, scope: AdapterScope, space: SlotSpace) -> MatrixSlots | None:
    """The slots of a layer, which computes with them from now on; None if it is no product with a matrix."""
    if isinstance(layer, FusedLinear):
        return FusedSlots(layer, scope, space)
    if isinstance(layer, RowParallelLinear):
        return RowSlots(layer, scope, space)
    return WholeSlots(layer, scope, space) if isinstance(layer, ReplicatedLinear) else None


def _arranged(part: MatrixPart, rows: torch.Tensor) -> torch.Tensor:
    return rows if part.arrange is None else part.arrange(rows)


def _dense(weight: Weight) -> torch.Tensor:
    """A matrix in host memory, dequantized."""
    return (weight.dequantize() if isinstance(weight, QuantizedWeight) else weight).cpu()
