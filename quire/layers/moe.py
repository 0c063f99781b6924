"""Mixtures of experts: an MLP of many, of which each token goes through a few."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from quire.distributed.collectives import all_reduce
from quire.errors import ValidationError
from quire.layers.build_context import BuildContext
from quire.layers.expert_parallel import ExpertSpread
from quire.layers.expert_placement import Placement
from quire.layers.expert_weights import ONE_BY_ONE, STACKED_APART, ExpertShare, ExpertWeights, Spelling
from quire.layers.norm import RMSNorm
from quire.loading.model_config import ModelConfig, positive_integer
from quire.loading.weights import Target


@dataclass(frozen=True)
class Routing:
    """How many experts there are, how wide each is, and how tokens are dealt to them."""

    num_experts: int
    top_k: int
    width: int
    renormalise: bool
    """Whether the weights of a token's experts sum to one."""

    @classmethod
    def of(cls, config: ModelConfig, width: str, renormalise: bool) -> Routing:
        """Read from the model's config, where `width` is this family's name of that field."""
        # Which of its two names the number of experts has depends on who wrote the file, not on the family.
        count = positive_integer(config.raw, "num_experts", "num_local_experts")
        top_k = positive_integer(config.raw, "num_experts_per_tok")
        if top_k > count:
            raise ValidationError(
                f"the model's config sends each token to {top_k} experts (num_experts_per_tok) and has {count}",
                "num_experts_per_tok",
                top_k,
            )
        return cls(count, top_k, positive_integer(config.raw, width), renormalise)


class SparseMLP(nn.Module):
    """Each token through the few experts that the router chose for it; their results, weighted, are summed.

    `counts` says how often each expert was chosen since the start. It is written by the router's kernel and read only
    when somebody asks. What it counts is what is computed: in the last layer only the tokens that something is drawn
    from.
    """

    counts: torch.Tensor

    def __init__(
        self, build: BuildContext, routing: Routing, layer: int, spellings: Sequence[Spelling] = (ONE_BY_ONE,)
    ) -> None:
        """`spellings`: how checkpoints of this family name the tensors, beside the ways that all have in common."""
        super().__init__()
        self.ops = build.ops
        self.layer = layer
        self.ranks = build.ranks
        self.routing = routing
        self.spellings = (*spellings, STACKED_APART)
        self.spread: ExpertSpread | None = None
        if build.experts is None:
            self.share = share = ExpertShare.of(build.ranks, routing.num_experts, routing.width)
        else:
            self.spread = ExpertSpread(build.experts, routing.num_experts, build.device)
            whole = slice(0, routing.width)
            self.share = share = ExpertShare(routing.num_experts, routing.width, self.spread.held, whole)
        hidden = build.config.hidden_size
        self.router = build.parameter(routing.num_experts, hidden)
        self.gate_up = build.parameter(len(share.experts), 2 * share.width, hidden)
        self.down = build.parameter(len(share.experts), hidden, share.width)
        counts = torch.zeros(routing.num_experts, dtype=torch.int64, device=build.device)
        self.register_buffer("counts", counts, persistent=False)

    def forward(
        self, norm: RMSNorm, x: torch.Tensor | None, residual: torch.Tensor | None, slots: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """(what is still to be added to the residual stream, the stream). `slots`: as in `Ops.route`."""
        if self.spread is not None:
            normed, residual = norm(x, residual)
            return self.mix(normed, slots), residual
        routing = self.routing
        out, residual = self.ops.sparse_mlp(
            x, residual, norm.weight, norm.eps, self.router, self.gate_up, self.down, routing.top_k,
            routing.renormalise, self.counts, slots,
        )  # fmt: skip
        return all_reduce(out, self.ranks), residual

    def mix(self, x: torch.Tensor, slots: torch.Tensor | None = None) -> torch.Tensor:
        """What the experts make of x."""
        logits, routing = self.ops.linear(x, self.router), self.routing
        exchanges = self.spread is not None and self.spread.ranks.exchanges
        places = None if exchanges else slots  # such steps are not padded
        weights, experts = self.ops.route(logits, routing.top_k, routing.renormalise, self.counts, places)
        if self.spread is None:
            return all_reduce(self._run(x, weights, experts), self.ranks)
        if exchanges:
            return self.spread.exchange(x, weights, experts, self._run)
        return all_reduce(self._run(x, weights, self.spread.here(experts)), self.ranks)

    def _run(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        return self.ops.experts(x, weights, experts, self.gate_up, self.down)

    def serve(self) -> None:
        """Compute what other ranks send, without a token of our own."""
        assert self.spread is not None
        top_k, none = self.routing.top_k, self.router[:0]
        pairs = torch.empty(0, top_k, device=none.device)
        self.spread.exchange(none, pairs, pairs.int(), self._run)

    def rearrange(self, placement: Placement) -> None:
        """Hold the experts that `placement` gives this rank. All ranks do so, at the same time."""
        assert self.spread is not None
        self.spread.change(placement, self.gate_up, self.down)

    @property
    def idle_parameters(self) -> int:
        """Those of the experts that a token does not go to."""
        total, top_k = self.routing.num_experts, self.routing.top_k
        return (self.gate_up.numel() + self.down.numel()) * (total - top_k) // total

    def targets(self) -> dict[str, list[Target]]:
        """The router and the rank's part of the experts."""
        return ExpertWeights(self.router, self.gate_up, self.down, self.share, self.spellings).targets()


def expert_counts(model: nn.Module) -> dict[int, list[int]]:
    """How often each expert was chosen, by layer. The device is waited for, once."""
    layers = _sparse(model)
    if not layers:
        return {}
    counts = torch.stack([layer.counts for layer in layers]).tolist()
    return {layer.layer: chosen for layer, chosen in zip(layers, counts, strict=True)}


def serve_others(model: nn.Module) -> None:
    """A pass without tokens: nothing but what other ranks need of this one's experts."""
    for layer in _sparse(model):
        layer.serve()


def rearrange_experts(model: nn.Module, placements: Mapping[int, Placement]) -> None:
    """Hold other experts, in the layers that are named."""
    for layer in _sparse(model):
        if layer.layer in placements:
            layer.rearrange(placements[layer.layer])


def forget_counts(model: nn.Module) -> None:
    """Begin to count anew."""
    for layer in _sparse(model):
        layer.counts.zero_()


def active_parameters(model: nn.Module) -> int:
    """Parameters that one token meets; all of them, but for the experts it does not go to."""
    return sum(weight.numel() for weight in model.parameters()) - sum(layer.idle_parameters for layer in _sparse(model))


def widest_mixture(model: nn.Module) -> int:
    """Numbers a token has at once on its way through a mixture, at most; 0 where there is none."""
    return max(map(_token_numbers, _sparse(model)), default=0)


def _token_numbers(layer: SparseMLP) -> int:
    numbers = layer.routing.top_k * (3 * layer.share.width + layer.router.shape[1])
    spread = layer.spread
    # At worst every rank sends all of its tokens to the same one.
    return numbers if spread is None or not spread.ranks.exchanges else numbers * spread.ranks.size


def has_experts(model: nn.Module) -> bool:
    """Whether there is a mixture in it."""
    return bool(_sparse(model))


def _sparse(model: nn.Module) -> list[SparseMLP]:
    return [module for module in model.modules() if isinstance(module, SparseMLP)]
