"""gpt-oss-20b's attention (sinks, windows, heads of 64) and experts (MXFP4) on a GPU: checked, then timed.

    python -m benchmarks.gpu.gpt_oss [--quick] [--parts check tiles experts decode prefill queries]

`queries` runs decodes of several query tokens in processes of their own: an illegal access ends only one of them.
"""

# ruff: noqa: B023 (functions run within the iteration that makes them)

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from quire.kernels.gates import GATES
from quire.kernels.kv import KVFormat, LayerKV, QuantizedKV
from quire.kernels.triton.decode_attention import DecodeAttention, DecodeTile, decode_tile
from quire.kernels.triton.launch import let_threads_launch
from quire.kernels.triton.moe.common import ChosenExperts, ExpertsConfig, GemmTile
from quire.kernels.triton.moe.layout import arrange
from quire.kernels.triton.prefill_attention import PrefillTile, plan_tiles, prefill_attention
from quire.kernels.triton.quantized.expert_stacks import Stack, stack_of
from quire.kernels.triton.quantized.expert_tiles import tile_down, tile_gate_up
from quire.kernels.triton.quantized.experts import candidates, expert_outputs
from quire.kernels.triton.skinny_gemm.timing import GraphTimer, raise_clocks
from quire.kernels.weights.fp4 import Fp4Weight
from quire.layers.attention.base import AttentionInputs, AttentionSpec, KVSpec
from quire.layers.attention.torch_paged import TorchPagedAttention
from quire.layers.attention.triton import TritonPagedAttention
from quire.worker.kv import KVCache

HEADS, KV_HEADS, DIM, WINDOW, SCALE = 64, 8, 64, 128, 0.125
EXPERTS, TOP, HIDDEN = 32, 4, 2880
BLOCK, DTYPE = 16, torch.bfloat16
LAYERS = 12
BANDWIDTH = 4.3e6
"""Bytes a microsecond of an H200, measured."""


class Rows:
    """Rows of (context, query) tokens over shuffled blocks of several layers' caches; decodes first."""

    def __init__(
        self, lens: list[tuple[int, int]], heads: int = HEADS, kv_heads: int = KV_HEADS, dim: int = DIM,
        layers: int = 1, kind: str = "auto", dtype: torch.dtype = DTYPE,
    ) -> None:  # fmt: skip
        contexts, queries = zip(*lens, strict=True)
        counts = [-(-context // BLOCK) for context in contexts]
        format = KVFormat.named(kind, dtype)
        cache = KVCache(KVSpec(layers, kv_heads, dim), sum(counts) + 1, BLOCK, format, torch.device("cuda"))
        self.layers: list[LayerKV] = [_filled(layer, kv_heads) for layer in cache.layers]
        order = (torch.randperm(sum(counts)) + 1).int().split(counts)
        tables = torch.zeros(len(lens) + 1, -(-max(counts) // 16) * 16 + 16, dtype=torch.int32)
        for row, blocks in enumerate(order):
            tables[row, : len(blocks)] = blocks
        self.tables, self.lens, self.contexts, self.queries = tables.cuda(), lens, contexts, queries
        self.q = torch.randn(sum(queries), heads, dim, device="cuda").to(dtype)
        self.sinks = torch.randn(heads, device="cuda").to(dtype)

    def inputs(self) -> AttentionInputs:
        return AttentionInputs(
            slots=torch.empty(0), query_starts=torch.tensor([0, *self.queries], device="cuda").cumsum(0).int(),
            context_lens=torch.tensor(self.contexts, dtype=torch.int32, device="cuda"), block_tables=self.tables,
            num_rows=len(self.lens), num_tokens=len(self.q), num_decodes=sum(n == 1 for n in self.queries),
            max_query_len=max(self.queries), max_context_len=max(self.contexts),
            rows=torch.arange(len(self.lens), dtype=torch.int32, device="cuda"),
        )  # fmt: skip

    def hide(self, window: int) -> None:
        """Entries of the tables that a window must not read become those of a block full of NaN."""
        for row, (context, queries) in enumerate(self.lens):
            self.tables[row, : max(0, context - queries - window + 1) // BLOCK] = 0

    def exact(self, spec: AttentionSpec) -> torch.Tensor:
        kv = self.layers[0]
        return TorchPagedAttention().attend(
            self.q.float(), kv if isinstance(kv, QuantizedKV) else kv.float(), self.inputs(), spec
        )


def _filled(kv: LayerKV, kv_heads: int) -> LayerKV:
    if not isinstance(kv, QuantizedKV):
        kv.copy_(torch.randn(kv.shape, device="cuda"))
        kv[0] = torch.nan
        return kv
    codes = torch.randn(kv.codes.shape, device="cuda")
    if kv.codes.dtype == torch.int8:
        kv.codes.copy_((codes * 40).clamp(-127, 127).round())
    else:
        kv.codes.copy_((codes * 100).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8))
    if kv.format.per_token:
        assert kv.scales is not None
        kv.scales.copy_(torch.rand(kv.scales.shape, device="cuda") / 50 + 0.001)
        return kv
    return kv.scaled(torch.rand(2, kv_heads, device="cuda") / 50 + 0.01)


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours.float() - theirs.float()).norm() / theirs.float().norm()).item()


def together(jobs: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run jobs in threads: most of their time is compiling."""
    let_threads_launch()
    with ThreadPoolExecutor(14) as pool:
        return list(pool.map(lambda job: job(), jobs))


def check() -> bool:
    """The backend against plain torch: prompts and decodes, every format, stale table entries."""
    mixed = [(700, 1), (1, 1), (129, 1), (128, 1), (4000, 1), (300, 300), (2000, 512), (130, 5), (3500, 40)]
    cases = [
        ("gpt-oss", HEADS, KV_HEADS, DIM, None, kind, window)
        for kind in ("auto", "fp8", "fp8_per_token_head", "int8_per_token_head")
        for window in (None, WINDOW)
    ]
    cases += [("gpt-oss", HEADS, KV_HEADS, DIM, None, "auto", WINDOW + 1)]
    cases += [("gemma-2", 16, 8, 256, 50.0, kind, window) for kind in ("auto", "fp8") for window in (None, WINDOW)]
    cases += [("gemma-3", 8, 4, 256, None, "auto", 512)]

    def run(case: tuple[str, int, int, int, float | None, str, int | None]) -> bool:
        name, heads, kv_heads, dim, cap, kind, window = case
        rows = Rows(mixed, heads, kv_heads, dim, kind=kind)
        spec = AttentionSpec(dim**-0.5, window, cap, rows.sinks if name == "gpt-oss" else None)
        wanted = rows.exact(spec)
        if window is not None:
            rows.hide(window)
        errors = []
        for backend in (TritonPagedAttention(), TritonPagedAttention(batch_invariant=True)):
            inputs = rows.inputs()
            backend.prepare(heads, rows.layers[0], inputs, spec)
            torch.zeros(1, device="cuda").add_(1)
            errors.append(error(backend.attend(rows.q, rows.layers[0], inputs, spec), wanted))
        if not all(found < 8e-3 for found in errors):
            print(f"WRONG {name} {kind} window {window}: {errors}", flush=True)
            return False
        return True

    good = all(together([lambda case=case: run(case) for case in cases]))  # type: ignore[misc]
    print("attention with sinks, windows and soft caps:", "correct" if good else "WRONG", flush=True)
    return good


QUERY_CASES = [
    (dtype, kind, group, queries, window)
    for dtype, kind, group, queries in (
        ("bfloat16", "auto", 8, 2),
        ("bfloat16", "auto", 8, 8),
        ("bfloat16", "fp8", 8, 2),
        ("bfloat16", "int8_per_token_head", 8, 8),
        ("float32", "auto", 3, 2),
        ("float32", "auto", 3, 8),
        ("float32", "fp8", 3, 3),
        ("float32", "int8_per_token_head", 3, 3),
    )
    for window in (None, 20)
]
"""What the activations are, the cache, query heads of a KV head, query tokens, the window."""


def check_queries(case: int) -> None:
    """One case of several query tokens a row."""
    name, kind, group, queries, window = QUERY_CASES[case]
    dtype = getattr(torch, name)
    lens = [(length, queries) for length in (70, 8, 33, 129, 3000)]
    rows = Rows(lens, 2 * group, 2, 64, kind=kind, dtype=dtype)
    sinks = rows.sinks if window is None else None
    wanted = rows.exact(AttentionSpec(SCALE, window, None, sinks))
    inputs = rows.inputs()
    kernel = DecodeAttention(
        2 * group, 2, 64, 8, dtype, torch.device("cuda"), quantized=kind != "auto", queries=queries
    )  # fmt: skip
    assert inputs.rows is not None
    out = torch.full((len(rows.q), 2 * group * 64), torch.nan, dtype=dtype, device="cuda")
    for _ in range(2):
        plan = kernel.plan(inputs.context_lens, inputs.rows, len(lens), window)
        out.fill_(torch.nan)
        kernel.attend(
            rows.q, rows.layers[0], out, rows.tables, inputs.rows, inputs.context_lens, plan, len(lens), SCALE, window,
            None, None, sinks,
        )  # fmt: skip
    torch.cuda.synchronize()
    found = error(out, wanted)
    print("correct" if found < (1e-5 if dtype == torch.float32 else 8e-3) else f"WRONG {found:.1e}", flush=True)


def run_queries(seconds: float) -> None:
    """Every case in a process of its own, several at once: most of their time is compiling."""

    def run(case: int) -> str:
        command = [sys.executable, "-m", "benchmarks.gpu.gpt_oss", "--query-case", str(case)]
        try:
            made = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            return "no result in time"
        return (made.stdout.strip() or made.stderr.strip() or "no message").splitlines()[-1][:160]

    with ThreadPoolExecutor(8) as pool:
        for case, said in zip(QUERY_CASES, pool.map(run, range(len(QUERY_CASES))), strict=True):
            print("several queries a row:", *case, said, flush=True)


# Time


def decode_times(quick: bool) -> Iterator[str]:
    tiles = [decode_tile(DIM, 2)]
    if not quick:
        tiles += [DecodeTile(64, 2, 3, 4), DecodeTile(64, 4, 3, 4), DecodeTile(32, 2, 5, 8), DecodeTile(64, 2, 4, 6),
                  DecodeTile(64, 2, 3, 4, min_tiles=1), DecodeTile(32, 1, 5, 6)]  # fmt: skip
    timer = GraphTimer()
    yield "decode attention, us a layer (share of memory speed), by tile: " + ", ".join(map(_tile_name, tiles))
    for count, context in ((1, 640), (1, 8192), (8, 1024), (64, 1024), (256, 560)):
        rows = Rows([(context, 1)] * count, layers=LAYERS)
        inputs = rows.inputs()
        other = torch.zeros(1, device="cuda")
        assert inputs.rows is not None
        for window in (None, WINDOW):
            cells, runs = [], []
            for tile in tiles:
                kernel = DecodeAttention(HEADS, KV_HEADS, DIM, 256, DTYPE, torch.device("cuda"), tile=tile)
                plan = kernel.plan(inputs.context_lens, inputs.rows, count, window)
                out = torch.empty(count, HEADS * DIM, dtype=DTYPE, device="cuda")

                def run(layer: LayerKV, kernel=kernel, plan=plan, out=out, window=window) -> None:
                    other.add_(1)
                    kernel.attend(
                        rows.q, layer, out, rows.tables, inputs.rows, inputs.context_lens, plan, count, SCALE, window,
                        None, None, rows.sinks,
                    )  # fmt: skip

                runs.append(run)
            together([lambda run=run: run(rows.layers[0]) for run in runs])  # type: ignore[misc]
            idle = timer.time(lambda _: other.add_(1), rows.layers, 20.0)  # type: ignore[arg-type]
            for run in runs:
                took = timer.time(run, rows.layers, 20.0) - idle  # type: ignore[arg-type]
                read = count * min(context, window or context) * 2 * KV_HEADS * DIM * 2
                cells.append(f"{took:6.1f} ({read / took / BANDWIDTH:.0%})")
            yield f"  {count:3d} x {context:5d} window {window or '-':>4}: " + "  ".join(cells)


def prefill_times(quick: bool) -> Iterator[str]:
    tiles = [PrefillTile(64, 64, 4, 2), PrefillTile(128, 128, 8, 2)]
    if not quick:
        tiles += [PrefillTile(128, 64, 8, 3), PrefillTile(128, 64, 4, 3), PrefillTile(64, 128, 4, 2),
                  PrefillTile(128, 128, 8, 3)]  # fmt: skip
    timer = GraphTimer()
    yield "prompts, us a layer (TFLOP/s), by tile: " + ", ".join(map(_prefill_name, tiles))
    for count, length in ((1, 1024), (4, 2048), (1, 8192)):
        rows = Rows([(length, length)] * count, layers=2)
        inputs = rows.inputs()
        assert inputs.rows is not None
        for window in (None, WINDOW):
            pairs = sum(min(i + 1, window or length) for i in range(length)) * count
            cells, runs = [], []
            for tile in tiles:
                planned = plan_tiles(
                    inputs.query_starts, inputs.context_lens, inputs.rows, 0, count, len(rows.q),
                    tile.tokens(HEADS // KV_HEADS),
                )  # fmt: skip
                out = torch.empty(len(rows.q), HEADS * DIM, dtype=DTYPE, device="cuda")

                def run(layer: LayerKV, planned=planned, out=out, window=window, tile=tile) -> None:
                    prefill_attention(
                        rows.q, layer, out, rows.tables, planned, SCALE, window, tile, None, rows.sinks
                    )  # fmt: skip

                runs.append(run)
            together([lambda run=run: run(rows.layers[0]) for run in runs])  # type: ignore[misc]
            for run in runs:
                took = timer.time(run, rows.layers, 200.0)  # type: ignore[arg-type]
                cells.append(f"{took:7.0f} ({4 * DIM * HEADS * pairs / took / 1e6:4.0f})")
            yield f"  {count} x {length:5d} window {window or '-':>4}: " + "  ".join(cells)


def _tile_name(tile: DecodeTile) -> str:
    return f"{tile.tokens}t{tile.warps}w{tile.stages}s{tile.programs}p{tile.min_tiles}"


def _prefill_name(tile: PrefillTile) -> str:
    return f"{tile.block_m}x{tile.block_n}w{tile.warps}s{tile.stages}"


class Layer:
    """A layer's experts in MXFP4, with biases."""

    def __init__(self) -> None:
        self.gate_up, self.down = _stack(2 * HIDDEN), _stack(HIDDEN)
        self.biases = tuple(torch.randn(EXPERTS, width, device="cuda").to(DTYPE) for width in (2 * HIDDEN, HIDDEN))

    def run(self, x: torch.Tensor, routing: ChosenExperts, config: ExpertsConfig) -> torch.Tensor:
        first, second = self.biases
        return expert_outputs(x, routing, self.gate_up, self.down, config, first, second, "clamped_swiglu")


def _weight(height: int) -> Fp4Weight:
    weight = Fp4Weight.allocate(
        (EXPERTS, height, HIDDEN), DTYPE, lambda size, dtype: torch.zeros(size, dtype=dtype, device="cuda")
    )
    weight.codes.random_(0, 256)
    weight.scale.random_(119, 122)
    weight.bounded = True
    return weight


def _stack(height: int) -> Stack:
    found = stack_of(_weight(height))
    assert found is not None
    return found


def _values(stack: Stack) -> torch.Tensor:
    weight = Fp4Weight(stack.codes, stack.scale, DTYPE)
    return torch.stack([weight[index].dequantize() for index in range(EXPERTS)])


def _routing(tokens: int) -> ChosenExperts:
    chosen = torch.rand(tokens, EXPERTS, device="cuda").topk(TOP).indices.int()
    return ChosenExperts(TOP, torch.rand(tokens, TOP, device="cuda").softmax(-1), chosen)


def expert_times(quick: bool) -> Iterator[str]:
    layers = [Layer() for _ in range(2)]
    dense = [_values(layers[0].gate_up), _values(layers[0].down)]
    timer = GraphTimer(window_us=600.0)
    yield "experts, us a layer (share of memory speed or TFLOP/s), best configurations first"
    for tokens in (1, 8, 64, 256, 1024, 4096, 8192):
        x = torch.randn(tokens, HIDDEN, device="cuda").to(DTYPE)
        routing = _routing(tokens)
        wanted = _expected(x[:16], ChosenExperts(TOP, routing.weights[:16], routing.experts[:16]), dense, layers[0])
        configs: dict[str, ExpertsConfig] = {}
        found = candidates(layers[0].gate_up, layers[0].down, TOP, tokens)
        for group in found[: 1 if quick else None]:
            for gate_up in group.gate_ups[: 1 if quick else 2]:
                for down in group.downs[: 1 if quick else 2]:
                    config = replace(group.base, gate_up=gate_up, down=down)
                    configs[_config_name(config)] = config
        if 4096 > tokens >= 256:  # whether the 16-bit kernel over copies pays earlier
            large = candidates(layers[0].gate_up, layers[0].down, TOP, 8 * 1024)[0].base
            configs.setdefault("scratch*", replace(large, block_m=64) if tokens < 1024 else large)
        times: dict[str, float] = {}
        copied = [_copied(layer, dense) for layer in layers]
        together([lambda config=config: layers[0].run(x, routing, config) for config in configs.values()])  # type: ignore[misc]
        for name, config in configs.items():
            for held, label in ((layers, name), *([(copied, f"{name}+copy")] if config.kernel == "scratch" else [])):
                out = held[0].run(x, routing, config)
                wrong = error(out[:16], wanted)
                times[label + (f" WRONG {wrong:.1e}" if wrong > 1e-2 else "")] = timer.time(
                    lambda layer, config=config: layer.run(x, routing, config),  # type: ignore[misc]
                    held,  # type: ignore[arg-type]
                    100.0,
                )
        used = len(routing.experts.unique())
        read = used * 3 * HIDDEN * HIDDEN * 17 / 32
        work = tokens * TOP * 6 * HIDDEN * HIDDEN
        best = sorted(times, key=times.__getitem__)[:4]
        cells = (f"{name} {times[name]:.0f} ({read / times[name] / BANDWIDTH:.0%}, {work / times[name] / 1e6:.0f})"
                 for name in best)  # fmt: skip
        yield f"  {tokens:5d}: {' | '.join(cells)} || shipped {next(iter(times.values())):.0f}"


TILES = {
    32: [(64, 64, 4, 4), (64, 192, 4, 3), (64, 192, 4, 4), (128, 64, 4, 4), (128, 64, 8, 4), (128, 192, 8, 3)],
    64: [(64, 64, 4, 3), (64, 64, 4, 5), (64, 192, 4, 3), (128, 64, 8, 4), (128, 64, 4, 3), (128, 192, 8, 3)],
}
"""Of the experts' products, (outputs, inputs, warps, stages) by rows."""


def tile_times(quick: bool) -> Iterator[str]:
    """Both products of the tile kernel apart, for tiles and for how codes are read; checked against the default."""
    layers = [Layer() for _ in range(2)]
    timer = GraphTimer(window_us=600.0)
    yield "tiles of MXFP4 experts, us a layer: gate and up | down; pairs, then bytes"
    for tokens in (64, 256) if quick else (64, 256, 1024):
        x, routing = torch.randn(tokens, HIDDEN, device="cuda").to(DTYPE), _routing(tokens)
        found: list[dict[str, float]] = [{}, {}]
        jobs: list[tuple[int, str, Callable[[Layer], Any]]] = []
        for block_m, tiles in TILES.items():
            layout = arrange(routing.experts, EXPERTS, block_m)
            features = torch.randn(tokens * TOP, HIDDEN, device="cuda").to(DTYPE)
            for tile in tiles:
                for pairs in (True, False) if tile is tiles[0] else (True,):
                    config = ExpertsConfig("tile", GemmTile(*tile), GemmTile(*tile), block_m)
                    name = f"{block_m}:{'.'.join(map(str, tile))}{'' if pairs else ' bytes'}"

                    def first(layer: Layer, layout=layout, config=config, pairs=pairs) -> Any:
                        return tile_gate_up(
                            x, layout, layer.gate_up, layer.biases[0], TOP, config, "clamped_swiglu", False, pairs
                        )  # fmt: skip

                    def second(layer: Layer, layout=layout, config=config, pairs=pairs, features=features) -> Any:
                        return tile_down(features, None, layout, layer.down, layer.biases[1], TOP, config, pairs)

                    jobs += [(0, name, first), (1, name, second)]
        together([lambda run=run: run(layers[0]) for _, _, run in jobs])  # type: ignore[misc]
        for index, name, run in jobs:
            found[index][name] = timer.time(run, layers, 100.0)  # type: ignore[arg-type]
        cells = (
            "  ".join(f"{name} {times[name]:.0f}" for name in sorted(times, key=times.__getitem__)[:6])
            for times in found
        )
        yield f"  {tokens:5d}: {' | '.join(cells)}"


def _copied(layer: Layer, dense: list[torch.Tensor]) -> Layer:
    """The layer with 16-bit copies of its experts; for timing, all layers share those of the first."""
    made = Layer.__new__(Layer)
    made.gate_up, made.down = replace(layer.gate_up, copy=dense[0]), replace(layer.down, copy=dense[1])
    made.biases = layer.biases
    return made


def _expected(x: torch.Tensor, routing: ChosenExperts, dense: list[torch.Tensor], layer: Layer) -> torch.Tensor:
    out = torch.zeros(x.shape, device="cuda")
    for token, chosen in enumerate(routing.experts.tolist()):
        for slot, expert in enumerate(chosen):
            both = dense[0][expert].float() @ x[token].float() + layer.biases[0][expert].float()
            features = GATES["clamped_swiglu"](*both.chunk(2)).to(DTYPE).float()
            result = dense[1][expert].float() @ features + layer.biases[1][expert].float()
            out[token] += routing.weights[token, slot] * result
    return out


def _config_name(config: ExpertsConfig) -> str:
    tiles = "/".join(f"{tile.n}.{tile.k}.{tile.warps}.{tile.stages}" for tile in (config.gate_up, config.down))
    return f"{config.kernel}{config.block_m or ''} {tiles}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the configurations in use only")
    parser.add_argument("--parts", nargs="+", default=["check", "tiles", "experts", "decode", "prefill", "queries"])
    parser.add_argument("--query-case", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.query_case is not None:
        check_queries(args.query_case)
        return
    raise_clocks()
    parts: dict[str, Callable[[bool], Iterator[str]]] = {
        "tiles": tile_times, "experts": expert_times, "decode": decode_times, "prefill": prefill_times,
    }  # fmt: skip
    if "check" in args.parts:
        check()
    for name, part in parts.items():
        if name in args.parts:
            begin = time.monotonic()
            for line in part(args.quick):
                print(line, flush=True)
            print(f"({name}: {time.monotonic() - begin:.0f} s)", flush=True)
    if "queries" in args.parts:
        run_queries(25.0 if args.quick else 60.0)


if __name__ == "__main__":
    main()
