"""Recurrent layers in steps that verify drafts: outputs and states are those of plain decodes, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from quire.kernels.states import StateReplay
from quire.layers.attention.base import AttentionInputs
from quire.layers.caches import StateCache, StatePart, StateView
from tests.kernels.recurrent_inputs import (
    copied,
    random_delta_net,
    random_inputs,
    random_mamba,
    random_mamba2,
    random_short_conv,
    random_states,
    state_parts,
    step_of,
)
from tests.kernels.triton_target import DEVICE, ON_GPU

# isort: split
from quire.kernels.reference import TorchOps
from quire.kernels.triton.ops import TritonOps
from quire.kernels.triton.recurrent.commit import commit_later

Run = Callable[[Any, torch.Tensor, StateView, AttentionInputs], torch.Tensor]
"""(ops, inputs, states, step) -> outputs."""


def delta_net() -> tuple[Run, int, Sequence[StatePart]]:
    layer = random_delta_net(1, 2, 16, 16, torch.float32, DEVICE)
    return lambda ops, x, *at: ops.delta_net(x, layer, *at), layer.in_width, state_parts(layer, torch.float32)


def mamba2() -> tuple[Run, int, Sequence[StatePart]]:
    layer = random_mamba2(2, 1, 16, 32, torch.float32, DEVICE)
    return lambda ops, x, *at: ops.mamba2(x, layer, *at), layer.in_width, state_parts(layer, torch.float32)


def short_conv() -> tuple[Run, int, Sequence[StatePart]]:
    layer = random_short_conv(40, torch.float32, DEVICE, taps=3)
    return lambda ops, x, *at: ops.short_conv(x, layer, *at), layer.in_width, [StatePart(5, (3, 8), torch.float32)]


def mamba() -> tuple[Run, int, Sequence[StatePart]]:
    """With its convolution, as the layer calls both."""
    layer = random_mamba(48, 8, DEVICE)
    conv = replace(random_short_conv(48, torch.float32, DEVICE, taps=4), gated=False, part=1)

    def run(ops: Any, x: torch.Tensor, states: StateView, step: AttentionInputs) -> torch.Tensor:
        projected, dt, b, c = x.split([96, 48, 8, 8], dim=-1)
        mixed = ops.short_conv(projected, conv, states, step)
        return ops.mamba(mixed, dt, b, c, projected, layer, states, step)

    parts = [StatePart(3, (8, 16), torch.float32), StatePart(3, (4, 16), torch.float32)]
    return run, 96 + 48 + 16, parts


LAYERS = {each.__name__: each for each in (delta_net, mamba2, short_conv, mamba)}
PADDING = 11
WIDTHS = [4, 1, 8, 3, 2, PADDING]
BEGINS = [40, 2, 7, 0, 11, -PADDING]
"""In the middle, within the taps of its begin, of the largest width, one that begins, one that ends, and padding, which
may be wider."""
ACCEPTED = [2, 1, 7, 3, 0, 1]
PROMPT = 5


def verifying_step(tables: torch.Tensor, widths: Sequence[int], prompt: bool = False) -> AttentionInputs:
    counts, begins = ([*widths, PROMPT], [*BEGINS, 9]) if prompt else (widths, BEGINS)
    contexts = [max(begin + count, 0) for begin, count in zip(begins, counts, strict=True)]
    step = step_of(tables[: len(counts)], counts, contexts, in_batch=True)
    return replace(
        step,
        num_decodes=0,
        num_verifying=len(widths),
        width=max(widths[:-1]),
        num_verified=sum(widths),
        replay=StateReplay(),
    )


def parts_of(view: StateView, tables: torch.Tensor) -> list[torch.Tensor]:
    return [view.read(part, tables) for part in range(len(view.parts))]


@pytest.mark.parametrize(
    ("ops", "prompt"),
    [(TorchOps(), False), (TorchOps(), True), (TritonOps(), True)],
    ids=["torch", "torch-and-prompt", "triton-and-prompt"],
)
@pytest.mark.parametrize("name", list(LAYERS))
def test_rows_that_verify_drafts(name: str, ops: Any, prompt: bool) -> None:
    run, features, parts = LAYERS[name]()
    most = 4 if isinstance(ops, TritonOps) and not ON_GPU else 8  # the interpreter is slow
    widths = [*(min(width, most) for width in WIDTHS[:-1]), PADDING]
    accepted = [min(count, most) for count in ACCEPTED]
    rows, padding = len(WIDTHS) - 1, len(WIDTHS) - 1
    view, tables = random_states(parts, len(WIDTHS) + 1, 4112, DEVICE)
    tables[padding] = 0
    x = torch.randn(sum(widths) + (PROMPT if prompt else 0), features, device=DEVICE)
    plain, before = copied(view), copied(view)

    step = verifying_step(tables, widths, prompt)
    out = run(ops, x, view, step)
    for ours, theirs in zip(parts_of(view, tables[:rows]), parts_of(before, tables[:rows]), strict=True):
        assert torch.equal(ours, theirs), "verification changes no state"
    starts = step.query_starts.tolist()
    assert (out[starts[padding] : sum(widths)] == 0).all()
    assert step.replay is not None
    step.replay.commit(torch.tensor(accepted, dtype=torch.int32, device=DEVICE))

    for place in range(most + 1):
        ended = [row for row in range(rows) if accepted[row] == place]
        for ours, theirs in zip(parts_of(view, tables[ended]), parts_of(plain, tables[ended]), strict=True):
            assert torch.equal(ours, theirs), f"states after {place} tokens"
        left = [row for row in range(rows) if widths[row] > place]
        if not left:
            break
        tokens = [starts[row] + place for row in left]
        decodes = step_of(tables[left], [1] * len(left), [BEGINS[row] + place + 1 for row in left])
        assert torch.equal(out[tokens], run(ops, x[tokens], plain, decodes)), f"outputs of token {place}"
    if prompt:
        own = tables[len(WIDTHS) :]
        expected = run(ops, x[sum(widths) :], plain, step_of(own, [PROMPT], [9 + PROMPT]))
        pairs = [(out[sum(widths) :], expected), *zip(parts_of(view, own), parts_of(plain, own), strict=True)]
        for ours, theirs in pairs:
            assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


NAN = float("nan")


@pytest.mark.parametrize("ops", [TorchOps(), TritonOps()], ids=["torch", "triton"])
@pytest.mark.parametrize("name", list(LAYERS))
def test_what_does_not_count_may_be_nan(name: str, ops: Any) -> None:
    """Outputs and states do not depend on padding, on drafts that are not accepted, on what is in pages before a row's
    first token, nor on another row's values, whatever they are."""
    run, features, parts = LAYERS[name]()
    most = 4 if isinstance(ops, TritonOps) and not ON_GPU else 8
    widths = [*(min(width, most) for width in WIDTHS[:-1]), PADDING]
    accepted = torch.tensor([min(count, most) for count in ACCEPTED], dtype=torch.int32, device=DEVICE)
    padding = len(WIDTHS) - 1
    view, tables = random_states(parts, len(WIDTHS) + 1, 4112, DEVICE)
    tables[padding] = 0
    x = torch.randn(sum(widths) + PROMPT, features, device=DEVICE)
    clean, step = copied(view), verifying_step(tables, widths, prompt=True)
    starts = step.query_starts.tolist()
    x[starts[padding] : starts[padding + 1]] = NAN
    for row in range(padding):
        x[starts[row] + int(accepted[row]) : starts[row + 1]] = NAN
    x[-1] = NAN  # the last token of the prompt, and of the step

    view.memory[0] = 0xFF  # NaN in every format
    for part in range(len(parts)):
        values = view.read(part, tables)
        values[BEGINS.index(0)] = NAN
        if part == len(parts) - 1:
            values[BEGINS.index(2)][:, 2:] = NAN  # slots of no position yet
        view.write(part, tables, values)
    out = run(ops, x, view, step)
    assert step.replay is not None
    step.replay.commit(accepted)

    expected = verifying_step(tables, widths, prompt=True)
    right = run(ops, x.nan_to_num(0.5), clean, expected)
    assert expected.replay is not None
    expected.replay.commit(accepted)
    for row in range(padding):
        own = slice(starts[row], starts[row] + int(accepted[row]))
        assert torch.equal(out[own], right[own]), f"outputs of row {row}"
        for part in range(len(parts)):
            ours, theirs = (each.read(part, tables[row : row + 1]) for each in (view, clean))
            if part == len(parts) - 1:  # slots of the ring that a position has been written to
                known = BEGINS[row] + int(accepted[row])
                ours, theirs = ours[:, :, :known], theirs[:, :, :known]
            assert torch.equal(ours, theirs), f"part {part} of the states of row {row}"
    assert (out[starts[padding] : starts[padding + 1]] == 0).all()


def test_without_replay_states_stay() -> None:
    layer = random_delta_net(1, 2, 16, 16, torch.float32, DEVICE)
    view, tables = random_states(state_parts(layer, torch.float32), len(WIDTHS), 4112, DEVICE)
    before = view.memory.clone()
    step = replace(verifying_step(tables, WIDTHS), replay=None)
    for ops in (TorchOps(), TritonOps()):
        ops.delta_net(random_inputs(layer, sum(WIDTHS), torch.float32), layer, view, step)
        assert torch.equal(view.memory, before)


def test_what_is_kept_is_counted() -> None:
    for layer in (
        random_delta_net(2, 4, 16, 32, torch.float16, DEVICE),
        random_mamba2(4, 2, 16, 32, torch.float16, DEVICE),
    ):
        view, tables = random_states(state_parts(layer, torch.float16), len(WIDTHS), 8208, DEVICE)
        kept = commit_later(
            random_inputs(layer, sum(WIDTHS), torch.float16), layer, view, verifying_step(tables, WIDTHS)
        )
        size = sum(tensor.nbytes for tensor in kept if tensor is not None)
        assert 0 < size <= sum(WIDTHS) * StateCache(view.parts).replay_bytes
