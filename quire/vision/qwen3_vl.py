"""The encoder of Qwen3-VL and Qwen3.5: learned positions beside rotary ones, and features for early decoder layers
(deepstack, arXiv 2406.04334) where the config names layers of the encoder for them."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from quire.kernels.segments import upload
from quire.layers.build_context import BuildContext
from quire.vision.layers import VisionLinear, VisionNorm, VisionParameter, rotation_2d, vision_fields
from quire.vision.qwen2_vl import QwenVisionBlock
from quire.vision.qwen_vit import FrameLayout, Packed, QwenVisionEncoder

_DEFAULTS = {
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 2304,
}
_MLP = ("linear_fc1", "linear_fc2")


class Qwen3Merger(nn.Module):
    """Neighbouring patches, joined, through an MLP of two products; the norm is before or after they are joined."""

    def __init__(self, build: BuildContext, size: int, merge: int, norms_joined: bool) -> None:
        super().__init__()
        self.joined, self.norms_joined = size * merge**2, norms_joined
        self.norm = VisionNorm(build, "norm", self.joined if norms_joined else size, 1e-6)
        self.up = VisionLinear(build, _MLP[0], self.joined, self.joined)
        self.down = VisionLinear(build, _MLP[1], self.joined, build.config.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x.reshape(-1, self.joined)) if self.norms_joined else self.norm(x).reshape(-1, self.joined)
        return self.down(F.gelu(self.up(x)))


class Qwen3VLEncoder(QwenVisionEncoder):
    """Rows have the merged output, then the features for each early layer of the decoder."""

    deepstack_by_default: tuple[int, ...] = (8, 16, 24)

    def __init__(self, build: BuildContext) -> None:
        defaults = _DEFAULTS | {"deepstack_visual_indexes": self.deepstack_by_default}
        vision = vision_fields(build.config.raw, defaults)
        size, heads = int(vision["hidden_size"]), int(vision["num_heads"])
        super().__init__(build, vision, size // heads)
        self.deepstack = [int(layer) for layer in vision["deepstack_visual_indexes"]]
        self.width = build.config.hidden_size * (1 + len(self.deepstack))
        self.side = math.isqrt(int(vision["num_position_embeddings"]))
        self.patch_embed = VisionLinear(build, "patch_embed.proj", self.kernel, size)
        self.pos_embed = VisionParameter(build, "pos_embed.weight", int(vision["num_position_embeddings"]), size)
        width, act = int(vision["intermediate_size"]), str(vision["hidden_act"])
        blocks = [QwenVisionBlock(build, size, width, heads, act, _MLP) for _ in range(int(vision["depth"]))]
        self.blocks = nn.ModuleList(blocks)
        self.merger = Qwen3Merger(build, size, self.merge, norms_joined=False)
        mergers = [Qwen3Merger(build, size, self.merge, norms_joined=True) for _ in self.deepstack]
        self.deepstack_merger_list = nn.ModuleList(mergers)

    def make_layout(self, rows: int, columns: int) -> FrameLayout:
        """Rotations, and the learned positions between which each patch lies."""
        places, device = self.places(rows, columns), self.build.device
        rotation = rotation_2d(places, self.head_dim, 10000.0, device)
        return FrameLayout(rotation, taps=self._taps(places, rows, columns))

    def _taps(self, places: np.ndarray, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Bilinear, corners on corners."""
        where = places.astype(np.float32) * (self.side - 1) / np.maximum([rows - 1, columns - 1], 1).astype(np.float32)
        low = np.floor(where)
        share = where - low
        index, weight = [], []
        for down in (0, 1):
            for right in (0, 1):
                row, column = np.minimum(low + np.asarray([down, right]), self.side - 1).astype(np.int64).T
                index.append(row * self.side + column)
                weight.append(np.abs(1 - down - share[:, 0]) * np.abs(1 - right - share[:, 1]))
        device = self.build.device
        weights = upload(np.stack(weight, 1).astype(np.float32), device).to(self.build.dtype)
        return upload(np.stack(index, 1), device), weights

    def arrange(self, packed: Packed, frames: Sequence[FrameLayout]) -> None:
        """The learned positions."""
        taps = [frame.taps for frame in frames if frame.taps is not None]
        index, share = zip(*taps, strict=True)
        packed.taps = torch.cat(index), torch.cat(share)

    def transform(self, packed: Packed) -> Generator[None, None, torch.Tensor]:
        """[rows of all items, width]; stops after each layer."""
        assert packed.taps is not None
        index, share = packed.taps
        learned = F.embedding_bag(index, self.pos_embed.weight, per_sample_weights=share, mode="sum")
        x, stream = self.patch_embed(packed.patches).add_(learned), None
        deeper = []
        for number, block in enumerate(self.blocks):
            x, stream = block(x, stream, packed.whole, packed.rotation)
            if number in self.deepstack:
                deeper.append(self.deepstack_merger_list[self.deepstack.index(number)](x + stream))
            yield
        return torch.cat((self.merger(x if stream is None else x + stream), *deeper), dim=1)


class Qwen3_5Encoder(Qwen3VLEncoder):  # noqa: N801
    """Qwen3.5 and 3.6: without deepstack."""

    deepstack_by_default = ()
