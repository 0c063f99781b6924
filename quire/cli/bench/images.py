"""Synthetic images for benchmarks: smoothed noise, so that their files are about as large as photographs' are."""

from __future__ import annotations

import argparse
import base64
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.images import image_part
from quire.cli.values import size as whole_number
from quire.errors import ValidationError

if TYPE_CHECKING:
    from PIL import Image

GRAIN = 8
"""Pixels between two independent ones."""
LARGEST_SIDE = 16384


def image_size(text: str) -> tuple[int, int]:
    """Width and height, as 1024x768."""
    width, _, height = text.lower().partition("x")
    if not (width.isdecimal() and height.isdecimal()):
        raise argparse.ArgumentTypeError(f"must be WIDTHxHEIGHT, as 1024x1024; got {text!r}")
    sides = int(width), int(height)
    if not all(1 <= side <= LARGEST_SIDE for side in sides):
        raise argparse.ArgumentTypeError(f"sides must be from 1 to {LARGEST_SIDE}; got {text}")
    return sides


def add_images(group: Any) -> None:
    """--images and --image-size."""
    group.add_argument(
        "--images", type=whole_number, default=0, metavar="N", help="synthetic images of each prompt (default: 0)"
    )
    group.add_argument(
        "--image-size", type=image_size, default=(512, 512), metavar="WxH", help="their size (default: 512x512)"
    )


def noise_image(size: tuple[int, int], seed: int) -> Image.Image:
    """An image that no other seed makes."""
    import numpy as np
    from PIL import Image

    width, height = size
    coarse = (-(-height // GRAIN), -(-width // GRAIN), 3)
    pixels = np.random.default_rng(seed).integers(0, 256, coarse, dtype=np.uint8)
    return Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC)


def noise_part(size: tuple[int, int], seed: int) -> dict[str, Any]:
    """Such an image as a part of a message."""
    buffer = io.BytesIO()
    noise_image(size, seed).save(buffer, "JPEG", quality=90)
    url = f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def with_noise(prompt: str | list[dict[str, Any]], count: int, size: tuple[int, int], seed: int) -> Any:
    """A prompt as messages, with `count` images before the last one's text."""
    given: list[dict[str, Any]] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    messages = [dict(one) for one in given]
    content = messages[-1]["content"]
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    messages[-1]["content"] = [*(noise_part(size, seed * count + index) for index in range(count)), *parts]
    return messages


def with_files(prompt: Any, files: Any, folder: Path, where: str) -> list[dict[str, Any]]:
    """A prompt with the images that a line of a dataset names, relative to the dataset's folder."""
    if not isinstance(prompt, str) or not isinstance(files, list) or not all(isinstance(one, str) for one in files):
        raise ValidationError(f'{where}: "images" is a list of files, beside a "prompt"')
    parts = [image_part(folder / name) for name in files]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": prompt}]}]
