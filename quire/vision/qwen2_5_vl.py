"""The encoder of Qwen2.5-VL (arXiv 2502.13923): a transformer most of whose layers attend in windows."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from quire.kernels.segments import Segments, upload
from quire.layers.build_context import BuildContext
from quire.vision.layers import (
    GatedVisionMLP,
    Rotation,
    VisionAttention,
    VisionLinear,
    VisionNorm,
    rotation_2d,
    vision_fields,
)
from quire.vision.qwen_vit import FrameLayout, Packed, QwenVisionEncoder

_DEFAULTS = {
    "depth": 32,
    "hidden_size": 3584,
    "hidden_act": "silu",
    "intermediate_size": 3420,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "fullatt_block_indexes": (7, 15, 23, 31),
}
_EPS = 1e-6


class Qwen2_5VisionBlock(nn.Module):  # noqa: N801
    """Attention and a gated MLP, each behind an RMS norm."""

    def __init__(self, build: BuildContext, size: int, width: int, heads: int, act: str) -> None:
        super().__init__()
        self.norm1 = VisionNorm(build, "norm1", size, _EPS, rms=True)
        self.norm2 = VisionNorm(build, "norm2", size, _EPS, rms=True)
        self.attn = VisionAttention(build, size, heads, "qkv", "proj")
        self.mlp = GatedVisionMLP(build, size, width, act, bias=True)

    def forward(
        self, x: torch.Tensor, stream: torch.Tensor | None, segments: Segments, rotation: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`stream`: the residual stream, to which x is added first; returns what is to be added next, and the stream,
        which is overwritten."""
        normed, stream = self.norm1.add(x, stream)
        normed, stream = self.norm2.add(self.attn(normed, segments, rotation), stream)
        return self.mlp(normed), stream


class Qwen2_5VLEncoder(QwenVisionEncoder):  # noqa: N801
    """Patches in the order of their windows; merged four by four at the end."""

    def __init__(self, build: BuildContext) -> None:
        vision = vision_fields(build.config.raw, _DEFAULTS)
        size, heads = int(vision["hidden_size"]), int(vision["num_heads"])
        super().__init__(build, vision, size // heads)
        self.window = int(vision["window_size"]) // self.patch // self.merge
        self.longest_window = (self.window * self.merge) ** 2
        self.full = frozenset(vision["fullatt_block_indexes"])
        self.patch_embed = VisionLinear(build, "patch_embed.proj", self.kernel, size, bias=False)
        width, act = int(vision["intermediate_size"]), str(vision["hidden_act"])
        blocks = [Qwen2_5VisionBlock(build, size, width, heads, act) for _ in range(int(vision["depth"]))]
        self.blocks = nn.ModuleList(blocks)
        self.merger = QwenMerger(build, size, self.merge, rms=True)

    def make_layout(self, rows: int, columns: int) -> FrameLayout:
        """Rotation and runs, in the order of the windows."""
        order, windows = self._windows(rows // self.merge, columns // self.merge)
        places = self.places(rows, columns).reshape(-1, self.merge**2, 2)[order].reshape(-1, 2)
        return FrameLayout(rotation_2d(places, self.head_dim, 10000.0, self.build.device), windows, order)

    def _windows(self, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
        """(merged blocks in the order of their windows, patches of each window)."""
        row, column = np.indices((rows, columns)).reshape(2, -1)
        window = row // self.window * -(-columns // self.window) + column // self.window
        return np.argsort(window, kind="stable"), np.bincount(window) * self.merge**2

    def transform(self, packed: Packed) -> Generator[None, None, torch.Tensor]:
        """[rows of all items, width]; stops after each layer."""
        x: torch.Tensor = packed.patches.unflatten(0, (-1, self.merge**2))[packed.order].flatten(0, 1)
        x, stream = self.patch_embed(x), None
        for number, block in enumerate(self.blocks):
            x, stream = block(x, stream, packed.whole if number in self.full else packed.windows, packed.rotation)
            yield
        merged: torch.Tensor = self.merger(x, stream)
        return merged[packed.inverse]

    def arrange(self, packed: Packed, frames: Sequence[FrameLayout]) -> None:
        """Merged blocks in the order of their windows, their places in it, and the windows' patches."""
        orders, lengths = zip(*((frame.order, frame.windows) for frame in frames), strict=True)
        starts = np.cumsum([0, *map(len, orders)])
        order = np.concatenate([own + start for own, start in zip(orders, starts, strict=False)])
        inverse = np.empty_like(order)
        inverse[order] = np.arange(len(order))
        device = self.build.device
        packed.order, packed.inverse = upload(np.stack((order, inverse)), device).unbind(0)
        packed.windows = Segments(np.concatenate(lengths), device, windows=True)


class QwenMerger(nn.Module):
    """The norms of neighbouring patches, joined, through an MLP of two products."""

    def __init__(self, build: BuildContext, size: int, merge: int, rms: bool = False) -> None:
        super().__init__()
        joined = size * merge**2
        self.joined = joined
        self.ln_q = VisionNorm(build, "ln_q", size, _EPS, rms)
        self.up = VisionLinear(build, "mlp.0", joined, joined)
        self.down = VisionLinear(build, "mlp.2", joined, build.config.hidden_size)

    def forward(self, x: torch.Tensor, stream: torch.Tensor | None) -> torch.Tensor:
        normed, _ = self.ln_q.add(x, stream)
        return self.down(F.gelu(self.up(normed.reshape(-1, self.joined))))
