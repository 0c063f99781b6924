"""Drafts that are drawn, and accepted by the ratio of both probabilities, leave the target's distribution as it is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.messages.sampling import SamplingParams
from quire.speculative.choice import choose, write
from quire.speculative.device import ProposalStep
from tests.worker.device import Device

ROWS = 4000
VOCAB = 8
CRITICAL = 35.0
"""Of chi-squared with 7 degrees of freedom: exceeded once in 90,000 by chance. The seeds are fixed."""


CRITICAL_PAIRS = 150.0
"""With at most 63 degrees of freedom: exceeded by chance once in 100 million."""


def chi_squared(tokens: torch.Tensor, probs: torch.Tensor) -> float:
    expected = probs.double() * len(tokens)
    counts = torch.bincount(tokens, minlength=len(probs)).double()
    return float(((counts - expected) ** 2 / expected).sum())


def pairs_chi_squared(first: torch.Tensor, second: torch.Tensor, probs: torch.Tensor) -> float:
    """Of pairs of independent draws from `probs`; pairs that are expected less than 5 times count as one."""
    likely = (probs[:, None] * probs).flatten()
    is_rare = likely * len(first) < 5
    names = torch.where(is_rare, 0, is_rare.logical_not().cumsum(0))
    joined = torch.zeros(int(names.max()) + 1).index_add(0, names, likely).clamp(min=1e-9)
    return chi_squared(names[first * VOCAB + second], joined)


@pytest.mark.parametrize("filtered", [False, True])
def test_the_distribution_is_the_targets(filtered: bool) -> None:
    params = SamplingParams(temperature=0.8, top_k=6 if filtered else -1)
    device = Device(VOCAB, ROWS)
    for row in range(ROWS):
        device.add(row, params, prompt=[1, 2], seed=row * 7919)
    batch = device.batch
    batch.speculate(sampled=2)
    generator = torch.Generator().manual_seed(1)
    target, *noise = (torch.randn(VOCAB, generator=generator) for _ in range(3))
    others = [target + each for each in noise]
    rows = torch.arange(ROWS)
    step = ProposalStep(
        tokens=rows, positions=rows, following=rows, attention=(), hidden=None, features=(), rows=rows, ends=rows,
        count=1, batch=batch, kv=(), lay_out=lambda distance: (rows, ()),
    )  # fmt: skip
    write(step, [choose(logits.expand(ROWS, VOCAB), step, i, "probabilistic") for i, logits in enumerate(others)])
    assert batch.draft_probs is not None
    drafted = batch.draft_probs[0]
    for place in range(2):
        assert chi_squared(batch.drafts[:ROWS, place].long(), drafted[place].clamp(min=1e-9)) < CRITICAL
    kept = target.clone()
    if filtered:
        kept[kept < kept.topk(6).values[-1]] = float("-inf")
    expected = torch.softmax(kept / 0.8, -1)
    host = np.arange(ROWS, dtype=np.int32)
    before = None
    for place in range(3):  # two drafts, and the place behind them
        lengths = batch.num_tokens[rows] + place
        drawn = device.sampler.draw(target.expand(ROWS, VOCAB).clone(), rows, lengths, host).tokens
        possible = expected > 0
        assert not (~possible)[drawn].any()
        scaled = torch.where(possible, expected, 1e-9)
        assert chi_squared(drawn, scaled) < CRITICAL
        if before is not None:
            assert pairs_chi_squared(before, drawn, expected) < CRITICAL_PAIRS, "draws of two places are independent"
        before = drawn
        if place < 2:
            accepted = (drawn == batch.drafts[:ROWS, place]).float().mean()
            # What is drawn instead of a draft that was refused is never that draft.
            assert abs(float(accepted) - float(torch.minimum(expected, drafted[place]).sum())) < 0.04


@pytest.mark.parametrize("share", [float("nan"), 1.0 + 1e-6], ids=["not a number", "rounding"])
def test_probabilities_that_leave_nothing_to_draw(share: float) -> None:
    """Draft probabilities that are not numbers, or no smaller than the target's anywhere, leave the target's own."""
    device = Device(VOCAB, ROWS)
    for row in range(ROWS):
        device.add(row, SamplingParams(temperature=1.0), prompt=[1, 2], seed=row * 7919)
    batch = device.batch
    batch.speculate(sampled=1)
    target = torch.randn(VOCAB, generator=torch.Generator().manual_seed(2))
    target[-1] = float("-inf")
    expected = torch.softmax(target, -1)
    assert batch.draft_probs is not None
    batch.draft_probs[:, 0] = expected * share
    batch.is_sampled[:], batch.num_drafts[:] = True, 1
    batch.drafts[:, 0] = VOCAB - 1  # as unlikely as can be: it is never accepted
    rows, host = torch.arange(ROWS), np.arange(ROWS, dtype=np.int32)
    drawn = device.sampler.draw(target.expand(ROWS, VOCAB).clone(), rows, batch.num_tokens[rows], host).tokens
    assert (drawn < VOCAB - 1).all()
    assert chi_squared(drawn, torch.where(expected > 0, expected, 1e-9)) < CRITICAL


def test_a_run_from_the_host_is_verified_by_its_tokens() -> None:
    device = Device(VOCAB, 2)
    for row in range(2):
        device.add(row, SamplingParams(temperature=1.0), seed=row)
    batch = device.batch
    batch.speculate(sampled=2)
    batch.is_sampled[:] = True
    logits, rows, host = torch.zeros(2, VOCAB), torch.arange(2), np.arange(2, dtype=np.int32)
    batch.num_drafts[:2] = 1
    batch._given_by_host(rows)
    drawn = device.sampler.draw(logits.clone(), rows, batch.num_tokens[rows], host).tokens
    batch.draft_probs = None
    assert drawn.tolist() == device.sampler.draw(logits, rows, batch.num_tokens[rows], host).tokens.tolist()
