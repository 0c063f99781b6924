"""Logits under a mask of bits, against the same mask spelled out."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_target import DEVICE, HALF

from quire.kernels.triton.masking import BLOCK, mask_logits  # isort: skip


@pytest.mark.parametrize("vocab", [1, 31, 128, BLOCK + 33])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_what_is_not_allowed_is_minus_infinity_and_nothing_else_is_touched(vocab: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(6, vocab + 3, generator=generator).to(DEVICE, dtype)[:, :vocab]
    allowed = torch.rand(3, vocab, generator=generator) < 0.4
    words = -(-vocab // 32)
    padded = torch.nn.functional.pad(allowed, (0, 32 * words - vocab)).view(3, words, 32).long()
    bits = (padded << torch.arange(32)).sum(-1)
    bits = torch.where(bits >= 2**31, bits - 2**32, bits).to(DEVICE, torch.int32)
    rows = torch.tensor([4, 0, 3], dtype=torch.int32, device=DEVICE)
    expected = logits.clone()
    for row, mask in zip(rows.tolist(), allowed, strict=True):
        expected[row, ~mask.to(DEVICE)] = float("-inf")
    mask_logits(logits, rows, bits)
    torch.testing.assert_close(logits, expected, rtol=0, atol=0)


def test_no_rows_are_no_work() -> None:
    logits = torch.zeros(2, 40, device=DEVICE)
    nothing = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    mask_logits(logits, nothing, nothing.view(0, 1).expand(0, 2))
    assert not logits.any()
