"""Which kernel and tile shapes the experts of a layer run, by the number of tokens.

Looked up in the tuning tables (`tuning_table.py`), or else guessed. An entry: {"experts 256 128x768x2048/8 bfloat16":
{"kernel": "tile", "gate_up": [64, 64, 4, 5], "down": [128, 64, 4, 5], "block_m": 32, "tma": true, "us": 300.1}};
blocks are [n, k, warps, stages]. Keys of experts in few bits end with the kind of their stacks: "… bfloat16 mxfp4";
`quantized/experts.py` guesses for them.

With few tokens per expert the kernels are bound by reading weights and need many bytes in flight on every
multiprocessor. With many they are bound by the tensor cores, and a tile should do little else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch

from quire.kernels.triton.moe.common import ExpertsConfig, ExpertsShape, GemmTile
from quire.kernels.triton.tuning_table import Entry, Gpu, TuningTables, bucket_of, current_tables, dtype_name

BUCKETS = (*(2**power for power in range(15)),)
"""Tokens: 1 to 16384. More use the last one's."""
MAX_VECTOR_TOKENS = 8
"""With more, tokens share experts often enough for tiles to pay."""
KERNELS, QUANTIZED_KERNELS = ("vector", "tile"), ("tile", "hopper")
"""Those that entries may name: of 16-bit experts, and of experts in few bits."""
INVARIANT = ExpertsConfig("tile", GemmTile(64, 64, 4, 4), GemmTile(128, 64, 4, 4), 64)
"""Batch-invariant: one shape for any number of tokens, so that sums always have the same order."""
_SHARED = 224 * 1024  # bytes of shared memory per multiprocessor, less what the compiler needs


class ConfigGroup(NamedTuple):
    """Configurations that differ only in the tile shapes of their two GEMMs."""

    base: ExpertsConfig
    gate_ups: list[GemmTile]
    downs: list[GemmTile]


_VECTORS = (
    [GemmTile(n, warps=warps) for n, warps in ((2, 4), (4, 4), (1, 2), (2, 2), (4, 8), (8, 8))],
    [GemmTile(n, warps=warps) for n, warps in ((2, 4), (1, 4), (1, 2), (4, 8), (2, 8), (4, 4))],
)
"""(gate and up, down), the best guesses first."""
_TILES = {
    16: (((64, 128, 4), (64, 64, 4), (128, 64, 4), (128, 64, 8)), ((128, 128, 4), (64, 128, 4), (128, 64, 4))),
    32: (((64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 64, 8)), ((128, 64, 4), (128, 128, 4), (64, 128, 4))),
    64: (((64, 64, 4), (128, 64, 8), (64, 128, 4)), ((128, 64, 4), (128, 128, 8), (256, 64, 8))),
    128: (((128, 64, 8), (64, 64, 4), (64, 64, 8)), ((128, 64, 8), (256, 64, 8), (128, 64, 4))),
    256: (((64, 64, 8),), ((128, 64, 8), (64, 64, 8))),
}
"""(block_n, block_k, warps) of (gate and up, down) by block_m, the best guesses first."""


def candidates(shape: ExpertsShape, tokens: int, dtype: torch.dtype, gpu: Gpu) -> list[ConfigGroup]:
    """What to try for at most `tokens` tokens (a power of two), the best guess first."""
    found = []
    aligned = shape.hidden * dtype.itemsize % 16 == 0 and shape.width * dtype.itemsize % 16 == 0
    if tokens <= MAX_VECTOR_TOKENS and aligned:
        base = ExpertsConfig("vector", _VECTORS[0][0], _VECTORS[1][0])
        found.append(ConfigGroup(base, *_VECTORS))
    tma = gpu.has_tma and aligned and dtype.itemsize == 2
    for block_m in _tile_heights(shape, tokens):
        gate_ups, downs = (
            [block for n, k, warps in blocks for block in _staged(n, k, warps, block_m, matrices, dtype)]
            for blocks, matrices in zip(_TILES[block_m], (2, 1), strict=True)
        )
        found.append(ConfigGroup(ExpertsConfig("tile", gate_ups[0], downs[0], block_m, tma), gate_ups, downs))
    if found[0].base.kernel == "vector" and tokens > MAX_VECTOR_TOKENS // 2:
        found.append(found.pop(0))
    return found


def guess(shape: ExpertsShape, tokens: int, dtype: torch.dtype, gpu: Gpu) -> ExpertsConfig:
    """The configuration to use where nothing was measured."""
    return candidates(shape, tokens, dtype, gpu)[0].base


def _tile_heights(shape: ExpertsShape, tokens: int) -> list[int]:
    """block_m, the best guess first: most experts should need a single tile, or fill several."""
    tokens_an_expert = tokens * shape.top_k / shape.experts
    if tokens_an_expert <= 8:
        return [16, 32]
    if tokens_an_expert <= 24:
        return [32, 16]
    if tokens_an_expert <= 48:
        return [64, 32]
    if tokens_an_expert <= 128:
        return [128, 64]
    return [128, 256, 64]


def _staged(n: int, k: int, warps: int, block_m: int, matrices: int, dtype: torch.dtype) -> list[GemmTile]:
    """A block with as many pipeline stages as fit: for two programs per multiprocessor, and for one."""
    if dtype.itemsize == 4:
        n, k = min(n, 64), 32
    step = (matrices * n + block_m) * k * dtype.itemsize
    counts = [min(6, shared // step) for shared in (_SHARED // 2, _SHARED)]
    return [GemmTile(n, k, warps, stages) for stages in dict.fromkeys(counts) if stages >= 3] or [
        GemmTile(n, k, warps, max(counts[1], 1))
    ]


class ExpertsTimer(Protocol):
    """Measures a configuration."""

    def __call__(
        self, shape: ExpertsShape, tokens: int, dtype: torch.dtype, config: ExpertsConfig, part: str = ""
    ) -> float:
        """Microseconds, of `gate_up` or `down` alone if `part` names it; infinity if it cannot run."""
        ...


class ExpertsTuner:
    """Chooses and measures the kernels of experts on one GPU."""

    def __init__(self, tables: TuningTables) -> None:
        self._tables = tables

    def choose(self, shape: ExpertsShape, tokens: int, dtype: torch.dtype) -> ExpertsConfig:
        """The configuration for `tokens` tokens."""
        bucket = bucket_of(tokens, BUCKETS) or BUCKETS[-1]
        entry = self.known(shape, bucket, dtype)
        config = None if entry is None else config_of(entry)
        return guess(shape, bucket, dtype, self._tables.gpu) if config is None else config

    def known(self, shape: ExpertsShape, bucket: int, dtype: torch.dtype) -> Entry | None:
        """The tables' entry; None: it was not measured."""
        return self._tables.get(key_of(shape, bucket, dtype))

    def tune(
        self,
        shape: ExpertsShape,
        dtype: torch.dtype,
        buckets: Sequence[int],
        timer: ExpertsTimer,
        progress: Callable[[int, Entry], None] | None = None,
        expired: Callable[[], bool] = lambda: False,
    ) -> dict[str, Entry]:
        """Measure the candidates and record the fastest; stop early when `expired`."""
        found: dict[str, Entry] = {}
        for tokens in buckets:
            if expired():
                break
            groups = candidates(shape, tokens, dtype, self._tables.gpu)
            entry = _fastest(groups, shape, tokens, dtype, timer)
            if entry is None:
                continue
            found[key_of(shape, tokens, dtype)] = entry
            if progress is not None:
                progress(tokens, entry)
        self._tables.record(found)
        _chosen.cache_clear()
        quantized_entry.cache_clear()
        return found

    def candidate_configs(
        self, shape: ExpertsShape, dtype: torch.dtype, buckets: Iterable[int]
    ) -> list[ExpertsConfig]:  # fmt: skip
        """Configurations that together contain every kernel `tune` may measure."""
        configs: dict[ExpertsConfig, None] = {}
        for tokens in buckets:
            for group in candidates(shape, tokens, dtype, self._tables.gpu):
                for i in range(max(len(group.gate_ups), len(group.downs))):
                    gate_up, down = group.gate_ups[i % len(group.gate_ups)], group.downs[i % len(group.downs)]
                    for tma in {group.base.tma, False}:
                        configs[replace(group.base, gate_up=gate_up, down=down, tma=tma)] = None
        return list(configs)


def _fastest(
    groups: Iterable[ConfigGroup], shape: ExpertsShape, tokens: int, dtype: torch.dtype, timer: ExpertsTimer
) -> Entry | None:
    """Within a group the tile shapes of each GEMM are timed alone; groups, and TMA or not, by the whole."""

    def time(config: ExpertsConfig, part: str = "") -> float:
        return timer(shape, tokens, dtype, config, part)

    best, us = None, float("inf")
    for base, gate_ups, downs in groups:
        gate_up = min(gate_ups, key=lambda block: time(replace(base, gate_up=block), "gate_up"))
        down = min(downs, key=lambda block: time(replace(base, down=block), "down"))
        config = replace(base, gate_up=gate_up, down=down)
        if (whole := time(config)) < us:
            best, us = config, whole
    if best is not None and best.tma:
        without_tma = replace(best, tma=False)
        if (whole := time(without_tma)) < us:
            best, us = without_tma, whole
    return None if best is None else entry_of(best) | {"us": round(us, 2)}


def choose_experts(shape: ExpertsShape, tokens: int, dtype: torch.dtype) -> ExpertsConfig:
    """The configuration for `tokens` tokens on the current device."""
    return _chosen(shape, bucket_of(tokens, BUCKETS) or BUCKETS[-1], dtype)


@functools.cache
def _chosen(shape: ExpertsShape, bucket: int, dtype: torch.dtype) -> ExpertsConfig:
    return ExpertsTuner(current_tables()).choose(shape, bucket, dtype)


@functools.cache
def quantized_entry(shape: ExpertsShape, bucket: int, dtype: torch.dtype, kind: str) -> ExpertsConfig | None:
    """The tables' configuration for experts in few bits; None: it was not measured."""
    entry = current_tables().get(key_of(shape, bucket, dtype, kind))
    return None if entry is None else config_of(entry, QUANTIZED_KERNELS)


def key_of(shape: ExpertsShape, bucket: int, dtype: torch.dtype, kind: str = "") -> str:
    """The key in a table. `kind`: that of stacks in few bits."""
    size = f"{shape.experts}x{shape.width}x{shape.hidden}/{shape.top_k}"
    return f"experts {bucket} {size} {dtype_name(dtype)} {kind}".rstrip()


def entry_of(config: ExpertsConfig) -> Entry:
    """A configuration as a table stores it."""
    entry: Entry = {"kernel": config.kernel, "gate_up": [*config.gate_up], "down": [*config.down]}
    if config.kernel == "tile":
        entry |= {"block_m": config.block_m, "tma": config.tma}
    elif config.kernel == "hopper":
        entry |= {"block_m": config.block_m}
    return entry


def config_of(entry: Entry, kernels: Sequence[str] = KERNELS) -> ExpertsConfig | None:
    """The configuration of an entry; None for entries that this version does not support, or not among `kernels`."""
    if entry.get("kernel") not in kernels:
        return None
    blocks = entry.get("gate_up"), entry.get("down")
    if not all(isinstance(block, list) and len(block) == 4 and all(map(_is_small, block)) for block in blocks):
        return None
    gate_up, down = (GemmTile(*block) for block in blocks)  # type: ignore[misc]
    block_m = entry.get("block_m", 0)
    if entry.get("kernel") == "vector":
        return ExpertsConfig("vector", gate_up, down)
    if _is_small(block_m) and block_m >= 16:
        return ExpertsConfig(entry["kernel"], gate_up, down, block_m, bool(entry.get("tma")))
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
