"""Triton's kernels of recurrent layers against the same recurrences in plain torch, token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire.kernels import reference_states
from tests.kernels.recurrent_inputs import (
    copied,
    random_delta_net,
    random_inputs,
    random_mamba2,
    random_states,
    state_parts,
    step_of,
)
from tests.kernels.triton_target import DEVICE

# isort: split
from quire.kernels.triton.recurrent import decode

LAYERS: dict[str, Any] = {
    "delta": lambda: random_delta_net(2, 4, 16, 16, torch.float32, DEVICE),
    "delta-odd": lambda: random_delta_net(1, 1, 12, 20, torch.float32, DEVICE, taps=3),
    "mamba": lambda: random_mamba2(4, 2, 16, 32, torch.float32, DEVICE),
}


def assert_near(actual: torch.Tensor, expected: torch.Tensor, share: float = 1e-5) -> None:
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= share * expected.abs().max()


def states_of(view: Any, tables: torch.Tensor) -> list[torch.Tensor]:
    return [view.read(part, tables) for part in range(2)]


@pytest.mark.parametrize("name", list(LAYERS))
@pytest.mark.parametrize("queries", [1, 3])
def test_decodes(name: str, queries: int) -> None:
    layer = LAYERS[name]()
    is_delta = name.startswith("delta")
    parts = state_parts(layer, torch.float32, queries)
    view, tables = random_states(parts, 4, 4112, DEVICE)
    # One in the middle, one within the taps of its begin, one that begins, and a padding row.
    counts, contexts = [queries] * 4, [40, queries + 1, queries, 0]
    tables[3] = 0
    step = step_of(tables, counts, contexts, in_batch=queries == 1)
    x = random_inputs(layer, sum(counts), torch.float32)
    expected_view = copied(view)
    reference = reference_states.delta_net if is_delta else reference_states.mamba2
    expected = reference(x, layer, expected_view, step)
    out = torch.full_like(expected, torch.nan)
    kernel = decode.delta_net_decode if is_delta else decode.mamba2_decode
    kernel(x, layer, view, step, out, 4, single=queries == 1)
    assert_near(out, expected)
    assert (out[3 * queries :] == 0).all()
    for ours, theirs in zip(states_of(view, tables[:3]), states_of(expected_view, tables[:3]), strict=True):
        assert_near(ours, theirs)
