"""Decodes images and animations with Pillow. What a header says is checked before any pixel is decoded."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from PIL import Image, ImageOps

from quire.errors import MediaError
from quire.media.limits import BYTES_A_PIXEL, PILLOW_PIXELS, Check, MediaLimits, no_check

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
WAIT_SECONDS = 0.2
"""How often work that waits for memory looks whether it is still wanted."""
_SIGNATURES = (
    (b"%PDF", "PDF"), (b"II*\0", "TIFF"), (b"MM\0*", "TIFF"), (b"\0\0\1\0", "ICO"), (b"8BPS", "PSD"),
    (b"\x1a\x45\xdf\xa3", "Matroska or WebM"), (b"OggS", "Ogg"), (b"\xff\x4f\xff\x51", "JPEG 2000"),
    (b"\0\0\0\x0cjP", "JPEG 2000"), (b"\xff\x0a", "JPEG XL"), (b"\0\0\0\x0cJXL ", "JPEG XL"), (b"PK\3\4", "ZIP"),
    (b"\x1f\x8b", "gzip"), (b"\x00\x00\x01\xba", "MPEG"), (b"\x00\x00\x01\xb3", "MPEG"),
)  # fmt: skip
_BRANDS = {b"avif": "AVIF", b"avis": "AVIF", b"heic": "HEIC", b"heix": "HEIC", b"mif1": "HEIF", b"msf1": "HEIF"}


class OpenedImage:
    """An image file whose header has been read and checked, and whose pixels have not been decoded."""

    def __init__(self, data: bytes, limits: MediaLimits, where: str = "the image") -> None:
        self._limits = limits
        self._data = data
        self.where = where
        try:
            self._image = Image.open(io.BytesIO(data), formats=FORMATS)
        except Image.DecompressionBombError:
            raise self._too_large(f"more than {PILLOW_PIXELS}") from None
        except Exception:
            raise MediaError(
                f"{where} is {_looks_like(data)}; images are PNG, JPEG, WebP, GIF or BMP", reason="type"
            ) from None
        self._check_size()

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels, before the orientation is applied."""
        return self._image.size

    @property
    def pixels(self) -> int:
        return self._image.size[0] * self._image.size[1]

    def decode(self) -> Image.Image:
        """The image, or the first frame, in RGB and upright, as transformers' `load_image` makes it."""
        try:
            self._image.load()
            self._check_size()
            return upright(self._image)
        except MediaError:
            raise
        except Image.DecompressionBombError:
            raise self._too_large(f"more than {PILLOW_PIXELS}") from None
        except Exception as error:  # whatever Pillow raises for damaged data
            raise MediaError(f"{self.where} cannot be decoded: {_reason(error)}", reason="damaged") from None

    def count_frames(self) -> int:
        """Frames of an animation. Nothing is decoded, and frames that are too many are not counted to the end."""
        if self._image.format == "GIF":
            return _count_gif_frames(self._data, self._limits.max_frames + 1)
        return int(getattr(self._image, "n_frames", 1))  # in the header

    def decode_frames(self, count: int, check: Check = no_check) -> list[Image.Image]:
        """The first `count` frames of an animation."""
        frames: list[Image.Image] = []
        size = self._image.size
        try:
            for index in range(count):
                self._image.seek(index)
                if self._image.size != size:
                    raise MediaError(f"{self.where} has frames that are larger than its header says", reason="damaged")
                check()
                frames.append(upright(self._image))
        except MediaError:
            raise
        except Exception as error:
            raise MediaError(f"{self.where} cannot be decoded: {_reason(error)}", reason="damaged") from None
        return frames

    def close(self) -> None:
        """Free what the file takes."""
        self._image.close()
        self._data = b""

    def _check_size(self) -> None:
        """A frame of a GIF may be larger than the file's header says."""
        check_pixels(self._image, self._limits, self.where)

    def _too_large(self, pixels: str) -> MediaError:
        return _too_many(pixels, self._limits, self.where)


def check_pixels(image: Image.Image, limits: MediaLimits, where: str) -> None:
    """Raise for an image with more pixels than are allowed, or with none."""
    width, height = image.size
    if width < 1 or height < 1:
        raise MediaError(f"{where} has {width} × {height} pixels", reason="damaged")
    if width * height > limits.max_pixels:
        raise _too_many(f"{width} × {height}", limits, where)


def upright(image: Image.Image) -> Image.Image:
    """The image in RGB, turned as its EXIF orientation says. The result is a copy."""
    turned = ImageOps.exif_transpose(image)
    made = turned.convert("RGB")
    return made.copy() if made is image else made


class DecodeMemory:
    """Bounds the memory of images that are decoded at the same time. Any thread may use it."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held = 0
        self._changed = threading.Condition()

    @property
    def held(self) -> int:
        """Bytes in use."""
        return self._held

    @contextmanager
    def hold(self, pixels: int, check: Check = no_check) -> Iterator[None]:
        """Wait until there is memory to decode so many pixels, and hold it. If nothing else is decoded, any number
        is accepted."""
        size = pixels * BYTES_A_PIXEL
        with self._changed:
            while self._held and self._held + size > self._most:
                self._changed.wait(WAIT_SECONDS)
                check()
            self._held += size
        try:
            yield
        finally:
            with self._changed:
                self._held -= size
                self._changed.notify_all()


def check_request_pixels(pixels: Sequence[int], limits: MediaLimits) -> None:
    """Raise if the images and frames of a request have too many pixels together."""
    if (total := sum(pixels)) > limits.max_request_pixels:
        raise MediaError(
            f"the request's {len(pixels)} images and frames have {total} pixels together; at most "
            f"{limits.max_request_pixels}, four times --max-image-pixels",
            reason="pixels",
        )


def _count_gif_frames(data: bytes, most: int) -> int:
    """Frames of a GIF up to `most`, by its blocks."""
    at, count = 13, 0
    if len(data) > 10 and data[10] & 0x80:
        at += 3 << ((data[10] & 7) + 1)
    while at < len(data) and count < most:
        mark = data[at]
        if mark == 0x21:  # an extension
            at += 2
        elif mark == 0x2C:  # a frame
            if at + 10 > len(data):
                break
            flags = data[at + 9]
            at += 11 + ((3 << ((flags & 7) + 1)) if flags & 0x80 else 0)
            count += 1
        else:  # the end
            break
        while at < len(data) and data[at]:
            at += data[at] + 1
        at += 1
    return max(1, count)


def _too_many(pixels: str, limits: MediaLimits, where: str) -> MediaError:
    return MediaError(f"{where} has {pixels} pixels; at most {limits.max_pixels} (--max-image-pixels)", reason="pixels")


def _looks_like(data: bytes) -> str:
    """What a file that is no image appears to be, for an error."""
    start = data[:512].lstrip().lower()
    if not data:
        return "empty"
    if start.startswith((b"<svg", b"<?xml")) or b"<svg" in start:
        return "an SVG, which is not accepted"
    if start.startswith((b"<!doctype", b"<html")):
        return "a web page"
    if data[4:8] == b"ftyp":
        return f"of type {_BRANDS.get(data[8:12], 'MP4')}, which is not accepted"
    for signature, name in _SIGNATURES:
        if data.startswith(signature):
            return f"of type {name}, which is not accepted"
    if data.startswith((b"\x89PNG", b"\xff\xd8", b"GIF8", b"BM", b"RIFF")):
        return "damaged: its header cannot be read"
    return "of an unknown type"


def _reason(error: Any) -> str:
    if isinstance(error, MemoryError):
        return "there is not enough memory"
    return (str(error) or type(error).__name__)[:200]
