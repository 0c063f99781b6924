"""Absorbed latent attention over the paged cache, for rows of one to eight query tokens: persistent, balanced programs.

As in `decode_attention.py`, the tiles of all rows form one list and every program takes an equal range of it.
All heads of a token read the same vectors, so they are rows of one matrix: a tile [TILE, rank + rope] is read once and
serves as keys and, its first `rank` columns, as values. A row that several programs share leaves a partial result of
each; the product with the values' half of `kv_b_proj`, which follows in any case, merges them (`products.py`).

Bytes: context * (rank + rope) values a row, for up to 64 query heads; operations: 2 * (2 * rank + rope) per head and
cached token. With 16 heads that is 30 operations a byte: bound by memory. With 128 it is 240, of which an H200 can do
some 200: bound by the tensor cores.

With few heads the products are computed transposed: WGMMA multiplies 64 rows by any multiple of 8 columns, so the
tokens take the side of 64. The accumulator of 64 heads, [64, 512] in float32, is half of a multiprocessor's registers:
more heads are several tiles of heads.
"""

# ruff: noqa: N803, N806

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from quire.kernels.triton.launch import INTERPRETED, arch, compiles_only, gdc_launch_dependents, gdc_wait, num_sms, pdl

logger = logging.getLogger(__name__)

LOG2_E = 1.4426950408889634
PLANNED_AT_ONCE = 32
HEADER = 8
ENTRY = 8
"""Integers of an entry: row, tile of heads, tile, number of tiles, the row's length, its line in the block tables."""
HEADER_SIZE: tl.constexpr = tl.constexpr(HEADER)
ENTRY_SIZE: tl.constexpr = tl.constexpr(ENTRY)
MAX_QUERY_ROWS = 64
"""Heads times queries of a program."""


@dataclass(frozen=True)
class LatentTile:
    """Tokens per tile, warps, pipeline stages, programs per multiprocessor."""

    tokens: int
    warps: int
    stages: int
    programs: int = 1
    transposed: bool = False
    """Tokens are the rows of the products, heads their columns."""
    min_tiles: int = 1
    """Tiles per program, at least."""
    gluon: bool = False
    """A kernel of `hopper.py`: 64 tokens, 2 stages, 8 warps (4 if transposed)."""


USE_GLUON = True
"""Whether the kernels of `hopper.py` are used where they apply."""


@functools.cache
def _gluon_works(tile: LatentTile) -> bool:
    """Whether a kernel of `hopper.py` compiles here and computes the right thing, tried once on two short rows.

    Gluon is experimental, and no interpreter runs it in tests: with another Triton it may do neither.
    """
    if compiles_only():
        return True  # a process that compiles ahead: it has no device to try it on
    from quire.kernels.triton.latent.products import absorb, values_of_rows

    device, dtype = torch.device("cuda", torch.cuda.current_device()), torch.bfloat16
    heads = 16 if tile.transposed else 64
    generator = torch.Generator(device).manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=dtype)

    try:
        kernel = LatentDecode(heads, 128, 512, 64, 2, dtype, device, tile=tile)
        q, up, kv = random(2, heads, 192), random(heads, 256, 512) * 512**-0.5, random(24, 16, 576)
        tables = torch.arange(48, dtype=torch.int32, device=device).view(2, 24) % 24
        lens, rows = (torch.tensor(numbers, dtype=torch.int32, device=device) for numbers in ([333, 7], [0, 1]))
        plan, absorbed = kernel.plan(lens, rows, 2), absorb(q, up, 128)
        kernel.attend(q, absorbed, kv, tables, rows, lens, plan, 0.07)
        out = q.new_empty(2, heads * 128)
        values_of_rows(absorbed, up, out, lens, plan, kernel, 128, 2)
        wide, keys, values = kv.flatten(0, 1).float(), up[:, :128].float(), up[:, 128:].float()
        for row, length in enumerate((333, 7)):
            cached = wide[:length]
            scores = torch.einsum("hn,hnr,tr->ht", q[row, :, :128].float(), keys, cached[:, :512])
            scores += torch.einsum("hr,tr->ht", q[row, :, 128:].float(), cached[:, 512:])
            expected = torch.einsum("ht,tr,hvr->hv", (scores * 0.07).softmax(-1), cached[:, :512], values).flatten()
            error = float((out[row].float() - expected).norm() / expected.norm())
            if not error < 0.03:
                raise ValueError(f"its results are off by {error:.1%}")
    except Exception as error:
        logger.warning("a kernel of latent attention is not used, a slower one replaces it: %s", error)
        return False
    return True


@functools.cache
def latent_tile(query_rows: int, itemsize: int, rank: int = 512, rope: int = 64) -> LatentTile:
    """The tile shape for this many heads times queries; found with benchmarks/gpu/latent_attention.py on an H200."""
    if INTERPRETED:
        return LatentTile(16, 4, 1, 2)
    if itemsize == 4:
        return LatentTile(16, 4, 2)
    if USE_GLUON and arch() == 90 and (rank, rope) == (512, 64) and not 16 < query_rows <= 32:
        few = query_rows <= 16
        tile = LatentTile(64, 4 if few else 8, 2, transposed=few, gluon=True)
        if _gluon_works(tile):
            return tile
    if query_rows <= 16:
        return LatentTile(32, 4, 5, 2)
    if query_rows <= 32:
        return LatentTile(32, 8, 5, transposed=True)
    return LatentTile(32, 8, 5)


@triton.jit(do_not_specialize=["num_rows"])
def _plan(
    lens, rows, plan, begins, num_rows, programs, HEAD_TILES: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr, MIN_TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """For each program: the row, head tile and tile its range begins at, and its number of tiles; for each row, where
    its tiles begin in the list."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    index = tl.arange(0, ROWS)
    length = tl.load(lens + index, mask=index < num_rows, other=0)
    tiles = tl.where(index < num_rows, (length + TILE - 1) // TILE, 0)
    ends = tl.cumsum(tiles, 0) * HEAD_TILES
    total = tl.sum(tiles, 0) * HEAD_TILES
    p = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    each = tl.maximum((total + programs - 1) // programs, MIN_TILES)
    begin = p * each
    count = tl.minimum(each, total - begin)
    passed = ends[None, :] <= begin[:, None]
    row = tl.sum(passed.to(tl.int32), 1)
    offset = begin - tl.max(tl.where(passed, ends[None, :], 0), 1)
    own = tl.maximum(tl.sum(tl.where(index[None, :] == row[:, None], tiles[None, :], 0), 1), 1)
    here = (begin < total) & (count > 0)
    entry = plan + HEADER_SIZE + p * ENTRY_SIZE
    tl.store(entry, row)
    tl.store(entry + 1, offset // own)
    tl.store(entry + 2, offset % own)
    tl.store(entry + 3, tl.where(here, count, 0))
    tl.store(entry + 4, tl.load(lens + row, mask=here, other=0))
    tl.store(entry + 5, tl.load(rows + row, mask=here, other=0).to(tl.int32))
    if tl.program_id(0) == 0:
        tl.store(plan, each)
        tl.store(begins + index, ends - tiles * HEAD_TILES, mask=index < num_rows)


@triton.jit
def load_queries(q, absorbed, token, head, there, stride_token, stride_head, HEADS: tl.constexpr, NOPE: tl.constexpr,
                 RANK: tl.constexpr, RANK_P2: tl.constexpr, ROPE: tl.constexpr, ROPE_P2: tl.constexpr):  # fmt: skip
    """(absorbed part [rows, RANK_P2], rotated part [rows, ROPE_P2]) of queries of these tokens and heads."""
    d = tl.arange(0, RANK_P2)[None, :]
    e = tl.arange(0, ROPE_P2)[None, :]
    lines = (token * HEADS + head)[:, None] * RANK
    qc = tl.load(absorbed + lines + d, mask=there[:, None] & (d < RANK), other=0.0)
    at = (token * stride_token + head * stride_head)[:, None] + NOPE
    qr = tl.load(q + at + e, mask=there[:, None] & (e < ROPE), other=0.0)
    return qc, qr


@triton.jit
def attend_latents(
    qc, qr, kv, table, begin, end, length, visible_to, scale, stride_block,
    RANK: tl.constexpr, ROPE: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, TRANSPOSED: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Online softmax of queries over cached tokens begin to end, of which those before `length` exist: (best score,
    sum of weights, sum of latents, transposed if so). `visible_to`: with CAUSAL, the last position each query sees."""
    # A loop that may be empty would make ptxas serialize every WGMMA: see `_prefill` in prefill_attention.py.
    tl.assume(begin < end)
    M: tl.constexpr = qc.shape[0]
    RANK_P2: tl.constexpr = qc.shape[1]
    ROPE_P2: tl.constexpr = qr.shape[1]
    d = tl.arange(0, RANK_P2)[None, :]
    e = tl.arange(0, ROPE_P2)[None, :]
    best = tl.full([M], float("-inf"), tl.float32)
    weight = tl.zeros([M], tl.float32)
    if TRANSPOSED:
        acc = tl.zeros([RANK_P2, M], tl.float32)
        qc = tl.trans(qc)
        qr = tl.trans(qr)
    else:
        acc = tl.zeros([M, RANK_P2], tl.float32)
    for start in tl.range(begin, end, TILE, num_stages=STAGES):
        position = start + tl.arange(0, TILE)
        seen = position < length
        block = tl.load(table + position // BLOCK, mask=seen, other=0).to(tl.int64)
        at = kv + (block * stride_block + (position % BLOCK) * (RANK + ROPE))[:, None]
        # Zeros past the end: uninitialized memory may be NaN.
        if RANK == RANK_P2:
            c = tl.load(at + d, mask=seen[:, None], other=0.0)
        else:
            c = tl.load(at + d, mask=seen[:, None] & (d < RANK), other=0.0)
        if ROPE == ROPE_P2:
            r = tl.load(at + RANK + e, mask=seen[:, None], other=0.0)
        else:
            r = tl.load(at + RANK + e, mask=seen[:, None] & (e < ROPE), other=0.0)
        if TRANSPOSED:
            scores = tl.dot(c, qc, input_precision=PRECISION)
            scores = tl.dot(r, qr, scores, input_precision=PRECISION) * scale
            visible = seen[:, None]
            if CAUSAL:
                visible = visible & (position[:, None] <= visible_to[None, :])
            scores = tl.where(visible, scores, float("-inf"))
            higher = tl.maximum(best, tl.max(scores, 0))
            safe = tl.where(higher == float("-inf"), 0.0, higher)
            keep = tl.exp2(best - safe)
            p = tl.exp2(scores - safe[None, :])
            weight = weight * keep + tl.sum(p, 0)
            acc = tl.dot(tl.trans(c), p.to(c.dtype), acc * keep[None, :], input_precision=PRECISION)
        else:
            scores = tl.dot(qc, tl.trans(c), input_precision=PRECISION)
            scores = tl.dot(qr, tl.trans(r), scores, input_precision=PRECISION) * scale
            visible = seen[None, :]
            if CAUSAL:
                visible = visible & (position[None, :] <= visible_to[:, None])
            scores = tl.where(visible, scores, float("-inf"))
            higher = tl.maximum(best, tl.max(scores, 1))
            safe = tl.where(higher == float("-inf"), 0.0, higher)
            keep = tl.exp2(best - safe)
            p = tl.exp2(scores - safe[:, None])
            weight = weight * keep + tl.sum(p, 1)
            acc = tl.dot(p.to(c.dtype), c, acc * keep[:, None], input_precision=PRECISION)
        best = higher
    return best, weight, acc


@triton.jit
def _decode(
    q, absorbed, kv, tables, rows, lens, starts, plan, partial, stats, scale, stride_token, stride_head, stride_block,
    stride_table,
    HEADS: tl.constexpr, EACH: tl.constexpr, QUERIES: tl.constexpr, M: tl.constexpr, NOPE: tl.constexpr,
    RANK: tl.constexpr, RANK_P2: tl.constexpr, ROPE: tl.constexpr, ROPE_P2: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr, TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program's range of tiles, segment by segment; a segment is the part of the range in one row and head tile.

    QUERIES: most query tokens of a row. 1: row i's is token i; else they are starts[i] to before starts[i + 1].
    The result of a whole row replaces its absorbed queries, which no other program reads.
    """
    HEAD_TILES: tl.constexpr = (HEADS + EACH - 1) // EACH
    OWN: tl.constexpr = EACH * QUERIES  # lines of a partial result
    program = tl.program_id(0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    entry = plan + HEADER_SIZE + program * ENTRY_SIZE
    row = tl.load(entry)
    head_tile = tl.load(entry + 1)
    tile = tl.load(entry + 2)
    count = tl.load(entry + 3)
    length = tl.load(entry + 4)
    line = tl.load(entry + 5)
    g = tl.arange(0, M)
    d = tl.arange(0, RANK_P2)
    while count > 0:
        tiles = (length + TILE - 1) // TILE
        take = tl.minimum(count, tiles - tile)
        first, queries = row, 1
        if QUERIES > 1:
            first = tl.load(starts + row)
            queries = tl.load(starts + row + 1) - first
        head = head_tile * EACH + g % EACH
        token = (first + g // EACH).to(tl.int64)
        there = (g < EACH * queries) & (head < HEADS)
        qc, qr = load_queries(q, absorbed, token, head, there, stride_token, stride_head, HEADS, NOPE, RANK, RANK_P2,
                              ROPE, ROPE_P2)  # fmt: skip
        best, weight, acc = attend_latents(
            qc, qr, kv, tables + line.to(tl.int64) * stride_table, tile * TILE, (tile + take) * TILE, length,
            length - queries + g // EACH, scale, stride_block,
            RANK, ROPE, TILE, BLOCK, TRANSPOSED, QUERIES > 1, PRECISION, STAGES,
        )  # fmt: skip
        if take == tiles:
            share = 1.0 / tl.where(weight == 0.0, 1.0, weight)
            lines = (token * HEADS + head) * RANK
            if TRANSPOSED:
                tl.store(absorbed + lines[None, :] + d[:, None], (acc * share[None, :]).to(absorbed.dtype.element_ty),
                         mask=there[None, :] & (d < RANK)[:, None])  # fmt: skip
            else:
                tl.store(absorbed + lines[:, None] + d[None, :], (acc * share[:, None]).to(absorbed.dtype.element_ty),
                         mask=there[:, None] & (d < RANK)[None, :])  # fmt: skip
        else:
            slot = program * 2 + (tile == 0).to(tl.int32)
            lines = slot * OWN + g
            tl.store(stats + lines * 2, best, mask=there)
            tl.store(stats + lines * 2 + 1, weight, mask=there)
            lines = lines.to(tl.int64) * RANK
            if TRANSPOSED:
                tl.store(partial + lines[None, :] + d[:, None], acc, mask=there[None, :] & (d < RANK)[:, None])
            else:
                tl.store(partial + lines[:, None] + d[None, :], acc, mask=there[:, None] & (d < RANK)[None, :])
        count -= take
        tile = 0
        head_tile += 1
        if head_tile == HEAD_TILES:
            head_tile = 0
            row += 1
            length = tl.load(lens + row, mask=count > 0, other=0)
            while (length == 0) & (count > 0):  # ended rows and padding
                row += 1
                length = tl.load(lens + row)
            line = tl.load(rows + row, mask=count > 0, other=0).to(tl.int32)


@dataclass(frozen=True)
class DecodePlan:
    """The ranges of the programs, and where each row's tiles begin in the list of all."""

    ranges: torch.Tensor
    begins: torch.Tensor


class LatentDecode:
    """The kernel and its workspace, for one configuration of heads. Created once; a plan lasts one step."""

    def __init__(
        self, heads: int, nope: int, rank: int, rope: int, max_rows: int, dtype: torch.dtype, device: torch.device,
        queries: int = 1, tile: LatentTile | None = None,
    ) -> None:  # fmt: skip
        """`queries`: most query tokens of a row, the last of its context, 1 to 8. With more than one, rows may have
        different numbers."""
        self.heads = heads
        self.queries = queries
        self.each = min(triton.next_power_of_2(heads), MAX_QUERY_ROWS // triton.next_power_of_2(queries))
        self.head_tiles = triton.cdiv(heads, self.each)
        own = self.each * queries
        self.tile = tile or latent_tile(own, dtype.itemsize, rank, rope)
        self.programs = num_sms() * self.tile.programs
        self._rows = max(16, triton.next_power_of_2(max_rows))
        self._planned = -(-self.programs // PLANNED_AT_ONCE) * PLANNED_AT_ONCE
        self.partial = torch.empty(2 * self.programs * own * rank, dtype=torch.float32, device=device)
        self.stats = torch.empty(2 * self.programs * own * 2, dtype=torch.float32, device=device)
        self._constants: dict[str, Any] = dict(
            HEADS=heads, EACH=self.each, QUERIES=queries, M=max(16, triton.next_power_of_2(own)), NOPE=nope, RANK=rank,
            RANK_P2=max(16, triton.next_power_of_2(rank)), ROPE=rope, ROPE_P2=max(16, triton.next_power_of_2(rope)),
            TILE=self.tile.tokens, TRANSPOSED=self.tile.transposed,
            PRECISION="ieee" if dtype == torch.float32 else "tf32", STAGES=self.tile.stages,
            num_warps=self.tile.warps, **pdl(),
        )  # fmt: skip

    def plan(self, lens: torch.Tensor, rows: torch.Tensor, num_rows: int) -> DecodePlan:
        """The ranges for rows of these lengths [num_rows] int32, own query tokens included: one small kernel a step."""
        ranges = torch.empty(HEADER + ENTRY * self._planned, dtype=torch.int32, device=lens.device)
        begins = torch.empty(self._rows, dtype=torch.int32, device=lens.device)
        width = min(self._rows, 32 if num_rows <= 32 else 256 if num_rows <= 256 else self._rows)
        _plan[(self._planned // PLANNED_AT_ONCE,)](
            lens, rows, ranges, begins, num_rows, self.programs, HEAD_TILES=self.head_tiles, TILE=self.tile.tokens,
            ROWS=width, AT_ONCE=PLANNED_AT_ONCE, MIN_TILES=self.tile.min_tiles, num_warps=4, **pdl(),
        )  # fmt: skip
        return DecodePlan(ranges, begins)

    def attend(
        self, q: torch.Tensor, absorbed: torch.Tensor, kv: torch.Tensor, tables: torch.Tensor, rows: torch.Tensor,
        lens: torch.Tensor, plan: DecodePlan, scale: float, starts: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Attention of the rows' tokens in q [*, heads, nope + rope] and absorbed [*, heads, rank] (contiguous), row
        after row: whole results into `absorbed`, others into the workspace. `values_of_rows` reads both. `starts`
        [rows + 1] int32, if rows may have several tokens: row i's are starts[i] to before starts[i + 1]."""
        kernel: Any = _decode
        constants = self._constants
        if self.tile.gluon:
            from quire.kernels.triton.latent import hopper

            kernel = hopper._few_heads if self.tile.transposed else hopper._many_heads
            unused = {"RANK", "RANK_P2", "ROPE", "ROPE_P2", "TILE", "TRANSPOSED", "PRECISION", "STAGES"}
            unused |= set() if self.tile.transposed else {"M"}
            constants = {name: value for name, value in constants.items() if name not in unused}
            if q.stride(0) % 16 or q.stride(1) % 16:  # it copies 16 bytes at a time, and is compiled for such strides
                q = q.contiguous()
        kernel[(self.programs,)](
            q, absorbed, kv, tables, rows, lens, lens if starts is None else starts, plan.ranges, self.partial,
            self.stats, scale * LOG2_E, q.stride(0),
            q.stride(1), kv.stride(0), tables.stride(0), BLOCK=kv.shape[1], **constants,
        )  # fmt: skip
