"""Mamba 1 mixers (arXiv 2312.00752) as Jamba has them: with norms of the time step, B and C.

Channels are split over the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from quire.kernels.states import RING, Mamba, ShortConv
from quire.layers.attention.base import AttentionInputs
from quire.layers.build_context import BuildContext
from quire.layers.caches import StateCache, StatePart, StateView
from quire.layers.linear import ColumnParallelLinear, FusedLinear, FusedPart, RowParallelLinear
from quire.layers.norm import RMSNorm
from quire.layers.recurrent import Recurrence, kept_rows
from quire.loading.weights import Target

PIECE = 32
"""Most channels of a piece of the state: those of a program of the scan. A power of two."""

Selection = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Time steps [tokens, channels], B and C [tokens, state_dim]."""


@dataclass(frozen=True)
class MambaSettings:
    """The sizes of a model's Mamba 1 mixers."""

    channels: int
    """On all ranks."""
    state_dim: int
    taps: int
    rank: int
    """Of the product that makes the time steps."""
    conv_bias: bool
    bias: bool
    """Of the input and output products."""

    def kept(self, build: BuildContext) -> slice:
        """The rank's channels."""
        return build.ranks.slice(self.channels, "Mamba channels")

    def cache(self, build: BuildContext) -> StateCache:
        """What a row keeps in a layer on this rank."""
        kept = self.kept(build)
        count = kept.stop - kept.start
        piece = math.gcd(count, PIECE)
        state = StatePart(count // piece, (self.state_dim, piece), torch.float32)
        return StateCache((state, StatePart(count // piece, (self.taps, piece), build.dtype)))


def _transposed_decay(log: torch.Tensor) -> torch.Tensor:
    return -log.float().exp().t()


class MambaRecurrence(Recurrence):
    """Convolution, then the selective scan and its gate; see `ShortConv` and `Mamba`."""

    spec: Mamba

    def __init__(self, build: BuildContext, layer: int, settings: MambaSettings) -> None:
        keep = settings.kept(build)
        super().__init__(build, layer, settings.taps, [keep], settings.channels, settings.conv_bias)
        self.keep = keep

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(build.memory.zeros(shape, torch.float32), requires_grad=False)

        count = keep.stop - keep.start
        self.decay, self.dt_bias, self.skip = parameter(settings.state_dim, count), parameter(count), parameter(count)
        self.spec = Mamba(self.decay, self.dt_bias, self.skip)
        self.conv_spec = ShortConv(self.conv, self.bias, gated=False, part=RING)

    def forward(
        self,
        projected: torch.Tensor,
        states: StateView,
        inputs: AttentionInputs,
        select: Callable[[torch.Tensor], Selection] | None = None,
    ) -> torch.Tensor:
        """[tokens, channels] from the products [tokens, x | z]. `select`: makes time steps, B and C from the
        convolution's outputs; None: they are zeros."""
        step = inputs.of(self.group)
        x = self.ops.short_conv(projected, self.conv_spec, states, step)
        if select is None:
            shared = x.new_zeros(len(x), len(self.decay))
            dt, b, c = torch.zeros_like(x), shared, shared
        else:
            dt, b, c = select(x)
        return self.ops.mamba(x, dt, b, c, projected, self.spec, states, step)

    def targets(self) -> dict[str, list[Target]]:
        """The rank's channels."""
        total, keep = self.total, (self.keep,)
        return super().targets() | {
            "A_log": [Target(self.decay, (total, len(self.decay)), keep, _transposed_decay)],
            "D": [Target(self.skip, (total,), keep)],
            "dt_proj.bias": [Target(self.dt_bias, (total,), keep)],
        }


class MambaMixer(nn.Module):
    """A Mamba 1 mixer with its products and norms."""

    def __init__(self, build: BuildContext, layer: int, settings: MambaSettings) -> None:
        super().__init__()
        size, channels, rank, state = build.config.hidden_size, settings.channels, settings.rank, settings.state_dim
        keep = settings.kept(build)
        rows = kept_rows((0, channels), (keep, keep))
        self.widths = [rank, state, state]
        self.in_proj = FusedLinear(
            build, size, [FusedPart("in_proj", 2 * channels, each) for each in rows], settings.bias
        )
        self.recurrence = MambaRecurrence(build, layer, settings)
        self.x_proj = RowParallelLinear(build, "x_proj", channels, rank + 2 * state, bias=False)
        self.dt_layernorm = RMSNorm(build, "dt_layernorm", rank)
        self.b_layernorm = RMSNorm(build, "b_layernorm", state)
        self.c_layernorm = RMSNorm(build, "c_layernorm", state)
        self.dt_proj = ColumnParallelLinear(build, "dt_proj", rank, channels, bias=False)  # added in float32
        self.out_proj = RowParallelLinear(build, "out_proj", channels, size, settings.bias)

    def forward(self, projected: torch.Tensor, states: StateView, inputs: AttentionInputs) -> torch.Tensor:
        """What `out_proj` takes, from what `in_proj` gives."""
        return self.recurrence(projected, states, inputs, self._select)

    def _select(self, x: torch.Tensor) -> Selection:
        rank, b, c = self.x_proj(x).split(self.widths, dim=-1)
        dt, _ = self.dt_proj.norm_linear(self.dt_layernorm, rank, None)
        return dt, self.b_layernorm.normed(b), self.c_layernorm.normed(c)
