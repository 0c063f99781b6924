"""Content keys and the index that maps them to blocks."""

from __future__ import annotations

import itertools
import struct

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from quire.kvcache.prefix_cache import ContentKeys, PrefixCache
from quire.messages.media import KeySpan

TOKENS = st.lists(st.one_of(st.integers(0, 3), st.integers(-(2**31), 2**31 - 1)), max_size=24)


@given(TOKENS, st.sampled_from([1, 2, 3, 4, 16]), st.sampled_from(["", "a", "tenant"]))
def test_a_sequence_has_one_key_for_each_full_block_chained_from_the_root(
    tokens: list[int], size: int, salt: str
) -> None:
    keys = ContentKeys(size, b"model")
    chain, parent = [], keys.root(salt)
    for start in range(0, len(tokens) - size + 1, size):
        parent = keys.key_after(parent, tokens[start : start + size])
        chain.append(parent)
    assert keys.of(tokens, salt) == chain
    assert len(chain) == len(tokens) // size


@given(TOKENS, TOKENS, st.sampled_from([1, 2, 4]))
def test_keys_are_equal_exactly_as_far_as_the_tokens_are(one: list[int], other: list[int], size: int) -> None:
    keys = ContentKeys(size)
    for i, (a, b) in enumerate(zip(keys.of(one), keys.of(other), strict=False), start=1):
        assert (a == b) == (one[: i * size] == other[: i * size])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_no_two_of_all_short_sequences_share_a_key(size: int) -> None:
    keys = ContentKeys(size, b"model")
    seen: dict[bytes, tuple[object, ...]] = {}
    for salt in ("", "a", "b"):
        for length in range(size, 7, size):
            for tokens in itertools.product((0, 1, -1), repeat=length):
                content = (salt, *tokens)
                assert seen.setdefault(keys.of(tokens, salt)[-1], content) == content
    assert keys.root() not in seen


def test_salts_and_fingerprints_separate_owners() -> None:
    tokens = [1, 2, 3, 4]
    roots = {
        ContentKeys(4, fingerprint).of(tokens, salt)[0]
        for fingerprint in (b"", b"model", b"model2")
        for salt in ("", "a", "b", "ab", "é")
    }
    assert len(roots) == 15


def test_no_salt_equals_the_tokens_of_a_block() -> None:
    keys = ContentKeys(1, b"model")
    (unsalted,) = keys.of([97])
    assert keys.root("a\0\0\0") != unsalted
    assert keys.of([5], "a\0\0\0") != keys.of([97, 5])[1:]


def test_block_sizes_do_not_mix() -> None:
    tokens = list(range(12))
    keys = {size: set(ContentKeys(size, b"model").of(tokens)) for size in (1, 2, 3, 4, 6, 12)}
    for one, other in itertools.combinations(keys, 2):
        assert not keys[one] & keys[other]


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=4, max_size=4))
def test_every_int32_has_its_own_key(tokens: list[int]) -> None:
    keys = ContentKeys(4)
    (key,) = keys.of(tokens)
    for i, bit in itertools.product(range(4), (0, 8, 16, 24, 30)):
        changed = [token ^ (1 << bit) if j == i else token for j, token in enumerate(tokens)]
        assert keys.of(changed) != [key]


@pytest.mark.parametrize("token", [2**31, -(2**31) - 1, 2**40])
def test_a_token_that_is_not_an_int32_is_refused_and_not_wrapped(token: int) -> None:
    keys = ContentKeys(1)
    with pytest.raises(OverflowError):
        keys.of([token])
    with pytest.raises(OverflowError):
        keys.key_after(keys.root(), [token])


class IndexMachine(RuleBasedStateMachine):
    """The index against one dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixCache()
        self.model: dict[bytes, int] = {}

    @rule(key=st.sampled_from([bytes([i]) for i in range(6)]), block=st.integers(1, 6))
    def add(self, key: bytes, block: int) -> None:
        if key in self.model:
            assert not self.index.add(key, block)
        elif block in self.model.values():
            with pytest.raises(RuntimeError, match=f"block {block}"):
                self.index.add(key, block)
        else:
            assert self.index.add(key, block)
            self.model[key] = block

    @rule(block=st.integers(1, 6))
    def remove(self, block: int) -> None:
        known = block in self.model.values()
        assert bool(self.index.remove(block)) == known
        self.model = {key: other for key, other in self.model.items() if other != block}

    @rule(keys=st.lists(st.sampled_from([bytes([i]) for i in range(6)]), max_size=6))
    def match(self, keys: list[bytes]) -> None:
        found = itertools.takewhile(lambda block: block is not None, (self.model.get(key) for key in keys))
        assert self.index.match(keys) == list(found)

    @invariant()
    def the_maps_are_inverses(self) -> None:
        assert len(self.index) == len(self.model)
        assert sorted(self.index.blocks()) == sorted(self.model.values())
        for key, block in self.model.items():
            assert self.index.match([key]) == [block]


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


def test_keys_of_blocks_with_images_have_the_whole_digest() -> None:
    keys, tokens = ContentKeys(4, b"model"), [7] * 20
    digest = bytes(range(32))
    spans = [KeySpan(6, 13, 0, digest)]
    text, shown = keys.of(tokens), keys.of(tokens, "", spans)
    assert shown == keys.of(tokens, "", [KeySpan(6, 13, 0, bytes(range(32)))])
    assert shown[0] == text[0]  # before the image
    assert not set(shown[1:]) & set(text)
    others = [
        KeySpan(6, 13, 1, digest),
        KeySpan(6, 12, 0, digest),
        KeySpan(6, 14, 0, digest),
        KeySpan(7, 13, 0, digest),
    ]
    for place in range(32):
        changed = bytearray(digest)
        changed[place] ^= 1
        others.append(KeySpan(6, 13, 0, bytes(changed)))
    found = {keys.of(tokens, "", [other])[1] for other in others}
    assert len(found) == len(others)
    assert shown[1] not in found
    assert keys.of(tokens, "", [*spans, KeySpan(14, 16, 0, digest)])[:3] == shown[:3]
    two = [KeySpan(0, 2, 0, digest), KeySpan(2, 4, 0, bytes(32))]
    assert keys.of(tokens[:4], "", two) != keys.of(tokens[:4], "", [two[0]._replace(digest=bytes(32)), two[1]])


def test_keys_of_blocks_with_images_can_be_computed_piece_by_piece() -> None:
    keys, tokens = ContentKeys(4, b"model"), list(range(30))
    spans = [KeySpan(3, 9, 2, b"a" * 32), KeySpan(10, 27, 0, b"b" * 32)]
    whole = keys.of(tokens, "salt", spans)
    for cut in range(len(whole)):
        parent = whole[cut - 1] if cut else keys.root("salt")
        assert keys.keys_after(parent, tokens[4 * cut :], spans, 4 * cut) == whole[cut:]
        assert keys.key_after(parent, tokens[4 * cut : 4 * cut + 4], spans, 4 * cut) == whole[cut]
    partial = keys.key_after(whole[-1], tokens[28:], spans, 28)
    assert partial == keys.key_after(whole[-1], tokens[28:])  # no image in it


def test_keys_of_text_are_hashes_of_parent_and_tokens() -> None:
    keys, tokens = ContentKeys(2, b"model"), [1, 2, 3, 4]
    first = blake3(blake3(b"model").digest() + struct.pack("<2i", 1, 2)).digest()
    assert keys.of(tokens) == [first, blake3(first + struct.pack("<2i", 3, 4)).digest()]
