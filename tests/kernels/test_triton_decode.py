"""Decode attention in Triton against the plain-torch backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.triton_target import DEVICE, HALF, ON_GPU

from quire.kernels.triton.decode_attention import DecodeAttention, DecodeTile  # isort: skip
from quire.layers.attention.base import AttentionInputs, AttentionSpec  # isort: skip
from quire.layers.attention.torch_paged import TorchPagedAttention  # isort: skip

SMALL = None if ON_GPU else DecodeTile(16, 4, 1, 2)


def make_case(lens: list[int], heads: int, kv_heads: int, dim: int, block: int, dtype: torch.dtype) -> dict:
    """Random rows over a shuffled cache whose unused slots are NaN."""
    blocks_of = [-(-max(n, 1) // block) for n in lens]
    layers, total = 2, sum(blocks_of) + 3
    cache = torch.full((total, layers, 2, kv_heads, block, dim), float("nan"), dtype=dtype, device=DEVICE)
    kv = cache[:, 1]
    order = (torch.randperm(total - 1) + 1).tolist()
    batch_rows = torch.randperm(len(lens) + 4)[: len(lens)]
    tables = torch.zeros(len(lens) + 5, max(blocks_of) + 2, dtype=torch.int32)
    for row, n in zip(batch_rows.tolist(), lens, strict=True):
        mine = [order.pop() for _ in range(-(-n // block))]
        tables[row, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
        for i, number in enumerate(mine):
            used = min(block, n - i * block)
            kv[number, :, :, :used] = torch.randn(2, kv_heads, used, dim, device=DEVICE).to(dtype)
    qkv = torch.randn(len(lens), heads + 2 * kv_heads, dim, device=DEVICE).to(dtype)
    return {
        "q": qkv[:, :heads], "kv": kv, "tables": tables.to(DEVICE), "rows": batch_rows.to(DEVICE),
        "lens": torch.tensor(lens, dtype=torch.int32, device=DEVICE),
    }  # fmt: skip


def expected(case: dict, scale: float, window: int | None, *more: Any) -> torch.Tensor:
    lens, rows = case["lens"], len(case["lens"])
    inputs = AttentionInputs(
        slots=torch.empty(0), query_starts=torch.arange(rows + 1, dtype=torch.int32, device=DEVICE),
        context_lens=lens, block_tables=case["tables"][case["rows"].long()], num_rows=rows, num_tokens=rows,
        num_decodes=rows, max_query_len=1, max_context_len=int(lens.max()),
    )  # fmt: skip
    spec = AttentionSpec(scale, window, *more)
    return TorchPagedAttention().attend(case["q"].float(), case["kv"].float(), inputs, spec)


def attend(case: dict, scale: float, window: int | None, max_rows: int = 32, more: tuple = ()) -> torch.Tensor:
    rows, heads, dim = case["q"].shape
    kernel = DecodeAttention(
        heads, case["kv"].shape[2], dim, max_rows, case["q"].dtype, torch.device(DEVICE), tile=SMALL
    )
    out = torch.full((rows, heads * dim), float("nan"), dtype=case["q"].dtype, device=DEVICE)
    for _ in range(2):  # the second run uses the counters as the first left them
        plan = kernel.plan(case["lens"], case["rows"], rows, window)
        out.fill_(float("nan"))  # another launch must come between the two
        kernel.attend(
            case["q"], case["kv"], out, case["tables"], case["rows"], case["lens"], plan, rows, scale, window, None,
            *more,
        )  # fmt: skip
    return out


def error(out: torch.Tensor, reference: torch.Tensor) -> float:
    return ((out.float() - reference).norm() / reference.norm()).item()


CASES = [
    ([5], 4, 2, 64, 16, None),
    ([70, 1, 16, 33], 4, 2, 64, 16, None),
    ([200, 3], 2, 2, 64, 8, None),
    ([17, 100, 64], 6, 2, 64, 16, None),
    ([40, 90], 4, 4, 80, 16, None),
    ([100, 20, 64], 4, 2, 64, 16, 24),
    ([130], 8, 1, 64, 32, 50),
]
if ON_GPU:
    CASES += [
        ([4000, 1, 700, 33, 90, 2048], 32, 8, 128, 16, None),
        (list(range(1, 257)), 16, 8, 128, 16, None),
        ([100_000], 32, 8, 128, 16, None),
        ([3000, 20, 1], 32, 8, 128, 16, 1024),
        ([500, 700], 16, 16, 256, 16, None),
        ([500, 700], 12, 4, 192, 16, None),
        ([500, 700, 31], 9, 3, 64, 16, None),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("lens, heads, kv_heads, dim, block, window", CASES)
def test_equals_the_torch_backend(
    lens: list[int], heads: int, kv_heads: int, dim: int, block: int, window: int | None, dtype: torch.dtype,
) -> None:  # fmt: skip
    case = make_case(lens, heads, kv_heads, dim, block, dtype)
    out = attend(case, dim**-0.5, window, max_rows=max(32, len(lens)))
    assert error(out, expected(case, dim**-0.5, window)) < (1e-5 if dtype == torch.float32 else 5e-3)


@pytest.mark.parametrize("ended", [[1], [0, 1], [1, 2], [3], [0, 1, 2, 3]])
def test_ended_rows_are_skipped_and_affect_no_other(ended: list[int]) -> None:
    case = make_case([30, 9, 50, 41], 4, 2, 64, 16, torch.float32)
    reference = expected(case, 0.125, None)
    case["lens"][ended] = 0
    out = attend(case, 0.125, None)
    others = [i for i in range(4) if i not in ended]
    assert out[ended].isnan().all()
    assert not others or error(out[others], reference[others]) < 1e-5


@pytest.mark.parametrize("cap, sunk", [(None, True), (2.0, False), (30.0, True)])
@pytest.mark.parametrize("window", [None, 16, 17])
def test_soft_caps_sinks_and_stale_tables(window: int | None, cap: float | None, sunk: bool) -> None:
    case = make_case([130, 16, 33, 17, 1], 6, 2, 32, 16, torch.float32)
    sinks = torch.tensor([-3.0, 0.5, 40.0, 2.0, -90.0, 1.0], device=DEVICE) if sunk else None
    reference = expected(case, 0.3, window, cap, sinks)
    if window is not None:
        assert (reference - expected(case, 0.3, window + 1, cap, sinks)).abs().max() > 0.01
        for line, length in zip(case["rows"].tolist(), case["lens"].tolist(), strict=True):
            case["tables"][line, : max(0, length - window) // 16] = 1 << 20
    assert error(attend(case, 0.3, window, more=(cap, sinks)), reference) < 1e-5


@pytest.mark.parametrize("window, cap", [(None, None), (20, 30.0)])
def test_slopes(window: int | None, cap: float | None) -> None:
    case = make_case([130, 16, 33, 1], 6, 2, 32, 16, torch.float32)
    slopes = 2.0 ** -torch.arange(6, device=DEVICE)
    out = attend(case, 0.3, window, more=(cap, None, slopes))
    assert error(out, expected(case, 0.3, window, cap, None, slopes)) < 1e-5


@pytest.mark.parametrize("heads, kv_heads", [(6, 2), (4, 4), (8, 1)])
@pytest.mark.parametrize(
    "window, cap, sunk, sloped", [(None, None, True, False), (24, 30.0, True, False), (None, 2.0, False, True)]
)
def test_rows_of_several_queries(
    heads: int, kv_heads: int, window: int | None, cap: float | None, sunk: bool, sloped: bool
) -> None:  # fmt: skip
    """Rows of 1 to 5 queries, an ended one with more among them."""
    widths, lens = [3, 1, 5, 20, 4, 2, 5], [130, 16, 33, 0, 70, 2, 5]
    case = make_case(lens, heads, kv_heads, 32, 16, torch.float32)
    starts = torch.tensor([0, *widths], device=DEVICE).cumsum(0).int()
    q = torch.randn(sum(widths), heads, 32, device=DEVICE)
    sinks = torch.randn(heads, device=DEVICE) * 3 if sunk else None
    slopes = 2.0 ** -torch.arange(heads, device=DEVICE) if sloped else None
    kept = torch.tensor([i for i, n in enumerate(lens) if n], device=DEVICE)
    tokens = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in kept.tolist()]).to(DEVICE)
    inputs = AttentionInputs(
        slots=torch.empty(0), query_starts=torch.tensor([0, *(widths[i] for i in kept)], device=DEVICE).cumsum(0).int(),
        context_lens=case["lens"][kept], block_tables=case["tables"][case["rows"][kept]], num_rows=len(kept),
        num_tokens=len(tokens), num_decodes=0, max_query_len=5, max_context_len=130,
    )  # fmt: skip
    wanted = TorchPagedAttention().attend(q[tokens], case["kv"], inputs, AttentionSpec(0.3, window, cap, sinks, slopes))
    if window is not None:
        for line, length, width in zip(case["rows"].tolist(), lens, widths, strict=True):
            case["tables"][line, : max(0, length - width + 1 - window) // 16] = 1 << 20
    kernel = DecodeAttention(heads, kv_heads, 32, 8, torch.float32, torch.device(DEVICE), tile=SMALL, queries=8)
    out = torch.full((len(q), heads * 32), torch.nan, device=DEVICE)
    for _ in range(2):
        plan = kernel.plan(case["lens"], case["rows"], len(lens), window, None, starts)
        out.fill_(torch.nan)
        kernel.attend(
            q, case["kv"], out, case["tables"], case["rows"], case["lens"], plan, len(lens), 0.3, window, None, cap,
            sinks, slopes, starts,
        )  # fmt: skip
        assert error(out[tokens], wanted) < 1e-5 and out.isnan().any(1).sum() == 20
