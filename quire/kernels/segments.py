"""Packed sequences: tokens of several pictures one after another, each run of which attends within itself.

`Segments` is made once for each call of an encoder, on the host, from the runs' lengths. What kernels need of it on the
device is uploaded when first asked for, from pinned memory, without waiting for the device.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import torch
from torch.nn import functional as F

FLASH, TRITON, GROUPS, CUDNN = "flash", "triton", "groups", "cudnn"
WAYS = (FLASH, TRITON, GROUPS, CUDNN)
"""How attention over segments is computed on a GPU: torch's FlashAttention over packed tokens, the kernel of
`kernels/triton/packed_attention.py`, torch's attention over runs of one length, or the same by cuDNN."""
WHOLE, WINDOWS = "whole", "windows"
attention_ways: dict[str, str] = dict(
    zip((WHOLE, WINDOWS), os.environ.get("QUIRE_SEGMENT_ATTENTION", f"{FLASH},{FLASH}").split(","), strict=True)
)
"""The way for whole pictures, and the one for windows within them. `benchmarks/gpu/images.py` compares them."""


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array on the device. On a GPU through pinned memory, so that the copy waits for nothing."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class Segments:
    """Runs of a packed sequence, each of which attends within itself."""

    is_partial = False
    """Whether tokens after the last run belong to none, and attend to nothing."""

    def __init__(
        self, lengths: np.ndarray | Sequence[int], device: torch.device, windows: bool = False, longest: int = 0
    ) -> None:
        """`windows`: the runs are short. `longest`: a bound on the runs, if it is not the longest of them."""
        self.lengths = np.asarray(lengths, np.int64)
        self.kind = WINDOWS if windows else WHOLE
        self.device = device
        self.total = int(self.lengths.sum())
        self.longest = longest or int(self.lengths.max(initial=0))
        self._starts: torch.Tensor | None = None
        self._tiles: dict[int, torch.Tensor] = {}
        self._groups: list[tuple[torch.Tensor | None, int, int]] | None = None

    @property
    def starts(self) -> torch.Tensor:
        """[runs + 1] int32: where each run begins, and where the last one ends."""
        if self._starts is None:
            starts = np.zeros(len(self.lengths) + 1, np.int32)
            np.cumsum(self.lengths, out=starts[1:])
            self._starts = upload(starts, self.device)
        return self._starts

    def tiles(self, size: int) -> torch.Tensor:
        """[tiles, 4] int32: the first of at most `size` tokens of a run, where the run begins and ends, and 0; those of
        the longest runs first."""
        if size not in self._tiles:
            self._tiles[size] = upload(tile_list(self.lengths, size), self.device)
        return self._tiles[size]

    @property
    def groups(self) -> list[tuple[torch.Tensor | None, int, int]]:
        """Runs of one length together: (their tokens, None: all in order; runs; length of each)."""
        if self._groups is None:
            starts = np.cumsum(self.lengths) - self.lengths
            distinct = np.unique(self.lengths[self.lengths > 0])
            self._groups = []
            for length in distinct.tolist():
                own = starts[self.lengths == length]
                index = None
                if len(distinct) > 1 or self.is_partial:
                    index = upload((own[:, None] + np.arange(length)).reshape(-1), self.device)
                self._groups.append((index, len(own), length))
        return self._groups


class SegmentBuffers(Segments):
    """Segments in memory that stays where it is, for graphs: filled with other runs before each replay."""

    is_partial = True

    def __init__(self, kind: str, most_runs: int, tokens: int, longest: int, device: torch.device) -> None:
        """For at most so many runs of at most `longest` tokens each, and `tokens` together."""
        super().__init__(np.zeros(most_runs, np.int64), device, kind == WINDOWS, longest)
        self.tokens = tokens
        self._starts = torch.zeros(most_runs + 1, dtype=torch.int32, device=device)

    def fits(self, other: Segments) -> bool:
        """Whether there is room for these."""
        return len(other.lengths) <= len(self.lengths) and other.longest <= self.longest and other.total <= self.tokens

    def tiles(self, size: int) -> torch.Tensor:
        """Room for as many as there can be; those of no run are empty."""
        if size not in self._tiles:
            most = self.tokens // size + len(self.lengths)
            self._tiles[size] = torch.zeros(most, 4, dtype=torch.int32, device=self.device)
            self._tiles[size].copy_(self._padded_tiles(size))
        return self._tiles[size]

    def _padded_tiles(self, size: int) -> torch.Tensor:
        found = tile_list(self.lengths, size)
        padded = np.zeros((self.tokens // size + len(self.lengths), 4), np.int32)
        padded[: len(found)] = found
        return upload(padded, self.device)

    def fill(self, other: Segments) -> None:
        """Become these segments; further runs are empty."""
        self.lengths = np.zeros_like(self.lengths)
        self.lengths[: len(other.lengths)] = other.lengths
        self.total, self._groups = other.total, None
        starts = np.zeros(len(self.lengths) + 1, np.int32)
        np.cumsum(self.lengths, out=starts[1:])
        self.starts.copy_(upload(starts, self.device))
        for size, tiles in self._tiles.items():
            tiles.copy_(self._padded_tiles(size))


def tile_list(lengths: np.ndarray, size: int) -> np.ndarray:
    """See `Segments.tiles`."""
    begins = np.cumsum(lengths) - lengths
    order = np.argsort(-lengths, kind="stable")
    counts = -(-lengths[order] // size)
    run = np.repeat(order, counts)
    within = np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts, counts)
    begin = begins[run]
    return np.stack((begin + within * size, begin, begin + lengths[run], np.zeros_like(run)), axis=1).astype(np.int32)


def attend_groups(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, scale: float) -> torch.Tensor:
    """Attention of [T, heads, dim] within each run; [T, heads * dim]. Runs of one length are computed together."""
    parts = []
    groups = segments.groups
    for index, count, length in groups:
        own = (x if index is None else x[index] for x in (q, k, v))
        queries, keys, values = (x.unflatten(0, (count, length)).transpose(1, 2) for x in own)
        attended = F.scaled_dot_product_attention(queries, keys, values, scale=scale)
        parts.append(attended.transpose(1, 2).flatten(2).flatten(0, 1))
    if groups[0][0] is None:
        return parts[0]
    out = torch.empty_like(q, memory_format=torch.contiguous_format).flatten(1)
    for (index, _, _), part in zip(groups, parts, strict=True):
        out[index] = part
    return out


def attend_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, scale: float) -> torch.Tensor:
    """The same by torch's FlashAttention for packed sequences: no padding, no groups. 16-bit floats on a GPU."""
    starts, longest = segments.starts, segments.longest
    out = torch.ops.aten._flash_attention_forward(
        q, k, v, starts, starts, longest, longest, 0.0, False, False, scale=scale
    )
    return out[0].flatten(1)


def flash_takes(q: torch.Tensor) -> bool:
    """Whether torch's FlashAttention can compute with heads of this size and type."""
    return q.is_cuda and q.itemsize == 2 and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
