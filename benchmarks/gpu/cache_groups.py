"""The device batch of models with several cache groups: what applying a plan and laying out a decode step cost.

    python benchmarks/gpu/cache_groups.py [--quick]

Compares the kernels with the batch in plain torch first. Times are those of a CUDA graph with the layout of one step
(`expand`), and of the launch that applies a plan (`apply`), which reads pinned host memory, by events around many.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch

from quire.kernels.kv import KVFormat
from quire.layers.caches import AttentionCache, LayerCache, StateCache, StatePart
from quire.messages.plan import NewRow, StepPlan
from quire.messages.sampling import SamplingParams
from quire.worker.batch import DeviceBatch
from quire.worker.cuda_batch import CudaBatch
from quire.worker.geometry import CacheGeometry, make_geometry
from quire.worker.kv import KVCache

ROWS, LONGEST, BLOCK = 256, 32768, 16
BF16 = KVFormat(torch.bfloat16)


def models() -> dict[str, CacheGeometry]:
    """Few heads, so that the caches are small: only tables matter here."""
    full, window = AttentionCache(1, 16, BF16), AttentionCache(1, 16, BF16, 1024)
    state = StateCache((StatePart(8, (16, 16), torch.float32),))
    layers: dict[str, list[LayerCache]] = {
        "1 full": [full] * 4,
        "full + window": [full, window] * 4,
        "full + 5 windows": [full, *[window] * 5] * 4,
        "full + state": [full, state, state, state],
        "window": [window] * 4,
    }
    return {name: make_geometry(caches, BLOCK) for name, caches in layers.items()}


def plan_of(step: int, geometry: CacheGeometry, first: bool) -> StepPlan:
    """All rows decode; the first plan adds them with their tables."""
    rows = np.arange(ROWS, dtype=np.int32)
    none = np.empty(0, np.int32)
    added = [
        NewRow(
            row=row, request="", prompt_len=40, num_tokens=41, num_computed=40, limit=LONGEST, seed=row, sequence=0,
            params=SamplingParams(), stop_ids=[], bad_words=[], computed=np.zeros(40, np.int32),
        )
        for row in range(ROWS)
    ]  # fmt: skip
    changes = [
        (group, row, index, 1 + (row * 7 + index + group) % 1000)
        for group, each in enumerate(geometry.groups)
        for row in range(ROWS)
        for index in range(each.pages or 6)
    ]
    columns = np.array(changes, np.int32).T if first else np.empty((4, 0), np.int32)
    return StepPlan(
        step=step, rows=rows, counts=np.ones(ROWS, np.int32), num_decodes=ROWS, tokens=none, samples=rows,
        sample_rows=rows, block_rows=columns[1], block_indices=columns[2], blocks=columns[3], max_context=64,
        block_groups=columns[0] if len(geometry.groups) > 1 else none, add=added if first else [],
    )  # fmt: skip


def check(ours: CudaBatch, theirs: DeviceBatch, geometry: CacheGeometry) -> None:
    plan = plan_of(0, geometry, first=True)
    for batch in (ours, theirs):
        batch.apply(plan)
    mine, other = ours.inputs(plan), theirs.inputs(plan)
    for own, group in zip(mine.attention, other.attention, strict=True):
        assert torch.equal(own.slots, group.slots) and torch.equal(own.context_lens, group.context_lens)
        width = group.block_tables.shape[1]
        assert torch.equal(own.own_tables(width), group.block_tables)
    assert torch.equal(mine.positions, other.positions)
    assert torch.equal(ours.block_tables, theirs.block_tables) and torch.equal(ours.token_ids, theirs.token_ids)


def expand_seconds(batch: CudaBatch, repeats: int) -> float:
    inputs = batch.empty_inputs(ROWS, ROWS, ROWS, 1, 0)
    batch.expand(inputs)
    before = batch.num_computed.clone()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        for _ in range(20):
            batch.expand(inputs)
    batch.num_computed.copy_(before)
    best = _timed(graph.replay, repeats) / 20
    batch.num_computed.copy_(before)
    return best


def apply_seconds(batch: CudaBatch, geometry: CacheGeometry, repeats: int) -> float:
    numbers = iter(range(1, 100_000))
    return _timed(lambda: batch.apply(plan_of(next(numbers), geometry, first=False)), repeats)


def _timed(run: Any, repeats: int) -> float:
    for _ in range(3):
        run()
    best = float("inf")
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(10):
            run()
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end) / 1e4)
    return best


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    repeats = 3 if parser.parse_args().quick else 20
    device = torch.device("cuda")
    lines = []
    for name, geometry in models().items():
        ours = CudaBatch(ROWS, LONGEST, 1000, KVCache.of(geometry, 1100, device), device, 4096)
        theirs = DeviceBatch(ROWS, LONGEST, 1000, KVCache.of(geometry, 1100, device), device)
        check(ours, theirs, geometry)
        expand, apply = expand_seconds(ours, repeats), apply_seconds(ours, geometry, repeats)
        lines.append(f"{name:<18} {len(geometry.groups):>6}  {expand * 1e6:>9.2f}  {apply * 1e6:>9.2f}")
    print(f"{ROWS} rows, {torch.cuda.get_device_name()}\n{'model':<18} groups  expand µs   apply µs (host included)")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
