"""The block pool, against a model that keeps owner counts in a dictionary and idle blocks in a list."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quire.errors import CacheTooSmallError
from quire.kvcache.block_pool import NULL_BLOCK, BlockPool

SIZE = 9


class PoolMachine(RuleBasedStateMachine):
    """Every operation of the pool in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.evicted: list[int] = []
        self.pool = BlockPool(SIZE, on_evict=self.evicted.append)
        self.held: dict[int, int] = {}
        self.kept: set[int] = set()
        self.idle: list[int] = []
        """Oldest first."""

    @rule(count=st.integers(0, SIZE))
    def allocate(self, count: int) -> None:
        empty = SIZE - 1 - len(self.held) - len(self.idle)
        if count > empty + len(self.idle):
            with pytest.raises(
                RuntimeError, match=f"cannot allocate {count} blocks: {empty + len(self.idle)} of {SIZE - 1} are free"
            ):
                self.pool.allocate(count)
            assert not self.evicted, "a refused allocation evicts nothing"
            return
        blocks = self.pool.allocate(count)
        assert len(blocks) == len(set(blocks)) == count
        assert NULL_BLOCK not in blocks
        assert not self.held.keys() & set(blocks), "a held block was handed out"
        lost = self.idle[: max(0, count - empty)]
        assert self.evicted == lost, "empty blocks go first, then the least recently used"
        self.idle = self.idle[len(lost) :]
        assert not set(self.idle) & set(blocks)
        self.kept -= set(lost)
        self.evicted.clear()
        self.held.update(dict.fromkeys(blocks, 1))

    @precondition(lambda self: self.held or self.idle)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.held) + self.idle), max_size=4))
        self.pool.share(blocks)
        for block in blocks:
            self.held[block] = self.held.get(block, 0) + 1
            if block in self.idle:
                self.idle.remove(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.held)), unique=True, max_size=5))
        self.pool.release(blocks)
        for block in reversed(blocks):
            self.held[block] -= 1
            if not self.held[block]:
                del self.held[block]
                if block in self.kept:
                    self.idle.append(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.held)))
        self.pool.keep(block)
        self.kept.add(block)

    @rule(block=st.integers(1, SIZE - 1))
    def forget(self, block: int) -> None:
        self.pool.forget(block)
        self.kept.discard(block)
        if block in self.idle:
            self.idle.remove(block)

    @rule(block=st.integers(0, SIZE - 1))
    def misuse_raises(self, block: int) -> None:
        if block not in self.held:
            with pytest.raises(RuntimeError, match="was released but has no references"):
                self.pool.release([block])
            with pytest.raises(RuntimeError, match="cannot be cached"):
                self.pool.keep(block)
            if block not in self.idle:
                with pytest.raises(RuntimeError, match="nothing to share"):
                    self.pool.share([block])

    @invariant()
    def the_pool_agrees_with_the_model(self) -> None:
        pool = self.pool
        assert {block: count for block, count in enumerate(pool.refs) if count} == self.held
        assert pool.used == len(self.held)
        assert pool.idle == len(self.idle)
        assert pool.free + pool.used == pool.capacity == SIZE - 1
        assert [block for block in range(SIZE) if pool.is_idle(block)] == sorted(self.idle)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("blocks", [-1, 0, 1])
def test_a_cache_without_a_usable_block_is_refused_with_its_size(blocks: int) -> None:
    with pytest.raises(CacheTooSmallError, match=f"room for {blocks} blocks; at least 2"):
        BlockPool(blocks)


def test_tails_are_evicted_before_heads() -> None:
    evicted: list[int] = []
    pool = BlockPool(4, on_evict=evicted.append)
    sequence = pool.allocate(3)
    for block in sequence:
        pool.keep(block)
    pool.release(sequence)
    pool.allocate(3)
    assert evicted == sequence[::-1]


def test_an_idle_block_that_was_shared_again_counts_as_recently_used() -> None:
    evicted: list[int] = []
    pool = BlockPool(4, on_evict=evicted.append)
    first, second, third = pool.allocate(3)
    for block in (first, second, third):
        pool.keep(block)
        pool.release([block])
    pool.share([first])
    pool.release([first])
    pool.allocate(3)
    assert evicted == [second, third, first]


def test_empty_blocks_are_allocated_before_cached_ones_are_evicted() -> None:
    evicted: list[int] = []
    pool = BlockPool(5, on_evict=evicted.append)
    kept, plain = pool.allocate(2)
    pool.keep(kept)
    pool.release([kept, plain])
    assert kept not in pool.allocate(3)
    assert not evicted
