"""Gated short convolutions (LFM2), with their input and output products. Channels are split over the ranks."""

from __future__ import annotations

import math

import torch
from torch import nn

from quire.kernels.states import ShortConv
from quire.layers.attention.base import AttentionInputs
from quire.layers.build_context import BuildContext
from quire.layers.caches import StateCache, StatePart, StateView
from quire.layers.linear import FusedLinear, FusedPart, RowParallelLinear
from quire.layers.recurrent import Recurrence, kept_rows

PIECE = 256
"""Most channels of a piece of the ring: a piece lies within one page."""


class ShortConvRecurrence(Recurrence):
    """Gates and convolution; see `ShortConv`."""

    conv_name = "conv"
    spec: ShortConv

    def __init__(self, build: BuildContext, layer: int, keep: slice, channels: int, taps: int, bias: bool) -> None:
        """`keep`: this rank's of all `channels`."""
        super().__init__(build, layer, taps, [keep], channels, bias)
        self.spec = ShortConv(self.conv, self.bias)

    def forward(self, projected: torch.Tensor, states: StateView, inputs: AttentionInputs) -> torch.Tensor:
        """[tokens, channels] from the products [tokens, B | C | x]."""
        return self.ops.short_conv(projected, self.spec, states, inputs.of(self.group))


class ShortConvMixer(nn.Module):
    """A gated short convolution with its input and output products."""

    def __init__(self, build: BuildContext, layer: int, taps: int, bias: bool) -> None:
        """`bias`: of the convolution and of both products."""
        super().__init__()
        size = build.config.hidden_size
        keep = build.ranks.slice(size, "channels of short convolutions")
        rows = kept_rows((0, size, 2 * size), (keep, keep, keep))  # B, C, x
        self.in_proj = FusedLinear(build, size, [FusedPart("in_proj", 3 * size, each) for each in rows], bias)
        self.recurrence = ShortConvRecurrence(build, layer, keep, size, taps, bias)
        self.out_proj = RowParallelLinear(build, "out_proj", size, size, bias)

    def forward(self, projected: torch.Tensor, states: StateView, inputs: AttentionInputs) -> torch.Tensor:
        """What `out_proj` takes, from what `in_proj` gives."""
        return self.recurrence(projected, states, inputs)


def short_conv_cache(build: BuildContext, taps: int) -> StateCache:
    """What a row keeps in a layer on this rank: the ring of the convolution's inputs."""
    keep = build.ranks.slice(build.config.hidden_size, "channels of short convolutions")
    channels = keep.stop - keep.start
    piece = math.gcd(channels, PIECE)
    return StateCache((StatePart(channels // piece, (taps, piece), build.dtype),))
