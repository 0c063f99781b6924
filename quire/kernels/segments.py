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
            distinct = np.unique(self.lengths)
            self._groups = []
            for length in distinct.tolist():
                own = starts[self.lengths == length]
                index = None
                if len(distinct) > 1:
                    index = upload((own[:, None] + np.arange(length)).reshape(-1), self.device)
                self._groups.append((index, len(own), length))
        return self._groups


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
