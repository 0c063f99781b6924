"""Times skinny GEMMs as a step runs them, for `tuning.py`; compiles the candidates in parallel first."""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple

import torch
import torch.nn.functional as F
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from quire.kernels.triton.elementwise import add_rms_norm, silu_mul
from quire.kernels.triton.skinny_gemm.candidates import GemmShape
from quire.kernels.triton.skinny_gemm.gemm import skinny_linear, skinny_norm_linear, skinny_silu_linear
from quire.kernels.triton.skinny_gemm.tuning import GemmKernel, GemmVariant

log = logging.getLogger(__name__)

COLD_BYTES = 120 << 20
"""Timing rotates over at least this many bytes of weights: a step reads every weight once, none of them from L2."""

_EPS = 1e-5


class GemmInputs(NamedTuple):
    """A GEMM's inputs on the device; the weights are several of one shape."""

    x: torch.Tensor
    residual: torch.Tensor
    gain: torch.Tensor
    weights: list[torch.Tensor]


def random_inputs(shape: GemmShape, rows: int, dtype: torch.dtype, copies: int, device: str = "cuda") -> GemmInputs:
    """Inputs scaled as in a model: activations and outputs about 1."""

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, dtype=dtype, device=device)

    weights = [normal(shape.n, shape.k).mul_(shape.k**-0.5) for _ in range(copies)]
    return GemmInputs(normal(rows, shape.k), normal(rows, shape.k), normal(shape.k), weights)


def run(shape: GemmShape, variant: GemmVariant, inputs: GemmInputs, weight: torch.Tensor) -> torch.Tensor:
    """Compute a GEMM by a variant; what the variant does not fuse is done by the other kernels of a step."""
    x, config = inputs.x, variant.config
    if shape.norm:
        if variant.norm:
            assert config is not None
            return skinny_norm_linear(
                x, inputs.residual, inputs.gain, _EPS, weight, silu=variant.silu, config=config
            )[0]  # fmt: skip
        x, _ = add_rms_norm(x, inputs.residual, inputs.gain, _EPS)
    if config is None:
        out = F.linear(x, weight)
    elif variant.silu:
        out = skinny_silu_linear(x, weight, config=config)
    else:
        out = skinny_linear(x, weight, config=config)
    return silu_mul(out) if shape.silu and not variant.silu else out


class GraphTimer:
    """Times a GEMM as a step runs it: in a CUDA graph, after another one like it, its weights not in L2."""

    def __init__(self, window_us: float = 300.0, replays: int = 8) -> None:
        self.window_us = window_us
        self.replays = replays
        self.stream = torch.cuda.Stream()
        self._weights: tuple[tuple[int, int, torch.dtype], list[torch.Tensor]] | None = None

    def __call__(self, shape: GemmShape, rows: int, dtype: torch.dtype, variant: GemmVariant) -> float:
        """Microseconds; infinity if it does not compile or does not fit."""
        inputs = self._inputs(shape, rows, dtype)
        try:
            run(shape, variant, inputs, inputs.weights[0])
        except (CompilationError, OutOfResources, PTXASError) as error:
            log.warning("%s of %d rows cannot be computed by %s: %s", shape, rows, variant, error)
            return float("inf")
        estimate = 3.0 + shape.n * shape.k * dtype.itemsize / 4e6
        return self.time(lambda weight: run(shape, variant, inputs, weight), inputs.weights, estimate)

    def time(self, gemm: Callable[[torch.Tensor], object], weights: Sequence[torch.Tensor], estimate: float) -> float:
        """Microseconds of a GEMM that takes about `estimate` microseconds, one weight after the other."""
        count = len(weights)
        launches = -(-max(count, int(self.window_us / estimate), 2) // count) * count

        def chain() -> None:
            for i in range(launches):
                gemm(weights[i % count])

        return self.replay(chain) / launches

    def replay(self, chain: Callable[[], None]) -> float:
        """Microseconds of one run of `chain`, the fastest of three series of replays."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        # Not `torch.cuda.graph`, which empties the allocator's cache each time.
        with torch.cuda.stream(self.stream):
            graph.capture_begin()
            chain()
            graph.capture_end()
        times = []
        graph.replay()
        for _ in range(3):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            graph.replay()  # keeps the GPU busy while the host enqueues what is timed
            start.record()
            for _ in range(self.replays):
                graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1000 / self.replays)
        return min(times)

    def _inputs(self, shape: GemmShape, rows: int, dtype: torch.dtype) -> GemmInputs:
        """New activations; the weights of the last call if they fit, since generating them takes longest."""
        key = (shape.n, shape.k, dtype)
        if self._weights is None or self._weights[0] != key:
            self._weights = None  # freed before the next are generated
            copies = -(-COLD_BYTES // (shape.n * shape.k * dtype.itemsize))
            self._weights = key, random_inputs(shape, 1, dtype, copies).weights
        return random_inputs(shape, rows, dtype, 0)._replace(weights=self._weights[1])


def raise_clocks() -> None:
    """Keep the GPU busy for a moment: after idling its clocks are low."""
    x = torch.randn(4096, 8192, dtype=torch.float16, device="cuda")
    weight = torch.randn(8192, 8192, dtype=torch.float16, device="cuda")
    for _ in range(50):
        F.linear(x, weight)


def compile_all(kernels: Sequence[GemmKernel], processes: int | None = None) -> None:
    """Compile kernels in parallel processes, into Triton's cache on disk, from which this process loads them."""
    # Spawned, not forked: a forked process cannot use the GPU.
    context = multiprocessing.get_context("spawn")
    workers = max(min(processes or os.cpu_count() or 1, len(kernels)), 1)
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        try:
            for kernel, error in zip(kernels, pool.map(_compile, kernels, chunksize=2), strict=True):
                if error is not None:
                    log.warning("%s was not compiled: %s", kernel, error)
        except BrokenProcessPool as error:
            log.warning("a compiler process died; the remaining kernels are compiled on first use: %s", error)


def _compile(kernel: GemmKernel) -> str | None:
    try:
        kernel.compile()
    except (CompilationError, OutOfResources, PTXASError) as error:
        return str(error)
    return None
