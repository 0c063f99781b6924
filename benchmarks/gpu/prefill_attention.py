"""Prefill attention on the GPU: which tile is best for which step, beside torch's attention over contiguous tensors.

    python benchmarks/gpu/prefill_attention.py [--model all|llama-8b|qwen3-0.6b]

TFLOP/s count causal operations only: 4 * head_dim a query head and visible key. Each case runs over several layers of
one block-major cache as a captured graph, so that neither Python nor a warm L2 distorts the times.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from quire.kernels.triton.prefill_attention import PrefillTile, plan_tiles, prefill_attention, prefill_tile
from quire.layers.attention.base import AttentionInputs, AttentionSpec
from quire.layers.attention.torch_paged import TorchPagedAttention

DIM, BLOCK, LAYERS, RUN_LAYERS = 128, 16, 32, 4
MODELS = {"llama-8b": (32, 8), "qwen3-0.6b": (16, 8)}
CASES = {
    "8 x 2048": [(2048, 2048)] * 8,
    "1 x 16384": [(16384, 16384)],
    "16 x 512 after 4096": [(4608, 512)] * 16,
    "64 x 128": [(128, 128)] * 64,
}
VARIANTS = [
    PrefillTile(128, 128, 8, 2),
    PrefillTile(128, 128, 8, 3),
    PrefillTile(128, 128, 8, 5),
    PrefillTile(128, 64, 8, 2),
    PrefillTile(128, 64, 8, 5),
    PrefillTile(64, 64, 4, 2),
    PrefillTile(64, 64, 4, 5),
    PrefillTile(128, 128, 8, 5, skewed=False),
    PrefillTile(128, 64, 8, 5, skewed=False),
    PrefillTile(64, 64, 4, 5, skewed=False),
]


class Step:
    """Rows of (context, query) tokens over a shuffled block-major cache."""

    def __init__(self, lens: list[tuple[int, int]], heads: int, kv_heads: int) -> None:
        self.heads, self.group = heads, heads // kv_heads
        self.num_rows, self.num_tokens = len(lens), sum(queries for _, queries in lens)
        blocks_of = [-(-context // BLOCK) for context, _ in lens]
        order = torch.randperm(sum(blocks_of), device="cuda").int()
        self.cache = torch.empty(len(order), LAYERS, 2, kv_heads, BLOCK, DIM, dtype=torch.bfloat16, device="cuda")
        self.cache[:, :RUN_LAYERS].normal_()
        self.tables = torch.zeros(len(lens) + 1, -(-max(blocks_of) // 16) * 16, dtype=torch.int32, device="cuda")
        for row, mine in enumerate(order.split(blocks_of)):
            self.tables[row, : len(mine)] = mine
        self.query_starts = torch.tensor([0, *(queries for _, queries in lens)], device="cuda").cumsum(0).int()
        self.context_lens = torch.tensor([context for context, _ in lens], dtype=torch.int32, device="cuda")
        self.rows = torch.arange(len(lens), dtype=torch.int32, device="cuda")
        qkv = torch.randn(self.num_tokens, heads + 2 * kv_heads, DIM, dtype=torch.bfloat16, device="cuda")
        self.q = qkv[:, :heads]
        self.out = torch.full((self.num_tokens, heads * DIM), torch.nan, dtype=torch.bfloat16, device="cuda")
        pairs = sum(queries * (context - queries) + queries * (queries + 1) // 2 for context, queries in lens)
        self.operations = 4 * DIM * heads * pairs

    def plan(self, tile: PrefillTile) -> torch.Tensor:
        tokens = tile.tokens(self.group)
        return plan_tiles(
            self.query_starts, self.context_lens, self.rows, 0, self.num_rows, self.num_tokens, tokens
        )  # fmt: skip

    def attend(self, layers: range, tiles: torch.Tensor, tile: PrefillTile) -> None:
        for layer in layers:
            prefill_attention(self.q, self.cache[:, layer], self.out, self.tables, tiles, DIM**-0.5, None, tile)


def compile_all(models: list[str]) -> None:
    """Compile every variant for every model in parallel: ptxas runs as separate processes."""

    def compile_one(heads: int, kv_heads: int, tile: PrefillTile) -> None:
        step = Step([(33, 20)], heads, kv_heads)
        step.attend(range(1), step.plan(tile), tile)

    cases = [(*MODELS[model], tile) for model in models for tile in VARIANTS]
    compile_one(*cases[0])
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda case: compile_one(*case), cases[1:]))
    torch.cuda.synchronize()


def check(heads: int, kv_heads: int) -> None:
    """Every variant against plain torch on a small step; raises if one is wrong."""
    step = Step([(300, 300), (700, 129), (40, 1)], heads, kv_heads)
    inputs = AttentionInputs(
        slots=torch.empty(0), query_starts=step.query_starts, context_lens=step.context_lens,
        block_tables=step.tables[: step.num_rows], num_rows=step.num_rows, num_tokens=step.num_tokens, num_decodes=0,
        max_query_len=300, max_context_len=700,
    )  # fmt: skip
    wanted = TorchPagedAttention().attend(step.q.float(), step.cache[:, 1].float(), inputs, AttentionSpec(DIM**-0.5))
    for tile in VARIANTS:
        step.out.fill_(torch.nan)
        step.attend(range(1, 2), step.plan(tile), tile)
        error = ((step.out.float() - wanted).norm() / wanted.norm()).item()
        if not error < 6e-3:
            raise AssertionError(f"{tile} is off by {error:.1e} of the result")


def seconds(run: Callable[[], object], repeats: int = 5) -> float:
    """Median seconds of one replay of what `run` launches."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(times)


def rate(step: Step, tile: PrefillTile) -> float:
    """TFLOP/s of the attention of a layer, without the step's planning."""
    tiles = step.plan(tile)
    return step.operations * RUN_LAYERS / seconds(lambda: step.attend(range(RUN_LAYERS), tiles, tile)) / 1e12


def torch_rate(heads: int, kv_heads: int, backend: SDPBackend) -> float:
    """TFLOP/s of torch over contiguous K and V, for the first case."""
    lens = CASES["8 x 2048"]
    length = lens[0][0]
    q, k, v = (
        torch.randn(len(lens), h, length, DIM, dtype=torch.bfloat16, device="cuda") for h in (heads, kv_heads, kv_heads)
    )
    with sdpa_kernel(backend):
        once = seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
    return 4 * DIM * heads * len(lens) * length * (length + 1) / 2 / once / 1e12


def report(model: str) -> None:
    heads, kv_heads = MODELS[model]
    check(heads, kv_heads)
    steps = {name: Step(lens, heads, kv_heads) for name, lens in CASES.items()}
    print(f"\n{model}: {heads} heads, {kv_heads} KV heads, TFLOP/s")
    print(f"{'block_m block_n warps stages skewed':<38}" + "".join(f"{name:>22}" for name in steps))
    best: dict[str, tuple[float, PrefillTile]] = {}
    for tile in VARIANTS:
        line = f"{tile.block_m:>7} {tile.block_n:>7} {tile.warps:>5} {tile.stages:>6} {tile.skewed!s:>6}   "
        for name, step in steps.items():
            found = rate(step, tile)
            best[name] = max(best.get(name, (0.0, tile)), (found, tile), key=lambda pair: pair[0])
            line += f"{found:>22.0f}"
        print(line + ("  <- default" if tile == prefill_tile(DIM, 2) else ""), flush=True)
    for name, (found, tile) in best.items():
        print(f"best for {name}: {found:.0f} with {tile}")
    plans = {name: 1e6 * seconds(lambda step=step: step.plan(VARIANTS[0])) for name, step in steps.items()}
    print("plan, us a step: " + ", ".join(f"{name}: {found:.0f}" for name, found in plans.items()))
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        try:
            print(f"torch {backend.name} for 8 x 2048, contiguous: {torch_rate(heads, kv_heads, backend):.0f}")
        except RuntimeError as refusal:
            print(f"torch {backend.name}: {str(refusal).splitlines()[0]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["all", *MODELS], default="all")
    chosen = parser.parse_args().model
    models = list(MODELS) if chosen == "all" else [chosen]
    torch.manual_seed(0)
    compile_all(models)
    for model in models:
        report(model)


if __name__ == "__main__":
    main()
