"""Drafts from repetition, on the host: what followed the last time that a sequence's latest tokens occurred.

A `History` finds earlier occurrences of the latest tokens, as a suffix tree does, in arrays: tokens in a ring, and for
each run of `gram` tokens a chain of the places where it occurred, latest first. About 20 bytes a token, well below a
microsecond to add one and 10 to 40 to look one up; a suffix automaton in Python takes several hundred bytes a token.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quire.messages.outputs import Key
from quire.speculative.config import SpeculativeConfig

OWN_TOKENS = 1 << 17
"""Most tokens of a sequence that are looked through, the latest ones."""
SHARED_TOKENS, TENANT_TOKENS = 1 << 21, 1 << 19
"""Most tokens of finished sequences that are kept, over all tenants (40 MiB) and of one."""
CANDIDATES = 64
"""Occurrences that are compared, the latest ones."""
OWN_GRAM, SHARED_GRAM = 2, 4
"""Shortest matches in a sequence itself and in finished ones: there are more of those, and less alike."""
_HOPS = 2 * CANDIDATES
"""Most places of a chain that are visited: runs whose hashes are equal share a chain."""
_FEW, _FIRST_LOOK = 8, 8
"""With more occurrences than a few, so many tokens are compared first, and the others only where these are equal."""
_BLOCK = 256
"""Finished sequences that begin alike are kept once, in steps of so many tokens."""
_SEPARATOR = -1
_MASK = (1 << 64) - 1
_MULTIPLIERS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93,
                0xA0761D6478BD642F, 0xE7037ED1A0B428DB, 0x8EBC6AF09C88C6E3, 0x589965CC75374CC3)  # fmt: skip
"""Odd numbers with random bits: a run's hash is the sum of its tokens times these, in 64 bits."""

Ints = NDArray[np.int32]


class History:
    """The latest tokens of a text, and where runs of `gram` of them occurred."""

    def __init__(self, gram: int, most: int, expected: int = 0) -> None:
        self._gram = gram
        self._factors = [_MULTIPLIERS[i % len(_MULTIPLIERS)] for i in range(gram)]
        self._most = most
        self.total = 0
        """Tokens that were ever added; a token's position is how many were added before it."""
        self.oldest = 0
        """The first position that is kept."""
        self._indexed = gram
        """The first position whose preceding run is in no chain yet. The run before the end is not: nothing follows
        it."""
        self._allocate(min(max(expected, 64), most))

    def _allocate(self, tokens: int) -> None:
        self.capacity = 1 << (tokens - 1).bit_length()
        self._wrap = self.capacity - 1
        self._shift = 64 - (self.capacity.bit_length() - 1)
        self._tokens = np.full(self.capacity, _SEPARATOR, np.int32)
        self._previous = np.full(self.capacity, -1, np.int64)
        self._heads = np.full(self.capacity, -1, np.int64)
        # Views whose items are Python integers: several times faster than the arrays' own, one by one.
        self._token_at, self._previous_at = memoryview(self._tokens), memoryview(self._previous)  # type: ignore[arg-type]
        self._head_at = memoryview(self._heads)  # type: ignore[arg-type]

    def last(self, count: int) -> Ints:
        """The last `count` tokens, or as many as are kept."""
        count = min(count, self.total - self.oldest)
        return self._tokens[np.arange(self.total - count, self.total) & self._wrap]

    def add(self, tokens: Sequence[int] | Ints) -> None:
        """Append tokens."""
        if self.total + len(tokens) - self.oldest > self.capacity < self._most:
            self._grow(len(tokens))
        if len(tokens) > 16:
            self._add_many(np.asarray(tokens, np.int32))
            return
        gram, wrap, at = self._gram, self._wrap, self._token_at
        for token in tokens:
            end = self.total
            if end >= self._indexed:  # the run before this token has something that follows it now
                value = 0
                for i, factor in enumerate(self._factors, end - gram):
                    value += at[i & wrap] * factor
                slot = (value & _MASK) >> self._shift
                self._previous_at[end & wrap] = self._head_at[slot]
                self._head_at[slot] = end
                self._indexed = end + 1
            at[end & wrap] = token
            self.total = end + 1
        self.oldest = max(self.oldest, self.total - self.capacity)

    def _grow(self, more: int) -> None:
        kept = self.last(self.capacity)
        self._allocate(min(max(2 * self.capacity, len(kept) + more), self._most))
        self.total = self.oldest
        self._indexed = self.oldest + self._gram
        self._add_many(kept)

    def _add_many(self, tokens: Ints) -> None:
        if len(tokens) > self.capacity:
            self.total += len(tokens) - self.capacity
            self._indexed = self.total + self._gram  # runs that end before are not kept
            tokens = tokens[-self.capacity :]
        self._tokens[np.arange(self.total, self.total + len(tokens)) & self._wrap] = tokens
        self.total += len(tokens)
        self.oldest = max(self.oldest, self.total - self.capacity)
        first = max(self._indexed, self.oldest + self._gram)
        ends = np.arange(first, self.total)
        if not len(ends):
            return
        text = self._tokens[np.arange(first - self._gram, self.total - 1) & self._wrap].astype(np.uint64)
        values = np.zeros(len(ends), np.uint64)
        for i, factor in enumerate(self._factors):
            values += text[i : i + len(ends)] * np.uint64(factor)
        # In the order of chains, and of places within one: sorting both as one number is the fastest.
        packed = np.sort((values >> np.uint64(self._shift) << np.uint64(32)) | np.arange(len(ends), dtype=np.uint64))
        slots, ends = packed >> np.uint64(32), ends[packed & np.uint64(0xFFFFFFFF)]
        starts = np.empty(len(ends), np.bool_)
        starts[0], starts[1:] = True, slots[1:] != slots[:-1]
        before = np.empty(len(ends), np.int64)
        before[0], before[1:] = 0, ends[:-1]
        before[starts] = self._heads[slots[starts]]
        self._previous[ends & self._wrap] = before
        lasts = np.append(starts[1:], True)
        self._heads[slots[lasts]] = ends[lasts]
        self._indexed = self.total

    def find(self, pattern: Ints) -> tuple[int, Ints]:
        """Where the end of `pattern` occurred, and was followed by something: the length of the longest match, and the
        positions that follow matches of this length, latest first. (0, none) if the last `gram` tokens did not."""
        gram, wrap = self._gram, self._wrap
        if len(pattern) < gram:
            return 0, np.empty(0, np.int32)
        value = 0
        for token, factor in zip(pattern[-gram:].tolist(), self._factors, strict=True):
            value += token * factor
        places: list[int] = []
        place, previous, least = self._head_at[(value & _MASK) >> self._shift], self._previous_at, self.oldest + gram
        while place >= least and len(places) < _HOPS:
            places.append(place)
            place = previous[place & wrap]
        if not places:
            return 0, np.empty(0, np.int32)
        ends = np.array(places)
        look = max(_FIRST_LOOK, gram)
        lengths = self._match_lengths(ends, pattern[-look:] if len(places) > _FEW else pattern)
        fits = (lengths >= gram) & (self._tokens[ends & wrap] != _SEPARATOR)
        ends, lengths = ends[fits][:CANDIDATES], lengths[fits][:CANDIDATES]
        if not len(ends):
            return 0, ends
        longest = int(lengths.max())
        ends = ends[lengths == longest]
        if longest == look < len(pattern):
            lengths = self._match_lengths(ends, pattern)
            longest = int(lengths.max())
            ends = ends[lengths == longest]
        return longest, ends

    def _match_lengths(self, ends: Ints, pattern: Ints) -> Ints:
        """How many tokens before each of these positions are those at the end of `pattern`."""
        before = ends[:, None] - np.arange(1, len(pattern) + 1)
        differs = (self._tokens[before & self._wrap] != pattern[::-1]) | (before < self.oldest)
        return np.where(differs.any(1), differs.argmax(1), len(pattern))

    def following(self, places: Ints, most: int) -> list[list[int]]:
        """For each of these positions `most` tokens from there on, a negative one (and any others) at the end of a
        finished sequence. The end of a running one is followed by what the place is followed by, over again."""
        after = places[:, None] + np.arange(most) % (self.total - places)[:, None]
        found: list[list[int]] = self._tokens[after & self._wrap].tolist()
        return found


class _Shared:
    """Finished sequences of a tenant."""

    def __init__(self, most_tokens: int, most_sequences: int) -> None:
        self.history = History(SHARED_GRAM, most_tokens)
        self._most_sequences = most_sequences
        self._starts: deque[int] = deque()
        self._known: dict[int, int] = {}
        """By the hash of everything up to the end of a block: where it is."""

    def add(self, tokens: Ints) -> None:
        """Keep a sequence; what it has in common with the beginning of an earlier one is there already."""
        history = self.history
        value, new, ends = 0, 0, []
        for end in range(_BLOCK, len(tokens) + 1, _BLOCK):
            value = hash((value, tokens[end - _BLOCK : end].tobytes()))
            ends.append((value, end))
            if new == end - _BLOCK and self._known.get(value, -1) >= history.oldest:
                new = end
        kept = max(0, new - 2 * SHARED_GRAM)  # the tokens before the new ones, so that they can be matched
        if kept >= len(tokens) - SHARED_GRAM:
            return
        start = history.total
        self._starts.append(start)
        history.add(np.append(tokens[kept:], np.int32(_SEPARATOR)))
        if len(self._known) > 2 * history.capacity // _BLOCK + 16:
            self._known = {value: place for value, place in self._known.items() if place >= history.oldest}
        self._known.update((value, start + end - _BLOCK - kept) for value, end in ends if end > new)
        while len(self._starts) > self._most_sequences:
            self._starts.popleft()
            history.oldest = max(history.oldest, self._starts[0])
        while self._starts[0] < history.oldest:
            self._starts.popleft()


class _Sequence:
    """A running sequence."""

    def __init__(self, tokens: Sequence[int], tenant: str, gram: int) -> None:
        self.tenant = tenant
        self.history = History(gram, OWN_TOKENS, len(tokens) + 64)
        self.history.add(np.asarray(tokens, np.int32))


class NgramLookup:
    """The n-gram proposer on the host, for devices that cannot run it: what followed the latest occurrence of the
    longest run of the last tokens."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._shortest, self._longest = config.shortest_ngram, config.longest_ngram
        self._sequences: dict[Key, History] = {}

    def start(self, key: Key, tokens: Sequence[int], tenant: str) -> None:
        self._sequences[key] = _Sequence(tokens, tenant, self._shortest).history

    def extend(self, key: Key, tokens: Sequence[int]) -> None:
        self._sequences[key].add(tokens)

    def propose(self, key: Key, most: int) -> list[int]:
        history = self._sequences[key]
        length, places = history.find(history.last(self._longest))
        return _until_end(history.following(places[:1], most)[0]) if length else []

    def leave(self, key: Key, has_ended: bool) -> None:
        self._sequences.pop(key, None)


class SuffixProposer:
    """Proposes the most frequent continuation of the longest match, in the sequence itself and in those that its tenant
    has finished. The longer the match, the more tokens."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._depth = config.suffix_decoding_max_tree_depth
        self._factor = config.suffix_decoding_max_spec_factor
        self._least_share = config.suffix_decoding_min_token_prob
        self._most_sequences = config.suffix_decoding_max_cached_requests
        self._sequences: dict[Key, _Sequence] = {}
        self._shared: OrderedDict[str, _Shared] = OrderedDict()
        """By tenant, the least recently used first."""

    def start(self, key: Key, tokens: Sequence[int], tenant: str) -> None:
        self._sequences[key] = _Sequence(tokens, tenant, OWN_GRAM)
        if tenant in self._shared:
            self._shared.move_to_end(tenant)

    def extend(self, key: Key, tokens: Sequence[int]) -> None:
        self._sequences[key].history.add(tokens)

    def propose(self, key: Key, most: int) -> list[int]:
        sequence = self._sequences[key]
        source = sequence.history
        pattern = source.last(self._depth)
        length, places = source.find(pattern)
        if (shared := self._shared.get(sequence.tenant)) is not None and length < len(pattern):
            shared_length, shared_places = shared.history.find(pattern)
            if shared_length > length:
                length, places, source = shared_length, shared_places, shared.history
        count = min(most, int(self._factor * length))
        return self._most_frequent(source.following(places, count)) if count > 0 else []

    def _most_frequent(self, runs: list[list[int]]) -> list[int]:
        """The tokens that most of the runs have, as long as enough of them do."""
        if len(runs) == 1:
            return _until_end(runs[0])
        least = self._least_share * len(runs)
        draft: list[int] = []
        for i in range(len(runs[0])):
            votes: dict[int, int] = {}
            for run in runs:
                votes[run[i]] = votes.get(run[i], 0) + 1
            votes.pop(_SEPARATOR, 0)
            token = max(votes, key=votes.__getitem__, default=_SEPARATOR)  # the latest place's, of several
            if token == _SEPARATOR or votes[token] < least:
                break
            draft.append(token)
            runs = [run for run in runs if run[i] == token]
        return draft

    def leave(self, key: Key, has_ended: bool) -> None:
        sequence = self._sequences.pop(key, None)
        if sequence is None or not has_ended or not self._most_sequences:
            return
        tenant = sequence.tenant
        if tenant not in self._shared:
            self._shared[tenant] = _Shared(TENANT_TOKENS, self._most_sequences)
        self._shared.move_to_end(tenant)
        self._shared[tenant].add(sequence.history.last(OWN_TOKENS))
        while len(self._shared) > 1 and self._num_kept > SHARED_TOKENS:
            self._shared.popitem(last=False)

    @property
    def _num_kept(self) -> int:
        return sum(shared.history.capacity for shared in self._shared.values())


def _until_end(run: list[int]) -> list[int]:
    return run[: run.index(_SEPARATOR)] if _SEPARATOR in run else run
