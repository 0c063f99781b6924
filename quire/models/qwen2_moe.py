"""Qwen2-MoE (arXiv 2407.10671): Qwen2 with mixtures of experts, and a shared expert that every token goes through."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from quire.errors import ValidationError
from quire.kernels.routing import RouteRule
from quire.layers.build_context import BuildContext
from quire.layers.linear import ReplicatedLinear
from quire.layers.moe import Routing, SparseMLP
from quire.layers.norm import RMSNorm
from quire.loading.model_config import ModelConfig, positive_integer
from quire.loading.weights import AnyTarget, Target
from quire.models.llama import LlamaForCausalLM, LlamaMLP, LlamaVariant


class SharedExpertMLP(SparseMLP):
    """A mixture, plus an expert for all tokens, weighted by a gate of its own.

    If that expert is as wide as the routed ones, it is held in the same stacks and its gate is one more row of the
    router: one more choice of each token instead of a second MLP. Where whole experts are spread over ranks, or
    matrices are in few bits, it is an MLP of its own.
    """

    shared_name = "mlp.shared_expert"

    def __init__(self, build: BuildContext, routing: Routing, layer: int, shared_width: int) -> None:
        self.stacked = build.experts is None and build.scheme is None and shared_width == routing.width
        if self.stacked:
            routing = replace(routing, rule=replace(routing.rule or RouteRule(), shared=1, gated=True))
        super().__init__(build, routing, layer)
        if not self.stacked:
            self.shared_expert = LlamaMLP(build, width=shared_width)
            self.shared_expert_gate = ReplicatedLinear(build, "shared_expert_gate", build.config.hidden_size, 1)

    def forward(
        self, norm: RMSNorm, x: torch.Tensor | None, residual: torch.Tensor | None, slots: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """(output to add to the residual stream, or None if already added; the stream)."""
        if self.stacked:
            return super().forward(norm, x, residual, slots)
        normed, residual = norm(x, residual)
        share = torch.sigmoid(self.shared_expert_gate(normed))
        return self.mix(normed, slots) + share * self.shared_expert.forward_normed(normed), residual

    def targets(self) -> dict[str, list[AnyTarget]]:
        """As in any mixture; and the shared expert's gate."""
        if not self.stacked:
            return super().targets()
        gate = self.router[self.routing.num_experts :]
        return super().targets() | {"mlp.shared_expert_gate.weight": [Target(gate, tuple(gate.shape))]}


class Qwen2MoeForCausalLM(LlamaForCausalLM):
    """Qwen1.5-MoE and Qwen2-57B-A14B."""

    def __init__(self, build: BuildContext) -> None:
        config = build.config
        routing = qwen_routing(config)
        sparse = sparse_layers(config)
        shared = positive_integer(config.raw, "shared_expert_intermediate_size")

        def mlp(build: BuildContext, layer: int) -> nn.Module:
            return SharedExpertMLP(build, routing, layer, shared) if layer in sparse else LlamaMLP(build)

        super().__init__(build, LlamaVariant(qkv_bias=bool(config.raw.get("qkv_bias", True)), mlp=mlp))


def qwen_routing(config: ModelConfig, renormalise: bool = False) -> Routing:
    """Routing of Qwen's mixtures, from the config. `renormalise`: the family's default."""
    renormalise = bool(config.raw.get("norm_topk_prob", renormalise))
    return Routing.from_config(config, "moe_intermediate_size", renormalise)


def sparse_layers(config: ModelConfig) -> set[int]:
    """The layers that have a mixture: each `decoder_sparse_step`-th one, except `mlp_only_layers`."""
    step = positive_integer({"decoder_sparse_step": 1} | dict(config.raw), "decoder_sparse_step")
    dense = config.raw.get("mlp_only_layers") or []
    if not isinstance(dense, (list, tuple)) or not all(isinstance(layer, int) for layer in dense):
        raise ValidationError(
            f"the model's config has mlp_only_layers = {dense!r}; a list of layer numbers is needed",
            "mlp_only_layers",
            dense,
        )
    return set(range(step - 1, config.num_layers, step)) - set(dense)
