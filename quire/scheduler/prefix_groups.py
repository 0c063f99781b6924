"""Groups of rows that begin with the same blocks: attention reads those once per group instead of once per row.

A request joins when its prompt is computed and leaves with its row; in between there is nothing to do. Only full blocks
before the last known token count: they are never written again, so what a group shares does not change.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.messages.plan import PrefixGroup

LEAST_TOKENS = 256
"""Rows that share fewer are not grouped: most prompts begin with some common template."""
LEAST_SAVED = 8192
"""Tokens a group must save attention from reading. A second pass over the shared blocks costs some microseconds a
layer, in which a large GPU reads the keys and values of a few thousand tokens."""


class Group:
    """Rows and the blocks all of them begin with. A row that shares no blocks is a group of its own."""

    def __init__(self) -> None:
        self.rows: dict[int, None] = {}
        self.blocks: list[int] = []

    def saved(self, gone: int = 0) -> int:
        """Block reads that the group saves, if `gone` of its rows left."""
        return max(0, len(self.rows) - gone - 1) * len(self.blocks)


class NoPrefixGroups:
    """The device does not use groups."""

    def join(self, row: int, blocks: Sequence[int]) -> None: ...

    def leave(self, row: int) -> None: ...

    def changes(self) -> list[PrefixGroup] | None:
        return None


class PrefixGroups:
    """Groups rows greedily: each new row joins where it saves the most reads."""

    def __init__(self, block_size: int, least_tokens: int | None = None, least_saved: int | None = None) -> None:
        self._size = block_size
        self._least_blocks = max(1, -(-(LEAST_TOKENS if least_tokens is None else least_tokens) // block_size))
        self._least_saved = LEAST_SAVED if least_saved is None else least_saved
        self._blocks: dict[int, list[int]] = {}
        """By row: its full blocks when it joined."""
        self._group_of: dict[int, Group] = {}
        self._near: dict[int, list[Group]] = {}
        """Groups by the block at index `least_blocks` - 1: rows that share enough have the same one."""
        self._announced: dict[Group, None] = {}
        self._is_changed = False

    def join(self, row: int, blocks: Sequence[int]) -> None:
        """The row decodes from now on; `blocks` are its leading blocks, which are never written again."""
        if len(blocks) < self._least_blocks:
            return
        self._blocks[row] = list(blocks)
        self._place(row)

    def _place(self, row: int) -> None:
        """Add the row to the group where it saves the most reads."""
        own = self._blocks[row]
        near = self._near.setdefault(own[self._least_blocks - 1], [])
        gain, group, partners, shared = 0, Group(), list[int](), 0
        for other in near:
            for rows, common in self._offers(other, own):
                gained = len(rows) * common + other.saved(gone=len(rows)) - other.saved()
                if common >= self._least_blocks and gained > gain:
                    gain, group, partners, shared = gained, other, rows, common
        if not partners:
            near.append(group)
        elif shared > len(group.blocks):
            self._split(near, group, [*partners, row])
            return
        self._add_row(row, group)

    def leave(self, row: int) -> None:
        """The row is given back."""
        group = self._group_of.pop(row, None)
        if group is None:
            return
        self._remove_row(group, row)
        del self._blocks[row]
        self._settle(group)

    def changes(self) -> list[PrefixGroup] | None:
        """All groups worth a second attention pass, if they changed since the last call; else None."""
        if not self._is_changed:
            return None
        self._is_changed = False
        return [PrefixGroup(list(group.rows), len(group.blocks) * self._size) for group in self._announced]

    # Grouping

    def _offers(self, group: Group, blocks: list[int]) -> list[tuple[list[int], int]]:
        """Members that a new row with these blocks may join, and the leading blocks they would share: the whole group,
        or the members that have more in common with the new row than the group shares."""
        shared = _num_common(group.blocks, blocks)
        offers = [(list(group.rows), shared)]
        if shared == len(group.blocks) < len(blocks):
            own = self._blocks
            like = [row for row in group.rows if len(own[row]) > shared and own[row][shared] == blocks[shared]]
            if like:
                offers.append((like, min(_num_common(own[row], blocks) for row in like)))
        return offers

    def _split(self, near: list[Group], group: Group, rows: list[int]) -> None:
        """Some of a group's rows, and a new one, become a group of their own."""
        near.append(new := Group())
        for row in rows:
            if row in group.rows:
                self._remove_row(group, row)
            self._add_row(row, new)
        self._settle(group)

    def _settle(self, group: Group) -> None:
        """A row left alone in a group may save more in another. This ends: every move saves more."""
        if len(group.rows) == 1:
            (row,) = group.rows
            self._remove_row(group, row)
            self._place(row)

    def _add_row(self, row: int, group: Group) -> None:
        blocks = self._blocks[row]
        group.blocks = blocks[: _num_common(group.blocks, blocks)] if group.rows else blocks
        group.rows[row] = None
        self._group_of[row] = group
        self._update_announced(group)

    def _remove_row(self, group: Group, row: int) -> None:
        del group.rows[row]
        if not group.rows:
            key = self._blocks[row][self._least_blocks - 1]
            self._near[key].remove(group)
            if not self._near[key]:
                del self._near[key]
        self._update_announced(group)

    def _update_announced(self, group: Group) -> None:
        """The group changed: if it pays for a second pass, or did before, the device needs the new groups."""
        pays = len(group.rows) > 1 and group.saved() * self._size >= self._least_saved
        if pays:
            self._announced[group] = None
            self._is_changed = True
        elif group in self._announced:
            del self._announced[group]
            self._is_changed = True


def _num_common(one: list[int], other: list[int]) -> int:
    """How many leading entries are the same."""
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    return next(i for i in range(length) if one[i] != other[i])
