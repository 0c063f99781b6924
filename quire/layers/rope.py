"""Rotary positions: one table of cosines and sines, made at start-up and shared by all layers.

A rope type is a function from the rope's parameters to inverse frequencies, and a factor on cosines and sines.
Angles are float32 products of position and inverse frequency, as in the code these models were trained with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from quire.errors import UnsupportedModelError
from quire.layers.build_context import BuildContext


@dataclass(frozen=True)
class _Rope:
    """The parameters common to all rope types."""

    kind: str
    dim: int
    base: float
    max_position: int
    original_max_position: int
    positions: int
    given: Mapping[str, Any]

    def number(self, name: str) -> float:
        """A parameter this rope type requires."""
        value = self.given.get(name)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise UnsupportedModelError(f"rope type {self.kind!r} needs a number as {name!r}; the config has {value!r}")
        return float(value)

    def frequencies(self, base: float | torch.Tensor | None = None) -> torch.Tensor:
        """base ** (-2i / dim) for each pair i."""
        base = self.base if base is None else base
        return 1.0 / (base ** (torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim))


def rope_tables(build: BuildContext, unrotated: Collection[int] = ()) -> list[torch.Tensor | None]:
    """The table of each layer, shared where it is the same; None for layers that are not rotated."""
    config = build.config
    table = rope_table(build)
    windowed = table if config.window_rope is None else rope_table(build, config.window_rope)
    of_layers = [table if window is None else windowed for window in config.windows]
    return [None if layer in unrotated else of_layers[layer] for layer in range(config.num_layers)]


def rope_table(build: BuildContext, rope: Mapping[str, Any] | None = None, head_dim: int | None = None) -> torch.Tensor:
    """[max_model_len, rotary_dim] float32: cosines of each position's angles, then their sines.

    `rope`: parameters as in `config.rope`, if not those; `head_dim`: of these layers, if not the config's."""
    config = build.config
    given = config.rope if rope is None else rope
    part = 1.0 if given.get("rope_type") == "proportional" else given.get("partial_rotary_factor", 1.0)
    parameters = _Rope(
        kind=str(given.get("rope_type", "default")),
        dim=int((head_dim or config.head_dim) * part),
        base=float(given.get("rope_theta", 10000.0)),
        max_position=config.max_position,
        original_max_position=(
            config.raw.get("original_max_position_embeddings")
            or given.get("original_max_position_embeddings")
            or config.max_position
        ),
        positions=build.max_model_len,
        given=given,
    )
    if (kind := parameters.kind) not in _KINDS:
        raise UnsupportedModelError(f"rope type {kind!r} is not implemented; known: {', '.join(sorted(_KINDS))}")
    frequencies, factor = _KINDS[kind](parameters)
    angles = torch.arange(parameters.positions, dtype=torch.float32).unsqueeze(1) * frequencies
    return (torch.cat((angles.cos(), angles.sin()), dim=-1) * factor).to(build.device)


def _default(rope: _Rope) -> tuple[torch.Tensor, float]:
    return rope.frequencies(), 1.0


def _linear(rope: _Rope) -> tuple[torch.Tensor, float]:
    return rope.frequencies() / rope.number("factor"), 1.0


def _proportional(rope: _Rope) -> tuple[torch.Tensor, float]:
    """Gemma 4: pairs over the whole head, of which only the first are rotated: the others have frequency 0."""
    rotated = int(rope.given.get("partial_rotary_factor", 1.0) * rope.dim // 2)
    frequencies = rope.frequencies() / float(rope.given.get("factor", 1.0))
    return torch.where(torch.arange(len(frequencies)) < rotated, frequencies, 0.0), 1.0


def _dynamic(rope: _Rope) -> tuple[torch.Tensor, float]:
    """NTK scaling whose base grows with the sequence: the row of position p has the base of a sequence of p + 1 tokens.

    Within the original length that is the plain base. Past it, this is what transformers computes when it decodes
    token by token; unlike there, a position's rotation does not depend on the prompt's chunks, so a cached block is the
    same whichever request computed it.
    """
    factor = rope.number("factor")
    lengths = torch.arange(1, rope.positions + 1, dtype=torch.float32).clamp(min=rope.max_position)
    growth = factor * lengths / rope.max_position - (factor - 1)
    return rope.frequencies(rope.base * growth.unsqueeze(1) ** (rope.dim / (rope.dim - 2))), 1.0


def _yarn(rope: _Rope) -> tuple[torch.Tensor, float]:
    """YaRN (arXiv 2309.00071): interpolate slow pairs, leave fast ones alone, blend those between."""
    given = rope.given
    factor = (
        rope.number("factor") if given.get("factor") is not None else rope.max_position / rope.original_max_position
    )

    def pair_with(rotations: float) -> float:
        """The (fractional) pair that makes this many full rotations over the original length."""
        return rope.dim * math.log(rope.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(rope.base))

    low, high = pair_with(given.get("beta_fast") or 32), pair_with(given.get("beta_slow") or 1)
    if given.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    plain = rope.frequencies()
    pairs = torch.arange(len(plain), dtype=torch.float32)
    interpolated = ((pairs - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    return plain / factor * interpolated + plain * (1 - interpolated), _yarn_magnitude(factor, given)


def _yarn_magnitude(factor: float, given: Mapping[str, Any]) -> float:
    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    if given.get("mscale") and given.get("mscale_all_dim"):
        return magnitude(given["mscale"]) / magnitude(given["mscale_all_dim"])
    return magnitude(1.0)


def _llama3(rope: _Rope) -> tuple[torch.Tensor, float]:
    """Llama 3.1: pairs slower than the original length are slowed by `factor`, blending smoothly into fast ones."""
    factor, low, high = rope.number("factor"), rope.number("low_freq_factor"), rope.number("high_freq_factor")
    plain = rope.frequencies()
    rotations = rope.original_max_position * plain / (2 * math.pi)
    kept = ((rotations - low) / (high - low)).clamp(0, 1)
    return plain / factor * (1 - kept) + plain * kept, 1.0


def _longrope(rope: _Rope) -> tuple[torch.Tensor, float]:
    """LongRoPE (arXiv 2402.13753): a divisor for each pair; one list up to the original length, another past it.

    The list is chosen by the longest sequence the engine allows, not by each sequence's own length: otherwise all keys
    of a sequence would change when it passes the original length, and a cached block would depend on the request.
    """
    original, given = rope.original_max_position, rope.given
    name = "long_factor" if rope.positions > original else "short_factor"
    divisors = given.get(name)
    if not isinstance(divisors, (list, tuple)) or len(divisors) != rope.dim // 2:
        raise UnsupportedModelError(
            f"rope type 'longrope' needs {rope.dim // 2} numbers as {name!r}; the config has {divisors!r}"
        )
    for unknown in ("short_mscale", "long_mscale"):
        if given.get(unknown) is not None:
            raise UnsupportedModelError(f"rope type 'longrope' with {unknown} is not implemented")
    factor = rope.number("factor") if given.get("factor") is not None else rope.max_position / original
    if given.get("attention_factor") is not None:
        magnitude = rope.number("attention_factor")
    else:
        magnitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return rope.frequencies() / torch.tensor(divisors, dtype=torch.float32), magnitude


_KINDS: dict[str, Callable[[_Rope], tuple[torch.Tensor, float]]] = {
    "default": _default,
    "mrope": _default,
    "proportional": _proportional,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
}
