"""Processors of models whose towers see tiles of one size: LLaVA, LLaVA-NeXT, Gemma 3."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from quire.errors import CheckpointError
from quire.loading.model_config import ModelConfig
from quire.vision.processor import Picture, PlaceholderProcessor, ProcessorFiles, Video, norm_of, resized, token_id

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class TileSettings:
    """How an image becomes a tile."""

    size: Mapping[str, int]
    crop: tuple[int, int] | None
    """Height and width that are cut out of the middle; None: nothing is cut off."""
    pads: bool
    """Whether an image is made square first, with bars of the mean colour."""
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    rescale: float
    resample: int

    @classmethod
    def read(cls, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> TileSettings:
        """From `preprocessor_config.json`."""
        known = {**defaults, **{name: value for name, value in given.items() if value is not None}}
        size, crop = known["size"], known.get("crop_size")
        size = {"shortest_edge": size} if isinstance(size, int) else dict(size)
        if isinstance(crop, int):
            crop = {"height": crop, "width": crop}
        crops = bool(known.get("do_center_crop")) and crop is not None
        return cls(
            size=size,
            crop=(int(crop["height"]), int(crop["width"])) if crops and crop is not None else None,
            pads=bool(known.get("do_pad")),
            mean=tuple(known["image_mean"]),
            deviation=tuple(known["image_std"]),
            rescale=float(known.get("rescale_factor", 1 / 255)),
            resample=int(known.get("resample", Image.Resampling.BICUBIC)),
        )

    @property
    def norm(self) -> np.ndarray:
        """As encoders take it."""
        return norm_of(self.mean, self.deviation, self.rescale)

    def tile(self, image: Image.Image) -> np.ndarray:
        """uint8 [height, width, 3]."""
        if self.pads:
            image = padded_square(image, tuple(int(value * 255) for value in self.mean))
        if "shortest_edge" in self.size:
            width, height = image.size
            short = int(self.size["shortest_edge"])
            long = int(short * max(width, height) / min(width, height))
            width, height = (short, long) if width <= height else (long, short)
        else:
            width, height = int(self.size["width"]), int(self.size["height"])
        pixels = resized(image, width, height, self.resample)
        return pixels if self.crop is None else center(pixels, *self.crop)


def one_side(value: Any) -> int:
    """A size that may be given for both sides."""
    return int(value[0] if isinstance(value, (list, tuple)) else value)


def padded_square(image: Image.Image, color: tuple[int, ...]) -> Image.Image:
    """The image in the middle of a square."""
    if image.width == image.height:
        return image
    side = max(image.size)
    square = Image.new("RGB", (side, side), color)
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return square


def center(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """The middle of an image; black around one that is smaller."""
    missing = [max(0, height - pixels.shape[0]), max(0, width - pixels.shape[1])]
    if any(missing):
        around = [(-(-each // 2), each // 2) for each in missing]
        pixels = np.pad(pixels, (*around, (0, 0)))
    top, left = (pixels.shape[0] - height) // 2, (pixels.shape[1] - width) // 2
    return pixels[top : top + height, left : left + width]


class LlavaProcessor(PlaceholderProcessor):
    """LLaVA 1.5: every image is one tile."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "size": {"shortest_edge": 224},
        "crop_size": {"height": 224, "width": 224},
        "do_center_crop": True,
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
    }

    def __init__(self, config: ModelConfig, files: ProcessorFiles, tokenizer: Any) -> None:
        super().__init__(config, files, tokenizer)
        self.settings = TileSettings.read(files.image, self.defaults)
        vision = config.raw["vision_config"]
        self.tower_side = int(vision.get("image_size") or 224)
        self.side = self.tower_side // int(vision.get("patch_size") or 32)
        """Patches of a side of a tile."""
        has_class = vision.get("model_type") == "clip_vision_model"
        drops = config.raw.get("vision_feature_select_strategy", "default") == "default"
        self.tile_rows = self.side**2 + has_class - drops
        """Embeddings of a tile."""

    def rows_of(self, width: int, height: int) -> int:
        """The same for every size."""
        return self.tile_rows

    def image(self, image: Image.Image, kwargs: Mapping[str, Any]) -> Picture:
        """One tile."""
        tile = self.checked(self.settings.tile(image))
        arrays = {"pixels": tile[None], "norm": self.settings.norm}
        return self.picture(image, self.tile_rows, arrays)

    def checked(self, tile: np.ndarray) -> np.ndarray:
        """The tile; raises if it is not what the tower takes."""
        if tile.shape != (self.tower_side, self.tower_side, 3):
            raise CheckpointError(
                f"the processor makes tiles of {tile.shape[1]} x {tile.shape[0]} pixels, and the vision tower takes "
                f"{self.tower_side} x {self.tower_side}: do preprocessor_config.json and config.json belong together?"
            )
        return tile

    def picture(self, image: Image.Image, rows: int, arrays: dict[str, np.ndarray]) -> Picture:
        """An item, with as many soft tokens as it has rows."""
        item = self.item("image", [image], rows, arrays, [self.settings, arrays["pixels"].shape])
        return Picture(item, np.full(rows, self.soft_token, np.int64))


class LlavaNextProcessor(LlavaProcessor):
    """LLaVA-NeXT: the whole image as a tile, and the image cut into tiles at the best of a few resolutions."""

    defaults: ClassVar[Mapping[str, Any]] = {**LlavaProcessor.defaults}

    def __init__(self, config: ModelConfig, files: ProcessorFiles, tokenizer: Any) -> None:
        super().__init__(config, files, tokenizer)
        default = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
        self.resolutions = config.raw.get("image_grid_pinpoints") or files.image.get("image_grid_pinpoints") or default

    def _plan(self, width: int, height: int) -> tuple[int, int, np.ndarray]:
        """(height and width the image is padded to; tiles down and across, and the cells that are not padding)."""
        best = best_resolution(width, height, self.resolutions)
        down, across = best[0] // self.tower_side, best[1] // self.tower_side
        rows, columns = down * self.side, across * self.side
        top = left = 0
        if width / height > columns / rows:
            top = (rows - int(round(height * (columns / width), 7))) // 2
        else:
            left = (columns - int(round(width * (rows / height), 7))) // 2
        return *best, np.asarray([down, across, top, rows - top, left, columns - left], np.int32)

    def rows_of(self, width: int, height: int) -> int:
        """Those of the whole image, and those of its parts with one at the end of each line."""
        *_, (_, _, top, bottom, left, right) = self._plan(width, height)
        return self.tile_rows + int(bottom - top) * (int(right - left) + 1)

    def image(self, image: Image.Image, kwargs: Mapping[str, Any]) -> Picture:
        """All tiles, the whole image first."""
        height, width, parts = self._plan(*image.size)
        scale_x, scale_y = width / image.width, height / image.height
        if scale_x < scale_y:
            fit = (width, min(math.ceil(image.height * scale_x), height))
        else:
            fit = (min(math.ceil(image.width * scale_y), width), height)
        canvas = np.zeros((height, width, 3), np.uint8)
        top, left = (height - fit[1]) // 2, (width - fit[0]) // 2
        canvas[top : top + fit[1], left : left + fit[0]] = resized(image, *fit, self.settings.resample)
        side = self.tower_side
        tiles = canvas.reshape(height // side, side, width // side, side, 3).transpose(0, 2, 1, 3, 4)
        whole = resized(image, side, side, self.settings.resample)
        pixels = np.concatenate((whole[None], tiles.reshape(-1, side, side, 3)))
        arrays = {"pixels": pixels, "norm": self.settings.norm, "parts": parts}
        return self.picture(image, self.rows_of(*image.size), arrays)


def best_resolution(width: int, height: int, choices: Sequence[Sequence[int]]) -> tuple[int, int]:
    """The (height, width) that keeps most of the image, and of those the one with the least padding."""

    def worth(choice: Sequence[int]) -> tuple[int, int]:
        scale = min(choice[1] / width, choice[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - choice[0] * choice[1]

    best = max(choices, key=worth)
    return int(best[0]), int(best[1])


class Gemma3Processor(LlavaProcessor):
    """Gemma 3: an image stands between tokens for its start and end, and two line ends on both sides."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "size": {"height": 896, "width": 896},
        "image_mean": HALF,
        "image_std": HALF,
        "resample": Image.Resampling.BILINEAR,
    }

    def __init__(self, config: ModelConfig, files: ProcessorFiles, tokenizer: Any) -> None:
        super().__init__(config, files, tokenizer)
        self.tile_rows = int(config.raw.get("mm_tokens_per_image") or 256)
        self.start = token_id(config, tokenizer, "boi_token_index", "boi_token_id", text="<start_of_image>")
        self.end = token_id(config, tokenizer, "eoi_token_index", "eoi_token_id", text="<end_of_image>")
        self.start_text, self.soft_text, self.end_text = tokenizer.convert_ids_to_tokens(
            [self.start, self.soft_token, self.end]
        )

    def prompt_text(self, text: str, videos: Sequence[Video] = ()) -> str:
        """What surrounds an image, in place of the template's token: line ends may join those beside them."""
        return text.replace(self.start_text, f"\n\n{self.start_text}{self.soft_text}{self.end_text}\n\n")

    def mark(self, tokens: list[int], videos: Sequence[Video]) -> list[int]:
        """A start without the soft token after it is a bare one, of a prompt that came as tokens."""
        if self.start not in tokens:
            return tokens
        lines = self.tokenizer.encode("\n\n", add_special_tokens=False)
        marked: list[int] = []
        for place, token in enumerate(tokens):
            if token == self.start and tokens[place + 1 : place + 2] != [self.soft_token]:
                marked += [*lines, self.start, self.soft_token, self.end, *lines]
            else:
                marked.append(token)
        return marked
