"""Latent attention (MLA): correctness, and times of several tile shapes.

    python benchmarks/gpu/latent_attention.py [--quick]

Decodes run over several layers' caches, so that no launch finds the last one's vectors in L2. Bytes are those of the
cache, operations those of the absorbed products (of heads of 192 and 128 dimensions for prompts).
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
import triton

from quire.kernels.triton.latent.decode import LatentDecode, LatentTile, latent_tile
from quire.kernels.triton.latent.products import absorb, values_of_context, values_of_rows
from quire.kernels.triton.latent.prompt import (
    PromptTile,
    attend_context,
    attend_own_tokens,
    context_tile,
    context_tokens,
    prompt_tile,
)
from quire.kernels.triton.launch import let_threads_launch
from quire.kernels.triton.prefill_attention import plan_tiles
from quire.layers.attention.base import AttentionInputs, LatentShape
from quire.layers.attention.torch_latent import TorchLatentAttention
from quire.layers.attention.triton_latent import TritonLatentAttention

SHAPE = LatentShape(rank=512, rope=64, nope=128, value=128)
BLOCK, MAX_ROWS, COLD_BYTES = 16, 256, 400 << 20
SCALE = SHAPE.query**-0.5
TILES = {
    16: [
        LatentTile(64, 4, 2, 1, True, gluon=True), LatentTile(64, 4, 2, 1, True, 2, gluon=True),
        LatentTile(32, 4, 5, 2), LatentTile(32, 4, 5, 2, min_tiles=2), LatentTile(32, 4, 5, 2, True),
        LatentTile(64, 4, 3, 1, True), LatentTile(64, 8, 3, 1, True),
    ],
    128: [
        LatentTile(64, 8, 2, gluon=True), LatentTile(64, 8, 3), LatentTile(64, 8, 3, 1, True), LatentTile(32, 8, 5),
    ],
}  # fmt: skip
PROMPT_TILES = [PromptTile(128, 64, 8, 2), PromptTile(128, 64, 8, 3), PromptTile(128, 128, 8, 2)]
CONTEXT_TILES = [LatentTile(64, 8, 3), LatentTile(32, 8, 5)]
DECODES = [(64, 4096, 16), (1, 4096, 16), (256, 1000, 16), (1, 600, 16), (8, 600, 16), (64, 4096, 128), (1, 4096, 128)]
PROMPTS = [(4, 2048, 16), (1, 8192, 16), (1, 2048, 128)]


def bf16(*size: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(size, device="cuda") * scale).to(torch.bfloat16)


class Decodes:
    """Rows of given lengths over caches in shuffled blocks."""

    def __init__(self, lens: list[int], heads: int, layers: int = 1) -> None:
        counts = [-(-n // BLOCK) for n in lens]
        total = sum(counts) + 1
        self.cache = bf16(total, layers, BLOCK, SHAPE.width)
        order = torch.randperm(total - 1, dtype=torch.int32) + 1
        tables = torch.zeros(MAX_ROWS + 1, -(-max(counts) // 16) * 16, dtype=torch.int32)
        for row, count in enumerate(counts):
            tables[row, :count], order = order[:count], order[count:]
        self.tables = tables.cuda()
        self.rows = torch.arange(len(lens), dtype=torch.int32, device="cuda")
        self.lens = torch.tensor(lens, dtype=torch.int32, device="cuda")
        self.q = bf16(len(lens), heads, SHAPE.query)
        self.up = bf16(heads, SHAPE.nope + SHAPE.value, SHAPE.rank, scale=SHAPE.rank**-0.5)
        self.out = torch.empty(len(lens), heads * SHAPE.value, dtype=torch.bfloat16, device="cuda")
        self.bytes = sum(lens) * SHAPE.width * 2
        self.operations = sum(lens) * heads * 2 * (SHAPE.width + SHAPE.rank)

    def attend(self, kernel: LatentDecode, layer: int, plan: object, absorbed: torch.Tensor) -> None:
        kernel.attend(
            self.q, absorbed, self.cache[:, layer], self.tables, self.rows, self.lens, plan, SCALE  # type: ignore[arg-type]
        )  # fmt: skip

    def run_once(self, kernel: LatentDecode) -> torch.Tensor:
        rows = len(self.lens)
        plan = kernel.plan(self.lens, self.rows, rows)
        absorbed = absorb(self.q, self.up, SHAPE.nope)
        self.attend(kernel, 0, plan, absorbed)
        values_of_rows(absorbed, self.up, self.out, self.lens, plan, kernel, SHAPE.nope, rows)
        return self.out

    def expected(self) -> torch.Tensor:
        rows, longest = len(self.lens), int(self.lens.max())
        inputs = AttentionInputs(
            slots=torch.empty(0), query_starts=torch.arange(rows + 1, dtype=torch.int32, device="cuda"),
            context_lens=self.lens, block_tables=self.tables, num_rows=rows, num_tokens=rows, num_decodes=rows,
            max_query_len=1, max_context_len=longest, rows=self.rows,
        )  # fmt: skip
        kv = self.cache[:, 0].float()
        return TorchLatentAttention().attend(self.q.float(), self.q, kv, self.up.float(), inputs, SCALE)

    def microseconds(self, kernel: LatentDecode, whole: bool = False) -> float:
        """A layer's attention without the step's planning; `whole`: with the products before and after."""
        rows, layers = len(self.lens), self.cache.shape[1]
        plan = kernel.plan(self.lens, self.rows, rows)
        absorbed = absorb(self.q, self.up, SHAPE.nope)

        def run() -> None:
            for layer in range(layers):
                queries = absorb(self.q, self.up, SHAPE.nope) if whole else absorbed
                self.attend(kernel, layer, plan, queries)
                if whole:
                    values_of_rows(queries, self.up, self.out, self.lens, plan, kernel, SHAPE.nope, rows)

        return timed(run) / layers


def timed(run: Callable[[], object]) -> float:
    run()
    bench = functools.partial(triton.testing.do_bench_cudagraph, rep=15, return_mode="median")
    return bench(run) * 1000


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm())


def name(tile: LatentTile | PromptTile) -> str:
    if isinstance(tile, PromptTile):
        return f"{tile.block_m}x{tile.block_n} {tile.warps}w{tile.stages}s"
    text = f"{tile.tokens}t{tile.warps}w{tile.stages}s{tile.programs}p" + "T" * tile.transposed + "G" * tile.gluon
    return text + (f"m{tile.min_tiles}" if tile.min_tiles > 1 else "")


def make(heads: int, tile: LatentTile, queries: int = 1) -> LatentDecode:
    device = torch.device("cuda")
    return LatentDecode(
        heads, SHAPE.nope, SHAPE.rank, SHAPE.rope, MAX_ROWS, torch.bfloat16, device, queries, tile
    )  # fmt: skip


def check_decodes(tiles: dict[int, list[LatentTile]]) -> dict[tuple[int, LatentTile], LatentDecode]:
    """The kernels that compile and compute the right result."""
    cases = {heads: Decodes([4000, 1, 700, 33, 90, 2048], heads) for heads in tiles}
    expected = {heads: case.expected() for heads, case in cases.items()}
    small = {heads: Decodes([17], heads) for heads in tiles}
    wanted = [(heads, tile) for heads, own in tiles.items() for tile in own]

    def compile(job: tuple[int, LatentTile]) -> tuple[tuple[int, LatentTile], LatentDecode | str]:
        heads, tile = job
        kernel = make(heads, tile)
        try:
            small[heads].run_once(kernel)
            torch.cuda.synchronize()
        except Exception as failure:
            return job, str(failure).splitlines()[0][:100]
        return job, kernel

    with ThreadPoolExecutor(16) as pool:
        made = list(pool.map(compile, wanted))
    good = {}
    for (heads, tile), kernel in made:
        if isinstance(kernel, str):
            print(f"{heads} heads, {name(tile)}: {kernel}", flush=True)
            continue
        off = error(cases[heads].run_once(kernel), expected[heads])
        if off < 1e-2:
            good[heads, tile] = kernel
        else:
            print(f"{heads} heads, {name(tile)}: WRONG, {off:.3f}", flush=True)
    return good


def check_steps(heads: int) -> None:
    """Decodes, a whole prompt and a chunk in one step, against plain torch."""
    lens, queries = [300, 700, 500, 1900], [1, 1, 500, 333]
    case = Decodes(lens, heads)
    tokens = sum(queries)
    starts = torch.tensor([0, 1, 2, 502, 835], dtype=torch.int32, device="cuda")
    q = bf16(tokens, heads, SHAPE.query)
    latents = []
    for row, (length, own) in enumerate(zip(lens, queries, strict=True)):
        blocks = case.tables[row, : -(-length // BLOCK)].long()
        latents.append(case.cache[blocks, 0].flatten(0, 1)[length - own : length])
    inputs = AttentionInputs(
        slots=torch.empty(0), query_starts=starts, context_lens=case.lens, block_tables=case.tables, num_rows=4,
        num_tokens=tokens, num_decodes=2, max_query_len=500, max_context_len=1900, rows=case.rows,
    )  # fmt: skip
    latent, kv = torch.cat(latents), case.cache[:, 0]
    expected = TorchLatentAttention().attend(q.float(), latent, kv.float(), case.up.float(), inputs, SCALE)
    backend = TritonLatentAttention(heads, SHAPE)
    backend.prepare(kv, inputs)
    off = error(backend.attend(q, latent, kv, case.up, inputs, SCALE), expected)
    print(f"{heads} heads, a mixed step: error {off:.4f}{'' if off < 1e-2 else ' WRONG'}", flush=True)


class Prompts:
    """Prompts of one length; `earlier`: tokens of each that are cached already."""

    def __init__(self, count: int, length: int, heads: int, earlier: int = 0) -> None:
        tokens = count * length
        self.heads, self.case = heads, Decodes([earlier + length] * count, heads)
        self.q = bf16(tokens, heads, SHAPE.query)
        self.latent = bf16(tokens, SHAPE.width)
        self.starts = torch.arange(0, tokens + 1, length, dtype=torch.int32, device="cuda")
        self.numbers = torch.arange(count, dtype=torch.int32, device="cuda")
        self.out = torch.empty(tokens, heads * SHAPE.value, dtype=torch.bfloat16, device="cuda")
        self.stats = torch.zeros(tokens, heads, 2, device="cuda")
        self.keys = self.expand()
        self.operations = count * length * (length + 1) / 2 * heads * 2 * (SHAPE.query + SHAPE.value)
        self.context_operations = count * length * earlier * heads * 2 * (SHAPE.width + SHAPE.rank)

    def expand(self) -> torch.Tensor:
        return torch.nn.functional.linear(self.latent[:, : SHAPE.rank], self.case.up.flatten(0, 1))

    def tiles(self, tokens: int) -> torch.Tensor:
        rows = len(self.numbers)
        return plan_tiles(self.starts, self.case.lens, self.numbers, 0, rows, len(self.q), tokens)

    def own(self, tile: PromptTile) -> float:
        tiles, sizes = self.tiles(tile.block_m), (SHAPE.rank, SHAPE.nope, SHAPE.rope, SHAPE.value)
        return timed(
            lambda: attend_own_tokens(
                self.q, self.keys, self.latent, self.out, None, tiles, self.starts, sizes, SCALE, 0, tile
            )
        )

    def context(self, tile: LatentTile) -> float:
        tiles, absorbed = self.tiles(context_tokens(self.heads)), absorb(self.q, self.case.up, SHAPE.nope)
        case = self.case
        return timed(
            lambda: attend_context(
                self.q,
                absorbed,
                case.cache[:, 0],
                self.stats,
                case.tables,
                case.rows,
                tiles,
                self.starts,
                SHAPE.nope,
                SCALE,
                0,
                tile,
            )
        )


def ranked(times: dict[str, float], cell: Callable[[float], str], shipped: str) -> str:
    best = sorted(times, key=times.__getitem__)
    cells = [f"{each} {cell(times[each])}" for each in best[:5]]
    return " | ".join(cells) + f" || shipped {shipped} {cell(times[shipped]) if shipped in times else ''}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the shipped tile shapes, and those without Gluon")
    quick = parser.parse_args().quick
    torch.manual_seed(0)
    let_threads_launch()
    shipped = {16: latent_tile(16, 2), 128: latent_tile(64, 2)}
    plain = {16: LatentTile(32, 4, 5, 2), 128: LatentTile(32, 8, 5)}
    tiles = {heads: list(dict.fromkeys([tile, plain[heads]])) for heads, tile in shipped.items()}
    if not quick:
        tiles = {heads: list(dict.fromkeys([shipped[heads], *TILES[heads]])) for heads in tiles}
    kernels = check_decodes(tiles)
    for heads in (16, 128):
        check_steps(heads)
    lines = ["", "decodes: us a layer (TB/s of cache, TFLOP/s)"]
    for rows, length, heads in DECODES:
        size = rows * length * SHAPE.width * 2
        case = Decodes([length] * rows, heads, min(28, -(-COLD_BYTES // size) + 1))

        def rates(us: float, case: Decodes = case) -> str:
            return f"{us:.1f} ({case.bytes / us / 1e6:.2f}, {case.operations / us / 1e6:.0f})"

        own = {tile: kernel for (count, tile), kernel in kernels.items() if count == heads}
        times = {name(tile): case.microseconds(kernel) for tile, kernel in own.items()}
        lines.append(f"{rows} x {length}, {heads} heads: " + ranked(times, rates, name(shipped[heads])))
        best = min(own, key=lambda tile: times[name(tile)])
        lines.append(f"    with absorbing and values: {case.microseconds(own[best], whole=True):.1f}")
        print(lines[-2], flush=True)
        del case
    lines.append("prompts: us a layer (TFLOP/s)")
    for count, length, heads in PROMPTS:
        prompts = Prompts(count, length, heads)

        def rate(us: float, operations: float = prompts.operations) -> str:
            return f"{us:.1f} ({operations / us / 1e6:.0f})"

        found = {}
        for tile in [prompt_tile(128, 2)] if quick else PROMPT_TILES:
            try:
                found[name(tile)] = prompts.own(tile)
            except Exception as failure:
                print(f"{name(tile)}: {str(failure).splitlines()[0][:100]}")
        lines.append(f"{count} x {length}, {heads} heads: " + ranked(found, rate, name(prompt_tile(128, 2))))
        lines.append(f"    keys and values from latents: {timed(lambda prompts=prompts: prompts.expand()):.1f}")  # type: ignore[misc]
        print(lines[-2], flush=True)
        del prompts
    for heads in (16, 128):
        chunk = Prompts(1, 1024, heads, earlier=4096)

        def chunk_rate(us: float, operations: float = chunk.context_operations) -> str:
            return f"{us:.1f} ({operations / us / 1e6:.0f})"

        choices = [context_tile(2)] if quick else CONTEXT_TILES
        spent = {name(tile): chunk.context(tile) for tile in choices}
        text = ranked(spent, chunk_rate, name(context_tile(2)))
        lines.append(f"1,024 after 4,096, absorbed, {heads} heads: {text}")
        absorbed = absorb(chunk.q, chunk.case.up, SHAPE.nope)
        chunk.stats.zero_()
        before = timed(lambda chunk=chunk: absorb(chunk.q, chunk.case.up, SHAPE.nope))  # type: ignore[misc]
        after = timed(
            lambda chunk=chunk, absorbed=absorbed: values_of_context(  # type: ignore[misc]
                absorbed, chunk.case.up, chunk.out, chunk.stats, SHAPE.nope
            )
        )
        lines.append(f"    absorbing {before:.1f}, values {after:.1f}")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
