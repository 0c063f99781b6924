"""Encoders of images cut into tiles of one size: CLIP and SigLIP towers, and what models do with their output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from quire.errors import UnsupportedModelError
from quire.kernels.segments import Segments
from quire.layers.build_context import BuildContext
from quire.messages.media import MediaItem
from quire.vision.layers import (
    VisionAttention,
    VisionLinear,
    VisionMLP,
    VisionNorm,
    VisionParameter,
    activation,
    blank_item,
    normalized,
    vision_fields,
)

_COMMON = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
}
_SIGLIP = _COMMON | {"patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
_IDEFICS3 = _SIGLIP | {"patch_size": 32, "hidden_size": 1152, "num_attention_heads": 16}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "clip_vision_model": _COMMON | {"patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
    "siglip_vision_model": _SIGLIP,
    "idefics3": _IDEFICS3,
    "idefics3_vision": _IDEFICS3,
    "smolvlm_vision": _IDEFICS3,
}


class TowerBlock(nn.Module):
    """Attention and an MLP, each behind a layer norm, as CLIP names them."""

    def __init__(self, build: BuildContext, vision: Mapping[str, Any]) -> None:
        super().__init__()
        size, eps = int(vision["hidden_size"]), float(vision["layer_norm_eps"])
        self.layer_norm1 = VisionNorm(build, "layer_norm1", size, eps)
        self.layer_norm2 = VisionNorm(build, "layer_norm2", size, eps)
        self.self_attn = VisionAttention(build, size, int(vision["num_attention_heads"]))
        self.mlp = VisionMLP(build, size, int(vision["intermediate_size"]), str(vision["hidden_act"]))

    def forward(
        self, x: torch.Tensor, stream: torch.Tensor | None, segments: Segments
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`stream`: the residual stream, to which x is added first; returns what is to be added next, and the stream,
        which is overwritten."""
        normed, stream = self.layer_norm1.add(x, stream)
        normed, stream = self.layer_norm2.add(self.self_attn(normed, segments), stream)
        return self.mlp(normed), stream


class TowerEmbeddings(nn.Module):
    """Patches with learned positions; CLIP has a class token before them."""

    def __init__(self, build: BuildContext, vision: Mapping[str, Any], has_class: bool) -> None:
        super().__init__()
        self.patch = int(vision["patch_size"])
        self.side = int(vision["image_size"]) // self.patch
        size, kernel = int(vision["hidden_size"]), (int(vision["num_channels"]), self.patch, self.patch)
        self.patch_embedding = VisionLinear(build, "patch_embedding", kernel, size, bias=not has_class)
        self.position_embedding = VisionParameter(build, "position_embedding.weight", self.side**2 + has_class, size)
        self.class_embedding = VisionParameter(build, "class_embedding", size) if has_class else None
        self.places: torch.Tensor | None = None
        """[patches]: the position that each patch has; None: they are in order."""

    def forward(self, tiles: torch.Tensor) -> torch.Tensor:
        """[tiles, side, side, 3] pixels -> [tiles, tokens, size]."""
        p = self.patch
        count, rows, columns = len(tiles), tiles.shape[1] // p, tiles.shape[2] // p
        patches = tiles.reshape(count, rows, p, columns, p, 3).permute(0, 1, 3, 5, 2, 4)
        x = self.patch_embedding(patches.reshape(count, rows * columns, -1))
        if self.class_embedding is not None:
            x = torch.cat((self.class_embedding.weight.expand(count, 1, -1), x), dim=1)
        positions = self.position_embedding.weight
        return x + (positions if self.places is None else positions[self.places])


class Tower(nn.Module):
    """A CLIP or SigLIP tower, up to the last layer that is read."""

    def __init__(self, build: BuildContext, layers: Sequence[int] | None = None) -> None:
        """`layers`: whose outputs are read, counted from the end if negative, 0: the embeddings; None: the output."""
        super().__init__()
        kind = str((build.config.raw.get("vision_config") or {}).get("model_type"))
        if kind not in _DEFAULTS:
            raise UnsupportedModelError(
                f"{build.config.architecture} with a vision tower of type {kind!r} is not implemented; known: "
                f"{', '.join(_DEFAULTS)}"
            )
        self.fields = vision = vision_fields(build.config.raw, _DEFAULTS[kind])
        self.build, total = build, int(vision["num_hidden_layers"])
        self.size, self.eps = int(vision["hidden_size"]), float(vision["layer_norm_eps"])
        is_clip = kind == "clip_vision_model"
        self.embeddings = TowerEmbeddings(build, vision, is_clip)
        self.pre_layrnorm = VisionNorm(build, "pre_layrnorm", self.size, self.eps) if is_clip else None
        self.read = None if layers is None else [layer % (total + 1) for layer in layers]
        depth = total if self.read is None else max(self.read)
        self.encoder: Any = nn.Module()
        self.encoder.layers = nn.ModuleList([TowerBlock(build, vision) for _ in range(depth)])
        self.post_layernorm = VisionNorm(build, "post_layernorm", self.size, self.eps) if self.read is None else None

    def forward(self, tiles: torch.Tensor) -> torch.Tensor:
        """[tiles, side, side, 3] pixels -> [tiles, tokens, size of all layers that are read]."""
        x = self.embeddings(tiles)
        count, tokens = x.shape[:2]
        x = x.flatten(0, 1)
        if self.pre_layrnorm is not None:
            x = self.pre_layrnorm(x)
        segments = Segments(np.full(count, tokens), x.device)
        read = self.read or ()
        outputs = {0: x.clone()} if 0 in read else {}
        stream = None
        for number, layer in enumerate(self.encoder.layers, start=1):
            x, stream = layer(x, stream, segments)
            if number in read:
                outputs[number] = x + stream
        if self.post_layernorm is not None:
            x = self.post_layernorm.add(x, stream)[0]
        else:
            x = torch.cat([outputs[layer] for layer in read], dim=-1)
        return x.unflatten(0, (count, tokens))


class TileEncoder(nn.Module):
    """Runs the tiles of all items of a call together, and splits the result by item."""

    most_tiles = 64
    """Of one pass: the rest follows in further ones."""

    def __init__(self, build: BuildContext) -> None:
        super().__init__()
        self.build = build
        self.width = build.config.hidden_size

    def canonical(self, name: str) -> str:
        """The name here of a checkpoint's tensor."""
        return name.removeprefix("model.").replace("vision_tower.vision_model.", "vision_tower.", 1)

    def tiles(self, item: MediaItem) -> torch.Tensor:
        """[tiles, side, side, 3], in the model's dtype."""
        pixels = normalized(item.arrays["pixels"], item.arrays["norm"], self.build.device)
        return pixels.to(self.build.dtype)

    @torch.inference_mode()
    def encode(self, items: Sequence[MediaItem]) -> list[torch.Tensor]:
        """[rows, width] of each item."""
        tiles = [self.tiles(item) for item in items]
        passes = torch.cat(tiles).split(self.most_tiles)
        features = torch.cat([self.features(part) for part in passes])
        split = features.split([len(own) for own in tiles])
        return [self.join(own, item) for own, item in zip(split, items, strict=True)]

    def features(self, tiles: torch.Tensor) -> torch.Tensor:
        """[tiles, rows of each, width]."""
        raise NotImplementedError

    def join(self, features: torch.Tensor, item: MediaItem) -> torch.Tensor:
        """The rows of an item from those of its tiles."""
        return features.flatten(0, 1)


def pixel_shuffle(x: torch.Tensor, scale: int) -> torch.Tensor:
    """[tiles, side * side, size] -> [tiles, (side / scale)^2, size * scale^2]: neighbours side by side."""
    side = int(x.shape[1] ** 0.5)
    cells = side // scale
    blocks = x.reshape(len(x), cells, scale, cells, scale, -1).transpose(2, 3)
    return blocks.reshape(len(x), cells**2, -1)


class LlavaProjector(nn.Module):
    """Two products with an activation between them."""

    def __init__(self, build: BuildContext, inputs: int, bias: bool = True) -> None:
        super().__init__()
        size = build.config.hidden_size
        self.act = activation(build.config.raw.get("projector_hidden_act") or "gelu")
        self.up = VisionLinear(build, "linear_1", inputs, size, bias)
        self.down = VisionLinear(build, "linear_2", size, size, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))


class LlavaEncoder(TileEncoder):
    """LLaVA 1.5 (arXiv 2310.03744): one tile an image, the features of one or more layers of the tower."""

    def __init__(self, build: BuildContext) -> None:
        super().__init__(build)
        raw = build.config.raw
        layers = raw.get("vision_feature_layer", -2)
        layers = [layers] if isinstance(layers, int) else list(layers)
        self.drops_class = raw.get("vision_feature_select_strategy", "default") == "default"
        self.vision_tower = Tower(build, layers)
        bias = bool(raw.get("multimodal_projector_bias", True))
        self.multi_modal_projector = LlavaProjector(build, self.vision_tower.size * len(layers), bias)

    def features(self, tiles: torch.Tensor) -> torch.Tensor:
        """Projected; the tower's class token is left out, if the config says so."""
        x = self.vision_tower(tiles)
        return self.multi_modal_projector(x[:, 1:] if self.drops_class else x)

    @property
    def tile_rows(self) -> int:
        """Rows of one tile."""
        return len(self.vision_tower.embeddings.position_embedding.weight) - self.drops_class

    def largest(self, rows: int) -> MediaItem:
        """An image of zeros."""
        side = int(self.vision_tower.fields["image_size"])
        return blank_item((1, side, side), self.tile_rows)


class LlavaNextEncoder(LlavaEncoder):
    """LLaVA-NeXT (1.6): the whole image in one tile, and its parts in further ones, joined without their padding; a
    learned row ends each line."""

    def __init__(self, build: BuildContext) -> None:
        super().__init__(build)
        self.image_newline = VisionParameter(build, "image_newline", build.config.hidden_size)

    def join(self, features: torch.Tensor, item: MediaItem) -> torch.Tensor:
        """The whole image; then its parts, line by line."""
        down, across, top, bottom, left, right = item.arrays["parts"].tolist()
        side = self.vision_tower.embeddings.side
        parts = features[1:].unflatten(0, (down, across)).unflatten(2, (side, side))
        lines = parts.transpose(1, 2).reshape(down * side, across * side, -1)[top:bottom, left:right]
        ends = self.image_newline.weight.expand(len(lines), 1, -1)
        return torch.cat((features[0], torch.cat((lines, ends), dim=1).flatten(0, 1)))

    def largest(self, rows: int) -> MediaItem:
        """An image of zeros, of the most tiles that fit into `rows`."""
        side, per_tile = self.vision_tower.embeddings.side, self.tile_rows
        choices = self.build.config.raw.get("image_grid_pinpoints") or [[672, 672]]
        pixels = int(self.vision_tower.fields["image_size"])
        best = (1, 1)
        for height, width in choices:
            grid = (height // pixels, width // pixels)
            if per_tile + grid[0] * side * (grid[1] * side + 1) <= rows and grid[0] * grid[1] > best[0] * best[1]:
                best = grid
        down, across = best
        parts = np.asarray([down, across, 0, down * side, 0, across * side], np.int32)
        total = per_tile + down * side * (across * side + 1)
        return blank_item((1 + down * across, pixels, pixels), total, parts=parts)


class Gemma3Projector(nn.Module):
    """Neighbouring patches averaged, normed, and through one product."""

    def __init__(self, build: BuildContext, size: int, eps: float, side: int) -> None:
        super().__init__()
        self.side = side
        self.pool = side // int(int(build.config.raw.get("mm_tokens_per_image") or 256) ** 0.5)
        self.size, self.eps = size, eps
        self.mm_soft_emb_norm = VisionNorm(build, "mm_soft_emb_norm", size, eps, rms=True)
        self.weight = VisionParameter(build, "mm_input_projection_weight", size, build.config.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cells = self.side // self.pool
        pooled = x.reshape(len(x), cells, self.pool, cells, self.pool, self.size).mean((2, 4)).flatten(1, 2)
        normed = torch.nn.functional.rms_norm(pooled.float(), (self.size,), None, self.eps)
        return (normed * (1 + self.mm_soft_emb_norm.weight.float())).to(x.dtype) @ self.weight.weight


class Gemma3Encoder(TileEncoder):
    """Gemma 3 (arXiv 2503.19786): a SigLIP tower, 256 rows an image."""

    def __init__(self, build: BuildContext) -> None:
        super().__init__(build)
        self.vision_tower = tower = Tower(build)
        self.multi_modal_projector = Gemma3Projector(build, tower.size, tower.eps, tower.embeddings.side)

    def features(self, tiles: torch.Tensor) -> torch.Tensor:
        """Pooled and projected."""
        return self.multi_modal_projector(self.vision_tower(tiles))

    def largest(self, rows: int) -> MediaItem:
        """An image of zeros."""
        cells = self.vision_tower.embeddings.side // self.multi_modal_projector.pool
        side = int(self.vision_tower.fields["image_size"])
        return blank_item((1, side, side), cells**2)
