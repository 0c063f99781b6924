"""Keys of pages in the tiers below the device, and which pages a sequence needs there.

Blocks are found by content key in every tier. A model of several cache groups has a page for each group under one
content key, and recurrent states have several: their keys are derived from the content key.
"""

from __future__ import annotations

from collections.abc import Sequence

from blake3 import blake3

from quire.kvcache.block_tables import BlockOwner, BlockTables
from quire.kvcache.groups import groups_of
from quire.kvcache.prefix_cache import split_index_key


def page_key(key: bytes, group: int, index: int = 0) -> bytes:
    """The key of page `index` of what a group keeps under a content key; as long as that. Group 0's first page has the
    content key itself."""
    return key if not group and not index else blake3(key + b"%d.%d" % (group, index)).digest()


def key_of_cached(tables: BlockTables, block: int) -> bytes | None:
    """The key of a block in the prefix cache; None if it is not there."""
    key = tables.prefix_cache.key_of(block)
    if key is None or not tables.others:
        return key
    content, number = split_index_key(key)
    return page_key(content, number, tables.prefix_cache.blocks_of(key).index(block))


def pages_to_continue(
    tables: BlockTables, owner: BlockOwner, keys: Sequence[bytes], tokens: int, end_key: bytes
) -> list[tuple[bytes, int]]:
    """(key, page) of all that it takes to continue after the owner's first `tokens` tokens. `keys`: content keys of
    full blocks; `end_key`: the content key at the end."""
    full, is_partial = divmod(tokens, tables.block_size)
    pairs = list(zip(keys[:full], owner.blocks[:full], strict=True)) if tables.has_full else []
    if is_partial and tables.has_full:
        pairs.append((end_key, owner.blocks[full]))
    if tables.others:
        for (number, group), table in zip(tables.others, tables.tables_of(owner), strict=True):
            if group.kind == "state":
                pairs += [(page_key(end_key, number, i), page) for i, page in enumerate(table.blocks)]
                continue
            first = tables.first_needed(number, tokens)
            pairs += [(page_key(keys[i], number), table.blocks[i]) for i in range(first, full)]
            if is_partial:
                pairs.append((page_key(end_key, number), table.blocks[full]))
    return pairs


def keys_of_blocks(tables: BlockTables, keys: Sequence[bytes]) -> list[bytes]:
    """Keys of what full groups keep of blocks with these content keys."""
    if not tables.others:
        return list(keys)
    full = [number for number, _ in groups_of(tables.groups, "full")]
    return [page_key(key, number) for key in keys for number in full]


def keys_at_end(tables: BlockTables, keys: Sequence[bytes], tokens: int) -> list[bytes]:
    """Keys of what other groups need to continue after a sequence; the last of `keys` may be of a partial block."""
    found: list[bytes] = []
    for number, group in tables.others if keys else ():
        if group.kind == "window":
            found += [page_key(key, number) for key in keys[tables.first_needed(number, tokens) :]]
        elif group.kind == "state":
            found += [page_key(keys[-1], number, i) for i in range(group.pages)]
    return found


def every_key(tables: BlockTables, keys: Sequence[bytes]) -> list[bytes]:
    """Keys of all that any group may keep under these content keys."""
    counts = [(number, group.pages if group.kind == "state" else 1) for number, group in enumerate(tables.groups)]
    return [page_key(key, number, i) for key in keys for number, count in counts for i in range(count)]
