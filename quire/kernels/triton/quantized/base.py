"""The products with one kind of quantized weight; what a kind does not fuse is composed of what it has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from quire.kernels.base import CompilableKernel, Ops


class QuantizedProducts:
    """Products with one layout of `kernels/weights`. `linear` is needed; a subclass overrides what it has a kernel for.

    Arguments and results are those of `Ops`.
    """

    def __init__(self, ops: Ops, batch_invariant: bool) -> None:
        """`ops`: kernels for what is not a product. `batch_invariant`: a row's bits must not depend on its batch."""
        self.ops = ops
        self.invariant = batch_invariant

    def linear(self, x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        raise NotImplementedError

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
        self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, gate_up: Any, down: Any
    ) -> torch.Tensor:
        """`Ops.experts`, where `gate_up` and `down` are stacks of this layout."""
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for index in range(gate_up.shape[0]):
            chosen = experts == index
            product = self.linear(self.gated_linear(x, gate_up[index]), down[index])
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
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, stream = self.ops.norm_stream(x, residual, gain, eps)
        weights, experts = self.ops.route(self.ops.linear(normed, router), top_k, renormalise, counts, slots)
        return self.experts(normed, weights, experts, gate_up, down), stream

    def kernels_of(
        self, weight: Any, normed: bool, gated: bool, bias: bool, max_rows: int
    ) -> Sequence[CompilableKernel]:
        return []

    def expert_kernels_of(
        self, gate_up: Any, down: Any, top_k: int, renormalise: bool, routed: int, max_tokens: int
    ) -> dict[object, Callable[[], object]]:
        return {}
