"""Images of sessions: what a session's log keeps of them, and their pixels while there is room."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from quire.messages.media import MediaItem, PromptMedia
from quire.messages.request import NewRequest
from quire.vision.processor import Prepared

HELD_BYTES = 256 << 20


class SessionItems:
    """Pixels of the images that sessions have seen, within a bound of bytes, the least recently used dropped. A turn
    needs them if what was computed of an image is no longer cached, or never was: after an append. Any thread may call
    it."""

    def __init__(self, most: int = HELD_BYTES) -> None:
        self._most = most
        self._items: OrderedDict[str, list[MediaItem]] = OrderedDict()
        self._held = 0
        self._lock = threading.Lock()

    def add(self, key: str, items: Sequence[MediaItem]) -> None:
        """A session has these images, too."""
        if not items:
            return
        with self._lock:
            known = self._items.pop(key, [])
            digests = {item.digest for item in known}
            new = [item for item in items if item.digest not in digests]
            self._items[key] = known + new
            self._held += sum(item.nbytes for item in new)
            while self._held > self._most and self._items:
                _, dropped = self._items.popitem(last=False)
                self._held -= sum(item.nbytes for item in dropped)

    def of(self, key: str) -> list[MediaItem]:
        """The images of a session that are still held."""
        with self._lock:
            if key in self._items:
                self._items.move_to_end(key)
            return list(self._items.get(key, ()))


def stored_media(media: Prepared | NewRequest | None) -> PromptMedia | None:
    """What a session's log keeps of the images of a prompt, or of a piece of it; None: there are none."""
    items = [] if media is None else media.media if isinstance(media, NewRequest) else media.items
    if media is None or not items or not media.spans:
        return None
    bare = [msgspec.structs.replace(item, arrays={}) for item in items]
    return PromptMedia(bare, list(media.spans), media.positions, media.position_delta)
