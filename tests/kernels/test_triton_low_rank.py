"""The Triton kernels of adapters' products, beside a computation in float64."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.adapters import SlotLowRank, SlotTokens
from quire.kernels.gates import gate_mul
from quire.kernels.reference import TorchOps
from tests.adapters.low_rank import CASES, expected, random_case
from tests.kernels.triton_target import DEVICE, HALF, ON_GPU

# isort: split
from quire.kernels.triton import low_rank, ops
from quire.kernels.triton.ops import TritonOps
from quire.kernels.triton.skinny_gemm.common import GemmConfig

Case = tuple[int, int, tuple[int, ...], int, int, int]
FEW: list[Case] = [CASES[0], CASES[1], (9, 2, (0, 150, 300), 129, 8, 3), (2, 1, (0, 40), 2100, 4, 2)]
TILES: list[Case] = [(37, 3, (0, 64, 96, 160), 70, 16, 3), (20, 2, (0, 130, 260), 600, 5, 6)]
ON_CARD: list[Case] = [
    (rows, parts, bounds, depth, 16, 64)
    for rows in (1, 8, 16, 17, 64, 256, 600)
    for parts, bounds, depth in ((3, (0, 4096, 5120, 6144), 4096), (1, (0, 4096), 14336))
]
"""Matrices of an 8B model."""


def on_device(case: Case, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, SlotLowRank]:
    out, x, a, b, slots = (tensor.to(DEVICE) for tensor in random_case(*case, dtype))
    return out, x, SlotLowRank(a, b, SlotTokens(slots, range(case[5])), case[2])


def assert_near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    error = 1e-2 if found.dtype is HALF else 1e-5
    torch.testing.assert_close(found.double(), wanted.double(), rtol=0, atol=error * float(wanted.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("case", [*FEW, *TILES, *(ON_CARD if ON_GPU else [])], ids=str)
def test_every_token_gets_the_product_of_its_slot(dtype: torch.dtype, case: Case) -> None:
    out, x, low = on_device(case, dtype)
    wanted = expected(out, x, low.a, low.b, low.tokens.slots, low.bounds)
    TritonOps().add_low_rank(out, x, low)
    assert (len(low.tokens.made) > 0) == (case[0] > low_rank.FEW_TOKENS)
    assert_near(out, wanted)
    if low.tokens.made:  # the tokens are sorted once for all layers
        again = torch.zeros_like(out)
        TritonOps().add_low_rank(again, x, low)
        assert len(low.tokens.made) == 1
        assert_near(again, expected(torch.zeros_like(out), x, low.a, low.b, low.tokens.slots, low.bounds))


@pytest.mark.parametrize("activation", ["", "silu"])
def test_a_program_takes_several_tiles(monkeypatch: pytest.MonkeyPatch, activation: str) -> None:
    monkeypatch.setattr(low_rank, "EXPAND_PROGRAMS", 0)  # one program for each block of outputs
    out, x, low = on_device((53, 2, (0, 70, 140), 40, 4, 3), torch.float32)
    low.tokens.slots[::7] = -1
    wanted = expected(out, x, low.a, low.b, low.tokens.slots, low.bounds)
    if activation:
        wanted = gate_mul(wanted.float(), activation)
    assert_near(low_rank.expand(low_rank.shrink(x, low), low, out, activation), wanted)


@pytest.mark.parametrize("case", [(3, 2, (0, 70, 140), 40, 4, 2), (21, 2, (0, 140, 280), 40, 4, 3)], ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gates_are_applied_to_all_rows(case: Case, activation: str) -> None:
    out, x, low = on_device(case, torch.float32)
    low.tokens.slots[1] = -1
    wanted = gate_mul(expected(out, x, low.a, low.b, low.tokens.slots, low.bounds).float(), activation)
    assert_near(low_rank.expand(low_rank.shrink(x, low), low, out, activation), wanted)


@pytest.mark.parametrize(("rows", "dtype"), [(1, HALF), (2, torch.float32), (3, HALF)] if ON_GPU else [(3, HALF)])
@pytest.mark.parametrize(
    ("norm", "silu", "residual"),
    [(False, False, False), (True, False, True), (True, True, True), (True, False, False), (False, True, False)],
)
def test_products_that_expand_in_their_epilogue(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, rows: int, norm: bool, silu: bool, residual: bool
) -> None:
    """The `vector` kernel, beside its parts in plain torch."""
    config = GemmConfig("vector", block_n=2 if rows == 1 else 4, warps=4)
    monkeypatch.setattr(ops, "USE_OWN_GEMMS", True)
    monkeypatch.setattr(ops, "choose", lambda *_: config)
    case: Case = (rows, 3, (0, 24, 30, 44), 80, 4, 2)
    _, x, low = on_device(case, dtype)
    low.tokens.slots[0] = 1
    if rows > 1:
        low.tokens.slots[1] = -1
    generator = torch.Generator().manual_seed(rows)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)

    weight, stream, gain, bias = drawn(44, 80) / 9, drawn(rows, 80), drawn(80), drawn(44)
    given = ((gain, 1e-5) if norm else None, stream.clone() if residual else None, "silu" if silu else "")
    # In float32: in 16 bits the plain computation rounds the norm, the product, and the sum with what adapters add.
    own = stream.float() if residual else None
    wide = SlotLowRank(low.a.float(), low.b.float(), low.tokens, low.bounds)
    norms = (gain.float(), 1e-5) if norm else None
    wanted, carried = TorchOps().adapted_linear(x.float(), weight.float(), bias.float(), wide, norms, own, given[2])
    found, left = TritonOps().adapted_linear(x, weight, bias, low, *given)
    assert_near(found, wanted)
    assert (carried is None) == (left is None)
    if carried is not None and left is not None:
        assert_near(left, carried)
