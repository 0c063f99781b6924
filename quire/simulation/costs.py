"""How long a step takes on a device, as a function of what it computes: the cost model, its file, and its fit.

    seconds = tokens(n) + context · c + pairs · p + (prompt, if it computes prompt tokens)

`tokens` is a broken line over the step's tokens: flat while the weights' bytes are the limit, rising where arithmetic
is.
`context` counts the tokens that decodes attend to, `pairs` the (query, key) pairs of prompt chunks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.errors import ValidationError

PROFILES = resources.files("quire.simulation") / "profiles"
KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Tokens of a step at which the line of a fitted model may bend."""
SWEEPS = 20_000
"""Of the fit, over all of its parameters."""


class StepWork(msgspec.Struct, frozen=True):
    """What a step computes, as far as its time depends on it."""

    decodes: int
    """Rows that compute their last token."""
    prompt_tokens: int
    context: int
    """Tokens that the decodes attend to, over all of them."""
    pairs: int
    """(query, key) pairs of the prompt tokens' attention."""

    @property
    def tokens(self) -> int:
        return self.decodes + self.prompt_tokens


class CostModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of a step, and what the device has room for."""

    name: str
    source: str
    """Where the numbers come from: the command that measured them, or what they were derived from."""
    tokens: list[tuple[int, float]]
    """(tokens of a step, seconds): linear between these, and beyond the last as between the last two."""
    context_seconds: float
    """Per token of context of a decode."""
    pair_seconds: float
    """Per (query, key) pair of a prompt."""
    prompt_seconds: float = 0.0
    """Fixed part of a step that computes prompt tokens."""
    num_blocks: int = 10_000
    """KV blocks that fit beside the weights…"""
    block_size: int = 16
    """…and tokens of each."""
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    pipeline_depth: int = 0
    """Steps in flight beside the one that is collected."""
    error: float | None = None
    """Median relative error over the steps it was fitted to; None: it was not fitted."""
    watts: float | None = None
    """Mean power while it computes."""
    layers: int | None = None
    """Of the model, as are the next three: what is needed to model ranks and tiers (`ranks.py`)."""
    hidden_size: int | None = None
    weight_bytes: int | None = None
    kv_bytes_per_token: int | None = None
    stages: int = 1
    """Pipeline stages, which work on different steps at the same time…"""
    hop_seconds: float = 0.0
    """…and what it takes from one to the next."""

    def seconds(self, shape: StepWork) -> float:
        """How long such a step takes."""
        if not shape.tokens:
            return 0.0
        total = self._line(shape.tokens) + self.context_seconds * shape.context + self.pair_seconds * shape.pairs
        return total + (self.prompt_seconds if shape.prompt_tokens else 0.0)

    def _line(self, tokens: int) -> float:
        knots = self.tokens
        if tokens <= knots[0][0]:
            return knots[0][1]
        for (left, low), (right, high) in itertools.pairwise(knots):
            if tokens <= right:
                return low + (high - low) * (tokens - left) / (right - left)
        (left, low), (right, high) = knots[-2] if len(knots) > 1 else (0, 0.0), knots[-1]
        return high + (high - low) * (tokens - right) / (right - left)


def read_profile(name: str) -> CostModel:
    """A profile that is shipped, by name, or one of the user's, by path."""
    path = Path(name)
    shipped = PROFILES / f"{name}.json"
    if path.suffix == ".json" and path.is_file():
        data = path.read_bytes()
    elif shipped.is_file():
        data = shipped.read_bytes()
    else:
        known = ", ".join(profile_names())
        raise ValidationError(
            f"there is no cost model {name!r}: known are {known}; `quire calibrate` writes one for the device at hand"
        )
    try:
        model = msgspec.json.decode(data, type=CostModel)
    except msgspec.MsgspecError as error:
        raise ValidationError(f"{name} is not a cost model: {error}") from None
    _check(model, name)
    return model


def profile_names() -> list[str]:
    """Names of the profiles that are shipped."""
    return sorted(entry.name.removesuffix(".json") for entry in PROFILES.iterdir() if entry.name.endswith(".json"))


def _check(model: CostModel, name: str) -> None:
    places = [at for at, _ in model.tokens]
    seconds = [value for _, value in model.tokens]
    if not places or places != sorted(set(places)) or places[0] < 1:
        raise ValidationError(f"{name}: `tokens` must be pairs of (tokens, seconds), with tokens rising from 1 or more")
    if min(*seconds, model.context_seconds, model.pair_seconds, model.prompt_seconds) < 0 or max(seconds) <= 0:
        raise ValidationError(f"{name}: seconds must not be negative")
    if min(model.num_blocks, model.block_size, model.max_num_seqs, model.max_num_batched_tokens) < 1:
        raise ValidationError(
            f"{name}: num_blocks, block_size, max_num_seqs and max_num_batched_tokens must be above 0"
        )


# Fitting


def fit(model: CostModel, shapes: Sequence[StepWork], seconds: Sequence[float]) -> CostModel:
    """`model` with the parameters that give the least squared relative error over these steps; none is negative, and
    the line over tokens never falls."""
    if len(shapes) < 4:
        raise ValidationError(f"a cost model cannot be fitted to {len(shapes)} steps: at least 4 are needed")
    largest = max(shape.tokens for shape in shapes)
    knots = [knot for knot in KNOTS if knot < largest] + [largest]
    measured = np.asarray(seconds, np.float64)
    columns = np.array([_features(shape, knots) for shape in shapes]) / measured[:, None]
    found = _least_squares(columns, np.ones(len(shapes)))
    line = np.cumsum(found[: len(knots)]).tolist()
    prompt, context, pair = found[len(knots) :].tolist()
    fitted = msgspec.structs.replace(
        model,
        tokens=list(zip(knots, line, strict=True)),
        prompt_seconds=prompt,
        context_seconds=context,
        pair_seconds=pair,
    )
    errors = [abs(fitted.seconds(shape) / took - 1) for shape, took in zip(shapes, seconds, strict=True)]
    return msgspec.structs.replace(fitted, error=float(np.median(errors)))


def _features(shape: StepWork, knots: Sequence[int]) -> list[float]:
    """What each parameter is multiplied with: increments of the line at the knots, then the other three."""
    place = float(np.interp(shape.tokens, knots, np.arange(len(knots))))
    rises = [min(1.0, max(0.0, place - knot + 1)) for knot in range(len(knots))]
    return [*rises, float(shape.prompt_tokens > 0), shape.context, shape.pairs]


def _least_squares(columns: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares with no negative parameter, one parameter after the other."""
    scale = np.linalg.norm(columns, axis=0)
    scale[scale == 0] = 1.0
    matrix = columns / scale
    gram, right = matrix.T @ matrix, matrix.T @ target
    found = np.zeros(len(right))
    for _ in range(SWEEPS):
        before = found.copy()
        for i in np.flatnonzero(np.diag(gram)):
            found[i] = max(0.0, found[i] + (right[i] - gram[i] @ found) / gram[i, i])
        if np.abs(found - before).max() <= 1e-12 * max(1.0, np.abs(found).max()):
            break
    return found / scale
