"""`CpuOps`: `Ops` in C++ for float32 and bfloat16; what the kernels do not support goes to torch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.kernels.adapters import SlotLowRank
from quire.kernels.cpu.build import library
from quire.kernels.cpu.results import ResultMemory
from quire.kernels.cpu.tape import TapeArena
from quire.kernels.gates import PLAIN_EXPERTS, ExpertVariant
from quire.kernels.kv import LayerKV, QuantizedKV
from quire.kernels.reference import TorchOps
from quire.kernels.routing import RouteRule
from quire.kernels.weights.base import QuantizedWeight, SplitWeight, Weight
from quire.kernels.weights.interleaved import InterleavedWeight
from quire.kernels.weights.strips import StripWeight

_MAX_HEAD_DIM = 1024  # kMaxDim in elementwise.cpp


class CpuOps(TorchOps):
    """Kernels for a CPU. Threads follow `torch.get_num_threads()`; a row's bits do not depend on its batch.

    `linear` is native at every size: in float32 it is faster than torch from 1 to 512 rows, in bfloat16 up to about 128
    rows and equal at 512 (benchmarks/cpu_kernels.py). So there is no size at which the order of sums, and with it a
    row's bits, would change.
    """

    def __init__(self) -> None:
        native = library()
        self.is_native = native is not None
        self._results = ResultMemory()
        kernel = native.kernel if native else lambda name: {}
        self._linear = kernel("linear")
        self._low_rank = kernel("low_rank")
        self._bounds: dict[tuple[int, ...], torch.Tensor] = {}
        self._rms_norm = kernel("rms_norm")
        self._add_rms_norm = kernel("add_rms_norm")
        self._copy_stream = kernel("copy_stream")
        self._silu_mul = kernel("silu_mul")
        self._prepare_qkv = kernel("prepare_qkv")
        self._embedding = kernel("embedding")
        self._route = kernel("route")
        self._experts = kernel("experts")
        self._packed_linear = kernel("packed_linear")
        self._packed_experts = kernel("packed_experts")
        self._packed_embedding = kernel("packed_embedding")

    def linear(
        self,
        x: torch.Tensor,
        weight: Weight,
        bias: torch.Tensor | None = None,
        addend: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if addend is not None:
            return self.linear(x, weight, bias).add_(addend)
        dtype = x.dtype
        kernel = self._linear.get(dtype)
        if isinstance(weight, QuantizedWeight):
            return self._quantized_linear(x, weight, bias)
        if kernel is None or weight.dtype != dtype or x.dim() != 2 or not x.numel():
            return super().linear(x, weight, bias)
        if bias is not None and bias.dtype != dtype:
            return super().linear(x, weight, bias)
        x_stride, x_step = x.stride()
        weight_stride, weight_step = weight.stride()
        if weight_step != 1 or x_step != 1:
            return super().linear(x, weight, bias)
        run, pack = kernel
        rows, (width, depth) = x.size(0), weight.shape
        out = self._results.empty(x, rows, width)
        bias_pointer = 0 if bias is None else bias.data_ptr()
        threads = torch.get_num_threads()
        pointers = (x.data_ptr(), weight.data_ptr(), bias_pointer, out.data_ptr())
        run(pack(*pointers, rows, width, depth, x_stride, weight_stride, threads))
        return out

    def add_low_rank(self, out: torch.Tensor, x: torch.Tensor, low: SlotLowRank) -> None:
        a, b, tokens, bounds = low
        kernel = self._low_rank.get(x.dtype)
        is_plain = a.dtype == b.dtype == out.dtype == x.dtype and x.stride(1) == 1 and out.stride(1) == 1
        if kernel is None or not is_plain or not a.is_contiguous() or not b.is_contiguous() or not len(x):
            return super().add_low_rank(out, x, low)
        run, pack = kernel
        if (ends := self._bounds.get(bounds)) is None:  # kept: a recorded pass has its address
            ends = self._bounds[bounds] = torch.tensor(bounds, dtype=torch.int64)
        pointers = (tensor.data_ptr() for tensor in (x, a, b, tokens.slots, ends, out))
        (_, rank, width), depth = b.shape, a.shape[2]
        threads = torch.get_num_threads()
        run(pack(*pointers, len(x), len(bounds) - 1, rank, depth, width, x.stride(0), out.stride(0), threads))
        return None

    def _quantized_linear(self, x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        """Native for interleaved weights, and for fused ones that consist of such."""
        kernel = self._packed_linear.get(x.dtype)
        parts = weight.parts if isinstance(weight, SplitWeight) else (weight,)
        packed = [part for part in parts if isinstance(part, (InterleavedWeight, StripWeight))]
        is_plain = x.dim() == 2 and x.numel() and x.stride(1) == 1 and (bias is None or bias.dtype == x.dtype)
        if kernel is None or len(packed) < len(parts) or not is_plain:
            return super().linear(x, weight, bias)
        run, pack = kernel
        rows, width = x.size(0), weight.shape[0]
        out = self._results.empty(x, rows, width)
        threads, size = torch.get_num_threads(), x.element_size()
        bias_pointer, out_pointer = 0 if bias is None else bias.data_ptr(), out.data_ptr()
        for part in packed:
            n, k = part.shape
            own = x
            if isinstance(part, StripWeight) and part.order is not None:
                own = x.index_select(1, part.order)
            run(
                pack(
                    *_pointers(part), own.data_ptr(), bias_pointer, out_pointer,
                    rows, n, k, own.stride(0), width, *_kind(part), threads,
                )
            )  # fmt: skip
            bias_pointer, out_pointer = bias_pointer and bias_pointer + n * size, out_pointer + n * size
        return out

    def embedding(self, tokens: torch.Tensor, weight: Weight) -> torch.Tensor:
        if isinstance(weight, InterleavedWeight) and (packed := self._packed_embedding.get(weight.dtype)):
            run, pack = packed
            out = tokens.new_empty(len(tokens), weight.shape[1], dtype=weight.dtype)
            sizes = (*out.shape, weight.number, torch.get_num_threads())
            run(pack(*_pointers(weight), tokens.data_ptr(), out.data_ptr(), *sizes))
            return out
        kernel = self._embedding.get(weight.dtype)
        if kernel is None or isinstance(weight, QuantizedWeight) or not weight.is_contiguous():
            return super().embedding(tokens, weight)
        run, pack = kernel
        rows, width = tokens.size(0), weight.size(1)
        out = weight.new_empty(rows, width)
        run(pack(tokens.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, width, torch.get_num_threads()))
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        kernel = self._rms_norm.get(x.dtype)
        if kernel is None or weight.dtype != x.dtype or x.dim() != 2:
            return super().rms_norm(x, weight, eps)
        run, pack = kernel
        rows, width = x.shape
        out = self._results.empty(x, rows, width)
        pointers = (x.data_ptr(), weight.data_ptr(), out.data_ptr())
        run(pack(*pointers, rows, width, x.stride(0), eps, torch.get_num_threads()))
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = x.dtype
        kernel = self._add_rms_norm.get(dtype)
        if kernel is None or weight.dtype != dtype or residual.dtype != dtype or x.dim() != 2:
            return super().add_rms_norm(x, residual, weight, eps)
        run, pack = kernel
        rows, width = x.shape
        out = self._results.empty(x, rows, width)
        pointers = (x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr())
        run(pack(*pointers, rows, width, x.stride(0), residual.stride(0), eps, torch.get_num_threads()))
        return out, residual

    def copy_stream(self, x: torch.Tensor | None, residual: torch.Tensor | None, out: torch.Tensor) -> None:
        parts = [part for part in (residual, x) if part is not None]
        kernel = self._copy_stream.get(out.dtype)
        if kernel is None or any(part.dtype != out.dtype or part.stride(1) != 1 for part in (*parts, out)):
            return super().copy_stream(x, residual, out)
        run, pack = kernel
        first, second = parts[0], parts[-1]
        pointers = (first.data_ptr(), 0 if len(parts) < 2 else second.data_ptr(), out.data_ptr())
        strides = (first.stride(0), second.stride(0), out.stride(0))
        run(pack(*pointers, *out.shape, *strides, torch.get_num_threads()))
        return None

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        kernel = self._silu_mul.get(gate_up.dtype)
        if kernel is None or gate_up.dim() != 2:
            return super().silu_mul(gate_up)
        run, pack = kernel
        rows, double = gate_up.shape
        width = double // 2
        out = self._results.empty(gate_up, rows, width)
        run(pack(gate_up.data_ptr(), out.data_ptr(), rows, width, gate_up.stride(0), torch.get_num_threads()))
        return out

    def route(
        self,
        logits: torch.Tensor,
        top_k: int,
        renormalise: bool,
        counts: torch.Tensor | None = None,
        slots: torch.Tensor | None = None,
        rule: RouteRule | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Steps are not padded here.
        kernel = self._route.get(logits.dtype)
        if kernel is None or logits.stride(1) != 1 or rule is not None:
            return super().route(logits, top_k, renormalise, counts, None, rule)
        run, pack = kernel
        rows, width = logits.shape
        weights = logits.new_empty(rows, top_k, dtype=torch.float32)
        experts = logits.new_empty(rows, top_k, dtype=torch.int32)
        counted = 0 if counts is None else counts.data_ptr()
        pointers = (logits.data_ptr(), weights.data_ptr(), experts.data_ptr(), counted)
        run(pack(*pointers, rows, width, logits.stride(0), top_k, renormalise))
        return weights, experts

    def experts(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        gate_up: Weight,
        down: Weight,
        variant: ExpertVariant = PLAIN_EXPERTS,
    ) -> torch.Tensor:
        """One GEMM for each expert in use, over all of its tokens."""
        kernel = self._experts.get(x.dtype)
        is_plain = variant.activation == "silu" and not variant.is_biased
        if is_plain and _is_packed_stack(gate_up) and _is_packed_stack(down) and x.dtype in self._packed_experts:
            return self._packed_mixture(x, weights, experts, gate_up, down)  # type: ignore[arg-type]
        if isinstance(gate_up, QuantizedWeight) or isinstance(down, QuantizedWeight) or not is_plain:
            return self._experts_one_by_one(x, weights, experts, gate_up, down, variant)
        if kernel is None or gate_up.dtype != x.dtype or not (gate_up.is_contiguous() and down.is_contiguous()):
            return self._experts_one_by_one(x, weights, experts, gate_up, down, variant)
        run, pack = kernel
        rows, hidden = x.shape
        out = self._results.empty(x, rows, hidden)
        pointers = (t.data_ptr() for t in (x, weights, experts, gate_up, down, out))
        count, width, top_k = gate_up.size(0), down.size(2), experts.size(1)
        run(pack(*pointers, rows, hidden, width, count, top_k, x.stride(0), torch.get_num_threads()))
        return out

    def _packed_mixture(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        gate_up: InterleavedWeight | StripWeight,
        down: InterleavedWeight | StripWeight,
    ) -> torch.Tensor:
        run, pack = self._packed_experts[x.dtype]
        rows, hidden = x.shape
        out = self._results.empty(x, rows, hidden)
        pointers = (t.data_ptr() for t in (x, weights, experts, out))
        count, width, top_k = gate_up.shape[0], down.shape[2], experts.size(1)
        stacks: list[int] = []
        for stack in (gate_up, down):
            strides = (0 if t is None else t.stride(0) * t.itemsize for t in _fields(stack))
            stacks += [*_pointers(stack), *strides, *_kind(stack)]
        run(pack(*pointers, *stacks, rows, hidden, width, count, top_k, x.stride(0), torch.get_num_threads()))
        return out

    def _experts_one_by_one(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        gate_up: Weight,
        down: Weight,
        variant: ExpertVariant,
    ) -> torch.Tensor:
        """The same in torch; on a CPU the host can read which experts are in use."""
        total = torch.zeros(x.shape, dtype=torch.float32)
        for index in experts.unique().tolist():
            if not 0 <= index < gate_up.shape[0]:
                continue
            tokens, choice = (experts == index).nonzero(as_tuple=True)
            first, second = variant.biases(index)
            features = self.gated_linear(x[tokens], gate_up[index], first, variant.activation)
            product = self.linear(features, down[index], second)
            total.index_add_(0, tokens, product.float() * weights[tokens, choice, None])
        return total.to(x.dtype)

    def prepare_qkv(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor | None,
        norms: tuple[torch.Tensor, torch.Tensor, float] | None,
        kv: LayerKV,
        slots: torch.Tensor,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
    ) -> torch.Tensor:
        dtype = qkv.dtype
        kernel = self._prepare_qkv.get(dtype)
        block_stride, _, _, slot_stride, _ = kv.stride()
        covered = kv.dtype == dtype and slot_stride == head_dim <= _MAX_HEAD_DIM
        if covered and norms is not None:
            covered = norms[0].dtype == dtype and norms[1].dtype == dtype
        if kernel is None or not covered or isinstance(kv, QuantizedKV):
            return super().prepare_qkv(qkv, positions, cos_sin, norms, kv, slots, num_heads, num_kv_heads, head_dim)
        run, pack = kernel
        tokens = qkv.size(0)
        q = self._results.empty(qkv, tokens, num_heads, head_dim)
        cosines, rotary = (0, 0) if cos_sin is None else (cos_sin.data_ptr(), cos_sin.size(1))
        q_weight, k_weight, eps = (0, 0, 0.0) if norms is None else (norms[0].data_ptr(), norms[1].data_ptr(), norms[2])
        run(
            pack(
                qkv.data_ptr(),
                positions.data_ptr(),
                cosines,
                q_weight,
                k_weight,
                kv.data_ptr(),
                slots.data_ptr(),
                q.data_ptr(),
                tokens,
                num_heads,
                num_kv_heads,
                head_dim,
                rotary,
                qkv.stride(0),
                kv.size(3),
                block_stride,
                eps,
                torch.get_num_threads(),
            )
        )
        return q

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None] | None]:
        native = library()
        if native is None:
            return super().capture(run)
        with native.recording() as tape, TapeArena() as arena, self._results.off():
            result = run()
        if arena.torch_ops:
            return result, None
        tape.seal(arena.memory)
        return result, tape.replay


def _pointers(weight: InterleavedWeight | StripWeight) -> tuple[int, ...]:
    """Its tensors as packed.cpp names them; 0: it has none of this name."""
    return tuple(0 if tensor is None else tensor.data_ptr() for tensor in _fields(weight))


def _fields(weight: InterleavedWeight | StripWeight) -> list[torch.Tensor | None]:
    names = ("codes", "high", "scale", "minimum" if isinstance(weight, InterleavedWeight) else "zero", "d", "m")
    return [weight.tensors.get(name) for name in names]


def _kind(weight: InterleavedWeight | StripWeight) -> tuple[int, int, int]:
    """(number, inputs of a block of activations, inputs of a group): the last two are those of strips.cpp."""
    if isinstance(weight, StripWeight):
        return weight.number, weight.block, weight.group
    return weight.number, 0, 0


def _is_packed_stack(weight: Weight) -> bool:
    """Whether experts are packed, each matrix in the order of its inputs."""
    if isinstance(weight, StripWeight):
        return weight.order is None
    return isinstance(weight, InterleavedWeight)
