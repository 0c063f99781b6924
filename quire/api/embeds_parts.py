"""Embeddings within the messages of a chat: parts `{"type": "prompt_embeds", "data": …}`, as vLLM has them.

Each part is the embeddings of a piece of content, not of a whole templated conversation. While the template is rendered
a random mark stands for it, which no text can contain by chance; what is rendered between marks becomes tokens.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from quire.errors import ValidationError
from quire.messages.media import MediaItem, Span
from quire.vision.processor import Prepared

PART = "prompt_embeds"
FIELDS = frozenset({"type", "data", "cache_control"})
"""Fields of such parts that are read, or have no effect."""


class EmbedsPart(NamedTuple):
    """A part of a message that is embeddings."""

    mark: str
    """What stands for it while the template is rendered."""
    data: Any
    """A tensor as torch.save writes it, in base64; in Python also a tensor or an array."""
    where: str


def is_embeds(part: Any) -> bool:
    """Whether a content part is embeddings."""
    return isinstance(part, Mapping) and part.get("type") == PART


def take_embeds(messages: Sequence[Any]) -> tuple[Sequence[Any], list[EmbedsPart]]:
    """The messages with a mark as text in the place of each such part, and the parts. The same messages, if there are
    none."""
    contents = [message.get("content") if isinstance(message, Mapping) else None for message in messages]
    if not any(isinstance(content, (list, tuple)) and any(map(is_embeds, content)) for content in contents):
        return messages, []
    found: list[EmbedsPart] = []
    taken: list[Any] = []
    for index, (message, content) in enumerate(zip(messages, contents, strict=True)):
        if not isinstance(content, (list, tuple)):
            taken.append(message)
            continue
        parts = []
        for place, part in enumerate(content):
            if is_embeds(part):
                where = f"messages[{index}].content[{place}]"
                if part.get("data") is None:
                    raise ValidationError(f"{where} is of type {PART!r} and has no data", f"{where}.data")
                found.append(EmbedsPart(f"[{PART} {secrets.token_hex(16)}]", part["data"], where))
                part = {"type": "text", "text": found[-1].mark}
            parts.append(part)
        taken.append({**message, "content": parts})
    return taken, found


def join_embeds(
    text: str,
    parts: Sequence[EmbedsPart],
    encode: Callable[[str], list[int]],
    read: Callable[[Any], Prepared],
    max_model_len: int,
) -> tuple[str, Prepared]:
    """(A rendered conversation without its marks, its tokens with the embeddings in their places). `read`: checks the
    data of a part."""
    tokens: list[int] = []
    pieces: list[str] = []
    spans: list[Span] = []
    items: list[MediaItem] = []
    for part in parts:
        piece, mark, text = text.partition(part.mark)
        if not mark or part.mark in text:
            raise ValidationError(
                f"{part.where}: the chat template does not write the content of this message once and in order, so "
                "that embeddings have no place in it",
                part.where,
            )
        if piece:
            pieces.append(piece)
            tokens += encode(piece)
        (item,) = read(part.data).items
        spans.append(Span(len(tokens), item.rows, len(items)))
        items.append(item)
        tokens += [0] * item.rows  # no id is looked up there
        if len(tokens) > max_model_len:
            raise ValidationError(
                f"This model's maximum context length is {max_model_len} tokens. However, the messages have "
                f"{len(tokens)} up to {part.where}",
                "messages",
            )
    if text:
        pieces.append(text)
        tokens += encode(text)
    return "".join(pieces), Prepared(tokens, items, spans)
