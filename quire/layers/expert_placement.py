"""Which rank holds which experts, and a placement for the observed load. Numbers, no tensors.

An expert may have copies on several ranks; its tokens are divided evenly among them.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from quire.errors import ConfigError

TRIES = 64
"""The most swaps of two experts that balance a placement…"""
NEIGHBOURS = 4
"""…each between the most loaded rank and one of this many least loaded ones."""
SHARINGS = 4
"""How many ways to use the spare slots are tried…"""
EVEN = 1.01
"""…until the most loaded rank has at most this multiple of the mean load."""
ALIKE = 1.01
"""Among placements within this factor of the best, the one that moves the fewest experts is chosen."""


@dataclass(frozen=True)
class Placement:
    """The experts on each rank, slot by slot. Every expert has a rank, and none is on a rank twice."""

    slots: tuple[tuple[int, ...], ...]
    num_experts: int

    @classmethod
    def even(cls, num_experts: int, ranks: int, spare: int = 0) -> Placement:
        """Ranges of experts, earlier ranks one more if they do not divide; copies in the `spare` slots."""
        sizes = capacities(num_experts, ranks, spare)
        ranges, start = [], 0
        for rank in range(ranks):
            stop = start + num_experts // ranks + (rank < num_experts % ranks)
            ranges.append(list(range(start, stop)))
            start = stop
        copies = Counter(range(num_experts))
        for held, size in zip(ranges, sizes, strict=True):
            while len(held) < size:
                others = (expert for expert in range(num_experts) if expert not in held)
                chosen = min(others, key=lambda expert: (copies[expert], expert))
                copies[chosen] += 1
                held.append(chosen)
        return cls(tuple(map(tuple, ranges)), num_experts)

    @classmethod
    def from_lists(cls, slots: Sequence[Sequence[int]]) -> Placement:
        """The experts on each rank, as plain lists."""
        return cls(tuple(map(tuple, slots)), 1 + max(expert for held in slots for expert in held))

    @property
    def ranks(self) -> int:
        return len(self.slots)

    @property
    def homes(self) -> list[list[tuple[int, int]]]:
        """For each expert its copies, as (rank, slot), in the order of ranks."""
        homes: list[list[tuple[int, int]]] = [[] for _ in range(self.num_experts)]
        for rank, held in enumerate(self.slots):
            for slot, expert in enumerate(held):
                homes[expert].append((rank, slot))
        return homes

    def loads(self, counts: Sequence[float]) -> list[float]:
        """The load of each rank if each expert is chosen `counts` times."""
        copies = Counter(expert for held in self.slots for expert in held)
        return [sum(counts[expert] / copies[expert] for expert in held) for held in self.slots]

    def skew(self, counts: Sequence[float]) -> float:
        """The highest rank's load ÷ the mean; 1 is perfectly even. 0 without load."""
        loads = self.loads(counts)
        return max(loads) * len(loads) / total if (total := sum(loads)) else 0.0


@dataclass(frozen=True)
class ExpertMove:
    """An expert's weights are copied from one slot to another, on the same rank or between ranks."""

    source: tuple[int, int]
    """(rank, slot)"""
    target: tuple[int, int]


def capacities(num_experts: int, ranks: int, spare: int) -> list[int]:
    """Slots on each rank."""
    share, extra = divmod(num_experts + spare, ranks)
    return [share + (rank < extra) for rank in range(ranks)]


def check_ranks(num_experts: int, ranks: int, spare: int) -> None:
    """Raise if the experts cannot be spread over this many ranks."""
    if ranks > num_experts:
        raise ConfigError(
            f"{num_experts} experts cannot be spread over {ranks} ranks: enable_expert_parallel needs at least "
            "one expert per rank; use fewer ranks",
            "enable_expert_parallel",
            True,
        )
    most = num_experts * (ranks - 1)
    if spare > most:
        raise ConfigError(
            f"num_redundant_experts is at most {most} here ({num_experts} experts, each once on each of {ranks} "
            f"ranks), got {spare}",
            "num_redundant_experts",
            spare,
        )


def place(counts: Sequence[float], before: Placement) -> Placement:
    """A placement in as many slots as `before` has that minimises the highest load of a rank.

    Hot experts get several copies if there are spare slots. Experts stay where they are if that costs nothing; if
    nothing better is found, `before` is returned.
    """
    sizes = [len(held) for held in before.slots]
    spare = sum(sizes) - len(counts)
    found = [before]
    lowest = max(before.loads(counts)) * (1 - 1e-9)
    for useful in sorted({spare * i // (SHARINGS - 1) for i in range(SHARINGS)}, reverse=True):
        if lowest <= EVEN * sum(counts) / before.ranks:
            break
        copies = _count_copies(counts, before.ranks, useful, spare - useful)
        weights = [count / share for count, share in zip(counts, copies, strict=True)]
        for ranks in (_adapt(weights, copies, before.slots), _place_from_scratch(weights, copies, sizes)):
            _balance(weights, ranks)
            found.append(Placement(_assign_slots(ranks, before.slots), before.num_experts))
        lowest = min(max(each.loads(counts)) for each in found)
    good = [each for each in found if max(each.loads(counts)) <= lowest * ALIKE]
    return min(good, key=lambda each: (len(moves(before, each)), max(each.loads(counts))))


def moves(before: Placement, after: Placement) -> list[ExpertMove]:
    """The copies that turn `before` into `after`; a rank copies from its own slots where it can."""
    homes, found = before.homes, []
    copied: Counter[int] = Counter()
    for rank, held in enumerate(after.slots):
        for slot, expert in enumerate(held):
            if before.slots[rank][slot] == expert:
                continue
            own = [home for home in homes[expert] if home[0] == rank]
            source = own[0] if own else homes[expert][copied[expert] % len(homes[expert])]
            copied[expert] += not own
            found.append(ExpertMove(source, (rank, slot)))
    return found


def _count_copies(counts: Sequence[float], ranks: int, useful: int, idle: int) -> list[int]:
    """Copies of each expert: `useful` slots go, one by one, to the expert with the highest load per copy.

    The `idle` ones go to the experts with the least load: a copy draws tokens to its rank, which may be busy already.
    """
    copies = [1] * len(counts)
    heap = [(-count, expert) for expert, count in enumerate(counts)]
    heapq.heapify(heap)
    for _ in range(useful):
        _, expert = heapq.heappop(heap)
        copies[expert] += 1
        if copies[expert] < ranks:
            heapq.heappush(heap, (-counts[expert] / copies[expert], expert))
    for expert in sorted(range(len(counts)), key=lambda expert: counts[expert]):
        added = min(idle, ranks - copies[expert])
        copies[expert] += added
        idle -= added
    return copies


def _adapt(weights: Sequence[float], copies: Sequence[int], slots: Sequence[Sequence[int]]) -> list[set[int]]:
    """The current placement without surplus copies of experts, and with missing ones added."""
    ranks = [set(held) for held in slots]
    for expert, wanted in enumerate(copies):
        holders = [rank for rank, held in enumerate(ranks) if expert in held]
        holders.sort(key=lambda rank: sum(weights[other] for other in ranks[rank]))
        for rank in holders[wanted:]:
            ranks[rank].remove(expert)
    _add_copies(ranks, weights, copies, [len(held) for held in slots])
    return ranks


def _place_from_scratch(weights: Sequence[float], copies: Sequence[int], sizes: Sequence[int]) -> list[set[int]]:
    """A placement from scratch."""
    ranks: list[set[int]] = [set() for _ in sizes]
    _add_copies(ranks, weights, copies, sizes)
    return ranks


def _add_copies(ranks: list[set[int]], weights: Sequence[float], copies: Sequence[int], sizes: Sequence[int]) -> None:
    """Add missing copies, heaviest first, each to the least loaded rank that has a free slot and lacks the expert."""
    loads = [sum(weights[expert] for expert in held) for held in ranks]
    for expert in sorted(range(len(weights)), key=lambda expert: -weights[expert]):
        for _ in range(copies[expert] - sum(expert in held for held in ranks)):
            room = [rank for rank, held in enumerate(ranks) if len(held) < sizes[rank]]
            fitting = [rank for rank in room if expert not in ranks[rank]]
            if fitting:
                rank = min(fitting, key=lambda rank: (loads[rank], rank))
            else:
                # All ranks with a free slot hold it already. A full rank without it hands one of its experts to one of
                # them: that rank holds fewer experts, this one among them, so there is one it lacks.
                rank = next(rank for rank, held in enumerate(ranks) if expert not in held)
                taker = room[0]
                given = min(ranks[rank] - ranks[taker], key=lambda other: (weights[other], other))
                ranks[rank].remove(given)
                ranks[taker].add(given)
                loads[rank] -= weights[given]
                loads[taker] += weights[given]
            ranks[rank].add(expert)
            loads[rank] += weights[expert]


def _balance(weights: Sequence[float], ranks: list[set[int]]) -> None:
    """Swap experts between the most and the least loaded ranks while that helps; in place."""
    loads = [sum(weights[expert] for expert in held) for held in ranks]
    for _ in range(TRIES):
        order = sorted(range(len(ranks)), key=lambda rank: loads[rank])
        full = order[-1]
        best: tuple[float, int, int, int] | None = None
        for other in order[: min(NEIGHBOURS, len(ranks) - 1)]:
            for given in ranks[full] - ranks[other]:
                for taken in ranks[other] - ranks[full]:
                    less = weights[given] - weights[taken]
                    highest = max(loads[full] - less, loads[other] + less)
                    if highest < loads[full] * (1 - 1e-9) and (best is None or (highest, other, given, taken) < best):
                        best = (highest, other, given, taken)
        if best is None:
            return
        _, other, given, taken = best
        ranks[full] = ranks[full] - {given} | {taken}
        ranks[other] = ranks[other] - {taken} | {given}
        loads[full] -= weights[given] - weights[taken]
        loads[other] += weights[given] - weights[taken]


def _assign_slots(ranks: Sequence[set[int]], before: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Assign sets of experts to ranks and slots so that as many experts as possible keep their slot."""
    pairs = sorted(
        ((-len(held & set(old)), rank, index) for index, held in enumerate(ranks) for rank, old in enumerate(before)
         if len(held) == len(old)),
    )  # fmt: skip
    chosen: dict[int, set[int]] = {}
    used: set[int] = set()
    for _, rank, index in pairs:
        if rank not in chosen and index not in used:
            chosen[rank] = ranks[index]
            used.add(index)
    settled = []
    for rank, old in enumerate(before):
        stays = set(old) & chosen[rank]
        new = iter(sorted(chosen[rank] - stays))
        settled.append(tuple(expert if expert in stays else next(new) for expert in old))
    return tuple(settled)
