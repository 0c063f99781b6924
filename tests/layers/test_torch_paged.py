"""Paged attention in torch against a loop over queries in float64."""

from __future__ import annotations

import pytest
import torch

from quire.layers.attention import torch_paged
from quire.layers.attention.base import AttentionInputs, AttentionSpec
from quire.layers.attention.torch_paged import TorchPagedAttention
from tests.layers.device_watch import NeverWaits

BLOCK = 4
DIM = 8
# (context length, query length): two decodes, a whole prompt, a chunk, a long one, another chunk.
ROWS = [(1, 1), (13, 1), (6, 6), (11, 3), (25, 17), (9, 2)]


class Case:
    """Random rows over shuffled blocks; every slot that is not a row's own holds NaN."""

    def __init__(
        self, heads: int, kv_heads: int, rows: list[tuple[int, int]], dtype: torch.dtype, slack: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(heads + kv_heads)
        self.rows = rows
        self.keys = [torch.randn(n, kv_heads, DIM, generator=generator).to(dtype) for n, _ in rows]
        self.values = [torch.randn(n, kv_heads, DIM, generator=generator).to(dtype) for n, _ in rows]
        total = sum(queries for _, queries in rows)
        self.q = 2 * torch.randn(total, heads, DIM, generator=generator).to(dtype)
        blocks = [-(-n // BLOCK) for n, _ in rows]
        order = (torch.randperm(sum(blocks), generator=generator) + 1).tolist()
        pool = torch.full((sum(blocks) + 1, 2, 2, kv_heads, BLOCK, DIM), torch.nan, dtype=dtype)
        self.kv = pool[:, 1]
        tables = torch.zeros(len(rows), max(blocks) + 1 + slack, dtype=torch.int32)
        for row, (length, _) in enumerate(rows):
            for position in range(length):
                if position % BLOCK == 0:
                    tables[row, position // BLOCK] = order.pop()
                block = tables[row, position // BLOCK]
                self.kv[block, 0, :, position % BLOCK] = self.keys[row][position]
                self.kv[block, 1, :, position % BLOCK] = self.values[row][position]
        starts = torch.tensor([0, *(queries for _, queries in rows)]).cumsum(0)
        self.inputs = AttentionInputs(
            slots=torch.zeros(total, dtype=torch.int64),
            query_starts=starts.int(),
            context_lens=torch.tensor([n for n, _ in rows], dtype=torch.int32),
            block_tables=tables,
            num_rows=len(rows),
            num_tokens=total,
            num_decodes=next((i for i, (_, queries) in enumerate(rows) if queries != 1), len(rows)),
            max_query_len=max(queries for _, queries in rows) + slack,
            max_context_len=max(n for n, _ in rows) + slack,
        )

    def exact(
        self, scale: float, window: int | None, cap: float | None = None, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        heads, kv_heads = self.q.shape[1], self.kv.shape[2]
        outputs, token = [], 0
        for (length, queries), keys, values in zip(self.rows, self.keys, self.values, strict=True):
            for position in range(length - queries, length):
                seen = slice(max(0, position + 1 - window) if window else 0, position + 1)
                for head in range(heads):
                    shared = head // (heads // kv_heads)
                    scores = keys[seen, shared].double() @ self.q[token, head].double() * scale
                    if cap is not None:
                        scores = cap * torch.tanh(scores / cap)
                    top = scores.max() if sinks is None else torch.maximum(scores.max(), sinks[head].double())
                    weights = (scores - top).exp()
                    total = weights.sum() + (0 if sinks is None else (sinks[head].double() - top).exp())
                    outputs.append(weights / total @ values[seen, shared].double())
                token += 1
        return torch.stack(outputs).view(token, -1)


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (9, 3), (5, 1)])
def test_mixed_rows(heads: int, kv_heads: int, window: int | None) -> None:
    case = Case(heads, kv_heads, ROWS, torch.float32)
    ours = TorchPagedAttention().attend(case.q, case.kv, case.inputs, AttentionSpec(0.3, window))
    torch.testing.assert_close(ours.double(), case.exact(0.3, window), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [ROWS[:2], ROWS[2:], [(7, 7)], [(30, 1)]], ids=["decodes", "chunks", "prompt", "one"])
def test_rows_of_one_kind(rows: list[tuple[int, int]]) -> None:
    case = Case(4, 2, rows, torch.float32)
    ours = TorchPagedAttention().attend(case.q, case.kv, case.inputs, AttentionSpec(0.3))
    torch.testing.assert_close(ours.double(), case.exact(0.3, None), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_softmax_and_sums_are_float32_whatever_the_cache(dtype: torch.dtype) -> None:
    case = Case(4, 2, ROWS, dtype)
    ours = TorchPagedAttention().attend(case.q, case.kv, case.inputs, AttentionSpec(0.3))
    assert ours.dtype == dtype
    one_rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(ours.double(), case.exact(0.3, None), rtol=one_rounding, atol=one_rounding)


@pytest.mark.parametrize("limit", [1, 700, 5000])
def test_groups_and_spans_change_nothing(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_paged, "_MAX_ELEMENTS", limit)
    case = Case(4, 2, ROWS, torch.float32)
    ours = TorchPagedAttention().attend(case.q, case.kv, case.inputs, AttentionSpec(0.3, 7))
    torch.testing.assert_close(ours.double(), case.exact(0.3, 7), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("longest", [40, 1000])
def test_the_bounds_may_be_loose(longest: int) -> None:
    case = Case(4, 2, ROWS, torch.float32, slack=3 * BLOCK)
    case.inputs.max_context_len = longest
    ours = TorchPagedAttention().attend(case.q, case.kv, case.inputs, AttentionSpec(0.3))
    torch.testing.assert_close(ours.double(), case.exact(0.3, None), rtol=1e-5, atol=1e-5)


def test_an_inactive_row_yields_no_nan() -> None:
    case = Case(4, 2, [(5, 1), (8, 1)], torch.float32)
    case.inputs.context_lens[1] = 0
    ours = TorchPagedAttention().attend(case.q, case.kv, case.inputs, AttentionSpec(0.3))
    assert ours.isfinite().all()
    torch.testing.assert_close(ours[:1].double(), case.exact(0.3, None)[:1], rtol=1e-5, atol=1e-5)


def test_nothing_waits_for_the_device() -> None:
    case = Case(4, 2, ROWS, torch.float32)
    with NeverWaits():
        TorchPagedAttention().attend(case.q, case.kv, case.inputs, AttentionSpec(0.3, 5))


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("sunk", [False, True])
def test_soft_caps_and_sinks(window: int | None, cap: float | None, sunk: bool) -> None:
    case = Case(4, 2, ROWS, torch.float32)
    sinks = torch.tensor([-3.0, 0.5, 40.0, 2.0]) if sunk else None
    ours = TorchPagedAttention().attend(case.q, case.kv, case.inputs, AttentionSpec(0.3, window, cap, sinks))
    torch.testing.assert_close(ours.double(), case.exact(0.3, window, cap, sinks), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [1, 4, 5])
def test_blocks_behind_the_window_are_not_read(window: int) -> None:
    case = Case(4, 2, ROWS, torch.float32)
    for row, (length, queries) in enumerate(ROWS):
        case.inputs.block_tables[row, : max(0, length - queries - window + 1) // BLOCK] = 1 << 30
    ours = TorchPagedAttention().attend(case.q, case.kv, case.inputs, AttentionSpec(0.3, window))
    torch.testing.assert_close(ours.double(), case.exact(0.3, window), rtol=1e-5, atol=1e-5)
    assert (case.exact(0.3, window) - case.exact(0.3, window + 1)).abs().max() > 0.1
