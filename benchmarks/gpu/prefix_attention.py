"""Decode attention of rows that share a prefix: microseconds a layer, each row by itself and as a group.

    python benchmarks/gpu/prefix_attention.py [--tiles]

Each case runs over several layers' caches, so that no launch finds the last one's keys in L2. `--tiles` tries
other tile shapes for the shared pass.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
import triton

from quire.kernels.triton.decode_attention import DecodeAttention, PrefixState
from quire.kernels.triton.prefix_attention import PrefixAttention, PrefixTile

HEADS, KV_HEADS, DIM = 32, 8, 128  # Llama 8B
BLOCK, LAYERS, MAX_ROWS = 16, 4, 1024
SCALE = DIM**-0.5
CASES = [(256, 1, 2048, 200), (64, 1, 8192, 200), (64, 8, 2048, 200), (32, 1, 512, 300), (8, 1, 8192, 100)]
"""Rows, groups, shared tokens of a group, own tokens of a row."""
TILES = [
    PrefixTile(queries, tokens, warps, stages, programs)
    for queries, tokens, warps in [(64, 64, 4), (64, 32, 4), (64, 128, 8), (128, 64, 8), (32, 64, 4)]
    for stages in (2, 3, 4)
    for programs in (1, 2, 3)
    if programs * stages * tokens * DIM * 4 < 190_000 and programs * warps <= 8
]


class Case:
    """Rows in groups over a cache in shuffled blocks."""

    def __init__(self, rows: int, groups: int, shared: int, own: int) -> None:
        prefix, rest = shared // BLOCK, math.ceil(own / BLOCK)
        total = groups * prefix + rows * rest + 1
        self.cache = torch.randn(total, LAYERS, 2, KV_HEADS, BLOCK, DIM, device="cuda", dtype=torch.bfloat16)
        order = torch.randperm(total - 1, dtype=torch.int32) + 1
        prefixes = order[: groups * prefix].view(groups, prefix).repeat_interleave(rows // groups, 0)
        tables = torch.zeros(MAX_ROWS + 1, prefix + rest, dtype=torch.int32)
        tables[:rows] = torch.cat([prefixes, order[groups * prefix :].view(rows, rest)], 1)
        self.tables = tables.cuda()
        self.rows = torch.arange(rows, dtype=torch.int32, device="cuda")
        self.lens = torch.full((rows,), shared + own, dtype=torch.int32, device="cuda")
        self.shared = torch.zeros(MAX_ROWS + 1, dtype=torch.int32, device="cuda")
        self.shared[:rows] = shared
        self.members = torch.arange(MAX_ROWS, dtype=torch.int32, device="cuda")
        starts = torch.full((MAX_ROWS // 2 + 1,), rows, dtype=torch.int32)
        starts[: groups + 1] = torch.arange(groups + 1, dtype=torch.int32) * (rows // groups)
        self.starts = starts.cuda()
        self.q = torch.randn(rows, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        self.out = torch.empty(rows, HEADS * DIM, device="cuda", dtype=torch.bfloat16)
        self.min_bytes = (groups * shared + rows * own) * 2 * KV_HEADS * DIM * 2

    def apart(self, kernel: DecodeAttention) -> Callable[[], None]:
        """A pass over the layers; each row reads all of its tokens."""
        plan = kernel.plan(self.lens, self.rows, len(self.rows), None)
        return lambda: [self._decode(kernel, layer, plan, None) for layer in range(LAYERS)] and None

    def together(self, kernel: DecodeAttention, prefix: PrefixAttention) -> Callable[[], None]:
        """A pass over the layers; shared tokens are read once a query tile."""
        rows = len(self.rows)
        tiles = prefix.plan(self.members, self.starts, self.shared, self.rows, rows, kernel.tile_tokens)
        plan = kernel.plan(self.lens, self.rows, rows, None, self.shared)

        def run() -> None:
            for layer in range(LAYERS):
                state = prefix.attend(self.q, self.cache[:, layer], self.tables, self.shared, tiles, SCALE)
                self._decode(kernel, layer, plan, state)

        return run

    def _decode(self, kernel: DecodeAttention, layer: int, plan: torch.Tensor, state: PrefixState | None) -> bool:
        kernel.attend(
            self.q, self.cache[:, layer], self.out, self.tables, self.rows, self.lens, plan, len(self.rows), SCALE,
            None, state,
        )  # fmt: skip
        return True


def microseconds(run: Callable[[], None]) -> float:
    """Of one layer, without the step's planning."""
    run()
    return triton.testing.do_bench_cudagraph(run, rep=20, return_mode="median") * 1000 / LAYERS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiles", action="store_true", help="try other tile shapes too")
    shapes: list[PrefixTile | None] = [None, *(TILES if parser.parse_args().tiles else [])]
    dimensions = (HEADS, KV_HEADS, DIM, MAX_ROWS, torch.bfloat16, torch.device("cuda"))
    decode = DecodeAttention(*dimensions)
    prefixes = {shape: PrefixAttention(*dimensions, tile=shape) for shape in shapes}
    small = Case(4, 1, 64, 20)
    with ThreadPoolExecutor(12) as pool:  # compiles
        list(pool.map(lambda prefix: small.together(decode, prefix)(), prefixes.values()))
    print(f"heads {HEADS}/{KV_HEADS} x {DIM}, us a layer; limit: every byte once at 4.3 TB/s")
    for rows, groups, shared, own in CASES:
        case = Case(rows, groups, shared, own)
        apart = microseconds(case.apart(decode))
        expected = case.out.float()
        name = f"{rows} rows, {groups} x {shared} shared + {own} own"
        limit = case.min_bytes / 4.3e6
        times = {}
        for shape, prefix in prefixes.items():
            times[shape] = microseconds(case.together(decode, prefix))
            error = ((case.out.float() - expected).norm() / expected.norm()).item()
            assert error < 1e-2, f"{name}: {shape} is wrong by {error}"
        print(
            f"{name:40s} apart {apart:7.1f}  together {times[None]:6.1f}  ({apart / times[None]:.1f} x)  "
            f"limit {limit:6.1f}",
            flush=True,
        )
        for shape in sorted(times, key=times.__getitem__)[:5] if len(times) > 1 else ():
            print(f"    {shape or 'shipped'}: {times[shape]:.1f}", flush=True)
        del case


if __name__ == "__main__":
    main()
