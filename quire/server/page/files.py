"""The page's files: compiled from `page/` by `make page`, and part of the package."""

from __future__ import annotations

import functools
from pathlib import Path

import msgspec

FOLDER = Path(__file__).parent / "assets"
LONGEST_NAME = 100

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; font-src 'self'; "
        "connect-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
}
TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".svg": b"image/svg+xml",
    ".txt": b"text/plain; charset=utf-8",
}
FOREVER = "public, max-age=31536000, immutable"
"""A file whose name has a hash of its content never changes."""


class Build(msgspec.Struct):
    """What `page/build.mjs` has written about its files."""

    sources: str
    """Hash of the sources that the files were made from."""
    files: list[str]


class PageFile(msgspec.Struct, frozen=True):
    """One file."""

    data: bytes
    content_type: bytes


@functools.cache
def page_files() -> dict[str, PageFile]:
    """The files by name; `index.html` is the page. Nothing outside this list is ever read."""
    build = msgspec.json.decode((FOLDER / "build.json").read_bytes(), type=Build)
    return {name: _read(name) for name in build.files}


def _read(name: str) -> PageFile:
    return PageFile((FOLDER / name).read_bytes(), TYPES[Path(name).suffix])
