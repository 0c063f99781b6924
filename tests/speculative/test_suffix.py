"""Drafts from repetition, against a search through all earlier tokens."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.speculative import suffix
from quire.speculative.config import SpeculativeConfig
from quire.speculative.suffix import History, NgramLookup, SuffixProposer

KEY = ("request", 0)
TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=120)


def config(method: str = "suffix", **keys: object) -> SpeculativeConfig:
    return SpeculativeConfig.parse({"method": method, **keys})


def matches(text: list[int], pattern: list[int], gram: int, runs_on: int = 1) -> list[tuple[int, list[int]]]:
    """(length of the match, what follows) of each place in `text` where the last `gram` tokens of `pattern` occur and
    something follows, the latest first. What follows is repeated `runs_on` times."""
    found = []
    for end in range(len(text) - 1, gram - 1, -1):
        length = 0
        while length < min(len(pattern), end) and text[end - 1 - length] == pattern[-1 - length]:
            length += 1
        if length >= gram:
            found.append((length, text[end:] * runs_on))
    return found


def most_frequent(found: list[tuple[int, list[int]]], count: int, least: float) -> list[int]:
    runs = [run for _, run in found]
    total, draft = len(runs), list[int]()
    for i in range(count):
        votes = Counter(run[i] for run in runs if i < len(run))
        if not votes:
            break
        token = max(votes, key=lambda each: votes[each])
        if votes[token] < least * total:
            break
        draft.append(token)
        runs = [run for run in runs if i < len(run) and run[i] == token]
    return draft


def expected_suffix(
    own: list[int], finished: list[list[int]], most: int, depth: int = 24, factor: float = 1.0, least: float = 0.1
) -> list[int]:
    pattern = own[-depth:]
    found = matches(own, pattern, suffix.OWN_GRAM, most)[: suffix.CANDIDATES]
    shared = [each for text in reversed(finished) for each in matches(text, pattern, suffix.SHARED_GRAM)]
    shared = shared[: suffix.CANDIDATES]
    if max((n for n, _ in shared), default=0) > max((n for n, _ in found), default=0):
        found = shared
    longest = max((n for n, _ in found), default=0)
    return most_frequent([each for each in found if each[0] == longest], min(most, int(factor * longest)), least)


def expected_ngram(own: list[int], shortest: int, longest: int, most: int) -> list[int]:
    for n in range(longest, shortest - 1, -1):
        for end in range(len(own) - 1, n - 1, -1):
            if own[end - n : end] == own[-n:]:
                return (own[end:] * most)[:most]
    return []


@given(TOKENS, st.lists(st.lists(st.integers(0, 3), max_size=20), max_size=8))
@settings(max_examples=150, deadline=None)
def test_a_sequences_own_tokens(prompt: list[int], drawn: list[list[int]]) -> None:
    proposer = SuffixProposer(config())
    lookup = NgramLookup(config("ngram", prompt_lookup_min=2, prompt_lookup_max=4))
    for each in (proposer, lookup):
        each.start(KEY, prompt, "")
    own = list(prompt)
    for tokens in [[], *drawn]:
        own += tokens
        for each in (proposer, lookup):
            each.extend(KEY, tokens)
        assert proposer.propose(KEY, 9) == expected_suffix(own, [], 9)
        assert lookup.propose(KEY, 5) == expected_ngram(own, 2, 4, 5)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=40), max_size=6), TOKENS, st.floats(0, 1))
@settings(max_examples=150, deadline=None)
def test_finished_sequences(finished: list[list[int]], own: list[int], least: float) -> None:
    proposer = SuffixProposer(
        config(
            suffix_decoding_min_token_prob=least, suffix_decoding_max_tree_depth=9, suffix_decoding_max_spec_factor=2
        )
    )
    for i, tokens in enumerate(finished):
        proposer.start(("other", i), tokens, "a")
        proposer.leave(("other", i), True)
    # Too short to hold a match and what follows it.
    kept = [tokens for tokens in finished if len(tokens) > suffix.SHARED_GRAM]
    proposer.start(KEY, own, "a")
    assert proposer.propose(KEY, 7) == expected_suffix(own, kept, 7, 9, 2, least)
    proposer.start(KEY, own, "b")
    assert proposer.propose(KEY, 7) == expected_suffix(own, [], 7, 9, 2, least), "of another tenant"


def test_a_history_keeps_the_latest_tokens() -> None:
    random = np.random.default_rng(0)
    text = random.integers(0, 6, 3000).tolist()
    for step in (1, 7, 16, 17, 100, 700):
        history = History(2, 256)
        for i in range(0, len(text), step):
            history.add(text[i : i + step])
        kept = text[-256:]
        assert (history.total, history.oldest, history.capacity) == (3000, 3000 - 256, 256)
        assert history.last(300).tolist() == kept
        length, places = history.find(history.last(24))
        found = [(n, run) for n, run in matches(kept, kept[-24:], 2, 3)][: suffix.CANDIDATES]
        assert length == max(n for n, _ in found)
        assert history.following(places, 3) == [run[:3] for n, run in found if n == length]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "SHARED_TOKENS", 4096)
    monkeypatch.setattr(suffix, "TENANT_TOKENS", 2048)
    proposer = SuffixProposer(config())
    random = np.random.default_rng(1)

    def finish(tenant: str, tokens: list[int]) -> None:
        proposer.start(KEY, tokens, tenant)
        proposer.leave(KEY, True)

    def knows(tenant: str, tokens: list[int]) -> bool:
        proposer.start(KEY, tokens[:8], tenant)
        found = proposer.propose(KEY, 4)
        proposer.leave(KEY, False)
        return found == tokens[8:12]

    texts = {tenant: random.integers(0, 1 << 17, 900).tolist() for tenant in "abcde"}
    for tenant, text in texts.items():
        finish(tenant, text)
        assert knows(tenant, text)
    assert proposer._num_kept <= 4096
    assert knows("e", texts["e"])
    assert not knows("a", texts["a"]), "the least recently used tenant is dropped"
    for _ in range(3):
        finish("e", random.integers(0, 1 << 17, 900).tolist())
    assert not knows("e", texts["e"]), "the oldest sequences of a tenant are dropped"


def test_what_sequences_begin_with_alike_is_kept_once() -> None:
    proposer = SuffixProposer(config())
    random = np.random.default_rng(2)
    text = random.integers(0, 1 << 17, 5000).tolist()
    for end in (1000, 2000, 3000, 5000):  # the turns of a conversation
        proposer.start(KEY, text[:end], "")
        proposer.leave(KEY, True)
    history = proposer._shared[""].history
    assert history.total < 5000 + 4 * 300
    for at in (10, 1000, 2998, 4000, 4990):
        proposer.start(KEY, text[at - 10 : at], "")
        assert proposer.propose(KEY, 5) == text[at : at + 5]


def test_the_number_of_finished_sequences_is_bounded() -> None:
    proposer = SuffixProposer(config(suffix_decoding_max_cached_requests=2))
    none = SuffixProposer(config(suffix_decoding_max_cached_requests=0))
    for i in range(4):
        for each in (proposer, none):
            each.start(KEY, list(range(100 * i, 100 * i + 20)), "")
            each.leave(KEY, True)
    for i, expected in enumerate([False, False, True, True]):
        for each in (proposer, none):
            each.start(KEY, list(range(100 * i, 100 * i + 10)), "")
        assert bool(proposer.propose(KEY, 3)) is expected
        assert none.propose(KEY, 3) == []


def test_a_sequence_that_returns_starts_again() -> None:
    proposer = SuffixProposer(config())
    proposer.start(KEY, [1, 2, 3, 1, 2], "")
    assert proposer.propose(KEY, 2) == [3, 1]
    proposer.leave(KEY, False)
    proposer.start(KEY, [1, 2, 3, 1, 2, 4], "")
    assert proposer.propose(KEY, 2) == []
    proposer.extend(KEY, [1, 2])
    assert proposer.propose(KEY, 8) == [4, 1]
    proposer.start(KEY, [7, 1, 2, 1, 2, 1, 2], "")
    assert proposer.propose(KEY, 8) == [1, 2, 1, 2], "a loop goes on"
    proposer.leave(("unknown", 0), True)
