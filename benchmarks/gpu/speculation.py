"""Steps that verify drafts, on a GPU: attention of several queries a row checked and timed, then whole steps.

    python -m benchmarks.gpu.speculation [CONFIG_FOLDER] [--quick] [--parts check attention engine requests]

`check` compares attention of rows of 1 to 8 query tokens with plain torch, each case in a process of its own, so that
an illegal access ends only one of them. `attention` times it by rows, context and width. `engine` needs the folder of a
model's configuration (weights are random): steps of width 4 against steps of width 1, and their slowest kernels.
`requests` needs that and `--draft`, the folder of an EAGLE-3 head's configuration: milliseconds a token without drafts,
with three of the head's (3.0 tokens a step, by synthetic acceptance), the same tuned, and with n-grams of random text,
none of which is ever right.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.gpt_oss import Rows, error
from quire.kernels.kv import QuantizedKV
from quire.kernels.triton.decode_attention import DecodeAttention, DecodeTile, decode_tile
from quire.kernels.triton.launch import let_threads_launch
from quire.kernels.triton.skinny_gemm.timing import GraphTimer, raise_clocks
from quire.layers.attention.base import AttentionInputs, AttentionSpec
from quire.layers.attention.torch_paged import TorchPagedAttention
from quire.layers.attention.triton import TritonPagedAttention
from quire.messages.plan import NewRow, StepPlan
from quire.messages.sampling import SamplingParams

DTYPE = torch.bfloat16
CASES = [
    (kind, heads, kv_heads, dim, width, window)
    for kind, heads, kv_heads, dim in (
        ("auto", 32, 8, 128),
        ("fp8", 32, 8, 128),
        ("int8_per_token_head", 32, 8, 128),
        ("auto", 64, 8, 64),
        ("auto", 28, 4, 128),
        ("auto", 8, 4, 256),
        ("auto", 16, 1, 128),
    )
    for width in (2, 4, 8)
    for window in (None, 100)
]
"""The cache's format, heads, KV heads, head size, most query tokens of a row, the window."""
LAYERS = 32
RATES = [0.8, 0.67, 0.53]
"""For each draft, how often it and all before it are accepted: 3.0 tokens a step."""
ROOM = 512
"""Tokens that the rows of an engine may draw."""


def verifying(inputs: AttentionInputs, width: int) -> AttentionInputs:
    """The step as one whose rows all verify drafts."""
    inputs.num_decodes, inputs.num_verifying, inputs.width = 0, inputs.num_rows, width
    inputs.num_verified = inputs.num_tokens
    return inputs


def check_case(number: int) -> None:
    """One case: ragged widths, contexts from one token to thousands, twice."""
    kind, heads, kv_heads, dim, width, window = CASES[number]
    contexts = [70, 8, 33, 129, 3000, 4097, 16, 8, 640, 1500]
    lens = [(context, 1 + (i * 5 + 3) % width) for i, context in enumerate(contexts)]
    rows = Rows(lens, heads, kv_heads, dim, kind=kind)
    worst = 0.0
    for cap, sinks, slopes in ((None, rows.sinks, None), (30.0, None, None), (None, None, _slopes(heads))):
        spec = AttentionSpec(dim**-0.5, window, cap, sinks, slopes)
        backend, inputs = TritonPagedAttention(), verifying(rows.inputs(), width)
        kv = rows.layers[0]
        wide = kv if isinstance(kv, QuantizedKV) else kv.float()
        wanted = TorchPagedAttention().attend(rows.q.float(), wide, verifying(rows.inputs(), width), spec)
        backend.prepare(heads, rows.layers[0], inputs, spec)
        for _ in range(2):
            torch.zeros(1, device="cuda").add_(1)
            out = backend.attend(rows.q, rows.layers[0], inputs, spec)
            torch.cuda.synchronize()
            worst = max(worst, error(out, wanted))
    print("correct" if worst < 8e-3 else f"WRONG {worst:.1e}", flush=True)


def _slopes(heads: int) -> torch.Tensor:
    return 2.0 ** -torch.linspace(1, 8, heads, device="cuda")


def check(quick: bool, seconds: float) -> Iterator[str]:
    """Every case in a process of its own, several at once: most of their time is compiling."""

    def run(case: int) -> str:
        command = [sys.executable, "-m", "benchmarks.gpu.speculation", "--case", str(case)]
        try:
            made = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            return "no result in time"
        return (made.stdout.strip() or made.stderr.strip() or "no message").splitlines()[-1][:160]

    cases = [i for i, case in enumerate(CASES) if not quick or (case[0] == "auto" and case[1] == 32 and case[4] != 2)]
    with ThreadPoolExecutor(12) as pool:
        said = dict(zip(cases, pool.map(run, cases), strict=True))
    wrong = {case: words for case, words in said.items() if words != "correct"}
    for case, words in wrong.items():
        yield f"{CASES[case]}: {words}"
    yield f"several queries a row: {len(cases) - len(wrong)} of {len(cases)} cases are correct"


def attention_times(quick: bool) -> Iterator[str]:
    """Microseconds of a layer's attention by width, and by tile for width 4."""
    heads, kv_heads, dim = 32, 8, 128
    shipped = decode_tile(dim, 2)
    tiles = [
        DecodeTile(32, 2, 5, programs, min_tiles=least)
        for programs, least in ((4, 2), (4, 3), (4, 8), (2, 4), (2, 6), (2, 8), (1, 8))
    ]
    if not quick:
        tiles += [DecodeTile(32, 4, 5, 2, 4), DecodeTile(64, 4, 3, 2, 2), DecodeTile(64, 4, 3, 2, 4)]
    kernels = {
        width: DecodeAttention(heads, kv_heads, dim, 256, DTYPE, torch.device("cuda"), queries=width)
        for width in (1, 4, 8)
    }
    others = {
        tile: DecodeAttention(heads, kv_heads, dim, 256, DTYPE, torch.device("cuda"), queries=4, tile=tile)
        for tile in tiles
    }
    yield f"Llama-8B's attention, us a layer, by query tokens a row (tile {shipped})"
    _compile([*kernels.values(), *others.values()], heads, kv_heads, dim)
    timer = GraphTimer()
    cases = (
        [(1, 640), (1, 4096), (64, 700)]
        if quick
        else [(1, 640), (1, 4096), (1, 32768), (8, 1024), (64, 700), (256, 384)]
    )
    for count, context in cases:
        times = {}
        for width, kernel in kernels.items():
            times[width] = _attention_time(timer, kernel, count, context, width, heads, kv_heads, dim)
        line = f"{count:4d} x {context:6d}: " + ", ".join(f"{width}: {time:.1f}" for width, time in times.items())
        found = {
            tile: _attention_time(timer, kernel, count, context, 4, heads, kv_heads, dim)
            for tile, kernel in others.items()
        }
        best = sorted(found, key=found.__getitem__)[:4]
        yield (
            line
            + " | width 4 by tile: " * bool(best)
            + ", ".join(f"{t.tokens}t{t.warps}w{t.stages}s{t.programs}p{t.min_tiles} {found[t]:.1f}" for t in best)
        )


def _compile(kernels: list[DecodeAttention], heads: int, kv_heads: int, dim: int) -> None:
    let_threads_launch()
    rows = Rows([(17, 1)], heads, kv_heads, dim)
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda kernel: _launch(kernel, rows, rows.inputs()), kernels))
    torch.cuda.synchronize()


def _launch(kernel: DecodeAttention, rows: Rows, inputs: AttentionInputs) -> None:
    starts = inputs.query_starts if kernel.queries > 1 else None
    assert inputs.rows is not None
    plan = kernel.plan(inputs.context_lens, inputs.rows, inputs.num_rows, None, None, starts)
    out = torch.empty(len(rows.q), rows.q[0].numel(), dtype=DTYPE, device="cuda")
    kernel.attend(
        rows.q, rows.layers[0], out, rows.tables, inputs.rows, inputs.context_lens, plan, inputs.num_rows, 0.088, None,
        starts=starts,
    )  # fmt: skip


def _attention_time(
    timer: GraphTimer,
    kernel: DecodeAttention,
    count: int,
    context: int,
    width: int,
    heads: int,
    kv_heads: int,
    dim: int,
) -> float:
    rows = Rows([(context, width)] * count, heads, kv_heads, dim, layers=LAYERS)
    inputs, other = rows.inputs(), torch.zeros(1, device="cuda")
    starts = inputs.query_starts if kernel.queries > 1 else None
    rows_of = inputs.rows
    assert rows_of is not None
    plan = kernel.plan(inputs.context_lens, rows_of, count, None, None, starts)
    out = torch.empty(len(rows.q), heads * dim, dtype=DTYPE, device="cuda")

    def chain(attends: bool = True) -> None:
        for layer in rows.layers:
            other.add_(1)  # as in a model: another kernel runs between two attentions
            if attends:
                kernel.attend(
                    rows.q, layer, out, rows.tables, rows_of, inputs.context_lens, plan, count, 0.088, None,
                    starts=starts,
                )  # fmt: skip

    chain()
    return (timer.replay(chain) - timer.replay(lambda: chain(False))) / LAYERS


class Steps:
    """Decode steps of an engine's worker, planned by hand: no draft is ever right, so a step yields one token a row."""

    def __init__(self, worker: Any, rows: int, context: int) -> None:
        self._launch = worker.launch
        batch = worker._runner.batch
        size, longest = batch.kv.block_size, context + ROOM
        pages = -(-longest // size)
        order = np.random.default_rng(0).permutation(len(batch.kv.data) - 1)[: rows * pages].astype(np.int32) + 1
        if len(order) < rows * pages:
            raise SystemExit(f"{rows} rows of {longest} tokens need {rows * pages} blocks, there are {len(order)}")
        self._rows, self._context, self._step = np.arange(rows, dtype=np.int32), context, batch._next_step
        added = [
            NewRow(
                row=row, request=str(row), prompt_len=context, num_tokens=context + 1, num_computed=context,
                limit=longest - 8, seed=row, sequence=0, params=SamplingParams(temperature=0.6), stop_ids=[],
                bad_words=[],
            )
            for row in range(rows)
        ]  # fmt: skip
        self.run(
            1, 1, reset=True, add=added, block_rows=np.repeat(self._rows, pages),
            block_indices=np.tile(np.arange(pages, dtype=np.int32), rows), blocks=order,
        )  # fmt: skip

    def run(self, width: int, count: int, **changes: Any) -> float:
        """Milliseconds of a step; each is planned before the result of the one before it is known."""
        none, rows, pending = np.empty(0, np.int32), self._rows, []
        begin = time.perf_counter()
        for number in range(count):
            arrays = {name: changes.pop(name, none) for name in ("block_rows", "block_indices", "blocks")}
            plan = StepPlan(
                step=self._step, rows=rows, counts=np.full(len(rows), width, np.int32), num_decodes=len(rows),
                num_drafts=(width - 1) * len(rows), tokens=none, samples=rows, sample_rows=rows,
                max_context=self._context + ROOM, **arrays, **changes,
            )  # fmt: skip
            changes = {}
            self._step += 1
            pending.append(self._launch(plan))
            if number:
                pending.pop(0).result()
        pending.pop().result()
        return (time.perf_counter() - begin) * 1000 / count


def engine(model: str, quick: bool, context: int) -> Iterator[str]:
    """Steps that verify drafts against plain ones, and where the time goes."""
    from quire import LLM

    llm = LLM(
        model, load_format="dummy", skip_tokenizer_init=True, max_model_len=4096, seed=0,
        speculative_config={"method": "suffix", "num_speculative_tokens": 7},
    )  # fmt: skip
    worker = llm.llm_engine.core._executor._worker  # type: ignore[attr-defined]
    widths = (1, 4) if quick else (1, 2, 4, 8)
    yield f"{model}: ms a step by width, {context} tokens of context (and how many times the plain step)"
    tables = []
    for rows in (1, 64) if quick else (1, 8, 64, 256):
        steps = Steps(worker, rows, context)
        for width in widths:
            steps.run(width, 5)
        times = {width: min(steps.run(width, 20) for _ in range(3)) for width in widths}
        yield f"{rows:4d} rows: " + ", ".join(f"{w}: {t:.3f} ({t / times[1]:.3f})" for w, t in times.items())
        if rows in (1, 64):
            tables += _kernel_table(steps, rows)
    yield from tables
    llm.shutdown()


def _kernel_table(steps: Steps, rows: int, count: int = 5) -> list[str]:
    """The kernels whose time grows most from width 1 to width 4, microseconds of a step."""
    from torch.profiler import ProfilerActivity, profile

    found: dict[int, dict[str, float]] = {}
    for width in (1, 4):
        with profile(activities=[ProfilerActivity.CUDA]) as taken:
            steps.run(width, count)
        found[width] = {event.key: event.device_time_total / count for event in taken.key_averages()}
    names = sorted({*found[1], *found[4]}, key=lambda name: found[1].get(name, 0) - found[4].get(name, 0))
    lines = [f"{rows} rows: us of a step in each kernel, width 1 and 4, those that grow most"]
    lines += [f"  {found[1].get(name, 0):8.1f} {found[4].get(name, 0):8.1f}  {name[:90]}" for name in names[:14]]
    total = [sum(times.values()) for times in found.values()]
    return [*lines, f"  {total[0]:8.1f} {total[1]:8.1f}  all"]


def requests(model: str, draft: str, quick: bool) -> Iterator[str]:
    """Milliseconds a token of some requests at once, while all of them draw."""
    from quire import LLM

    head = {
        "method": "eagle3", "model": draft, "num_speculative_tokens": 3, "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": RATES,
    }  # fmt: skip
    modes: dict[str, dict[str, Any] | None] = {
        "none": None, "3 drafts": {**head, "tune": False}, "tuned": head, "n-grams": {"method": "ngram"}
    }  # fmt: skip
    plain: dict[int, float] = {}
    yield f"{model}: ms a token by requests at once (and how many times as fast as none)"
    for name, config in modes.items():
        llm = LLM(
            model, load_format="dummy", skip_tokenizer_init=True, max_model_len=4096, seed=0, speculative_config=config
        )
        line = []
        for count in (1, 64) if quick else (1, 64, 256):
            for _ in range(2):
                _steady(llm, count, 96)
            took = min(_steady(llm, count, 256) for _ in range(2))
            base = plain.setdefault(count, took)
            line.append(f"{count}: {took:.3f} ({base / took:.3f})")
        yield f"{name:>9}: " + ", ".join(line)
        llm.shutdown()


def _steady(llm: Any, count: int, tokens: int) -> float:
    """Milliseconds a token, between a third of the tokens and 85 % of them."""
    from quire import SamplingParams

    def generated() -> int:
        return next(metric.value for metric in llm.get_metrics() if metric.name.endswith("generation_tokens"))

    def watch() -> None:
        while not ended.wait(0.015):
            points.append((time.perf_counter(), generated() - before))

    rng = np.random.default_rng()
    prompts = [{"prompt_token_ids": rng.integers(0, 500, 128).tolist()} for _ in range(count)]
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=tokens, detokenize=False)
    before, points, ended = generated(), list[tuple[float, int]](), threading.Event()
    watcher = threading.Thread(target=watch)
    watcher.start()
    llm.generate(prompts, params, use_tqdm=False)
    ended.set()
    watcher.join()
    inside = [(at, drawn) for at, drawn in points if count * tokens / 3 <= drawn <= 0.85 * count * tokens]
    (start, first), (end, last) = inside[0], inside[-1]
    return (end - start) * 1000 * count / (last - first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--parts", nargs="*", default=["check", "attention", "engine", "requests"])
    parser.add_argument("--draft", help="folder of an EAGLE-3 head's configuration")
    parser.add_argument("--case", type=int)
    parser.add_argument("--context", type=int, default=640, help="tokens of context of the engine's rows")
    parser.add_argument("--seconds", type=float, default=50.0, help="of a case of `check`")
    args = parser.parse_args()
    if args.case is not None:
        check_case(args.case)
        return
    if "check" in args.parts:
        for line in check(args.quick, args.seconds):
            print(line, flush=True)
    if "attention" in args.parts:
        raise_clocks()
        for line in attention_times(args.quick):
            print(line, flush=True)
    if "engine" in args.parts and args.model:
        for line in engine(args.model, args.quick, args.context):
            print(line, flush=True)
    if "requests" in args.parts and args.model and args.draft:
        for line in requests(args.model, args.draft, args.quick):
            print(line, flush=True)


if __name__ == "__main__":
    main()
