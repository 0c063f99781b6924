"""Decode attention: bandwidth reached, for several tile shapes.

    python benchmarks/gpu/decode_attention.py [--quick]

Each case runs over several layers' caches, so that no launch finds the last one's keys in L2.
"""

from __future__ import annotations

import argparse
import functools
from concurrent.futures import ThreadPoolExecutor

import torch
import triton

from quire.kernels.triton.decode_attention import DecodeAttention, DecodeTile

MODELS = {"llama-8b": (32, 8, 128), "qwen3-0.6b": (16, 8, 128)}
TILES = [
    DecodeTile(tokens, warps, stages, programs, min_tiles)
    for tokens, warps, stages in [(32, 2, 5), (64, 4, 3)]
    for programs in (4, 8, 12, 16, 24)
    for min_tiles in (2, 4, 8)
]
BLOCK, LAYERS, MAX_ROWS = 16, 28, 1024


def lengths(name: str) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    return {
        "1 x 640": [640],
        "1 x 32768": [32768],
        "8 x 1000": [1000] * 8,
        "64 x 700": [700] * 64,
        "256 x 384": [384] * 256,
        "256 x 200-1900": torch.randint(200, 1900, (256,), generator=generator).tolist(),
        "1 x 60000 + 63 x 200": [60000] + [200] * 63,
    }[name]


CASES = ["1 x 640", "1 x 32768", "8 x 1000", "64 x 700", "256 x 384", "256 x 200-1900", "1 x 60000 + 63 x 200"]


class Case:
    """Rows of given lengths over a cache in shuffled blocks."""

    def __init__(self, lens: list[int], heads: int, kv_heads: int, dim: int) -> None:
        counts = [-(-n // BLOCK) for n in lens]
        total = sum(counts) + 1
        self.cache = torch.randn(total, LAYERS, 2, kv_heads, BLOCK, dim, device="cuda", dtype=torch.bfloat16)
        order = torch.randperm(total - 1, dtype=torch.int32) + 1
        tables = torch.zeros(MAX_ROWS + 1, max(counts), dtype=torch.int32)
        at = 0
        for row, count in enumerate(counts):
            tables[row, :count] = order[at : at + count]
            at += count
        self.tables = tables.cuda()
        self.rows = torch.arange(len(lens), dtype=torch.int32, device="cuda")
        self.lens = torch.tensor(lens, dtype=torch.int32, device="cuda")
        self.q = torch.randn(len(lens), heads, dim, device="cuda", dtype=torch.bfloat16)
        self.out = torch.empty(len(lens), heads * dim, device="cuda", dtype=torch.bfloat16)
        self.other = torch.zeros(1, device="cuda")
        self.bytes = sum(lens) * 2 * kv_heads * dim * 2

    def run_once(self, kernel: DecodeAttention) -> None:
        rows = len(self.lens)
        plan = kernel.plan(self.lens, self.rows, rows, None)
        self.other.add_(1)  # another kernel must be launched between the two
        kernel.attend(self.q, self.cache[:, 0], self.out, self.tables, self.rows, self.lens, plan, rows, 0.088, None)

    def microseconds(self, kernel: DecodeAttention) -> float:
        """A layer's attention, without the step's planning."""
        rows = len(self.lens)
        plan = kernel.plan(self.lens, self.rows, rows, None)

        def run(attends: bool = True) -> None:
            for layer in range(LAYERS):
                self.other.add_(1)  # as in a model: another kernel runs between two attentions
                if not attends:
                    continue
                kernel.attend(
                    self.q, self.cache[:, layer], self.out, self.tables, self.rows, self.lens, plan, rows, 0.088, None
                )

        run()
        bench = functools.partial(triton.testing.do_bench_cudagraph, rep=10, return_mode="median")
        return (bench(run) - bench(lambda: run(attends=False))) * 1000 / LAYERS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the default tile shape only")
    parser.add_argument("--model", choices=MODELS, help="these heads only")
    args = parser.parse_args()
    quick = args.quick
    for model, (heads, kv_heads, dim) in MODELS.items():
        if args.model not in (None, model):
            continue
        kernels = {
            tile: DecodeAttention(heads, kv_heads, dim, MAX_ROWS, torch.bfloat16, torch.device("cuda"), tile=tile)
            for tile in ([None] if quick else TILES)
        }
        small = Case([17], heads, kv_heads, dim)
        with ThreadPoolExecutor(12) as pool:
            list(pool.map(small.run_once, kernels.values()))  # compiles
        print(f"\n{model}: us a layer (TB/s)")
        for name in CASES:
            case = Case(lengths(name), heads, kv_heads, dim)
            times = {tile: case.microseconds(kernel) for tile, kernel in kernels.items()}
            best = sorted(times, key=times.__getitem__)[:4]
            cells = (f"{_name(tile)} {times[tile]:.1f} ({case.bytes / times[tile] / 1e6:.2f})" for tile in best)
            default = decode_default(dim)
            print(
                f"{name:24s}", " | ".join(cells), f"|| shipped {times.get(default, times.get(None, 0)):.1f}", flush=True
            )
            del case


def decode_default(dim: int) -> DecodeTile:
    from quire.kernels.triton.decode_attention import decode_tile

    return decode_tile(dim, 2)


def _name(tile: DecodeTile | None) -> str:
    return "shipped" if tile is None else f"{tile.tokens}t{tile.warps}w{tile.stages}s{tile.programs}p{tile.min_tiles}"


if __name__ == "__main__":
    main()
