"""The encoder of Gemma 4: images of any shape, packed, with learned and rotary positions; patches are averaged at the
end, three by three."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from quire.kernels.segments import Segments, upload
from quire.layers.build_context import BuildContext
from quire.messages.media import MediaItem
from quire.vision.layers import (
    Rotation,
    VisionLinear,
    VisionNorm,
    VisionParameter,
    activation,
    blank_square,
    normalized,
    rope_theta,
    vision_fields,
)

_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "pooling_kernel_size": 3,
    "patch_size": 16,
    "position_embedding_size": 10240,
    "use_clipped_linears": False,
    "standardize": False,
}
_BOUNDS = ("input_min", "input_max", "output_min", "output_max")
_CACHED_GRIDS = 64


class ClippedLinear(nn.Module):
    """A product whose inputs and outputs may be clipped."""

    def __init__(self, build: BuildContext, inputs: int, outputs: int, clips: bool) -> None:
        super().__init__()
        self.linear = VisionLinear(build, "linear", inputs, outputs, bias=False)
        self.clips = clips
        for name in _BOUNDS if clips else ():
            self.add_module(name, VisionParameter(build, name))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.clips:
            return self.linear(x)
        low, high, least, most = (self._modules[name].weight for name in _BOUNDS)  # type: ignore[union-attr]
        return self.linear(x.clamp(low, high)).clamp(least, most)  # type: ignore[arg-type]


def unit_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """An RMS norm without a weight."""
    return F.rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype)


class Gemma4VisionNorm(VisionNorm):
    """An RMS norm whose weight is applied in float32."""

    def __init__(self, build: BuildContext, name: str, size: int, eps: float) -> None:
        super().__init__(build, name, size, eps, rms=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), (self.size,), self.weight.float(), self.eps).to(x.dtype)


def rotate_apart(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """[T, heads, dim]: the first half of a head turns by the column, the second by the row."""
    cos, sin = rotation  # [T, 1, 2, dim / 4]
    first, second = x.float().unflatten(-1, (2, 2, -1)).unbind(-2)
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-2)
    return turned.flatten(-3).to(x.dtype)


class Gemma4VisionAttention(nn.Module):
    """Attention with norms of queries, keys and values."""

    def __init__(self, build: BuildContext, vision: Mapping[str, Any]) -> None:
        super().__init__()
        self.ops = build.ops
        size, self.dim, eps = int(vision["hidden_size"]), int(vision["head_dim"]), float(vision["rms_norm_eps"])
        self.heads, self.kv_heads = int(vision["num_attention_heads"]), int(vision["num_key_value_heads"])
        clips = bool(vision["use_clipped_linears"])
        self.q_proj = ClippedLinear(build, size, self.heads * self.dim, clips)
        self.k_proj = ClippedLinear(build, size, self.kv_heads * self.dim, clips)
        self.v_proj = ClippedLinear(build, size, self.kv_heads * self.dim, clips)
        self.o_proj = ClippedLinear(build, self.heads * self.dim, size, clips)
        self.q_norm = Gemma4VisionNorm(build, "q_norm", self.dim, eps)
        self.k_norm = Gemma4VisionNorm(build, "k_norm", self.dim, eps)
        self.eps = eps

    def forward(self, x: torch.Tensor, segments: Segments, rotation: Rotation) -> torch.Tensor:
        q, k, v = (linear(x).unflatten(-1, (-1, self.dim)) for linear in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate_apart(self.q_norm(q), rotation), rotate_apart(self.k_norm(k), rotation)
        v = unit_norm(v, self.eps)
        if (repeat := self.heads // self.kv_heads) > 1:
            k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
        return self.o_proj(self.ops.attend_segments(q, k, v, segments, 1.0))


class Gemma4VisionMLP(nn.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, build: BuildContext, vision: Mapping[str, Any]) -> None:
        super().__init__()
        size, width, clips = (vision[name] for name in ("hidden_size", "intermediate_size", "use_clipped_linears"))
        self.act = activation(vision["hidden_activation"])
        self.gate_proj = ClippedLinear(build, size, width, clips)
        self.up_proj = ClippedLinear(build, size, width, clips)
        self.down_proj = ClippedLinear(build, width, size, clips)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Gemma4VisionBlock(nn.Module):
    """Attention and MLP, each normed before and after."""

    def __init__(self, build: BuildContext, vision: Mapping[str, Any]) -> None:
        super().__init__()
        norm = functools.partial(
            Gemma4VisionNorm, build, size=int(vision["hidden_size"]), eps=float(vision["rms_norm_eps"])
        )
        self.self_attn = Gemma4VisionAttention(build, vision)
        self.mlp = Gemma4VisionMLP(build, vision)
        self.input_layernorm, self.post_attention_layernorm = norm("input_layernorm"), norm("post_attention_layernorm")
        self.pre_feedforward_layernorm = norm("pre_feedforward_layernorm")
        self.post_feedforward_layernorm = norm("post_feedforward_layernorm")

    def forward(self, x: torch.Tensor, segments: Segments, rotation: Rotation) -> torch.Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), segments, rotation))
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class Gemma4Tower(nn.Module):
    """The transformer over the patches of all images, and the average of blocks of them."""

    def __init__(self, build: BuildContext) -> None:
        super().__init__()
        self.fields = vision = vision_fields(build.config.raw, _DEFAULTS)
        self.size, self.patch = int(vision["hidden_size"]), int(vision["patch_size"])
        self.pool, self.dim = int(vision["pooling_kernel_size"]), int(vision["head_dim"])
        self.theta, self.device = rope_theta(vision, 100.0), build.device
        self.patch_embedder: Any = nn.Module()
        self.patch_embedder.input_proj = VisionLinear(build, "input_proj", 3 * self.patch**2, self.size, bias=False)
        self.patch_embedder.table = VisionParameter(
            build, "position_embedding_table", 2, int(vision["position_embedding_size"]), self.size
        )
        self.encoder: Any = nn.Module()
        blocks = [Gemma4VisionBlock(build, vision) for _ in range(int(vision["num_hidden_layers"]))]
        self.encoder.layers = nn.ModuleList(blocks)
        standardizes = bool(vision["standardize"])
        self.std_bias = VisionParameter(build, "std_bias", self.size) if standardizes else None
        self.std_scale = VisionParameter(build, "std_scale", self.size) if standardizes else None
        self.layout = functools.lru_cache(_CACHED_GRIDS)(self._layout)

    def _layout(self, rows: int, columns: int) -> tuple[torch.Tensor, Rotation]:
        """(column and row of each patch; its rotation)."""
        row, column = np.indices((rows, columns)).reshape(2, -1)
        places = torch.from_numpy(np.stack((column, row), axis=1))
        half = self.dim // 2
        frequencies = 1.0 / self.theta ** (torch.arange(0, half, 2, dtype=torch.float32) / half)
        angles = upload(((places.float()[..., None] * frequencies).unsqueeze(1)).numpy(), self.device)
        return upload(places.numpy(), self.device), (angles.cos(), angles.sin())

    def forward(self, patches: torch.Tensor, grids: Sequence[tuple[int, int]]) -> torch.Tensor:
        """[rows of all images, size]."""
        layouts = [self.layout(*grid) for grid in grids]
        places = torch.cat([place for place, _ in layouts])
        cos, sin = zip(*(rotation for _, rotation in layouts), strict=True)
        rotation = (torch.cat(cos), torch.cat(sin))
        table = self.patch_embedder.table.weight
        x = self.patch_embedder.input_proj(patches) + (table[0][places[:, 0]] + table[1][places[:, 1]])
        segments = Segments(np.asarray([rows * columns for rows, columns in grids]), x.device)
        for block in self.encoder.layers:
            x = block(x, segments, rotation)
        pooled = [self._pooled(part, grid) for part, grid in zip(x.split(self._counts(grids)), grids, strict=True)]
        out = torch.cat(pooled).float() * self.size**0.5
        if self.std_bias is not None and self.std_scale is not None:
            out = (out - self.std_bias.weight.float()) * self.std_scale.weight.float()
        return out.to(x.dtype)

    @staticmethod
    def _counts(grids: Sequence[tuple[int, int]]) -> list[int]:
        return [rows * columns for rows, columns in grids]

    def _pooled(self, x: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
        k = self.pool
        cells = x.float().reshape(grid[0] // k, k, grid[1] // k, k, -1)
        return cells.mean((1, 3)).flatten(0, 1).to(x.dtype)


class Gemma4Encoder(nn.Module):
    """The tower, normed and projected."""

    def __init__(self, build: BuildContext) -> None:
        super().__init__()
        self.build, self.width = build, build.config.hidden_size
        self.vision_tower = Gemma4Tower(build)
        self.eps = float(self.vision_tower.fields["rms_norm_eps"])
        self.embed_vision = VisionLinear(
            build, "embed_vision.embedding_projection", self.vision_tower.size, self.width, bias=False
        )

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
            cut = pixels.reshape(rows, p, columns, p, 3).transpose(1, 2).reshape(rows * columns, -1)
            patches.append(cut.to(self.build.dtype))
            grids.append((rows, columns))
        x = unit_norm(self.vision_tower(torch.cat(patches), grids), self.eps)
        return list(self.embed_vision(x).split([item.rows for item in items]))

    def largest(self, rows: int) -> MediaItem:
        """An image of zeros, as square as it can be."""
        return blank_square(rows, self.vision_tower.patch * self.vision_tower.pool)
