"""What the encoders of the Qwen-VL models share: patches in blocks that are merged, of pictures of any size."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from quire.kernels.segments import Segments
from quire.layers.build_context import BuildContext
from quire.messages.media import MediaItem
from quire.vision.layers import Rotation, blank_square, normalized, rotation_2d

_CACHED_GRIDS = 64
Grid = tuple[int, int, int]
"""Patches of an item: frames (or pairs of frames), rows, columns."""


@dataclass(frozen=True)
class FrameLayout:
    """What depends on the rows and columns of a frame alone."""

    rotation: Rotation
    windows: np.ndarray | None = None
    """Patches of each window, where layers have windows."""
    order: np.ndarray | None = None
    """Merged blocks in the order of the windows."""
    taps: tuple[torch.Tensor, torch.Tensor] | None = None
    """[patches, taps]: which learned positions, and how much of each, where they are interpolated."""


@dataclass(frozen=True)
class Packed:
    """The items of a call, one after another."""

    patches: torch.Tensor
    grids: Sequence[Grid]
    frames: Sequence[FrameLayout]
    """Of each frame of each item."""

    def rotation(self) -> Rotation:
        """Of every patch."""
        cos, sin = zip(*(frame.rotation for frame in self.frames), strict=True)
        return torch.cat(cos), torch.cat(sin)

    def segments(self) -> Segments:
        """The runs that attend within themselves: the frames."""
        lengths = np.concatenate([np.full(frames, rows * columns) for frames, rows, columns in self.grids])
        return Segments(lengths, self.patches.device)


class QwenVisionEncoder(nn.Module):
    """Cuts items into patches, packs them, and splits the result. A family has the transformer."""

    def __init__(self, build: BuildContext, vision: Mapping[str, Any], head_dim: int) -> None:
        super().__init__()
        self.build = build
        self.patch, self.merge = int(vision["patch_size"]), int(vision["spatial_merge_size"])
        self.frames = int(vision["temporal_patch_size"])
        self.head_dim = head_dim
        self.width = build.config.hidden_size
        self.kernel = (int(vision["in_channels"]), self.frames, self.patch, self.patch)
        self.layout = functools.lru_cache(_CACHED_GRIDS)(self.make_layout)

    def canonical(self, name: str) -> str:
        """The name here of a checkpoint's tensor."""
        return name.removeprefix("model.").removeprefix("visual.")

    def make_layout(self, rows: int, columns: int) -> FrameLayout:
        """What depends on a frame's size; made once for each."""
        return FrameLayout(rotation_2d(self.places(rows, columns), self.head_dim, 10000.0, self.build.device))

    def places(self, rows: int, columns: int) -> np.ndarray:
        """[rows * columns, 2]: row and column of each patch of a frame, block after block."""
        m = self.merge
        place = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), axis=-1)
        return place.reshape(rows // m, m, columns // m, m, 2).transpose(0, 2, 1, 3, 4).reshape(-1, 2)

    def pack(self, items: Sequence[MediaItem]) -> Packed:
        """Patches of all items."""
        cut = [self._cut(item) for item in items]
        grids = [grid for _, grid in cut]
        frames = [self.layout(rows, columns) for count, rows, columns in grids for _ in range(count)]
        return Packed(torch.cat([patches for patches, _ in cut]), grids, frames)

    def _cut(self, item: MediaItem) -> tuple[torch.Tensor, Grid]:
        """[patches, channels * frames * height * width], in the model's dtype."""
        x = normalized(item.arrays["pixels"], item.arrays["norm"], self.build.device).to(self.build.dtype)
        if missing := -len(x) % self.frames:
            x = torch.cat((x, x[-1:].expand(missing, -1, -1, -1)))
        p, m = self.patch, self.merge
        grid = (len(x) // self.frames, x.shape[1] // p, x.shape[2] // p)
        x = x.reshape(grid[0], self.frames, grid[1] // m, m, p, grid[2] // m, m, p, 3)
        return x.permute(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(grid[0] * grid[1] * grid[2], -1), grid

    @torch.inference_mode()
    def encode(self, items: Sequence[MediaItem]) -> list[torch.Tensor]:
        """[rows, width] of each item."""
        packed = self.pack(items)
        return list(self.transform(packed).split([item.rows for item in items]))

    def transform(self, packed: Packed) -> torch.Tensor:
        """[rows of all items, width]."""
        raise NotImplementedError

    def largest(self, rows: int) -> MediaItem:
        """An image of zeros, as square as it can be."""
        return blank_square(rows, self.patch * self.merge)
