"""The Triton kernels of adapters' products, beside a computation in float64."""

from __future__ import annotations

import pytest
import torch

from tests.adapters.low_rank import CASES, expected, random_case
from tests.kernels.triton_target import DEVICE, HALF

# isort: split
from quire.kernels.triton import low_rank

SMALL = [CASES[0], CASES[1], (9, 2, (0, 150, 300), 129, 8, 3)]
MANY = (37, 3, (0, 64, 96, 160), 70, 16, 3)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("case", [*SMALL, MANY], ids=str)
def test_every_token_gets_the_product_of_its_slot(
    dtype: torch.dtype, case: tuple[int, int, tuple[int, ...], int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(low_rank, "FEW_TOKENS", 20)  # the last case takes tokens in blocks
    bounds = case[2]
    out, x, a, b, slots = (tensor.to(DEVICE) for tensor in random_case(*case, dtype))
    wanted = expected(out, x, a, b, slots, bounds)
    low_rank.add_low_rank(out, x, a, b, slots, bounds)
    scale = float(wanted.abs().max())
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=scale * (1e-2 if dtype is HALF else 1e-5))
