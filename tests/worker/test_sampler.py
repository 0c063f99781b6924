"""Which tokens may be drawn, how often, and what a draw depends on."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from quire import SamplingParams
from quire.worker.extras import ScalarColumns, pack_scalars
from quire.worker.sampler import FILTER_WINDOW, exclude_top_choices, filter_logits
from tests.worker.device import Device


def columns(*params: SamplingParams) -> ScalarColumns:
    """The scalar columns of rows with these parameters."""
    return ScalarColumns(torch.from_numpy(pack_scalars(params)))


def kept(logits: torch.Tensor, **params: Any) -> list[bool]:
    """Which tokens our filter keeps, for one row."""
    mask = filter_logits(logits[None], columns(SamplingParams(**params)))
    left = mask[0] > -math.inf
    assert torch.equal(mask[0][left], logits[left])
    return left.tolist()


def brute_force(
    logits: torch.Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, top_n_sigma: float = 0.0
) -> list[bool]:
    """The same in float64, one filter after the other in vLLM's order; ties with the last kept token are kept."""
    weights = np.exp(logits.double().numpy() - float(logits.max()))
    alive = weights >= min_p * weights.max()
    if top_n_sigma > 0.0:
        x = logits.double().numpy()
        alive &= x >= x.max() - top_n_sigma * x[x > -math.inf].std()
    if top_k > 0:
        alive &= weights >= np.sort(weights)[::-1][min(top_k, len(weights)) - 1]
    if top_p < 1.0:
        probabilities = np.where(alive, weights, 0.0) / weights[alive].sum()
        if top_k > 0:  # the mass is that of the k best alone, however many tie with the last of them
            best = np.sort(probabilities)[::-1][:top_k]
            probabilities = probabilities / best.sum()
        before = 0.0
        lowest = math.inf
        for value in np.sort(probabilities)[::-1]:
            if before >= np.float32(top_p):
                break
            before, lowest = before + value, value
        alive &= probabilities >= lowest
    return alive.tolist()


def without_top_choices(probabilities: np.ndarray, threshold: float) -> np.ndarray:
    """Which tokens XTC keeps where it applies, one by one from the most likely."""
    alive = probabilities > 0
    tops = [token for token in np.argsort(-probabilities) if alive[token] and probabilities[token] >= threshold]
    for token in tops[:-1]:
        alive[token] = probabilities[token] == probabilities[tops[-1]]
    return alive


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("vocab", [5, 300, 3000])
def test_masks_equal_brute_force(seed: int, vocab: int) -> None:
    generator = torch.Generator().manual_seed(1000 * vocab + seed)
    logits = torch.randn(vocab, generator=generator) * (0.3 + 1.2 * seed)
    for params in (
        {"top_k": 1}, {"top_k": 3}, {"top_k": vocab}, {"top_k": 2 * vocab}, {"top_p": 0.1}, {"top_p": 0.9},
        {"top_p": 0.999}, {"min_p": 0.05}, {"min_p": 1.0}, {"top_k": 4, "top_p": 0.7},
        {"top_k": 50, "top_p": 0.95, "min_p": 0.02},
        {"top_p": 0.8, "min_p": 0.2}, {"top_p": 1e-6}, {"top_n_sigma": 0.5}, {"top_n_sigma": 1.5, "top_p": 0.7},
        {"top_n_sigma": 1.0, "min_p": 0.05, "top_k": 20}, {"top_n_sigma": 100.0},
    ):  # fmt: skip
        values: dict[str, Any] = params
        assert kept(logits, **values) == brute_force(logits, **values), params


def test_nuclei_wider_than_the_window_are_exact() -> None:
    logits = torch.randn(4 * FILTER_WINDOW, generator=torch.Generator().manual_seed(3)) * 0.1  # nearly flat
    for top_p in (0.3, 0.6, 0.95):
        left = kept(logits, top_p=top_p)
        assert sum(left) > FILTER_WINDOW
        assert left == brute_force(logits, top_p=top_p)
    assert sum(kept(logits, top_k=FILTER_WINDOW + 500)) == FILTER_WINDOW + 500
    assert kept(logits, top_k=2000, top_p=0.9) == brute_force(logits, top_k=2000, top_p=0.9)


def test_top_n_sigma_keeps_the_same_tokens_at_any_temperature_and_ignores_masked_ones() -> None:
    logits = torch.randn(500, generator=torch.Generator().manual_seed(4)) * 2.5
    wanted = brute_force(logits, top_n_sigma=1.3)
    assert 1 < sum(wanted) < 250
    assert all(kept(logits / temperature, top_n_sigma=1.3) == wanted for temperature in (0.1, 0.7, 1.9))
    logits[50:] = -math.inf
    assert kept(logits, top_n_sigma=1.3) == brute_force(logits, top_n_sigma=1.3)
    logits[1:] = -math.inf
    assert sum(kept(logits, top_n_sigma=1.3)) == 1


@pytest.mark.parametrize("seed", range(6))
def test_xtc_equals_brute_force(seed: int) -> None:
    logits = torch.randn(200, generator=torch.Generator().manual_seed(seed)) * (0.5 + seed)
    logits[::9] = -math.inf
    for threshold in (0.0, 0.001, 0.05, 0.1, 0.3, 0.5, 0.9):
        for top_k in (0, 7):
            scalars = columns(SamplingParams(xtc_probability=0.5, xtc_threshold=threshold, top_k=top_k))
            left = filter_logits(logits[None], scalars)
            probabilities = np.exp(left[0].double().numpy() - float(logits.max()))
            probabilities /= probabilities.sum()
            exclude_top_choices(left, scalars, torch.tensor([0.5]))  # not below the probability: XTC does not apply
            assert ((left[0] > -math.inf).numpy() == (probabilities > 0)).all()
            exclude_top_choices(left, scalars, torch.tensor([0.49]))
            wanted = without_top_choices(probabilities, np.float32(threshold))
            assert ((left[0] > -math.inf).numpy() == wanted).all(), (threshold, top_k)


def test_xtc_applies_as_often_as_its_probability_and_by_a_separate_number() -> None:
    """Probabilities .6 .3 .1: without the top choice only .3 and .1 are drawn. Whether XTC applies is independent of
    which of the two is drawn."""
    logits = torch.tensor([0.6, 0.3, 0.1]).log()
    device = Device(3, max_rows=512)
    for row in range(512):
        device.add(row, SamplingParams(xtc_probability=0.5, xtc_threshold=0.2), seed=row * 104729)
    counts = np.zeros(3)
    for _ in range(16):
        tokens, _ = device.draw(logits.expand(512, -1), range(512))
        counts += np.bincount(tokens, minlength=3)
        device.batch.num_tokens += 1
    expected = 8192 * (0.5 * np.array([0.6, 0.3, 0.1]) + 0.5 * np.array([0.0, 0.75, 0.25]))
    assert ((counts - expected) ** 2 / expected).sum() < 25, (counts, expected)


def test_wide_and_narrow_rows_do_not_affect_each_other() -> None:
    generator = torch.Generator().manual_seed(9)
    logits = torch.stack([torch.randn(3000, generator=generator) * scale for scale in (0.1, 3.0, 0.1, 8.0)])
    settings: list[dict[str, Any]] = [{"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.1}, {}]
    together = filter_logits(logits, columns(*(SamplingParams(**params) for params in settings))) > -math.inf
    for row, params in enumerate(settings):
        assert together[row].tolist() == kept(logits[row], **params)


def test_ties_with_the_last_kept_token_are_kept() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0, 0.0])
    assert kept(logits, top_k=2) == [False, True, True, True, True, False]
    assert kept(logits, top_k=1) == [False, True, False, False, False, False]
    assert kept(torch.zeros(6), top_k=2) == [True] * 6
    assert kept(torch.zeros(6), top_p=0.4) == [True] * 6
    assert kept(torch.tensor([2.0, 2.0, -9.0]), top_p=0.3) == [True, True, False]


def test_top_p_applies_to_what_min_p_kept() -> None:
    """Probabilities .5 .3 .1 .1: min_p .5 keeps .625 .375, and the first alone is past top_p .6."""
    logits = torch.tensor([0.5, 0.3, 0.1, 0.1]).log()
    assert kept(logits, top_p=0.6, min_p=0.5) == [True, False, False, False]
    assert kept(logits, top_p=0.7, min_p=0.5) == [True, True, False, False]


def test_already_masked_tokens_stay_masked() -> None:
    logits = torch.tensor([1.0, -math.inf, 0.5, -math.inf])
    assert kept(logits, top_k=3) == [True, False, True, False]
    assert kept(logits, top_p=0.99) == [True, False, True, False]


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0}, {"temperature": 0.5}, {"temperature": 1.7, "top_k": 6},
        {"temperature": 1.0, "top_p": 0.8}, {"temperature": 1.0, "min_p": 0.15},
    ],
    ids=str,
)  # fmt: skip
def test_draws_follow_the_distribution(params: dict[str, Any]) -> None:
    draws, vocab = 8192, 12
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(1)) * 1.2
    device = Device(vocab, max_rows=512)
    asked = SamplingParams(**params)
    counts = np.zeros(vocab)
    for row in range(512):
        device.add(row, asked, seed=row * 7919)
    for _ in range(draws // 512):
        tokens, _ = device.draw(logits.expand(512, -1), range(512))
        counts += np.bincount(tokens, minlength=vocab)
        device.batch.num_tokens += 1  # the next number of every row's stream
    scaled = logits.double() / asked.temperature
    allowed = np.array(brute_force(scaled, asked.top_k, asked.top_p, asked.min_p))
    expected = np.where(allowed, np.exp(scaled.numpy()), 0)
    expected *= draws / expected.sum()
    assert counts[~allowed].sum() == 0
    chi_square = ((counts - expected)[allowed] ** 2 / expected[allowed]).sum()
    assert chi_square < 45, (chi_square, counts, expected)  # 11 degrees of freedom: p < 1e-5


def test_a_draw_depends_only_on_its_own_row() -> None:
    """The same seed, output index and logits give the same token in any row, in any batch."""
    vocab = 64
    logits = torch.randn(8, vocab, generator=torch.Generator().manual_seed(2))
    params = SamplingParams(temperature=0.9, top_p=0.95, seed=1234)
    alone = Device(vocab)
    alone.add(0, params, prompt=[1, 2], output=[3])
    wanted, _ = alone.draw(logits[:1], [0])
    others = [
        SamplingParams(temperature=0), SamplingParams(temperature=1.5, seed=5),
        SamplingParams(temperature=0.7, top_k=3), SamplingParams(temperature=1.0, presence_penalty=1.0),
        SamplingParams(temperature=1.0, logit_bias={3: 5.0}),
    ]  # fmt: skip
    for row in range(1, 6):
        crowd = Device(vocab)
        for at, other in enumerate(others):
            crowd.add((row + 1 + at) % 6, other, prompt=[4, 5, 6, 7], output=[8] * at)
        crowd.add(row, params, prompt=[9] * 5, output=[10])  # one output token too: the same index in the stream
        order = [(row + 1 + at) % 6 for at in range(5)]
        order.insert(2, row)
        rows = torch.stack([logits[0] if at == row else logits[at + 1] for at in order])
        tokens, _ = crowd.draw(rows, order)
        assert tokens[2] == wanted[0]


def test_sequences_of_one_prompt_have_separate_streams() -> None:
    device = Device(50, max_rows=32)
    for row in range(32):
        device.add(row, SamplingParams(seed=1), sequence=row)
    tokens, _ = device.draw(torch.zeros(32, 50), range(32))
    assert len(set(tokens)) > 12


def test_seeds_use_all_64_bits() -> None:
    device = Device(1000, max_rows=8)
    seeds = [1, 1 + 2**32, 1 + 2**63, 2**64 - 1, -1 - 2**40, 0, 2**31, 2**33]
    for row, seed in enumerate(seeds):
        device.add(row, SamplingParams(), seed=seed)
    tokens, _ = device.draw(torch.zeros(8, 1000), range(8))
    assert len(set(tokens)) >= 7


def test_the_lowest_temperature_is_almost_greedy_and_zero_is_greedy() -> None:
    logits = torch.randn(4, 40, generator=torch.Generator().manual_seed(4)) * 10
    device = Device(40)
    for row, temperature in enumerate((0.0, 1e-6, 0.001, 0.01)):
        device.add(row, SamplingParams(temperature=temperature, seed=3))
    tokens, invalid = device.draw(logits, range(4))
    assert tokens == logits.argmax(-1).tolist()
    assert not any(invalid)


def test_a_masked_token_is_never_drawn_even_by_the_smallest_number() -> None:
    device = Device(6, max_rows=256)
    for row in range(256):
        device.add(row, SamplingParams(), seed=row)
    logits = torch.tensor([-math.inf, 0.0, -math.inf, 0.0, -math.inf, -math.inf]).expand(256, -1)
    tokens, invalid = device.draw(logits, range(256))
    assert set(tokens) == {1, 3}
    assert not any(invalid)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_valid_logits_are_flagged(temperature: float) -> None:
    device = Device(5)
    for row in range(4):
        device.add(row, SamplingParams(temperature=temperature, seed=0))
    logits = torch.zeros(4, 5)
    logits[1, 2] = math.nan
    logits[2] = -math.inf
    logits[3, 1] = math.inf
    tokens, invalid = device.draw(logits, range(4))
    assert invalid == [False, True, True, True]
    assert all(0 <= token < 5 for token in tokens)
