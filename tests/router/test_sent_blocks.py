"""The blocks the router expects at a replica: bounded, evicted in the order of the replica's own cache."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.kvcache.block_tables import BlockTables
from quire.kvcache.prefix_cache import ContentKeys
from quire.router.replica_state import SentBlocks
from tests.router.prompts import words

KEYS = ContentKeys(1)
PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=30)


class Visit:
    """Holds blocks of a real cache."""

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.published = 0


@given(PROMPTS, st.integers(8, 20), st.lists(st.integers(0, 2), max_size=8))
def test_it_matches_a_real_cache_of_its_size(prompts: list[list[int]], limit: int, asked: list[int]) -> None:
    sent, cache = SentBlocks(limit), BlockTables(limit + 1, 1)
    for prompt in prompts:
        keys = KEYS.of(prompt)
        visit = Visit()
        cache.adopt(visit, cache.prefix_cache.match(keys))
        cache.grow(visit, len(prompt))
        cache.publish(visit, keys, len(keys))
        cache.release(visit)
        sent.touch(keys)
        assert len(sent) == len(cache.prefix_cache) <= limit
    assert sent.match(KEYS.of(asked)) == len(cache.prefix_cache.match(KEYS.of(asked)))


@given(PROMPTS, st.integers(0, 12), st.lists(st.integers(0, 12), max_size=30))
def test_it_stays_within_its_limit_and_never_has_a_block_without_its_predecessors(
    prompts: list[list[int]], limit: int, limits: list[int]
) -> None:
    sent = SentBlocks(limit)
    for prompt, then in zip(prompts, [*limits, *[limit] * len(prompts)], strict=False):
        sent.touch(KEYS.of(prompt))
        assert len(sent) <= sent.limit
        sent.limit = then
        assert len(sent) <= then
    for prompt in prompts:
        known = [key in sent for key in KEYS.of(prompt)]
        assert known == sorted(known, reverse=True)
        assert sent.match(KEYS.of(prompt)) == sum(known)


def test_the_least_recently_used_is_dropped_first_and_tails_before_heads() -> None:
    sent = SentBlocks(6)
    old, young = KEYS.of(words(1, 4)), KEYS.of(words(2, 4))
    sent.touch(old)
    sent.touch(young)
    assert (sent.match(old), sent.match(young)) == (2, 4)
    sent.touch(old)
    assert (sent.match(old), sent.match(young)) == (4, 2)
