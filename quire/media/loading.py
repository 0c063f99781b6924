"""`MediaLoader`: images and videos from whatever names or holds them: data URLs, https URLs, files, bytes, objects."""

from __future__ import annotations

import base64
import binascii
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

import numpy as np
from PIL import Image

from quire.errors import MediaError, short_repr
from quire.media.decoding import DecodeMemory, OpenedImage, check_pixels, check_request_pixels, upright
from quire.media.fetching import Fetcher
from quire.media.limits import Check, MediaLimits, no_check
from quire.media.video import FPS, TYPES, OpenedVideo, container_of, has_decoder

Kind = Literal["image", "video"]
FRAME_TYPES = ("image/gif", "image/webp", "image/png", "image/apng", "video/gif", "video/webp")
"""Types of animations, which are read as videos."""
JPEG_FRAMES = "video/jpeg"
"""The type of a data URL with several JPEGs in base64, divided by commas."""
CONTENT_TYPES = {"image": ("image/",), "video": ("image/", "video/")}


@dataclass(frozen=True)
class MediaSource:
    """An image or a video of a request."""

    kind: Kind
    content: Any
    """A URL (data, https, file), bytes, an image object, an array, a path object; for a video also a list of these."""
    where: str = "the image"
    """Its place in the request, for errors."""

    @property
    def is_remote(self) -> bool:
        """Whether it is fetched: takes long, but not from the processor."""
        return isinstance(self.content, str) and _scheme(self.content) in ("http", "https")


@dataclass
class DecodedMedia:
    """The decoded images and videos of a request, in its order."""

    images: list[Image.Image] = field(default_factory=list)
    videos: list[list[Image.Image]] = field(default_factory=list)
    fps: list[float] = field(default_factory=list)
    """Frames a second of each video."""
    num_bytes: int = 0
    """Of the files, as they were sent or fetched."""
    num_pixels: int = 0


class MediaLoader:
    """Loads the images and videos of requests within limits. Any thread may call it."""

    def __init__(self, limits: MediaLimits, fetcher: Fetcher | None = None) -> None:
        self.limits = limits
        self._fetcher = fetcher or Fetcher(limits)
        self.memory = DecodeMemory(limits.decode_bytes)

    def fetch(self, source: MediaSource, check: Check = no_check) -> MediaSource:
        """A source with the bytes that its https URL names; any other source as it is."""
        if not source.is_remote:
            return source
        with _at(source.where):
            data = self._fetcher.fetch(source.content, CONTENT_TYPES[source.kind], check)
        return MediaSource(source.kind, data, source.where)

    @contextmanager
    def decoded(self, sources: Sequence[MediaSource], check: Check = no_check) -> Iterator[DecodedMedia]:
        """The media of one request. The memory for them is held until the block ends."""
        made = DecodedMedia()
        plans = []
        for source in sources:
            with _at(source.where):
                plans.append(self._open(self.fetch(source, check), made, check))
            check()
        counts = [pixels for plan in plans for pixels in plan.pixels]
        check_request_pixels(counts, self.limits)
        made.num_pixels = sum(counts)
        with self.memory.hold(made.num_pixels, check):
            for source, plan in zip(sources, plans, strict=True):
                check()
                with _at(source.where):
                    frames = plan.decode(check)
                if source.kind == "image":
                    made.images.append(frames[0])
                else:
                    made.videos.append(frames)
                    made.fps.append(plan.fps)
            plans.clear()
            yield made

    def load_image(self, content: Any) -> Image.Image:
        """One image."""
        with self.decoded([MediaSource("image", content)]) as made:
            return made.images[0]

    def _open(self, source: MediaSource, made: DecodedMedia, check: Check) -> _Frames:
        """The frames of a source, none of them decoded."""
        content = source.content
        if source.kind == "video" and isinstance(content, (list, tuple)):
            return self._open_list(source, content, made, check)
        if source.kind == "video" and isinstance(content, np.ndarray) and content.ndim == 4:
            return self._open_list(source, list(content[: self.limits.max_frames + 1]), made, check)
        if isinstance(content, Image.Image):
            check_pixels(content, self.limits, source.where)
            return _Frames([content])
        if isinstance(content, np.ndarray):
            return _Frames([self._from_array(content, source.where)])
        data = self._read(source)
        if isinstance(data, list):
            return self._open_list(source, data, made, check)
        made.num_bytes += len(data)
        return self._open_file(data, source, check)

    def _open_file(self, data: bytes, source: MediaSource, check: Check) -> _Frames:
        if source.kind == "video" and (kind := container_of(data)) is not None:
            if not has_decoder():
                raise _no_container(kind, source.where)
            video = OpenedVideo(data, kind, self.limits, source.where)
            return _Frames([video], video.count, video.fps)
        opened = OpenedImage(data, self.limits, source.where)
        if source.kind == "image":
            return _Frames([opened])
        count = opened.count_frames()
        self._check_frames(count, source.where)
        return _Frames([opened], count)

    def _open_list(self, source: MediaSource, items: Sequence[Any], made: DecodedMedia, check: Check) -> _Frames:
        self._check_frames(len(items), source.where)
        frames: list[Image.Image | OpenedImage | OpenedVideo] = []
        for index, item in enumerate(items):
            where = f"{source.where}[{index}]"
            frame = self._open(self.fetch(MediaSource("image", item, where), check), made, check)
            frames += frame.items
            check()
        return _Frames(frames)

    def _check_frames(self, count: int, where: str) -> None:
        most = self.limits.max_frames
        if count > most:
            raise MediaError(f"{where} has more than {most} frames (--max-video-frames)", reason="frames")
        if count < 1:
            raise MediaError(f"{where} has no frames", reason="frames")

    def _from_array(self, array: np.ndarray, where: str) -> Image.Image:
        """An array of height × width × 3, in bytes."""
        if array.ndim != 3 or array.shape[2] != 3 or array.dtype != np.uint8:
            raise MediaError(
                f"{where} is an array of {array.dtype} {tuple(array.shape)}; an image is uint8 (height, width, 3)",
                reason="type",
            )
        image = Image.fromarray(array)
        check_pixels(image, self.limits, where)
        return image

    def _read(self, source: MediaSource) -> bytes | list[bytes]:
        content, where = source.content, source.where
        if isinstance(content, (bytes, bytearray, memoryview)):
            self._check_bytes(len(content), where)
            return bytes(content)
        if isinstance(content, os.PathLike):  # an object of this process's own program, not a text from elsewhere
            return self._read_file(Path(content), where)
        if not isinstance(content, str):
            raise MediaError(
                f"{where} is a {type(content).__name__}; it must be a URL, a path, bytes or a PIL image", reason="type"
            )
        scheme = _scheme(content)
        if scheme == "data":
            return self._read_data_url(content, source.kind, where)
        if scheme == "file":
            return self._read_allowed(_file_path(content, where), where)
        if scheme in ("http", "https"):  # reached in a list of frames only if `fetch` was not called
            return self._fetcher.fetch(content, CONTENT_TYPES[source.kind])
        if scheme and len(scheme) > 1:
            raise MediaError(
                f"{where} is a URL of scheme {scheme[:40]!r}; it must be data, https or file", reason="url"
            )
        if self.limits.local_path is None:
            raise MediaError(f"{where} is {short_repr(content)}: neither a data URL nor an https URL", reason="url")
        return self._read_allowed(Path(content), where)

    def _check_bytes(self, size: int, where: str) -> None:
        if size > self.limits.max_bytes:
            raise MediaError(
                f"{where} has {size} bytes; at most {self.limits.max_bytes} (--max-image-bytes)", reason="bytes"
            )

    def _read_data_url(self, url: str, kind: Kind, where: str) -> bytes | list[bytes]:
        head, comma, _ = url[5 : 5 + 200].partition(",")
        if not comma:
            raise MediaError(f"{where} is a data URL without a comma after its type", reason="url")
        words = [word.strip().lower() for word in head.split(";")]
        content_type = words[0]
        if "base64" not in words[1:]:
            raise MediaError(f"{where} is a data URL that is not in base64", reason="url")
        if "svg" in content_type:
            raise MediaError(f"{where} is an SVG, which is not accepted: send PNG, JPEG or WebP", reason="type")
        _check_type(content_type, kind, where)
        start = 5 + len(head) + 1
        self._check_bytes((len(url) - start) * 3 // 4 - 2, where)
        body = url[start:]
        if kind == "video" and content_type == JPEG_FRAMES:
            count = body.count(",") + 1
            self._check_frames(count, where)
            return [self._decode_base64(part, where) for part in body.split(",")]
        return self._decode_base64(body, where)

    def _decode_base64(self, text: str, where: str) -> bytes:
        try:
            return base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            pass
        try:  # lines of base64, or without the padding
            joined = "".join(text.split())
            return base64.b64decode(joined + "=" * (-len(joined) % 4), validate=True)
        except (binascii.Error, ValueError):
            raise MediaError(f"{where} is a data URL whose base64 is not valid", reason="damaged") from None

    def _read_allowed(self, path: Path, where: str) -> bytes:
        """A file below the allowed folder, links resolved."""
        root = self.limits.local_path
        if root is None:
            raise MediaError(
                f"{where} names a file, and this server reads none: send the image as a data URL, or set "
                "--allowed-local-media-path",
                reason="path",
            )
        outside = MediaError(f"{where} names no file in the allowed folder (--allowed-local-media-path)", reason="path")
        try:
            folder = Path(root).resolve(strict=True)
            resolved = (folder / path).resolve(strict=True)
        except (OSError, ValueError, RuntimeError):
            raise outside from None
        if not resolved.is_relative_to(folder):
            raise outside
        data = self._read_file(resolved, where, follow=False)
        try:  # a folder of the path may have been replaced by a link meanwhile
            if resolved.resolve(strict=True) != resolved:
                raise outside
        except OSError:
            raise outside from None
        return data

    def _read_file(self, path: Path, where: str, follow: bool = True) -> bytes:
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | (0 if follow else getattr(os, "O_NOFOLLOW", 0))
        try:
            handle = os.open(path, flags)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise MediaError(f"{where}: {short_repr(str(path))} cannot be read: {reason}", reason="path") from None
        try:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode):
                raise MediaError(f"{where}: {short_repr(str(path))} is not a file", reason="path")
            self._check_bytes(found.st_size, where)
            with open(handle, "rb", closefd=False) as file:
                data = file.read(self.limits.max_bytes + 1)
        finally:
            os.close(handle)
        self._check_bytes(len(data), where)
        return data


class _Frames:
    """What one source decodes to."""

    def __init__(self, items: Sequence[Image.Image | OpenedImage | OpenedVideo], count: int = 0, fps: float = FPS):
        """`count`: frames of the only item, an animation or a video; `fps`: of these a second."""
        self.items = list(items)
        self.fps = fps
        self._count = count

    @property
    def pixels(self) -> list[int]:
        """Of each frame."""
        each = [item.size[0] * item.size[1] for item in self.items]
        return each * self._count if self._count else each

    def decode(self, check: Check) -> list[Image.Image]:
        """All frames; what they were decoded from is freed."""
        items, self.items = self.items, []
        made: list[Image.Image] = []
        for item in items:
            check()
            if isinstance(item, Image.Image):
                made.append(upright(item))
                continue
            if isinstance(item, OpenedVideo) or self._count:
                made += item.decode_frames(self._count, check)
            else:
                made.append(item.decode())
            item.close()
        return made


@contextmanager
def _at(where: str) -> Iterator[None]:
    """Errors of this block name the place in the request as their parameter."""
    try:
        yield
    except MediaError as error:
        error.parameter = error.parameter or where
        raise


def _scheme(text: str) -> str:
    """The scheme of a URL; "" for a path."""
    start = text[:40]
    head, colon, _ = start.partition(":")
    return head.lower() if colon and head.isascii() and head.replace("+", "").isalnum() else ""


def _check_type(content_type: str, kind: Kind, where: str) -> None:
    known = content_type in ("", "application/octet-stream")
    if kind == "image" and not (known or content_type.startswith("image/")):
        raise MediaError(f"{where} is a data URL of type {content_type[:60]!r}, which is no image", reason="type")
    if kind == "video" and not (
        known or content_type == JPEG_FRAMES or content_type in FRAME_TYPES or (content_type in TYPES and has_decoder())
    ):
        raise _no_container(content_type[:60], where)


def _no_container(name: str, where: str) -> MediaError:
    wants = "" if has_decoder() else " without the package `av` (pip install quire[video])"
    return MediaError(
        f"{where} is a video of type {name}, which is not decoded here{wants}: send its frames as an animated GIF or "
        f"WebP, or as {JPEG_FRAMES}, JPEGs in base64 divided by commas",
        reason="type",
    )


def _file_path(url: str, where: str) -> Path:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise MediaError(f"{where}: a file URL names no host", reason="path")
    path = unquote(parts.path)
    if "\0" in path:
        raise MediaError(f"{where}: a file URL with a NUL character", reason="path")
    return Path(path)
