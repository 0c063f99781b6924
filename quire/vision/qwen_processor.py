"""Images and videos for the Qwen-VL models: any size, in blocks of merged patches, with positions of three rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from quire.errors import ValidationError
from quire.loading.model_config import ModelConfig
from quire.vision.processor import (
    Picture,
    PlaceholderProcessor,
    ProcessorFiles,
    Video,
    make_spans,
    norm_of,
    positive,
    resized,
    rgb,
    token_id,
)

_MAX_ASPECT = 200


@dataclass(frozen=True)
class QwenSettings:
    """How pictures are resized."""

    patch: int
    merge: int
    frames: int
    least: int
    """Fewest pixels of an image."""
    most: int
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    rescale: float
    resample: int

    @property
    def factor(self) -> int:
        """Both sides are multiples of this many pixels."""
        return self.patch * self.merge


def fitted(width: int, height: int, factor: int, least: int, most: int, frames: tuple[int, int] = (1, 1)) -> list[int]:
    """[width, height], both multiples of `factor`, of `least` to `most` pixels, near the given aspect ratio.

    `frames`: (as they are, rounded) where the limits are of all frames together."""
    if max(width, height) > _MAX_ASPECT * min(width, height):
        raise ValidationError(
            f"an image of {width} x {height} pixels is more than {_MAX_ASPECT} times as long as it is wide: crop it",
            "images",
        )
    sides = (width, height)
    found = [round(side / factor) * factor for side in sides]
    count, rounded = frames
    if rounded * found[0] * found[1] > most:
        shrink = math.sqrt(count * width * height / most)
        return [max(factor, math.floor(side / shrink / factor) * factor) for side in sides]
    if rounded * found[0] * found[1] < least:
        grow = math.sqrt(least / (count * width * height))
        return [math.ceil(side * grow / factor) * factor for side in sides]
    return found


class QwenProcessor(PlaceholderProcessor):
    """Qwen2-VL, and what the families share."""

    kwargs_known = ("min_pixels", "max_pixels", "size")
    takes_videos = True
    defaults: ClassVar[Mapping[str, Any]] = {
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
        "image_mean": (0.48145466, 0.4578275, 0.40821073),
        "image_std": (0.26862954, 0.26130258, 0.27577711),
    }
    video_sizes: ClassVar[tuple[int, int]] = (128 * 28 * 28, 28 * 28 * 768)

    def __init__(self, config: ModelConfig, files: ProcessorFiles, tokenizer: Any) -> None:
        super().__init__(config, files, tokenizer)
        self.video_token = token_id(config, tokenizer, "video_token_id", text="<|video_pad|>")
        self.vision = dict(config.raw["vision_config"])
        self._images = self._settings(files.image)
        video = dict(files.video)
        if "size" not in video and "min_pixels" not in video:
            video["size"] = dict(zip(("shortest_edge", "longest_edge"), self.video_sizes, strict=True))
        self._videos = self._settings(video)

    def _settings(self, given: Mapping[str, Any]) -> QwenSettings:
        known = {**self.defaults, **{name: value for name, value in given.items() if value is not None}}
        least, most = _limits(known)
        return QwenSettings(
            patch=int(known["patch_size"]),
            merge=int(known["merge_size"]),
            frames=int(known["temporal_patch_size"]),
            least=least,
            most=most,
            mean=tuple(known["image_mean"]),
            deviation=tuple(known["image_std"]),
            rescale=float(known.get("rescale_factor", 1 / 255)),
            resample=int(known.get("resample", Image.Resampling.BICUBIC)),
        )

    def rows_of(self, width: int, height: int) -> int:
        """Embeddings of an image of this size."""
        use = self._images
        size = fitted(width, height, use.factor, use.least, use.most)
        return size[0] * size[1] // use.factor**2

    def image(self, image: Image.Image, kwargs: Mapping[str, Any]) -> Picture:
        """A still: one frame."""
        use = _with(self._images, kwargs)
        width, height = fitted(*image.size, use.factor, use.least, use.most)
        return self._picture("image", [image], (width, height), use, self.soft_token)

    def video(self, video: Video, kwargs: Mapping[str, Any]) -> Picture:
        """All frames in one size; pairs of them share embeddings."""
        use = _with(self._videos, kwargs)
        frames = [rgb(frame) for frame in video.frames]
        assert self.video_token is not None
        return self._picture("video", frames, self.video_size(video, use), use, self.video_token, video)

    def video_size(self, video: Video, use: QwenSettings) -> tuple[int, int]:
        """Width and height of the frames of a video."""
        width, height = fitted(*video.frames[0].size, use.factor, use.least, use.most)
        return width, height

    def _picture(
        self,
        kind: str,
        frames: Sequence[Image.Image],
        size: tuple[int, int],
        use: QwenSettings,
        token: int,
        video: Video | None = None,
    ) -> Picture:
        pixels = np.stack([resized(frame, *size, use.resample) for frame in frames])
        grid = (-(-len(frames) // use.frames), size[1] // use.factor, size[0] // use.factor)
        rows = grid[0] * grid[1] * grid[2]
        arrays = {"pixels": pixels, "norm": norm_of(use.mean, use.deviation, use.rescale)}
        interval = 1.0 if video is None else self.interval(video, use)
        # Positions are part of the identity: cached keys are rotated by them.
        item = self.item(kind, frames, rows, arrays, [use, pixels.shape, interval])
        tokens = np.full(rows, token, np.int64) if video is None else self.video_tokens(grid, video, use)
        return Picture(item, tokens, grid, interval)

    def video_tokens(self, grid: tuple[int, int, int], video: Video, use: QwenSettings) -> np.ndarray:
        """What stands for a video."""
        return np.full(grid[0] * grid[1] * grid[2], self.video_token, np.int64)

    def interval(self, video: Video, use: QwenSettings) -> float:
        """Temporal positions between two embeddings of the same place of a video."""
        return 1.0

    def positions(self, tokens: np.ndarray, runs: Sequence[tuple[int, Picture]]) -> tuple[np.ndarray | None, int]:
        """Three rows: text advances all of them by one, a picture by the longer side of its grid."""
        rows = np.empty((3, len(tokens)), np.int64)
        done = position = 0
        for start, picture in runs:
            rows[:, done:start] = np.arange(position, position + start - done)
            position += start - done
            done = start + len(picture.tokens)
            position = self.place(rows[:, start:done], picture, position)
        rows[:, done:] = np.arange(position, position + len(tokens) - done)
        delta = int(rows.max()) + 1 - len(tokens)
        if delta > 0:
            raise ValidationError(
                f"positions of the prompt's videos reach {int(rows.max())}, and it has {len(tokens)} tokens: such a "
                "video (few embeddings a frame, seconds apart) is not supported; give more frames a second",
                "videos",
            )
        return rows.astype(np.int32), delta

    def place(self, rows: np.ndarray, picture: Picture, position: int) -> int:
        """Fill in the positions of a picture's tokens; returns the next token's."""
        frames, height, width = picture.grid
        grid = np.indices((frames, height, width)).reshape(3, -1)
        rows[:] = grid + position
        rows[0] = np.floor(np.float32(picture.interval) * grid[0].astype(np.float32)).astype(np.int64) + position
        return position + max(height, width)


class Qwen2_5VLProcessor(QwenProcessor):  # noqa: N801
    """Qwen2.5-VL, whose temporal positions follow the clock."""

    def interval(self, video: Video, use: QwenSettings) -> float:
        """Seconds between two pairs of frames, times the positions a second."""
        return float(self.vision.get("tokens_per_second") or 4) * (use.frames / video.fps)


class Qwen3VLProcessor(QwenProcessor):
    """Qwen3-VL and Qwen3.5: the embeddings of each pair of frames stand after their time in seconds, as text; each pair
    has positions like an image. Limits on pixels are of all frames of a video together."""

    video_sizes = (128 * 32 * 32, 32 * 32 * 768)

    def __init__(self, config: ModelConfig, files: ProcessorFiles, tokenizer: Any) -> None:
        super().__init__(config, files, tokenizer)
        self.start = token_id(config, tokenizer, "vision_start_token_id", text="<|vision_start|>")
        self.end = token_id(config, tokenizer, "vision_end_token_id", text="<|vision_end|>")

    def video_size(self, video: Video, use: QwenSettings) -> tuple[int, int]:
        """Width and height of the frames of a video."""
        width, height = video.frames[0].size
        if min(width, height) < use.factor:
            grow = max(use.factor / height, use.factor / width)
            width, height = int(width * grow), int(height * grow)
        count = max(len(video.frames), use.frames)
        rounded = round(count / use.frames) * use.frames
        width, height = fitted(width, height, use.factor, use.least, use.most, (count, rounded))
        return width, height

    def video_tokens(self, grid: tuple[int, int, int], video: Video, use: QwenSettings) -> np.ndarray:
        """For each pair of frames: its time, and its embeddings between tokens that mark their start and end."""
        times = video.times
        times += times[-1:] * (-len(times) % use.frames)
        firsts, lasts = times[:: use.frames], times[use.frames - 1 :: use.frames]
        tokens: list[int] = []
        for first, last in zip(firsts, lasts, strict=True):
            tokens += self.tokenizer.encode(f"<{(first + last) / 2:.1f} seconds>", add_special_tokens=False)
            tokens += [self.start, *[self.video_token] * (grid[1] * grid[2]), self.end]  # type: ignore[list-item]
        return np.asarray(tokens, np.int64)

    def place(self, rows: np.ndarray, picture: Picture, position: int) -> int:
        """A pair of frames after another, text between them."""
        is_soft = (picture.tokens == self.video_token) | (picture.tokens == self.soft_token)
        still = replace(picture, grid=(1, *picture.grid[1:]))
        done = 0
        for span in make_spans(is_soft, 0, 0):
            rows[:, done : span.start] = np.arange(position, position + span.start - done)
            position += span.start - done
            done = span.start + span.length
            position = super().place(rows[:, span.start : done], still, position)
        rows[:, done:] = np.arange(position, position + len(picture.tokens) - done)
        return position + len(picture.tokens) - done


def _limits(given: Mapping[str, Any]) -> tuple[int, int]:
    """Fewest and most pixels."""
    size = given.get("size") or {}
    least = given.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels")
    most = given.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels")
    return positive(least, "min_pixels"), positive(most, "max_pixels")


def _with(use: QwenSettings, kwargs: Mapping[str, Any]) -> QwenSettings:
    if not kwargs:
        return use
    size = kwargs.get("size") or {}
    if not isinstance(size, Mapping):
        raise ValidationError(f"size must be an object with shortest_edge and longest_edge, got {size!r}", "size", size)
    most = kwargs.get("max_pixels", size.get("longest_edge", use.most))
    least = kwargs.get("min_pixels", size.get("shortest_edge", min(use.least, most if isinstance(most, int) else 1)))
    least, most = positive(least, "min_pixels"), positive(most, "max_pixels")
    if least > most or most > _MOST_PIXELS:
        raise ValidationError(
            f"min_pixels = {least:,} and max_pixels = {most:,}: needed is min_pixels <= max_pixels <= {_MOST_PIXELS:,}",
            "mm_processor_kwargs",
        )
    return replace(use, least=least, most=most)


_MOST_PIXELS = 1 << 26
"""The most that a request may ask for: an image is never enlarged or kept beyond it."""
