"""`MediaLimits`: where images and videos may come from, and how large they may be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.config_checks import PILLOW_PIXELS as PILLOW_PIXELS

MAX_REDIRECTS = 3
REQUEST_IMAGES = 4
"""The images and frames of one request together may have this many times the pixels of the largest one."""
BYTES_A_PIXEL = 8
"""Memory to decode a pixel: as it is stored (at most 4 bytes), and as RGB, which Pillow keeps in 4 bytes."""


@dataclass(frozen=True)
class MediaLimits:
    """Bounds on the images and videos of requests."""

    max_pixels: int = 50_000_000
    """Of one image, or of one frame."""
    max_bytes: int = 20 << 20
    """Of one file, as it is sent or fetched."""
    max_frames: int = 256
    """Of one video."""
    allowed_hosts: tuple[str, ...] = ()
    """Hosts that https URLs may name; `*.name` is every host below a name, `*` every host with a public address."""
    local_path: str | None = None
    """The folder that file:// URLs and paths may name files in; None: there is none."""
    timeout: float = 10.0
    """Seconds to fetch one file, redirects included."""
    decode_bytes: int = 1 << 30
    """Memory of all images that are decoded at the same time."""

    @property
    def max_request_pixels(self) -> int:
        """Of all images and frames of one request together."""
        return REQUEST_IMAGES * self.max_pixels


Check = Callable[[], None]
"""Called now and then by long work: raises if its result is no longer wanted."""


def no_check() -> None:
    """The result is wanted in any case."""
