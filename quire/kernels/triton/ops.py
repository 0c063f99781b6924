"""`TritonOps`: `Ops` with our kernels where they apply; the rest goes to torch."""

from __future__ import annotations

import torch

from quire.kernels.reference import TorchOps
from quire.kernels.triton import norm
from quire.kernels.triton.activation import silu_mul
from quire.kernels.triton.launch import INTERPRETED
from quire.kernels.triton.qkv import prepare_qkv


def _takes(x: torch.Tensor) -> bool:
    """Whether x is what a kernel can walk: rows on the device, contiguous in their last dimension, at least one."""
    return (x.is_cuda or INTERPRETED) and x.dim() == 2 and x.stride(1) == 1 and x.numel() > 0


class TritonOps(TorchOps):
    """Row-wise kernels for a GPU. A row's bits do not depend on its batch: each is computed by itself."""

    whole_steps = True
    """Batch and sampling have kernels too: a step can be captured from its inputs to its tokens."""

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
