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


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize("bits, span, group", [(4, 128, 32), (4, 64, 64), (8, 64, 32)])
def test_words_of_eight_outputs_lie_side_by_side(bits: int, span: int, group: int) -> None:
    width = 3 * span if span == 64 else 2 * span
    codes = random_codes(bits, 24, width)
    scale, zero = torch.rand(24, width // group), random_codes(bits, 24, width // group)
    weight = GroupedWeight.allocate((24, width), torch.float32, zeros, bits, group, zeros=True)
    assert weight.side_by_side and weight.span == span
    # In pieces whose ends are no multiples of eight.
    for rows in (slice(0, 11), slice(11, 14), slice(14, 24)):
        weight.write(rows, codes[rows], scale[rows], zero[rows])
    packed = pack_words(codes, bits, span)
    run = span * bits // 16  # bytes: half a span
    eights = [packed[line : line + 8, at : at + run] for line in (0, 8, 16) for at in range(0, packed.shape[1], run)]
    assert torch.equal(weight.codes.flatten(), torch.cat([each.flatten() for each in eights]))
    assert weight.zero is not None
    assert torch.equal(weight.zero.flatten(), torch.cat([zero[line : line + 8].T.flatten() for line in (0, 8, 16)]))

    right = (codes.float() - zero.repeat_interleave(group, -1)) * scale.repeat_interleave(group, -1)
    assert torch.equal(weight.dequantize(), right)
    tokens = torch.tensor([23, 0, 9, 9])
    assert torch.equal(weight.embedding(tokens), right[tokens])
    assert torch.equal(weight[5:13].dequantize(), right[5:13])


def test_scales_of_one_byte_lie_side_by_side_too() -> None:
    weight = Fp4Weight.allocate((16, 64), torch.float32, zeros, nvidia=True)
    codes, scale = random_codes(4, 16, 64), (torch.rand(16, 4) * 8).to(torch.float8_e4m3fn)
    factor = torch.rand(16)
    weight.write(slice(None), codes, scale, factor)
    plain = Fp4Weight(pack(codes, 4, 64), scale, torch.float32, factor, span=64)
    assert weight.side_by_side and not plain.side_by_side
    assert torch.equal(weight.dequantize(), plain.dequantize())
    assert torch.equal(weight[torch.tensor([3, 15])].dequantize(), plain.dequantize()[[3, 15]])


def test_outputs_that_are_no_eights_lie_in_one_piece_each() -> None:
    weight = GroupedWeight.allocate((12, 128), torch.float32, zeros, 4, 32)
    codes, scale = random_codes(4, 12, 128), torch.rand(12, 4)
    weight.write(slice(None), codes, scale)
    assert not weight.side_by_side and torch.equal(weight.scale, scale)
