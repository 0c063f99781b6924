"""Inputs that are not token ids: images, videos and embeddings of the user's own.

A request has *items* and *spans*. An item is what an encoder turns into embeddings; a span is a run of prompt tokens
whose embeddings are rows of an item, in place of those of the token ids. The ids at these places (a placeholder token
of the model's) are never looked up; they count as tokens everywhere else.

The planning half sees digests and lengths only. It keeps a bounded cache of encoded items on the device, by numbered
*slots*: a plan says which items are encoded into which slots (`EncodeItem`) and which slots tokens read (`Splice`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

DIGEST_BYTES = 32
IMAGE, VIDEO, EMBEDS = "image", "video", "embeds"
KINDS = (IMAGE, VIDEO, EMBEDS)
ENCODE_PARTS = 1024
"""In which the progress of an encoding over several steps is counted."""
VALUES = "values"
"""The array of an item of kind "embeds": float32 [rows, hidden size]."""


class MediaItem(msgspec.Struct):
    """One image or video, or embeddings given by the user, as the encoder gets it."""

    digest: bytes
    """blake3 over all that decides the embeddings: decoded pixels, mode, size, processor settings, kind."""
    kind: str
    """"image", "video" or "embeds"."""
    rows: int
    """Embeddings that the encoder yields for it."""
    arrays: dict[str, np.ndarray] = {}
    """What the encoder reads, such as patches and their grid; empty if the engine is known to have it cached."""

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


class Span(msgspec.Struct, frozen=True):
    """Consecutive prompt tokens whose embeddings are rows `offset` to `offset + length` of an item."""

    start: int
    """Position of the first token in the prompt."""
    length: int
    item: int
    """Index into the request's `media`."""
    offset: int = 0

    @property
    def stop(self) -> int:
        return self.start + self.length


class PromptMedia(msgspec.Struct):
    """Items and spans of a piece of a prompt, counted from its first token, with the positions of its tokens."""

    items: list[MediaItem] = []
    spans: list[Span] = []
    positions: np.ndarray | None = None
    """[3, tokens] int32, the first token at 0; None: the model has one position a token."""
    position_delta: int = 0


class KeySpan(NamedTuple):
    """A span as content keys know it: rows from `offset` on of the item with this digest."""

    start: int
    stop: int
    offset: int
    digest: bytes


def key_spans(media: Sequence[MediaItem], spans: Sequence[Span]) -> list[KeySpan]:
    """The spans of a sequence, for its content keys."""
    return [KeySpan(span.start, span.stop, span.offset, media[span.item].digest) for span in spans]


class EncodeItem(msgspec.Struct):
    """An item is encoded into a slot before the step computes."""

    slot: int
    item: MediaItem
    request: str
    """The request at fault if the encoder raises."""


class Splice(msgspec.Struct, frozen=True):
    """Tokens of a step read rows `offset` to `offset + length` of the item in a slot instead of the table of ids."""

    start: int
    """Index of the first token among all tokens of the step."""
    length: int
    slot: int
    offset: int


class VisibleSpan(msgspec.Struct, frozen=True):
    """Tokens of a step that see each other both ways."""

    start: int
    """Index of the first token among all tokens of the step."""
    length: int


class EncoderLimits(msgspec.Struct, frozen=True):
    """What an engine takes beside token ids."""

    cache_rows: int = 0
    """Embeddings that the cache of encoded items holds; 0: the engine takes token ids alone."""
    has_encoder: bool = False
    """Whether it takes images and videos."""
    takes_embeds: bool = False
    """Whether it takes embeddings of the user's own."""
    bidirectional: bool = False
    """Whether the tokens of a span see each other both ways."""
    mrope: bool = False
    """Whether tokens have three positions."""
    width: int = 0
    """Values of a row: the hidden size, and once more for each layer that features are added after."""
    positions: int = 0
    """With three positions a token: each of them is below this."""


def encode_array(value: Any) -> Any:
    """An array for msgpack: its type, its bytes, and its shape if it has several dimensions."""
    if isinstance(value, np.ndarray):
        data = (value.dtype.str, value.tobytes())
        return data if value.ndim == 1 else (*data, value.shape)
    raise NotImplementedError(f"cannot encode {type(value).__name__}")


def decode_array(kind: type, value: Any) -> np.ndarray:
    """What `encode_array` encoded."""
    dtype, data, *shape = value
    kind_of = np.dtype(dtype)
    if kind_of.hasobject:
        raise ValueError(f"an array of type {dtype!r} is no data")
    array = np.frombuffer(data, dtype=kind_of)
    return (array.reshape(shape[0]) if shape else array).copy()


def check_media(prompt: int, media: Sequence[MediaItem], spans: Sequence[Span]) -> str | None:
    """What is wrong with the items and spans of a request of `prompt` tokens, in words; None: nothing."""
    end = last = 0
    for index, item in enumerate(media):
        if len(item.digest) != DIGEST_BYTES:
            return f"item {index} has a digest of {len(item.digest)} bytes, not {DIGEST_BYTES}"
        if item.kind not in KINDS:
            return f"item {index} is of kind {item.kind!r}; known: {', '.join(KINDS)}"
        if item.rows <= 0:
            return f"item {index} has {item.rows} rows"
    for span in spans:
        if span.length <= 0 or span.start < end or span.stop > prompt:
            return (
                f"the span of {span.length} tokens at {span.start} overlaps the one before it, or lies outside the "
                f"prompt of {prompt} tokens"
            )
        if not last <= span.item < len(media):
            return f"a span reads item {span.item} of {len(media)}, after one that reads item {last}"
        last = span.item
        if span.offset < 0 or span.offset + span.length > media[span.item].rows:
            return (
                f"the span at {span.start} reads rows {span.offset} to {span.offset + span.length} of item "
                f"{span.item}, which has {media[span.item].rows}"
            )
        end = span.stop
    return None


Positions = NDArray[np.int32]
