"""The requests that every engine runs, as token ids, so that no tokenizer is involved. Needs nothing but Python."""

from __future__ import annotations

import random
from dataclasses import dataclass

VOCABULARY = 40_000
"""Ids are drawn below this, above the special ones."""


@dataclass(frozen=True)
class Work:
    """Prompts and how many tokens each is to yield."""

    prompts: list[list[int]]
    outputs: list[int]

    @property
    def output_tokens(self) -> int:
        return sum(self.outputs)


def mixed(quick: bool = False) -> Work:
    """16 requests of mixed lengths: prompts 16 to 256, outputs 16 to 128."""
    draw = random.Random(1)
    longest, most = (32, 20) if quick else (256, 128)
    lengths = [draw.randint(16, longest) for _ in range(16)]
    outputs = [draw.randint(min(16, most), most) for _ in range(16)]
    return Work([_tokens(draw, length) for length in lengths], outputs)


def single(quick: bool = False) -> Work:
    """One request alone."""
    return Work([_tokens(random.Random(2), 16)], [8 if quick else 64])


def shared(quick: bool = False) -> Work:
    """32 requests that share their first 256 tokens, with 16 of their own, and 32 out."""
    draw = random.Random(3)
    count, length, outputs = (4, 64, 4) if quick else (32, 256, 32)
    common = _tokens(draw, length)
    return Work([common + _tokens(draw, 16) for _ in range(count)], [outputs] * count)


def _tokens(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(100, VOCABULARY) for _ in range(count)]
