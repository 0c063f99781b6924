"""The encoder of InternVL 3 (arXiv 2504.10479), in the layout of transformers: a tower whose residuals are scaled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from quire.kernels.segments import Segments
from quire.layers.build_context import BuildContext
from quire.messages.media import MediaItem
from quire.vision.layers import (
    VisionAttention,
    VisionLinear,
    VisionMLP,
    VisionNorm,
    VisionParameter,
    blank_item,
    vision_fields,
)
from quire.vision.tile_processors import one_side
from quire.vision.towers import LlavaProjector, TileEncoder, pixel_shuffle

_DEFAULTS = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "attention_bias": False,
    "use_qk_norm": False,
    "intermediate_size": 4096,
    "hidden_act": "gelu",
    "norm_type": "layer_norm",
    "layer_norm_eps": 1e-6,
    "image_size": 448,
    "patch_size": 14,
    "num_channels": 3,
    "use_absolute_position_embeddings": True,
    "use_mean_pooling": True,
}


class InternVLAttention(VisionAttention):
    """Queries and keys may be normed over all heads at once."""

    def __init__(self, build: BuildContext, size: int, vision: Mapping[str, Any]) -> None:
        bias = bool(vision["attention_bias"])
        super().__init__(
            build, size, int(vision["num_attention_heads"]), out="projection_layer", bias=bias, out_bias=True
        )
        norms = bool(vision["use_qk_norm"])
        self.q_norm = VisionNorm(build, "q_norm", size, 1e-6, rms=True) if norms else None
        self.k_norm = VisionNorm(build, "k_norm", size, 1e-6, rms=True) if norms else None

    def forward(self, x: torch.Tensor, segments: Segments, rotation: Any = None) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (each.unflatten(-1, (self.heads, self.dim)) for each in (q, k, v))
        return self.out(self.ops.attend_segments(q, k, v, segments, self.scale))


class InternVLBlock(nn.Module):
    """Attention and an MLP, each behind a norm and scaled by dimension before it is added."""

    def __init__(self, build: BuildContext, vision: Mapping[str, Any]) -> None:
        super().__init__()
        size, eps, rms = int(vision["hidden_size"]), float(vision["layer_norm_eps"]), vision["norm_type"] == "rms_norm"
        self.layernorm_before = VisionNorm(build, "layernorm_before", size, eps, rms)
        self.layernorm_after = VisionNorm(build, "layernorm_after", size, eps, rms)
        self.attention = InternVLAttention(build, size, vision)
        self.mlp = VisionMLP(build, size, int(vision["intermediate_size"]), str(vision["hidden_act"]))
        self.lambda_1 = VisionParameter(build, "lambda_1", size)
        self.lambda_2 = VisionParameter(build, "lambda_2", size)

    def forward(self, x: torch.Tensor, segments: Segments) -> torch.Tensor:
        x = x + self.lambda_1.weight * self.attention(self.layernorm_before(x), segments)
        return x + self.lambda_2.weight * self.mlp(self.layernorm_after(x))


class InternVLTower(nn.Module):
    """Patches with a class token and learned positions."""

    def __init__(self, build: BuildContext, layer: int) -> None:
        """`layer`: the last that is computed, counted from the end."""
        super().__init__()
        vision = vision_fields(build.config.raw, _DEFAULTS)
        self.patch = one_side(vision["patch_size"])
        self.image_side = one_side(vision["image_size"])
        self.side = self.image_side // self.patch
        self.size = size = int(vision["hidden_size"])
        kernel = (int(vision["num_channels"]), self.patch, self.patch)
        self.embeddings: Any = nn.Module()
        self.embeddings.patches = VisionLinear(build, "patch_embeddings.projection", kernel, size)
        self.embeddings.cls_token = VisionParameter(build, "cls_token", 1, 1, size)
        has_positions = bool(vision["use_absolute_position_embeddings"])
        positions: Any = None
        if has_positions:
            positions = VisionParameter(build, "position_embeddings", 1, self.side**2 + 1, size)
        self.embeddings.positions = positions
        total = int(vision["num_hidden_layers"])
        self.encoder: Any = nn.Module()
        self.encoder.layer = nn.ModuleList([InternVLBlock(build, vision) for _ in range(layer % (total + 1))])
        norms_output = layer == -1 and not vision["use_mean_pooling"]
        eps = float(vision["layer_norm_eps"])
        self.layernorm = VisionNorm(build, "layernorm", size, eps) if norms_output else None

    def forward(self, tiles: torch.Tensor) -> torch.Tensor:
        """[tiles, side, side, 3] pixels -> [tiles, 1 + patches, size]."""
        count, p, side = len(tiles), self.patch, self.side
        patches = tiles.reshape(count, side, p, side, p, 3).permute(0, 1, 3, 5, 2, 4).reshape(count, side**2, -1)
        x = torch.cat((self.embeddings.cls_token.weight.expand(count, 1, -1), self.embeddings.patches(patches)), dim=1)
        if self.embeddings.positions is not None:
            x = x + self.embeddings.positions.weight
        segments = Segments(np.full(count, x.shape[1]), x.device)
        tokens = x.shape[1]
        x = x.flatten(0, 1)
        for block in self.encoder.layer:
            x = block(x, segments)
        return (x if self.layernorm is None else self.layernorm(x)).unflatten(0, (count, tokens))


class InternVLProjector(LlavaProjector):
    """Normed, then two products."""

    def __init__(self, build: BuildContext, size: int) -> None:
        super().__init__(build, size)
        self.layer_norm = VisionNorm(build, "layer_norm", size, 1e-5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.layer_norm(x))


class InternVLEncoder(TileEncoder):
    """All tiles of an image have the same number of rows."""

    def __init__(self, build: BuildContext) -> None:
        super().__init__(build)
        raw = build.config.raw
        self.vision_tower = InternVLTower(build, int(raw.get("vision_feature_layer", -1)))
        self.scale = int(1 / float(raw.get("downsample_ratio") or 0.5))
        self.drops_class = raw.get("vision_feature_select_strategy", "default") == "default"
        self.multi_modal_projector = InternVLProjector(build, self.vision_tower.size * self.scale**2)

    def features(self, tiles: torch.Tensor) -> torch.Tensor:
        """Joined and projected."""
        x = self.vision_tower(tiles)
        return self.multi_modal_projector(pixel_shuffle(x[:, 1:] if self.drops_class else x, self.scale))

    def largest(self, rows: int) -> MediaItem:
        """An image of zeros, of as many tiles as fit into `rows`."""
        per_tile = (self.vision_tower.side // self.scale) ** 2
        tiles = max(1, rows // per_tile)
        side = self.vision_tower.image_side
        return blank_item((tiles, side, side), tiles * per_tile)
