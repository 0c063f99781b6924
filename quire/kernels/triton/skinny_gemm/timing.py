"""How long a product takes in a step: what `tuning` measures with, and the compiling that has to come first."""

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

from quire.kernels.triton.activation import silu_mul
from quire.kernels.triton.norm import add_rms_norm
from quire.kernels.triton.skinny_gemm.candidates import GemmShape
from quire.kernels.triton.skinny_gemm.gemm import thin_linear, thin_norm_linear, thin_silu_linear
from quire.kernels.triton.skinny_gemm.tuning import Plan, TuningJob

log = logging.getLogger(__name__)

COLD_BYTES = 120 << 20
"""A step reads every weight once and the cache holds none of them: weights are rotated over at least so much."""

_EPS = 1e-5


class Inputs(NamedTuple):
    """A product's inputs on the device; the weights are several of one shape."""

    x: torch.Tensor
    residual: torch.Tensor
    gain: torch.Tensor
    weights: list[torch.Tensor]


def random_inputs(shape: GemmShape, rows: int, dtype: torch.dtype, copies: int, device: str = "cuda") -> Inputs:
    """Inputs of the size that they have in a model: activations about 1, products of them too."""

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, dtype=dtype, device=device)

    weights = [normal(shape.n, shape.k).mul_(shape.k**-0.5) for _ in range(copies)]
    return Inputs(normal(rows, shape.k), normal(rows, shape.k), normal(shape.k), weights)


def run(shape: GemmShape, plan: Plan, inputs: Inputs, weight: torch.Tensor) -> torch.Tensor:
    """Do a product as `plan` says, what it does not fold in by the other kernels of a step."""
    x, config = inputs.x, plan.config
    if shape.norm:
        if plan.norm:
            assert config is not None
            return thin_norm_linear(
                x, inputs.residual, inputs.gain, _EPS, weight, silu=plan.silu, config=config
            )[0]  # fmt: skip
        x, _ = add_rms_norm(x, inputs.residual, inputs.gain, _EPS)
    if config is None:
        out = F.linear(x, weight)
    elif plan.silu:
        out = thin_silu_linear(x, weight, config=config)
    else:
        out = thin_linear(x, weight, config=config)
    return silu_mul(out) if shape.silu and not plan.silu else out


class GraphTimer:
    """Times a product as a step runs it: in a CUDA graph, after another one like it, its weights in no cache."""

    def __init__(self, window_us: float = 300.0, replays: int = 8) -> None:
        self.window_us = window_us
        self.replays = replays
        self.stream = torch.cuda.Stream()
        self._weights: tuple[tuple[int, int, torch.dtype], list[torch.Tensor]] | None = None

    def __call__(self, shape: GemmShape, rows: int, dtype: torch.dtype, plan: Plan) -> float:
        """Microseconds a product; infinity if it does not compile or does not fit."""
        inputs = self._inputs(shape, rows, dtype)
        try:
            run(shape, plan, inputs, inputs.weights[0])
        except (CompilationError, OutOfResources, PTXASError) as error:
            log.warning("%s of %d rows cannot be done by %s: %s", shape, rows, plan, error)
            return float("inf")
        estimate = 3.0 + shape.n * shape.k * dtype.itemsize / 4e6
        return self.time(lambda weight: run(shape, plan, inputs, weight), inputs.weights, estimate)

    def time(
        self, product: Callable[[torch.Tensor], object], weights: Sequence[torch.Tensor], estimate: float
    ) -> float:
        """Microseconds of a product that takes about `estimate`, one weight after the other."""
        count = len(weights)
        launches = -(-max(count, int(self.window_us / estimate), 2) // count) * count

        def chain() -> None:
            for i in range(launches):
                product(weights[i % count])

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
            graph.replay()  # the card is busy while the host prepares what is timed
            start.record()
            for _ in range(self.replays):
                graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1000 / self.replays)
        return min(times)

    def _inputs(self, shape: GemmShape, rows: int, dtype: torch.dtype) -> Inputs:
        """Fresh activations; the weights of the last call if they fit, since drawing them takes longest."""
        key = (shape.n, shape.k, dtype)
        if self._weights is None or self._weights[0] != key:
            self._weights = None  # freed before the next are drawn
            copies = -(-COLD_BYTES // (shape.n * shape.k * dtype.itemsize))
            self._weights = key, random_inputs(shape, 1, dtype, copies).weights
        return random_inputs(shape, rows, dtype, 0)._replace(weights=self._weights[1])


def raise_clocks() -> None:
    """Keep the card busy for a moment: one that has idled runs slowly."""
    x = torch.randn(4096, 8192, dtype=torch.float16, device="cuda")
    weight = torch.randn(8192, 8192, dtype=torch.float16, device="cuda")
    for _ in range(50):
        F.linear(x, weight)


def compile_all(jobs: Sequence[TuningJob], processes: int | None = None) -> None:
    """Compile many kernels at once, into Triton's cache on disk, whence this process loads them."""
    # New processes rather than forks: a fork cannot use the card.
    context = multiprocessing.get_context("spawn")
    workers = max(min(processes or os.cpu_count() or 1, len(jobs)), 1)
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        try:
            for job, error in zip(jobs, pool.map(_compile, jobs, chunksize=2), strict=True):
                if error is not None:
                    log.warning("%s was not compiled: %s", job, error)
        except BrokenProcessPool as error:
            log.warning("a compiler died; the rest is compiled as it is needed: %s", error)


def _compile(job: TuningJob) -> str | None:
    try:
        job.compile()
    except (CompilationError, OutOfResources, PTXASError) as error:
        return str(error)
    return None
