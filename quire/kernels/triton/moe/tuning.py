"""How tokens go through their experts, by how many there are: what was measured for the shape, or else a guess.

The tables are those of `tuning`. An entry: {"experts 256 128x768x2048/8 bfloat16": {"kernel": "tile", "gate_up": [64,
64, 4, 5], "down": [128, 64, 4, 5], "block_m": 32, "tma": true, "us": 300.1}, ...}; blocks are [n, k, warps, stages].
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from quire.kernels.triton.moe.candidates import Family, families, guess
from quire.kernels.triton.moe.common import Block, ExpertsConfig, ExpertsShape
from quire.kernels.triton.skinny_gemm.tuning import Entry, Tuner, read_table, tuner, write_table

BUCKETS = (*(2**power for power in range(15)),)
"""Tokens: 1 to 16384. More go as the last does."""


class ExpertsTimer(Protocol):
    """Measures a way through experts."""

    def __call__(
        self, shape: ExpertsShape, tokens: int, dtype: torch.dtype, config: ExpertsConfig, part: str = ""
    ) -> float:
        """Microseconds, of `gate_up` or `down` alone if so asked; infinity if it cannot be done that way."""
        ...


def choose_experts(shape: ExpertsShape, tokens: int, dtype: torch.dtype) -> ExpertsConfig:
    """How so many tokens go through experts of a shape, on the current device."""
    return _chosen(shape, bucket_of(tokens), dtype)


@functools.cache
def _chosen(shape: ExpertsShape, bucket: int, dtype: torch.dtype) -> ExpertsConfig:
    return chosen(tuner(), shape, bucket, dtype)


def chosen(tables: Tuner, shape: ExpertsShape, bucket: int, dtype: torch.dtype) -> ExpertsConfig:
    """What these tables say, or a guess."""
    entry = known(tables, shape, bucket, dtype)
    config = None if entry is None else config_of(entry)
    return guess(shape, bucket, dtype, tables.gpu) if config is None else config


def known(tables: Tuner, shape: ExpertsShape, bucket: int, dtype: torch.dtype) -> Entry | None:
    """What was measured, by the user or by us; None: nothing was."""
    key = key_of(shape, bucket, dtype)
    return tables.measured.get(key) or tables.shipped.get(key)


def bucket_of(tokens: int) -> int:
    """The smallest bucket that holds so many tokens, or the largest."""
    return next((bucket for bucket in BUCKETS if tokens <= bucket), BUCKETS[-1])


def key_of(shape: ExpertsShape, bucket: int, dtype: torch.dtype) -> str:
    """The name of experts and a number of tokens in a table."""
    experts = f"{shape.experts}x{shape.width}x{shape.hidden}/{shape.top_k}"
    return f"experts {bucket} {experts} {str(dtype).removeprefix('torch.')}"


def entry_of(config: ExpertsConfig) -> Entry:
    """A configuration as a table holds it."""
    entry: Entry = {"kernel": config.kernel, "gate_up": [*config.gate_up], "down": [*config.down]}
    if config.kernel == "tile":
        entry |= {"block_m": config.block_m, "tma": config.tma}
    return entry


def config_of(entry: Entry) -> ExpertsConfig | None:
    """The configuration of an entry; None for what this version does not know."""
    blocks = entry.get("gate_up"), entry.get("down")
    if not all(isinstance(block, list) and len(block) == 4 and all(map(_is_small, block)) for block in blocks):
        return None
    gate_up, down = (Block(*block) for block in blocks)  # type: ignore[misc]
    block_m = entry.get("block_m", 0)
    if entry.get("kernel") == "vector":
        return ExpertsConfig("vector", gate_up, down)
    if entry.get("kernel") == "tile" and _is_small(block_m) and block_m >= 16:
        return ExpertsConfig("tile", gate_up, down, block_m, bool(entry.get("tma")))
    return None


def _is_small(value: object) -> bool:
    return isinstance(value, int) and 0 <= value <= 1024


def describe(entry: Entry) -> str:
    """An entry's kernel in a few characters."""
    config = config_of(entry)
    if config is None:
        return "a guess"
    text = config.kernel if config.kernel == "vector" else f"tile m{config.block_m}"
    for name, block in (("gate_up", config.gate_up), ("down", config.down)):
        text += f", {name} n{block.n} w{block.warps}" + (f" k{block.k} s{block.stages}" if block.k else "")
    return text + (" tma" if config.tma else "")


def tune(
    tables: Tuner,
    shape: ExpertsShape,
    dtype: torch.dtype,
    buckets: Sequence[int],
    timer: ExpertsTimer,
    progress: Callable[[int, Entry], None] | None = None,
    expired: Callable[[], bool] = lambda: False,
) -> dict[str, Entry]:
    """Measure what is worth trying and keep the fastest, here and in the user's table; stop early when `expired`."""
    found: dict[str, Entry] = {}
    for tokens in buckets:
        if expired():
            break
        entry = _fastest(families(shape, tokens, dtype, tables.gpu), shape, tokens, dtype, timer)
        if entry is None:
            continue
        found[key_of(shape, tokens, dtype)] = entry
        tables.measured[key_of(shape, tokens, dtype)] = entry
        if progress is not None:
            progress(tokens, entry)
    if tables.own is not None:
        # Another process may have written in the meantime.
        write_table(tables.own, read_table(tables.own) | found)
    _chosen.cache_clear()
    return found


def _fastest(
    found: Iterable[Family], shape: ExpertsShape, tokens: int, dtype: torch.dtype, timer: ExpertsTimer
) -> Entry | None:
    """The two products by themselves within a family; the families, and who reads, by the whole."""

    def time(config: ExpertsConfig, part: str = "") -> float:
        return timer(shape, tokens, dtype, config, part)

    best, us = None, float("inf")
    for family in found:
        base = family.base
        gate_up = min(family.gate_ups, key=lambda block: time(replace(base, gate_up=block), "gate_up"))
        down = min(family.downs, key=lambda block: time(replace(base, down=block), "down"))
        config = replace(base, gate_up=gate_up, down=down)
        if (whole := time(config)) < us:
            best, us = config, whole
    if best is not None and best.tma:
        plain = replace(best, tma=False)
        if (whole := time(plain)) < us:
            best, us = plain, whole
    return None if best is None else entry_of(best) | {"us": round(us, 2)}


def tried(shape: ExpertsShape, dtype: torch.dtype, buckets: Iterable[int], tables: Tuner) -> list[ExpertsConfig]:
    """Every configuration that `tune` may measure, each product's shapes at least once."""
    configs: dict[ExpertsConfig, None] = {}
    for tokens in buckets:
        for family in families(shape, tokens, dtype, tables.gpu):
            count = max(len(family.gate_ups), len(family.downs))
            for i in range(count):
                gate_up, down = family.gate_ups[i % len(family.gate_ups)], family.downs[i % len(family.downs)]
                for tma in {family.base.tma, False}:
                    configs[replace(family.base, gate_up=gate_up, down=down, tma=tma)] = None
    return list(configs)
