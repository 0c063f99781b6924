"""Each token through the experts that the router chose for it, with weights in few bits.

`quantized_experts` serves any number of tokens: up to `MAX_VECTOR_TOKENS` pair by pair (`expert_vectors.py`,
`expert_streams.py`), more are sorted by expert into tiles (`expert_tiles.py`, MXFP4 on Hopper `expert_hopper.py`), very
many multiply the dequantized stack (`expert_scratch.py`). None of the kernels synchronizes with the host.

Which kernel it is, the tuning tables say (`moe/tuning.py`), or else `candidates` guesses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

import torch

from quire.kernels.triton.launch import INTERPRETED
from quire.kernels.triton.moe.common import ChosenExperts, ExpertsConfig, ExpertsShape, GemmTile
from quire.kernels.triton.moe.layout import LARGE, SMALL, arrange
from quire.kernels.triton.moe.route import MAX_EXPERTS, route
from quire.kernels.triton.moe.tile import combine
from quire.kernels.triton.moe.tuning import BUCKETS, choose_experts, quantized_entry
from quire.kernels.triton.quantized import expert_hopper, expert_streams
from quire.kernels.triton.quantized.expert_hopper import config_for, hopper_experts
from quire.kernels.triton.quantized.expert_scratch import scratch_experts
from quire.kernels.triton.quantized.expert_stacks import Stack, stack_of
from quire.kernels.triton.quantized.expert_streams import stream_experts
from quire.kernels.triton.quantized.expert_tiles import BLOCK as GROUP
from quire.kernels.triton.quantized.expert_tiles import in_pairs, tile_down, tile_gate_up
from quire.kernels.triton.quantized.expert_vectors import vector_experts
from quire.kernels.triton.tuning_table import bucket_of
from quire.kernels.weights.base import QuantizedWeight, Weight

Task = Callable[[], object]
"""Launches kernels."""

MAX_VECTOR_TOKENS = 8
"""With more, tokens share experts often enough for tiles to pay."""
SCRATCH_TOKENS, PAIRED_SCRATCH_TOKENS, COPY_TOKENS = 80, 200, 40
"""Tokens an expert from which on stacks are dequantized whole; the same for MXFP4 codes in pairs; from which on 16-bit
copies are multiplied, where there are some: measured with 4-bit weights on an H200."""
MAX_VECTOR_BYTES = 4096
"""Of a weight row: a program holds whole rows in registers."""


def tile_experts(
    x: torch.Tensor,
    routing: ChosenExperts,
    gate_up: Stack,
    down: Stack,
    config: ExpertsConfig,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: str = "silu",
) -> torch.Tensor:
    """`Ops.experts` for any number of tokens."""
    layout = arrange(routing.experts, gate_up.experts, config.block_m)
    # A program that owns a whole group of features writes them as codes.
    encoded = gate_up.kind == down.kind == "block" and config.gate_up.n == GROUP
    pairs = in_pairs(gate_up, down)
    features, scales = tile_gate_up(
        x, layout, gate_up, gate_up_bias, routing.top_k, config, activation, encoded, pairs
    )  # fmt: skip
    results = tile_down(features, scales, layout, down, down_bias, routing.top_k, config, pairs)
    return combine(results, routing.weights, routing.experts, gate_up.experts)


_KERNELS = {
    "vector": vector_experts, "stream": stream_experts, "tile": tile_experts, "hopper": hopper_experts,
    "scratch": scratch_experts,
}  # fmt: skip


def expert_outputs(
    x: torch.Tensor,
    routing: ChosenExperts,
    gate_up: Stack,
    down: Stack,
    config: ExpertsConfig,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: str = "silu",
) -> torch.Tensor:
    """`Ops.experts` by the kernel of `config`."""
    kernel = _KERNELS[config.kernel]
    return kernel(x, routing, gate_up, down, config, gate_up_bias, down_bias, activation)


class Candidates(NamedTuple):
    """Configurations that differ only in the tile shapes of their two GEMMs, the best guesses first."""

    base: ExpertsConfig
    gate_ups: list[GemmTile]
    downs: list[GemmTile]


_VECTORS = {
    8: (
        [GemmTile(n, warps=warps) for n, warps in ((4, 4), (8, 4), (8, 8), (4, 2), (2, 4))],
        [GemmTile(n, warps=warps) for n, warps in ((16, 8), (8, 8), (8, 4), (4, 8))],
    ),
    4: (
        [GemmTile(n, warps=warps) for n, warps in ((4, 2), (4, 4), (2, 2), (8, 4))],
        [GemmTile(n, warps=warps) for n, warps in ((2, 4), (4, 8), (4, 4), (16, 8))],
    ),
}
"""(gate and up, down), by bits."""
_STREAMS = (
    [GemmTile(8, k, warps, stages) for k, warps, stages in ((4, 4, 6), (2, 8, 3), (3, 4, 6))],
    [GemmTile(16, 0, warps, stages) for warps, stages in ((8, 6), (8, 4))],
)
"""The same for `stream`: programs a multiprocessor, warps, and pieces in flight; the first of one token."""
_SCALED = {
    16: ([(128, 128, 4, 3), (128, 128, 4, 2)], [(128, 128, 4, 3), (128, 128, 4, 4)]),
    32: ([(128, 128, 4, 3), (128, 128, 4, 2)], [(128, 128, 4, 3), (128, 128, 4, 4)]),
    64: ([(128, 128, 8, 4), (64, 128, 4, 3), (64, 128, 4, 4)], [(128, 128, 4, 3), (64, 128, 4, 4)]),
    128: ([(128, 128, 8, 3), (64, 128, 8, 3), (64, 128, 4, 3)], [(256, 128, 8, 3), (128, 128, 8, 3)]),
}
"""(block_n, block_k, warps, stages) of (gate and up, down) by block_m, for 8-bit codes."""
_DEQUANTIZED = {
    16: (
        [(64, 256, 4, 3), (64, 128, 4, 4), (64, 128, 4, 8), (128, 128, 8, 4)],
        [(64, 128, 4, 4), (64, 128, 4, 8), (128, 256, 4, 3), (128, 128, 8, 6)],
    ),
    32: ([(64, 256, 4, 3), (64, 128, 4, 4), (128, 128, 8, 4)], [(128, 256, 4, 3), (64, 128, 4, 4), (128, 128, 8, 4)]),
    64: ([(128, 128, 8, 3), (128, 320, 8, 3), (64, 128, 4, 3)], [(128, 320, 8, 3), (128, 128, 8, 3), (64, 128, 4, 3)]),
    128: ([(128, 128, 8, 3), (64, 128, 8, 3)], [(128, 128, 8, 3), (256, 128, 8, 3)]),
}
"""The same for weights that are dequantized; block_k are inputs of an iteration."""
_PAIRED = _DEQUANTIZED | {
    32: ([(128, 64, 8, 4), (64, 64, 4, 4), (128, 192, 8, 3)], [(128, 64, 8, 4), (128, 192, 8, 3), (64, 64, 4, 4)]),
    64: ([(128, 64, 8, 4), (64, 64, 4, 3), (128, 192, 8, 3)], [(128, 64, 8, 4), (128, 192, 8, 3), (128, 64, 4, 3)]),
}
"""The same for MXFP4 codes that are read in pairs (`expert_tiles.in_pairs`)."""
_HOPPER = {
    block_m: Candidates(configs[0], [config.gate_up for config in configs], [config.down for config in configs])
    for block_m, configs in (
        (16, [config_for(16, 8, 6), config_for(16, 16, 6)]),
        (32, [config_for(32, 8, 6)]),
        (64, [config_for(64, 8, 5), config_for(64, 8, 6), config_for(64, 16, 5)]),
        (128, [config_for(128, 8, 4)]),
    )
}
"""For `hopper`, by block_m: (rows, warps, stages), measured on an H200."""


def candidates(gate_up: Stack, down: Stack, top_k: int, tokens: int) -> list[Candidates]:
    """What to try for at most `tokens` tokens, the best guess first."""
    found = []
    vectors = _VECTORS[gate_up.bits][0], _VECTORS[down.bits][1]
    if tokens <= MAX_VECTOR_TOKENS and expert_streams.fits(gate_up, down, top_k, _STREAMS[1][0].warps):
        tiles = _STREAMS[0][0 if tokens == 1 else 1], _STREAMS[1][0]
        found.append(Candidates(ExpertsConfig("stream", *tiles), *_STREAMS))
    elif tokens <= MAX_VECTOR_TOKENS and _fits_vectors(gate_up) and _fits_vectors(down):
        found.append(Candidates(ExpertsConfig("vector", vectors[0][0], vectors[1][0]), *vectors))
    pairs, each = in_pairs(gate_up, down), tokens * top_k / gate_up.experts
    if expert_hopper.fits(gate_up, down):
        found.append(_HOPPER[_item_height(each)])
    table = _SCALED if gate_up.quantizes else _PAIRED if pairs else _DEQUANTIZED
    for block_m in _tile_heights(each, pairs):
        if block_m not in table:
            continue
        gate_ups, downs = ([GemmTile(*block) for block in blocks] for blocks in table[block_m])
        tma = gate_up.quantizes and down.quantizes and gate_up.inputs % 16 == down.inputs % 16 == 0
        found.append(Candidates(ExpertsConfig("tile", gate_ups[0], downs[0], block_m, tma), gate_ups, downs))
    if found[0].base.kernel in ("vector", "stream") and tokens > MAX_VECTOR_TOKENS // 2:
        found.append(found.pop(0))
    copied = _are_copied(gate_up, down)
    enough = COPY_TOKENS if copied else PAIRED_SCRATCH_TOKENS if pairs else SCRATCH_TOKENS
    if not (gate_up.quantizes or down.quantizes) and 4 * each > enough:
        shape = ExpertsShape(gate_up.experts, top_k, down.inputs, gate_up.inputs)
        config = replace(choose_experts(shape, tokens, gate_up.dtype), kernel="scratch")
        found.insert(0 if each > enough else len(found), Candidates(config, [config.gate_up], [config.down]))
    return found


def _tile_heights(tokens_an_expert: float, pairs: bool) -> list[int]:
    """block_m, the best guess first: most experts should need a single tile, or fill several."""
    if tokens_an_expert <= 8:
        return [16, 32]
    if tokens_an_expert <= (20 if pairs else 32):
        return [32, 16]
    return [64, 32] if tokens_an_expert <= 64 else [64, 128]


def _item_height(tokens_an_expert: float) -> int:
    """block_m of `hopper`: few experts should need a second item, for which codes become numbers once more; rows that
    an item has room for and does not have cost less."""
    if tokens_an_expert <= 16:
        return 16 if tokens_an_expert <= 8 else 32
    return 64 if tokens_an_expert <= 64 else 128


def _are_copied(gate_up: Stack, down: Stack) -> bool:
    """Whether both stacks have 16-bit copies."""
    return gate_up.copy is not None and down.copy is not None


def _fits_vectors(stack: Stack) -> bool:
    """Whether the vector kernels can read the stack: rows in pieces of 16 bytes, and not too long."""
    size = stack.inputs * stack.bits // 8
    return size % 16 == 0 and size <= MAX_VECTOR_BYTES


INVARIANT = {
    True: ExpertsConfig("tile", GemmTile(128, 128, 8, 4), GemmTile(128, 128, 4, 4), 64),
    False: ExpertsConfig("tile", GemmTile(128, 128, 8, 3), GemmTile(128, 128, 8, 3), 64),
}
"""Batch-invariant: one shape for any number of tokens, so that sums always have the same order. By whether activations
are quantized."""


def config_of(gate_up: Stack, down: Stack, top_k: int, tokens: int, batch_invariant: bool) -> ExpertsConfig:
    """The kernel and tile shapes for so many tokens."""
    if batch_invariant:
        return INVARIANT[gate_up.quantizes]
    bucket = bucket_of(tokens, BUCKETS) or BUCKETS[-1]
    return _measured(gate_up, down, top_k, bucket) or candidates(gate_up, down, top_k, bucket)[0].base


def _measured(gate_up: Stack, down: Stack, top_k: int, tokens: int) -> ExpertsConfig | None:
    """What a tuning table says, measured without copies; None: nothing, or of a kernel that cannot run here, or there
    are copies and enough tokens for them."""
    if _are_copied(gate_up, down) and tokens * top_k > COPY_TOKENS * gate_up.experts:
        return None
    shape = ExpertsShape(gate_up.experts, top_k, down.inputs, gate_up.inputs)
    config = quantized_entry(shape, tokens, gate_up.dtype, gate_up.kind)
    if config is not None and config.kernel == "hopper" and not expert_hopper.fits(gate_up, down):
        return None
    return config


def launches(
    gate_up: Stack,
    down: Stack,
    top_k: int,
    renormalise: bool,
    routed: int,
    configs: Iterable[ExpertsConfig],
    biased: bool = False,
    activation: str = "silu",
) -> dict[object, Task]:
    """Tasks that launch the kernels of these configurations, each once, for one token of zeros. `routed`: number of
    experts the router chooses among, on all ranks; `biased`: both products have a bias."""
    count, hidden = gate_up.experts, gate_up.inputs

    def zeros(*size: int, dtype: torch.dtype = gate_up.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=gate_up.codes.device)

    def routing(tokens: int = 1) -> ChosenExperts:
        return ChosenExperts(
            top_k, zeros(tokens, top_k, dtype=torch.float32), zeros(tokens, top_k, dtype=torch.int32)
        )  # fmt: skip

    def biases() -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return (zeros(count, gate_up.outputs), zeros(count, hidden)) if biased else (None, None)

    def vector(config: ExpertsConfig, fused_norm: bool) -> None:
        norm = (zeros(hidden), 1e-6) if fused_norm else None
        vector_experts(zeros(1, hidden), routing(), gate_up, down, config, *biases(), activation, norm)

    def stream(config: ExpertsConfig, fused_norm: bool) -> None:
        norm = (zeros(hidden), 1e-6) if fused_norm else None
        tokens = 1 if config.gate_up == _STREAMS[0][0] else 2
        stream_experts(zeros(tokens, hidden), routing(tokens), gate_up, down, config, *biases(), activation, norm)

    def tile(config: ExpertsConfig) -> None:
        expert_outputs(zeros(1, hidden), routing(), gate_up, down, config, *biases(), activation)

    tasks: dict[object, Task] = {
        "route": lambda: route(
            zeros(1, routed), top_k, renormalise, zeros(routed, dtype=torch.int64), zeros(1, dtype=torch.int64)
        )
    }
    for config in configs:
        if config.kernel == "vector":
            for fused_norm in (True, False):
                tasks[config, fused_norm] = functools.partial(vector, config, fused_norm)
        elif config.kernel == "stream":
            for fused_norm in (True, False) if config.gate_up == _STREAMS[0][0] else (False,):
                tasks[config, fused_norm] = functools.partial(stream, config, fused_norm)
        else:
            tasks[config] = functools.partial(tile, config)
    for pairs in (1, SMALL + 1, LARGE + 1):  # one small program, one large one, several
        tokens = -(-pairs // top_k)
        tasks["arrange", pairs] = functools.partial(lambda tokens: arrange(routing(tokens).experts, count, 16), tokens)
    return tasks


USE_KERNELS = not INTERPRETED
"""Off in the interpreter, which takes seconds for each; tests enable it."""


def stacks_of(x: torch.Tensor, gate_up: object, down: object) -> tuple[Stack, Stack] | None:
    """Both stacks, if the kernels can read them and multiply them with x."""
    if not USE_KERNELS or x.dim() != 2 or not x.is_contiguous() or not x.numel():
        return None
    if not (isinstance(gate_up, QuantizedWeight) and isinstance(down, QuantizedWeight)):
        return None
    stacks = stack_of(gate_up), stack_of(down)
    if stacks[0] is None or stacks[1] is None or stacks[0].experts > MAX_EXPERTS or x.dtype is not stacks[0].dtype:
        return None
    return stacks[0], stacks[1]


def quantized_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    activation: str = "silu",
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    batch_invariant: bool = False,
    norm: tuple[torch.Tensor, float] | None = None,
) -> torch.Tensor | None:
    """`Ops.experts` with stacks in few bits, for any number of tokens; None: the kernels cannot do it.

    gate_up_bias [experts, 2 * width], down_bias [experts, hidden]. `norm`: x is normed with (gain, eps) first; only for
    as few tokens as go pair by pair.
    """
    stacks = stacks_of(x, gate_up, down)
    if stacks is None:
        return None
    top_k = experts.shape[1]
    config = config_of(*stacks, top_k, x.shape[0], batch_invariant)
    routing = ChosenExperts(top_k, weights.contiguous(), experts.contiguous())
    if norm is None:
        return expert_outputs(x, routing, *stacks, config, gate_up_bias, down_bias, activation)
    if not _norms(config, len(x)):
        return None
    kernel = vector_experts if config.kernel == "vector" else stream_experts
    return kernel(x, routing, *stacks, config, gate_up_bias, down_bias, activation, norm)


def _norms(config: ExpertsConfig, tokens: int) -> bool:
    """Whether the kernels can norm x themselves."""
    return config.kernel == "vector" or (config.kernel == "stream" and tokens == 1)


def goes_pair_by_pair(
    x: torch.Tensor, gate_up: Weight, down: Weight, top_k: int, batch_invariant: bool
) -> bool:  # fmt: skip
    """Whether `quantized_experts` can norm x itself."""
    if len(x) > MAX_VECTOR_TOKENS:
        return False
    stacks = stacks_of(x, gate_up, down)
    return stacks is not None and _norms(config_of(*stacks, top_k, len(x), batch_invariant), len(x))


def expert_kernels(
    gate_up: Weight,
    down: Weight,
    top_k: int,
    renormalise: bool,
    routed: int,
    max_tokens: int,
    batch_invariant: bool,
    activation: str = "silu",
    biased: bool = False,
) -> dict[object, Task]:
    """Tasks that launch every kernel that up to `max_tokens` tokens need; `Ops.expert_kernels_of`."""
    x = torch.empty(1, gate_up.shape[2], dtype=gate_up.dtype, device="meta")
    stacks = stacks_of(x, gate_up, down)
    if stacks is None:
        return {}
    buckets = [tokens for tokens in BUCKETS if tokens < 2 * max_tokens]
    configs = [config_of(*stacks, top_k, tokens, batch_invariant) for tokens in buckets]
    if not stacks[0].quantizes and not batch_invariant:  # they may get copies once they are loaded
        marks = [replace(stack, copy=stack.codes) for stack in stacks]
        configs += [config_of(marks[0], marks[1], top_k, tokens, False) for tokens in buckets]
    return launches(*stacks, top_k, renormalise, routed, dict.fromkeys(configs), biased, activation)
