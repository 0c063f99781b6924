"""Attention and cache writes with keys and values in 16 and in 8 bits: checked, then timed, on Llama-8B's heads.

    python benchmarks/gpu/kv_formats.py [--quick]

Without --quick, several tile shapes of every kernel. Cases run over the caches of several layers in a CUDA graph, so
that no launch finds the last one's keys in L2. The last table is microseconds a layer, and of decodes TB/s.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton

from quire.kernels.kv import KVFormat, QuantizedKV
from quire.kernels.reference import TorchOps
from quire.kernels.triton.decode_attention import DecodeAttention, DecodeTile, decode_tile
from quire.kernels.triton.launch import let_threads_launch
from quire.kernels.triton.prefill_attention import PrefillTile, plan_tiles, prefill_attention, prefill_tile
from quire.kernels.triton.prefix_attention import PrefixAttention, PrefixTile, prefix_tile
from quire.kernels.triton.qkv import prepare_qkv
from quire.layers.attention.base import AttentionInputs, AttentionSpec, KVSpec
from quire.layers.attention.torch_paged import TorchPagedAttention
from quire.worker.kv import KVCache

HEADS, KV_HEADS, DIM, BLOCK, LAYERS = 32, 8, 128, 16, 16
SCALE = DIM**-0.5
NAMES = ["auto", "fp8", "fp8_per_token_head", "int8_per_token_head"]
DEVICE = torch.device("cuda")
DECODES = {"256 x 640": [640] * 256, "1 x 768": [768], "8 x 768": [768] * 8, "64 x 4096": [4096] * 64}
PREFILLS = {"4 x 2048": [(2048, 2048)] * 4, "1 x 16384": [(16384, 16384)], "8 x 512 after 4096": [(4608, 512)] * 8}
DECODE_TILES = [
    DecodeTile(tokens, warps, stages, programs, min_tiles)
    for tokens, warps, stages, min_tiles in [(32, 2, 5, 2), (64, 2, 4, 1), (64, 2, 5, 1), (64, 4, 4, 1), (128, 4, 3, 1)]
    for programs in (4, 8)
]
PREFILL_TILES = [
    PrefillTile(128, 128, 8, 3), PrefillTile(128, 64, 8, 3), PrefillTile(64, 64, 4, 3),
    PrefillTile(128, 128, 8, 2, skewed=False), PrefillTile(128, 64, 8, 3, skewed=False),
]  # fmt: skip
EXPLORED = NAMES[1:3]
"""Formats for which other tiles are tried; int8 is as fp8."""
PREFIX_TILES = [PrefixTile(64, 64, 4, 3, 2), PrefixTile(64, 128, 4, 3, 2), PrefixTile(32, 64, 4, 3, 2)]


class Cache:
    """Rows of given contexts over shuffled blocks of a cache with random content."""

    def __init__(self, name: str, contexts: list[int], layers: int = LAYERS) -> None:
        counts = [-(-n // BLOCK) for n in contexts]
        total = sum(counts) + 1
        self.format = KVFormat.named(name, torch.bfloat16)
        self.cache = KVCache(KVSpec(layers, KV_HEADS, DIM), total, BLOCK, self.format, DEVICE)
        scales = torch.rand(2, KV_HEADS, device=DEVICE) / 50 + 0.01
        self.layers: list[Any] = []
        for kv in self.cache.layers:
            if isinstance(kv, QuantizedKV):
                codes = torch.randint(-100, 101, kv.codes.shape, device=DEVICE, dtype=torch.int8)
                kv.codes.copy_(codes if self.format.codes == "int8" else codes.view(torch.uint8) & 0xDF)
                if kv.scales is None:
                    kv = kv.scaled(scales)
                else:
                    kv.scales.uniform_(0.001, 0.02)
            else:
                kv.normal_()
            self.layers.append(kv)
        tables = torch.zeros(len(contexts) + 1, -(-max(counts) // 16) * 16, dtype=torch.int32)
        order = torch.randperm(total - 1, dtype=torch.int32) + 1
        for row, mine in enumerate(order.split(counts)):
            tables[row, : len(mine)] = mine
        self.tables = tables.cuda()
        self.lens = torch.tensor(contexts, dtype=torch.int32, device=DEVICE)
        self.rows = torch.arange(len(contexts), dtype=torch.int32, device=DEVICE)
        self.other = torch.zeros(1, device=DEVICE)
        per_token = self.format.layer_bytes(KV_HEADS, BLOCK, DIM) / BLOCK
        self.bytes = sum(contexts) * per_token


class Decodes(Cache):
    def __init__(self, name: str, contexts: list[int], layers: int = LAYERS) -> None:
        super().__init__(name, contexts, layers)
        self.q = torch.randn(len(contexts), HEADS, DIM, device=DEVICE, dtype=torch.bfloat16)
        self.out = torch.empty(len(contexts), HEADS * DIM, device=DEVICE, dtype=torch.bfloat16)

    def kernel(self, tile: DecodeTile | None = None) -> DecodeAttention:
        quantized = self.format.codes is not None
        return DecodeAttention(
            HEADS, KV_HEADS, DIM, len(self.lens), torch.bfloat16, DEVICE, tile, quantized=quantized
        )  # fmt: skip

    def run(self, kernel: DecodeAttention, attends: bool = True) -> None:
        plan = kernel.plan(self.lens, self.rows, len(self.rows), None)
        for kv in self.layers:
            self.other.add_(1)  # as in a model, another kernel runs between two attentions
            if attends:
                kernel.attend(
                    self.q, kv, self.out, self.tables, self.rows, self.lens, plan, len(self.rows), SCALE, None
                )  # fmt: skip


class Prefills(Cache):
    def __init__(self, name: str, lens: list[tuple[int, int]], layers: int = 4) -> None:
        super().__init__(name, [context for context, _ in lens], layers)
        self.tokens = sum(queries for _, queries in lens)
        self.starts = torch.tensor([0, *(queries for _, queries in lens)], device=DEVICE).cumsum(0).int()
        self.q = torch.randn(self.tokens, HEADS, DIM, device=DEVICE, dtype=torch.bfloat16)
        self.out = torch.empty(self.tokens, HEADS * DIM, device=DEVICE, dtype=torch.bfloat16)
        self.is_long = max(context for context, _ in lens) > 3072
        pairs = sum(queries * (context - queries) + queries * (queries + 1) // 2 for context, queries in lens)
        self.operations = 4 * DIM * HEADS * pairs

    def run(self, tile: PrefillTile, attends: bool = True) -> None:
        tiles = plan_tiles(
            self.starts, self.lens, self.rows, 0, len(self.rows), self.tokens, tile.tokens(HEADS // KV_HEADS)
        )
        for kv in self.layers if attends else []:
            prefill_attention(self.q, kv, self.out, self.tables, tiles, SCALE, None, tile)


def microseconds(run: Callable[..., None], layers: int) -> float:
    """Of a layer, without what the step does once."""
    run()
    bench = functools.partial(triton.testing.do_bench_cudagraph, rep=10, return_mode="median")
    return (bench(run) - bench(lambda: run(attends=False))) * 1000 / layers


def exact(case: Any, starts: torch.Tensor, decodes: int, longest: int) -> torch.Tensor:
    inputs = AttentionInputs(
        slots=torch.empty(0), query_starts=starts, context_lens=case.lens, block_tables=case.tables,
        num_rows=len(case.rows), num_tokens=len(case.q), num_decodes=decodes, max_query_len=longest,
        max_context_len=int(case.lens.max()), rows=case.rows,
    )  # fmt: skip
    kv = case.layers[-1]
    return TorchPagedAttention().attend(
        case.q.float(), kv if isinstance(kv, QuantizedKV) else kv.float(), inputs, AttentionSpec(SCALE)
    )


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours.float() - theirs.float()).norm() / theirs.float().norm()).item()


def check(tiles: list[DecodeTile], prefill_tiles: list[PrefillTile]) -> None:
    """Every kernel and tile against plain torch; compiles them."""
    jobs: list[Callable[[], tuple[str, float]]] = []
    for name in NAMES:
        decodes = Decodes(name, [700, 1, 64, 33, 2000], 2)
        wanted = exact(decodes, torch.arange(6, device=DEVICE).int(), 5, 1)

        def compile_decode(tile: DecodeTile, name: str = name) -> None:
            case = Decodes(name, [9], 1)
            case.run(case.kernel(tile))

        def decode_error(name: str, tile: DecodeTile, case: Decodes, wanted: torch.Tensor) -> tuple[str, float]:
            case.run(case.kernel(tile))
            return f"decode {name} {tile}", error(case.out, wanted)

        shipped = decode_tile(DIM, 2, name != "auto")
        wanted_tiles = dict.fromkeys([shipped, *(tiles if name in EXPLORED else [])])
        with ThreadPoolExecutor(12) as pool:
            list(pool.map(compile_decode, wanted_tiles))
        jobs += [functools.partial(decode_error, name, tile, decodes, wanted) for tile in wanted_tiles]

        prefills = Prefills(name, [(300, 300), (700, 129), (40, 1)], 2)
        wanted = exact(prefills, prefills.starts, 0, 300)

        def prefill_error(name: str, tile: PrefillTile, case: Prefills, wanted: torch.Tensor) -> tuple[str, float]:
            case.run(tile)
            return f"prefill {name} {tile}", error(case.out, wanted)

        def compile_prefill(tile: PrefillTile, name: str = name) -> None:
            Prefills(name, [(33, 20)], 1).run(tile)

        chosen = dict.fromkeys(
            [prefill_tile(DIM, 2, True), prefill_tile(DIM, 2, False), *(prefill_tiles if name in EXPLORED else [])]
        )
        with ThreadPoolExecutor(12) as pool:
            list(pool.map(compile_prefill, chosen))
        jobs += [functools.partial(prefill_error, name, tile, prefills, wanted) for tile in chosen]
    torch.cuda.synchronize()
    wrong = [(what, found) for what, found in (job() for job in jobs) if not found < 6e-3]
    for name in NAMES:
        if not (found := _prefix_error(name)) < 6e-3:
            wrong.append((f"prefix {name}", found))
        if not (found := _written_error(name)) < 2e-2:
            wrong.append((f"written {name}", found))
    print(f"checked {len(jobs)} kernels: {wrong or 'all right'}", flush=True)


def _prefix_error(name: str) -> float:
    case = Decodes(name, [700, 690, 650, 640], 1)
    case.tables[:4, :36] = case.tables[0, :36]
    shared = torch.tensor([576] * 4 + [0], dtype=torch.int32, device=DEVICE)
    members = torch.arange(4, dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([0, 4, 4], dtype=torch.int32, device=DEVICE)
    quantized = case.format.codes is not None
    kernel = case.kernel()
    prefix = PrefixAttention(HEADS, KV_HEADS, DIM, 4, torch.bfloat16, DEVICE, quantized=quantized)
    tiles = prefix.plan(members, starts, shared, case.rows, 4, kernel.tile_tokens)
    plan = kernel.plan(case.lens, case.rows, 4, None, shared)
    case.other.add_(1)
    state = prefix.attend(case.q, case.layers[0], case.tables, shared, tiles, SCALE)
    kernel.attend(case.q, case.layers[0], case.out, case.tables, case.rows, case.lens, plan, 4, SCALE, None, state)
    return error(case.out, exact(case, torch.arange(5, device=DEVICE).int(), 4, 1))


def _qkv_inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    qkv = torch.randn(tokens, (HEADS + 2 * KV_HEADS) * DIM, device=DEVICE, dtype=torch.bfloat16)
    angles = torch.rand(64, DIM // 2, device=DEVICE) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    positions = torch.randint(0, 64, (tokens,), device=DEVICE)
    return qkv, positions, cos_sin, torch.randperm(tokens, device=DEVICE) + BLOCK


def _written_error(name: str) -> float:
    """Of what is read back, against what plain torch writes."""
    read = []
    qkv, positions, cos_sin, slots = _qkv_inputs(100)
    for write in (prepare_qkv, TorchOps().prepare_qkv):
        torch.manual_seed(0)  # the same scales twice
        case = Cache(name, [400], 1)
        kv = case.layers[0]
        write(qkv.clone(), positions, cos_sin, None, kv, slots, HEADS, KV_HEADS, DIM)
        block, offset = slots // BLOCK, slots % BLOCK
        if isinstance(kv, QuantizedKV):
            both = torch.stack([kv.gather(half, block[:, None]) for half in (0, 1)])
            read.append(both.view(2, KV_HEADS, len(slots), BLOCK, DIM)[:, :, torch.arange(len(slots)), offset])
        else:
            read.append(kv[block, :, :, offset].permute(1, 2, 0, 3))
    return error(*read)


def decode_times(tiles: list[DecodeTile]) -> None:
    print("\ndecode: us a layer (TB/s), ratio to bfloat16; best tiles")
    for label, contexts in DECODES.items():
        plain = 0.0
        for name in NAMES:
            case = Decodes(name, contexts, LAYERS if sum(contexts) > 1000 else 64)
            shipped = decode_tile(DIM, 2, name != "auto")
            found = {}
            for tile in dict.fromkeys([shipped, *(tiles if name in EXPLORED else [])]):
                kernel = case.kernel(tile)
                found[tile] = microseconds(lambda attends=True, k=kernel, c=case: c.run(k, attends), len(case.layers))
            plain = plain or found[shipped]
            best = sorted(found, key=found.__getitem__)[:3]
            rest = " | ".join(
                f"{t.tokens}t{t.warps}w{t.stages}s{t.programs}p{t.min_tiles} {found[t]:.1f}" for t in best
            )
            print(
                f"{label:12s} {name:20s} {found[shipped]:8.1f} ({case.bytes / found[shipped] / 1e6:.2f}) "
                f"{found[shipped] / plain:5.2f}   {rest}",
                flush=True,
            )
            del case


def prefill_times(tiles: list[PrefillTile]) -> None:
    print("\nprefill: us a layer (TFLOP/s), ratio to bfloat16; best tiles")
    for label, lens in PREFILLS.items():
        plain = 0.0
        for name in NAMES:
            case = Prefills(name, lens)
            shipped = prefill_tile(DIM, 2, case.is_long)
            found = {
                tile: microseconds(lambda attends=True, t=tile, c=case: c.run(t, attends), len(case.layers))
                for tile in dict.fromkeys([shipped, *(tiles if name in EXPLORED else [])])
            }
            plain = plain or found[shipped]
            best = sorted(found, key=found.__getitem__)[:3]
            rest = " | ".join(
                f"{t.block_m}x{t.block_n} {t.warps}w{t.stages}s{'' if t.skewed else ' straight'} {found[t]:.0f}"
                for t in best
            )
            print(
                f"{label:20s} {name:20s} {found[shipped]:8.1f} ({case.operations / found[shipped] / 1e6:.0f}) "
                f"{found[shipped] / plain:5.2f}   {rest}",
                flush=True,
            )
            del case


def prefix_times(tiles: list[PrefixTile]) -> None:
    print("\nshared prefix of 2048 tokens, 64 rows: us a layer, prefix kernel only")
    members = torch.arange(64, dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([0, 64, *[64] * 31], dtype=torch.int32, device=DEVICE)
    shared = torch.tensor([2048] * 64 + [0], dtype=torch.int32, device=DEVICE)
    for name in NAMES:
        case = Decodes(name, [2100] * 64, 4)
        case.tables[:64, :128] = case.tables[0, :128]
        cells = []
        for tile in dict.fromkeys([prefix_tile(DIM, 2), *(tiles if name in EXPLORED else [])]):
            quantized = case.format.codes is not None
            kernel = PrefixAttention(HEADS, KV_HEADS, DIM, 64, torch.bfloat16, DEVICE, tile, quantized=quantized)

            def run(attends: bool = True, kernel: PrefixAttention = kernel, case: Decodes = case) -> None:
                plan = kernel.plan(members, starts, shared, case.rows, 64, 64)
                for kv in case.layers:
                    case.other.add_(1)
                    if attends:
                        kernel.attend(case.q, kv, case.tables, shared, plan, SCALE)

            cells.append(f"{tile.queries}q{tile.tokens}t{tile.warps}w{tile.stages}s {microseconds(run, 4):.1f}")
        print(f"{name:20s} {' | '.join(cells)}", flush=True)
        del case


def write_times() -> None:
    print("\nnorm, rotate and write: us a layer")
    for tokens in (1, 256, 8192):
        cells = []
        inputs = _qkv_inputs(tokens)
        for name in NAMES:
            case = Cache(name, [tokens + 2 * BLOCK], 8)

            def run(attends: bool = True, case: Cache = case, given: Any = inputs) -> None:
                qkv, positions, cos_sin, slots = given
                for kv in case.layers:
                    case.other.add_(1)
                    if attends:
                        prepare_qkv(qkv, positions, cos_sin, None, kv, slots, HEADS, KV_HEADS, DIM)

            cells.append(f"{name} {microseconds(run, 8):.2f}")
        print(f"{tokens:5d} tokens: {' | '.join(cells)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the shipped tile shapes only")
    quick = parser.parse_args().quick
    torch.manual_seed(0)
    let_threads_launch()
    check([] if quick else DECODE_TILES, [] if quick else PREFILL_TILES)
    decode_times([] if quick else DECODE_TILES)
    prefill_times([] if quick else PREFILL_TILES)
    prefix_times([] if quick else PREFIX_TILES)
    write_times()


if __name__ == "__main__":
    main()
