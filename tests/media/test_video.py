"""MP4 and WebM: frames by the clock, within limits, in a process of their own."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest

from quire.errors import MediaError
from quire.media.limits import MediaLimits
from quire.media.loading import MediaLoader, MediaSource

av: Any = pytest.importorskip("av", reason="MP4 needs the package av")


def film(seconds: float, rate: int = 10, size: tuple[int, int] = (64, 48), kind: str = "mp4") -> bytes:
    """A film whose grey level is its time, 40 a second."""
    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream = container.add_stream("mpeg4" if kind == "mp4" else "libvpx", rate=rate)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        for index in range(round(seconds * rate)):
            level = min(20 + round(40 * index / rate), 255)
            frame = av.VideoFrame.from_ndarray(np.full((size[1], size[0], 3), level, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


def decoded(content: Any, **limits: Any) -> tuple[list[float], float, tuple[int, int]]:
    """(grey levels, frames a second, size)"""
    with MediaLoader(MediaLimits(**limits)).decoded([MediaSource("video", content, "the video")]) as media:
        (frames,), (fps,) = media.videos, media.fps
        return [float(np.asarray(frame).mean()) for frame in frames], fps, frames[0].size


@pytest.mark.parametrize("kind", ["mp4", "webm"])
def test_two_frames_a_second(kind: str) -> None:
    levels, fps, size = decoded(film(3, kind=kind))
    assert fps == 2.0 and size == (64, 48)
    np.testing.assert_allclose(levels, [20, 40, 60, 80, 100, 120], atol=6)
    url = f"data:video/{kind};base64,{base64.b64encode(film(1.5, kind=kind)).decode()}"
    np.testing.assert_allclose(decoded(url)[0], [20, 40, 60], atol=6)


def test_a_long_one_has_fewer() -> None:
    levels, fps, _ = decoded(film(4), max_frames=4)
    assert fps == pytest.approx(1.0, abs=0.05)
    np.testing.assert_allclose(levels, [20, 60, 100, 140], atol=8)
    levels, fps, _ = decoded(film(4), max_pixels=64 * 48)  # a request has four times the pixels of an image
    assert len(levels) == 4


def test_refused() -> None:
    whole = film(3)
    for content, message, limits in (
        (whole[: len(whole) // 2], "cannot be decoded", {}),
        (b"\0\0\0\x20ftypisom" + bytes(200), "cannot be decoded", {}),
        (b"\x1a\x45\xdf\xa3" + bytes(200), "cannot be decoded", {}),
        (whole, "64 x 48", {"max_pixels": 1000}),
        (whole, "bytes; at most", {"max_bytes": 1000}),
    ):
        with pytest.raises(MediaError, match=message):
            decoded(content, **limits)


def test_work_that_is_abandoned_ends_the_decoder() -> None:
    class GoneError(Exception):
        pass

    calls = iter(range(4))

    def check() -> None:
        if next(calls, None) is None:
            raise GoneError

    with pytest.raises(GoneError), MediaLoader(MediaLimits()).decoded([MediaSource("video", film(20))], check):
        pass
