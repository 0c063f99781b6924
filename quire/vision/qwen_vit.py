"""What the encoders of the Qwen-VL models share: patches in blocks that are merged, of pictures of any size."""

from __future__ import annotations

import functools
import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from quire.kernels.segments import FLASH, TRITON, WHOLE, WINDOWS, SegmentBuffers, Segments, attention_ways
from quire.layers.build_context import BuildContext
from quire.messages.media import MediaItem
from quire.vision.layers import Rotation, blank_square, normalized, rotation_2d

T = TypeVar("T")
_CACHED_GRIDS = 64
GRAPH_PATCHES = (256, 512, 768, 1024, 1536, 2048)
"""Patches of the calls that are captured. Larger ones keep the device busy for longer than their launches take: nine a
layer, of some microseconds, against 0.08 us a patch on an H200."""
MOST_RUNS = 32
"""Frames of a call that is captured."""
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


@dataclass
class Packed:
    """The items of a call, one after another: all that the transformer reads, on the device."""

    patches: torch.Tensor
    rotation: Rotation
    """Of every patch."""
    whole: Segments
    """The runs that attend within themselves: the frames…"""
    windows: Segments | None = None
    """…and, in some layers of some families, the windows within them."""
    order: torch.Tensor | None = None
    """Where there are windows, merged blocks in their order…"""
    inverse: torch.Tensor | None = None
    """…and the place of each block in it."""
    taps: tuple[torch.Tensor, torch.Tensor] | None = None
    """See `FrameLayout`."""
    grids: Sequence[Grid] = ()

    @property
    def segments(self) -> list[Segments]:
        """Of all layers."""
        return [each for each in (self.whole, self.windows) if each is not None]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All but the segments."""
        given = [self.patches, *self.rotation, self.order, self.inverse, *(self.taps or ())]
        return [tensor for tensor in given if tensor is not None]


def finish(parts: Generator[None, None, T]) -> T:
    """What a generator returns in the end."""
    try:
        while True:
            next(parts)
    except StopIteration as end:
        found: T = end.value
        return found


class EncoderGraph:
    """The transformer for calls of at most so many patches, in fixed memory."""

    def __init__(self, encoder: QwenVisionEncoder, patches: int, pool: Any) -> None:
        """`pool`: a `GraphPool`."""
        side = math.isqrt(patches) // encoder.merge * encoder.merge
        blank = encoder.pack([blank_square((side // encoder.merge) ** 2, encoder.patch * encoder.merge)])
        self.patches = patches
        scale = -(-patches // len(blank.patches)) + 1
        fixed = [tensor.repeat(scale, *[1] * (tensor.dim() - 1)) for tensor in blank.tensors]  # indices stay valid
        sizes = [patches * len(tensor) // len(blank.patches) for tensor in blank.tensors]
        self.tensors = [tensor[:size].clone() for tensor, size in zip(fixed, sizes, strict=True)]
        device = encoder.build.device
        rest = iter(self.tensors)
        self.inputs = Packed(
            next(rest),
            (next(rest), next(rest)),
            SegmentBuffers(WHOLE, MOST_RUNS, patches, patches, device),
        )
        if blank.order is not None:
            assert blank.windows is not None
            self.inputs.order, self.inputs.inverse = next(rest), next(rest)
            runs = patches // encoder.merge**2 // 2 + MOST_RUNS
            self.inputs.windows = SegmentBuffers(WINDOWS, runs, patches, encoder.longest_window, device)
        if blank.taps is not None:
            self.inputs.taps = next(rest), next(rest)
        self._fill(blank)
        self._graph = pool.capture(lambda: finish(encoder.transform(self.inputs)), warm_up=True)

    @property
    def segments(self) -> list[SegmentBuffers]:
        """Those that the graph reads."""
        return [each for each in self.inputs.segments if isinstance(each, SegmentBuffers)]

    def fits(self, packed: Packed) -> bool:
        """Whether the call can run in this graph."""
        return all(own.fits(each) for own, each in zip(self.segments, packed.segments, strict=True))

    def _fill(self, packed: Packed) -> None:
        for own, given in zip(self.tensors, packed.tensors, strict=True):
            own[: len(given)].copy_(given)
        for buffers, segments in zip(self.segments, packed.segments, strict=True):
            buffers.fill(segments)

    def run(self, packed: Packed) -> torch.Tensor:
        """[rows, width], more of them than the call has: the rest is of no image."""
        self._fill(packed)
        found: torch.Tensor = self._graph.replay()
        return found


class EncoderGraphs:
    """Graphs of an encoder for calls of several sizes."""

    def __init__(self, encoder: QwenVisionEncoder, pool: Any) -> None:
        self._graphs = [EncoderGraph(encoder, patches, pool) for patches in reversed(GRAPH_PATCHES)][::-1]

    def find(self, packed: Packed) -> EncoderGraph | None:
        """The smallest graph that the call fits into; None: it is launched kernel by kernel."""
        return next((graph for graph in self._graphs if graph.fits(packed)), None)


class QwenVisionEncoder(nn.Module):
    """Cuts items into patches, packs them, and splits the result. A family has the transformer."""

    def __init__(self, build: BuildContext, vision: Mapping[str, Any], head_dim: int) -> None:
        super().__init__()
        self.build = build
        self.patch, self.merge = int(vision["patch_size"]), int(vision["spatial_merge_size"])
        self.frames = int(vision["temporal_patch_size"])
        self.head_dim = head_dim
        self.longest_window = 0
        """Patches, in families with windows."""
        self.width = build.config.hidden_size
        self.kernel = (int(vision["in_channels"]), self.frames, self.patch, self.patch)
        self.layout = functools.lru_cache(_CACHED_GRIDS)(self.make_layout)
        self.graphs: EncoderGraphs | None = None
        self.blocks: Any = ()

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
        lengths = np.concatenate([np.full(count, rows * columns) for count, rows, columns in grids])
        cos, sin = zip(*(frame.rotation for frame in frames), strict=True)
        packed = Packed(
            torch.cat([patches for patches, _ in cut]),
            (torch.cat(cos), torch.cat(sin)),
            Segments(lengths, self.build.device),
            grids=grids,
        )
        self.arrange(packed, frames)
        return packed

    def arrange(self, packed: Packed, frames: Sequence[FrameLayout]) -> None:
        """Add what only this family reads. `frames`: the layout of each frame of each item."""

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
        return finish(self.encode_parts(items))

    @property
    def parts(self) -> int:
        """How often `encode_parts` stops: after each layer."""
        return len(self.blocks)

    def encode_parts(self, items: Sequence[MediaItem]) -> Generator[None, None, list[torch.Tensor]]:
        """The same, layer by layer; what is captured, at once."""
        packed = self.pack(items)
        graph = None if self.graphs is None else self.graphs.find(packed)
        counts = [item.rows for item in items]
        if graph is None:
            found = yield from self.transform(packed)
            return list(found.split(counts))
        return list(graph.run(packed)[: sum(counts)].clone().split(counts))  # the pool's next graph overwrites it

    def capture(self, pool: Any) -> None:
        """Capture the transformer for small calls, whose kernels take less time than their launches."""
        has_kernels = all(way in (FLASH, TRITON) for way in attention_ways.values())  # others look at the lengths
        if self.build.dtype.itemsize == 2 and self.head_dim % 8 == 0 and has_kernels:
            self.graphs = EncoderGraphs(self, pool)

    def transform(self, packed: Packed) -> Generator[None, None, torch.Tensor]:
        """[rows of all items, width]; stops after each layer."""
        raise NotImplementedError

    def largest(self, rows: int) -> MediaItem:
        """An image of zeros, as square as it can be."""
        return blank_square(rows, self.patch * self.merge)
