"""Where experts are placed for a load: invariants for any load, and the gain for a skewed one."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import ConfigError
from quire.layers.expert_placement import Placement, capacities, check_ranks, moves, place


@st.composite
def loads(draw: Any) -> tuple[list[int], int, int]:
    """(how often each expert is chosen, ranks, spare slots): any that fit together."""
    ranks = draw(st.integers(1, 6))
    experts = draw(st.integers(ranks, 20))
    counts = draw(st.lists(st.integers(0, 1000), min_size=experts, max_size=experts))
    return counts, ranks, draw(st.integers(0, experts * (ranks - 1)))


def assert_sound(placement: Placement, experts: int, ranks: int, spare: int) -> None:
    assert [len(held) for held in placement.slots] == capacities(experts, ranks, spare)
    assert all(len(set(held)) == len(held) for held in placement.slots), "no expert is twice on a rank"
    assert {expert for held in placement.slots for expert in held} == set(range(experts)), "every expert is somewhere"


@given(loads())
def test_every_expert_is_placed_at_most_once_on_a_rank_and_the_balance_never_gets_worse(
    load: tuple[list[int], int, int],
) -> None:
    counts, ranks, spare = load
    before = Placement.even(len(counts), ranks, spare)
    assert_sound(before, len(counts), ranks, spare)
    after = place(counts, before)
    assert_sound(after, len(counts), ranks, spare)
    assert max(after.loads(counts)) <= max(before.loads(counts))
    assert sum(after.loads(counts)) == pytest.approx(sum(counts))
    assert place(counts, before) == after, "ranks that compute it apart find the same"
    assert place(counts, after).slots == after.slots or max(place(counts, after).loads(counts)) < max(
        after.loads(counts)
    )


@given(loads(), loads())
def test_moves_lead_from_one_placement_to_the_other(first: Any, second: Any) -> None:
    counts, ranks, spare = first
    before = Placement.even(len(counts), ranks, spare)
    after = place([*second[0], *counts][: len(counts)], before)
    held = [list(slots) for slots in before.slots]
    arrived = {move.target: held[move.source[0]][move.source[1]] for move in moves(before, after)}
    for (rank, slot), expert in arrived.items():
        held[rank][slot] = expert
    assert tuple(map(tuple, held)) == after.slots
    stays = sum(len(set(old) & set(new)) for old, new in zip(before.slots, after.slots, strict=True))
    assert len(arrived) == len(counts) + spare - stays, "what a rank has it keeps where it is"


@given(st.lists(st.integers(0, 50), min_size=2, max_size=6), st.integers(2, 3), st.integers(0, 3))
def test_the_fullest_rank_is_close_to_the_optimum(counts: list[int], ranks: int, spare: int) -> None:
    if ranks > len(counts):
        return
    spare = min(spare, len(counts) * (ranks - 1))
    found = place(counts, Placement.even(len(counts), ranks, spare))
    sizes = capacities(len(counts), ranks, spare)
    everything = itertools.product(*(itertools.combinations(range(len(counts)), size) for size in sizes))
    best = min(
        max(Placement(slots, len(counts)).loads(counts))
        for slots in everything
        if {expert for held in slots for expert in held} == set(range(len(counts)))
    )
    assert max(found.loads(counts)) <= 1.5 * best + 1e-9


def test_a_hot_expert_is_copied_and_its_tokens_shared() -> None:
    counts = [800, 20, 30, 50, 40, 20, 20, 20]
    alone = place(counts, Placement.even(8, 4))
    assert alone.skew(counts) == pytest.approx(3.2, abs=0.2), "one rank has at least that expert"
    shared = place(counts, Placement.even(8, 4, spare=4))
    copies = Counter(expert for held in shared.slots for expert in held)
    assert copies[0] == 4
    assert shared.skew(counts) < 1.1


def test_an_even_split_takes_the_remainder_first() -> None:
    assert Placement.even(5, 2).slots == ((0, 1, 2), (3, 4))
    assert Placement.even(5, 2, spare=1).slots == ((0, 1, 2), (3, 4, 0))


@pytest.mark.parametrize(
    "experts, ranks, spare, message",
    [(4, 5, 0, "4 experts cannot be spread over 5 ranks"), (4, 2, 5, "num_redundant_experts is at most 4 here")],
)
def test_impossible_placements_are_refused(experts: int, ranks: int, spare: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_ranks(experts, ranks, spare)
