"""Random products of adapters, and what they are in float64, token by token."""

from __future__ import annotations

import itertools

import torch


def expected(
    out: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, slots: torch.Tensor, bounds: tuple[int, ...]
) -> torch.Tensor:
    total, rank = out.double().clone(), b.shape[1]
    for token, slot in enumerate(slots.tolist()):
        for part, (first, last) in enumerate(itertools.pairwise(bounds)):
            if slot >= 0:
                inner = a[slot, part * rank : (part + 1) * rank].double() @ x[token].double()
                total[token, first:last] += inner @ b[slot, :, first:last].double()
    return total


CASES = [
    (1, 1, (0, 40), 24, 4, 2),
    (5, 3, (0, 64, 96, 128), 70, 16, 4),
    (33, 2, (0, 700, 1400), 129, 8, 3),
    (130, 1, (0, 33), 257, 5, 8),
]


def random_case(
    tokens: int, parts: int, bounds: tuple[int, ...], depth: int, rank: int, slots: int, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(tokens)
    width = bounds[-1]
    shapes = ((tokens, width), (tokens, depth), (slots, parts * rank, depth), (slots, rank, width))
    own = torch.randint(-1, slots, (tokens,), generator=generator, dtype=torch.int32)
    return *(torch.randn(*shape, generator=generator).to(dtype) for shape in shapes), own
