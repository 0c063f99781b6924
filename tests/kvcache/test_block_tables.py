"""Block tables, against a model that knows each holder's blocks and remembers the content of every block."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quire.kvcache.block_tables import BlockTables
from quire.kvcache.prefix_cache import ContentKeys

SIZE = 2
BLOCKS = 10


@dataclass
class Holder:
    """A sequence and its blocks. `written` tokens are in the cache."""

    tokens: list[int] = field(default_factory=list)
    written: int = 0
    blocks: list[int] = field(default_factory=list)
    published: int = 0


class TablesMachine(RuleBasedStateMachine):
    """Requests arrive, hit, grow, write, fork, publish and finish; the model keeps the bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = BlockTables(BLOCKS, SIZE)
        self.keys = ContentKeys(SIZE)
        self.holders: list[Holder] = []
        self.model: list[list[int]] = []
        """The blocks each holder must have, by the model's own count."""
        self.content: dict[int, dict[int, tuple[int, ...]]] = {}
        """block → offset → all tokens up to there."""
        self.findable: dict[tuple[int, ...], int] = {}
        """Content of a published block → block."""

    # What the machine does

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=8))
    def arrive(self, tokens: list[int]) -> None:
        tables, keys = self.tables, self.keys.of(tokens)
        hit = tables.match(keys, len(tokens))
        expected = []
        for end in range(SIZE, len(tokens), SIZE):
            if tuple(tokens[:end]) not in self.findable:
                break
            expected.append(self.findable[tuple(tokens[:end])])
        assert hit == expected, "the longest known prefix, short of the last token"
        for i, block in enumerate(hit):
            for offset in range(SIZE):
                assert self.content[block][offset] == tuple(tokens[: i * SIZE + offset + 1]), "equal key, other content"
        held = Counter(block for blocks in self.model for block in blocks)
        assert tables.cost_of_sharing(hit) == sum(block not in held for block in hit)
        holder = Holder(list(tokens), written=len(hit) * SIZE)
        tables.adopt(holder, hit)
        assert holder.published == len(hit)
        self.holders.append(holder)
        self.model.append(list(hit))

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), count=st.integers(1, 5))
    def grow_and_write(self, data: st.DataObject, count: int) -> None:
        i = data.draw(st.integers(0, len(self.holders) - 1))
        holder, tables = self.holders[i], self.tables
        end = min(holder.written + count, len(holder.tokens))
        assume(end > holder.written)
        self._own_last_block(i)
        needed = -(-end // SIZE) - len(holder.blocks)
        assert tables.missing(holder, end) == max(0, needed)
        if tables.missing(holder, end) > tables.pool.free:
            with pytest.raises(RuntimeError, match="cannot allocate"):
                tables.grow(holder, end)
            return
        fresh = tables.grow(holder, end)
        self._taken(fresh)
        self.model[i] += fresh
        assert len(fresh) == max(0, needed)
        for position in range(holder.written, end):
            block = holder.blocks[position // SIZE]
            assert self._holders_of(block) == 1, "a shared block is written"
            self.content.setdefault(block, {})[position % SIZE] = tuple(holder.tokens[: position + 1])
        holder.written = end

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), token=st.integers(0, 1))
    def extend(self, data: st.DataObject, token: int) -> None:
        data.draw(st.sampled_from(self.holders)).tokens.append(token)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        full = holder.written // SIZE
        before = holder.published
        fresh = self.tables.publish(holder, self.keys.of(holder.tokens), full)
        expected = []
        for index in range(before, full):
            content = tuple(holder.tokens[: (index + 1) * SIZE])
            if content not in self.findable:
                self.findable[content] = holder.blocks[index]
                expected.append(holder.blocks[index])
        assert fresh == expected
        assert holder.published == max(before, full)

    @precondition(lambda self: self.findable)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.integers(1, BLOCKS - 1), max_size=3))
        self.tables.withdraw(blocks)
        self._unfind(blocks)

    @rule()
    def reset_prefix(self) -> None:
        self.tables.reset_prefix()
        self.findable.clear()
        assert self.tables.pool.idle == 0

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        i = data.draw(st.integers(0, len(self.holders) - 1))
        parent = self.holders[i]
        child = Holder(list(parent.tokens), parent.written)
        self.tables.fork(parent, child)
        assert child.published == parent.published
        self.holders.append(child)
        self.model.append(list(self.model[i]))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        i = data.draw(st.integers(0, len(self.holders) - 1))
        self.tables.release(self.holders[i])
        assert self.holders[i].blocks == [] and self.holders[i].published == 0
        del self.holders[i], self.model[i]

    @precondition(lambda self: any(holder.blocks for holder in self.holders))
    @rule(data=st.data())
    def adopting_twice_raises(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from([holder for holder in self.holders if holder.blocks]))
        with pytest.raises(RuntimeError, match="cannot start with a prefix"):
            self.tables.adopt(holder, [])

    # What always holds

    @invariant()
    def holders_and_counts_agree(self) -> None:
        pool = self.tables.pool
        assert [holder.blocks for holder in self.holders] == self.model
        held = Counter(block for blocks in self.model for block in blocks)
        assert {block: count for block, count in enumerate(pool.refs) if count} == dict(held)
        assert 0 not in held
        assert pool.used == len(held) and pool.free + pool.used == pool.capacity == BLOCKS - 1

    @invariant()
    def what_can_be_found_is_there(self) -> None:
        index = self.tables.prefix_cache
        assert sorted(index.blocks()) == sorted(self.findable.values())
        for content, block in self.findable.items():
            assert index.match([self.keys.of(content)[-1]]) == [block]
            assert self.content[block][SIZE - 1] == content
        held = {block for blocks in self.model for block in blocks}
        assert self.tables.pool.idle == len(set(self.findable.values()) - held), (
            "free blocks that can be found are idle"
        )

    # Helpers

    def _own_last_block(self, i: int) -> None:
        """Copy-on-write, if the next token goes to a block with other holders."""
        holder, tables = self.holders[i], self.tables
        index = holder.written // SIZE
        if index >= len(holder.blocks):
            return
        shared = holder.blocks[index]
        assert tables.is_shared(holder, index) == (self._holders_of(shared) > 1)
        if not tables.is_shared(holder, index):
            return
        assume(tables.pool.free)
        source, own = tables.copy_on_write(holder, index)
        assert source == shared and holder.blocks[index] == own
        self._taken([own])
        self.content[own] = dict(self.content.get(source, {}))
        self.model[i][index] = own

    def _holders_of(self, block: int) -> int:
        return sum(block in blocks for blocks in self.model)

    def _taken(self, blocks: list[int]) -> None:
        """Allocated blocks: they had no references, and their content is gone."""
        for block in blocks:
            assert not self._holders_of(block), f"block {block} has two owners"
            self.content[block] = {}
        self._unfind(blocks)

    def _unfind(self, blocks: list[int]) -> None:
        self.findable = {content: block for content, block in self.findable.items() if block not in blocks}


TestTables = TablesMachine.TestCase
TestTables.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


def holder_of(tables: BlockTables, tokens: list[int], keys: ContentKeys) -> Holder:
    """A sequence that is computed and published."""
    holder = Holder(tokens, len(tokens))
    tables.adopt(holder, tables.match(keys.of(tokens), len(tokens)))
    tables.grow(holder, len(tokens))
    tables.publish(holder, keys.of(tokens), len(tokens) // tables.block_size)
    return holder


def test_a_hit_leaves_the_last_token_even_of_a_sequence_of_full_blocks() -> None:
    tables, keys = BlockTables(20, 4), ContentKeys(4)
    tokens = list(range(12))
    held = holder_of(tables, tokens, keys).blocks
    assert tables.match(keys.of(tokens), 12) == held[:2]
    assert tables.match(keys.of([*tokens, 99]), 13) == held[:3]
    assert tables.match(keys.of(tokens[:1]), 1) == []


def test_without_prefix_caching_nothing_is_found_or_kept() -> None:
    tables, keys = BlockTables(20, 4, prefix_caching=False), ContentKeys(4)
    holder = holder_of(tables, list(range(12)), keys)
    assert tables.match(keys.of(list(range(13))), 13) == []
    tables.release(holder)
    assert tables.pool.idle == 0 and len(tables.prefix_cache) == 0


def test_tails_of_a_released_sequence_are_evicted_before_its_head() -> None:
    tables, keys = BlockTables(4, 4), ContentKeys(4)
    tokens = list(range(13))
    tables.release(holder_of(tables, tokens[:12], keys))
    found = []
    for taken in range(4):
        found.append(len(tables.match(keys.of(tokens), 13)))
        if taken < 3:
            tables.pool.allocate(1)
    assert found == [3, 2, 1, 0]


def test_a_shared_head_outlives_the_tail() -> None:
    tables, keys = BlockTables(6, 2), ContentKeys(2)
    one, other = holder_of(tables, [1, 2, 3, 4], keys), holder_of(tables, [1, 2, 5, 6], keys)
    assert one.blocks[0] == other.blocks[0]
    sequence = list(one.blocks)
    tables.release(one)
    assert tables.pool.idle == 1
    assert tables.match(keys.of([1, 2, 3, 4, 0]), 5) == sequence
    tables.pool.allocate(3)
    assert tables.match(keys.of([1, 2, 3, 4, 0]), 5) == sequence[:1]
    tables.release(other)


def test_copy_on_write_leaves_the_shared_block_to_the_others() -> None:
    tables = BlockTables(8, 4)
    parent, child = Holder(), Holder()
    tables.grow(parent, 6)
    tables.fork(parent, child)
    before = list(parent.blocks)
    source, own = tables.copy_on_write(child, 1)
    assert (source, child.blocks) == (before[1], [before[0], own])
    assert parent.blocks == before
    assert not tables.is_shared(parent, 1) and tables.is_shared(parent, 0)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_for_rounds_up(tokens: int, blocks: int) -> None:
    assert BlockTables(8, 4).blocks_for(tokens) == blocks
