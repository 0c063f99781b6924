"""DeepSeek V2 and V3 (arXiv 2405.04434, 2412.19437): latent attention, and mixtures with shared experts.

Also models published in their form: DeepSeek R1, Kimi K2, Moonlight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from quire.errors import UnsupportedModelError, ValidationError
from quire.kernels.routing import RouteRule
from quire.layers.attention.base import AttentionInputs, KVSpec, LastTokens
from quire.layers.attention.latent import LatentAttention, UpProjection, latent_shape
from quire.layers.build_context import BuildContext
from quire.layers.caches import LatentCache
from quire.layers.linear import FusedLinear, FusedPart, RowParallelLinear
from quire.layers.moe import Routing, SparseMLP
from quire.layers.norm import RMSNorm
from quire.loading.model_config import ModelConfig, positive_integer
from quire.models.llama import LlamaForCausalLM, LlamaMLP, LlamaVariant


class DeepseekAttention(nn.Module):
    """Latent attention. The first product of queries and that of the latent are one (`qkv_proj`)."""

    def __init__(self, build: BuildContext, layer: int, cos_sin: torch.Tensor, interleaved: bool) -> None:
        super().__init__()
        config, raw = build.config, build.config.raw
        shape = self.shape = latent_shape(config)
        q_rank = None if raw.get("q_lora_rank") is None else positive_integer(raw, "q_lora_rank")
        bias = bool(raw.get("attention_bias", False))
        heads = build.ranks.slice(config.num_heads, "attention heads")
        rows, keep = config.num_heads * shape.query, slice(heads.start * shape.query, heads.stop * shape.query)
        latent = FusedPart("kv_a_proj_with_mqa", shape.width, slice(0, shape.width))
        self.q_b_proj: FusedLinear | None = None
        if q_rank is None:
            if bias:
                raise UnsupportedModelError(
                    f"{config.architecture} with attention_bias and without q_lora_rank is not implemented: its "
                    "q_proj has no bias, though the latent's projection has one"
                )
            first = FusedPart("q_proj", rows, keep)
        else:
            first = FusedPart("q_a_proj", q_rank, slice(0, q_rank))
            self.q_a_layernorm = RMSNorm(build, "q_a_layernorm", q_rank)
            self.q_b_proj = FusedLinear(build, q_rank, (FusedPart("q_b_proj", rows, keep),), bias=False)
        self.qkv_proj = FusedLinear(build, config.hidden_size, (first, latent), bias)
        self.kv_a_layernorm = RMSNorm(build, "kv_a_layernorm", shape.rank)
        self.kv_b_proj = UpProjection(build, "kv_b_proj", shape, heads)
        self.attention = LatentAttention(
            build, shape, heads, cos_sin, self.kv_a_layernorm.weight, self.kv_b_proj, interleaved
        )
        self.o_proj = RowParallelLinear(build, "o_proj", config.num_heads * shape.value, config.hidden_size, bias)

    def forward(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        kv: torch.Tensor,
        inputs: AttentionInputs,
        last: LastTokens | None,
    ) -> torch.Tensor:
        """The heads' outputs, before `o_proj`."""
        q, latent = qkv.tensor_split((qkv.shape[1] - self.shape.width,), dim=1)
        if self.q_b_proj is not None:
            q, _ = self.q_b_proj.norm_linear(self.q_a_layernorm, q, None)
        return self.attention(q, latent, positions, kv, inputs, last)


class SharedMixture(SparseMLP):
    """A mixture, plus experts for all tokens.

    Shared experts are as wide as the routed ones and are held in the same stacks, after them: a few more choices of
    each token instead of a second MLP. Where whole experts are spread over ranks, or matrices are in few bits, they
    are an MLP of their own.
    """

    def __init__(self, build: BuildContext, routing: Routing, layer: int, shared: int) -> None:
        stacked = build.experts is None and build.scheme is None
        if stacked and shared:
            routing = replace(routing, rule=replace(routing.rule or RouteRule(), shared=shared))
        super().__init__(build, routing, layer)
        self.shared_experts = LlamaMLP(build, width=shared * routing.width) if shared and not stacked else None

    def forward(
        self, norm: RMSNorm, x: torch.Tensor | None, residual: torch.Tensor | None, slots: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """(output to add to the residual stream, or None if already added; the stream)."""
        if self.shared_experts is None:
            return super().forward(norm, x, residual, slots)
        normed, residual = norm(x, residual)
        return self.mix(normed, slots).add_(self.shared_experts.forward_normed(normed)), residual


def is_sparse(config: ModelConfig, layer: int) -> bool:
    """Whether a layer has a mixture in place of an MLP."""
    raw = config.raw
    if (kinds := raw.get("mlp_layer_types")) is not None:
        # Layers that predict (`speculative/mtp.py`) come after those that are listed.
        return "sparse" in kinds if layer >= len(kinds) else bool(kinds[layer] == "sparse")
    first = raw.get("first_k_dense_replace") or 0
    return layer >= first and layer % (raw.get("moe_layer_freq") or 1) == 0


def sigmoid_routing(config: ModelConfig) -> Routing:
    """DeepSeek V3's routing: sigmoid scores, a bias for the choice alone, the best groups by their two best experts."""
    raw = config.raw
    for key, expected in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if raw.get(key, expected) != expected:
            raise UnsupportedModelError(f"{config.architecture} with {key} {raw[key]!r} is not implemented")
    rule = RouteRule(sigmoid=True, group_top=2, scale=float(raw.get("routed_scaling_factor", 1.0)), **_groups(config))
    routing = Routing.from_config(config, "moe_intermediate_size", bool(raw.get("norm_topk_prob", True)))
    return replace(routing, rule=rule, bias="mlp.gate.e_score_correction_bias")


def _softmax_routing(config: ModelConfig) -> Routing:
    """DeepSeek V2's routing: a softmax, the best groups by their best expert."""
    raw = config.raw
    method, scale = raw.get("topk_method", "greedy"), float(raw.get("routed_scaling_factor", 1.0))
    if method not in ("greedy", "group_limited_greedy") or raw.get("scoring_func", "softmax") != "softmax":
        raise UnsupportedModelError(
            f"{config.architecture} with topk_method {method!r} and scoring_func {raw.get('scoring_func')!r} is not "
            "implemented"
        )
    renormalise = bool(raw.get("norm_topk_prob", False))
    if renormalise and scale != 1.0:
        raise UnsupportedModelError(
            f"{config.architecture} with norm_topk_prob and routed_scaling_factor {scale:g} is not implemented: its "
            "implementations disagree on what that means"
        )
    groups = _groups(config) if method == "group_limited_greedy" else {}
    rule = RouteRule(scale=scale, **groups)
    routing = Routing.from_config(config, "moe_intermediate_size", renormalise)
    return routing if rule == RouteRule() else replace(routing, rule=rule)


def _groups(config: ModelConfig) -> dict[str, Any]:
    groups, top = config.raw.get("n_group") or 1, config.raw.get("topk_group") or 1
    count = positive_integer(config.raw, "num_experts", "num_local_experts", "n_routed_experts")
    if count % groups or not 0 < top <= groups:
        raise ValidationError(
            f"the model's config has {count} experts in n_group = {groups} groups, of which topk_group = {top} are "
            "chosen",
            "n_group",
            groups,
        )
    return {} if groups == top else {"groups": groups, "top_groups": top}


def is_of_prediction_layer(name: str, config: ModelConfig) -> bool:
    """Whether a tensor is of the layers for multi-token prediction (MTP), which follow the model's own."""
    number = name.removeprefix("model.layers.").partition(".")[0] if name.startswith("model.layers.") else ""
    extra = config.raw.get("num_nextn_predict_layers") or config.raw.get("num_mtp_layers") or 0
    return number.isdigit() and config.num_layers <= int(number) < config.num_layers + extra


class DeepseekForCausalLM(LlamaForCausalLM):
    """What V2 and V3 share: everything but the routing."""

    prediction = "nextn"

    def __init__(self, build: BuildContext, routing: Routing | None, interleaved: bool) -> None:
        config = build.config
        if config.raw.get("index_topk"):
            raise UnsupportedModelError(
                f"{config.architecture}: sparse attention by an indexer (index_topk, DeepSeek V3.2) is not implemented"
            )
        shared = config.raw.get("n_shared_experts") or 0

        def attention(build: BuildContext, _: LlamaVariant, layer: int, cos_sin: torch.Tensor | None) -> nn.Module:
            assert cos_sin is not None
            return DeepseekAttention(build, layer, cos_sin, interleaved)

        def mlp(build: BuildContext, layer: int) -> nn.Module:
            if routing is None or not is_sparse(config, layer):
                return LlamaMLP(build)
            return SharedMixture(build, routing, layer, shared)

        super().__init__(build, LlamaVariant(mlp=mlp, attention=attention))

    def ignores(self, name: str) -> bool:
        return super().ignores(name) or is_of_prediction_layer(name, self.build.config)

    @property
    def caches(self) -> Sequence[LatentCache]:
        """What each layer of the whole model keeps."""
        width = latent_shape(self.build.config).width
        return [LatentCache(width, self.build.kv_format)] * self.build.config.num_layers

    @property
    def kv_shape(self) -> KVSpec:
        return KVSpec(len(self.model.layers), 1, latent_shape(self.build.config).width)


class DeepseekV2ForCausalLM(DeepseekForCausalLM):
    """DeepSeek V2, V2.5, V2-Lite and Coder-V2."""

    def __init__(self, build: BuildContext) -> None:
        raw = build.config.raw
        super().__init__(build, _softmax_routing(build.config) if raw.get("n_routed_experts") else None, True)


class DeepseekV3ForCausalLM(DeepseekForCausalLM):
    """DeepSeek V3, V3.1, R1; Kimi K2; Moonlight."""

    def __init__(self, build: BuildContext) -> None:
        raw = build.config.raw
        routing = sigmoid_routing(build.config) if raw.get("n_routed_experts") else None
        super().__init__(build, routing, bool(raw.get("rope_interleave", True)))
