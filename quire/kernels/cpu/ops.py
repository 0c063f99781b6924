"""`CpuOps`: `Ops` in C++ for float32 and bfloat16; whatever the kernels do not cover goes to torch."""

from __future__ import annotations

import torch

from quire.kernels.cpu.build import library
from quire.kernels.reference import TorchOps

_MAX_HEAD_DIM = 1024


class CpuOps(TorchOps):
    """Kernels for a CPU. Threads follow `torch.get_num_threads()`; a row's bits do not depend on its batch.

    `linear` is native at every size: it beats MKL from 1 row (2x) through 16 (2.4x) to 512 (1.1x), so there is no
    size at which the arithmetic, and with it a row's bits, would change. See benchmarks/cpu_kernels.py.
    """

    def __init__(self) -> None:
        native = library()
        self.is_native = native is not None
        kernel = native.kernel if native else lambda name: {}
        self._linear = kernel("linear")
        self._rms_norm = kernel("rms_norm")
        self._add_rms_norm = kernel("add_rms_norm")
        self._silu_mul = kernel("silu_mul")
        self._prepare_qkv = kernel("prepare_qkv")

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        dtype = x.dtype
        kernel = self._linear.get(dtype)
        if kernel is None or weight.dtype != dtype or x.dim() != 2 or not x.numel() or weight.stride(1) != 1:
            return super().linear(x, weight, bias)
        if bias is not None and bias.dtype != dtype:
            return super().linear(x, weight, bias)
        rows, (width, depth) = x.size(0), weight.shape
        out = torch.empty((rows, width), dtype=dtype)
        kernel(
            x.data_ptr(),
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            rows,
            width,
            depth,
            x.stride(0),
            weight.stride(0),
            torch.get_num_threads(),
        )
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        kernel = self._rms_norm.get(x.dtype)
        if kernel is None or weight.dtype != x.dtype or x.dim() != 2:
            return super().rms_norm(x, weight, eps)
        rows, width = x.shape
        out = torch.empty((rows, width), dtype=x.dtype)
        threads = torch.get_num_threads()
        kernel(x.data_ptr(), x.stride(0), weight.data_ptr(), out.data_ptr(), rows, width, eps, threads)
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = x.dtype
        kernel = self._add_rms_norm.get(dtype)
        if kernel is None or weight.dtype != dtype or residual.dtype != dtype or x.dim() != 2:
            return super().add_rms_norm(x, residual, weight, eps)
        rows, width = x.shape
        out = torch.empty((rows, width), dtype=dtype)
        kernel(
            x.data_ptr(),
            x.stride(0),
            residual.data_ptr(),
            residual.stride(0),
            weight.data_ptr(),
            out.data_ptr(),
            rows,
            width,
            eps,
            torch.get_num_threads(),
        )
        return out, residual

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        kernel = self._silu_mul.get(gate_up.dtype)
        if kernel is None or gate_up.dim() != 2:
            return super().silu_mul(gate_up)
        rows, double = gate_up.shape
        width = double // 2
        out = torch.empty((rows, width), dtype=gate_up.dtype)
        kernel(gate_up.data_ptr(), gate_up.stride(0), out.data_ptr(), rows, width, torch.get_num_threads())
        return out

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
        dtype = qkv.dtype
        kernel = self._prepare_qkv.get(dtype)
        q_weight, k_weight, eps = norms or (None, None, 0.0)
        covered = (
            kernel is not None
            and kv.dtype == dtype
            and kv.stride(3) == head_dim <= _MAX_HEAD_DIM
            and (q_weight is None or (q_weight.dtype == dtype and k_weight.dtype == dtype))
        )
        if not covered:
            return super().prepare_qkv(
                qkv, positions, cos_sin, norms, kv, slots, num_heads, num_kv_heads, head_dim
            )
        tokens = qkv.size(0)
        q = torch.empty((tokens, num_heads, head_dim), dtype=dtype)
        kernel(
            qkv.data_ptr(),
            qkv.stride(0),
            positions.data_ptr(),
            None if cos_sin is None else cos_sin.data_ptr(),
            0 if cos_sin is None else cos_sin.size(1),
            None if q_weight is None else q_weight.data_ptr(),
            None if k_weight is None else k_weight.data_ptr(),
            eps,
            kv.data_ptr(),
            kv.stride(0),
            kv.size(3),
            slots.data_ptr(),
            q.data_ptr(),
            tokens,
            num_heads,
            num_kv_heads,
            head_dim,
            torch.get_num_threads(),
        )
        return q
