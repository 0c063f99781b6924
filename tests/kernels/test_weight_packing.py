"""Where packed codes lie, by the definition in `kernels/weights/packing.py`."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.weights.fp4 import Fp4Weight
from quire.kernels.weights.grouped import GroupedWeight
from quire.kernels.weights.packing import WORD_SPANS, pack, pack_words, unpack, word_span


def random_codes(bits: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, 1 << bits, shape, dtype=torch.uint8)


@pytest.mark.parametrize("bits, span", [(bits, span) for bits, spans in WORD_SPANS.items() for span in spans])
def test_a_words_fields_are_values_a_part_of_a_span_apart(bits: int, span: int) -> None:
    codes = random_codes(bits, 3, 2 * span)
    words = pack_words(codes, bits, span).view(torch.int16).int() & 0xFFFF
    fields = 16 // bits
    for at in range(2 * span):
        first, field, word = at // span, at % span // (span // fields), at % (span // fields)
        held = (words[:, first * (span // fields) + word] >> (bits * field)) & ((1 << bits) - 1)
        assert torch.equal(held, codes[:, at].int())


def test_a_byte_holds_values_half_a_span_apart() -> None:
    codes = random_codes(4, 2, 256)
    packed = pack(codes, 4, None)
    assert torch.equal(packed[:, 3] & 15, codes[:, 3])
    assert torch.equal(packed[:, 3] >> 4, codes[:, 3 + 64])
    assert torch.equal(packed[:, 64 + 3] >> 4, codes[:, 128 + 3 + 64])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("width", [576, 128, 24, 6])
def test_unpacking_is_the_inverse(bits: int, width: int) -> None:
    codes = random_codes(bits, 2, 3, width)
    for span in (None, *(span for span in WORD_SPANS[bits] if width % span == 0)):
        assert torch.equal(unpack(pack(codes, bits, span), bits, span), codes)


@pytest.mark.parametrize(
    "width, bits, group, span",
    [
        (4096, 4, 128, 128), (4096, 4, 32, 128), (4096, 4, 16, 64), (576, 4, 64, 64), (576, 4, 576, 64),
        (4096, 8, 128, 64), (96, 8, 32, 32), (96, 4, 32, None), (4096, 4, 8, None),
    ],
)  # fmt: skip
def test_spans_divide_the_width_and_groups_are_whole_fields(
    width: int, bits: int, group: int, span: int | None
) -> None:
    assert word_span(width, bits, group) == span


def test_written_codes_are_the_dequantized_ones_in_stacks_and_matrices() -> None:
    codes, scale = random_codes(4, 2, 8, 128), torch.rand(2, 8, 4)

    def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    stack = GroupedWeight.allocate((2, 8, 128), torch.float32, zeros, 4, 32)
    for index in range(2):
        stack.write(index, codes[index], scale[index])
        matrix = GroupedWeight.allocate((8, 128), torch.float32, zeros, 4, 32)
        matrix.write(slice(None), codes[index], scale[index])
        right = (codes[index].float() - 8) * scale[index].repeat_interleave(32, -1)
        assert torch.equal(matrix.dequantize(), right)
        assert torch.equal(stack[index].dequantize(), right)
        assert torch.equal(matrix[2:5].dequantize(), right[2:5])
        assert matrix.nbytes == stack.nbytes // 2


def test_fp4_codes_are_numbers_times_scales() -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(1, 4)
    weight = Fp4Weight.allocate((1, 64), torch.bfloat16, lambda shape, dtype: torch.zeros(shape, dtype=dtype))
    weight.write(slice(None), codes, torch.tensor([[127, 130]], dtype=torch.uint8))
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    numbers = torch.cat((numbers, -numbers))
    assert torch.equal(weight.dequantize()[0].float(), torch.cat((numbers, numbers, 8 * numbers, 8 * numbers)))
