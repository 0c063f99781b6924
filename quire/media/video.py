"""MP4, WebM and their relatives, by the optional package `av` (`pip install quire[video]`) in a process of its own."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
import weakref
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from PIL import Image

from quire.errors import MediaError
from quire.media.limits import Check, MediaLimits, no_check

FPS = 2.0
"""Frames a second that are taken of a video, if there are not more of them than a video may have."""
CHILD = Path(__file__).with_name("video_child.py")
TYPES = ("video/mp4", "video/quicktime", "video/webm", "video/x-matroska")
_FORMATS = {"MP4": "mov", "Matroska or WebM": "matroska"}
_SECONDS = 60.0
"""After this a decoder is ended."""


@cache
def has_decoder() -> bool:
    """Whether videos can be decoded."""
    return find_spec("av") is not None


def container_of(data: bytes) -> str | None:
    """The kind of a video file, by its first bytes; None: it is none that is known."""
    if data[4:8] == b"ftyp":
        return "MP4"
    return "Matroska or WebM" if data.startswith(b"\x1a\x45\xdf\xa3") else None


class OpenedVideo:
    """A video whose header was read and checked; at most one of its frames has been decoded."""

    def __init__(self, data: bytes, kind: str, limits: MediaLimits, where: str) -> None:
        """`kind`: what `container_of` says."""
        self.where = where
        arguments = [_FORMATS[kind], limits.max_frames, FPS, limits.max_request_pixels]
        command = [sys.executable, "-I", str(CHILD), *map(str, arguments)]
        self._child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={"OPENBLAS_NUM_THREADS": "1"},
        )
        self._end = weakref.finalize(self, _end, self._child)
        self._timer = threading.Timer(_SECONDS, self._child.kill)
        self._timer.daemon = True
        self._timer.start()
        assert self._child.stdin is not None and self._child.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.write(data)
            self._child.stdin.close()
        try:
            head = json.loads(self._child.stdout.readline(4096) or b"{}")
            if "count" not in head:
                raise MediaError(f"{where} cannot be decoded: {head.get('error', 'it is damaged')}", reason="damaged")
            self.size = int(head["width"]), int(head["height"])
            self.count, self.fps = int(head["count"]), float(head["fps"])
            if self.size[0] * self.size[1] > limits.max_pixels:
                raise MediaError(
                    f"{where} has frames of {self.size[0]} x {self.size[1]} pixels; at most {limits.max_pixels} pixels "
                    "(--max-image-pixels)",
                    reason="pixels",
                )
        except MediaError:
            self.close()
            raise
        except ValueError:
            self.close()
            raise MediaError(f"{where} cannot be decoded: it is damaged", reason="damaged") from None

    def decode_frames(self, count: int, check: Check = no_check) -> list[Image.Image]:
        """The frames."""
        assert self._child.stdout is not None
        length = self.size[0] * self.size[1] * 3
        frames: list[Image.Image] = []
        begin = time.monotonic()
        for index in range(count):
            check()
            data = self._child.stdout.read(length)
            if len(data) < length:
                late = " within the time for it" if time.monotonic() - begin > _SECONDS / 2 else ""
                self.close()
                raise MediaError(
                    f"{self.where} cannot be decoded{late}: it ends after {index} of {count} frames", reason="damaged"
                )
            frames.append(Image.frombytes("RGB", self.size, data))
        return frames

    def close(self) -> None:
        """End the decoder."""
        self._timer.cancel()
        self._end()


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
