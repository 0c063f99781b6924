"""Processors of models that split large images into tiles, and add the whole image as one more: Idefics3, InternVL."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from quire.errors import ValidationError
from quire.loading.model_config import ModelConfig
from quire.vision.processor import Picture, PlaceholderProcessor, ProcessorFiles, positive, resized, token_id
from quire.vision.tile_processors import CLIP_MEAN, CLIP_STD, HALF, TileSettings, one_side

_MOST_PIXELS = 4096
"""Longest edge that Idefics3 allows before an image is split."""


def cut(pixels: np.ndarray, side: int) -> np.ndarray:
    """[tiles, side, side, 3], row by row; what is left over is cut off."""
    rows, columns = pixels.shape[0] // side, pixels.shape[1] // side
    whole = pixels[: rows * side, : columns * side].reshape(rows, side, columns, side, 3)
    return whole.transpose(0, 2, 1, 3, 4).reshape(-1, side, side, 3)


class Idefics3Processor(PlaceholderProcessor):
    """Idefics3 and SmolVLM: tiles row by row, each behind a token for its place; the whole image at the end."""

    kwargs_known = ("do_image_splitting", "size")
    defaults: ClassVar[Mapping[str, Any]] = {
        "size": {"longest_edge": 4 * 364},
        "image_mean": HALF,
        "image_std": HALF,
        "resample": Image.Resampling.LANCZOS,
    }

    def __init__(self, config: ModelConfig, files: ProcessorFiles, tokenizer: Any) -> None:
        super().__init__(config, files, tokenizer)
        given, vision = files.image, config.raw["vision_config"]
        self.settings = TileSettings.read(given, self.defaults)
        self.longest = int(self.settings.size.get("longest_edge") or max(self.settings.size.values()))
        self.side = int((given.get("max_image_size") or {"longest_edge": 364})["longest_edge"])
        self.splits = bool(given.get("do_image_splitting", True))
        patches = int(vision.get("image_size") or 224) // int(vision.get("patch_size") or 32)
        scale = int(config.raw.get("scale_factor") or 2)
        self.tile_rows = int(patches**2 / scale**2)
        self.fake = token_id(config, tokenizer, text="<fake_token_around_image>")
        self.whole = tokenizer.encode("<global-img>", add_special_tokens=False)
        self.line, self.lines = (tokenizer.encode(text, add_special_tokens=False) for text in ("\n", "\n\n"))

    def _splits(self, kwargs: Mapping[str, Any]) -> tuple[bool, int]:
        splits, size = kwargs.get("do_image_splitting", self.splits), kwargs.get("size") or {}
        if not isinstance(splits, bool) or not isinstance(size, Mapping):
            raise ValidationError(
                f"do_image_splitting must be true or false and size an object with longest_edge; got {splits!r}, "
                f"{size!r}",
                "mm_processor_kwargs",
            )
        longest = positive(size.get("longest_edge", self.longest), "longest_edge")
        if longest > _MOST_PIXELS:
            raise ValidationError(f"longest_edge must be {_MOST_PIXELS} at most, got {longest}", "size", longest)
        return splits, longest

    def _sizes(self, width: int, height: int, longest: int) -> list[tuple[int, int]]:
        """The (width, height) that an image is resized to, first by its longest edge, then to whole tiles."""
        aspect = width / height
        if width >= height:
            first = (longest, _even(int(longest / aspect)))
            across = math.ceil(first[0] / self.side) * self.side
            aspect = first[0] / first[1]
            return [first, (across, math.ceil(int(across / aspect) / self.side) * self.side)]
        first = (_even(int(longest * aspect)), longest)
        down = math.ceil(first[1] / self.side) * self.side
        aspect = first[0] / first[1]
        if first[0] >= first[1]:  # rounding up made it square
            return [first, (down, math.ceil(int(down / aspect) / self.side) * self.side)]
        return [first, (math.ceil(int(down * aspect) / self.side) * self.side, down)]

    def _grid(self, width: int, height: int, splits: bool, longest: int) -> tuple[int, int]:
        """Rows and columns of tiles; (0, 0): the image is one tile."""
        if not splits:
            return 0, 0
        width, height = self._sizes(width, height, longest)[1]
        return (height // self.side, width // self.side) if max(width, height) > self.side else (0, 0)

    def rows_of(self, width: int, height: int) -> int:
        """Embeddings of all tiles."""
        rows, columns = self._grid(width, height, self.splits, self.longest)
        return self.tile_rows * (rows * columns + 1)

    def image(self, image: Image.Image, kwargs: Mapping[str, Any]) -> Picture:
        """The tiles, and the whole image."""
        splits, longest = self._splits(kwargs)
        rows, columns = self._grid(*image.size, splits, longest)
        first, fitted = self._sizes(*image.size, longest)
        resample, side = self.settings.resample, self.side
        pixels = resized(image, *first, resample)
        if splits:
            pixels = resized(Image.fromarray(pixels), *fitted, resample)
        whole = resized(Image.fromarray(pixels), side, side, resample)[None]
        tiles = np.concatenate((cut(pixels, side), whole)) if rows else whole
        arrays = {"pixels": tiles, "norm": self.settings.norm}
        settings = [self.settings, splits, longest, tiles.shape]
        item = self.item("image", [image], self.tile_rows * len(tiles), arrays, settings)
        return Picture(item, self._tokens(rows, columns))

    def _tokens(self, rows: int, columns: int) -> np.ndarray:
        soft = [self.soft_token] * self.tile_rows
        tokens: list[int] = []
        for row in range(rows):
            for column in range(columns):
                place = f"<row_{row + 1}_col_{column + 1}>"
                tokens += [self.fake, *self.tokenizer.encode(place, add_special_tokens=False), *soft]
            tokens += self.line if row < rows - 1 else self.lines
        return np.asarray([*tokens, self.fake, *self.whole, *soft, self.fake], np.int64)


def _even(value: int) -> int:
    """Rounded up to an even number."""
    return max(1, value + value % 2)


class InternVLProcessor(PlaceholderProcessor):
    """InternVL: the grid of tiles nearest to the image's shape; a smaller picture of the whole at the end."""

    kwargs_known = ("min_patches", "max_patches", "crop_to_patches")
    defaults: ClassVar[Mapping[str, Any]] = {
        "size": {"height": 448, "width": 448},
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
    }

    def __init__(self, config: ModelConfig, files: ProcessorFiles, tokenizer: Any) -> None:
        super().__init__(config, files, tokenizer)
        given, vision = files.image, config.raw["vision_config"]
        self.settings = TileSettings.read(given, self.defaults)
        self.side = one_side(vision.get("image_size") or 448)
        patches = self.side // one_side(vision.get("patch_size") or 14)
        self.tile_rows = int(patches * float(config.raw.get("downsample_ratio") or 0.5)) ** 2
        self.least, self.most = int(given.get("min_patches") or 1), int(given.get("max_patches") or 12)
        self.start = token_id(config, tokenizer, text=getattr(tokenizer, "start_image_token", None) or "<img>")
        self.end = token_id(config, tokenizer, text=getattr(tokenizer, "end_image_token", None) or "</img>")

    def _grid(self, width: int, height: int, least: int, most: int) -> tuple[int, int]:
        """Columns and rows of tiles."""
        grids = [(c, r) for c in range(1, most + 1) for r in range(1, most + 1) if least <= c * r <= most]
        best, nearest = (1, 1), math.inf
        for columns, rows in sorted(grids, key=lambda grid: grid[0] * grid[1]):
            distance = abs(width / height - columns / rows)
            is_large = width * height > 0.5 * self.side**2 * columns * rows
            if distance < nearest or (distance == nearest and is_large):
                best, nearest = (columns, rows), distance
        return best

    def _limits(self, kwargs: Mapping[str, Any]) -> tuple[int, int]:
        if kwargs.get("crop_to_patches", True) is False:
            return 1, 1
        most = positive(kwargs.get("max_patches", self.most), "max_patches")
        least = positive(kwargs.get("min_patches", min(self.least, most)), "min_patches")
        if not least <= most <= 64:
            raise ValidationError(
                f"min_patches = {least} and max_patches = {most}: needed is min_patches <= max_patches <= 64",
                "mm_processor_kwargs",
            )
        return least, most

    def rows_of(self, width: int, height: int) -> int:
        """Embeddings of all tiles."""
        columns, rows = self._grid(width, height, self.least, self.most)
        return self.tile_rows * (columns * rows + (columns * rows > 1))

    def image(self, image: Image.Image, kwargs: Mapping[str, Any]) -> Picture:
        """The tiles, and the whole image if there are several."""
        limits = self._limits(kwargs)
        columns, rows = self._grid(*image.size, *limits)
        resample, side = self.settings.resample, self.side
        tiles = cut(resized(image, columns * side, rows * side, resample), side)
        if len(tiles) > 1:
            tiles = np.concatenate((tiles, resized(image, side, side, resample)[None]))
        count = self.tile_rows * len(tiles)
        arrays = {"pixels": tiles, "norm": self.settings.norm}
        item = self.item("image", [image], count, arrays, [self.settings, limits, tiles.shape])
        return Picture(item, np.asarray([self.start, *[self.soft_token] * count, self.end], np.int64))
