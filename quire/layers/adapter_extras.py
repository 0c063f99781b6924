"""What few adapters change besides matrices of layers: embeddings, the head, experts.

These take as much memory as the model's own tables, so that no room is kept for them: a slot has what its adapter
brings. Steps with such rows are launched kernel by kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from quire.distributed.collectives import all_gather_last, all_reduce
from quire.layers.adapters import AdapterScope
from quire.layers.embedding import VocabMatrix
from quire.layers.moe import SparseMLP
from quire.layers.norm import RMSNorm


@dataclass
class TableChange:
    """What a slot changes of a table with a row for each token of the vocabulary: this rank's rows of everything."""

    replaced: torch.Tensor | None = None
    """[rows, hidden]: another table."""
    ids: torch.Tensor | None = None
    """Tokens, as indices of the rank's rows, that have other rows…"""
    rows: torch.Tensor | None = None
    """…[ids, hidden]."""
    low_rank: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """(tall [rows, rank], wide [hidden, rank]) of matrices that are added: tall @ wide.T."""

    def to(self, device: torch.device) -> TableChange:
        replaced, ids, rows = (
            None if tensor is None else tensor.to(device) for tensor in (self.replaced, self.ids, self.rows)
        )
        return TableChange(replaced, ids, rows, [(tall.to(device), wide.to(device)) for tall, wide in self.low_rank])

    @property
    def tensors(self) -> list[torch.Tensor]:
        own = [tensor for tensor in (self.replaced, self.ids, self.rows) if tensor is not None]
        return own + [tensor for pair in self.low_rank for tensor in pair]


class TableSlots:
    """The slots of an embedding or of a head."""

    def __init__(self, layer: VocabMatrix, scope: AdapterScope) -> None:
        self.layer = layer
        self.ops = layer.ops
        self.scope = scope
        self.changes: dict[int, TableChange] = {}
        self.plain_forward = layer.forward
        layer.forward = self.forward

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        out, tokens = self.plain_forward(given), self.scope.tokens
        if tokens is None or not self.changes.keys() & set(tokens.present):
            return out
        out = out.clone()
        flat, given = out.view(-1, out.shape[-1]), given.flatten() if given.dtype is torch.int64 else given
        for slot, index in tokens.groups:
            if slot in self.changes:
                flat[index] = self.changed(given.view(-1, *given.shape[1:])[index], self.changes[slot])
        return out

    def changed(self, given: torch.Tensor, change: TableChange) -> torch.Tensor:
        raise NotImplementedError


class EmbeddingSlots(TableSlots):
    """Of a `VocabEmbedding`."""

    def changed(self, given: torch.Tensor, change: TableChange) -> torch.Tensor:
        kept = self.layer.kept
        local = given - kept.start
        elsewhere = (local < 0) | (local >= len(kept))
        local = local.masked_fill(elsewhere, 0)
        vectors = self.ops.embedding(local, self.layer.weight if change.replaced is None else change.replaced)
        if change.ids is not None and len(change.ids):
            is_own = local[:, None] == change.ids
            vectors = torch.where(is_own.any(1, keepdim=True), change.rows[is_own.long().argmax(1)], vectors)  # type: ignore[index]
        for tall, wide in change.low_rank:
            vectors = vectors + (tall[local] @ wide.t()).to(vectors.dtype)
        return all_reduce(vectors.masked_fill(elsewhere.unsqueeze(-1), 0), self.layer.ranks)


class HeadSlots(TableSlots):
    """Of an `LMHead`."""

    def changed(self, given: torch.Tensor, change: TableChange) -> torch.Tensor:
        local = self.ops.linear(given, self.layer.weight if change.replaced is None else change.replaced)
        if change.ids is not None and len(change.ids):
            local[:, change.ids] = self.ops.linear(given, change.rows)  # type: ignore[arg-type]
        for tall, wide in change.low_rank:
            local = local + ((given.to(wide.dtype) @ wide) @ tall.t()).to(local.dtype)
        return all_gather_last(local, self.layer.ranks)[:, : self.layer.part.shape[0]]


@dataclass
class ExpertChange:
    """What a slot changes of the experts of a layer: (a [experts, rank, in], b [experts, out, rank]), this rank's
    part."""

    gate_up: tuple[torch.Tensor, torch.Tensor] | None = None
    down: tuple[torch.Tensor, torch.Tensor] | None = None
    router: tuple[torch.Tensor, torch.Tensor] | None = None
    """(a [rank, hidden], b [experts, rank])."""

    def to(self, device: torch.device) -> ExpertChange:
        pairs = (self.gate_up, self.down, self.router)
        return ExpertChange(*(None if pair is None else (pair[0].to(device), pair[1].to(device)) for pair in pairs))

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [*(self.gate_up or ()), *(self.down or ()), *(self.router or ())]


class ExpertSlots:
    """The slots of a mixture. The experts of tokens that have a changed one are computed one by one."""

    def __init__(self, layer: SparseMLP, scope: AdapterScope) -> None:
        self.layer = layer
        self.ops = layer.ops
        self.scope = scope
        self.changes: dict[int, ExpertChange] = {}
        self.plain_forward, self.plain_run, self.plain_mix = layer.forward, layer._run, layer.mix
        layer.forward, layer._run = self.forward, self.run  # type: ignore[method-assign]
        layer.mix = self.mix  # type: ignore[method-assign]
        self.is_fused = type(layer).forward is SparseMLP.forward or getattr(layer, "stacked", False)
        """Whether the layer's own pass is one kernel, from norm to sum."""

    @property
    def _is_changed(self) -> bool:
        tokens = self.scope.tokens
        return tokens is not None and bool(self.changes) and not self.changes.keys().isdisjoint(tokens.present)

    def forward(
        self, norm: RMSNorm, x: torch.Tensor | None, residual: torch.Tensor | None, slots: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        if not self.is_fused or not self._is_changed:
            return self.plain_forward(norm, x, residual, slots)
        normed, residual = norm(x, residual)
        return self.layer.mix(normed, slots), residual

    def mix(self, x: torch.Tensor, slots: torch.Tensor | None = None) -> torch.Tensor:
        """`SparseMLP.mix`, with the changes of routers added to their logits."""
        if not self._is_changed:
            return self.plain_mix(x, slots)
        layer, tokens = self.layer, self.scope.tokens
        assert tokens is not None
        logits, routing = self.ops.linear(x, layer.router, layer.variant.router_bias), layer.routing
        for slot, index in tokens.groups:
            if slot in self.changes and (pair := self.changes[slot].router) is not None:
                a, b = pair
                added = ((x[index].to(a.dtype) @ a.t()) @ b.t()).to(logits.dtype)
                logits[index, : len(b)] += added
        weights, experts = self.ops.route(
            logits, routing.top_k, routing.renormalise, layer.counts, layer.padding(slots), layer.rule
        )
        return layer.summed(x, weights, experts)

    def run(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        if not self._is_changed:
            return self.plain_run(x, weights, experts)
        tokens = self.scope.tokens
        assert tokens is not None
        changed = [(index, self.changes[slot]) for slot, index in tokens.groups if slot in self.changes]
        others = experts.clone()
        for index, _ in changed:
            others[index] = -1  # an index that no expert has
        out = self.plain_run(x, weights, others)
        for index, change in changed:
            out[index] = self._changed(x[index], weights[index], experts[index], change)
        return out

    def _changed(
        self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, change: ExpertChange
    ) -> torch.Tensor:
        layer, variant = self.layer, self.layer.variant
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in experts.unique().tolist():
            if not 0 <= expert < layer.gate_up.shape[0]:
                continue
            chosen = experts == expert
            index = chosen.any(-1).nonzero().flatten()
            own = x[index]
            first, second = variant.biases(expert)
            features = self.ops.gated_linear(
                own, layer.gate_up[expert], first, variant.activation, _added(own, change.gate_up, expert)
            )
            product = self.ops.linear(features, layer.down[expert], second, _added(features, change.down, expert))
            weight = torch.where(chosen, weights, 0.0).sum(-1)[index, None]
            total[index] += product.float() * weight
        return total.to(x.dtype)


def _added(x: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor] | None, expert: int) -> torch.Tensor | None:
    if pair is None or expert >= len(pair[0]):
        return None
    a, b = pair
    return ((x.to(a.dtype) @ a[expert].t()) @ b[expert].t()).to(x.dtype)


def local_table(layer: VocabMatrix, whole: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The rank's rows of a table of the whole vocabulary, as many as its own has."""
    kept = layer.kept
    own = whole[kept.start : kept.stop].to(dtype)
    short = layer.weight.shape[0] - len(own)
    return torch.cat([own, own.new_zeros(short, *own.shape[1:])]) if short else own
