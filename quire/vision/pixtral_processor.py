"""Images for Pixtral and Mistral Small 3: of any size, read line by line, with a token at the end of each line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

from quire.errors import ValidationError
from quire.loading.model_config import ModelConfig
from quire.vision.processor import (
    MediaProcessor,
    Picture,
    PlaceholderProcessor,
    ProcessorFiles,
    norm_of,
    positive,
    resized,
    token_id,
)
from quire.vision.tile_processors import CLIP_MEAN, CLIP_STD, LlavaProcessor


class PixtralProcessor(PlaceholderProcessor):
    """Images are only made smaller, to a longest edge, and to whole patches."""

    kwargs_known = ("size", "longest_edge")

    def __init__(self, config: ModelConfig, files: ProcessorFiles, tokenizer: Any) -> None:
        super().__init__(config, files, tokenizer)
        given, vision = files.image, config.raw["vision_config"]
        merge = int(config.raw.get("spatial_merge_size", 2)) if config.architecture.startswith("Mistral3") else 1
        self.cell = int(vision.get("patch_size") or 16) * merge
        """Pixels of a side of what becomes one embedding."""
        size = given.get("size") or {"longest_edge": 1024}
        self.longest = int(size["longest_edge"] if isinstance(size, Mapping) else size)
        self.resample = int(given.get("resample", Image.Resampling.BICUBIC))
        self.norm = norm_of(
            given.get("image_mean") or CLIP_MEAN,
            given.get("image_std") or CLIP_STD,
            float(given.get("rescale_factor", 1 / 255)),
        )
        names = files.processor
        self.line_end = token_id(config, tokenizer, text=names.get("image_break_token") or "[IMG_BREAK]")
        self.end = token_id(config, tokenizer, text=names.get("image_end_token") or "[IMG_END]")

    def _longest(self, kwargs: Mapping[str, Any]) -> int:
        size = kwargs.get("size") or {}
        if not isinstance(size, Mapping):
            raise ValidationError(f"size must be an object with longest_edge, got {size!r}", "size", size)
        asked = kwargs.get("longest_edge", size.get("longest_edge", self.longest))
        return min(positive(asked, "longest_edge"), self.longest)

    def _cells(self, width: int, height: int, longest: int) -> tuple[int, int]:
        """Rows and columns of embeddings."""
        ratio = max(height / longest, width / longest)
        if ratio > 1:
            width, height = math.floor(width / ratio), math.floor(height / ratio)
        return max(1, -(-height // self.cell)), max(1, -(-width // self.cell))

    def rows_of(self, width: int, height: int) -> int:
        """Embeddings of an image of this size."""
        rows, columns = self._cells(width, height, self.longest)
        return rows * columns

    def image(self, image: Image.Image, kwargs: Mapping[str, Any]) -> Picture:
        """One item of all lines."""
        longest = self._longest(kwargs)
        rows, columns = self._cells(*image.size, longest)
        pixels = resized(image, columns * self.cell, rows * self.cell, self.resample)
        arrays = {"pixels": pixels[None], "norm": self.norm}
        settings = [longest, self.resample, self.norm.tolist(), pixels.shape]
        item = self.item("image", [image], rows * columns, arrays, settings)
        tokens = np.full((rows, columns + 1), self.soft_token, np.int64)
        tokens[:, -1] = self.line_end
        tokens[-1, -1] = self.end
        return Picture(item, tokens.reshape(-1))


def llava_processor(config: ModelConfig, files: ProcessorFiles, tokenizer: Any) -> MediaProcessor:
    """That of LLaVA 1.5; or that of Pixtral 12B, which is published under LLaVA's name."""
    is_pixtral = config.raw["vision_config"].get("model_type") == "pixtral"
    return (PixtralProcessor if is_pixtral else LlavaProcessor)(config, files, tokenizer)
