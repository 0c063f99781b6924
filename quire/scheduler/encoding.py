"""Images and other inputs that are not token ids: which items a step encodes, and which encoded ones its tokens read.

Encoded items lie on the device in numbered slots; this is the list of them. The cache is bounded by rows and evicts the
item that was read longest ago. Requests share items by digest, within one salt. An item is held from the step that
encodes it until the last of the request's tokens that read it are in a plan; after that it stays while there is room.
An item that was evicted, or whose request was preempted, is encoded again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from quire.errors import CacheTooSmallError, ValidationError
from quire.messages.media import (
    EMBEDS,
    ENCODE_PARTS,
    EncodeItem,
    EncoderLimits,
    MediaItem,
    Span,
    Splice,
    VisibleSpan,
    check_media,
)
from quire.messages.plan import Ints, StepPlan
from quire.messages.request import NewRequest, Request

ItemKey = tuple[bytes, int, str]
"""Digest, rows, salt."""

ORPHAN_STEPS = 8
"""Steps in which what is half encoded is finished while the request that waits for it has no turn."""
PIXELS_GONE = (
    "what the model has computed of an image or video of this conversation is no longer cached, and neither are its "
    "pixels: send it again"
)


@dataclass(eq=False)
class _Encoded:
    """An item in a slot, or about to be encoded into it."""

    key: ItemKey
    slot: int
    holders: set[Request] = field(default_factory=set)
    """Requests with tokens that still have to read it."""
    readers: set[Request] = field(default_factory=set)
    """Unfinished requests that have read it."""

    @property
    def rows(self) -> int:
        return self.key[1]


class EncoderStats:
    """Counts since the start."""

    def __init__(self) -> None:
        self.encoded = 0
        """Items encoded…"""
        self.encoded_rows = 0
        self.hits = 0
        """…and found in the cache instead."""
        self.spliced_tokens = 0
        """Prompt tokens that were computed from embeddings of items."""
        self.failed = 0


class NoEncoding:
    """The model takes token ids alone."""

    is_on = False
    unsplit = False
    limits = EncoderLimits()
    splits = False
    num_waiting = used_rows = spent = 0
    stats = EncoderStats()

    def check(self, source: NewRequest) -> None:
        """Refuse a request that has anything else."""
        if source.media or source.spans or source.positions is not None:
            raise ValidationError("this model takes text only: it has no encoder for images", "media")

    def begin(self) -> None: ...

    def cut(self, request: Request, start: int, count: int, budget: int) -> int:
        return count

    def unsplit_spans(self, source: NewRequest) -> Sequence[Span]:
        return ()

    def whole(self, request: Request, start: int, count: int) -> int:
        return count

    def cost(self, request: Request) -> int:
        return 0

    def lacks_arrays(self, source: NewRequest) -> bool:
        return False

    def boundary(self, request: Request, tokens: int, block_size: int) -> int:
        return tokens

    def is_waiting(self, request: Request) -> bool:
        return False

    def leave(self, request: Request) -> None: ...

    def end(self, request: Request) -> None: ...

    def read(self, request: Request, start: int, count: int, at: int) -> None: ...

    def write(self, plan: StepPlan) -> None: ...

    def take_failed(self, errors: list[tuple[int, str]]) -> Iterator[tuple[Request, str]]:
        return iter(())

    def take_lacking(self) -> list[Request]:
        return []

    def reset(self) -> None: ...

    def check_idle(self) -> None: ...


class Encoding:
    """The items of all requests, and the cache of encoded ones."""

    is_on = True

    def __init__(self, limits: EncoderLimits, step_tokens: int, max_rows: int) -> None:
        """`step_tokens`, `max_rows`: the most of a step."""
        self.limits = limits
        self.unsplit = limits.bidirectional
        """Whether the tokens of a span are computed in one step."""
        self.stats = EncoderStats()
        self.used_rows = 0
        self._step_tokens = step_tokens
        self._longest_span = max(step_tokens - max_rows, 1)
        self._items: OrderedDict[ItemKey, _Encoded] = OrderedDict()
        """Least recently read first."""
        self._free_slots: list[int] = []
        self._num_slots = 0
        self._to_encode: list[EncodeItem] = []
        self._to_free: list[int] = []
        self.spent = 0
        """Rows that the step being planned encodes…"""
        self._cost: dict[Request, int] = {}
        """…by the request whose item it is."""
        self.splits = False
        """Whether streams wait for the step being planned: what is too large for its budget is encoded over several."""
        self._partial: _Encoded | None = None
        """What is being encoded over several steps…"""
        self._done = 0
        """…and how many of its rows are paid for."""
        self._is_begun = False
        """Whether the last plan left something half encoded."""
        self._is_advanced = False
        """Whether the step being planned has its share of that."""
        self._waiting: set[Request] = set()
        """Requests that waited for room in the cache or in the step, when the last step was planned."""
        self._lacking: list[Request] = []
        self._splices: list[Splice] = []
        self._visible: list[VisibleSpan] = []
        self._positions: list[tuple[int, Ints]] = []

    # Arrival

    def check(self, source: NewRequest) -> None:
        """Refuse a request whose items or spans make no sense, or could never be encoded."""
        if (problem := check_media(len(source.prompt), source.media, source.spans)) is not None:
            raise ValidationError(problem, "media")
        limits = self.limits
        for item in source.media:
            if item.rows > limits.cache_rows:
                raise CacheTooSmallError(
                    f"an {item.kind} of {item.rows} tokens does not fit the encoder's cache of {limits.cache_rows}: "
                    "make it smaller, or raise encoder_cache_tokens"
                )
            if item.kind == EMBEDS and not limits.takes_embeds:
                raise ValidationError("prompt_embeds are off: start with enable_prompt_embeds", "prompt_embeds")
            if item.kind != EMBEDS and not limits.has_encoder:
                raise ValidationError("this model takes text only: it has no encoder for images", "media")
        if source.positions is not None and (
            not limits.mrope or source.positions.shape != (3, len(source.prompt)) or source.positions.dtype != np.int32
        ):
            raise ValidationError("positions are three int32 for each token, for models with M-RoPE only", "positions")
        if source.positions is not None:
            low, high = int(source.positions.min()), int(source.positions.max())
            high = max(high, source.limit - 1 + source.position_delta)
            if low < 0 or high >= limits.positions or len(source.prompt) + source.position_delta < 0:
                raise ValidationError(
                    f"positions go from {low} to {high}, and this model has {limits.positions} (max_model_len)",
                    "positions",
                )
        if source.positions is None and source.position_delta:
            raise ValidationError("a position_delta needs positions", "position_delta", source.position_delta)
        longest = max((span.length for span in self.unsplit_spans(source)), default=0)
        if longest > self._longest_span:
            raise CacheTooSmallError(
                f"an image of {longest} tokens is computed in one step, which has at most {self._longest_span} tokens "
                "beside its rows: raise max_num_batched_tokens, or make it smaller"
            )

    # Planning a step

    def begin(self) -> None:
        """A step is about to be planned."""
        self.spent = 0
        self.splits = self._is_advanced = False
        self._cost.clear()
        self._waiting.clear()

    def cut(self, request: Request, start: int, count: int, budget: int) -> int:
        """How many of the request's `count` tokens from `start` on can be computed in this step: items that they read
        are in the cache then, or are encoded. Encoding an item of n rows counts like n tokens of `budget`; the first of
        a step is encoded in any case, or if streams wait, over several steps."""
        source = request.source
        if not source.spans:
            return count
        stop = start + count
        for span in self.unsplit_spans(source):
            if span.start < stop < span.stop:  # before it, unless the chunk begins with it
                stop = span.start if span.start > start else span.stop if span.start == start else start
        end, left = start, budget
        for span in source.spans:
            if span.stop <= start:
                continue
            if span.start >= stop:
                break
            found = self._find(request, source.media[span.item], left - (max(span.start, start) - end))
            if not found:
                stop = max(start, span.start)
                break
            left = budget - self._cost.get(request, 0) - (min(span.stop, stop) - start)
            end = min(span.stop, stop)
        cost = self._cost.get(request, 0)
        if stop > start and cost and stop - start + cost > budget and not self.unsplit_spans(source):
            stop = max(start + 1, min(stop, start + budget - cost))
        return stop - start

    def unsplit_spans(self, source: NewRequest) -> Sequence[Span]:
        """Spans whose tokens are computed in one step: they see each other both ways."""
        if not self.unsplit:
            return ()
        return [span for span in source.spans if source.media[span.item].kind != EMBEDS]

    def whole(self, request: Request, start: int, count: int) -> int:
        """How many of the request's `count` tokens from `start` on can be computed without splitting a span that must
        not be; 0 if they begin with one that is longer."""
        for span in self.unsplit_spans(request.source):
            if span.start < start + count < span.stop:
                return max(0, span.start - start)
        return count

    def _find(self, request: Request, item: MediaItem, left: int) -> bool:
        """The item is in the cache, or is encoded in this step; False: it has to wait."""
        key = (item.digest, item.rows, request.source.salt)
        found = self._items.get(key)
        if found is None:
            if not item.arrays:
                self._lacking.append(request)
                return False
            in_parts = self.splits and item.kind != EMBEDS and item.rows > left
            is_busy = self._partial is not None or any(each.item.kind != EMBEDS for each in self._to_encode)
            if (
                (self.spent and item.rows > left)
                or (in_parts and (left <= 0 or is_busy))
                or (self._partial is not None and item.kind != EMBEDS)
                or not self._make_room(item.rows)
            ):
                self._waiting.add(request)
                return False
            found = self._items[key] = _Encoded(key, self._take_slot())
            self.used_rows += item.rows
            self._to_encode.append(EncodeItem(found.slot, item, request.id))
            self.stats.encoded += 1
            self.stats.encoded_rows += item.rows
            if in_parts:
                self._partial, self._done = found, 0
                found.holders.add(request)
                return self._advance(request, left)
            self._charge(request, item.rows)
        elif found is self._partial:
            found.holders.add(request)
            if not self._advance(request, left):
                return False
        elif request not in found.readers and request not in found.holders:
            self.stats.hits += 1
        found.holders.add(request)
        self._items.move_to_end(key)
        return True

    def _charge(self, request: Request, rows: int) -> None:
        self.spent += rows
        self._cost[request] = self._cost.get(request, 0) + rows

    def _advance(self, request: Request | None, left: int) -> bool:
        """Encode another part of what takes several steps, once a step; whether that was the last. `request`: the one
        that waits for it; None: none does in this step."""
        one = self._partial
        assert one is not None
        rest = one.rows - self._done
        if not self._is_advanced:
            self._is_advanced = True
            rows = max(0, min(rest, left)) if self.splits else rest
            self._done += rows
            rest -= rows
            if request is None:
                self.spent += rows
            else:
                self._charge(request, rows)
        if not rest:
            self._partial = None
            return True
        if request is not None:
            self._waiting.add(request)
        return False

    def lacks_arrays(self, source: NewRequest) -> bool:
        """Whether the request has an item that cannot be encoded, so that its KV has to come from a cache."""
        return any(not item.arrays for item in source.media)

    def cost(self, request: Request) -> int:
        """Rows that are encoded for the request in this step."""
        return self._cost.get(request, 0)

    def _make_room(self, rows: int) -> bool:
        """Evict items that no request waits to read, until `rows` more fit."""
        idle = [one for one in self._items.values() if not one.holders]
        if self.used_rows - sum(one.rows for one in idle) + rows > self.limits.cache_rows:
            return False
        for one in idle:
            if self.used_rows + rows <= self.limits.cache_rows:
                break
            self._evict(one)
        return True

    def _evict(self, one: _Encoded) -> None:
        del self._items[one.key]
        self.used_rows -= one.rows
        self._free_slots.append(one.slot)
        self._to_free.append(one.slot)
        self._to_encode = [waiting for waiting in self._to_encode if waiting.slot != one.slot]
        if one is self._partial:
            self._partial = None

    def _take_slot(self) -> int:
        if self._free_slots:
            return self._free_slots.pop()
        self._num_slots += 1
        return self._num_slots - 1

    def boundary(self, request: Request, tokens: int, block_size: int) -> int:
        """The most of the request's first `tokens` tokens, whole blocks, after which it can continue from cached KV:
        not within a span whose tokens see each other both ways."""
        for span in self.unsplit_spans(request.source):
            if span.start < tokens < span.stop:
                return self.boundary(request, span.start // block_size * block_size, block_size)
        return tokens

    # Writing a plan

    def read(self, request: Request, start: int, count: int, at: int) -> None:
        """Tokens `start` to `start + count` of the request are those from `at` on of the step. Items that no later
        token reads are held no more."""
        source, stop = request.source, start + count
        if source.positions is not None:
            known = source.positions[:, start:stop]
            if (more := stop - max(start, len(source.prompt))) > 0:  # output that is computed again
                tail = np.arange(stop - more, stop, dtype=np.int32) + source.position_delta
                known = np.concatenate([known, np.broadcast_to(tail, (3, more))], axis=1)
            self._positions.append((at, known))
        last = source.spans[-1] if source.spans else None
        if last is None or start >= last.stop:
            return
        for span in source.spans:
            first, end = max(span.start, start), min(span.stop, stop)
            if first >= end:
                continue
            item = source.media[span.item]
            one = self._items[item.digest, item.rows, source.salt]
            one.readers.add(request)
            offset = span.offset + first - span.start
            self._splices.append(Splice(at + first - start, end - first, one.slot, offset))
            self.stats.spliced_tokens += end - first
            if self.unsplit and item.kind != EMBEDS:
                self._visible.append(VisibleSpan(at + first - start, span.length))
        open_items = {span.item for span in source.spans if span.stop > stop and span.start < stop}
        held = {(item.digest, item.rows, source.salt) for i in open_items for item in (source.media[i],)}
        for key, one in self._items.items():
            if key not in held and one is not self._partial:
                one.holders.discard(request)

    def write(self, plan: StepPlan) -> None:
        """Put what the step encodes and reads into its plan."""
        if self._partial is not None:
            self._advance(None, -(-self._partial.rows // ORPHAN_STEPS))
        partial = self._partial
        if partial is not None:
            plan.encoded = max(1, self._done * ENCODE_PARTS // partial.rows)
        elif self._is_begun or self._to_encode:
            plan.encoded = ENCODE_PARTS
        self._is_begun = partial is not None
        if self._to_encode or self._to_free:
            plan.encode, self._to_encode = self._to_encode, []
            plan.freed, self._to_free = self._to_free, []
        if self._splices:
            plan.splices, self._splices = self._splices, []
            plan.visible, self._visible = self._visible, []
        if self._positions:
            plan.positions, self._positions = _all_positions(plan, self._positions), []

    # Ends

    def leave(self, request: Request) -> None:
        """The request has lost its row: it reads nothing in the step being planned."""
        if request.source.spans:
            for one in self._items.values():
                one.holders.discard(request)
            self._drop_partial()

    def _drop_partial(self) -> None:
        """Stop encoding items that no request waits for."""
        if self._partial is not None and not self._partial.holders:
            self._evict(self._partial)

    def end(self, request: Request) -> None:
        """The request has ended."""
        if request.source.spans:
            for one in self._items.values():
                one.holders.discard(request)
                one.readers.discard(request)
            self._drop_partial()

    def take_failed(self, errors: list[tuple[int, str]]) -> Iterator[tuple[Request, str]]:
        """Requests that have read items which could not be encoded, and why. The items are in no slot any more."""
        for slot, message in errors:
            one = next((one for one in self._items.values() if one.slot == slot), None)
            if one is None:
                continue
            self.stats.failed += 1
            readers = sorted(one.readers | one.holders, key=lambda request: request.arrival_order)
            self._evict(one)
            for request in readers:
                yield request, f"the image could not be encoded: {message}"

    def take_lacking(self) -> list[Request]:
        """Requests that have to read items which are in no cache, and whose arrays were not sent."""
        lacking, self._lacking = self._lacking, []
        return lacking

    @property
    def num_waiting(self) -> int:
        """Requests that waited for the encoder when the last step was planned."""
        return len(self._waiting)

    def is_waiting(self, request: Request) -> bool:
        """Whether the request was one of them."""
        return request in self._waiting

    def reset(self) -> None:
        """A step failed: the device forgets all items."""
        self._items.clear()
        self._partial, self._is_begun = None, False
        self.used_rows = self._num_slots = 0
        for pending in (self._free_slots, self._to_encode, self._to_free, self._splices, self._visible):
            pending.clear()
        self._positions.clear()

    def check_idle(self) -> None:
        """Raise if an item is held, or rows are miscounted. Call it when no request is unfinished."""
        held = [one.slot for one in self._items.values() if one.holders or one.readers]
        rows = sum(one.rows for one in self._items.values())
        is_over = self.used_rows > self.limits.cache_rows
        if self._partial is not None or held or rows != self.used_rows or is_over or self._lacking:
            raise RuntimeError(
                f"not idle: encoder slots {held[:8]} are held; {self.used_rows} rows counted, {rows} found, "
                f"{self.limits.cache_rows} allowed"
            )


def _all_positions(plan: StepPlan, given: list[tuple[int, Ints]]) -> Ints:
    """[3 * prompt tokens]: the positions of all prompt tokens, where some are given by their place in the step."""
    first = plan.num_tokens - len(plan.tokens)
    positions = np.full((3, len(plan.tokens)), -1, np.int32)
    for at, known in given:
        positions[:, at - first : at - first + known.shape[1]] = known
    return positions.reshape(-1)
