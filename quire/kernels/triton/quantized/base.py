"""The products with one kind of quantized weight; what a kind does not fuse is composed of what it has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from quire.kernels.base import CompilableKernel, Ops
from quire.kernels.gates import PLAIN_EXPERTS, ExpertVariant
from quire.kernels.routing import RouteRule
from quire.kernels.triton.quantized.experts import expert_kernels, goes_pair_by_pair, quantized_experts
from quire.kernels.triton.quantized.tuning import ProductCase


class QuantizedProducts:
    """Products with one layout of `kernels/weights`. `linear` is needed; a subclass overrides what it has a kernel for.

    Arguments and results are those of `Ops`.
    """

    buckets: Sequence[int] = ()
    """Rows that `quire tune` chooses kernels for."""

    def __init__(self, ops: Ops, batch_invariant: bool, config: Any = None) -> None:
        """`ops`: kernels for what is not a product. `batch_invariant`: a row's bits must not depend on its batch.
        `config`: the configuration of every product, to measure it; None: chosen by its shape and rows."""
        self.ops = ops
        self.invariant = batch_invariant
        self.config = config

    def case_of(self, weight: Any, rows: int, gated: bool) -> ProductCase | None:
        """What `quire tune` measures for a product; None: there is nothing to choose."""
        return None

    def linear(self, x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        raise NotImplementedError

    def embedding(self, tokens: torch.Tensor, weight: Any) -> torch.Tensor:
        found: torch.Tensor = weight.embedding(tokens)
        return found

    def linear_add(
        self, stream: torch.Tensor, x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        return self.linear(x, weight, bias)

    def gated_linear(self, x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self.ops.silu_mul(self.linear(x, weight, bias))

    def norm_linear(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor | None,
        gain: torch.Tensor,
        eps: float,
        weight: Any,
        bias: torch.Tensor | None = None,
        gated: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, stream = self.ops.norm_stream(x, residual, gain, eps)
        return (self.gated_linear if gated else self.linear)(normed, weight, bias), stream

    def experts(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        gate_up: Any,
        down: Any,
        activation: str = "silu",
        gate_up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`Ops.experts`, where `gate_up` and `down` are stacks of this layout; biases are [experts, outputs]."""
        out = quantized_experts(
            x, weights, experts, gate_up, down, activation, gate_up_bias, down_bias, self.invariant
        )  # fmt: skip
        if out is not None:
            return out
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for index in range(gate_up.shape[0]):
            chosen = experts == index
            biases = (None if bias is None else bias[index] for bias in (gate_up_bias, down_bias))
            features = self.ops.gate_mul(self.linear(x, gate_up[index], next(biases)), activation)
            product = self.linear(features, down[index], next(biases))
            weight = torch.where(chosen, weights, 0.0).sum(dim=-1, keepdim=True)
            total += torch.where(chosen.any(dim=-1, keepdim=True), product.float() * weight, 0.0)
        return total.to(x.dtype)

    def sparse_mlp(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor | None,
        gain: torch.Tensor,
        eps: float,
        router: torch.Tensor,
        gate_up: Any,
        down: Any,
        top_k: int,
        renormalise: bool,
        counts: torch.Tensor | None = None,
        slots: torch.Tensor | None = None,
        rule: RouteRule | None = None,
        variant: ExpertVariant = PLAIN_EXPERTS,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if (
            x is not None
            and router.shape[0] == gate_up.shape[0]
            and goes_pair_by_pair(x, gate_up, down, top_k, self.invariant)
        ):
            # Four kernels: the norm is fused into the router's GEMM and into the experts' first one.
            logits, stream = self.ops.norm_linear(x, residual, gain, eps, router, variant.router_bias)
            weights, experts = self.ops.route(logits, top_k, renormalise, counts, slots, rule)
            out = quantized_experts(
                stream, weights, experts, gate_up, down, variant.activation, variant.gate_up_bias, variant.down_bias,
                norm=(gain, eps),
            )  # fmt: skip
            assert out is not None
            return out, stream
        normed, stream = self.ops.norm_stream(x, residual, gain, eps)
        logits = self.ops.linear(normed, router, variant.router_bias)
        weights, experts = self.ops.route(logits, top_k, renormalise, counts, slots, rule)
        out = self.experts(
            normed, weights, experts, gate_up, down, variant.activation, variant.gate_up_bias, variant.down_bias
        )
        return out, stream

    def kernels_of(
        self, weight: Any, normed: bool, gated: bool, bias: bool, max_rows: int
    ) -> Sequence[CompilableKernel]:
        return []

    def expert_kernels_of(
        self, gate_up: Any, down: Any, top_k: int, renormalise: bool, routed: int, max_tokens: int,
        activation: str = "silu", biased: bool = False,
    ) -> dict[object, Callable[[], object]]:  # fmt: skip
        return expert_kernels(
            gate_up, down, top_k, renormalise, routed, max_tokens, self.invariant, activation, biased
        )  # fmt: skip
