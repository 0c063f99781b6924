"""Sampling kernels: which tokens may be drawn, which are drawn, and what a draw writes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest
import torch

from tests.kernels.triton_target import DEVICE, HALF, ON_GPU  # isort: skip  # before any kernel

from quire.kernels.philox import uniform
from quire.kernels.triton.sampling import (
    INVALID,
    STOPPED,
    BatchColumns,
    SamplingWorkspace,
    commit,
    draw_and_commit,
    workspace,
)
from quire.messages.sampling import COLUMN, PENALTIES, SamplingParams
from quire.worker.extras import ScalarColumns, pack_scalars
from quire.worker.sampler import filter_logits

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SMALL = {"group": 8, "tile": 32, "room": 64}
"""Small enough that a vocabulary of a thousand takes every path."""
SLOTS = 3


@dataclass
class Row:
    """One row of the batch, with a request's default parameters."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    seed: int = 0
    sequence: int = 0
    prompt_len: int = 3
    num_tokens: int = 5
    limit: int = 100
    stop_ids: list[int] = field(default_factory=list)

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(**{name: value for name, value in vars(self).items() if name in COLUMN})


@dataclass
class Bench:
    """A batch of rows and the results of a call."""

    columns: BatchColumns
    results: torch.Tensor
    slot: torch.Tensor
    work: SamplingWorkspace

    def tokens(self, count: int) -> list[int]:
        return self.results[int(self.slot), 0, :count].tolist()

    def flags(self, count: int) -> list[int]:
        return self.results[int(self.slot), 1, :count].tolist()


def bench(rows: list[Row], vocab: int, sizes: dict[str, int] | None = None, slot: int = 1) -> Bench:
    """The rows, and a padding row after them, on the device; results filled with values that no draw writes."""
    padded = [*rows, Row(temperature=0.0, num_tokens=0, prompt_len=0, limit=0)]
    width = max(len(row.stop_ids) for row in padded) + 1

    def column(values: list, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=DEVICE)

    columns = BatchColumns(
        last_token=column([-7] * len(padded)),
        num_tokens=column([row.num_tokens for row in padded]),
        prompt_len=column([row.prompt_len for row in padded]),
        limit=column([row.limit for row in padded]),
        active=column([True] * len(rows) + [False], torch.bool),
        seed=column([row.seed for row in padded]),
        sequence=column([row.sequence for row in padded]),
        scalars=packed([row.params for row in padded]),
        stop_ids=column([row.stop_ids + [-1] * (width - len(row.stop_ids)) for row in padded]),
    )  # fmt: skip
    results = torch.full((SLOTS, 2, len(rows)), -9, dtype=torch.int32, pin_memory=ON_GPU)
    work = workspace(max(len(rows), 1), vocab, DEVICE, **(SMALL if sizes is None and not ON_GPU else sizes or {}))
    for part in (work.maxima, work.sums, work.thresholds):
        part.fill_(math.nan)
    work.live.fill_(-1)
    work.spans.fill_(2**30)
    return Bench(columns, results, column([slot], torch.int32), work)


def packed(params: list[SamplingParams]) -> torch.Tensor:
    """The batch's scalar columns; penalties, which no kernel reads, are NaN."""
    scalars = pack_scalars(params)
    scalars.view(np.float32)[:, [COLUMN[penalty.name] for penalty in PENALTIES]] = math.nan
    return torch.from_numpy(scalars).to(DEVICE)


def draw(logits: torch.Tensor, rows: list[Row], filtered: bool = True, sizes: dict[str, int] | None = None) -> Bench:
    """Draw once for every row, in order."""
    made = bench(rows, logits.shape[1], sizes)
    numbers = torch.arange(len(rows), device=DEVICE)
    draw_and_commit(logits, numbers, made.columns, made.results, made.slot, filtered, made.work)
    if ON_GPU:
        torch.cuda.synchronize()
    return made


def noise(*shape: int, seed: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale
    return values.to(dtype).to(DEVICE)


def allowed(logits: torch.Tensor, row: Row, slack: float = 0.0) -> torch.Tensor:
    """Which tokens the torch sampler keeps; with slack, those it keeps if masses are off by that much."""
    scaled = (logits.float() / torch.tensor(row.temperature))[None].cpu()
    top_p, min_p = min(row.top_p * (1 + slack), 1.0), min(row.min_p * (1 - slack), 1.0)
    asked = pack_scalars([msgspec.structs.replace(row.params, top_p=top_p, min_p=min_p)])
    return (filter_logits(scaled, ScalarColumns(torch.from_numpy(asked))) > -math.inf)[0]


def assert_kept(logits: torch.Tensor, rows: list[Row], thresholds: torch.Tensor) -> None:
    """A threshold keeps what the torch sampler keeps, up to the rounding of masses."""
    for i, row in enumerate(rows):
        if row.temperature == 0.0:
            assert thresholds[i] == -math.inf
            continue
        kept = (logits[i].float() >= thresholds[i]).cpu() & (logits[i] > -math.inf).cpu()
        at_least, at_most = allowed(logits[i], row, -2e-5), allowed(logits[i], row, 2e-5)
        assert not (at_least & ~kept).any(), (i, row, int(kept.sum()), int(at_least.sum()))
        assert not (kept & ~at_most).any(), (i, row, int(kept.sum()), int(at_most.sum()))


def assert_drawn(logits: torch.Tensor, rows: list[Row], tokens: list[int]) -> None:
    """Each token is the one at the row's number in the cumulative distribution, in double precision."""
    for i, (row, token) in enumerate(zip(rows, tokens, strict=True)):
        if row.temperature == 0.0:
            assert token == int(logits[i].float().cpu().numpy().argmax()), i
            continue
        number = uniform(np.int64(row.seed), np.int64(row.num_tokens - row.prompt_len), np.int64(row.sequence))
        misses = []
        for slack in (0.0, -2e-5, 2e-5):  # one token more or less in the nucleus moves all others
            scaled = logits[i].double().cpu() / np.float32(row.temperature)
            weights = scaled.masked_fill(~allowed(logits[i], row, slack), -math.inf).softmax(-1)
            through = weights.cumsum(-1)
            assert weights[token] > 0, (i, row, token)
            misses.append(max(float(through[token] - weights[token]) - number, number - float(through[token])))
        assert min(misses) < 1e-6, (i, row, token, misses)


MIXED = [
    Row(), Row(temperature=0.0), Row(top_k=1), Row(top_k=5, temperature=0.7), Row(top_p=0.9), Row(min_p=0.1),
    Row(top_k=40, top_p=0.95, temperature=0.6), Row(top_p=0.8, min_p=0.02), Row(top_k=300, top_p=0.99, min_p=1e-4),
    Row(top_k=10**6), Row(top_p=1e-6), Row(temperature=2.0, top_p=0.5), Row(min_p=1.0), Row(top_k=700),
    Row(temperature=0.01, top_p=0.9), Row(top_p=0.9999), Row(min_p=1e-12, top_k=3),
]  # fmt: skip


def mixed() -> list[Row]:
    """Every filter beside every other; each row with a number of its own."""
    return [Row(**{**vars(row), "seed": 77 * i + 2**40, "sequence": i}) for i, row in enumerate(MIXED)]


SPREADS = [0.05, 1.0, 4.0, 30.0]
"""From nearly flat (the nucleus is most of the vocabulary) to one token with almost all the mass."""
CASES = [(torch.float32, 1.0), (torch.float16, 4.0), (torch.bfloat16, 0.05), (torch.bfloat16, 30.0)]


@pytest.mark.parametrize("dtype, scale", [(d, s) for d in DTYPES for s in SPREADS] if ON_GPU else CASES, ids=str)
def test_filters_and_draws_equal_the_torch_sampler(dtype: torch.dtype, scale: float) -> None:
    rows = mixed()
    logits = noise(len(rows), 803, seed=int(scale * 100), scale=scale, dtype=dtype)
    made = draw(logits, rows)
    assert made.flags(len(rows)) == [0] * len(rows)
    assert_kept(logits, rows, made.work.thresholds)
    assert_drawn(logits, rows, made.tokens(len(rows)))


def reference(logits: torch.Tensor, row: Row) -> np.ndarray:
    """The probabilities that a row's token is drawn from: one filter after the other, in float64."""
    x = logits.double().cpu().numpy()
    kept = x > -math.inf
    scaled = np.where(kept, x, -1e300) / np.float32(row.temperature)
    weights = np.where(kept, np.exp(scaled - scaled.max()), 0.0)
    if row.top_n_sigma > 0.0:
        kept &= x >= x.max() - np.float32(row.top_n_sigma) * x[kept].std()
    kept &= weights >= np.float32(row.min_p)
    if row.top_k > 0:
        kept &= weights >= np.sort(weights)[::-1][min(row.top_k, len(weights)) - 1]
    if row.top_p < 1.0:
        best = np.sort(np.where(kept, weights, 0.0))[::-1]
        above = np.cumsum(best) - best
        kept &= weights >= best[above < np.float32(row.top_p) * best.sum()].min()
    drawn = row.num_tokens - row.prompt_len
    number = uniform(np.int64(row.seed), np.int64(drawn), np.int64(row.sequence + 2**32))
    if number < np.float32(row.xtc_probability):
        probabilities = np.where(kept, weights, 0.0) / weights[kept].sum()
        is_top = kept & (probabilities >= np.float32(row.xtc_threshold))
        if is_top.sum() > 1:
            kept &= x <= x[is_top].min()
    return np.where(kept, weights, 0.0) / weights[kept].sum()


def assert_drawn_by_the_reference(logits: torch.Tensor, rows: list[Row], tokens: list[int]) -> None:
    for i, (row, token) in enumerate(zip(rows, tokens, strict=True)):
        probabilities = reference(logits[i], row)
        number = uniform(np.int64(row.seed), np.int64(row.num_tokens - row.prompt_len), np.int64(row.sequence))
        through = probabilities.cumsum()
        assert probabilities[token] > 0, (i, row, token)
        assert through[token] - probabilities[token] - 1e-6 < number < through[token] + 1e-6, (i, row, token)


XTC = [
    Row(xtc_probability=1.0), Row(xtc_probability=1.0, xtc_threshold=0.02), Row(xtc_probability=1.0, xtc_threshold=0.0),
    Row(xtc_probability=1.0, xtc_threshold=1e-6, temperature=0.5), Row(xtc_probability=1.0, xtc_threshold=0.6),
    Row(xtc_probability=1.0, xtc_threshold=0.05, top_k=5), Row(xtc_probability=1.0, top_p=0.8, temperature=1.7),
    Row(xtc_probability=1.0, xtc_threshold=0.03, min_p=0.05), Row(xtc_probability=1.0, xtc_threshold=0.0, top_k=12),
    Row(xtc_probability=0.5, xtc_threshold=0.02), Row(xtc_probability=0.5, xtc_threshold=0.02, top_p=0.95),
    Row(top_p=0.9, xtc_threshold=0.02), Row(xtc_threshold=0.0),
]  # fmt: skip


SCALES = [(torch.float32, 1.0), (torch.float32, 3.0), (torch.bfloat16, 3.0)]


@pytest.mark.parametrize("dtype, scale", SCALES if ON_GPU else SCALES[1:2], ids=str)
def test_xtc_excludes_top_choices(dtype: torch.dtype, scale: float) -> None:
    rows = [
        Row(**{**vars(row), "seed": 31 * i + 5, "sequence": i}) for i, row in enumerate(XTC * (20 if ON_GPU else 2))
    ]
    logits = noise(len(rows), 803, seed=int(10 * scale), scale=scale, dtype=dtype)
    logits[:, ::7] = -math.inf  # as under a grammar
    made = draw(logits, rows)
    assert made.flags(len(rows)) == [0] * len(rows)
    assert_drawn_by_the_reference(logits, rows, made.tokens(len(rows)))
    best = logits.float().amax(-1)
    assert (made.work.maxima.amax(-1) < best).sum() > len(rows) // 3


SIGMAS = [
    Row(top_n_sigma=1.0), Row(top_n_sigma=0.3, temperature=2.0), Row(top_n_sigma=2.5), Row(top_n_sigma=100.0),
    Row(top_n_sigma=1.5, temperature=0.3), Row(top_n_sigma=2.0, top_k=4), Row(top_n_sigma=2.0, top_p=0.6),
    Row(top_n_sigma=1.0, min_p=0.001), Row(top_n_sigma=3.0, min_p=0.2), Row(top_n_sigma=1e-6),
    Row(top_n_sigma=2.0, xtc_probability=1.0, xtc_threshold=0.01), Row(top_n_sigma=1.5, top_k=300, top_p=0.9),
]  # fmt: skip


@pytest.mark.parametrize("dtype, scale", [(torch.float32, 1.0), (torch.float32, 9.0), (torch.bfloat16, 3.0)], ids=str)
def test_top_n_sigma_keeps_what_is_near_the_best(dtype: torch.dtype, scale: float) -> None:
    rows = [Row(**{**vars(row), "seed": 19 * i + 2, "sequence": i}) for i, row in enumerate(SIGMAS)]
    logits = noise(len(rows), 803, seed=int(10 * scale), scale=scale, dtype=dtype)
    logits[:, 3::5] = -math.inf
    logits += 40.0  # a mean far from zero loses no precision
    made = draw(logits, rows)
    assert made.flags(len(rows)) == [0] * len(rows)
    assert_drawn_by_the_reference(logits, rows, made.tokens(len(rows)))
    for i, row in enumerate(rows):
        if row.xtc_probability == 0.0:
            kept = (logits[i].float() >= made.work.thresholds[i]) & (logits[i] > -math.inf)
            assert (kept.cpu().numpy() == (reference(logits[i], row) > 0)).all(), row


def test_xtc_keeps_ties_of_the_least_likely_choice_and_a_single_choice() -> None:
    few = torch.tensor([0.4, 0.2, 0.2, 0.15, 0.05], device=DEVICE).log()
    logits = torch.stack([few, few, few, few])
    rows = [
        Row(xtc_probability=1.0, xtc_threshold=threshold, seed=seed)
        for seed, threshold in enumerate((0.19, 0.3, 0.1, 0.5))
    ]
    made = draw(logits, rows, sizes={"group": 8, "tile": 2, "room": 8})
    expected = few[[1, 0, 3, 0]]
    assert torch.equal(made.work.maxima.amax(-1), expected)


def test_greedy_rows_ignore_xtc() -> None:
    logits = noise(2, 300, seed=2, scale=4.0)
    greedy = Row(temperature=0.0, xtc_probability=1.0, xtc_threshold=0.0)
    assert draw(logits, [greedy] * 2).tokens(2) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("count", [0, 1, 7])
def test_any_number_of_rows(count: int) -> None:
    rows = mixed()[:count]
    logits = noise(count, 500, seed=count, scale=2.0)
    for filtered in (False, True):
        if not filtered:
            rows = [Row(temperature=row.temperature, seed=row.seed) for row in rows]
        made = draw(logits, rows, filtered)
        assert_drawn(logits, rows, made.tokens(count))
        assert made.columns.num_tokens.tolist() == [6] * count + [0]


def test_plain_draws_ignore_filters_and_need_no_thresholds() -> None:
    rows = [Row(seed=seed, top_k=1) for seed in range(8)]
    logits = noise(8, 200, seed=0, scale=0.1)
    made = draw(logits, rows, filtered=False)
    assert_drawn(logits, [Row(seed=seed) for seed in range(8)], made.tokens(8))
    assert made.work.thresholds.isnan().all()


def test_greedy_takes_the_first_of_ties() -> None:
    logits = noise(4, 700, seed=3)
    logits[0, [40, 41, 650]] = 9.0
    logits[1, [0, 699]] = 9.0
    logits[2] = 0.25
    logits[3, 699] = 9.0
    made = draw(logits, [Row(temperature=0.0)] * 4)
    assert made.tokens(4) == [40, 0, 0, 699]


def test_ties_with_the_last_kept_token_are_kept() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]] * 4, device=DEVICE)
    logits[2:] = 0.0
    rows = [Row(top_k=2), Row(top_k=1), Row(top_k=2), Row(top_p=0.4)]
    thresholds = draw(logits, rows).work.thresholds
    assert (logits >= thresholds[:, None]).sum(-1).tolist() == [4, 1, 6, 6]
    logits = torch.tensor([[-0.5, -0.0, 0.0], [-0.0, -0.5, -0.5]], device=DEVICE)
    thresholds = draw(logits, [Row(top_k=1), Row(top_k=1)]).work.thresholds
    assert (logits >= thresholds[:, None]).sum(-1).tolist() == [2, 1]


@pytest.mark.parametrize("dtype, tie", [(torch.bfloat16, -0.5), *([(torch.float32, 0.0)] if ON_GPU else [])], ids=str)
def test_more_ties_than_room(dtype: torch.dtype, tie: float) -> None:
    """800 equal logits below a few better ones: the search ends at the tie itself, even among the tiniest floats."""
    logits = torch.full((6, 1000), tie, device=DEVICE)
    logits[:, ::10] = noise(6, 100, seed=5) + 8.0
    logits[:, 5::10] = -6.0
    logits = logits.to(dtype)
    rows = [
        Row(top_k=300), Row(temperature=2.0, top_p=0.98), Row(top_k=950, top_p=0.9), Row(top_k=120, top_p=0.999),
        Row(top_p=0.999, min_p=1e-5), Row(top_k=990),
    ]  # fmt: skip
    made = draw(logits, rows)
    assert_kept(logits, rows, made.work.thresholds)
    assert_drawn(logits, rows, made.tokens(6))


def test_masked_tokens_are_never_drawn() -> None:
    """Most of the vocabulary at -inf, or at the lowest finite number: with and without filters."""
    settings = [Row(), Row(top_k=5), Row(top_k=50), Row(top_p=0.9), Row(min_p=0.2), Row(top_k=50, top_p=0.5)]
    rows = [Row(**{**vars(row), "seed": seed}) for seed in range(2) for row in settings]
    alive = torch.tensor([0, 17, 300, 301, 555, 899], device=DEVICE)
    for masked in (-math.inf, -1e30):
        logits = torch.full((len(rows), 900), masked, dtype=torch.bfloat16, device=DEVICE)
        logits[:, alive] = noise(len(rows), 6, seed=1, dtype=torch.bfloat16)
        made = draw(logits, rows)
        assert set(made.tokens(len(rows))) <= set(alive.tolist())
        assert_kept(logits, rows, made.work.thresholds)
        assert_drawn(logits, rows, made.tokens(len(rows)))


@pytest.mark.parametrize("row", [Row(temperature=0.0), Row(), Row(top_p=0.9), Row(top_k=3, min_p=0.1)], ids=str)
def test_a_single_finite_logit_is_drawn(row: Row) -> None:
    logits = torch.full((1, 333), -math.inf, device=DEVICE)
    logits[0, 200] = -40.0
    made = draw(logits, [row])
    assert (made.tokens(1), made.flags(1)) == ([200], [0])


@pytest.mark.parametrize("row", [Row(temperature=0.0), Row(), Row(top_p=0.9), Row(top_k=3, min_p=0.1)], ids=str)
def test_rows_without_valid_logits_are_flagged(row: Row) -> None:
    logits = noise(6, 333, seed=11)
    logits[1, 200] = math.nan
    logits[2] = -math.inf
    logits[3, 5] = math.inf
    logits[4] = math.nan
    made = draw(logits, [row] * 6)
    assert made.flags(6) == [0, INVALID, INVALID, INVALID, INVALID, 0]
    assert all(0 <= token < 333 for token in made.tokens(6))
    assert_drawn(logits[[0, 5]], [row] * 2, [made.tokens(6)[i] for i in (0, 5)])


def test_a_draw_commits_its_token() -> None:
    logits = torch.full((6, 64), -5.0, device=DEVICE)
    logits[:, 11] = 50.0
    rows = [
        Row(), Row(stop_ids=[9, 10, 11]), Row(limit=6), Row(limit=7), Row(stop_ids=list(range(12, 40))),
        Row(temperature=0.0, stop_ids=[11]),
    ]  # fmt: skip
    columns = (made := draw(logits, rows)).columns
    assert made.tokens(6) == [11] * 6
    assert made.flags(6) == [0, STOPPED, 0, 0, 0, STOPPED]
    assert columns.last_token.tolist() == [11] * 6 + [-7]
    assert columns.num_tokens.tolist() == [6] * 6 + [0]
    assert columns.active.tolist() == [True, False, False, True, True, False, False]
    assert (made.results[[0, 2]] == -9).all()  # only its own slot is written


def test_rows_in_any_order_with_padding_between() -> None:
    """Draw i belongs to row rows[i]; draws for the padding row write nothing, and ended rows stay ended."""
    rows = [Row(seed=seed, temperature=0.5) for seed in range(5)]
    logits = noise(6, 150, seed=8, scale=2.0)
    logits[3] = math.nan  # a padding row may have any logits
    order = [4, 0, 2, 5, 1, 5]
    for number_type in (torch.int32, torch.int64):
        made = bench(rows, 150)
        made.columns.active[2] = False
        everything = torch.full((SLOTS, 2, 10), -9, dtype=torch.int32, pin_memory=ON_GPU)
        results = everything[:, :, 4:]  # a step in slices writes each after the one before
        numbers = torch.tensor(order, dtype=number_type, device=DEVICE)
        work = workspace(6, 150, DEVICE, **SMALL)
        draw_and_commit(logits, numbers, made.columns, results, made.slot, True, work)
        if ON_GPU:
            torch.cuda.synchronize()
        drawn = results[1, 0].tolist()
        assert (drawn[3], drawn[5]) == (-9, -9)
        assert int((everything != -9).sum()) == 8
        assert_drawn(logits[[0, 1, 2, 4]], [rows[i] for i in (4, 0, 2, 1)], [drawn[i] for i in (0, 1, 2, 4)])
        assert made.columns.last_token.tolist() == [drawn[1], drawn[4], drawn[2], -7, drawn[0], -7]
        assert made.columns.num_tokens.tolist() == [6, 6, 6, 5, 6, 0]
        assert made.columns.active.tolist() == [True, True, False, True, True, False]


def test_commit_alone_writes_what_a_draw_writes() -> None:
    rows = [Row(stop_ids=[3]), Row(limit=6), Row(), Row(stop_ids=[4])]
    made = bench(rows, 10)
    numbers = torch.tensor([0, 1, 3, 4], device=DEVICE)
    tokens = torch.tensor([3, 4, 5, 6], device=DEVICE)
    invalid = torch.tensor([False, True, False, False], device=DEVICE)
    commit(tokens, invalid, numbers, made.columns, made.results, made.slot)
    if ON_GPU:
        torch.cuda.synchronize()
    assert made.tokens(4) == [3, 4, 5, -9]
    assert made.flags(4) == [STOPPED, INVALID, 0, -9]
    assert made.columns.last_token.tolist() == [3, 4, -7, 5, -7]
    assert made.columns.num_tokens.tolist() == [6, 6, 5, 6, 0]
    assert made.columns.active.tolist() == [False, False, True, True, False]
    commit(tokens[:0], invalid[:0], numbers[:0], made.columns, made.results, made.slot)


def test_logits_rows_may_be_strided() -> None:
    rows = mixed()[:7]
    wide = noise(7, 900, seed=21, scale=2.0, dtype=HALF)
    logits = wide[:, :803]
    made = draw(logits, rows)
    assert made.tokens(7) == draw(logits.contiguous(), rows).tokens(7)
    assert_drawn(logits, rows, made.tokens(7))


def test_numbers_match_philox() -> None:
    """Over a flat vocabulary of 1024 the token is the number's first ten bits."""
    seeds = [0, 2**32 - 1, 2**32, 2**63 - 1, -1, -(2**63), -1 - 2**40, 123456789012345]
    places = [(0, 5, 5), (3, 3, 9), (1, 0, 2**31), (2**33, 1, 2**33 + 7)]
    rows = [
        Row(seed=seed, sequence=sequence, prompt_len=prompt, num_tokens=tokens, limit=2**40)
        for seed in seeds
        for sequence, prompt, tokens in places
    ]
    made = draw(torch.zeros(len(rows), 1024, device=DEVICE), rows, filtered=False)
    with np.errstate(over="ignore"):
        wanted = [
            uniform(np.int64(row.seed), np.int64(row.num_tokens - row.prompt_len), np.int64(row.sequence))
            for row in rows
        ]
    assert made.tokens(len(rows)) == [int(number * 1024) for number in wanted]


FREQUENCIES = [
    Row(temperature=0.5), Row(temperature=1.7, top_k=9, top_p=0.9), Row(), Row(top_k=6), Row(top_p=0.8),
    Row(min_p=0.15),
]  # fmt: skip


@pytest.mark.parametrize("row", FREQUENCIES if ON_GPU else FREQUENCIES[1:2], ids=str)
def test_draws_follow_the_distribution(row: Row) -> None:
    draws, vocab = 8192 if ON_GPU else 24, 12
    logits = noise(vocab, seed=1, scale=1.2, dtype=torch.bfloat16)
    rows = [Row(**{**vars(row), "seed": 7919 * i, "num_tokens": 3 + i % 5}) for i in range(draws)]
    made = draw(logits.expand(draws, -1), rows, sizes={"group": 8, "tile": 2, "room": 8})
    counts = np.bincount(made.tokens(draws), minlength=vocab)
    possible = allowed(logits, row).numpy()
    expected = np.where(possible, np.exp(logits.double().cpu().numpy() / row.temperature), 0)
    expected *= draws / expected.sum()
    assert counts[~possible].sum() == 0
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert chi_square < 45, (chi_square, counts, expected)  # at most 11 degrees of freedom: p < 1e-5


def test_a_draw_depends_only_on_its_own_row() -> None:
    rows = mixed()
    logits = noise(len(rows), 603, seed=6, scale=1.5, dtype=HALF)
    made = draw(logits, rows)
    together = made.tokens(len(rows))
    for i in range(0, len(rows), 1 if ON_GPU else 3):
        alone = draw(logits[i : i + 1], rows[i : i + 1])
        assert alone.tokens(1) == together[i : i + 1]
        assert torch.equal(alone.work.thresholds, made.work.thresholds[i : i + 1])


def peaked(count: int, vocab: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Logits like a model's: a bulk that does not matter and a few hundred likely tokens."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, vocab, generator=generator) * 2.0
    best = torch.rand(count, vocab, generator=generator).argsort(-1)[:, :300]
    spread = torch.rand(count, 300, generator=generator).sort(-1, descending=True).values * 14 + 6
    return logits.scatter_(1, best, spread).to(dtype).to(DEVICE)


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU: vocabularies of real models")
@pytest.mark.parametrize("vocab", [151_936, 128_256, 32_000, 50_257])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_vocabularies_of_real_models(vocab: int, dtype: torch.dtype) -> None:
    rows = mixed()
    for kind, logits in (
        ("peaked", peaked(len(rows), vocab, 4, dtype)),
        ("wide", noise(len(rows), vocab, seed=5, scale=3.0, dtype=dtype)),
        ("flat", noise(len(rows), vocab, seed=6, scale=0.5, dtype=dtype)),
    ):
        made = draw(logits, rows)
        assert made.flags(len(rows)) == [0] * len(rows), kind
        assert_kept(logits, rows, made.work.thresholds)
        assert_drawn(logits, rows, made.tokens(len(rows)))
        again = draw(logits.flip(0), rows[::-1])
        assert again.tokens(len(rows)) == made.tokens(len(rows))[::-1], kind


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU: CUDA graphs")
def test_a_graph_draws_with_another_number_each_time() -> None:
    rows = [Row(seed=seed, top_p=0.9) for seed in range(32)]
    logits = peaked(32, 128_256, 9, HALF)
    numbers = torch.arange(32, device=DEVICE)
    eager, made = bench(rows, 128_256), bench(rows, 128_256)
    draw_and_commit(logits, numbers, eager.columns, eager.results, eager.slot, True, eager.work)  # compile first
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        draw_and_commit(logits, numbers, made.columns, made.results, made.slot, True, made.work)
    for slot in (2, 0):
        made.slot.fill_(slot)
        graph.replay()
        torch.cuda.synchronize()
    assert made.columns.num_tokens.tolist() == [7] * 32 + [0]
    assert made.results[2].tolist() == eager.results[1].tolist()
    assert (made.results[1] == -9).all()
    assert made.results[0, 0].tolist() != made.results[2, 0].tolist()  # the next number of every row's stream
