"""The selective scan of Mamba 1 (arXiv 2312.00752), with its gate, for decodes and for prompts.

A program takes one row and the channels of a piece of its state [state_dim, channels]. Decodes go token by token, with
the state in registers: bytes are each state once in and once out. Prompts go in tiles of tokens: the updates
S <- a S + b of a tile are composed by an associative scan, so that its loads are one and wait once; operations
about 2 log2(TOKENS) + 5 for each state and token, and an exponential.

Rows that verify drafts go as decodes do, and their states are not stored; once it is known which tokens count, the same
kernel repeats their updates, without outputs.
"""

# ruff: noqa: N803, N806

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl

from quire.kernels.states import STATE, Mamba, States, StepRows
from quire.kernels.triton.launch import INTERPRETED, gdc_launch_dependents, gdc_wait, pdl
from quire.kernels.triton.recurrent.common import held, silu, softplus, state_at, table_of, tables_of


@dataclass(frozen=True)
class ScanConfig:
    """Tokens of a tile of a prompt, and the warps of a program."""

    tokens: int = 4 if INTERPRETED else 16
    warps: int = 4


DECODE, PROMPT = ScanConfig(1, 1), ScanConfig()


@triton.jit
def _compose(a, b, next_a, next_b):
    """S -> next_a (a S + b) + next_b."""
    return a * next_a, b * next_a + next_b


@triton.jit(do_not_specialize=["first_row"])
def _scan(
    x, dt, b, c, gate, x_stride, dt_stride, b_stride, c_stride, gate_stride, decay, dt_bias, skip, out,
    state, state_pages, state_offsets, state_stride, tables, table_stride, rows, query_starts, context_lens, first_row,
    accepted, CHANNELS: tl.constexpr, PIECE: tl.constexpr, STATES: tl.constexpr, TOKENS: tl.constexpr,
    STORE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """STORE: states are stored. accepted: tokens of each row that count, of which there are no outputs; None: all."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row, piece = first_row + tl.program_id(0), tl.program_id(1)
    first = tl.load(query_starts + row)
    count = tl.load(query_starts + row + 1) - first
    begin = tl.load(context_lens + row) - count
    if accepted is not None:
        count = tl.minimum(tl.load(accepted + row), count)
    lane, n = tl.arange(0, PIECE), tl.arange(0, STATES)
    channel = piece * PIECE + lane
    table = table_of(tables, table_stride, rows, row)
    at = state_at(state, state_pages, state_offsets, state_stride, table, piece)
    tile = at + n[:, None] * PIECE + lane[None, :]
    S = tl.load(tile, mask=(begin > 0) & (n[:, None] < STATES), other=0.0)  # [state, channels]
    rate = tl.load(decay + n[:, None] * CHANNELS + channel[None, :])
    bias, through = tl.load(dt_bias + channel), tl.load(skip + channel)
    origin = first.to(tl.int64)
    real = begin >= 0  # a row that is padding has outputs of zero, and no state
    for start in range(0, count, TOKENS):
        if TOKENS == 1:
            token = origin + start
            u = tl.load(x + token * x_stride + channel).to(tl.float32)
            time = softplus(tl.load(dt + token * dt_stride + channel).to(tl.float32) + bias)
            keys = tl.load(b + token * b_stride + n).to(tl.float32)
            S = tl.fma(S, tl.exp(rate * time[None, :]), keys[:, None] * (time * u)[None, :])
            if accepted is None:
                queries = tl.load(c + token * c_stride + n).to(tl.float32)
                z = tl.load(gate + token * gate_stride + channel).to(tl.float32)
                y = (tl.sum(S * queries[:, None], axis=0) + through * u) * silu(z)
                tl.store(out + token * CHANNELS + channel, tl.where(real, y, 0.0))
        else:
            t = tl.arange(0, TOKENS)
            exists = (start + t < count)[:, None]
            token = (origin + start + t)[:, None]
            u = tl.load(x + token * x_stride + channel[None, :], mask=exists, other=0.0).to(tl.float32)
            steps = tl.load(dt + token * dt_stride + channel[None, :], mask=exists, other=0.0).to(tl.float32)
            time = tl.where(exists, softplus(steps + bias[None, :]), 0.0)
            keys = tl.load(b + token * b_stride + n[None, :], mask=exists, other=0.0).to(tl.float32)
            queries = tl.load(c + token * c_stride + n[None, :], mask=exists, other=0.0).to(tl.float32)
            z = tl.load(gate + token * gate_stride + channel[None, :], mask=exists, other=0.0).to(tl.float32)
            kept = tl.exp(rate[None, :, :] * time[:, None, :])  # [token, state, channel]
            kept, added = tl.associative_scan((kept, keys[:, :, None] * (time * u)[:, None, :]), 0, _compose)
            after = kept * S[None, :, :] + added
            y = (tl.sum(after * queries[:, :, None], axis=1) + through[None, :] * u) * silu(z)
            tl.store(out + token * CHANNELS + channel[None, :], tl.where(real, y, 0.0), mask=exists)
            # Tokens past the end change nothing: the tile's last state is that of its last token.
            S = tl.sum(tl.where(t[:, None, None] == TOKENS - 1, after, 0.0), axis=0)
    if STORE and real & (count > 0):
        tl.store(tile, S)


def mamba(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    projected: torch.Tensor,
    layer: Mamba,
    states: States,
    step: StepRows,
    decode: ScanConfig = DECODE,
    prompt: ScanConfig = PROMPT,
) -> torch.Tensor:
    """[tokens, channels]; see `Mamba`."""
    out = torch.empty(len(x), layer.channels, dtype=x.dtype, device=x.device)
    gate = projected[:, layer.channels :]
    verifying = step.num_verifying
    short = verifying or step.num_decodes
    if short:
        _launch((x, dt, b, c, gate), layer, states, step, out, (0, short), decode, not verifying)
    if verifying and step.replay is not None:
        x_kept, dt_kept, b_kept = (held(each, step) for each in (x, dt, b))
        kept = (x_kept, dt_kept, b_kept, b_kept, x_kept)  # without outputs, c and the gate are not read
        step.replay.add(partial(_launch, kept, layer, states, step, x_kept, (0, short), decode, True))
    if short < step.num_rows:
        _launch((x, dt, b, c, gate), layer, states, step, out, (short, step.num_rows), prompt, True)
    return out


def _launch(
    inputs: tuple[torch.Tensor, ...],
    layer: Mamba,
    states: States,
    step: StepRows,
    out: torch.Tensor,
    rows: tuple[int, int],
    config: ScanConfig,
    store: bool,
    accepted: torch.Tensor | None = None,
) -> None:
    """Rows rows[0] to rows[1]. inputs: x, dt, b, c and the gate."""
    memory, part = states.memory, states.parts[STATE]
    _scan[(rows[1] - rows[0], part.count)](
        *inputs, *(each.stride(0) for each in inputs), layer.decay, layer.dt_bias, layer.skip, out,
        memory.view(torch.float32), states.pages[STATE], states.offsets[STATE], memory.shape[1] // 4,
        *tables_of(step), step.query_starts, step.context_lens, rows[0], accepted,
        CHANNELS=layer.channels, PIECE=part.shape[1], STATES=part.shape[0], TOKENS=config.tokens, STORE=store,
        num_warps=config.warps, **pdl(),
    )  # fmt: skip


def is_supported(layer: Mamba) -> bool:
    """Whether the kernel takes the layer's shapes."""
    states = len(layer.decay)
    return states & (states - 1) == 0
