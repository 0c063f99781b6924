"""Native CPU kernels beside torch's, on the shapes of SmolLM2-135M.

    python benchmarks/cpu_kernels.py [--dtype float32|bfloat16] [--only gemms,attention] [--rounds 7]

Both run alternately within each round and the best round counts, so that a shared machine still gives a fair ratio.
GEMMs run over all 121 weights of the model, each distinct: nothing stays in cache from one step to the next, as in a
real decode.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from quire.kernels.cpu.ops import CpuOps
from quire.kernels.reference import TorchOps
from quire.layers.attention.base import AttentionInputs, AttentionSpec
from quire.layers.attention.cpu import CpuPagedAttention

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCABULARY = 576, 30, 9, 3, 64, 1536, 49152
QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM


def compare(rounds: int, repeats: int, **candidates: Callable[[], object]) -> dict[str, float]:
    """Best seconds per call of each, run alternately."""
    best = dict.fromkeys(candidates, float("inf"))
    for _ in range(rounds):
        for name, run in candidates.items():
            start = time.perf_counter()
            for _ in range(repeats):
                run()
            best[name] = min(best[name], (time.perf_counter() - start) / repeats)
    return best


def report(title: str, best: dict[str, float], *, byte_count: float = 0, operations: float = 0) -> None:
    """One line: the time and rates of each, and the speedup of the first over the second."""
    cells = []
    for name, seconds in best.items():
        cell = f"{name} {seconds * 1e3:9.3f} ms"
        cell += f" {byte_count / seconds / 1e9:6.1f} GB/s" if byte_count else ""
        cell += f" {operations / seconds / 1e9:6.1f} GFLOP/s" if operations else ""
        cells.append(cell)
    first, second = list(best.values())[:2]
    print(f"{title:<34} " + " | ".join(cells) + f" | {second / first:5.2f}x", flush=True)


def gemms(ops: CpuOps, dtype: torch.dtype, rounds: int) -> None:
    """Every GEMM of one step: 30 x (qkv, output, gate and up, down) and the LM head."""
    shapes = [(QKV, HIDDEN), (HIDDEN, HIDDEN), (2 * MLP, HIDDEN), (HIDDEN, MLP)] * LAYERS + [(VOCABULARY, HIDDEN)]
    weights = [torch.randn(shape).to(dtype) for shape in shapes]
    numbers = sum(weight.numel() for weight in weights)
    for rows in (1, 2, 4, 8, 16, 32, 64, 128, 512):
        inputs = {width: torch.randn(rows, width).to(dtype) for width in (HIDDEN, MLP)}

        def step(linear: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], inputs: dict = inputs) -> None:
            for weight in weights:
                linear(inputs[weight.shape[1]], weight)

        best = compare(
            max(2, rounds // (1 + rows // 64)), 1, quire=lambda: step(ops.linear), torch=lambda: step(F.linear)
        )
        report(f"all GEMMs, {rows} rows", best, byte_count=numbers * dtype.itemsize, operations=2 * numbers * rows)


def attention(dtype: torch.dtype, rounds: int) -> None:
    """One layer, against torch's fused attention over a contiguous cache (which a paged engine cannot have)."""
    backend = CpuPagedAttention()
    cases = {
        "decode 1 x 1000": [(1, 1000)],
        "decode 1 x 16000": [(1, 16000)],
        "decode 16 x 1000": [(1, 1000)] * 16,
        "decode 64 x 200": [(1, 200)] * 64,
        "prompt 512": [(512, 512)],
        "prompt 2048": [(2048, 2048)],
        "chunk 256 at 4096": [(256, 4096)],
        "mixed 16 decodes + 256": [(1, 1000)] * 16 + [(256, 256)],
    }
    for title, rows in cases.items():
        q, kv, inputs = paged(rows, dtype)
        keys = [torch.randn(2, 1, KV_HEADS, context, HEAD_DIM).to(dtype) for _, context in rows]

        def fused(rows: list = rows, keys: list = keys, q: torch.Tensor = q) -> None:
            start = 0
            for (length, context), (key, value) in zip(rows, keys, strict=True):
                query = q[start : start + length].transpose(0, 1).unsqueeze(0)
                start += length
                mask = None
                if 1 < length < context:
                    mask = torch.ones(length, context, dtype=torch.bool).tril(context - length)
                F.scaled_dot_product_attention(
                    query, key, value, attn_mask=mask, is_causal=1 < length == context, enable_gqa=True
                )

        pairs = sum(length * (context - length) + length * (length + 1) / 2 for length, context in rows)
        repeats = 1 if pairs > 1e5 else 20
        best = compare(
            rounds,
            repeats,
            quire=lambda q=q, kv=kv, inputs=inputs: backend.attend(q, kv, inputs, AttentionSpec(HEAD_DIM**-0.5)),
            torch=fused,
        )
        cache = sum(context for _, context in rows) * 2 * KV_HEADS * HEAD_DIM * dtype.itemsize
        decode = inputs.max_query_len == 1
        report(
            f"attention, {title}",
            best,
            byte_count=cache if decode else 0,
            operations=0 if decode else 4 * HEADS * HEAD_DIM * pairs,
        )


def paged(rows: list[tuple[int, int]], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, AttentionInputs]:
    """Queries, one layer's cache and the inputs for rows of (query length, context), blocks in random order."""
    block_size = 16
    counts = [-(-context // block_size) for _, context in rows]
    kv = torch.randn(sum(counts) + 1, 2, KV_HEADS, block_size, HEAD_DIM).to(dtype)
    tables = torch.zeros(len(rows), max(counts), dtype=torch.int32)
    for row, blocks in enumerate((torch.randperm(sum(counts)) + 1).int().split(counts)):
        tables[row, : len(blocks)] = blocks
    lengths = [length for length, _ in rows]
    inputs = AttentionInputs(
        slots=torch.empty(0, dtype=torch.int64),
        query_starts=torch.tensor([0, *lengths]).cumsum(0).int(),
        context_lens=torch.tensor([context for _, context in rows], dtype=torch.int32),
        block_tables=tables,
        num_rows=len(rows),
        num_tokens=sum(lengths),
        num_decodes=lengths.count(1),
        max_query_len=max(lengths),
        max_context_len=max(context for _, context in rows),
    )
    return torch.randn(sum(lengths), HEADS, HEAD_DIM).to(dtype), kv, inputs


def rowwise(ops: CpuOps, dtype: torch.dtype, rounds: int) -> None:
    """The small kernels, against the reference in plain torch."""
    plain = TorchOps()
    weight = torch.randn(HIDDEN).to(dtype)
    cos_sin = torch.randn(4096, HEAD_DIM)
    for tokens in (1, 16, 512):
        x, residual = torch.randn(2, tokens, HIDDEN).to(dtype)
        gate_up, qkv = torch.randn(tokens, 2 * MLP).to(dtype), torch.randn(tokens, QKV).to(dtype)
        kv = torch.zeros(64, 2, KV_HEADS, 16, HEAD_DIM, dtype=dtype)
        slots = torch.randperm(1024)[:tokens]
        arguments = (qkv, slots, cos_sin, None, kv, slots, HEADS, KV_HEADS, HEAD_DIM)
        calls = {
            "rms_norm": ((x, weight, 1e-5), 2 * x.nbytes),
            "add_rms_norm": ((x, residual, weight, 1e-5), 4 * x.nbytes),
            "silu_mul": ((gate_up,), 1.5 * gate_up.nbytes),
            "prepare_qkv": (arguments, 2 * qkv.nbytes),
        }
        for name, (args, byte_count) in calls.items():
            ours, theirs = getattr(ops, name), getattr(plain, name)
            best = compare(rounds, 200 if tokens < 100 else 20, quire=lambda: ours(*args), torch=lambda: theirs(*args))  # noqa: B023
            report(f"{name}, {tokens} tokens", best, byte_count=byte_count)


def overhead(ops: CpuOps, dtype: torch.dtype, rounds: int) -> None:
    """A call that computes almost nothing: the overhead of Python, ctypes and the thread pool."""
    x, weight = torch.randn(1, 16).to(dtype), torch.randn(16, 16).to(dtype)
    norm = torch.randn(16).to(dtype)
    best = compare(rounds, 1000, quire=lambda: ops.rms_norm(x, norm, 1e-5), torch=lambda: x * norm)
    report("smallest rms_norm (torch: x * w)", best)
    best = compare(rounds, 1000, quire=lambda: ops.linear(x, weight), torch=lambda: F.linear(x, weight))
    report("smallest linear", best)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--only", default="overhead,rowwise,attention,gemms")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    ops = CpuOps()
    print(f"{options.dtype}, {torch.get_num_threads()} threads, torch {torch.__version__}, native: {ops.is_native}")
    runs = {
        "overhead": lambda: overhead(ops, dtype, options.rounds),
        "rowwise": lambda: rowwise(ops, dtype, options.rounds),
        "attention": lambda: attention(dtype, options.rounds),
        "gemms": lambda: gemms(ops, dtype, options.rounds),
    }
    with torch.inference_mode():
        for name in options.only.split(","):
            runs[name]()


if __name__ == "__main__":
    main()
