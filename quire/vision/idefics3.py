"""The encoder of Idefics3 (arXiv 2408.12637) and SmolVLM: a SigLIP tower, blocks of patches joined, one product."""

from __future__ import annotations

import torch
from torch import nn

from quire.layers.build_context import BuildContext
from quire.messages.media import MediaItem
from quire.vision.layers import VisionLinear, blank_item
from quire.vision.towers import TileEncoder, Tower, pixel_shuffle


def patch_places(side: int) -> torch.Tensor:
    """[side * side]: the learned position of each patch, from its place as a fraction of the side, in float32.

    Rounding puts some patches on their neighbour's position; the models were trained so."""
    borders = torch.arange(1 / side, 1.0, 1 / side)
    places = torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(side))
    line = torch.bucketize(places.clamp(max=1.0 - 1e-6), borders, right=True)
    return (line[:, None] * side + line[None, :]).flatten()


class Connector(nn.Module):
    """One product over joined blocks of patches."""

    def __init__(self, build: BuildContext, size: int, scale: int) -> None:
        super().__init__()
        self.scale = scale
        self.project = VisionLinear(
            build, "modality_projection.proj", size * scale**2, build.config.hidden_size, bias=False
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.project(pixel_shuffle(x, self.scale))


class Idefics3Encoder(TileEncoder):
    """All tiles of an image have the same number of rows."""

    def __init__(self, build: BuildContext) -> None:
        super().__init__(build)
        self.vision_model = tower = Tower(build)
        if build.device.type != "meta":
            tower.embeddings.places = patch_places(tower.embeddings.side).to(build.device)
        self.scale = int(build.config.raw.get("scale_factor") or 2)
        self.connector = Connector(build, tower.size, self.scale)

    def features(self, tiles: torch.Tensor) -> torch.Tensor:
        """Joined and projected."""
        return self.connector(self.vision_model(tiles))

    def largest(self, rows: int) -> MediaItem:
        """An image of zeros, of as many tiles as fit into `rows`."""
        per_tile = (self.vision_model.embeddings.side // self.scale) ** 2
        tiles = max(1, rows // per_tile)
        side = int(self.vision_model.fields["image_size"])
        return blank_item((tiles, side, side), tiles * per_tile)
