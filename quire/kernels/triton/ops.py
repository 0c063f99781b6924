"""`TritonOps`: `Ops` with our kernels where they apply; the rest goes to torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from quire.kernels.adapters import SlotLowRank
from quire.kernels.base import CompilableKernel
from quire.kernels.gates import PLAIN_EXPERTS, ExpertVariant, has_gate
from quire.kernels.kv import LayerKV
from quire.kernels.reference import TorchOps
from quire.kernels.routing import RouteRule
from quire.kernels.segments import CUDNN, FLASH, TRITON, Segments, attend_flash, attention_ways, flash_takes
from quire.kernels.states import DeltaNet, Mamba, Mamba2, ShortConv, States, StepRows
from quire.kernels.triton import elementwise, low_rank, vision
from quire.kernels.triton.cublaslt import TunedGemms, tuned_gemms
from quire.kernels.triton.latent.prepare import prepare_latent
from quire.kernels.triton.launch import INTERPRETED
from quire.kernels.triton.moe import experts as moe
from quire.kernels.triton.moe import tuning as moe_tuning
from quire.kernels.triton.moe.common import ExpertsConfig
from quire.kernels.triton.moe.tuning import choose_experts
from quire.kernels.triton.packed_attention import packed_attention
from quire.kernels.triton.qkv import prepare_qkv
from quire.kernels.triton.quantized.base import QuantizedProducts
from quire.kernels.triton.quantized.registry import products_of
from quire.kernels.triton.recurrent import decode, delta_net, mamba, mamba2, norm
from quire.kernels.triton.recurrent.short_conv import short_conv
from quire.kernels.triton.skinny_gemm.candidates import GemmShape
from quire.kernels.triton.skinny_gemm.gemm import (
    GemmConfig,
    skinny_adapted_linear,
    skinny_linear,
    skinny_norm_linear,
    skinny_silu_linear,
)
from quire.kernels.triton.skinny_gemm.tuning import BUCKETS, choose, distinct_kernels
from quire.kernels.weights.base import QuantizedWeight, Weight


def _is_supported(x: torch.Tensor) -> bool:
    """Whether a kernel can take x: a matrix on the device, contiguous in its last dimension, not empty."""
    return (x.is_cuda or INTERPRETED or x.is_meta) and x.dim() == 2 and x.stride(1) == 1 and x.numel() > 0


USE_OWN_GEMMS = not INTERPRETED
"""Whether GEMMs and experts run our kernels. Off in the interpreter, which takes seconds for each; tests enable it."""
FUSED_ADD_MIN_ROWS = 1024
"""From this many rows on cuBLAS adds a GEMM's result to the residual stream in its epilogue: one pass over the stream
less than adding in the norm. With fewer rows the norm, and with it the addition, is fused into the next GEMM."""
COPY_MIN_ROWS = 65
"""From this many rows on a weight in few bits is multiplied by its 16-bit copy, if it has one."""
INVARIANT = GemmConfig("tile", block_n=128, block_m=64, block_k=64, warps=4, stages=4)
"""Batch-invariant: cuBLAS and our tables choose by the number of rows, and tile shapes differ in the order of sums."""


def _for_rows(weight: Weight, x: torch.Tensor | None) -> Weight:
    """The weight that is faster for x: itself, or its 16-bit copy."""
    if isinstance(weight, torch.Tensor) or weight.copy is None or x is None or len(x) < COPY_MIN_ROWS:
        return weight
    return weight.copy


class TritonOps(TorchOps):
    """Kernels for a GPU. In the row-wise ones a row's bits do not depend on its batch."""

    whole_steps = True

    def __init__(self, batch_invariant: bool = False) -> None:
        """`batch_invariant`: GEMMs in float16 and bfloat16 sum in the same order for any number of rows."""
        self._invariant = batch_invariant
        self._products: dict[type, QuantizedProducts] = {}

    def quantized(self, weight: QuantizedWeight) -> QuantizedProducts:
        """The products with weights of this kind."""
        found = self._products.get(type(weight))
        if found is None:
            found = self._products[type(weight)] = products_of(weight)(self, self._invariant)
        return found

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if _is_supported(x) and x.size(1) <= elementwise.MAX_NORM_WIDTH:
            return elementwise.rms_norm(x, weight, eps)
        return super().rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if _is_supported(x) and _is_supported(residual) and x.size(1) <= elementwise.MAX_NORM_WIDTH:
            return elementwise.add_rms_norm(x, residual, weight, eps)
        return super().add_rms_norm(x, residual, weight, eps)

    def linear(
        self,
        x: torch.Tensor,
        weight: Weight,
        bias: torch.Tensor | None = None,
        addend: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if addend is not None:
            return self.linear(x, weight, bias).add_(addend)
        weight = _for_rows(weight, x)
        if isinstance(weight, QuantizedWeight):
            return self.quantized(weight).linear(x, weight, bias)
        config = self._config("linear", x, weight)
        if config is not None:
            return skinny_linear(x, weight, bias, config=config)
        tuned = self._tuned_gemms(x) if bias is None else None
        out = None if tuned is None else tuned.linear(x, weight)
        return super().linear(x, weight, bias) if out is None else out

    def embedding(self, tokens: torch.Tensor, weight: Weight) -> torch.Tensor:
        if isinstance(weight, QuantizedWeight):
            return self.quantized(weight).embedding(tokens, weight)
        return super().embedding(tokens, weight)

    def linear_add(
        self, stream: torch.Tensor, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        weight = _for_rows(weight, x)
        if isinstance(weight, QuantizedWeight):
            return self.quantized(weight).linear_add(stream, x, weight, bias)
        if bias is not None or self._invariant or len(x) < FUSED_ADD_MIN_ROWS or not stream.is_contiguous():
            return self.linear(x, weight, bias)
        tuned = self._tuned_gemms(x)
        if tuned is None or not tuned.linear_add(stream, x, weight):
            stream.addmm_(x, weight.t())
        return None

    def norm_linear(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor | None,
        gain: torch.Tensor,
        eps: float,
        weight: Weight,
        bias: torch.Tensor | None = None,
        gated: bool = False,
        activation: str = "silu",
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if gated and activation != "silu":
            return super().norm_linear(x, residual, gain, eps, weight, bias, gated, activation)
        weight = _for_rows(weight, x if residual is None else residual)
        if isinstance(weight, QuantizedWeight):
            return self.quantized(weight).norm_linear(x, residual, gain, eps, weight, bias, gated)
        if x is not None:
            config = self._config("norm_silu_linear" if gated else "norm_linear", x, weight)
            if config is not None and (residual is None or residual.is_contiguous()):
                return skinny_norm_linear(x, residual, gain, eps, weight, bias, silu=gated, config=config)
        return super().norm_linear(x, residual, gain, eps, weight, bias, gated)

    def gated_linear(
        self,
        x: torch.Tensor,
        weight: Weight,
        bias: torch.Tensor | None = None,
        activation: str = "silu",
        addend: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if activation != "silu" or addend is not None:  # the kernels fuse silu alone
            return super().gated_linear(x, weight, bias, activation, addend)
        weight = _for_rows(weight, x)
        if isinstance(weight, QuantizedWeight):
            return self.quantized(weight).gated_linear(x, weight, bias)
        config = self._config("silu_linear", x, weight)
        return (
            super().gated_linear(x, weight, bias)
            if config is None
            else skinny_silu_linear(x, weight, bias, config=config)
        )

    def _tuned_gemms(self, x: torch.Tensor) -> TunedGemms | None:
        """cuBLASLt with measured algorithms, if it may be used for x."""
        if self._invariant or not USE_OWN_GEMMS or not x.is_cuda or x.dim() != 2 or not len(x):
            return None
        return tuned_gemms()

    def _config(self, kind: str, x: torch.Tensor, weight: torch.Tensor) -> GemmConfig | None:
        """Our kernel for a GEMM; None: cuBLAS is faster, or ours does not support it."""
        if not (
            USE_OWN_GEMMS
            and _is_supported(x)
            and x.is_contiguous()
            and weight.is_contiguous()
            and weight.stride(0) * x.itemsize % 16 == 0
        ):
            return None
        if self._invariant:
            return INVARIANT if kind == "linear" else None
        n, k = weight.shape
        return choose(kind, x.shape[0], n, k, x.dtype)

    def kernels_of(
        self, weight: Weight, normed: bool, gated: bool, bias: bool, max_rows: int
    ) -> Sequence[CompilableKernel]:
        if isinstance(weight, QuantizedWeight):
            found = self.quantized(weight).kernels_of(weight, normed, gated, bias, max_rows)
            if not weight.is_weight_only or weight.dim() != 2:
                return found
            copy = torch.empty(weight.shape, dtype=weight.dtype, device="meta")  # it may get one once it is loaded
            dense = self.kernels_of(copy, normed, gated, bias, max_rows)
            return [*found, *(kernel for kernel in dense if getattr(kernel, "rows", 0) >= COPY_MIN_ROWS)]
        fused = ["norm_silu_linear", "silu_linear"] if gated else ["norm_linear"]
        fused = fused if normed else fused[1:]
        kinds = [*fused, "linear"]
        n, k = weight.shape

        def chosen(shape: GemmShape, rows: int) -> list[GemmConfig]:
            """The configuration if `shape.kind` is the one that runs: the most fused kind that has a kernel."""
            x = weight.new_empty(rows, k, device="meta")
            found = ((kind, self._config(kind, x, weight)) for kind in kinds)
            first, config = next((pair for pair in found if pair[1] is not None), ("", None))
            return [config] if config is not None and first == shape.kind else []

        buckets = [rows for rows in BUCKETS if rows < 2 * max_rows]
        return distinct_kernels([GemmShape(kind, n, k, bias) for kind in kinds], weight.dtype, buckets, chosen)

    def route(
        self,
        logits: torch.Tensor,
        top_k: int,
        renormalise: bool,
        counts: torch.Tensor | None = None,
        slots: torch.Tensor | None = None,
        rule: RouteRule | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if _is_supported(logits) and logits.shape[1] <= moe.MAX_EXPERTS:
            return moe.route(logits, top_k, renormalise, counts, slots, rule)
        return super().route(logits, top_k, renormalise, counts, slots, rule)

    def experts(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        gate_up: Weight,
        down: Weight,
        variant: ExpertVariant = PLAIN_EXPERTS,
    ) -> torch.Tensor:
        if isinstance(gate_up, QuantizedWeight):
            return self.quantized(gate_up).experts(
                x, weights, experts, gate_up, down, variant.activation, variant.gate_up_bias, variant.down_bias
            )
        config = self._experts_config(x, gate_up, down, experts.shape[1])
        if config is None:
            return super().experts(x, weights, experts, gate_up, down, variant)
        return moe.experts(x, weights.contiguous(), experts.contiguous(), gate_up, down, config, variant)  # type: ignore[arg-type]

    def sparse_mlp(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor | None,
        gain: torch.Tensor,
        eps: float,
        router: torch.Tensor,
        gate_up: Weight,
        down: Weight,
        top_k: int,
        renormalise: bool,
        counts: torch.Tensor | None = None,
        slots: torch.Tensor | None = None,
        rule: RouteRule | None = None,
        variant: ExpertVariant = PLAIN_EXPERTS,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if isinstance(gate_up, QuantizedWeight):
            return self.quantized(gate_up).sparse_mlp(
                x, residual, gain, eps, router, gate_up, down, top_k, renormalise, counts, slots, rule, variant
            )  # fmt: skip
        shared, gates = (0, 0) if rule is None else (rule.shared, rule.gates)
        if x is not None and router.shape[0] - gates + shared == gate_up.shape[0]:
            config = self._experts_config(x, gate_up, down, top_k + shared)
            if config is not None and config.kernel == "vector":
                # Four kernels: the norm is fused into the router's GEMM and into the experts' first one.
                logits, stream = self.norm_linear(x, residual, gain, eps, router, variant.router_bias)
                weights, chosen = self.route(logits, top_k, renormalise, counts, slots, rule)
                routing = moe.ChosenExperts(top_k + shared, weights=weights, experts=chosen)
                return moe.vector_experts(stream, routing, gate_up, down, config, (gain, eps), variant), stream  # type: ignore[arg-type]
        return super().sparse_mlp(
            x, residual, gain, eps, router, gate_up, down, top_k, renormalise, counts, slots, rule, variant
        )  # fmt: skip

    def _experts_config(self, x: torch.Tensor, gate_up: Weight, down: Weight, top_k: int) -> ExpertsConfig | None:
        """The experts' kernel and tile shapes; None: ours do not support x."""
        if not (
            USE_OWN_GEMMS
            and isinstance(gate_up, torch.Tensor)
            and isinstance(down, torch.Tensor)
            and _is_supported(x)
            and x.is_contiguous()
            and gate_up.is_contiguous()
            and down.is_contiguous()
            and x.dtype == gate_up.dtype
            and gate_up.shape[0] <= moe.MAX_EXPERTS
        ):
            return None
        if self._invariant:
            return moe_tuning.INVARIANT
        return choose_experts(moe.shape_of(down, top_k), x.shape[0], x.dtype)

    def expert_kernels_of(
        self, gate_up: Weight, down: Weight, top_k: int, renormalise: bool, routed: int, max_tokens: int,
        variant: ExpertVariant = PLAIN_EXPERTS,
    ) -> dict[object, moe.Task]:  # fmt: skip
        if isinstance(gate_up, QuantizedWeight):
            return self.quantized(gate_up).expert_kernels_of(
                gate_up, down, top_k, renormalise, routed, max_tokens, variant.activation, variant.is_biased
            )
        buckets = [tokens for tokens in moe_tuning.BUCKETS if tokens < 2 * max_tokens]
        inputs = (gate_up.new_empty(tokens, gate_up.shape[2], device="meta") for tokens in buckets)
        configs = [self._experts_config(x, gate_up, down, top_k) for x in inputs]
        wanted = [config for config in configs if config is not None]
        return moe.launches(gate_up, down, top_k, renormalise, routed, wanted, variant)  # type: ignore[arg-type]

    def gate_mul(self, gate_up: torch.Tensor, activation: str = "silu") -> torch.Tensor:
        if _is_supported(gate_up) and has_gate(activation):
            return elementwise.silu_mul(gate_up, activation)
        return super().gate_mul(gate_up, activation)

    def layer_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if _is_supported(x) and x.size(1) <= elementwise.MAX_NORM_WIDTH:
            stream = x if residual is None else residual
            return vision.add_layer_norm(x, residual, weight, bias, eps), stream
        return super().layer_norm(x, residual, weight, bias, eps)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        if (x.is_cuda or INTERPRETED) and x.stride(2) == 1 and x.stride(1) == x.shape[2] and len(x):
            vision.rotate(x, cos, sin)
        else:
            super().rotate(x, cos, sin)

    def attend_segments(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, scale: float
    ) -> torch.Tensor:
        way = attention_ways[segments.kind]
        if way == FLASH and flash_takes(q):
            return attend_flash(q, k, v, segments, scale)
        if way == TRITON and (INTERPRETED or (q.is_cuda and q.itemsize == 2)):
            return packed_attention(q, k, v, segments, scale)
        if way == CUDNN and q.is_cuda and q.itemsize == 2:
            with sdpa_kernel(
                [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], set_priority=True
            ):
                return super().attend_segments(q, k, v, segments, scale)
        return super().attend_segments(q, k, v, segments, scale)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return elementwise.silu_mul(gate_up) if _is_supported(gate_up) else super().silu_mul(gate_up)

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
        kernel = prepare_qkv if _is_supported(qkv) and kv.stride()[4] == 1 else super().prepare_qkv
        return kernel(qkv, positions, cos_sin, norms, kv, slots, num_heads, num_kv_heads, head_dim)

    def prepare_latent(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        gain: torch.Tensor,
        eps: float,
        cache: torch.Tensor,
        slots: torch.Tensor,
        interleaved: bool,
    ) -> None:
        kernel = prepare_latent if _is_supported(latent) and cache.stride(2) == 1 else super().prepare_latent
        kernel(q, latent, positions, cos_sin, gain, eps, cache, slots, interleaved)

    def add_low_rank(self, out: torch.Tensor, x: torch.Tensor, low: SlotLowRank) -> None:
        if _is_supported(x) and _is_supported(out) and low_rank.is_supported(low):
            low_rank.expand(low_rank.shrink(x, low), low, out)
        else:
            super().add_low_rank(out, x, low)

    def adapted_linear(
        self,
        x: torch.Tensor | None,
        weight: Weight,
        bias: torch.Tensor | None,
        low: SlotLowRank,
        norm: tuple[torch.Tensor, float] | None = None,
        residual: torch.Tensor | None = None,
        activation: str = "",
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if x is None:
            x, residual = residual, None
        assert x is not None
        if not _is_supported(x) or not low_rank.is_supported(low):
            return super().adapted_linear(x, weight, bias, low, norm, residual, activation)
        dense = _for_rows(weight, x)
        if (config := self._vector_config(x, residual, dense, norm is not None, activation)) is not None:
            assert isinstance(dense, torch.Tensor)
            inner = low_rank.shrink(x, low, residual, norm)
            return skinny_adapted_linear(x, residual, norm, dense, bias, low, inner.sums, bool(activation), config)
        stream = None
        if norm is not None:
            x, stream = self.norm_stream(x, residual, *norm)
        inner, out = low_rank.together(x, low, partial(self.linear, x, weight, bias))
        return low_rank.expand(inner, low, out, activation), stream

    def _vector_config(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: Weight, normed: bool, activation: str
    ) -> GemmConfig | None:
        """The kernel of a product that expands what adapters change in its epilogue, if that is the one to run."""
        is_whole = residual is None or residual.is_contiguous()
        if not isinstance(weight, torch.Tensor) or activation not in ("", "silu") or not is_whole:
            return None
        kind = ("norm_" if normed else "") + ("silu_" if activation else "") + "linear"
        config = self._config(kind, x, weight)
        return config if config is not None and config.kernel == "vector" and not config.programs else None

    def sigmoid_mul(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        if not (_is_supported(x) and _is_supported(gate) and x.is_contiguous()):
            return super().sigmoid_mul(x, gate)
        return norm.sigmoid_mul(x, gate)

    def delta_net(self, projected: torch.Tensor, layer: DeltaNet, states: States, step: StepRows) -> torch.Tensor:
        if not delta_net.is_supported(layer):
            return super().delta_net(projected, layer, states, step)
        out = torch.empty(len(projected), layer.width, dtype=projected.dtype, device=projected.device)
        decodes, single = decode.rows_of(step)
        if decodes:
            decode.delta_net_decode(projected, layer, states, step, out, decodes, single)
        if decodes < step.num_rows:
            delta_net.delta_net_prompts(projected, layer, states, step, out)
        return out

    def mamba2(self, projected: torch.Tensor, layer: Mamba2, states: States, step: StepRows) -> torch.Tensor:
        if not mamba2.is_supported(layer):
            return super().mamba2(projected, layer, states, step)
        out = torch.empty(len(projected), layer.width, dtype=projected.dtype, device=projected.device)
        decodes, single = decode.rows_of(step)
        if decodes:
            decode.mamba2_decode(projected, layer, states, step, out, decodes, single)
        if decodes < step.num_rows:
            mamba2.mamba2_prompts(projected, layer, states, step, out)
        return out

    def short_conv(self, projected: torch.Tensor, layer: ShortConv, states: States, step: StepRows) -> torch.Tensor:
        return short_conv(projected, layer, states, step)

    def mamba(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        projected: torch.Tensor,
        layer: Mamba,
        states: States,
        step: StepRows,
    ) -> torch.Tensor:
        if not mamba.is_supported(layer):
            return super().mamba(x, dt, b, c, projected, layer, states, step)
        return mamba.mamba(x, dt, b, c, projected, layer, states, step)

    def gated_norm(
        self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, groups: int, eps: float
    ) -> torch.Tensor:
        if not (_is_supported(x) and _is_supported(gate)):
            return super().gated_norm(x, gate, weight, groups, eps)
        return norm.gated_norm(x, gate, weight, groups, eps)
