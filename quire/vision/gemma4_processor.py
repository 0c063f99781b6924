"""Images for Gemma 4: as large as a budget of embeddings allows, in their own shape."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

from quire.errors import ValidationError
from quire.loading.model_config import ModelConfig
from quire.vision.processor import Picture, PlaceholderProcessor, ProcessorFiles, norm_of, resized, token_id

_BUDGETS = (70, 140, 280, 560, 1120)


class Gemma4Processor(PlaceholderProcessor):
    """An image stands between tokens for its start and end."""

    kwargs_known = ("max_soft_tokens",)

    def __init__(self, config: ModelConfig, files: ProcessorFiles, tokenizer: Any) -> None:
        super().__init__(config, files, tokenizer)
        given, vision = files.image, config.raw["vision_config"]
        self.patch = int(given.get("patch_size") or vision.get("patch_size") or 16)
        self.pool = int(given.get("pooling_kernel_size") or vision.get("pooling_kernel_size") or 3)
        self.budget = self._checked_budget(given.get("max_soft_tokens") or 280)
        self.resample = int(given.get("resample", Image.Resampling.BICUBIC))
        # The model itself maps pixels from [0, 1] to [-1, 1].
        mean, deviation = np.zeros(3), np.ones(3)
        if given.get("do_normalize"):
            mean, deviation = np.asarray(given["image_mean"]), np.asarray(given["image_std"])
        rescale = float(given.get("rescale_factor", 1 / 255))
        self.norm = norm_of((mean + 0.5 * deviation).tolist(), (0.5 * deviation).tolist(), rescale)
        self.start = token_id(config, tokenizer, "boi_token_id", "boi_token_index", text="<|image>")
        self.end = token_id(config, tokenizer, "eoi_token_id", "eoi_token_index", text="<image|>")

    def _checked_budget(self, value: Any) -> int:
        if value not in _BUDGETS:
            known = ", ".join(map(str, _BUDGETS))
            raise ValidationError(f"max_soft_tokens must be one of {known}; got {value!r}", "max_soft_tokens", value)
        return int(value)

    def _size(self, width: int, height: int, budget: int) -> tuple[int, int]:
        """Width and height in units of embeddings."""
        side = self.pool * self.patch
        patches = budget * self.pool**2
        factor = math.sqrt(patches * self.patch**2 / (width * height))
        across, down = math.floor(factor * width / side), math.floor(factor * height / side)
        longest = patches // self.pool**2
        if not across and not down:
            raise ValidationError(f"an image of {width} x {height} pixels cannot be shown to the model", "images")
        if not down:
            across, down = min(math.floor(width / height), longest), 1
        elif not across:
            across, down = 1, min(math.floor(height / width), longest)
        return across, down

    def rows_of(self, width: int, height: int) -> int:
        """Embeddings of an image of this size."""
        across, down = self._size(width, height, self.budget)
        return across * down

    def image(self, image: Image.Image, kwargs: Mapping[str, Any]) -> Picture:
        """One item."""
        budget = self._checked_budget(kwargs.get("max_soft_tokens", self.budget))
        across, down = self._size(*image.size, budget)
        side = self.pool * self.patch
        pixels = resized(image, across * side, down * side, self.resample)
        rows = across * down
        settings = [budget, self.resample, self.norm.tolist(), pixels.shape]
        item = self.item("image", [image], rows, {"pixels": pixels[None], "norm": self.norm}, settings)
        return Picture(item, np.asarray([self.start, *[self.soft_token] * rows, self.end], np.int64))
