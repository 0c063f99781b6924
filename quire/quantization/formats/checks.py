"""Checks that formats share: values that scales must have, and where a matrix can be cut."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch

from quire.errors import CheckpointError

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
E8M0: tuple[torch.dtype, ...] = tuple(
    dtype for dtype in (getattr(torch, "float8_e8m0fnu", None), torch.uint8) if dtype is not None
)
"""How checkpoints store powers of two: torch's type, where this torch has it, or the bytes."""


def span(part: slice, size: int) -> tuple[int, int]:
    """(start, stop) of a slice of `size` values."""
    start, stop, _ = part.indices(size)
    return start, stop


def shrink(part: slice, size: int, unit: int, numerator: int = 1) -> slice:
    """The slice of a tensor that holds `numerator` entries for every `unit` values: `part` cuts at multiples of unit,
    or at the end."""
    start, stop = span(part, size)
    return slice(start * numerator // unit, -(-stop * numerator // unit))


def check_multiple(part: slice, size: int, unit: int, axis: str, why: str) -> None:
    """Raise ValueError if `part` of `size` inputs or outputs does not begin and end at a multiple of `unit`."""
    start, stop = span(part, size)
    if start % unit == 0 and (stop % unit == 0 or stop == size):
        return
    ranks = [str(count) for count in range(1, 65) if size % count == 0 and size // count % unit == 0]
    works = f"{size} {axis} can be split over {', '.join(ranks)} ranks" if ranks else f"{size} {axis} cannot be split"
    raise ValueError(f"{axis} {start}:{stop} of {size} cannot be cut out: {why} {unit} {axis} belong together; {works}")


def check_scale(name: str, scale: torch.Tensor, zeros: bool = False) -> torch.Tensor:
    """The scale, if every value is finite and positive (`zeros`: or zero)."""
    wide = scale.float()
    wrong = ~torch.isfinite(wide) | ((wide < 0) if zeros else (wide <= 0))
    count = int(wrong.sum())
    if count:
        value = wide[wrong][0].item()
        raise CheckpointError(
            f"{name}: {count} of {wrong.numel()} scales are not finite{' and positive' if not zeros else ''} "
            f"(the first is {value})"
        )
    return scale


def check_exponents(name: str, exponent: torch.Tensor) -> torch.Tensor:
    """The exponents (uint8), if none is NaN (255)."""
    count = int((exponent == 255).sum())
    if count:
        raise CheckpointError(f"{name}: {count} of {exponent.numel()} scales are NaN")
    return exponent


def check_fp8(name: str, codes: torch.Tensor) -> torch.Tensor:
    """The float8_e4m3fn codes, if none is NaN."""
    if bool(((codes.view(torch.uint8) & 0x7F) == 0x7F).any()):
        raise CheckpointError(f"{name}: has NaN values")
    return codes


_SHARED = threading.Lock()
"""Matrices are placed by several threads."""


def check_agreement(into: torch.Tensor, value: torch.Tensor, name: str, what: str) -> None:
    """Write `value` to a tensor that all parts of a weight share, and that is zero before the first is placed.

    Raise CheckpointError if an earlier part had another value; `what`: what it is a property of.
    """
    value = value.to(into.device, into.dtype).reshape(into.shape)
    with _SHARED:
        if bool(into.any()) and not torch.equal(into, value):
            shown = f": {into.flatten()[0].item():g} and {value.flatten()[0].item():g}" if into.numel() == 1 else ""
            raise CheckpointError(
                f"{name}: differs between matrices that are held as one weight and share {what}{shown}"
            )
        into.copy_(value)


def on(device: torch.device, read: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors on a device."""
    return {name: tensor.to(device, non_blocking=True) for name, tensor in read.items()}


def need(read: Mapping[str, torch.Tensor], *names: str) -> torch.Tensor:
    """The first of the tensors that is there."""
    found = next((read[name] for name in names if name in read), None)
    if found is None:
        raise CheckpointError(f"{names[0]}: missing from the checkpoint")
    return found
