"""Pages in 8 bits: how far values are from what was encoded, that a page loses nothing more, and the GPU's kernels."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.page_codes import PageCodes
from tests.kernels.triton_target import DEVICE, HALF

from quire.kernels.triton.page_codes import decode_pages, encode_pages  # isort: skip

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def pages_of(count: int, format: PageCodes) -> torch.Tensor:
    """Vectors of very different sizes, some of zeros."""
    sizes = 10.0 ** torch.randint(-3, 3, (count, format.vectors, 1))
    values = torch.randn(count, format.vectors, format.vector) * sizes
    values[:, ::5] = 0
    return values.to(format.dtype).flatten(1).to(DEVICE)


def moved(format: PageCodes, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encoded pages, and what comes back."""
    encoded = torch.zeros(len(pages), format.encoded_bytes, dtype=torch.uint8, device=pages.device)
    format.encode(pages, encoded)
    return encoded, format.decode(encoded)


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_within_half_a_code_of_what_they_were(dtype: torch.dtype) -> None:
    format = PageCodes(dtype, 24 * 40, 40)
    pages = pages_of(7, format)
    _, back = moved(format, pages)
    before, after = (x.double().unflatten(1, (-1, 40)) for x in (pages, back))
    half = before.abs().amax(-1, keepdim=True) / 127 / 2
    rounding = torch.finfo(dtype).eps / 2 * before.abs().amax(-1, keepdim=True)
    assert ((after - before).abs() <= half * (1 + 1e-5) + rounding).all()
    assert torch.equal(before.abs().amax(-1), after.abs().amax(-1)) or dtype == torch.float32
    assert (after[:, ::5] == 0).all() and not torch.equal(after, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_page_loses_nothing_more_when_it_moves_again(dtype: torch.dtype) -> None:
    format = PageCodes(dtype, 512 * 64, 64)
    encoded, back = moved(format, pages_of(8, format))
    again, same = moved(format, back)
    assert torch.equal(again, encoded) and torch.equal(same, back)


def test_sizes() -> None:
    """Llama-3.1-8B: 32 layers of 8 heads of 128 in 16 bits."""
    format = PageCodes(torch.bfloat16, 32 * 2 * 8 * 16 * 128, 128)
    assert format.encoded_bytes == 1 << 20 | 1 << 14 and format.encoded_bytes / (2 << 20) < 0.508
    odd = PageCodes(torch.bfloat16, 3 * 5, 5)
    assert odd.largest_at == 16 and odd.encoded_bytes == 32, "parts begin at multiples of 16 bytes"


def test_vectors_that_are_not_finite_come_back_as_nan() -> None:
    """What was broken stays broken, and nothing else is."""
    format = PageCodes(torch.bfloat16, 4 * 8, 8)
    pages = torch.randn(1, 32, dtype=torch.bfloat16, device=DEVICE)
    pages[0, 3], pages[0, 17] = float("nan"), float("inf")
    _, back = moved(format, pages)
    assert back.isnan().view(4, 8).all(1).tolist() == [True, False, True, False]
    assert back.isfinite().sum() == 16


@pytest.mark.parametrize("dtype", [HALF, torch.float32])
@pytest.mark.parametrize("vector, vectors", [(64, 96), (80, 13), (8, 3)])
def test_kernels_are_the_reference(dtype: torch.dtype, vector: int, vectors: int) -> None:
    """Bit by bit, for pages anywhere, and nothing else is written."""
    format = PageCodes(dtype, vector * vectors, vector)
    pages = pages_of(9, format)
    pages[2, 5] = float("nan")
    pages[2, -1] = float("inf")
    numbers = torch.tensor([7, 2, 5], dtype=torch.int32, device=DEVICE)
    expected, values = moved(format, pages[numbers.long()])
    encoded = torch.zeros(5, format.encoded_bytes, dtype=torch.uint8, device=DEVICE)
    encode_pages(format, pages, numbers, encoded)
    assert torch.equal(encoded[:3], expected) and not encoded[3:].any()
    found = torch.full_like(pages, 3.0)
    decode_pages(format, encoded, found, numbers)
    assert torch.equal(found[numbers.long()].nan_to_num(9.0), values.nan_to_num(9.0))
    untouched = [number for number in range(9) if number not in (7, 2, 5)]
    assert (found[untouched] == 3.0).all()
