"""Triton's row-wise kernels on a GPU: microseconds and GB/s at the shapes of two models.

    python benchmarks/gpu/elementwise.py

Each kernel is repeated inside a CUDA graph, so its time contains no host launch cost; that has its own column ("host":
microseconds of one eager call in Python). L2 is not flushed in between: what fits there (50 MB on an H200) stays, as
between the kernels of a step, and reads faster than memory. The column of 16384 tokens is bound by memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from triton.testing import do_bench_cudagraph

from quire.kernels.triton.ops import TritonOps

OPS = TritonOps()
TOKENS = (1, 64, 256, 4096, 16384)
BLOCK_SIZE = 16
Case = tuple[Callable[[], object], int]
"""A call, and the bytes it moves."""


@dataclass(frozen=True)
class Shape:
    """The dimensions of a model's row-wise kernels."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    qk_norm: bool


MODELS = (
    Shape("Llama-3.1-8B", 4096, 32, 8, 128, 14336, qk_norm=False),
    Shape("Qwen3-0.6B", 1024, 16, 8, 128, 3072, qk_norm=True),
)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def norm_case(model: Shape, tokens: int) -> Case:
    x, weight = random(tokens, model.hidden), random(model.hidden)
    return lambda: OPS.rms_norm(x, weight, 1e-5), 2 * (2 * tokens + 1) * model.hidden


def add_norm_case(model: Shape, tokens: int) -> Case:
    x, residual, weight = random(tokens, model.hidden), random(tokens, model.hidden), random(model.hidden)
    return lambda: OPS.add_rms_norm(x, residual, weight, 1e-5), 2 * (4 * tokens + 1) * model.hidden


def silu_case(model: Shape, tokens: int) -> Case:
    gate_up = random(tokens, 2 * model.mlp)
    return lambda: OPS.silu_mul(gate_up), 2 * 3 * tokens * model.mlp


def qkv_case(model: Shape, tokens: int) -> Case:
    dim, width = model.head_dim, (model.heads + 2 * model.kv_heads) * model.head_dim
    qkv = random(tokens, width)
    positions = torch.arange(tokens, device="cuda")
    cos_sin = torch.randn(tokens, dim, device="cuda").cos()
    norms = (random(dim), random(dim), 1e-6) if model.qk_norm else None
    blocks = -(-tokens // BLOCK_SIZE)
    kv = random(blocks, 2, model.kv_heads, BLOCK_SIZE, dim)
    order = torch.randperm(blocks, device="cuda")  # a row's blocks are scattered
    slots = order[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    rest = (positions, cos_sin, norms, kv, slots, model.heads, model.kv_heads, dim)
    return lambda: OPS.prepare_qkv(qkv, *rest), tokens * (2 * 2 * width + 4 * dim + 16)


CASES = {"rms_norm": norm_case, "add_rms_norm": add_norm_case, "silu_mul": silu_case, "prepare_qkv": qkv_case}


def host_us(run: Callable[[], object], calls: int = 300) -> float:
    """Microseconds Python spends on one eager call."""
    run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls * 1e6


def main() -> None:
    print(torch.cuda.get_device_name(), "| us and GB/s by tokens, bfloat16")
    print(f"{'':<26} {'host':>6}" + "".join(f"{tokens:>16}" for tokens in TOKENS))
    for model in MODELS:
        for name, case in CASES.items():
            cells = [f"{host_us(case(model, 1)[0]):>6.1f}"]
            for tokens in TOKENS:
                run, count = case(model, tokens)
                us = 1e3 * do_bench_cudagraph(run, rep=5, return_mode="median")
                cells.append(f"{us:>9.2f} {count / us / 1e3:>6.0f}")
            print(f"{model.name:<13}{name:<13} " + "".join(cells), flush=True)


if __name__ == "__main__":
    main()
