"""Prefill attention in Triton against the plain-torch backend."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.kernels.triton_target import DEVICE, HALF, ON_GPU, assert_same_bits
from tests.layers.device_watch import NeverWaits

from quire.kernels.triton.prefill_attention import PrefillTile, plan_tiles, prefill_attention, prefill_tile  # isort: skip
from quire.layers.attention.base import AttentionInputs, AttentionSpec  # isort: skip
from quire.layers.attention.torch_paged import TorchPagedAttention  # isort: skip

SCALE = 0.21
NO_BLOCK = 1 << 30
"""Entries after a row's blocks in its table: must not be read."""


@dataclass
class Case:
    """Random rows over a shuffled cache whose unused slots are NaN."""

    lens: list[tuple[int, int]]
    """(context, query) of each row."""
    q: torch.Tensor
    kv: torch.Tensor
    tables: torch.Tensor
    rows: torch.Tensor

    @property
    def query_starts(self) -> torch.Tensor:
        return torch.tensor([0, *(n for _, n in self.lens)], device=DEVICE).cumsum(0).int()

    @property
    def context_lens(self) -> torch.Tensor:
        return torch.tensor([n for n, _ in self.lens], dtype=torch.int32, device=DEVICE)

    def expected(self, window: int | None, *more: Any) -> torch.Tensor:
        tables = self.tables[self.rows.long()]
        inputs = AttentionInputs(
            slots=torch.empty(0), query_starts=self.query_starts, context_lens=self.context_lens,
            block_tables=tables.masked_fill(tables == NO_BLOCK, 0), num_rows=len(self.lens), num_tokens=len(self.q),
            num_decodes=0, max_query_len=max(n for _, n in self.lens), max_context_len=max(n for n, _ in self.lens),
        )  # fmt: skip
        spec = AttentionSpec(SCALE, window, *more)
        return TorchPagedAttention().attend(self.q.float(), self.kv.float(), inputs, spec)

    def attend(
        self, window: int | None, first_row: int = 0, tile: PrefillTile | None = None, more: tuple = ()
    ) -> torch.Tensor:
        tokens, heads, dim = self.q.shape
        tile = tile or prefill_tile(dim, self.q.element_size())
        out = torch.full((tokens, heads * dim), torch.nan, dtype=self.q.dtype, device=DEVICE)
        starts, contexts = self.query_starts, self.context_lens
        tile_tokens = tile.tokens(heads // self.kv.shape[2])
        with NeverWaits():
            tiles = plan_tiles(starts, contexts, self.rows, first_row, len(self.lens), tokens, tile_tokens)
            prefill_attention(self.q, self.kv, out, self.tables, tiles, SCALE, window, tile, *more)
        return out


def make_case(lens: list[tuple[int, int]], heads: int, kv_heads: int, dim: int, block: int, dtype: torch.dtype) -> Case:
    blocks_of = [-(-n // block) for n, _ in lens]
    total = sum(blocks_of) + 2
    cache = torch.full((total, 2, 2, kv_heads, block, dim), torch.nan, dtype=dtype, device=DEVICE)
    kv = cache[:, 1]
    order = torch.randperm(total).int()
    rows = torch.randperm(len(lens) + 3)[: len(lens)]
    tables = torch.full((len(lens) + 4, max(blocks_of) + len(lens) % 2), NO_BLOCK, dtype=torch.int32)
    for row, (length, _), count in zip(rows.tolist(), lens, blocks_of, strict=True):
        mine, order = order[:count], order[count:]
        tables[row, :count] = mine
        filled = torch.full((2, kv_heads, count * block, dim), torch.nan)
        filled[:, :, :length] = torch.randn(2, kv_heads, length, dim)
        kv[mine.long().to(DEVICE)] = filled.unflatten(2, (count, block)).permute(2, 0, 1, 3, 4).to(kv)
    qkv = torch.randn(sum(n for _, n in lens), heads + 2 * kv_heads, dim).to(DEVICE, dtype)
    return Case(lens, qkv[:, :heads], kv, tables.to(DEVICE), rows.to(DEVICE, torch.int32))


def error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    return ((ours.float() - reference).norm() / reference.norm()).item()


# A prompt, a chunk with context before it, one token, a prompt shorter than a tile, a long context with few queries.
MIXED = [(40, 40), (75, 30), (50, 1), (3, 3), (97, 5)]
CASES = [
    (MIXED, 4, 2, 64, 16, None),
    (MIXED, 2, 2, 64, 8, None),
    (MIXED, 3, 1, 64, 16, 20),
    ([(33, 33), (64, 10)], 8, 1, 64, 32, None),
    ([(70, 40)], 8, 2, 16, 64, 33),
    ([(45, 45), (30, 2)], 2, 1, 80, 16, 7),
    ([(20, 18)], 2, 1, 128, 16, None),
    ([(90, 60)], 2, 2, 64, 16, 1),
]
if ON_GPU:
    LONG = [(2048, 2048), (4096, 512), (1000, 333), (129, 129), (777, 1), (128, 128), (2500, 7)]
    CASES += [(LONG, 32, 8, 128, block, window) for block in (8, 16, 32, 256) for window in (None, 500)]
    HEADS = [(9, 3, 64), (8, 8, 80), (8, 8, 96), (8, 4, 192), (8, 4, 256), (16, 1, 128), (14, 2, 64), (5, 1, 128)]
    CASES += [(LONG, *heads, 16, None) for heads in HEADS]
    CASES += [([(n, n) for n in range(1, 300)], 16, 8, 128, 16, None)]


@pytest.mark.parametrize(("lens", "heads", "kv_heads", "dim", "block", "window"), CASES)
def test_float32(
    lens: list[tuple[int, int]], heads: int, kv_heads: int, dim: int, block: int, window: int | None
) -> None:
    case = make_case(lens, heads, kv_heads, dim, block, torch.float32)
    assert error(case.attend(window), case.expected(window)) < 1e-5


@pytest.mark.parametrize(("lens", "heads", "kv_heads", "dim", "block", "window"), CASES[:3] + CASES[8:])
def test_half_precision(
    lens: list[tuple[int, int]], heads: int, kv_heads: int, dim: int, block: int, window: int | None
) -> None:
    case = make_case(lens, heads, kv_heads, dim, block, HALF)
    assert error(case.attend(window), case.expected(window)) < 3 * torch.finfo(HALF).eps


@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize("window", [None, 20])
def test_the_product_with_v_may_run_one_step_late(skewed: bool, window: int | None) -> None:
    case = make_case(MIXED, 4, 2, 64, 16, HALF)
    tile = PrefillTile(128, 64, 8, 2, skewed) if ON_GPU else PrefillTile(16, 16, 4, 1, skewed)
    assert error(case.attend(window, tile=tile), case.expected(window)) < 3 * torch.finfo(HALF).eps


def test_blocks_outside_the_window_may_be_freed() -> None:
    case = make_case([(110, 20)], 4, 2, 64, 16, torch.float32)
    wanted = case.expected(30)
    gone = case.tables[case.rows[0], : (110 - 20 - 30 + 1) // 16]
    case.kv[gone.long()] = torch.nan
    gone.fill_(NO_BLOCK)
    assert error(case.attend(30), wanted) < 1e-5


def test_rows_before_the_first_are_not_written() -> None:
    case = make_case([(30, 1), (12, 1), (40, 21), (7, 7)], 4, 2, 64, 16, torch.float32)
    ours = case.attend(None, first_row=2)
    assert ours[:2].isnan().all()
    assert error(ours[2:], case.expected(None)[2:]) < 1e-5


@pytest.mark.parametrize("window", [None, 30])
def test_chunking_a_prompt_changes_no_bit(window: int | None) -> None:
    length = 700 if ON_GPU else 90
    case = make_case([(length, length), (33, 20)], 4, 2, 64, 16, HALF)
    whole = case.attend(window)[:length]
    for begin, end in [(0, 37), (37, 38), (38, length)]:
        chunk = Case([(end, end - begin)], case.q[begin:end], case.kv, case.tables, case.rows[:1])
        assert_same_bits(chunk.attend(window), whole[begin:end])


@pytest.mark.parametrize(("num_rows", "tile_tokens"), [(5, 1), (30, 21), (270, 8)])
def test_the_plan_covers_every_token_once_and_the_longest_rows_first(num_rows: int, tile_tokens: int) -> None:
    queries = torch.randint(0, 50, (num_rows,)).tolist()
    contexts = (torch.randint(50, 900, (num_rows,))).tolist()
    rows = torch.randperm(num_rows + 100)[:num_rows].tolist()
    starts = [0, *itertools.accumulate(queries)]
    first_row = 2
    tensors = (torch.tensor(numbers, dtype=torch.int32, device=DEVICE) for numbers in (starts, contexts, rows))
    tiles = plan_tiles(*tensors, first_row, num_rows, starts[-1], tile_tokens).tolist()
    used = [tile for tile in tiles if tile[0] >= 0]
    assert all(tile[0] == -1 for tile in tiles[len(used) :])
    seen = []
    for batch_row, first, count, position in used:
        row = rows.index(batch_row)
        assert 0 < count <= tile_tokens
        assert position == contexts[row] - queries[row] + first - starts[row]
        seen += [(row, first + j) for j in range(count)]
    assert sorted(seen) == [(row, t) for row in range(first_row, num_rows) for t in range(starts[row], starts[row + 1])]
    order = [contexts[rows.index(tile[0])] for tile in used]
    assert order == sorted(order, reverse=True)


@pytest.mark.parametrize("skewed", [True, False])
@pytest.mark.parametrize("cap, sunk", [(None, True), (2.0, False), (30.0, True)])
@pytest.mark.parametrize("window", [None, 16])
def test_soft_caps_sinks_and_stale_tables(window: int | None, cap: float | None, sunk: bool, skewed: bool) -> None:
    case = make_case([(40, 40), (75, 3), (1, 1), (90, 20)], 6, 2, 32, 16, torch.float32)
    sinks = torch.tensor([-3.0, 0.5, 40.0, 2.0, -90.0, 1.0], device=DEVICE) if sunk else None
    reference = case.expected(window, cap, sinks)
    if window is not None:
        assert (reference - case.expected(window + 1, cap, sinks)).abs().max() > 0.01
        for line, (context, queries) in zip(case.rows.tolist(), case.lens, strict=True):
            case.tables[line, : max(0, context - queries - window + 1) // 16] = NO_BLOCK
    tile = PrefillTile(32, 32, 4, 1, skewed)
    assert error(case.attend(window, tile=tile, more=(cap, sinks)), reference) < 1e-5


@pytest.mark.parametrize("window, cap, skewed", [(None, None, True), (20, 30.0, True), (None, None, False)])
def test_slopes(window: int | None, cap: float | None, skewed: bool) -> None:
    case = make_case([(40, 40), (75, 3), (90, 20)], 6, 2, 32, 16, torch.float32)
    slopes = 2.0 ** -torch.arange(6, device=DEVICE)
    out = case.attend(window, tile=PrefillTile(32, 32, 4, 1, skewed), more=(cap, None, slopes))
    assert error(out, case.expected(window, cap, None, slopes)) < 1e-5
