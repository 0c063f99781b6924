"""The products of adapters: every kernel beside a computation in float64, token by token."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from quire.kernels.adapters import SlotLowRank, SlotTokens
from quire.kernels.base import Ops
from quire.kernels.cpu.ops import CpuOps
from quire.kernels.reference import TorchOps
from tests.adapters.low_rank import CASES, expected, random_case


@pytest.mark.parametrize("make_ops", [TorchOps, CpuOps])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_token_gets_the_product_of_its_slot(
    make_ops: Callable[[], Ops], dtype: torch.dtype, case: tuple[int, int, tuple[int, ...], int, int, int]
) -> None:
    bounds = case[2]
    out, x, a, b, slots = random_case(*case, dtype)
    wanted = expected(out, x, a, b, slots, bounds)
    make_ops().add_low_rank(out, x, SlotLowRank(a, b, SlotTokens(slots, range(case[5])), bounds))
    scale = float(wanted.abs().max())
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=scale * (3e-2 if dtype is torch.bfloat16 else 1e-5))


def test_a_tokens_bits_do_not_depend_on_the_others() -> None:
    bounds = (0, 64, 96, 128)
    ops = CpuOps()
    if not ops.is_native:
        pytest.skip("no compiler")
    out, x, a, b, slots = random_case(33, 3, bounds, 70, 16, 4, torch.float32)
    alone = out.clone()
    ops.add_low_rank(out, x, SlotLowRank(a, b, SlotTokens(slots, range(4)), bounds))
    for token in range(33):
        one = slice(token, token + 1)
        ops.add_low_rank(alone[one], x[one], SlotLowRank(a, b, SlotTokens(slots[one], range(4)), bounds))
    assert torch.equal(alone, out)
