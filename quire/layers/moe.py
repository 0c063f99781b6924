"""Mixtures of experts: each token goes through a few of many MLPs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn

from quire.distributed.collectives import all_reduce
from quire.errors import ValidationError
from quire.kernels.gates import PLAIN_EXPERTS, ExpertVariant
from quire.kernels.routing import RouteRule
from quire.kernels.weights.base import QuantizedWeight, Weight
from quire.layers.build_context import BuildContext, quantized_weights
from quire.layers.expert_parallel import ExpertDispatch
from quire.layers.expert_placement import Placement
from quire.layers.expert_weights import (
    ONE_BY_ONE,
    STACKED_APART,
    ExpertNaming,
    ExpertShare,
    ExpertWeights,
    QuantizedExperts,
    shared_targets,
)
from quire.layers.norm import RMSNorm
from quire.loading.model_config import ModelConfig, positive_integer
from quire.loading.weights import AnyTarget, Target


@dataclass(frozen=True)
class Routing:
    """How many experts there are, how wide each is, and how tokens are routed to them."""

    num_experts: int
    top_k: int
    width: int
    renormalise: bool
    """Whether the weights of a token's experts sum to one."""
    rule: RouteRule | None = None
    """Another way to choose and weight than the largest of a softmax."""
    bias: str = ""
    """Name of a tensor [experts] that is added to the scores for the choice; empty: there is none."""

    @classmethod
    def from_config(cls, config: ModelConfig, width: str, renormalise: bool) -> Routing:
        """Read from the model's config; `width` is this family's name of that field."""
        # The number of experts has one of three names, depending on the program that wrote the file.
        count = positive_integer(config.raw, "num_experts", "num_local_experts", "n_routed_experts")
        top_k = positive_integer(config.raw, "num_experts_per_tok", "top_k_experts")
        if top_k > count:
            raise ValidationError(
                f"the model's config sends each token to {top_k} experts (num_experts_per_tok) and has {count}",
                "num_experts_per_tok",
                top_k,
            )
        return cls(count, top_k, positive_integer(config.raw, width), renormalise)


class SparseMLP(nn.Module):
    """Sends each token through the few experts that the router chose for it; their weighted results are summed.

    `counts` is how often each expert was chosen since the start. It is written by the router's kernel and read only on
    request. It counts what is computed: in the last layer only the tokens that are sampled from.
    """

    counts: torch.Tensor
    gate_up: Weight
    down: Weight
    shared_name = "mlp.shared_experts"
    """What checkpoints call the shared experts, if they are held in the same stacks (`RouteRule.shared`)."""

    def __init__(
        self, build: BuildContext, routing: Routing, layer: int, namings: Sequence[ExpertNaming] = (ONE_BY_ONE,)
    ) -> None:
        """`namings`: how checkpoints of this family name the tensors, besides the ways common to all."""
        super().__init__()
        self.ops = build.ops
        self.layer = layer
        self.ranks = build.ranks
        self.routing = routing
        self.namings = (*namings, STACKED_APART)
        self.variant: ExpertVariant = PLAIN_EXPERTS
        self.dispatch: ExpertDispatch | None = None
        if build.experts is None:
            self.share = ExpertShare.of_rank(build.ranks, routing.num_experts, routing.width)
        else:
            self.dispatch = ExpertDispatch(build.experts, routing.num_experts, build.device)
            whole = slice(0, routing.width)
            self.share = ExpertShare(routing.num_experts, routing.width, self.dispatch.held, whole)
        hidden = build.config.hidden_size
        self.rule = routing.rule
        if routing.bias:
            bias = nn.Parameter(build.memory.zeros((routing.num_experts,), torch.float32), requires_grad=False)
            self.choice_bias = bias
            self.rule = replace(routing.rule or RouteRule(), bias=bias)
        gates = 0 if self.rule is None else self.rule.gates
        self.router = build.parameter(routing.num_experts + gates, hidden)
        counts = torch.zeros(routing.num_experts, dtype=torch.int64, device=build.device)
        self.register_buffer("counts", counts, persistent=False)

    def forward(
        self, norm: RMSNorm, x: torch.Tensor | None, residual: torch.Tensor | None, slots: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """(output to add to the residual stream, or None if already added; the stream). `slots`: as in `Ops.route`."""
        if self.dispatch is not None:
            normed, residual = norm(x, residual)
            return self.mix(normed, slots), residual
        routing = self.routing
        out, residual = self.ops.sparse_mlp(
            x, residual, norm.weight, norm.eps, self.router, self.gate_up, self.down, routing.top_k,
            routing.renormalise, self.counts, slots, self.rule, self.variant,
        )  # fmt: skip
        return all_reduce(out, self.ranks), residual

    def mix(self, x: torch.Tensor, slots: torch.Tensor | None = None) -> torch.Tensor:
        """The weighted sum of the experts' outputs for x."""
        logits, routing = self.ops.linear(x, self.router, self.variant.router_bias), self.routing
        weights, experts = self.ops.route(
            logits, routing.top_k, routing.renormalise, self.counts, self.padding(slots), self.rule
        )
        return self.summed(x, weights, experts)

    def padding(self, slots: torch.Tensor | None) -> torch.Tensor | None:
        """What tells the router which tokens are padding; steps with exchanges have none."""
        return None if self.dispatch is not None and self.dispatch.ranks.exchanges else slots

    def summed(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """The weighted sum of the chosen experts' outputs, wherever these are."""
        if self.dispatch is None:
            return all_reduce(self._run(x, weights, experts), self.ranks)
        if self.dispatch.ranks.exchanges:
            return self.dispatch.exchange(x, weights, experts, self._run)
        return all_reduce(self._run(x, weights, self.dispatch.local_slots(experts)), self.ranks)

    def _run(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        return self.ops.experts(x, weights, experts, self.gate_up, self.down, self.variant)

    def serve(self) -> None:
        """Compute the tokens that other ranks send, without own tokens."""
        assert self.dispatch is not None
        top_k, none = self.routing.top_k, self.router[:0]
        pairs = torch.empty(0, top_k, device=none.device)
        self.dispatch.exchange(none, pairs, pairs.int(), self._run)

    def rearrange(self, placement: Placement) -> None:
        """Hold the experts that `placement` gives this rank. All ranks call this together."""
        assert self.dispatch is not None
        held = [stack for weight in (self.gate_up, self.down) for stack in _tensors(weight)]
        held += [bias for bias in (self.variant.gate_up_bias, self.variant.down_bias) if bias is not None]
        self.dispatch.change(placement, *held)

    @property
    def choices(self) -> int:
        """Experts a token goes through, shared ones included."""
        return self.routing.top_k + (0 if self.rule is None else self.rule.shared)

    @property
    def idle_parameters(self) -> int:
        """Parameters of the experts that a token is not routed to."""
        total, top_k = self.routing.num_experts, self.routing.top_k
        held = total + self.choices - top_k
        return (self.gate_up.numel() + self.down.numel()) * (total - top_k) // held

    def create_weights(self, build: BuildContext, owner: str) -> None:
        """Make the experts' stacks in the format that the checkpoint has them in."""
        share, hidden = self.share, build.config.hidden_size
        naming = ONE_BY_ONE if getattr(build.scheme, "stacks_experts", False) else self.namings[0]
        self._quantized = QuantizedExperts.find(build, owner, share, hidden, naming)
        if self._quantized is not None:
            self.gate_up, self.down = self._quantized.gate_up, self._quantized.down
            return
        held = len(share.experts) + self.choices - self.routing.top_k
        self.gate_up = build.parameter(held, 2 * share.width, hidden)
        self.down = build.parameter(held, hidden, share.width)

    def targets(self) -> dict[str, list[AnyTarget]]:
        """The router and the rank's part of the experts."""
        biases: dict[str, list[AnyTarget]] = {}
        if self.routing.bias:
            biases[self.routing.bias] = [Target(self.choice_bias, tuple(self.choice_bias.shape))]
        if self._quantized is not None:
            return biases | self._quantized.targets(self.router, self.namings)
        assert isinstance(self.gate_up, torch.Tensor) and isinstance(self.down, torch.Tensor)
        own = len(self.share.experts)
        router = self.router[: self.routing.num_experts]
        stacks = ExpertWeights(router, self.gate_up[:own], self.down[:own], self.share, self.namings).targets()
        shared = shared_targets(self.gate_up[own:], self.down[own:], self.share, self.shared_name)
        return biases | stacks | shared


def _tensors(weight: Weight) -> list[torch.Tensor]:
    if not isinstance(weight, QuantizedWeight):
        return [weight]
    return [*weight.tensors.values(), *([] if weight.copy is None else [weight.copy])]


def expert_counts(model: nn.Module) -> dict[int, list[int]]:
    """How often each expert was chosen, by layer. Waits for the device once."""
    layers = _sparse_layers(model)
    if not layers:
        return {}
    counts = torch.stack([layer.counts for layer in layers]).tolist()
    return {layer.layer: chosen for layer, chosen in zip(layers, counts, strict=True)}


def serve_others(model: nn.Module) -> None:
    """A pass without own tokens: computes what other ranks send to this rank's experts."""
    for layer in _sparse_layers(model):
        layer.serve()


def rearrange_experts(model: nn.Module, placements: Mapping[int, Placement]) -> None:
    """Hold other experts, in the layers named."""
    for layer in _sparse_layers(model):
        if layer.layer in placements:
            layer.rearrange(placements[layer.layer])


def reset_expert_counts(model: nn.Module) -> None:
    """Set the counts to zero."""
    for layer in _sparse_layers(model):
        layer.counts.zero_()


def active_parameters(model: nn.Module) -> int:
    """Parameters used for one token: all but those of the experts it is not routed to."""
    return parameter_count(model) - sum(layer.idle_parameters for layer in _sparse_layers(model))


def parameter_count(model: nn.Module) -> int:
    """Parameters of the model, in any number of bits."""
    return sum(weight.numel() for weight in model.parameters()) + sum(w.numel() for w in quantized_weights(model))


def widest_mixture(model: nn.Module) -> int:
    """The most activations a token has at once in a mixture; 0 if there is none."""
    return max(map(_activations_per_token, _sparse_layers(model)), default=0)


def _activations_per_token(layer: SparseMLP) -> int:
    activations = layer.choices * (3 * layer.share.width + layer.router.shape[1])
    dispatch = layer.dispatch
    # In the worst case every rank sends all of its tokens to the same rank.
    return activations if dispatch is None or not dispatch.ranks.exchanges else activations * dispatch.ranks.size


class ExpertSizes(NamedTuple):
    """What the routed experts of a model take, over all of its layers and ranks."""

    num_bytes: int
    layers: int
    """That have some."""
    per_token: int
    """Experts a token is routed to in each of these."""


def expert_sizes(model: nn.Module) -> ExpertSizes | None:
    """Of a whole model, which may be on the meta device; None: it has no experts."""
    layers, total = _sparse_layers(model), 0
    for layer in layers:
        routed = layer.routing.num_experts
        held = routed + layer.choices - layer.routing.top_k  # with shared experts in the same stacks
        total += (layer.gate_up.nbytes + layer.down.nbytes) * routed // held
    return ExpertSizes(total, len(layers), max(layer.routing.top_k for layer in layers)) if layers else None


def has_experts(model: nn.Module) -> bool:
    """Whether the model has a mixture of experts."""
    return bool(_sparse_layers(model))


def _sparse_layers(model: nn.Module) -> list[SparseMLP]:
    return [module for module in model.modules() if isinstance(module, SparseMLP)]
