"""Low-rank products of adapters, whatever slots the tokens have.

`shrink` computes the inner products a[s] x of each token in float32; `expand` adds b[s] times these to the base's
product, before its gate if it has one. Grids depend on shapes only, and slots are read on the device: all of it can be
captured.

Up to FEW_TOKENS have programs of their own. `shrink` then takes the preceding norm too, and where the base's product
runs the `vector` kernel, that one expands in its epilogue (`skinny_gemm/vector.py`): one small launch a matrix, during
which the product's kernel loads its weights already.

More tokens are sorted by slot, once a pass, into tiles of one slot each, for the tensor cores. Tiles are few where many
rows share an adapter, so the inputs are split over programs, each of which writes its own sums; `expand` adds them.

Operations: 2 tokens rank (parts depth + width). Bytes, with numbers of size s: a and b of the slots that occur, once
each from DRAM; tokens (depth + 2 width) s for x and the result, which are in L2 as a rule; 8 tokens parts rank splits
for what is in between.
"""

# ruff: noqa: N803, N806
# mypy: disable-error-code="assignment"

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from quire.kernels.adapters import SlotLowRank
from quire.kernels.triton.gates import gate_mul
from quire.kernels.triton.launch import INTERPRETED, gdc_launch_dependents, gdc_wait, num_sms, pdl
from quire.kernels.triton.moe.layout import SPAN, ExpertLayout, arrange

MAX_PARTS = 4
FEW_TOKENS = 16
"""Up to this many tokens have programs of their own."""
TILE, LARGE_TILE = 16, 64
"""Tokens of a tile…"""
LARGE_TOKENS = 512
"""…up to this many, and beyond."""
BLOCK_N = 128
SPLIT_COUNTS = ((LARGE_TOKENS, 16), (4096, 4), (1 << 62, 1))
"""Up to so many tokens the inputs of a tile are split over so many programs, each of which has…"""
LOADING_TOKENS = (64, 1024, 4097)
"""Tokens that between them need every kernel for tiles."""
LEAST_SPLIT = 512
"""…so many inputs at least."""
EXPAND_PROGRAMS = 16
"""Programs that expand tiles, on each multiprocessor: about as many as are resident at once. They share the tiles:
most tiles of a layout are unused where few adapters occur, and a program for each would only begin and end."""
OVERLAPS = True
"""Whether captured steps shrink beside the base's product."""


class Inner(NamedTuple):
    """Inner products, and how they lie."""

    sums: torch.Tensor
    """[splits, tokens, parts * rank] float32, to be added up."""
    layout: ExpertLayout | None = None
    """Which token each of them is of; None: in the order of tokens."""


# A few tokens


@triton.jit
def _shrink_few(
    x, residual, gain, a, slots, inner, x_stride, eps,
    K: tl.constexpr, RANKS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Some inner products of one token, or of its norm; zeros if it has no slot."""
    CHUNKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    token = tl.program_id(0).to(tl.int64)
    ranks = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    # No kernel of a step writes slots or adapters: they are read while the preceding one runs.
    slot = tl.load(slots + token).to(tl.int64)
    rows = a + (tl.maximum(slot, 0) * RANKS + tl.minimum(ranks, RANKS - 1)[:, None]) * K
    tiles = ()
    gains = ()
    for chunk in tl.static_range(CHUNKS):
        columns = chunk * BLOCK_K + tl.arange(0, BLOCK_K)
        inside = columns < K
        tiles = tiles + (tl.load(rows + columns[None, :], mask=inside[None, :] & (slot >= 0), other=0.0),)  # noqa: RUF005
        if gain is not None:
            gains = gains + (tl.load(gain + columns, mask=inside, other=0.0).to(tl.float32),)  # noqa: RUF005
    if PDL:
        gdc_launch_dependents()  # the product's kernel loads its weights meanwhile
        gdc_wait()
    total = tl.zeros([BLOCK_R, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for chunk in tl.static_range(CHUNKS):
        columns = chunk * BLOCK_K + tl.arange(0, BLOCK_K)
        inside = columns < K
        values = tl.load(x + token * x_stride + columns, mask=inside, other=0.0)
        if residual is not None:
            carried = tl.load(residual + token * K + columns, mask=inside, other=0.0)
            values = (values.to(tl.float32) + carried.to(tl.float32)).to(values.dtype)
        wide = values.to(tl.float32)
        if gain is not None:
            squares += wide * wide
            wide = wide * gains[chunk]
        total += tiles[chunk].to(tl.float32) * wide[None, :]
    result = tl.sum(total, 1)
    if gain is not None:
        result *= tl.rsqrt(tl.sum(squares, 0) / K + eps)
    tl.store(inner + token * RANKS + ranks, tl.where(slot >= 0, result, 0.0), mask=ranks < RANKS)


@triton.jit
def _part_of(columns, first, second, third):
    """The part that each output is of. first, second, third: where parts end, but for the last."""
    return (columns >= first).to(tl.int32) + (columns >= second).to(tl.int32) + (columns >= third).to(tl.int32)


@triton.jit
def _rows_of_b(b, slot, columns, limit, RANK: tl.constexpr, WIDTH: tl.constexpr, BLOCK_R: tl.constexpr):
    ranks = tl.arange(0, BLOCK_R)
    mask = (columns < limit)[None, :] & (ranks < RANK)[:, None] & (slot >= 0)
    return tl.load(b + (slot * RANK + ranks[:, None]) * WIDTH + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _expand_few(
    inner, b, slots, out, features, out_stride, first, second, third,
    WIDTH: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    ACTIVATION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Some outputs of one token, in place; with an ACTIVATION the features of a gate and as many outputs after it."""
    token = tl.program_id(0).to(tl.int64)
    GATED: tl.constexpr = ACTIVATION != ""
    N: tl.constexpr = WIDTH // 2 if GATED else WIDTH
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    slot = tl.load(slots + token).to(tl.int64)
    weights = _rows_of_b(b, slot, columns, N, RANK, WIDTH, BLOCK_R)
    if GATED:
        weights_up = _rows_of_b(b, slot, columns + N, WIDTH, RANK, WIDTH, BLOCK_R)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    ranks = tl.arange(0, BLOCK_R)
    own = inner + token * RANKS + ranks[:, None]
    mask = (columns < N)[None, :] & (ranks < RANK)[:, None]
    place = out + token * out_stride + columns
    total = tl.load(place, mask=columns < N, other=0.0).to(tl.float32)
    shares = tl.load(own + _part_of(columns, first, second, third)[None, :] * RANK, mask=mask, other=0.0)
    total += tl.sum(weights.to(tl.float32) * shares, 0)
    if GATED:
        up = tl.load(place + N, mask=columns < N, other=0.0).to(tl.float32)
        shares = tl.load(own + _part_of(columns + N, first, second, third)[None, :] * RANK, mask=mask, other=0.0)
        up += tl.sum(weights_up.to(tl.float32) * shares, 0)
        total = gate_mul(total, up, ACTIVATION)
        place = features + token * N + columns
    tl.store(place, total.to(out.dtype.element_ty), mask=columns < N)


# Tiles of one slot. These kernels are launched after all before them have ended: `together` forks and joins streams.


@triton.jit
def _span(spans, tile, SPAN: tl.constexpr):
    """(slot of a tile, its first sorted row, the end of the slot's rows)."""
    at = spans + tile * SPAN
    return tl.load(at), tl.load(at + 1), tl.load(at + 2)


@triton.jit
def _tokens_of(order, start, stop, BLOCK_T: tl.constexpr):
    """(sorted rows of a tile, whether they exist, their tokens)."""
    rows = start + tl.arange(0, BLOCK_T)
    exists = rows < stop
    return rows.to(tl.int64), exists, tl.load(order + rows, mask=exists, other=0).to(tl.int64)


@triton.jit(do_not_specialize=["tokens", "slots"])
def _shrink_tiles(
    x, a, order, spans, inner, tokens, slots, x_stride, split,
    DEPTH: tl.constexpr, RANKS: tl.constexpr, SPAN: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Sums over `split` of the inputs, of a tile's tokens and some ranks."""
    slot, start, stop = _span(spans, tl.program_id(0), SPAN)
    if slot < slots:
        rows, exists, token = _tokens_of(order, start, stop, BLOCK_T)
        ranks = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
        begin = tl.program_id(1) * split
        own_x = x + token[:, None] * x_stride
        own_a = a + (slot.to(tl.int64) * RANKS + tl.minimum(ranks, RANKS - 1)[None, :]) * DEPTH
        total = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
        for k in range(begin, tl.minimum(begin + split, DEPTH), BLOCK_K):
            columns = k + tl.arange(0, BLOCK_K)
            inside = columns < DEPTH
            values = tl.load(own_x + columns[None, :], mask=exists[:, None] & inside[None, :], other=0.0)
            weights = tl.load(own_a + columns[:, None], mask=inside[:, None], other=0.0)
            total = tl.dot(values, weights.to(values.dtype), total, input_precision="ieee")
        place = inner + (tl.program_id(1) * tokens + rows)[:, None] * RANKS + ranks[None, :]
        tl.store(place, total, mask=exists[:, None] & (ranks < RANKS)[None, :])


@triton.jit
def _grown(
    total, inner, b, slot, rows, exists, columns, last, tokens, first, second, third,
    WIDTH: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, SPLITS: tl.constexpr, BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """total + b of the slot times the inner products, for outputs up to `last`; they are of one part, as a rule."""
    part_of = _part_of(tl.minimum(columns, last), first, second, third)
    for part in range(tl.min(part_of, 0), tl.max(part_of, 0) + 1):
        for r in range(0, RANK, BLOCK_R):
            ranks = r + tl.arange(0, BLOCK_R)
            own = inner + rows[:, None] * RANKS + part * RANK + ranks[None, :]
            mask = exists[:, None] & (ranks < RANK)[None, :]
            shares = tl.load(own, mask=mask, other=0.0)
            for split in tl.static_range(1, SPLITS):
                shares += tl.load(own + split * tokens * RANKS, mask=mask, other=0.0)
            at = b + (slot.to(tl.int64) * RANK + ranks[:, None]) * WIDTH + columns[None, :]
            # The mask has bounds that the compiler knows, so that loads are wide; other parts are left out below.
            weights = tl.load(at, mask=(ranks < RANK)[:, None] & (columns < WIDTH)[None, :], other=0.0)
            grown = tl.dot(shares, weights.to(tl.float32), input_precision=PRECISION)
            total += tl.where((part_of == part)[None, :], grown, 0.0)
    return total


@triton.jit(do_not_specialize=["tokens", "slots", "tiles"])
def _expand_tiles(
    inner, b, order, spans, out, features, tokens, slots, tiles, out_stride, first, second, third,
    WIDTH: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, SPLITS: tl.constexpr, SPAN: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Some outputs of the tokens of every n-th tile; as `_expand_few`. With an ACTIVATION also of the tokens without a
    slot. Unused tiles are the last ones: a program ends at the first of them."""
    GATED: tl.constexpr = ACTIVATION != ""
    N: tl.constexpr = WIDTH // 2 if GATED else WIDTH
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    end = slots + (1 if GATED else 0)
    tile = tl.program_id(1)
    slot, start, stop = _span(spans, tile, SPAN)
    while slot < end:
        rows, exists, token = _tokens_of(order, start, stop, BLOCK_T)
        mask = exists[:, None] & (columns < N)[None, :]
        place = out + token[:, None] * out_stride + columns[None, :]
        total = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        if slot < slots:
            total = _grown(
                total, inner, b, slot, rows, exists, columns, N - 1, tokens, first, second, third,
                WIDTH, RANK, RANKS, SPLITS, BLOCK_R, PRECISION,
            )  # fmt: skip
        if GATED:
            up = tl.load(place + N, mask=mask, other=0.0).to(tl.float32)
            if slot < slots:
                up = _grown(
                    up, inner, b, slot, rows, exists, columns + N, WIDTH - 1, tokens, first, second, third,
                    WIDTH, RANK, RANKS, SPLITS, BLOCK_R, PRECISION,
                )  # fmt: skip
            total = gate_mul(total, up, ACTIVATION)
            place = features + token[:, None] * N + columns[None, :]
        tl.store(place, total.to(out.dtype.element_ty), mask=mask)
        tile += tl.num_programs(1)
        slot = end
        if tile < tiles:
            slot, start, stop = _span(spans, tile, SPAN)


def _tile_size(tokens: int) -> int:
    return TILE if tokens <= LARGE_TOKENS else LARGE_TILE


def _splits(tokens: int, depth: int) -> int:
    """Programs that a tile's inputs are split over. One of few numbers: kernels are compiled for each."""
    most = next(count for limit, count in SPLIT_COUNTS if tokens <= limit)
    return min(most, max(1, triton.next_power_of_2(depth // LEAST_SPLIT + 1) // 2))


def together(x: torch.Tensor, low: SlotLowRank, product: Callable[[], torch.Tensor]) -> tuple[Inner, torch.Tensor]:
    """(`shrink`, the product with x): at the same time, if both are being captured. The product of many rows leaves
    some multiprocessors idle, and neither needs the other."""
    if len(x) <= FEW_TOKENS or not OVERLAPS or INTERPRETED or not torch.cuda.is_current_stream_capturing():
        return shrink(x, low), product()  # shrink first: it may begin while the norm runs
    layout_of(low)
    main, side = torch.cuda.current_stream(), _side_stream(x.device.index)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        inner = shrink(x, low)
    out = product()
    main.wait_stream(side)
    return inner, out


@functools.cache
def _side_stream(device: int) -> torch.cuda.Stream:
    # torch gives out 32 streams of each priority in turns: nothing else has this one, such as a copy during a capture.
    return torch.cuda.Stream(device, priority=-1)


def layout_of(low: SlotLowRank) -> ExpertLayout:
    """The pass's tokens sorted by slot, those without one last; made once a pass."""
    made, slots, count = low.tokens.made, low.tokens.slots, len(low.a)
    if count not in made:
        placed = torch.where(slots < 0, count, slots)
        made[count] = arrange(placed, count + 1, _tile_size(len(slots)))
    found: ExpertLayout = made[count]
    return found


# Launches


def shrink(
    x: torch.Tensor, low: SlotLowRank, residual: torch.Tensor | None = None,
    norm: tuple[torch.Tensor, float] | None = None,
) -> Inner:  # fmt: skip
    """The inner products of x [tokens, in]; of up to FEW_TOKENS also of the norm of x, or of residual + x."""
    tokens, depth = x.shape
    ranks = low.a.shape[1]
    if tokens <= FEW_TOKENS:
        inner = torch.empty(1, tokens, ranks, dtype=torch.float32, device=x.device)
        gain, eps = norm or (None, 0.0)
        few = 1 if tokens * ranks <= 2 * num_sms() else 4
        block_k = min(2048, max(64, triton.next_power_of_2(depth)))
        _shrink_few[(tokens, triton.cdiv(ranks, few))](
            x, residual, gain, low.a, low.tokens.slots, inner, x.stride(0), eps, depth, ranks, few, block_k,
            num_warps=max(1, block_k // 256), **pdl(),
        )  # fmt: skip
        return Inner(inner)
    layout, size = layout_of(low), _tile_size(tokens)
    block_r = min(64, max(16, triton.next_power_of_2(ranks)))
    block_k = min(128, max(16, triton.next_power_of_2(depth)))
    splits = _splits(tokens, depth)
    split = triton.cdiv(triton.cdiv(depth, splits), block_k) * block_k
    inner = torch.empty(splits, tokens, ranks, dtype=torch.float32, device=x.device)
    _shrink_tiles[(layout.tiles, splits, triton.cdiv(ranks, block_r))](
        x, low.a, layout.order, layout.spans, inner, tokens, len(low.a), x.stride(0), split, depth, ranks, SPAN, size,
        block_r, block_k, num_warps=4, num_stages=4 if size == TILE else 3,
    )  # fmt: skip
    return Inner(inner, layout)


def expand(inner: Inner, low: SlotLowRank, out: torch.Tensor, activation: str = "") -> torch.Tensor:
    """Add b times the inner products to `out`. With an activation `out` holds a gate and as many features after it, and
    the result is `gate_mul` of them, a new tensor."""
    splits, tokens, ranks = inner.sums.shape
    _, rank, width = low.b.shape
    bounds = (*low.bounds[1:-1], width, width, width)[:3]
    outputs = width // 2 if activation else width
    features = out.new_empty(tokens, outputs) if activation else None
    constants: dict[str, Any] = {
        "WIDTH": width, "RANK": rank, "RANKS": ranks, "BLOCK_N": BLOCK_N, "ACTIVATION": activation
    }  # fmt: skip
    block_r = max(16, triton.next_power_of_2(rank))
    if inner.layout is None:
        _expand_few[(tokens, triton.cdiv(outputs, BLOCK_N))](
            inner.sums, low.b, low.tokens.slots, out, features, out.stride(0), *bounds, BLOCK_R=block_r, num_warps=4,
            **constants, **pdl(),
        )  # fmt: skip
    else:
        layout = inner.layout
        precision = "ieee" if low.b.dtype == torch.float32 else "tf32"
        blocks = triton.cdiv(outputs, BLOCK_N)
        programs = min(layout.tiles, max(1, EXPAND_PROGRAMS * num_sms() // blocks))
        _expand_tiles[(blocks, programs)](
            inner.sums, low.b, layout.order, layout.spans, out, features, tokens, len(low.b), layout.tiles,
            out.stride(0), *bounds, SPLITS=splits, SPAN=SPAN, BLOCK_T=_tile_size(tokens), BLOCK_R=min(64, block_r),
            PRECISION=precision, num_warps=4 if tokens <= LARGE_TOKENS else 8, num_stages=1,
            **constants,
        )  # fmt: skip
    return out if features is None else features


def is_supported(low: SlotLowRank) -> bool:
    """Whether the kernels can take these matrices."""
    return low.a.is_contiguous() and low.b.is_contiguous() and len(low.bounds) <= MAX_PARTS + 1
