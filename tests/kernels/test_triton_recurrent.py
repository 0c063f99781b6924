"""Triton's kernels of recurrent layers against the same recurrences in plain torch, token by token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from quire.kernels import reference_states
from quire.layers.caches import StatePart
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
from tests.kernels.triton_target import DEVICE

# isort: split
from quire.kernels.reference import TorchOps
from quire.kernels.triton.ops import TritonOps
from quire.kernels.triton.recurrent import decode, delta_net
from quire.kernels.triton.recurrent.chunks import CHUNK
from quire.kernels.triton.recurrent.delta_net import DeltaNetConfig

LAYERS: dict[str, Any] = {
    "delta": lambda: random_delta_net(1, 2, 16, 16, torch.float32, DEVICE),
    "delta-odd": lambda: random_delta_net(1, 1, 12, 20, torch.float32, DEVICE, taps=3),
    "mamba": lambda: random_mamba2(2, 1, 16, 32, torch.float32, DEVICE),
}


def assert_near(actual: torch.Tensor, expected: torch.Tensor, share: float = 1e-5) -> None:
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= share * expected.abs().max()


def states_of(view: Any, tables: torch.Tensor) -> list[torch.Tensor]:
    return [view.read(part, tables) for part in range(2)]


@pytest.mark.parametrize("name", list(LAYERS))
def test_decodes(name: str) -> None:
    layer = LAYERS[name]()
    is_delta = name.startswith("delta")
    parts = state_parts(layer, torch.float32)
    view, tables = random_states(parts, 4, 4112, DEVICE)
    # One in the middle, one within the taps of its begin, one that begins, and a padding row.
    counts, contexts = [1] * 4, [40, 2, 1, 0]
    tables[3] = 0
    step = step_of(tables, counts, contexts, in_batch=True)
    x = random_inputs(layer, sum(counts), torch.float32)
    expected_view = copied(view)
    reference = reference_states.delta_net if is_delta else reference_states.mamba2
    expected = reference(x, layer, expected_view, step)
    out = torch.full_like(expected, torch.nan)
    assert decode.rows_of(step) == (4, True)
    kernel = decode.delta_net_decode if is_delta else decode.mamba2_decode
    kernel(x, layer, view, step, out, 4)
    assert_near(out, expected)
    assert (out[3:] == 0).all()
    for ours, theirs in zip(states_of(view, tables[:3]), states_of(expected_view, tables[:3]), strict=True):
        assert_near(ours, theirs)


@pytest.mark.parametrize("name", ["delta", "mamba"])
def test_steps_with_prompts(name: str) -> None:
    """Decodes, then a prompt of several chunks, one within taps of its begin, one that begins, none, and padding."""
    layer = LAYERS[name]()
    view, tables = random_states(state_parts(layer, torch.float32), 7, 4112, DEVICE)
    counts = [1, 1, CHUNK + 5, 2, CHUNK, 0, 3]
    contexts = [30, 1, 90 + CHUNK, 4, CHUNK, 0, 0]
    tables[5:] = 0
    step = step_of(tables, counts, contexts, in_batch=True)
    x = random_inputs(layer, sum(counts), torch.float32)
    expected_view = copied(view)
    op = "delta_net" if name == "delta" else "mamba2"
    expected = getattr(TorchOps(), op)(x, layer, expected_view, step)
    step.plans.clear()
    out = getattr(TritonOps(), op)(x, layer, view, step)
    # The sum of a chunk's decays, some hundreds, is rounded to 3e-5: so is the factor that it is the exponent of.
    assert_near(out[:-3], expected[:-3], 1e-4)
    assert out.isfinite().all()
    for ours, theirs in zip(states_of(view, tables[:5]), states_of(expected_view, tables[:5]), strict=True):
        assert_near(ours, theirs, 1e-4)


COUNTS = [1, 1, 1, CHUNK + 19, 2, CHUNK, 0, 3]
CONTEXTS = [30, 1, 2, 70 + CHUNK, 7, CHUNK, 0, 0]
"""Decodes in the middle and at the begin; prompts likewise, one shorter than the ring; none, and padding."""


@pytest.mark.parametrize("gated", [True, False])
def test_short_convolutions(gated: bool) -> None:
    conv = random_short_conv(40, torch.float32, DEVICE, taps=4 if gated else 3, bias=gated)
    layer = replace(conv, gated=gated)
    part = StatePart(5, (len(layer.conv), 8), torch.float32)
    view, tables = random_states([part], 8, 272, DEVICE)
    tables[6:] = 0
    step = step_of(tables, COUNTS, CONTEXTS, in_batch=gated)
    x = random_inputs(layer, sum(COUNTS), torch.float32)
    expected_view = copied(view)
    expected = TorchOps().short_conv(x, layer, expected_view, step)
    step.plans.clear()
    out = TritonOps().short_conv(x, layer, view, step)
    assert_near(out[:-3], expected[:-3])
    assert (out[-3:] == 0).all()
    assert_near(view.read(0, tables[:6]), expected_view.read(0, tables[:6]))


def test_selective_scans() -> None:
    layer = random_mamba(48, 8, DEVICE)
    part = StatePart(3, (8, 16), torch.float32)
    view, tables = random_states([part], 8, 1040, DEVICE)
    tables[6:] = 0
    step = step_of(tables, COUNTS, CONTEXTS, in_batch=True)
    tokens = sum(COUNTS)
    x, dt, both = (torch.randn(tokens, width, device=DEVICE) for width in (48, 48, 16))
    b, c = both.split(8, dim=1)
    projected = torch.randn(tokens, layer.in_width, device=DEVICE)
    expected_view = copied(view)
    expected = TorchOps().mamba(x, dt, b, c, projected, layer, expected_view, step)
    step.plans.clear()
    out = TritonOps().mamba(x, dt, b, c, projected, layer, view, step)
    assert_near(out[:-3], expected[:-3])
    assert (out[-3:] == 0).all()
    assert_near(view.read(0, tables[:6]), expected_view.read(0, tables[:6]))


@pytest.mark.parametrize("leaf", [1, 4])
def test_keys_that_hardly_differ(leaf: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system of a chunk is then as badly conditioned as it can be: powers of it would overflow."""
    monkeypatch.setattr(delta_net, "choose", lambda *_: DeltaNetConfig(solve_leaf=leaf, scan_values=16))
    layer = LAYERS["delta"]()
    view, tables = random_states(state_parts(layer, torch.float32), 1, 4112, DEVICE)
    x = random_inputs(layer, 1, torch.float32).repeat(2 * CHUNK, 1)
    x[:, -2 * layer.value_heads :] = 8.0  # beta near 1
    layer.decay.mul_(1e-3)
    step = step_of(tables, [2 * CHUNK], [2 * CHUNK])
    expected = TorchOps().delta_net(x, layer, copied(view), step)
    assert_near(TritonOps().delta_net(x, layer, view, step), expected, 1e-3)


def test_norms_and_gates() -> None:
    ours, theirs = TritonOps(), TorchOps()
    x, both, weight = (torch.randn(*shape, device=DEVICE) for shape in ((5, 96), (5, 200), (96,)))
    gate = both[:, 3:99]
    for groups in (1, 4):
        assert_near(ours.gated_norm(x, gate, weight, groups, 1e-5), theirs.gated_norm(x, gate, weight, groups, 1e-5))
    assert_near(ours.sigmoid_mul(x.clone(), gate), theirs.sigmoid_mul(x, gate))
