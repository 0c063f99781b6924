"""How long a step takes on a device, as a function of what it computes: the cost model, its file, and its fit.

    seconds = line(n) + (context - shared) · c + shared · s + pairs · p + (rows · r, if it computes prompt tokens)

`line` is a broken line over the step's tokens: flat while the weights' bytes are the limit, rising where arithmetic is.
Steps of decodes alone have one, steps with prompts another, and those of them that run as a captured graph a third.
A captured step is padded: n are the tokens of the graph that it runs in.
`context` counts the tokens that decodes attend to, `shared` those of them that attention reads once for a group of rows
with the same prefix and not again for the other rows, `pairs` the (query, key) pairs of prompt chunks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.errors import ValidationError

PROFILES = resources.files("quire.simulation") / "profiles"
KNOTS = tuple(sorted({*(1 << power for power in range(15)), *(3 << power for power in range(13))}))
"""Tokens of a step at which the line of a fitted model may bend: powers of two, and halfway between them."""
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
    prompts: int = 0
    """Rows that compute prompt tokens."""
    shared: int = 0
    """Of `context`: what attention need not read, because it has read it for another row of a prefix group."""
    has_images: bool = False
    """Prompt tokens read encoded images: such steps are not captured."""

    @property
    def tokens(self) -> int:
        return self.decodes + self.prompt_tokens


Line = list[tuple[int, float]]
"""(tokens of a step, seconds): linear between these, and beyond the last as between the last two."""


class StepPadding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sizes that captured steps are padded to. All rise."""

    decodes: list[int] = []
    """Rows of steps of decodes alone; larger steps are not padded."""
    mixed_decodes: list[int] = []
    """Decodes of steps with prompts…"""
    mixed_tokens: list[int] = []
    """…and prompt tokens of these…"""
    prompts: int = 0
    """…which have at most so many rows with prompt tokens. Steps that fit no size are not captured."""


class CostModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of a step, and what the device has room for."""

    name: str
    source: str
    """Where the numbers come from: the command that measured them, or what they were derived from."""
    tokens: Line
    """Steps of decodes alone, and all others if the next two are not given."""
    context_seconds: float
    """Per token of context of a decode."""
    pair_seconds: float
    """Per (query, key) pair of a prompt."""
    prompt_seconds: float = 0.0
    """Fixed part of a step that computes prompt tokens, if these have no line of their own."""
    prompt_tokens: Line | None = None
    """Steps with prompts…"""
    captured_tokens: Line | None = None
    """…and those of them that run as a captured graph."""
    padding: StepPadding | None = None
    """None: no step is padded, or captured."""
    row_seconds: float = 0.0
    """Per row of a step with prompts, decodes too: attention takes each for itself."""
    shared_seconds: float | None = None
    """Per token of context that a prefix group saves from being read; None: as if it were read."""
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
    expert_bytes: int | None = None
    """Of `weight_bytes`, those of routed experts, with the next two for replicas that share experts…"""
    moe_layers: int | None = None
    """…layers that have some…"""
    experts_per_token: int | None = None
    """…and how many a token goes to."""
    host_out_rate: float | None = None
    """Bytes a second from the device to host memory…"""
    host_back_rate: float | None = None
    """…and from there to the device…"""
    disk_rate: float | None = None
    """…and from disk to host memory."""
    front_seconds: float = 0.0
    """What a request takes beside its steps: from the caller to the engine, and its first token back."""
    host_seconds: float = 0.0
    """What the engine takes between two steps while the device waits for it: where no step is in flight beside the one
    that is collected."""
    stages: int = 1
    """Pipeline stages, which work on different steps at the same time…"""
    hop_seconds: float = 0.0
    """…and what it takes from one to the next."""

    def seconds(self, shape: StepWork) -> float:
        """How long such a step takes."""
        if not shape.decodes and not shape.prompt_tokens:
            return 0.0
        kind, size = self.size(shape)
        line: Line | None = getattr(self, kind)
        total = self.prompt_seconds if shape.prompt_tokens and kind == DECODE_LINE else 0.0
        total += line_seconds(self.tokens if line is None else line, size)
        if shape.prompt_tokens:
            total += self.row_seconds * (shape.decodes + shape.prompts)
        shared = 0 if self.shared_seconds is None else shape.shared
        if shared:
            total += (self.shared_seconds or 0.0) * shared
        return total + self.context_seconds * (shape.context - shared) + self.pair_seconds * shape.pairs

    def size(self, shape: StepWork) -> tuple[str, int]:
        """The line of such a step, by its field, and the tokens that it computes with padding."""
        pad, decodes = self.padding, shape.decodes
        if not shape.prompt_tokens:
            return DECODE_LINE, decodes if pad is None else _next(pad.decodes, decodes) or decodes
        is_plain = not shape.has_images and self.captured_tokens is not None
        if pad is not None and is_plain and shape.prompts <= pad.prompts:
            before, behind = _next(pad.mixed_decodes, decodes), _next(pad.mixed_tokens, shape.prompt_tokens)
            if before is not None and behind is not None:
                return CAPTURED_LINE, before + behind
        return DECODE_LINE if self.prompt_tokens is None else PROMPT_LINE, shape.tokens


DECODE_LINE, PROMPT_LINE, CAPTURED_LINE = LINES = ("tokens", "prompt_tokens", "captured_tokens")


def _next(sizes: Sequence[int], size: int) -> int | None:
    """The smallest of these sizes that holds this one."""
    place = bisect_left(sizes, size)
    return sizes[place] if place < len(sizes) else None


def line_seconds(line: Line, tokens: int) -> float:
    """The line's seconds there."""
    place = min(bisect_left(line, (tokens, 0.0)), len(line) - 1)
    if place == 0:
        left, low = line[0]
        if tokens <= left or len(line) == 1:
            return low if tokens <= left else low * tokens / left
        place = 1
    (left, low), (right, high) = line[place - 1], line[place]
    return low + (high - low) * (tokens - left) / (right - left)


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


def write_profile(path: str, model: CostModel) -> None:
    """Write the file that `read_profile` reads."""
    Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(model), indent=2) + b"\n")


def profile_names() -> list[str]:
    """Names of the profiles that are shipped."""
    return sorted(entry.name.removesuffix(".json") for entry in PROFILES.iterdir() if entry.name.endswith(".json"))


def _check(model: CostModel, name: str) -> None:
    lines = [line for line in (model.tokens, model.prompt_tokens, model.captured_tokens) if line is not None]
    for line in lines:
        places = [at for at, _ in line]
        if not places or places != sorted(set(places)) or places[0] < 1:
            raise ValidationError(
                f"{name}: `tokens` must be pairs of (tokens, seconds), with tokens rising from 1 or more"
            )
    seconds = [value for line in lines for _, value in line]
    prices = [model.context_seconds, model.pair_seconds, model.prompt_seconds, model.row_seconds]
    prices.append(model.shared_seconds or 0.0)
    if min(*seconds, *prices, model.front_seconds, model.hop_seconds, model.host_seconds) < 0 or max(seconds) <= 0:
        raise ValidationError(f"{name}: seconds must not be negative")
    if min(model.num_blocks, model.block_size, model.max_num_seqs, model.max_num_batched_tokens) < 1:
        raise ValidationError(
            f"{name}: num_blocks, block_size, max_num_seqs and max_num_batched_tokens must be above 0"
        )
    rates = (model.host_out_rate, model.host_back_rate, model.disk_rate)
    if any(rate is not None and not rate > 0 for rate in rates) or model.stages < 1 or model.pipeline_depth < 0:
        raise ValidationError(f"{name}: rates must be above 0, stages at least 1, pipeline_depth at least 0")
    if (pad := model.padding) is not None:
        for sizes in (pad.decodes, pad.mixed_decodes, pad.mixed_tokens):
            if list(sizes) != sorted(set(sizes)):
                raise ValidationError(f"{name}: sizes of `padding` must rise")


# Fitting


def fit(model: CostModel, shapes: Sequence[StepWork], seconds: Sequence[float]) -> CostModel:
    """`model` with the parameters that give the least squared relative error over these steps; none is negative, and
    no line ever falls. A line is fitted if `model` has one, and left out if no step was measured for it."""
    if len(shapes) < 4:
        raise ValidationError(f"a cost model cannot be fitted to {len(shapes)} steps: at least 4 are needed")
    places = [model.size(shape) for shape in shapes]
    knots = {line: _knots([size for kind, size in places if kind == line]) for line in LINES}
    measured = np.asarray(seconds, np.float64)
    rows = [
        _features(shape, place, knots, model.prompt_tokens is None) for shape, place in zip(shapes, places, strict=True)
    ]
    found = _least_squares(np.array(rows) / measured[:, None], np.ones(len(shapes)))
    lines, start = {}, 0
    for line in LINES:
        values = np.cumsum(found[start : start + len(knots[line])]).tolist()
        start += len(values)
        lines[line] = list(zip(knots[line], values, strict=True)) or None
    prompt, context, pair, shared, row = found[start:].tolist()
    fitted = msgspec.structs.replace(
        model,
        **{**lines, "tokens": lines[DECODE_LINE] or lines[PROMPT_LINE] or lines[CAPTURED_LINE]},
        prompt_seconds=prompt,
        context_seconds=context,
        pair_seconds=pair,
        row_seconds=row,
        shared_seconds=shared if any(shape.shared for shape in shapes) else None,
    )
    errors = [abs(fitted.seconds(shape) / took - 1) for shape, took in zip(shapes, seconds, strict=True)]
    return msgspec.structs.replace(fitted, error=float(np.median(errors)))


def _knots(sizes: Sequence[int]) -> list[int]:
    """Where a line over steps of these sizes may bend: at `KNOTS`, as far as there are steps between them."""
    if not sizes:
        return []
    found, high = [min(sizes)], max(sizes)
    for knot in (*(knot for knot in KNOTS if found[0] < knot < high), high):
        if any(found[-1] < size <= knot for size in sizes):
            found.append(knot)
    return found


def _features(shape: StepWork, place: tuple[str, int], knots: dict[str, list[int]], has_one_line: bool) -> list[float]:
    """What each parameter is multiplied with: increments of the lines at their knots, then the other five."""
    kind, size = place
    rises: list[float] = []
    for line in LINES:
        if line == kind:
            at = float(np.interp(size, knots[line], np.arange(len(knots[line]))))
            rises += [min(1.0, max(0.0, at - knot + 1)) for knot in range(len(knots[line]))]
        else:
            rises += [0.0] * len(knots[line])
    is_prompt = float(has_one_line and shape.prompt_tokens > 0)
    rows = shape.decodes + shape.prompts if shape.prompt_tokens else 0
    return [*rises, is_prompt, shape.context - shape.shared, shape.pairs, shape.shared, rows]


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
