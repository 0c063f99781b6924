"""Round to nearest: a matrix in 16 or 32 bits as codes and scales, for every kind of number that quire stores.

Pure functions of tensors, on any device. A weight is [..., out, in]; codes have its shape, unpacked. Scales are rounded
to `scale_dtype` before the codes are chosen, so that a reader that holds them in 16 bits finds the codes nearest to
its own scales. The codes fit `write` of the layouts in `quire/kernels/weights`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from quire.kernels.weights.fp4 import VALUES
from quire.kernels.weights.scaled import LARGEST, encode

FP4_LARGEST = VALUES[-1]
FP4_EXPONENT = 2
"""Exponent of the largest 4-bit float, 6 = 1.5 * 2^2."""
E4M3_SMALLEST = 2.0**-9
SHRINKS = tuple(1 - step / 40 for step in range(21))
"""Parts of a group's range that the search for the best scale tries: 1 to 0.5."""
_MIDDLES = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))
"""Borders between neighbouring 4-bit floats, and whether the border itself belongs to the larger: ties go to even."""


class Rounded(NamedTuple):
    """A matrix of small integers or 8-bit floats."""

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None = None


def round_channels(
    weight: torch.Tensor, code: torch.dtype, scale_dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes int8 or float8_e4m3fn, scale [..., out]): value = code * scale, scale = max |row| / the largest code."""
    wide = weight.float()
    scale = _stored(wide.abs().amax(-1) / LARGEST[code], scale_dtype)
    return encode(wide / scale.float().unsqueeze(-1), code), scale


def round_blocks(
    weight: torch.Tensor, block: tuple[int, int] = (128, 128), scale_dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes float8_e4m3fn, scale [..., block rows, block columns]); the last blocks may be smaller."""
    rows, columns = weight.shape[-2:]
    padded = F.pad(weight.float(), (0, -columns % block[1], 0, -rows % block[0]))
    blocks = padded.unflatten(-1, (-1, block[1])).unflatten(-3, (-1, block[0]))  # [..., rows, block, columns, block]
    scale = _stored(blocks.abs().amax((-3, -1)) / LARGEST[torch.float8_e4m3fn], scale_dtype)
    codes = encode(blocks / scale.float().unsqueeze(-1).unsqueeze(-3), torch.float8_e4m3fn)
    return codes.flatten(-2).flatten(-3, -2)[..., :rows, :columns].contiguous(), scale


def round_groups(
    weight: torch.Tensor,
    bits: int,
    group: int,
    symmetric: bool = True,
    scale_dtype: torch.dtype = torch.float32,
    search: bool = False,
    importance: torch.Tensor | None = None,
) -> Rounded:
    """Integers with a scale per output and `group` inputs: value = (code - zero) * scale.

    Codes are unsigned, uint8. Symmetric: zero is 2^(bits - 1), and None here; otherwise uint8 [..., out, groups].
    `search`: scales with the least squared error, of part of the range, rather than those that hold the largest value.
    `importance` [in]: weights of the errors, such as the mean square of each input.
    """
    scale, zero = group_scales(weight, bits, group, symmetric, scale_dtype, search, importance)
    grouped = _grouped(weight, group)
    middle = _middle(bits) if zero is None else zero.float().unsqueeze(-1)
    return Rounded(integer_codes(grouped, scale.float().unsqueeze(-1), middle, bits).flatten(-2), scale, zero)


def group_scales(
    weight: torch.Tensor,
    bits: int,
    group: int,
    symmetric: bool = True,
    scale_dtype: torch.dtype = torch.float32,
    search: bool = False,
    importance: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(scale, zero) of `round_groups`, each [..., out, groups].

    Symmetric: scale = max |group| / (2^(bits - 1) - 0.5), which makes the outermost values err by half a step on
    either side. Asymmetric: scale = (max - min) / (2^bits - 1), where 0 lies within min to max, so that it is a code.
    """
    grouped = _grouped(weight, group)
    weights = None if importance is None else _grouped(importance, group)
    low, high = grouped.amin(-1).clamp_max(0), grouped.amax(-1).clamp_min(0)
    peak = torch.maximum(-low, high)
    best: tuple[torch.Tensor, torch.Tensor | None] | None = None
    least = torch.full_like(peak, torch.inf)
    for shrink in SHRINKS if search else SHRINKS[:1]:
        zero = None
        if symmetric:
            scale = _stored(peak * (shrink / (_middle(bits) - 0.5)), scale_dtype)
        else:
            scale = _stored((high - low) * (shrink / (2**bits - 1)), scale_dtype)
            zero = (-low * shrink / scale.float()).round().clamp(0, 2**bits - 1).to(torch.uint8)
        if not search:
            return scale, zero
        error = _squared_error(grouped, scale.float(), zero, bits, weights)
        better = error < least
        least = torch.where(better, error, least)
        if best is None:
            best = scale, zero
        else:
            kept = None if zero is None or best[1] is None else torch.where(better, zero, best[1])
            best = torch.where(better, scale, best[0]), kept
    assert best is not None
    return best


def integer_codes(values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | float, bits: int) -> torch.Tensor:
    """The nearest codes, uint8, for scales and zeros that broadcast to the values."""
    return ((values / scale).round() + zero).clamp(0, 2**bits - 1).to(torch.uint8)


def restore_groups(rounded: Rounded, bits: int, group: int) -> torch.Tensor:
    """The values of `round_groups`, in float32."""
    middle = _middle(bits) if rounded.zero is None else rounded.zero.float().unsqueeze(-1)
    grouped = rounded.codes.unflatten(-1, (-1, group)).float()
    return ((grouped - middle) * rounded.scale.float().unsqueeze(-1)).flatten(-2)


def round_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes uint8 0..15, exponents uint8 [..., out, in / 32]): value = VALUES[code] * 2^(exponent - 127).

    The exponent is the one of OCP's MX specification: floor(log2 max |group|) - 2, so that the largest value becomes
    4 to 8 and saturates at 6.
    """
    grouped = _grouped(weight, 32)
    peak = grouped.abs().amax(-1)
    # frexp: peak = m * 2^e with 0.5 <= m < 1, so that floor(log2 peak) = e - 1, exactly.
    exponent = torch.where(peak > 0, torch.frexp(peak).exponent - 1 - FP4_EXPONENT, -127).clamp(-127, 127)
    codes = fp4_codes(torch.ldexp(grouped, -exponent.unsqueeze(-1)))
    return codes.flatten(-2), (exponent + 127).to(torch.uint8)


def round_nvfp4(
    weight: torch.Tensor, peak: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes uint8 0..15, scale float8_e4m3fn [..., out, in / 16], divisor float32 scalar).

    value = VALUES[code] * scale / divisor, divisor = 448 * 6 / peak; `peak` is max |weight|, or that of all parts of
    a fused layer, which readers want to have one divisor.
    """
    grouped = _grouped(weight, 16)
    peak = weight.abs().amax().float() if peak is None else peak.float()
    divisor = LARGEST[torch.float8_e4m3fn] * FP4_LARGEST / torch.where(peak > 0, peak, 1.0)
    scale = encode(grouped.abs().amax(-1) / FP4_LARGEST * divisor, torch.float8_e4m3fn)
    smallest = torch.full_like(scale, E4M3_SMALLEST)
    scale = torch.where(scale.float() == 0, smallest, scale)
    return fp4_codes(grouped * (divisor / scale.float()).unsqueeze(-1)).flatten(-2), scale, divisor


def fp4_codes(values: torch.Tensor) -> torch.Tensor:
    """The nearest 4-bit floats, ties to even, saturated; as codes 0..15."""
    size = values.abs()
    codes = torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
    for border, up in _MIDDLES:
        codes += (size >= border) if up else (size > border)
    return codes | ((values < 0) & (codes > 0)).to(torch.uint8) << 3


def _stored(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The scale as it is stored; never zero."""
    smallest = 2.0**-24 if dtype is torch.float16 else torch.finfo(dtype).tiny
    return scale.clamp_min(smallest).to(dtype)


def _middle(bits: int) -> float:
    return float(1 << (bits - 1))


def _grouped(weight: torch.Tensor, group: int) -> torch.Tensor:
    """[..., in] as [..., groups, group] float32."""
    if weight.shape[-1] % group:
        raise ValueError(f"groups of {group} do not divide {weight.shape[-1]} inputs")
    return weight.float().unflatten(-1, (-1, group))


def _squared_error(
    grouped: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, bits: int, weights: torch.Tensor | None
) -> torch.Tensor:
    spread = scale.unsqueeze(-1)
    middle = _middle(bits) if zero is None else zero.float().unsqueeze(-1)
    codes = integer_codes(grouped, spread, middle, bits).float()
    error = ((codes - middle) * spread - grouped).square()
    return (error if weights is None else error * weights).sum(-1)
