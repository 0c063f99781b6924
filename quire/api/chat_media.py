"""Images and videos in messages, in all the forms that clients have for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.errors import ValidationError, short_repr
from quire.media.loading import Kind, MediaSource

Message = dict[str, Any]

PART_KINDS: Mapping[str, Kind] = {
    "image_url": "image", "input_image": "image", "image": "image", "image_pil": "image",
    "video_url": "video", "input_video": "video", "video": "video",
}  # fmt: skip
"""Types of content parts that are images and videos."""
FIELDS = frozenset(
    {"image_url", "image", "image_pil", "video_url", "video", "url", "path", "base64", "source", "detail", "uuid"}
)
"""Fields of such parts that are read, or have no effect."""
_CONTENTS = ("image_url", "image_pil", "image", "video_url", "video", "url", "path", "base64", "source")


def part_kind(part: Any) -> Kind | None:
    """Whether a content part is an image or a video; None: neither. The type may be left out."""
    if not isinstance(part, Mapping):
        return None
    name = part.get("type")
    if name is None:
        name = next((field for field in _CONTENTS[:5] if field in part), None)
    return PART_KINDS.get(name) if isinstance(name, str) else None


def has_media(messages: Sequence[Any] | str) -> bool:
    """Whether any message, or result of a tool, has an image or a video."""
    if isinstance(messages, str):
        return False
    return any(
        part_kind(part) is not None
        for message in messages
        if isinstance(message, Mapping)
        for content in (message.get("content"), message.get("output"))
        if isinstance(content, (list, tuple))
        for part in content
    )


def take_media(
    messages: Sequence[Any], check: Callable[[Kind, str], None] = lambda kind, where: None
) -> tuple[Sequence[Any], list[MediaSource]]:
    """The messages with `{"type": "image"}` in the place of each image, as chat templates expect it, and the images.
    The same messages, if there are none. `check`: raises for a kind that the model does not take, at a place."""
    if not has_media(messages):
        return messages, []
    sources: list[MediaSource] = []
    taken: list[Any] = []
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, (list, tuple)):
            taken.append(message)
            continue
        parts = []
        for place, part in enumerate(content):
            kind = part_kind(part)
            if kind is None:
                parts.append(part)
                continue
            where = f"messages[{index}].content[{place}]"
            check(kind, where)
            sources.append(MediaSource(kind, _content(part, where), where))
            parts.append({"type": kind})
        taken.append({**message, "content": parts})
    return taken, sources


def _content(part: Mapping[str, Any], where: str) -> Any:
    """What names or holds the image of a part. A `uuid` that a client gives is never taken for its identity."""
    name = next((name for name in _CONTENTS if part.get(name) is not None), None)
    if name is None:
        named = " by a file_id, which this server does not store" if part.get("file_id") else ""
        raise ValidationError(f"{where} is of type {short_repr(part.get('type'))} and has no image{named}", where)
    content = part[name]
    if name == "base64" and isinstance(content, str):
        return f"data:;base64,{content}"
    if name == "source":
        return _anthropic_source(content, where)
    if isinstance(content, Mapping):  # {"url": …, "detail": …}
        content = content.get("url")
        if content is None:
            raise ValidationError(f"{where}.{name} has no url", f"{where}.{name}.url")
    return content


def _anthropic_source(source: Any, where: str) -> str:
    """The URL of an image in Anthropic's form."""
    kind = source.get("type") if isinstance(source, Mapping) else None
    if kind == "base64" and isinstance(source.get("data"), str):
        return f"data:{source.get('media_type') or ''};base64,{source['data']}"
    if kind == "url" and isinstance(source.get("url"), str):
        return str(source["url"])
    raise ValidationError(
        f"{where}.source is of type {short_repr(kind)}; it must be base64, with media_type and data, or url",
        f"{where}.source",
    )
