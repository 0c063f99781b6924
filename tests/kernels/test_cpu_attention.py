"""Paged attention on a CPU against a loop over rows and queries in float64."""

from __future__ import annotations

import itertools

import pytest
import torch

from quire.layers.attention.base import AttentionInputs, AttentionSpec
from quire.layers.attention.cpu import CpuPagedAttention

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module")
def attention() -> CpuPagedAttention:
    attention = CpuPagedAttention()
    if not attention.is_native:
        pytest.skip("no C++ compiler on this machine")
    return attention


class Step:
    """Random queries and a random cache for rows given as (query_len, context_len), blocks shuffled."""

    def __init__(
        self,
        rows: list[tuple[int, int]],
        heads: int = 9,
        kv_heads: int = 3,
        dim: int = 64,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        rows = sorted(rows, key=lambda row: row[0] != 1)
        query_lens, contexts = zip(*rows, strict=True)
        counts = [-(-context // block_size) for context in contexts]
        # Two layers in a block, of which this is the second; NaN wherever no row has written.
        self.kv = torch.full((sum(counts) + 1, 2, 2, kv_heads, block_size, dim), float("nan"), dtype=dtype)[:, 1]
        order = (torch.randperm(sum(counts)) + 1).int().split(counts)
        tables = torch.full((len(rows), max(counts) + 2), 1 << 30, dtype=torch.int32)
        self.keys, self.values = [], []
        for row, (blocks, context) in enumerate(zip(order, contexts, strict=True)):
            tables[row, : len(blocks)] = blocks
            at = torch.arange(context)
            key, value = torch.randn(2, context, kv_heads, dim).to(dtype)
            self.kv[blocks.long()[at // block_size], 0, :, at % block_size] = key
            self.kv[blocks.long()[at // block_size], 1, :, at % block_size] = value
            self.keys.append(key), self.values.append(value)
        starts = torch.tensor([0, *query_lens]).cumsum(0)
        self.q = (torch.randn(int(starts[-1]), heads, dim) * 2).to(dtype)
        self.inputs = AttentionInputs(
            slots=torch.empty(0, dtype=torch.int64),
            query_starts=starts.int(),
            context_lens=torch.tensor(contexts, dtype=torch.int32),
            block_tables=tables,
            num_rows=len(rows),
            num_tokens=int(starts[-1]),
            num_decodes=sum(length == 1 for length in query_lens),
            max_query_len=max(query_lens),
            max_context_len=max(contexts),
        )
        self.scale = dim**-0.5

    def expected(
        self,
        window: int | None = None,
        cap: float | None = None,
        sinks: torch.Tensor | None = None,
        slopes: torch.Tensor | None = None,
    ) -> torch.Tensor:
        heads = self.q.shape[1]
        out = torch.empty(self.q.shape, dtype=torch.float64)
        for row, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            first, last = self.inputs.query_starts[row : row + 2].tolist()
            group = heads // keys.shape[1]
            k, v = (x.double().repeat_interleave(group, dim=1).transpose(0, 1) for x in (keys, values))
            scores = self.q[first:last].double().transpose(0, 1) @ k.transpose(1, 2) * self.scale
            position = torch.arange(len(keys) - (last - first), len(keys))[:, None]
            hidden = torch.arange(len(keys)) > position
            if window is not None:
                hidden |= torch.arange(len(keys)) <= position - window
            if cap is not None:
                scores = cap * torch.tanh(scores / cap)
            if slopes is not None:
                scores += slopes.double().view(-1, 1, 1) * (torch.arange(len(keys)) - position)
            scores = scores.masked_fill(hidden, -torch.inf)
            if sinks is not None:
                scores = torch.cat((scores, sinks.double().view(-1, 1, 1).expand(heads, last - first, 1)), -1)
            out[first:last] = (scores.softmax(-1)[..., : len(keys)] @ v).transpose(0, 1)
        return out.flatten(1)

    def check(
        self,
        attention: CpuPagedAttention,
        window: int | None = None,
        cap: float | None = None,
        sinks: torch.Tensor | None = None,
        slopes: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = attention.attend(self.q, self.kv, self.inputs, AttentionSpec(self.scale, window, cap, sinks, slopes))
        tolerance = {torch.float32: 2e-5, torch.bfloat16: 2e-2}[out.dtype]
        assert out.dtype == self.q.dtype
        torch.testing.assert_close(
            out.double(), self.expected(window, cap, sinks, slopes), rtol=tolerance, atol=tolerance
        )
        return out


MIXED = [(1, 1), (1, 16), (1, 300), (1, 17), (5, 5), (40, 40), (3, 90), (64, 301), (1, 33)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 4, 16, 24, 32])
def test_decodes_and_prompts_of_one_step(attention: CpuPagedAttention, block_size: int, dtype: torch.dtype) -> None:
    Step(MIXED, block_size=block_size, dtype=dtype).check(attention)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "heads, kv_heads", [(1, 1), (8, 8), (4, 2), (9, 3), (7, 1), (16, 1), (40, 2), (71, 1), (90, 1)]
)
def test_any_group_of_heads(attention: CpuPagedAttention, heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    Step([(1, 50), (1, 270), (7, 20), (30, 280)], heads, kv_heads, 32, dtype=dtype).check(attention)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 8, 16, 20, 40, 64, 72, 80, 96, 128, 192, 256])
def test_any_head_size(attention: CpuPagedAttention, dim: int, dtype: torch.dtype) -> None:
    Step([(1, 50), (1, 270), (30, 300)], 6, 2, dim, dtype=dtype).check(attention)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 2, 15, 64, 255, 256, 257, 10_000])
def test_windows(attention: CpuPagedAttention, window: int, dtype: torch.dtype) -> None:
    Step([*MIXED, (1, 800), (200, 700)], dtype=dtype).check(attention, window)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("cap", [None, 2.0, 50.0])
def test_soft_caps_and_sinks(
    attention: CpuPagedAttention, window: int | None, cap: float | None, dtype: torch.dtype
) -> None:
    step = Step([*MIXED, (1, 800), (90, 700)], dtype=dtype)
    sinks = torch.linspace(-4, 9, 9).to(dtype)
    sinks[3] = 200  # takes all weight
    for row, (first, last) in enumerate(itertools.pairwise(step.inputs.query_starts.tolist())):
        behind = int(step.inputs.context_lens[row]) - (last - first) - (window or 10_000) + 1
        step.inputs.block_tables[row, : max(0, behind) // 16] = 1 << 30  # stale
    step.check(attention, window, cap, sinks)
    if cap:
        step.check(attention, window, cap)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 20])
def test_slopes(attention: CpuPagedAttention, window: int | None, dtype: torch.dtype) -> None:
    slopes = 2.0 ** -torch.arange(9)
    Step([*MIXED, (1, 800), (90, 700)], dtype=dtype).check(attention, window, slopes=slopes)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_long_row_is_shared_between_threads(attention: CpuPagedAttention, dtype: torch.dtype) -> None:
    Step([(1, 5000)], dtype=dtype).check(attention)
    Step([(6, 4000)], dtype=dtype).check(attention)
    Step([(1, 3000), *[(1, 20)] * 20], dtype=dtype).check(attention)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_long_prompt(attention: CpuPagedAttention, dtype: torch.dtype) -> None:
    Step([(700, 700)], dtype=dtype).check(attention)


def test_large_scores_do_not_overflow(attention: CpuPagedAttention) -> None:
    step = Step([(1, 600), (40, 300)])
    step.q *= 200
    out = attention.attend(step.q, step.kv, step.inputs, AttentionSpec(step.scale))
    assert out.isfinite().all()
    torch.testing.assert_close(out.double(), step.expected(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 100])
def test_a_row_has_the_same_bits_in_any_batch_threads_and_chunking(
    attention: CpuPagedAttention, dtype: torch.dtype, window: int | None
) -> None:
    step = Step([(1, 900), (1, 40), (300, 900)], dtype=dtype)
    whole = step.check(attention, window)
    q, inputs = step.q, step.inputs

    def alone(row: int, first: int, last: int, threads: int) -> torch.Tensor:
        """Queries first to last of a row, as a separate step."""
        begin, end = inputs.query_starts[row : row + 2].tolist()
        count, context = last - first, int(inputs.context_lens[row]) - (end - begin) + last
        part = AttentionInputs(
            slots=inputs.slots,
            query_starts=torch.tensor([0, count], dtype=torch.int32),
            context_lens=torch.tensor([context], dtype=torch.int32),
            block_tables=inputs.block_tables[row : row + 1],
            num_rows=1,
            num_tokens=count,
            num_decodes=int(count == 1),
            max_query_len=count,
            max_context_len=context,
        )
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(threads)
            return attention.attend(q[begin + first : begin + last], step.kv, part, AttentionSpec(step.scale, window))
        finally:
            torch.set_num_threads(before)

    for threads in (1, 2):
        assert torch.equal(alone(0, 0, 1, threads), whole[0:1])
        assert torch.equal(alone(1, 0, 1, threads), whole[1:2])
        for first, last in [(0, 300), (0, 1), (299, 300), (100, 200), (7, 20), (150, 153)]:
            assert torch.equal(alone(2, first, last, threads), whole[2 + first : 2 + last])


def test_padding_rows_stay_inside_their_tables(attention: CpuPagedAttention) -> None:
    step = Step([(1, 40), (1, 16), (4, 30)])
    step.kv[0] = 1
    inputs = step.inputs
    inputs.block_tables[1] = 0
    inputs.context_lens[1] = 1 << 20  # claims far more than its table holds
    out = attention.attend(step.q, step.kv, inputs, AttentionSpec(step.scale))
    expected = step.expected()
    torch.testing.assert_close(out[[0, 2, 3, 4, 5]].double(), expected[[0, 2, 3, 4, 5]], rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(out[1], torch.ones_like(out[1]))


def test_queries_may_be_a_slice_of_a_wider_tensor(attention: CpuPagedAttention) -> None:
    step = Step(MIXED)
    wide = torch.randn(step.q.shape[0], 15, 64)
    wide[:, :9] = step.q
    step.q = wide[:, :9]
    step.check(attention)


def test_float16_goes_to_torch(attention: CpuPagedAttention) -> None:
    step = Step([(1, 40), (8, 30)], dtype=torch.float16)
    step.kv.nan_to_num_(0)
    step.inputs.block_tables[step.inputs.block_tables >= len(step.kv)] = 0
    out = attention.attend(step.q, step.kv, step.inputs, AttentionSpec(step.scale))
    torch.testing.assert_close(out.double(), step.expected(), rtol=1e-2, atol=1e-2)
