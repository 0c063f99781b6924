"""Attention as a model file sees it: a fused qkv in, the heads' outputs out."""

from __future__ import annotations

import torch
from torch import nn

from quire.kernels.kv import LayerKV, QuantizedKV
from quire.layers.attention.base import AttentionInputs, AttentionSpec, LastTokens
from quire.layers.build_context import BuildContext
from quire.layers.linear import Heads
from quire.layers.mrope import mixed_rotations, position_axes
from quire.loading.weights import Target


class Sinks(nn.Module):
    """A learned logit for each query head of this rank, see `AttentionSpec`."""

    def __init__(self, build: BuildContext, heads: Heads, name: str) -> None:
        super().__init__()
        self.name = name
        self.total = build.config.num_heads
        self.keep = slice(heads.query.start, heads.query.stop)
        self.weight = build.parameter(len(heads.query))

    def targets(self) -> dict[str, list[Target]]:
        """Those of the rank's heads."""
        return {self.name: [Target(self.weight, (self.total,), (self.keep,))]}


def alibi_slopes(build: BuildContext, heads: Heads) -> torch.Tensor:
    """The slopes of this rank's heads (arXiv 2108.12409): 2^(-8 i / n) of n heads, n a power of two; further heads have
    those between."""
    total = build.config.num_heads
    power = 1 << (total.bit_length() - 1)
    slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    slopes += [2 ** (-8 * i / (2 * power)) for i in range(1, 2 * (total - power), 2)]
    own = slopes[heads.query.start : heads.query.stop]
    return torch.tensor(own, dtype=torch.float32, device=build.device)


class Attention(nn.Module):
    """Norm and rotate, write K and V to the cache, attend. Has no weights of its own but the scales of an 8-bit cache
    (`kv_scales` [2, kv_heads] float32, see `scales.py`)."""

    def __init__(
        self,
        build: BuildContext,
        heads: Heads,
        layer: int,
        cos_sin: torch.Tensor | None,
        norms: tuple[torch.Tensor, torch.Tensor, float] | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
        sinks: torch.Tensor | None = None,
        slopes: torch.Tensor | None = None,
        sees_spans: bool = True,
    ) -> None:
        """`layer`: its index in the whole model, whose window it has. `scale`: 1 / sqrt(head_dim) if None. `soft_cap`,
        `sinks`, `slopes` (of this rank's heads) and `sees_spans`: see `AttentionSpec`."""
        super().__init__()
        self.ops = build.ops
        self.backend = build.attention
        self.cos_sin = cos_sin
        self.norms = norms
        self.num_heads = len(heads.query)
        self.num_kv_heads = len(heads.kv)
        self.head_dim = heads.dim
        self.kv_heads = heads.kv
        self.num_all_kv_heads = build.config.num_kv_heads
        self.dtype = build.dtype
        has_scales = build.kv_format.codes is not None and not build.kv_format.per_token
        scales = torch.ones(2, len(heads.kv), dtype=torch.float32, device=build.device) if has_scales else None
        self.register_buffer("kv_scales", scales, persistent=False)
        self.has_unit_scales = True
        scale = heads.dim**-0.5 if scale is None else scale
        self.spec = AttentionSpec(scale, build.config.windows[layer], soft_cap, sinks, slopes, sees_spans)
        self.axes = position_axes(build)
        self.group = 0
        self._owner: tuple[Attention, ...] = ()  # a tuple: its module is not a part of this one

    kv_scales: torch.Tensor | None

    def read_from(self, owner: Attention) -> None:
        """Read the cache of another layer, and write none."""
        self._owner = (owner,)

    def scaled(self, kv: LayerKV) -> LayerKV:
        """The layer's cache with the scales of the layer that writes it, if it has any."""
        writer = self._owner[0] if self._owner else self
        if writer.kv_scales is None or not isinstance(kv, QuantizedKV):
            return kv
        return kv.scaled(writer.kv_scales, writer.has_unit_scales)

    def forward(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        kv: LayerKV,
        inputs: AttentionInputs,
        last: LastTokens | None = None,
    ) -> torch.Tensor:
        """The heads' outputs [T, heads * head_dim]. With `last`: only of its tokens, but K and V of all are written."""
        kv = self.scaled(kv)
        inputs = inputs.of(self.group)
        attended = inputs if last is None else last.inputs.of(self.group)
        self.backend.prepare(self.num_heads, kv, attended, self.spec)
        slots = torch.zeros_like(inputs.slots) if self._owner else inputs.slots  # zeros: the null block's
        cos_sin = self.cos_sin
        if positions.dim() > 1 and cos_sin is not None:
            cos_sin, positions = mixed_rotations(cos_sin, positions, self.axes, inputs.common)
        q = self.ops.prepare_qkv(
            qkv,
            positions,
            cos_sin,
            self.norms,
            kv,
            slots,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
        )
        return self.backend.attend(q if last is None else q[last.tokens], kv, attended, self.spec)
