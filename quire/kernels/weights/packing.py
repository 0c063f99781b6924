"""How codes of 4 and 8 bits lie in memory.

Two packings, both over *spans*: runs of inputs that are packed together.
- bytes: byte j of a span holds value j (low) and value j + span / 2; 8-bit codes lie as they come. Stacks of experts.
- words: a little-endian 16-bit word holds values w, w + span / 4, w + span / 2, w + 3 span / 4 (8 bits: w and
  w + span / 2), the first in the lowest bits. Matrices: a register holds two words, and one mask and shift of it gives
  the same field of both, which is the pair of numbers a tensor core takes in one register. So a span is as many small
  products as a word has fields, and no values are interleaved.

Words of eight outputs lie side by side: of each half span first those of the first output, then of the next. So a warp
that reads its registers' part of a tensor-core operand, a few words of eight outputs, reads bytes that are adjacent.
Scales and zeros lie likewise: those of eight outputs for the first group, then for the next.
"""

from __future__ import annotations

import torch

LINES = 8
"""Outputs whose words lie side by side."""
WORD_SPANS = {4: (128, 64), 8: (64, 32)}
"""Spans that kernels read as words: 32 or 16 words."""


def word_span(width: int, bits: int, group: int) -> int | None:
    """The span of a matrix of `width` inputs packed as words; None: packed as bytes.

    All values of a field have one scale: a field is no longer than a group, and groups are whole fields.
    """
    for span in WORD_SPANS[bits]:
        field = span * bits // 16
        if width % span == 0 and (group >= width or group % field == 0):
            return span
    return None


def byte_span(width: int) -> int:
    """Inputs whose 4-bit codes are packed together as bytes, in a matrix of `width` inputs."""
    return next(span for span in (128, 64, 32, 16, 8, 4, 2) if width % span == 0)


def pack_words(codes: torch.Tensor, bits: int, span: int) -> torch.Tensor:
    """uint8 codes [..., in] as bytes [..., in * bits / 8] that hold words."""
    fields = codes.unflatten(-1, (-1, 16 // bits, span * bits // 16)).unbind(-2)
    if bits == 4:
        fields = fields[0] | (fields[1] << 4), fields[2] | (fields[3] << 4)
    return torch.stack(fields, -1).flatten(-3)


def unpack_words(packed: torch.Tensor, bits: int, span: int) -> torch.Tensor:
    """The inverse of `pack_words`."""
    halves = packed.unflatten(-1, (-1, span * bits // 16, 2)).unbind(-1)
    if bits == 4:
        halves = halves[0] & 15, halves[0] >> 4, halves[1] & 15, halves[1] >> 4
    return torch.stack(halves, -2).flatten(-3)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes 0..15 [..., in] as [..., in / 2]: byte j of a span holds value j (low) and value j + span / 2."""
    low, high = codes.unflatten(-1, (-1, 2, byte_span(codes.shape[-1]) // 2)).unbind(-2)
    return (low | (high << 4)).flatten(-2)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_nibbles`."""
    pairs = packed.unflatten(-1, (-1, byte_span(2 * packed.shape[-1]) // 2))
    return torch.stack((pairs & 15, pairs >> 4), -2).flatten(-3)


def pack(codes: torch.Tensor, bits: int, span: int | None) -> torch.Tensor:
    """Codes uint8 [..., in] packed as words of this span, or (None) as bytes."""
    if span is not None:
        return pack_words(codes, bits, span)
    return pack_nibbles(codes) if bits == 4 else codes


def unpack(packed: torch.Tensor, bits: int, span: int | None) -> torch.Tensor:
    """The inverse of `pack`."""
    if span is not None:
        return unpack_words(packed, bits, span)
    return unpack_nibbles(packed) if bits == 4 else packed


def _side_by_side(tensor: torch.Tensor, run: int) -> torch.Tensor:
    """A view [lines / LINES, LINES, runs, run] of values [lines, width] that lie side by side in runs of `run`."""
    lines, width = tensor.shape
    return tensor.view(lines // LINES, width // run, LINES, run).transpose(1, 2)


def place_lines(into: torch.Tensor, index: slice, values: torch.Tensor, run: int) -> None:
    """Fill lines of a tensor whose lines lie side by side."""
    lines = torch.arange(*index.indices(len(into)), device=into.device)
    values = values.to(into.device, into.dtype).unflatten(-1, (-1, run))
    if into.dtype is torch.float8_e4m3fn:  # which torch does not index
        into, values = into.view(torch.uint8), values.view(torch.uint8)
    _side_by_side(into, run)[lines // LINES, lines % LINES] = values


def take_lines(held: torch.Tensor, lines: torch.Tensor, run: int) -> torch.Tensor:
    """Lines of a tensor whose lines lie side by side, each in one piece."""
    plain = held.view(torch.uint8) if held.dtype is torch.float8_e4m3fn else held
    return _side_by_side(plain, run)[lines // LINES, lines % LINES].flatten(-2).view(held.dtype)
