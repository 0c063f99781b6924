"""The encoder of Qwen2-VL (arXiv 2409.12191): a transformer over whole images of any size."""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import nn

from quire.kernels.segments import Segments
from quire.layers.build_context import BuildContext
from quire.vision.layers import (
    Rotation,
    VisionAttention,
    VisionLinear,
    VisionMLP,
    VisionNorm,
    vision_fields,
)
from quire.vision.qwen2_5_vl import QwenMerger
from quire.vision.qwen_vit import Packed, QwenVisionEncoder

_DEFAULTS = {
    "depth": 32,
    "embed_dim": 1280,
    "hidden_act": "quick_gelu",
    "mlp_ratio": 4,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_EPS = 1e-6


class QwenVisionBlock(nn.Module):
    """Attention and an MLP, each behind a layer norm."""

    def __init__(
        self, build: BuildContext, size: int, width: int, heads: int, act: str, mlp: tuple[str, str] = ("fc1", "fc2")
    ) -> None:
        super().__init__()
        self.norm1 = VisionNorm(build, "norm1", size, _EPS)
        self.norm2 = VisionNorm(build, "norm2", size, _EPS)
        self.attn = VisionAttention(build, size, heads, "qkv", "proj")
        self.mlp = VisionMLP(build, size, width, act, mlp)

    def forward(
        self, x: torch.Tensor, stream: torch.Tensor | None, segments: Segments, rotation: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`stream`: the residual stream, to which x is added first; returns what is to be added next, and the stream,
        which is overwritten."""
        normed, stream = self.norm1.add(x, stream)
        normed, stream = self.norm2.add(self.attn(normed, segments, rotation), stream)
        return self.mlp(normed), stream


class Qwen2VLEncoder(QwenVisionEncoder):
    """Patches, merged four by four at the end."""

    def __init__(self, build: BuildContext) -> None:
        vision = vision_fields(build.config.raw, _DEFAULTS)
        size, heads, act = int(vision["embed_dim"]), int(vision["num_heads"]), str(vision["hidden_act"])
        super().__init__(build, vision, size // heads)
        self.patch_embed = VisionLinear(build, "patch_embed.proj", self.kernel, size, bias=False)
        width = int(size * vision["mlp_ratio"])
        blocks = [QwenVisionBlock(build, size, width, heads, act) for _ in range(int(vision["depth"]))]
        self.blocks = nn.ModuleList(blocks)
        self.merger = QwenMerger(build, size, self.merge)

    def transform(self, packed: Packed) -> Generator[None, None, torch.Tensor]:
        """[rows of all items, width]; stops after each layer."""
        x, stream = self.patch_embed(packed.patches), None
        for block in self.blocks:
            x, stream = block(x, stream, packed.whole, packed.rotation)
            yield
        merged: torch.Tensor = self.merger(x, stream)
        return merged
