"""Images in a session: their digests and places are stored with its tokens, their pixels are not.

That is enough to find the KV that was computed of them, in any process. If that KV is lost, the pixels have to be sent
again.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import msgspec
import numpy as np

from quire.errors import ValidationError
from quire.messages.media import KeySpan, MediaItem, PromptMedia, Span, check_media

MOST_SPANS = 4096
"""Spans of a session."""


class StoredSpan(msgspec.Struct, array_like=True, frozen=True):
    """A span of a session, and the item that it reads."""

    start: int
    length: int
    offset: int
    digest: bytes
    kind: str
    rows: int
    first: int = 0
    """Number of the item: spans of one item have the same."""
    positions: bytes = b""
    """Compressed int32 [3, length]: positions of its tokens, less its start; empty in models with one a token."""
    shift: int = 0
    """What is added to the index of a token after the span to have its position."""

    @property
    def stop(self) -> int:
        return self.start + self.length

    @property
    def key(self) -> KeySpan:
        return KeySpan(self.start, self.stop, self.offset, self.digest)


def stored_spans(media: PromptMedia, tokens: int, before: Sequence[StoredSpan], at: int) -> list[StoredSpan]:
    """The spans of `tokens` tokens that are appended to a session of `at` tokens with the spans `before`."""
    if (problem := check_media(tokens, media.items, media.spans)) is not None:
        raise ValidationError(problem, "media")
    if len(before) + len(media.spans) > MOST_SPANS:
        raise ValidationError(f"a session has at most {MOST_SPANS} images, or parts of some", "media")
    shift = before[-1].shift if before else 0
    number = before[-1].first + 1 if before else 0
    found: list[StoredSpan] = []
    for span in media.spans:
        item, packed, after = media.items[span.item], b"", shift
        if media.positions is not None:
            own = media.positions[:, span.start : span.stop] - span.start + shift
            packed = zlib.compress(np.ascontiguousarray(own, np.int32).tobytes())
            if span.stop < tokens:
                after = int(media.positions[0, span.stop]) - span.stop + shift
            else:
                after = media.position_delta + shift
        known = (span.offset, item.digest, item.kind, item.rows, number + span.item)
        found.append(StoredSpan(at + span.start, span.length, *known, packed, after))
    if media.positions is not None:
        restored = restored_positions([*before, *found], at + tokens)
        if not np.array_equal(restored[:, at:], media.positions + np.int32(at + shift)):
            raise ValidationError("a session cannot keep the positions of these images", "media")
    return found


def restored_positions(spans: Sequence[StoredSpan], tokens: int) -> np.ndarray:
    """int32 [3, tokens]: the positions of a session's tokens."""
    positions = np.tile(np.arange(tokens, dtype=np.int32), (3, 1))
    for span in spans:
        own = np.frombuffer(zlib.decompress(span.positions), np.int32).reshape(3, -1)
        positions[:, span.start : span.stop] = own + span.start
        positions[:, span.stop :] = np.arange(span.stop, tokens, dtype=np.int32) + span.shift
    return positions


def restored_media(spans: Sequence[StoredSpan], tokens: int, given: Sequence[MediaItem]) -> PromptMedia:
    """What a turn of the session has in place of token ids. `given`: items whose arrays came with the turn."""
    arrays = {item.digest: item.arrays for item in given if item.arrays}
    items: list[MediaItem] = []
    places: list[Span] = []
    last = None
    for span in spans:
        if span.first != last:
            items.append(MediaItem(span.digest, span.kind, span.rows, arrays.get(span.digest, {})))
            last = span.first
        places.append(Span(span.start, span.length, len(items) - 1, span.offset))
    if not spans or not spans[0].positions:
        return PromptMedia(items, places)
    return PromptMedia(items, places, restored_positions(spans, tokens), spans[-1].shift)


def spans_before(spans: Sequence[StoredSpan], at: int) -> tuple[StoredSpan, ...]:
    """The spans of a session's first `at` tokens. Raises if an image does not end there."""
    for span in spans:
        if span.start < at < span.stop:
            raise ValidationError(
                f"tokens {span.start} to {span.stop} are an image, which a session has all of or nothing: it cannot "
                f"end at {at}",
                "at",
                at,
            )
    return tuple(span for span in spans if span.stop <= at)


def common_spans(old: Sequence[StoredSpan], new: Sequence[StoredSpan], same: int) -> int:
    """How much of the first `same` tokens, which are equal, has the same images, too."""
    for one, other in zip(old, new, strict=False):
        if one.key != other.key or one.positions != other.positions:
            same = min(same, one.start, other.start)
    for span in (*old[len(new) :], *new[len(old) :]):
        same = min(same, span.start)
    for span in (*old, *new):
        if span.start < same < span.stop:
            same = span.start
    return same
