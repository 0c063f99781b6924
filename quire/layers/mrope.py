"""Rotary positions of three coordinates (M-RoPE, arXiv 2409.12191): each pair of a head turns by one of them.

Tokens of text have the same number in all three, so that only chunks of prompts with images need more than one position
a token: a table of their own rotations is made once a step, and read in order.
"""

from __future__ import annotations

from typing import Any

import torch

from quire.errors import UnsupportedModelError
from quire.layers.build_context import BuildContext


def position_axes(build: BuildContext) -> torch.Tensor | None:
    """[rotated pairs] int64: which of a token's three positions each pair turns by; None: the model has one."""
    rope = build.config.rope
    sections = rope.get("mrope_section")
    if not sections:
        return None
    if len(sections) != 3:
        raise UnsupportedModelError(f"mrope_section has three numbers; the config has {sections!r}")
    count = sum(sections)
    if rope.get("mrope_interleaved"):
        pairs = torch.arange(count)
        axes = pairs % 3
        limits = torch.tensor(sections)[axes] * 3
        axes = torch.where((axes > 0) & (pairs < limits), axes, 0)
    else:
        axes = torch.repeat_interleave(torch.arange(3), torch.tensor(sections))
    return axes.to(build.device)


def mixed_rotations(
    cos_sin: torch.Tensor, positions: torch.Tensor, axes: torch.Tensor | None, common: dict[Any, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """A table of the step's own rotations, and the positions [T] to look them up at.

    cos_sin [positions, 2 * pairs], cosines first; positions [3, T]; `common`: what the step's layers share.
    """
    if axes is None:  # a proposer's layers, whose model has one position a token
        return cos_sin, positions[0]
    key = ("rotations", cos_sin.data_ptr())
    if key not in common:
        pairs = cos_sin.shape[1] // 2
        if len(axes) != pairs:
            raise UnsupportedModelError(f"mrope_section covers {len(axes)} pairs, and {pairs} are rotated")
        rotations = cos_sin[positions].unflatten(-1, (2, pairs))  # [3, T, 2, pairs]
        index = axes.expand(1, *rotations.shape[1:])
        table = rotations.gather(0, index)[0].flatten(1)
        common[key] = (table, torch.arange(positions.shape[1], device=positions.device))
    return common[key]
