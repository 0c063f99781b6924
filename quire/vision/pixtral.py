"""The encoder of Pixtral (arXiv 2410.07073) and Mistral Small 3: images of any size, packed, with rotary positions."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from quire.errors import UnsupportedModelError
from quire.kernels.segments import Segments
from quire.layers.build_context import BuildContext
from quire.messages.media import MediaItem
from quire.vision.layers import (
    GatedVisionMLP,
    Rotation,
    VisionAttention,
    VisionLinear,
    VisionNorm,
    blank_square,
    normalized,
    rope_theta,
    rotation_2d,
    vision_fields,
)
from quire.vision.towers import LlavaEncoder, LlavaProjector

_DEFAULTS = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_channels": 3,
    "patch_size": 16,
    "hidden_act": "gelu",
}
_EPS = 1e-5
_CACHED_GRIDS = 64


class PixtralBlock(nn.Module):
    """Attention and a gated MLP, each behind an RMS norm."""

    def __init__(self, build: BuildContext, size: int, width: int, heads: int, act: str) -> None:
        super().__init__()
        self.attention_norm = VisionNorm(build, "attention_norm", size, _EPS, rms=True)
        self.attention = VisionAttention(build, size, heads, out="o_proj", bias=False)
        self.ffn_norm = VisionNorm(build, "ffn_norm", size, _EPS, rms=True)
        self.feed_forward = GatedVisionMLP(build, size, width, act, bias=False)

    def forward(
        self, x: torch.Tensor, stream: torch.Tensor | None, segments: Segments, rotation: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`stream`: the residual stream, to which x is added first; returns what is to be added next, and the stream,
        which is overwritten."""
        normed, stream = self.attention_norm.add(x, stream)
        normed, stream = self.ffn_norm.add(self.attention(normed, segments, rotation), stream)
        return self.feed_forward(normed), stream


class PixtralTower(nn.Module):
    """The transformer over the patches of all images."""

    def __init__(self, build: BuildContext) -> None:
        super().__init__()
        vision = vision_fields(build.config.raw, _DEFAULTS)
        if (kind := vision.get("model_type")) != "pixtral":
            raise UnsupportedModelError(f"{build.config.architecture} with a vision tower of type {kind!r}")
        layer = build.config.raw.get("vision_feature_layer", -1)
        total = int(vision["num_hidden_layers"])
        if not isinstance(layer, int):
            raise UnsupportedModelError(f"{build.config.architecture} with several vision_feature_layer: {layer!r}")
        self.device = build.device
        self.size, self.heads = int(vision["hidden_size"]), int(vision["num_attention_heads"])
        self.patch, self.theta = int(vision["patch_size"]), rope_theta(vision, 10000.0)
        kernel = (int(vision["num_channels"]), self.patch, self.patch)
        self.patch_conv = VisionLinear(build, "patch_conv", kernel, self.size, bias=False)
        self.ln_pre = VisionNorm(build, "ln_pre", self.size, _EPS, rms=True)
        self.transformer: Any = nn.Module()
        width, act = int(vision["intermediate_size"]), str(vision["hidden_act"])
        blocks = [PixtralBlock(build, self.size, width, self.heads, act) for _ in range(layer % (total + 1))]
        self.transformer.layers = nn.ModuleList(blocks)
        self.rotation = functools.lru_cache(_CACHED_GRIDS)(self._rotation)

    def _rotation(self, rows: int, columns: int) -> Rotation:
        places = np.indices((rows, columns)).reshape(2, -1).T.copy()
        return rotation_2d(places, self.size // self.heads, self.theta, self.device, alternate=True)

    def forward(self, patches: torch.Tensor, grids: Sequence[tuple[int, int]]) -> torch.Tensor:
        cos, sin = zip(*(self.rotation(*grid) for grid in grids), strict=True)
        rotation = (torch.cat(cos), torch.cat(sin))
        segments = Segments(np.asarray([rows * columns for rows, columns in grids]), patches.device)
        x, stream = self.ln_pre(self.patch_conv(patches)), None
        for block in self.transformer.layers:
            x, stream = block(x, stream, segments, rotation)
        return x if stream is None else x + stream


class MergingProjector(LlavaProjector):
    """Mistral Small 3: neighbouring patches are normed and merged by a product before the projection."""

    def __init__(self, build: BuildContext, size: int, merge: int) -> None:
        super().__init__(build, size, bool(build.config.raw.get("multimodal_projector_bias", False)))
        self.norm = VisionNorm(build, "norm", size, build.config.norm_eps, rms=True)
        self.merge = VisionLinear(build, "patch_merger.merging_layer", size * merge**2, size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.merge(x))


class PixtralEncoder(nn.Module):
    """An image is read line by line."""

    def __init__(self, build: BuildContext) -> None:
        super().__init__()
        self.build, self.width = build, build.config.hidden_size
        self.vision_tower = tower = PixtralTower(build)
        merges = build.config.architecture.startswith("Mistral3")
        self.merge = int(build.config.raw.get("spatial_merge_size", 2)) if merges else 1
        bias = bool(build.config.raw.get("multimodal_projector_bias", True))
        projector = (
            MergingProjector(build, tower.size, self.merge) if merges else LlavaProjector(build, tower.size, bias)
        )
        self.multi_modal_projector = projector

    def canonical(self, name: str) -> str:
        """The name here of a checkpoint's tensor."""
        return name.removeprefix("model.")

    @torch.inference_mode()
    def encode(self, items: Sequence[MediaItem]) -> list[torch.Tensor]:
        """[rows, width] of each item."""
        p = self.vision_tower.patch
        patches, grids = [], []
        for item in items:
            pixels = normalized(item.arrays["pixels"][0], item.arrays["norm"], self.build.device)
            rows, columns = pixels.shape[0] // p, pixels.shape[1] // p
            cut = pixels.reshape(rows, p, columns, p, 3).permute(0, 2, 4, 1, 3)
            patches.append(cut.reshape(rows * columns, -1).to(self.build.dtype))
            grids.append((rows, columns))
        x = self.vision_tower(torch.cat(patches), grids)
        projector = self.multi_modal_projector
        if isinstance(projector, MergingProjector):
            split = projector.norm(x).split([rows * columns for rows, columns in grids])
            x = torch.cat([self._joined(part, grid) for part, grid in zip(split, grids, strict=True)])
        return list(projector(x).split([item.rows for item in items]))

    def _joined(self, x: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
        """Neighbouring patches side by side, dimension by dimension."""
        m = self.merge
        cells = x.reshape(grid[0] // m, m, grid[1] // m, m, -1).permute(0, 2, 4, 1, 3)
        return cells.reshape(len(x) // m**2, -1)

    def largest(self, rows: int) -> MediaItem:
        """An image of zeros, as square as it can be."""
        return blank_square(rows, self.vision_tower.patch * self.merge)


def llava_encoder(build: BuildContext) -> nn.Module:
    """That of LLaVA 1.5; or that of Pixtral 12B, which is published under LLaVA's name."""
    is_pixtral = build.config.raw["vision_config"].get("model_type") == "pixtral"
    return PixtralEncoder(build) if is_pixtral else LlavaEncoder(build)
