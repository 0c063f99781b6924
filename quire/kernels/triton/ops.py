"""`TritonOps`: `Ops` with our kernels where they apply; the rest goes to torch."""

from __future__ import annotations

import torch

from quire.kernels.cublaslt import Products
from quire.kernels.reference import TorchOps
from quire.kernels.triton import norm
from quire.kernels.triton.activation import silu_mul
from quire.kernels.triton.launch import INTERPRETED
from quire.kernels.triton.moe import candidates as moe_candidates
from quire.kernels.triton.moe import experts as moe
from quire.kernels.triton.moe.common import ExpertsConfig
from quire.kernels.triton.moe.tuning import BUCKETS as EXPERT_BUCKETS
from quire.kernels.triton.moe.tuning import choose_experts
from quire.kernels.triton.qkv import prepare_qkv
from quire.kernels.triton.skinny_gemm.candidates import GemmShape
from quire.kernels.triton.skinny_gemm.gemm import Config, thin_linear, thin_norm_linear, thin_silu_linear
from quire.kernels.triton.skinny_gemm.tuning import BUCKETS, TuningJob, choose, jobs_for, many_rows


def _takes(x: torch.Tensor) -> bool:
    """Whether x is what a kernel can walk: rows on the device, contiguous in their last dimension, at least one."""
    return (x.is_cuda or INTERPRETED or x.is_meta) and x.dim() == 2 and x.stride(1) == 1 and x.numel() > 0


THIN = not INTERPRETED
"""Whether thin products are ours: the interpreter takes seconds for each, so tests turn it on for some."""


ONTO_ROWS = 1024
"""From here on cuBLAS adds a product to the stream as it writes it: one pass over the stream less than adding it in
the norm, which for few rows is folded into the next product anyway."""
INVARIANT = Config("tile", block_n=128, block_m=64, block_k=64, warps=4, stages=4)
"""One shape for all: cuBLAS, and our tables, choose by the number of rows, and shapes differ in how they sum."""


class TritonOps(TorchOps):
    """Row-wise kernels for a GPU. A row's bits do not depend on its batch: each is computed by itself."""

    whole_steps = True
    """Batch and sampling have kernels too: a step can be captured from its inputs to its tokens."""

    def __init__(self, batch_invariant: bool = False) -> None:
        """`batch_invariant`: products sum in the same order however many rows there are, in float16 and bfloat16."""
        self._invariant = batch_invariant

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if _takes(x) and x.size(1) <= norm.MAX_WIDTH:
            return norm.rms_norm(x, weight, eps)
        return super().rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if _takes(x) and _takes(residual) and x.size(1) <= norm.MAX_WIDTH:
            return norm.add_rms_norm(x, residual, weight, eps)
        return super().add_rms_norm(x, residual, weight, eps)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        config = self._config("linear", x, weight)
        if config is not None:
            return thin_linear(x, weight, bias, config=config)
        known = self._many_rows(x) if bias is None else None
        out = None if known is None else known.linear(x, weight)
        return super().linear(x, weight, bias) if out is None else out

    def linear_onto(
        self, stream: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        if bias is not None or self._invariant or len(x) < ONTO_ROWS or not stream.is_contiguous():
            return self.linear(x, weight, bias)
        known = self._many_rows(x)
        if known is None or not known.add_linear(stream, x, weight):
            stream.addmm_(x, weight.t())
        return None

    def norm_linear(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor | None,
        gain: torch.Tensor,
        eps: float,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        gated: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if x is not None:
            config = self._config("norm_silu_linear" if gated else "norm_linear", x, weight)
            if config is not None and (residual is None or residual.is_contiguous()):
                return thin_norm_linear(x, residual, gain, eps, weight, bias, silu=gated, config=config)
        return super().norm_linear(x, residual, gain, eps, weight, bias, gated)

    def gated_linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        config = self._config("silu_linear", x, weight)
        return (
            super().gated_linear(x, weight, bias)
            if config is None
            else thin_silu_linear(x, weight, bias, config=config)
        )

    def _many_rows(self, x: torch.Tensor) -> Products | None:
        """Products whose algorithm was measured, if one of x may be among them."""
        if self._invariant or not THIN or not x.is_cuda or x.dim() != 2 or not len(x):
            return None
        return many_rows()

    def _config(self, kind: str, x: torch.Tensor, weight: torch.Tensor) -> Config | None:
        """The kernel of ours for a product; None: cuBLAS is faster, or ours does not take it."""
        if not (
            THIN
            and _takes(x)
            and x.is_contiguous()
            and weight.is_contiguous()
            and weight.stride(0) * x.itemsize % 16 == 0
        ):
            return None
        if self._invariant:
            return INVARIANT if kind == "linear" else None
        n, k = weight.shape
        return choose(kind, x.shape[0], n, k, x.dtype)

    def kernels_of(self, weight: torch.Tensor, normed: bool, gated: bool, bias: bool, max_rows: int) -> list[TuningJob]:
        """The kernels that `linear` (`normed`: `norm_linear`) takes for up to `max_rows` rows, each once."""
        folded = (["norm_silu_linear", "silu_linear"] if gated else ["norm_linear"]) if normed else []
        kinds = [*folded, "linear"]
        n, k = weight.shape

        def chosen(shape: GemmShape, rows: int) -> list[Config]:
            """Of the kinds a product can be of, the first that has a kernel is the one that runs."""
            x = weight.new_empty(rows, k, device="meta")
            found = ((kind, self._config(kind, x, weight)) for kind in kinds)
            first, config = next((pair for pair in found if pair[1] is not None), ("", None))
            return [config] if config is not None and first == shape.kind else []

        buckets = [rows for rows in BUCKETS if rows < 2 * max_rows]
        return jobs_for([GemmShape(kind, n, k, bias) for kind in kinds], weight.dtype, buckets, chosen)

    def route(
        self,
        logits: torch.Tensor,
        top_k: int,
        renormalise: bool,
        counts: torch.Tensor | None = None,
        slots: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if _takes(logits) and logits.shape[1] <= moe.MAX_EXPERTS:
            return moe.route(logits, top_k, renormalise, counts, slots)
        return super().route(logits, top_k, renormalise, counts, slots)

    def experts(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
    ) -> torch.Tensor:
        config = self._experts_config(x, gate_up, down, experts.shape[1])
        if config is None:
            return super().experts(x, weights, experts, gate_up, down)
        return moe.experts(x, weights.contiguous(), experts.contiguous(), gate_up, down, config)

    def sparse_mlp(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor | None,
        gain: torch.Tensor,
        eps: float,
        router: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        top_k: int,
        renormalise: bool,
        counts: torch.Tensor | None = None,
        slots: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if x is not None and router.shape[0] == gate_up.shape[0]:
            config = self._experts_config(x, gate_up, down, top_k)
            if config is not None and config.kernel == "vector":
                # Four kernels: the router's product has the norm folded in, and so have the experts' programs.
                logits, stream = self.norm_linear(x, residual, gain, eps, router)
                weights, chosen = self.route(logits, top_k, renormalise, counts, slots)
                routing = moe.ChosenExperts(top_k, weights=weights, experts=chosen)
                return moe.vector_experts(stream, routing, gate_up, down, config, (gain, eps)), stream
        return super().sparse_mlp(
            x, residual, gain, eps, router, gate_up, down, top_k, renormalise, counts, slots
        )  # fmt: skip

    def _experts_config(
        self, x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, top_k: int
    ) -> ExpertsConfig | None:
        """How x goes through experts; None: not by kernels of ours."""
        if not (
            THIN
            and _takes(x)
            and x.is_contiguous()
            and gate_up.is_contiguous()
            and down.is_contiguous()
            and x.dtype == gate_up.dtype
            and gate_up.shape[0] <= moe.MAX_EXPERTS
        ):
            return None
        if self._invariant:
            return moe_candidates.INVARIANT
        return choose_experts(moe.shape_of(gate_up, top_k), x.shape[0], x.dtype)

    def expert_kernels_of(
        self, gate_up: torch.Tensor, down: torch.Tensor, top_k: int, renormalise: bool, routed: int, max_tokens: int
    ) -> dict[object, moe.Task]:
        """Launches of the kernels that take up to `max_tokens` tokens through such experts, each with a name. `routed`:
        experts there are on all ranks."""
        buckets = [tokens for tokens in EXPERT_BUCKETS if tokens < 2 * max_tokens]
        inputs = (gate_up.new_empty(tokens, gate_up.shape[2], device="meta") for tokens in buckets)
        configs = [self._experts_config(x, gate_up, down, top_k) for x in inputs]
        wanted = [config for config in configs if config is not None]
        return moe.launches(gate_up, down, top_k, renormalise, routed, wanted)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return silu_mul(gate_up) if _takes(gate_up) else super().silu_mul(gate_up)

    def prepare_qkv(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor | None,
        norms: tuple[torch.Tensor, torch.Tensor, float] | None,
        kv: torch.Tensor,
        slots: torch.Tensor,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
    ) -> torch.Tensor:
        kernel = prepare_qkv if _takes(qkv) and kv.stride(4) == 1 else super().prepare_qkv
        return kernel(qkv, positions, cos_sin, norms, kv, slots, num_heads, num_kv_heads, head_dim)
