"""`TorchOps`: what each kernel computes, in plain torch. Any device, any dtype, arithmetic in float32, and no
synchronization with the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from quire.kernels import reference_states
from quire.kernels.adapters import SlotLowRank, add_low_rank
from quire.kernels.base import CompilableKernel
from quire.kernels.gates import PLAIN_EXPERTS, ExpertVariant, gate_mul
from quire.kernels.kv import LayerKV, QuantizedKV
from quire.kernels.routing import RouteRule, add_shared, route_by_rule
from quire.kernels.segments import Segments, attend_groups
from quire.kernels.states import DeltaNet, Mamba, Mamba2, ShortConv, States, StepRows
from quire.kernels.weights.base import Weight, reference_linear


class TorchOps:
    """`Ops` without kernels of our own: the reference the others are tested against."""

    whole_steps = False

    def linear(
        self,
        x: torch.Tensor,
        weight: Weight,
        bias: torch.Tensor | None = None,
        addend: torch.Tensor | None = None,
    ) -> torch.Tensor:
        product = reference_linear(x, weight, bias)
        return product if addend is None else product.add_(addend)

    def embedding(self, tokens: torch.Tensor, weight: Weight) -> torch.Tensor:
        return F.embedding(tokens, weight) if isinstance(weight, torch.Tensor) else weight.embedding(tokens)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual.add_(x)
        return self.rms_norm(residual, weight, eps), residual

    def norm_stream(
        self, x: torch.Tensor | None, residual: torch.Tensor | None, gain: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if x is not None and residual is not None:
            return self.add_rms_norm(x, residual, gain, eps)
        stream = x if residual is None else residual
        assert stream is not None
        return self.rms_norm(stream, gain, eps), stream

    def copy_stream(self, x: torch.Tensor | None, residual: torch.Tensor | None, out: torch.Tensor) -> None:
        if x is not None and residual is not None:
            torch.add(x, residual, out=out)
        else:
            stream = x if residual is None else residual
            assert stream is not None
            out.copy_(stream)

    def layer_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        stream = x if residual is None else residual.add_(x)
        return F.layer_norm(stream, weight.shape, weight, bias, eps), stream

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        first, second = x.float().chunk(2, dim=-1)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        x.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))

    def attend_segments(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, scale: float
    ) -> torch.Tensor:
        return attend_groups(q, k, v, segments, scale)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (F.silu(gate) * up).to(gate_up.dtype)

    def add_low_rank(self, out: torch.Tensor, x: torch.Tensor, low: SlotLowRank) -> None:
        add_low_rank(out, x, low)

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
        stream = None
        if norm is not None:
            x, stream = self.norm_stream(x, residual, *norm)
        assert x is not None
        out = self.linear(x, weight, bias)
        self.add_low_rank(out, x, low)
        return self.gate_mul(out, activation) if activation else out, stream

    def linear_add(
        self, stream: torch.Tensor, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        return self.linear(x, weight, bias)

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
        normed, stream = self.norm_stream(x, residual, gain, eps)
        if gated:
            return self.gated_linear(normed, weight, bias, activation), stream
        return self.linear(normed, weight, bias), stream

    def gate_mul(self, gate_up: torch.Tensor, activation: str = "silu") -> torch.Tensor:
        return self.silu_mul(gate_up) if activation == "silu" else gate_mul(gate_up, activation)

    def gated_linear(
        self,
        x: torch.Tensor,
        weight: Weight,
        bias: torch.Tensor | None = None,
        activation: str = "silu",
        addend: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self.gate_mul(self.linear(x, weight, bias, addend), activation)

    def route(
        self,
        logits: torch.Tensor,
        top_k: int,
        renormalise: bool,
        counts: torch.Tensor | None = None,
        slots: torch.Tensor | None = None,
        rule: RouteRule | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        routed = logits[:, : logits.shape[1] - (rule or _PLAIN).gates]
        weights, chosen = route_by_rule(routed, top_k, renormalise, rule or _PLAIN)
        real = torch.ones_like(chosen) if slots is None else (slots != 0).to(chosen.dtype)[:, None].expand_as(chosen)
        if counts is not None:
            counts.scatter_add_(0, chosen.flatten(), real.flatten())
        experts = torch.where(real != 0, chosen, -1).int()
        return (weights, experts) if rule is None else add_shared(weights, experts, rule, logits)

    def experts(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        gate_up: Weight,
        down: Weight,
        variant: ExpertVariant = PLAIN_EXPERTS,
    ) -> torch.Tensor:
        # Every expert computes every token: the routing is only on the device.
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for index in range(gate_up.shape[0]):
            chosen = experts == index
            first, second = variant.biases(index)
            features = self.gated_linear(x, gate_up[index], first, variant.activation)
            product = self.linear(features, down[index], second)
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
        gate_up: Weight,
        down: Weight,
        top_k: int,
        renormalise: bool,
        counts: torch.Tensor | None = None,
        slots: torch.Tensor | None = None,
        rule: RouteRule | None = None,
        variant: ExpertVariant = PLAIN_EXPERTS,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, stream = self.norm_stream(x, residual, gain, eps)
        logits = self.linear(normed, router, variant.router_bias)
        weights, experts = self.route(logits, top_k, renormalise, counts, slots, rule)
        return self.experts(normed, weights, experts, gate_up, down, variant), stream

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
        q, k, v = qkv.unflatten(-1, (-1, head_dim)).split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        if norms is not None:
            q_weight, k_weight, eps = norms
            q, k = self.rms_norm(q, q_weight, eps), self.rms_norm(k, k_weight, eps)
        if cos_sin is not None:
            angles = cos_sin[positions].unsqueeze(1)
            q, k = _rotate(q, angles), _rotate(k, angles)
        block_size = kv.shape[3]
        block, offset = slots // block_size, slots % block_size
        if isinstance(kv, QuantizedKV):
            kv.write(0, k, block, offset)
            kv.write(1, v, block, offset)
            return q
        keys, values = kv.unbind(1)
        keys[block, :, offset] = k.to(kv.dtype)
        values[block, :, offset] = v.to(kv.dtype)
        return q

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
        rank, rotary = len(gain), cos_sin.shape[1]
        angles = cos_sin[positions].unsqueeze(1)
        for x in (q[..., -rotary:], latent[:, None, rank:]):
            if interleaved:
                apart = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
                x.copy_(_rotate(apart, angles).unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2))
            else:
                x.copy_(_rotate(x, angles))
        latent[:, :rank] = self.rms_norm(latent[:, :rank].contiguous(), gain, eps)
        block_size = cache.shape[1]
        cache[slots // block_size, slots % block_size] = latent

    def sigmoid_mul(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return (x.float() * gate.float().sigmoid()).to(x.dtype)

    def delta_net(self, projected: torch.Tensor, layer: DeltaNet, states: States, step: StepRows) -> torch.Tensor:
        return reference_states.delta_net(projected, layer, states, step)

    def mamba2(self, projected: torch.Tensor, layer: Mamba2, states: States, step: StepRows) -> torch.Tensor:
        return reference_states.mamba2(projected, layer, states, step)

    def short_conv(self, projected: torch.Tensor, layer: ShortConv, states: States, step: StepRows) -> torch.Tensor:
        return reference_states.short_conv(projected, layer, states, step)

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
        return reference_states.mamba(x, dt, b, c, projected, layer, states, step)

    def gated_norm(
        self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, groups: int, eps: float
    ) -> torch.Tensor:
        return reference_states.gated_norm(x, gate, weight, groups, eps)

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None] | None]:
        return run(), None

    def kernels_of(
        self, weight: Weight, normed: bool, gated: bool, bias: bool, max_rows: int
    ) -> Sequence[CompilableKernel]:
        return []

    def expert_kernels_of(
        self, gate_up: Weight, down: Weight, top_k: int, renormalise: bool, routed: int, max_tokens: int,
        variant: ExpertVariant = PLAIN_EXPERTS,
    ) -> dict[object, Callable[[], object]]:  # fmt: skip
        return {}


_PLAIN = RouteRule()


def _rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotate each pair (i, i + rotary_dim / 2) of x [tokens, heads, head_dim] by its angle."""
    cos, sin = angles.chunk(2, dim=-1)
    half = cos.shape[-1]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((rotated.to(x.dtype), x[..., 2 * half :]), dim=-1)
