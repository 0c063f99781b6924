"""Images that commands read from files."""

from __future__ import annotations

import base64
import mimetypes
from pathlib import Path
from typing import Any

from quire.errors import ValidationError


def image_part(path: str | Path) -> dict[str, Any]:
    """The file as a part of a message, for a local model or a server."""
    file = Path(path).expanduser()
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ValidationError(f"the image {str(path)!r} cannot be read: {error.strerror}", "image", path) from error
    kind = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{base64.b64encode(data).decode()}"}}


def with_images(text: str, images: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """The content of a message: its images first, as most models were trained."""
    return [*images, {"type": "text", "text": text}] if images else text
