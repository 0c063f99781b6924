"""Our Philox is Philox4x32-10 as published."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from quire.kernels.philox import philox, uniform

# From Random123's kat_vectors: counter (4 words), key (2 words), result (4 words).
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def _words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def _published(counter: list[int], key: list[int]) -> list[int]:
    """The ten rounds in Python integers, all four words."""
    c, k = list(counter), list(key)
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c[0], 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * c[2], 1 << 32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) % (1 << 32), (k[1] + 0xBB67AE85) % (1 << 32)]
    return c


def _signed(low: int, high: int) -> int:
    value = low | high << 32
    return value - (1 << 64) if value >> 63 else value


def _ours(counter: list[int], key: list[int], make: type | object) -> int:
    seed, index, stream = _signed(*key), _signed(*counter[:2]), _signed(*counter[2:])
    return int(philox(*(make([value]) for value in (seed, index, stream)))[0])  # type: ignore[operator]


MAKERS = [
    pytest.param(lambda values: np.array(values, np.int64), id="numpy"),
    pytest.param(lambda values: torch.tensor(values, dtype=torch.int64), id="torch"),
]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("counter, key, result", KNOWN)
def test_known_answers(counter: str, key: str, result: str, make: object) -> None:
    assert _published(_words(counter), _words(key)) == _words(result)  # the reference of the next test is right
    assert _ours(_words(counter), _words(key), make) == _words(result)[0]


@pytest.mark.parametrize("make", MAKERS)
def test_random_inputs_equal_the_ten_rounds_in_python(make: object) -> None:
    draw = random.Random(5)
    for _ in range(200):
        words = [draw.getrandbits(32) for _ in range(6)]
        assert _ours(words[:4], words[4:], make) == _published(words[:4], words[4:])[0]


def test_uniform_numbers_are_even_and_below_one() -> None:
    values = uniform(np.full(100_000, 7), np.arange(100_000), np.zeros(100_000, np.int64))
    counts = np.bincount((values * 100).astype(int), minlength=100)
    assert values.min() >= 0 and values.max() < 1
    assert ((counts - 1000) ** 2 / 1000).sum() < 160  # chi-square, 99 degrees of freedom: p < 1e-4


def test_seeds_indices_and_sequences_give_different_streams() -> None:
    numbers = {
        int(philox(np.array([seed]), np.array([index]), np.array([sequence]))[0])
        for seed in range(8)
        for index in range(8)
        for sequence in range(8)
    }
    assert len(numbers) == 512
