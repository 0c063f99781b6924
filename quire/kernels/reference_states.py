"""Recurrent layers in plain torch: what the kernels compute. Arithmetic in float32; no synchronization with the host.

Decodes, rows that verify drafts and longer rows run separately, padded to the longest. The recurrences have two forms
with the same result: `delta_net_steps` and `mamba2_steps` follow the definition token by token; the chunked ones take
`CHUNK` tokens at once with matrix products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from quire.kernels.states import RING, STATE, DeltaNet, Mamba, Mamba2, ShortConv, States, StepRows

CHUNK = 64
MIN_CHUNKED = 8
"""Rows of at least this many tokens are computed in chunks."""


@dataclass(frozen=True)
class _Padded:
    """Rows of a step, padded to one length."""

    tokens: torch.Tensor
    """[rows, length]: indices into the step's tokens; of padding: the number of tokens."""
    real: torch.Tensor
    """[rows, length]"""
    begin: torch.Tensor
    """[rows]: position of a row's first token; negative: the row is padding."""
    counts: torch.Tensor
    """[rows]: tokens."""
    tables: torch.Tensor
    is_stepwise: bool = False
    """Whether they are updated token by token, however many they are, so that results are those of plain decodes."""
    is_stored: bool = True
    """Whether their states are."""

    @property
    def continues(self) -> torch.Tensor:
        """[rows]: whether a row goes on from what its pages hold; otherwise it begins with zeros."""
        return (self.begin > 0) | (self.counts == 0)

    def first(self, counts: torch.Tensor) -> _Padded:
        """Only the first `counts` tokens of each row; their states are stored."""
        real = self.real & (torch.arange(self.real.shape[1], device=counts.device) < counts[:, None])
        return replace(self, real=real, counts=counts.long(), is_stored=True)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, ...] -> [rows, length, ...] float32; zeros where there is no token."""
        values = x[self.tokens.clamp(max=len(x) - 1)].float()
        # Not a product: padding and rejected drafts may be NaN.
        return values.masked_fill_(~self.real.view(*self.real.shape, *[1] * (values.dim() - 2)), 0.0)


# torch's own sigmoid and its like compute the last elements of a tensor with other instructions than the rest: a row's
# bits would depend on the number of rows. exp and log1p do not.


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1.0 / (1.0 + (-x).exp())


def _silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1.0 + (-x).exp())


def _softplus(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 20.0, x, x.exp().log1p())


def _padded_rows(step: StepRows, device: torch.device) -> list[_Padded]:
    """The decodes or the rows that verify drafts, then the longer rows; without those that there are none of."""
    verifying = step.num_verifying
    short = verifying or step.num_decodes
    spans = [(0, short, step.width if verifying else 1), (short, step.num_rows, step.max_query_len)]
    tables = step.own_tables(step.block_tables.shape[1])
    found = []
    for first, last, length in spans:
        if first == last:
            continue
        starts = step.query_starts[first : last + 1].long()
        counts = starts.diff()
        begin = step.context_lens[first:last].long() - counts
        place = torch.arange(length, device=device)
        real = (place < counts[:, None]) & (begin[:, None] >= 0)
        tokens = torch.where(real, starts[:-1, None] + place, step.num_tokens)
        verifies = last <= verifying
        found.append(_Padded(tokens, real, begin, counts, tables[first:last], verifies, not verifies))
    return found


def _replay_later(step: StepRows, rows: _Padded, run: Callable[..., object], *inputs: torch.Tensor) -> None:
    """If the rows verify drafts: run(rows, *inputs) again once it is known which tokens count. inputs [tokens, ...]."""
    if rows.is_stored or step.replay is None:
        return
    kept = [x[: step.num_verified].clone() for x in inputs]

    def commit(accepted: torch.Tensor) -> None:
        run(rows.first(accepted), *kept)

    step.replay.add(commit)


def convolve(
    x: torch.Tensor,
    conv: torch.Tensor,
    bias: torch.Tensor | None,
    states: States,
    rows: _Padded,
    ring_part: int = RING,
) -> torch.Tensor:
    """The causal convolution of x [tokens, channels]: [rows, length, channels]; stores the rings."""
    taps, channels = conv.shape
    slots, width = states.parts[ring_part].shape
    ring = states.read(ring_part, rows.tables).transpose(1, 2).reshape(-1, slots, channels)
    inputs = rows.gather(x)
    back = torch.arange(1 - taps, 0, device=x.device)
    before = rows.begin[:, None] + back
    history = ring.float().gather(1, (before % slots)[:, :, None].expand(-1, -1, channels))
    history = torch.where((before >= 0)[:, :, None], history, 0.0)
    line = torch.cat((history, inputs), dim=1)
    length = inputs.shape[1]
    out = torch.stack([line[:, tap : tap + length] * conv[tap].float() for tap in range(taps)]).sum(0)
    out = out if bias is None else out + bias.float()
    if not rows.is_stored:
        return out
    # Each slot holds the last position that falls on it; positions before this step are as they were.
    end = (rows.begin + rows.counts)[:, None]
    slot = torch.arange(slots, device=x.device)
    position = end - 1 - (end - 1 - slot) % slots
    fresh = inputs.gather(1, (position - rows.begin[:, None]).clamp(0, length - 1)[:, :, None].expand(-1, -1, channels))
    ring = torch.where((position >= rows.begin[:, None])[:, :, None], fresh.to(ring.dtype), ring)
    states.write(ring_part, rows.tables, ring.view(-1, slots, channels // width, width).transpose(1, 2))
    return out


def _begin_states(states: States, rows: _Padded) -> torch.Tensor:
    """[rows, heads, value_dim, key_dim]: the states before the step's tokens; zeros where a row begins."""
    stored = states.read(STATE, rows.tables)
    return torch.where(rows.continues[:, None, None, None], stored, 0.0).transpose(-1, -2)


def delta_net(projected: torch.Tensor, layer: DeltaNet, states: States, step: StepRows) -> torch.Tensor:
    """[tokens, value_heads * value_dim]; see `DeltaNet`."""
    tokens, values, heads = len(projected), layer.width, layer.value_heads
    out = projected.new_zeros(tokens + 1, heads, layer.value_dim)

    def run(rows: _Padded, projected: torch.Tensor) -> torch.Tensor:
        mixed, z, b, a = projected.split([layer.channels, values, heads, heads], dim=-1)
        keys = layer.key_heads * layer.key_dim
        q, k, v = _silu(convolve(mixed, layer.conv, None, states, rows)).split([keys, keys, values], dim=-1)
        q, k = (x.unflatten(-1, (layer.key_heads, layer.key_dim)) for x in (q, k))
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        q, k = (x.repeat_interleave(heads // layer.key_heads, dim=2) for x in (q, k))
        v = v.unflatten(-1, (heads, layer.value_dim))
        beta = _sigmoid(rows.gather(b)) * rows.real[:, :, None]
        decay = layer.decay * _softplus(rows.gather(a) + layer.dt_bias) * rows.real[:, :, None]
        scan = delta_net_chunks if q.shape[1] >= MIN_CHUNKED and not rows.is_stepwise else delta_net_steps
        raw, after = scan(q * layer.key_dim**-0.5, k, v, decay, beta, _begin_states(states, rows))
        if rows.is_stored:
            states.write(STATE, rows.tables, after.transpose(-1, -2))
        normed = raw * torch.rsqrt(raw.square().mean(-1, keepdim=True) + layer.eps) * layer.norm.float()
        return normed * _silu(rows.gather(z)).unflatten(-1, (heads, layer.value_dim))

    for rows in _padded_rows(step, projected.device):
        out.index_copy_(0, rows.tokens.flatten(), run(rows, projected).flatten(0, 1).to(out.dtype))
        _replay_later(step, rows, run, projected)
    return out[:tokens].flatten(1)


Scanned = tuple[torch.Tensor, torch.Tensor]
"""Outputs [rows, length, heads, value_dim], and the states after them."""


def delta_net_steps(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> Scanned:
    """q, k [rows, length, heads, key_dim], v [..., value_dim], decay (log) and beta [rows, length, heads]."""
    outs = []
    for t in range(q.shape[1]):
        state = state * decay[:, t, :, None, None].exp()
        error = v[:, t] - torch.einsum("rhvk,rhk->rhv", state, k[:, t])
        state = state + (beta[:, t, :, None] * error)[..., None] * k[:, t, :, None]
        outs.append(torch.einsum("rhvk,rhk->rhv", state, q[:, t]))
    return torch.stack(outs, dim=1), state


def _in_chunks(x: torch.Tensor) -> torch.Tensor:
    """[rows, length, heads, ...] -> [rows, heads, chunks, CHUNK, ...], padded with zeros."""
    missing = -x.shape[1] % CHUNK
    x = F.pad(x, (*[0, 0] * (x.dim() - 2), 0, missing))
    return x.unflatten(1, (-1, CHUNK)).movedim(3, 1)


def _out_of_chunks(chunks: list[torch.Tensor], length: int) -> torch.Tensor:
    """Chunks [rows, heads, CHUNK, dim] -> [rows, length, heads, dim]."""
    return torch.cat(chunks, dim=2)[:, :, :length].transpose(1, 2)


def delta_net_chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> Scanned:
    """As `delta_net_steps`. Within a chunk the updates solve one triangular system (the WY form, arXiv 2406.06484)."""
    length = q.shape[1]
    q, k, v, decay, beta = map(_in_chunks, (q, k, v, decay, beta))
    total = decay.cumsum(-1)
    between = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    system = (beta[..., None] * (k @ k.transpose(-1, -2)) * between).tril(-1)
    both = torch.cat((beta[..., None] * v, (beta * total.exp())[..., None] * k), dim=-1)
    solved = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
    values, keys = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    scores = (q @ k.transpose(-1, -2)) * between
    outs = []
    for c in range(q.shape[2]):
        fresh = values[:, :, c] - keys[:, :, c] @ state.transpose(-1, -2)
        carried = (q[:, :, c] * total[:, :, c, :, None].exp()) @ state.transpose(-1, -2)
        outs.append(carried + scores[:, :, c] @ fresh)
        last = total[:, :, c, -1:]
        weighted = k[:, :, c] * (last - total[:, :, c]).exp()[..., None]
        state = state * last.exp()[..., None] + fresh.transpose(-1, -2) @ weighted
    return _out_of_chunks(outs, length), state


def mamba2(projected: torch.Tensor, layer: Mamba2, states: States, step: StepRows) -> torch.Tensor:
    """[tokens, heads * head_dim], before gate and norm; see `Mamba2`."""
    tokens, inner, shared = len(projected), layer.width, layer.groups * layer.state_dim
    out = projected.new_zeros(tokens + 1, layer.heads, layer.head_dim)

    def run(rows: _Padded, projected: torch.Tensor) -> torch.Tensor:
        mixed, dt = projected[:, inner:].split([layer.channels, layer.heads], dim=-1)
        mixed_rows = _silu(convolve(mixed, layer.conv, layer.bias, states, rows))
        x, b, c = mixed_rows.split([inner, shared, shared], dim=-1)
        x = x.unflatten(-1, (layer.heads, layer.head_dim))
        b, c = (y.unflatten(-1, (layer.groups, layer.state_dim)) for y in (b, c))
        b, c = (y.repeat_interleave(layer.heads // layer.groups, dim=2) for y in (b, c))
        time = _softplus(rows.gather(dt) + layer.dt_bias).clamp(*layer.dt_limit) * rows.real[:, :, None]
        scan = mamba2_chunks if x.shape[1] >= MIN_CHUNKED and not rows.is_stepwise else mamba2_steps
        raw, after = scan(c, b, x * time[..., None], layer.decay * time, _begin_states(states, rows))
        if rows.is_stored:
            states.write(STATE, rows.tables, after.transpose(-1, -2))
        return raw + layer.skip[:, None] * x

    for rows in _padded_rows(step, projected.device):
        out.index_copy_(0, rows.tokens.flatten(), run(rows, projected).flatten(0, 1).to(out.dtype))
        _replay_later(step, rows, run, projected)
    return out[:tokens].flatten(1)


def mamba2_steps(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, state: torch.Tensor
) -> Scanned:
    """q is C, k is B [rows, length, heads, state_dim], v is dt x [..., head_dim], decay (log) [rows, length, heads]."""
    outs = []
    for t in range(q.shape[1]):
        state = state * decay[:, t, :, None, None].exp() + v[:, t, :, :, None] * k[:, t, :, None]
        outs.append(torch.einsum("rhvk,rhk->rhv", state, q[:, t]))
    return torch.stack(outs, dim=1), state


def mamba2_chunks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, state: torch.Tensor
) -> Scanned:
    """As `mamba2_steps`."""
    length = q.shape[1]
    q, k, v, decay = map(_in_chunks, (q, k, v, decay))
    total = decay.cumsum(-1)
    between = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    scores = (q @ k.transpose(-1, -2)) * between
    outs = []
    for c in range(q.shape[2]):
        carried = (q[:, :, c] * total[:, :, c, :, None].exp()) @ state.transpose(-1, -2)
        outs.append(carried + scores[:, :, c] @ v[:, :, c])
        last = total[:, :, c, -1:]
        weighted = k[:, :, c] * (last - total[:, :, c]).exp()[..., None]
        state = state * last.exp()[..., None] + v[:, :, c].transpose(-1, -2) @ weighted
    return _out_of_chunks(outs, length), state


def gated_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, groups: int, eps: float) -> torch.Tensor:
    """rms_norm(x * silu(gate)) * weight, the norm over each of `groups` equal parts of a row."""
    gated = (x.float() * _silu(gate.float())).unflatten(-1, (groups, -1))
    normed = gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + eps)
    return (normed.flatten(1) * weight.float()).to(x.dtype)


def short_conv(projected: torch.Tensor, layer: ShortConv, states: States, step: StepRows) -> torch.Tensor:
    """[tokens, channels]; see `ShortConv`."""
    b, c, x = projected.chunk(3, dim=-1) if layer.gated else (None, None, projected[:, : layer.channels])
    inputs = x if b is None else b * x
    out = projected.new_zeros(len(projected) + 1, layer.channels)

    def run(rows: _Padded, inputs: torch.Tensor) -> torch.Tensor:
        return convolve(inputs, layer.conv, layer.bias, states, rows, layer.part)

    for rows in _padded_rows(step, projected.device):
        mixed = run(rows, inputs)
        mixed = _silu(mixed) if c is None else rows.gather(c) * mixed
        out.index_copy_(0, rows.tokens.flatten(), mixed.flatten(0, 1).to(out.dtype))
        _replay_later(step, rows, run, inputs)
    return out[: len(projected)]


def mamba(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    projected: torch.Tensor,
    layer: Mamba,
    states: States,
    step: StepRows,
) -> torch.Tensor:
    """[tokens, channels]; see `Mamba`."""
    out = x.new_zeros(len(x) + 1, layer.channels)

    def run(rows: _Padded, x: torch.Tensor, dt: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        inputs, keys, queries = rows.gather(x), rows.gather(b), rows.gather(c)
        time = _softplus(rows.gather(dt) + layer.dt_bias) * rows.real[:, :, None]
        stored = states.read(STATE, rows.tables)  # [rows, pieces, state_dim, channels of a piece]
        state = torch.where(rows.continues[:, None, None], stored.transpose(1, 2).flatten(2), 0.0)
        outs = []
        for t in range(inputs.shape[1]):
            kept = (layer.decay * time[:, t, None]).exp()
            state = state * kept + keys[:, t, :, None] * (time[:, t] * inputs[:, t])[:, None]
            outs.append((state * queries[:, t, :, None]).sum(1))
        if rows.is_stored:
            states.write(STATE, rows.tables, state.unflatten(2, (stored.shape[1], -1)).transpose(1, 2))
        return torch.stack(outs, dim=1) + layer.skip * inputs

    for rows in _padded_rows(step, x.device):
        gate = rows.gather(projected[:, layer.channels :])
        mixed = run(rows, x, dt, b, c) * _silu(gate)
        out.index_copy_(0, rows.tokens.flatten(), mixed.flatten(0, 1).to(out.dtype))
        _replay_later(step, rows, run, x, dt, b, c)
    return out[: len(x)]
