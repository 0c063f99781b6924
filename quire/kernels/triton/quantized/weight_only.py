"""Products with weights in few bits and activations in 16: `GroupedWeight` and `Fp4Weight` on NVIDIA GPUs.

A weight is its code's number, rounded once to the activations' dtype, and products are summed in float32, whichever
kernel runs: `few` and `tile` make numbers of codes as they multiply, `dequantize` makes all of them first.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton

from quire.kernels.base import CompilableKernel
from quire.kernels.triton.launch import INTERPRETED, has_pdl, num_sms
from quire.kernels.triton.quantized import few_rows, tuning
from quire.kernels.triton.quantized.base import QuantizedProducts
from quire.kernels.triton.quantized.dequantize import compile_dequantize, dequantize, scratch
from quire.kernels.triton.quantized.few_rows import few_launch
from quire.kernels.triton.quantized.gemm import (
    WeightOnlyConfig,
    WeightOnlyGemm,
    WeightOnlyLaunch,
    WordWeight,
    as_words,
)
from quire.kernels.triton.quantized.tile_rows import can_gate, tile_launch
from quire.kernels.triton.quantized.tuning import ProductCase
from quire.kernels.triton.tuning_table import bucket_of, current_tables
from quire.kernels.weights.fp4 import Fp4Weight
from quire.kernels.weights.grouped import GroupedWeight

USE_KERNELS = not INTERPRETED
"""Whether products run our kernels. Off in the interpreter, which takes seconds for each; tests enable it."""
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Rows that kernels are chosen for. More rows dequantize the matrix and leave the product to cuBLAS."""
TILES = {16: (64, 4, 8), 32: (64, 4, 8), 64: (64, 4, 5), 128: (64, 4, 6), 256: (128, 8, 3)}
"""(outputs, warps, stages) of `tile`, by rows."""
TALL_TILES = TILES | {32: (128, 4, 6), 128: (64, 4, 3)}
"""The same for weights of at least MANY_OUTPUTS outputs."""
MIN_SPANS = 8
"""Spans of inputs that `tile` is used from; it also needs whole tiles of outputs, of gate and up alike."""
DEEP = 64
"""Spans of inputs from which on a weight is deep: more programs share its inputs."""
MANY_OUTPUTS = 16384
SMALL_OUTPUTS = 4096
"""Up to so many outputs `few` is faster with 16 rows, too."""
INVARIANT = WeightOnlyConfig("tile", block_n=128, block_m=64, warps=8, depth=4)
"""Batch-invariant: one tile shape, whole sums, for any number of rows."""

_LAUNCHES = {"few": few_launch, "tile": tile_launch}


def launch_of(gemm: WeightOnlyGemm, config: WeightOnlyConfig) -> WeightOnlyLaunch:
    """The launch of a GEMM by `few` or `tile`."""
    return _LAUNCHES[config.kernel](gemm, config)


def run(gemm: WeightOnlyGemm, config: WeightOnlyConfig) -> torch.Tensor:
    """The result of a GEMM by `few` or `tile`."""
    launch = launch_of(gemm, config)
    launch.kernel[(launch.programs,)](*launch.arguments, **launch.constants)
    return launch.out


def compile_gemm(gemm: WeightOnlyGemm, config: WeightOnlyConfig) -> None:
    """Compile the kernel that `gemm` needs, without running it; its tensors may be on the `meta` device."""
    launch = launch_of(gemm, config)
    launch.kernel.warmup(*launch.arguments, grid=(launch.programs,), **launch.constants)


@functools.cache
def choose(outputs: int, spans: int, rows: int) -> WeightOnlyConfig:
    """The kernel for a GEMM of `rows` rows with a weight of so many outputs, and spans of inputs.

    Measured for Llama-3.1-8B's matrices with benchmarks/gpu/weight_only_gemm.py on an H200; other shapes take what is
    nearest.
    """
    bucket = bucket_of(rows, BUCKETS)
    is_tall, is_deep = outputs >= MANY_OUTPUTS, spans > DEEP
    if bucket is None or bucket > 256 or (bucket == 256 and not is_tall):
        return WeightOnlyConfig("dequantize")
    is_small = outputs <= SMALL_OUTPUTS and not is_deep
    if bucket <= few_rows.MAX_ROWS and spans <= 8 * few_rows.MAX_CHUNKS and (bucket < 16 or is_small):
        block_n = 32 if bucket == 8 and is_tall else 16
        depth = 4 if is_deep or is_tall else 8
        return WeightOnlyConfig("few", block_n, max(bucket, 8), 8 if is_deep else 4, depth)
    if outputs % 256 or spans < MIN_SPANS:
        return WeightOnlyConfig("dequantize")
    block_n, warps, stages = (TALL_TILES if is_tall else TILES)[max(bucket, 16)]
    config = WeightOnlyConfig("tile", block_n, max(bucket, 16), warps, stages)
    tiles = triton.cdiv(outputs, block_n)
    if tiles > num_sms():
        # Stream-K where the last round of tiles would leave most multiprocessors idle.
        programs = {16: 3, 128: 2}.get(bucket, 0)
        return replace(config, programs=programs)
    if is_deep:
        split = {16: 6, 128: 2}.get(bucket, 4)
    else:
        split = 4 if bucket == 16 else 1 if bucket == 128 and tiles > num_sms() // 2 else 2
    return replace(config, split=max(1, min(split, spans // 4)))


def candidates(outputs: int, spans: int, bucket: int) -> list[WeightOnlyConfig]:
    """What `quire tune` measures for such a GEMM; the rule's choice is the first."""
    found = [choose(outputs, spans, bucket)]
    if bucket <= few_rows.MAX_ROWS:
        found += [
            WeightOnlyConfig("few", block_n, max(bucket, 8), warps, depth)
            for block_n, warps, depth in itertools.product((16, 32), (4, 8, 16), (4, 8))
            if spans <= warps * few_rows.MAX_CHUNKS and depth <= triton.cdiv(spans, warps)
        ]
    if outputs % 256 == 0 and spans >= MIN_SPANS and bucket in BUCKETS[: BUCKETS.index(512)]:
        block_m = max(bucket, 16)
        for block_n, warps, stages in dict.fromkeys((TILES[block_m], TALL_TILES[block_m], (64, 4, 4), (128, 8, 4))):
            tile = WeightOnlyConfig("tile", block_n, block_m, warps, stages)
            splits = [split for split in (1, 2, 4, 6, 8) if split == 1 or split <= spans // 4]
            found += [replace(tile, split=split) for split in splits]
            found += [replace(tile, programs=programs) for programs in (2, 3)]
    return list(dict.fromkeys([*found, WeightOnlyConfig("dequantize")]))


@functools.cache
def _case(
    kind: str, outputs: int, spans: int, inputs: int, bucket: int, dtype: torch.dtype, gated: bool
) -> ProductCase:
    key = tuning.key_of(kind, bucket, outputs, inputs, dtype, gated)
    return ProductCase(key, choose(outputs, spans, bucket), candidates(outputs, spans, bucket))


@functools.cache
def _chosen(*case: Any) -> WeightOnlyConfig:
    found: WeightOnlyConfig = tuning.config_of(_case(*case), current_tables())
    return found


class WeightOnlyKernel(NamedTuple):
    """A kernel that a model needs compiled."""

    weight: WordWeight
    """On the meta device."""
    rows: int
    config: WeightOnlyConfig
    silu: bool
    bias: bool

    def gemm(self) -> WeightOnlyGemm:
        """A GEMM that runs this kernel, on the `meta` device."""
        weight = self.weight
        x = torch.empty(self.rows, weight.inputs, dtype=weight.dtype, device="meta")
        bias = x.new_empty(weight.outputs) if self.bias else None
        return WeightOnlyGemm(x, weight, bias, self.silu)

    def compile(self) -> None:
        """Compile the kernel, into Triton's cache on disk as well."""
        if self.config.kernel == "dequantize":
            compile_dequantize(self.weight)
        else:
            compile_gemm(self.gemm(), self.config)

    @property
    def key(self) -> Hashable:
        """Equal for kernels that are compiled once."""
        kind = (self.config, self.silu, self.bias)
        return (*kind, self.rows == 1) if self.config.kernel == "few" else kind


class WeightOnlyProducts(QuantizedProducts):
    """Products with `GroupedWeight` and `Fp4Weight`."""

    buckets = BUCKETS

    def linear(
        self, x: torch.Tensor, weight: GroupedWeight | Fp4Weight, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._product(x, weight, bias, gated=False)

    def gated_linear(
        self, x: torch.Tensor, weight: GroupedWeight | Fp4Weight, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._product(x, weight, bias, gated=True)

    def linear_add(
        self,
        stream: torch.Tensor,
        x: torch.Tensor,
        weight: GroupedWeight | Fp4Weight,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        words = self._words(x, weight)
        if words is not None and self._config(words, len(x), gated=False).kernel == "dequantize":
            return self.ops.linear_add(stream, self._ordered(x, weight), dequantize(words, scratch(words)), bias)
        return self.linear(x, weight, bias)

    def _product(
        self, x: torch.Tensor, weight: GroupedWeight | Fp4Weight, bias: torch.Tensor | None, gated: bool
    ) -> torch.Tensor:
        words = self._words(x, weight)
        if words is None:
            out = weight.linear(x, bias)
            return self.ops.silu_mul(out) if gated else out
        config = self._config(words, len(x), gated)
        x = self._ordered(x, weight)
        if config.kernel == "dequantize":
            matrix = dequantize(words, scratch(words))
            return self.ops.gated_linear(x, matrix, bias) if gated else self.ops.linear(x, matrix, bias)
        if gated and config.kernel == "tile" and not can_gate(words):
            return self.ops.silu_mul(run(WeightOnlyGemm(x, words, bias), config))
        return run(WeightOnlyGemm(x, words, bias, silu=gated), config)

    def _words(self, x: torch.Tensor, weight: GroupedWeight | Fp4Weight) -> WordWeight | None:
        """The weight for our kernels; None: they do not support this product."""
        if not USE_KERNELS or x.dim() != 2 or not x.is_contiguous() or not x.numel() or x.dtype != weight.dtype:
            return None
        if not INTERPRETED and not has_pdl():
            return None  # bfloat16 arithmetic and WGMMA need a Hopper GPU or later
        return as_words(weight)

    def _ordered(self, x: torch.Tensor, weight: GroupedWeight | Fp4Weight) -> torch.Tensor:
        """x with its columns in the order in which the weight stores its inputs."""
        order = weight.order if isinstance(weight, GroupedWeight) else None
        return x if order is None else x.index_select(1, order)

    def _config(self, words: WordWeight, rows: int, gated: bool) -> WeightOnlyConfig:
        if self.invariant:
            return INVARIANT
        if self.config is not None:
            return self.config
        bucket = bucket_of(rows, BUCKETS)
        return WeightOnlyConfig("dequantize") if bucket is None else _chosen(*_case_fields(words, bucket, gated))

    def case_of(self, weight: GroupedWeight | Fp4Weight, rows: int, gated: bool) -> ProductCase | None:
        words = as_words(weight)
        return None if words is None or rows not in BUCKETS else _case(*_case_fields(words, rows, gated))

    def kernels_of(
        self, weight: Any, normed: bool, gated: bool, bias: bool, max_rows: int
    ) -> Sequence[CompilableKernel]:
        words = self._words(weight.scale.new_empty(1, weight.shape[1], dtype=weight.dtype, device="meta"), weight)
        if words is None:
            return []
        meta = words.to_meta()
        kernels: dict[Hashable, WeightOnlyKernel] = {}
        for rows in [rows for rows in (*BUCKETS, 2 * BUCKETS[-1]) if rows < 2 * max_rows]:
            config = self._config(words, rows, gated)
            if config.kernel == "dequantize" and not words.codes.is_meta:
                scratch(words)  # taken now: later there may be no memory, or a graph is being recorded
            kernel = WeightOnlyKernel(meta, rows, config, gated, bias)
            kernels.setdefault(kernel.key, kernel)
        return list(kernels.values())


def _case_fields(words: WordWeight, bucket: int, gated: bool) -> tuple[Any, ...]:
    """The arguments of `_case`."""
    kind = f"{words.format}-g{words.group}"
    if words.zero is not None or words.minimum is not None:
        kind += "-zero" if words.zero is not None else "-minimum"
    return kind, words.outputs, words.inputs // words.span, words.inputs, bucket, words.dtype, gated
