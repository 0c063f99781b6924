"""What LoRA adapters cost on a GPU: an 8B model's shapes with random weights, rank 16 on every linear layer.

    python -m benchmarks.gpu.adapters                        # everything, less than 5 minutes
    python -m benchmarks.gpu.adapters --parts kernels speed  # some of it
    python -m benchmarks.gpu.adapters --quick --device cpu --model FOLDER   # only whether it runs

    kernels  microseconds of each matrix of a layer, rows by adapters: the base's product with its norm and activation
             fused, the same as three launches, and what shrink and expand add to these; after other weights have been
             read, in a CUDA graph. Share: of memory speed, over the bytes of the adapters that occur, once each
    off      an engine without enable_lora: 256 requests of 128 in, 512 out; 1 request of 512 in, 256 out
    speed    the same with enable_lora: no row has an adapter; 1, 8, 64 adapters, request i has adapter i mod n
    load     gaps between tokens of 32 streams while requests of other adapters come, which are in slots already; and
             while each of them must be read and copied first
    many     1,000 adapters on disk (files are hard links to a few, each with a scale of its own), 64 slots: 256
             requests each with another. Longest gap of running rows; and whether answers are right: some again, alone

Every part prints its lines when it has them, the table comes last; with $OUT set it is also in $OUT/adapters.json. A
part that fails costs only itself: each engine is a process of its own, with a time limit.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
PARTS = ("kernels", "off", "speed", "load", "many")
PROCESSES = (("kernels",), ("off",), ("speed",), ("load", "many"))
"""Parts that run in one process."""
LIMITS = {"kernels": 90, "off": 75, "speed": 130, "load": 100, "many": 100}
"""Seconds of a process, by its first part."""
RANK, SLOTS, BANDWIDTH = 16, 64, 4.3e6
"""Bandwidth: bytes a microsecond of an H200, measured."""
FILES = 8
"""Different files of weights; adapters of one file differ by their scale."""
TIE = 0.06
"""Logits within this are a near tie in bfloat16, where other batches run other kernels."""


# Adapters on disk


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """[out, in] of each linear layer of a Llama's layer."""
    hidden, width = config["hidden_size"], config["intermediate_size"]
    kv = hidden * config["num_key_value_heads"] // config["num_attention_heads"]
    return {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (width, hidden), "mlp.up_proj": (width, hidden),
        "mlp.down_proj": (hidden, width),
    }  # fmt: skip


def write_adapters(root: Path, config: dict[str, Any], count: int, rank: int) -> None:
    """`count` folders 0, 1, …; the weights of adapter i are those of file i mod FILES."""
    from safetensors.torch import save_file

    shapes = shapes_of(config)
    bank = torch.randn(1 << 23).to(torch.bfloat16)

    def drawn(generator: random.Random, rows: int, columns: int, size: float) -> torch.Tensor:
        while rows * columns > len(bank) // 2:
            raise ValueError(f"a matrix of {rows} x {columns} is larger than the bank of random numbers")
        start = generator.randrange(len(bank) - rows * columns)
        return bank[start : start + rows * columns].view(rows, columns) * size

    def write(number: int) -> None:
        generator, tensors = random.Random(number), {}
        for layer in range(config["num_hidden_layers"]):
            for name, (out, width) in shapes.items():
                key = f"base_model.model.model.layers.{layer}.{name}"
                tensors[f"{key}.lora_A.weight"] = drawn(generator, rank, width, width**-0.5)
                tensors[f"{key}.lora_B.weight"] = drawn(generator, out, rank, 0.1)
        save_file(tensors, root / f"weights-{number}.safetensors")

    modules = [name.rpartition(".")[2] for name in shapes]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(min(FILES, count))))
    for number in range(count):
        folder = root / str(number)
        folder.mkdir()
        (folder / "adapter_model.safetensors").hardlink_to(root / f"weights-{number % FILES}.safetensors")
        # Of the same file no two have the same scale: 0.75, 0.78, …
        alpha = rank * (0.75 + (number // FILES) / 32)
        written = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": modules}
        (folder / "adapter_config.json").write_text(json.dumps(written))


# Kernels


class Matrix:
    """One linear layer's matrices and adapters in several copies, so that none is in L2 when its turn comes."""

    def __init__(self, name: str, heights: Sequence[int], depth: int, normed: bool, gated: bool, slots: int) -> None:
        self.name, self.depth, self.normed, self.gated = name, depth, normed, gated
        self.bounds = (0, *torch.tensor(heights).cumsum(0).tolist())
        height = self.bounds[-1]
        copies = max(2, -(-(120 << 20) // (2 * height * depth)))
        self.weights = [_normal(height, depth) for _ in range(copies)]
        self.a = [_normal(slots, len(heights) * RANK, depth) for _ in range(copies)]
        self.b = [_normal(slots, RANK, height) for _ in range(copies)]
        self.gain = torch.ones(depth, device="cuda", dtype=torch.bfloat16)

    def adapter_bytes(self, adapters: int) -> int:
        return adapters * (self.a[0][0].nbytes + self.b[0][0].nbytes)


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * shape[-1] ** -0.5


def time_kernels(args: argparse.Namespace, say: Callable[..., None]) -> None:
    from quire.kernels.adapters import SlotLowRank, SlotTokens
    from quire.kernels.triton import low_rank
    from quire.kernels.triton.launch import let_threads_launch
    from quire.kernels.triton.ops import TritonOps
    from quire.kernels.triton.skinny_gemm.timing import GraphTimer, raise_clocks

    config = json.loads((Path(args.model) / "config.json").read_text())
    shapes = shapes_of(config)
    names = {
        "qkv": (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), True, False),
        "o": (("self_attn.o_proj",), False, False),
        "gate_up": (("mlp.gate_proj", "mlp.up_proj"), True, True),
        "down": (("mlp.down_proj",), False, False),
    }
    ops = TritonOps()
    # (rows, adapters)
    cases = [(1, 1), (8, 8), (64, 8), (256, 1), (256, 8), (256, 64)]
    cases = cases[:2] if args.quick else cases
    let_threads_launch()
    layers: dict[tuple[int, int], list[float]] = {case: [0.0, 0.0, 0.0, 0.0] for case in cases}
    for name, (parts, normed, gated) in names.items():
        matrix = Matrix(name, [shapes[part][0] for part in parts], shapes[parts[0]][1], normed, gated, SLOTS)
        runs: dict[tuple[int, int], list[Callable[[int], Any]]] = {}
        for rows, adapters in cases:
            x, stream = _normal(rows, matrix.depth) * matrix.depth**0.5, _normal(rows, matrix.depth)
            slots = (torch.arange(rows, device="cuda") % adapters).int()
            tokens = SlotTokens(slots, range(adapters))

            def fused(i: int, matrix=matrix, x=x, stream=stream) -> Any:  # type: ignore[no-untyped-def]
                if not matrix.normed:
                    return ops.linear(x, matrix.weights[i])
                return ops.norm_linear(x, stream, matrix.gain, 1e-5, matrix.weights[i], None, matrix.gated)

            def apart(i: int, matrix=matrix, x=x, stream=stream) -> Any:  # type: ignore[no-untyped-def]
                normed = ops.add_rms_norm(x, stream, matrix.gain, 1e-5)[0] if matrix.normed else x
                found = ops.linear(normed, matrix.weights[i])
                return ops.gate_mul(found) if matrix.gated else found

            def adapted(i: int, matrix=matrix, x=x, stream=stream, tokens=tokens) -> Any:  # type: ignore[no-untyped-def]
                low = SlotLowRank(matrix.a[i], matrix.b[i], tokens, matrix.bounds)
                norm = (matrix.gain, 1e-5) if matrix.normed else None
                carried = stream if matrix.normed else None
                return ops.adapted_linear(
                    x, matrix.weights[i], None, low, norm, carried, "silu" if matrix.gated else ""
                )

            def in_turn(i: int, adapted=adapted) -> Any:  # type: ignore[no-untyped-def]
                low_rank.OVERLAPS = False
                try:
                    return adapted(i)
                finally:
                    low_rank.OVERLAPS = True

            runs[rows, adapters] = [fused, apart, adapted, in_turn]
        with ThreadPoolExecutor(14) as pool:  # most of the time is compiling
            list(pool.map(lambda run: run(0), [run for group in runs.values() for run in group]))
        torch.cuda.synchronize()
        raise_clocks()
        timer = GraphTimer(window_us=400.0, replays=4)
        for (rows, adapters), group in runs.items():
            copies = range(len(matrix.weights))
            took = [timer.time(run, copies, 20.0 + 4 * rows) for run in group]  # type: ignore[arg-type]
            low, read = min(took[2:]) - took[0], matrix.adapter_bytes(adapters)
            share = read / max(low, 1e-3) / BANDWIDTH
            layers[rows, adapters] = [s + t for s, t in zip(layers[rows, adapters], took, strict=True)]
            say(
                "kernels", f"{rows:3} rows {adapters:2} adapters {name:8}",
                text=f"fused {took[0]:7.2f} us, apart {took[1]:7.2f}, with adapters {took[2]:7.2f} "
                f"(in turn {took[3]:7.2f}): low rank {low:6.2f} us for {read / 1e6:6.2f} MB ({share:4.0%})",
                us=took, bytes=read,
            )  # fmt: skip
        _time_halves(matrix, cases, timer, say)
        del matrix, runs
        torch.cuda.empty_cache()
    for (rows, adapters), took in layers.items():
        say(
            "kernels", f"{rows:3} rows {adapters:2} adapters a layer",
            text=f"fused {took[0]:7.2f} us, apart {took[1]:7.2f}, with adapters {took[2]:7.2f} "
            f"({took[2] / took[0]:.3f} of fused), shrink before the product {took[3]:7.2f}",
            us=took,
        )  # fmt: skip
    overlapped, in_turn_us = (sum(layers[case][at] for case in cases if case[0] == 256) for at in (2, 3))
    say("overlap", "256 rows", text=f"{overlapped:.0f} us beside the product, {in_turn_us:.0f} before it",
        helps=overlapped <= in_turn_us)  # fmt: skip


def _time_halves(matrix: Matrix, cases: Sequence[tuple[int, int]], timer: Any, say: Callable[..., None]) -> None:
    """Shrink alone and expand alone, after nothing but themselves: the adapters come from L2 where they fit."""
    from quire.kernels.adapters import SlotLowRank, SlotTokens
    from quire.kernels.triton import low_rank

    copies = range(len(matrix.weights))
    for rows, adapters in cases:
        x = _normal(rows, matrix.depth)
        slots = (torch.arange(rows, device="cuda") % adapters).int()
        out = torch.zeros(rows, matrix.bounds[-1], device="cuda", dtype=torch.bfloat16)

        def low(i: int, tokens: Any) -> SlotLowRank:
            return SlotLowRank(matrix.a[i], matrix.b[i], tokens, matrix.bounds)

        tokens = SlotTokens(slots, range(adapters))

        def shrink(i: int, x=x, tokens=tokens) -> Any:  # type: ignore[no-untyped-def]
            return low_rank.shrink(x, low(i, tokens))

        inner = shrink(0)

        def expand(i: int, inner=inner, out=out, tokens=tokens) -> Any:  # type: ignore[no-untyped-def]
            low_rank.expand(inner, low(i, tokens), out, "silu" if matrix.gated else "")

        expand(0)
        torch.cuda.synchronize()
        first, second = (timer.time(run, copies, 3.0 + rows / 8) for run in (shrink, expand))
        read = [adapters * t[0][0].nbytes for t in (matrix.a, matrix.b)]
        shares = [size / max(us, 1e-3) / BANDWIDTH for size, us in zip(read, (first, second), strict=True)]
        say(
            "kernels", f"{rows:3} rows {adapters:2} adapters {matrix.name:8} apart",
            text=f"shrink {first:6.2f} us ({shares[0]:4.0%}), expand {second:6.2f} us ({shares[1]:4.0%})",
            us=[first, second],
        )  # fmt: skip


# Engines


class Bench:
    """An engine, and requests of it."""

    def __init__(self, args: argparse.Namespace, say: Callable[..., None], lora: bool) -> None:
        from quire import LLM

        self.args, self.say = args, say
        settings: dict[str, Any] = {
            "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 4096, "seed": 0,
            "device": args.device, "max_num_seqs": 256, "enable_prefix_caching": False,
        }  # fmt: skip
        if lora:
            settings |= {"enable_lora": True, "max_loras": SLOTS, "max_lora_rank": RANK, "max_cpu_loras": args.host}
        if args.quick:
            settings |= {"max_model_len": 256, "num_gpu_blocks_override": 512, "max_num_seqs": 16}
        begin = time.perf_counter()
        self.llm = LLM(args.model, **settings)
        say("start", "with adapters" if lora else "without", text=f"{time.perf_counter() - begin:.1f} s")
        self.engine = self.llm.llm_engine
        self.vocab = min(10_000, self.engine.info.model.vocab_size - 1)
        self.rng = random.Random(0)

    def prompt(self, tokens: int) -> dict[str, list[int]]:
        return {"prompt_token_ids": [self.rng.randint(0, self.vocab) for _ in range(tokens)]}

    def lora(self, number: int) -> Any:
        from quire.messages.lora import LoRARequest

        return LoRARequest(str(number), number + 1, str(Path(self.args.folder) / str(number)))

    def params(self, count: int, **more: Any) -> Any:
        from quire import SamplingParams

        return SamplingParams(
            **({"temperature": 0.6, "max_tokens": count, "ignore_eos": True, "detokenize": False} | more)
        )

    def seconds(self, requests: int, inputs: int, outputs: int, loras: Sequence[int]) -> float:
        """Of these requests; `loras`: adapters that they have in turn."""
        prompts = [self.prompt(inputs) for _ in range(requests)]
        chosen = [self.lora(loras[i % len(loras)]) for i in range(requests)] if loras else None
        begin = time.perf_counter()
        results = self.llm.generate(prompts, self.params(outputs), use_tqdm=False, lora_request=chosen)
        took = time.perf_counter() - begin
        failed = [result.error for result in results if result.error]
        if failed:
            raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")
        return took

    def throughput(self, name: str, loras: Sequence[int]) -> None:
        requests, inputs, outputs = (16, 8, 8) if self.args.quick else (256, 128, 512)
        self.seconds(requests, inputs, 24 if outputs > 24 else 4, loras)  # loads, captures
        took = min(self.seconds(requests, inputs, outputs, loras) for _ in range(self.args.repeats))
        value = requests * outputs / took
        self.say("256 x 128/512", name, text=f"{value:,.0f} tok/s", value=value)

    def single(self, name: str, loras: Sequence[int]) -> None:
        inputs, outputs = (8, 8) if self.args.quick else (512, 256)
        self.seconds(1, inputs, 24 if outputs > 24 else 4, loras)
        took = min(self.seconds(1, inputs, outputs, loras) for _ in range(2 * self.args.repeats))
        self.say("1 x 512/256", name, text=f"{1000 * took / outputs:.3f} ms a token", value=1000 * took / outputs)

    def profile(self, name: str, rows: int, loras: Sequence[int]) -> None:
        """Kernels of some decode steps by their time, of which the slowest are printed."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as found:
            self.seconds(rows, 16, 40, loras)
        events = sorted(found.key_averages(), key=lambda event: -event.device_time_total)[:14]
        for event in events:
            self.say(
                "profile", f"{name} {event.key[:60]}",
                text=f"{event.device_time_total / 1000:9.2f} ms, {event.count:6} x "
                f"{event.device_time_total / max(1, event.count):7.2f} us",
            )  # fmt: skip

    # Gaps

    def run(
        self,
        streams: Sequence[tuple[str, dict[str, Any], Any, Any]],
        later: list[tuple[str, dict[str, Any], Any, Any]],
        every: float,
        limit: float,
    ) -> tuple[dict[str, list[float]], dict[str, list[int]]]:
        """Step until all requests have ended; another of `later` comes each `every` seconds. Returns the times and the
        tokens of every request's outputs."""
        times: dict[str, list[float]] = {}
        tokens: dict[str, list[int]] = {}
        later = later[::-1]

        def add(request: tuple[str, dict[str, Any], Any, Any]) -> None:
            name, prompt, params, lora = request
            self.engine.add_request(name, prompt, params, lora_request=lora)
            times[name], tokens[name] = [], []

        for request in streams:
            add(request)
        begin = due = time.perf_counter()
        while (later or self.engine.has_unfinished_requests()) and time.perf_counter() - begin < limit:
            if later and time.perf_counter() >= due:
                add(later.pop())
                due += every
            for output in self.engine.step():
                if output.error:
                    raise RuntimeError(f"request {output.request_id} failed: {output.error}")
                new = [token for sample in output.outputs for token in sample.token_ids]
                if new:
                    times[output.request_id].append(time.perf_counter())
                    tokens[output.request_id] += new
        if self.engine.has_unfinished_requests():
            self.engine.abort_request(list(times))
            while self.engine.has_unfinished_requests():
                self.engine.step()
            self.say("limit", "", text=f"requests were aborted after {limit:.0f} s")
        return times, tokens

    def register(self, numbers: Sequence[int]) -> None:
        """Check and hash adapters, as a front does before an engine sees their requests."""
        begin = time.perf_counter()
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda number: self.engine.adapters.add(self.lora(number)), numbers))
        took = time.perf_counter() - begin
        self.say(
            "register",
            f"{len(numbers)} adapters",
            text=f"{took:.1f} s, 8 threads: {1000 * took / len(numbers):.0f} ms each",
        )

    def gaps(self, case: str, fresh: Sequence[int] | None) -> None:
        """Gaps of streams while requests come; `fresh`: adapters that have to be loaded, None: loaded ones."""
        from quire.messages.sampling import RequestOutputKind

        delta = {"output_kind": RequestOutputKind.DELTA}
        count, length, new = (4, 24, 6) if self.args.quick else (32, 600, 24)
        streams = [
            (f"stream {case} {i}", self.prompt(16), self.params(length, **delta), self.lora(i % 4))
            for i in range(count)
        ]
        numbers = [i % 4 for i in range(new)] if fresh is None else list(fresh)[:new]
        later = [
            (f"new {case} {i}", self.prompt(32), self.params(2, **delta), self.lora(n)) for i, n in enumerate(numbers)
        ]
        before = self.engine.core.scheduler.requests.adapters.stats
        loads, spent = before.loads, before.load_seconds
        begin = time.perf_counter()
        times, _ = self.run(streams, later, 0.01 if self.args.quick else 0.12, 30.0)
        found = sorted(gap for name, own in times.items() if name.startswith("stream") for gap in _differences(own))
        after = self.engine.core.scheduler.requests.adapters.stats
        made = after.loads - loads
        p50, p99, most = (1000 * found[min(len(found) - 1, int(len(found) * q))] for q in (0.5, 0.99, 1.0))
        text = f"gaps p50 {p50:.2f} ms, p99 {p99:.2f}, longest {most:.1f}, {time.perf_counter() - begin:.1f} s"
        if made:
            text += f"; {made} loads, {1000 * (after.load_seconds - spent) / made:.0f} ms each"
        self.say("load", case, text=text, value=p99, p50=p50, most=most)

    def many(self) -> None:
        from quire.messages.sampling import RequestOutputKind

        total, checked, length = (12, 2, 8) if self.args.quick else (256, 24, 96)
        numbers = self.rng.sample(range(self.args.adapters), min(total, self.args.adapters))
        self.register(numbers)
        delta = {"output_kind": RequestOutputKind.DELTA, "temperature": 0}
        requests = [(f"many {n}", self.prompt(64), self.params(length, **delta), self.lora(n)) for n in numbers]
        warm = [(f"warm {n}", self.prompt(64), self.params(40, **delta), self.lora(n % 4)) for n in range(64)]
        self.run(warm, [], 0.0, 30.0)
        stats = self.engine.core.scheduler.requests.adapters.stats
        loads, spent, begin = stats.loads, stats.load_seconds, time.perf_counter()
        times, tokens = self.run(requests, [], 0.0, self.args.many_seconds)
        took = time.perf_counter() - begin
        gaps = sorted(gap for own in times.values() for gap in _differences(own))
        p50, p99, most = (1000 * gaps[min(len(gaps) - 1, int(len(gaps) * q))] for q in (0.5, 0.99, 1.0))
        over = sum(gap > 0.05 for gap in gaps)
        made = stats.loads - loads
        self.say(
            "many", f"{len(numbers)} requests",
            text=f"{took:.1f} s, {made} loads of {1000 * (stats.load_seconds - spent) / max(1, made):.0f} ms; gaps p50 "
            f"{p50:.2f} ms, p99 {p99:.2f}, longest {most:.1f}, {over} of {len(gaps)} over 50 ms; "
            f"{sum(len(own) == length for own in tokens.values())} complete",
            value=most,
        )  # fmt: skip
        self._check_alone([(r, tokens[r[0]]) for r in self.rng.sample(requests, checked) if tokens[r[0]]])

    def _check_alone(self, answered: Sequence[tuple[Any, list[int]]]) -> None:
        """Each again, alone: the same tokens up to a near tie; and other tokens than the base's."""
        equal, ties, wrong, as_base = 0, 0, [], 0
        for (name, prompt, _, lora), tokens in answered:
            params = self.params(min(len(tokens), 24), temperature=0, logprobs=2)
            (alone,) = self.llm.generate([prompt], params, use_tqdm=False, lora_request=lora)
            (base,) = self.llm.generate([prompt], self.params(4, temperature=0), use_tqdm=False)
            sample = alone.outputs[0]
            own = list(sample.token_ids)
            as_base += list(base.outputs[0].token_ids) == own[:4]
            at = next((i for i, (a, b) in enumerate(zip(own, tokens, strict=False)) if a != b), None)
            if at is None:
                equal += 1
                continue
            entry = sample.logprobs[at]
            gap = entry[own[at]].logprob - entry[tokens[at]].logprob if tokens[at] in entry else float("inf")
            if gap < TIE:
                ties += 1
            else:
                wrong.append(f"{name} at {at} by {gap:.3f}")
        self.say(
            "many", "answers",
            text=f"{equal} of {len(answered)} as alone, {ties} up to a near tie, {len(wrong)} WRONG {wrong[:3]}; "
            f"{as_base} begin as the base's",
            wrong=len(wrong),
        )  # fmt: skip


def _differences(times: Sequence[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(times)]


def run_parts(args: argparse.Namespace, say: Callable[..., None]) -> None:
    """The parts of one process."""

    def guarded(name: str, run: Callable[[], None]) -> None:
        try:
            run()
        except Exception as error:
            traceback.print_exc()
            say("FAILED", name, text=f"{type(error).__name__}: {error}"[:300])

    if "kernels" in args.parts:
        guarded("kernels", lambda: time_kernels(args, say))
        return
    if args.in_turn:
        from quire.kernels.triton import low_rank

        low_rank.OVERLAPS = False
    bench = Bench(args, say, lora="off" not in args.parts)
    if "off" in args.parts:
        guarded("off 1", lambda: bench.single("off", ()))
        guarded("off 256", lambda: bench.throughput("off", ()))
        guarded("off 256", lambda: bench.throughput("off", ()))
    if "speed" in args.parts:
        guarded("none 1", lambda: bench.single("none", ()))
        guarded("1 adapter, 1", lambda: bench.single("1 adapter", [0]))
        guarded("register", lambda: bench.register(range(SLOTS)))
        cases = (("none", 0), ("1 adapter", 1), ("8 adapters", 8), ("64 adapters", 64), ("none, again", 0))
        for name, count in cases:
            guarded(name, lambda name=name, count=count: bench.throughput(name, range(count)))  # type: ignore[misc]
        if args.profile:
            for rows, count in ((1, 1), (256, 1), (256, 64)):
                guarded("profile", lambda r=rows, n=count: bench.profile(f"{r} rows {n}", r, range(n)))  # type: ignore[misc]
    if "load" in args.parts:
        fresh = range(SLOTS, min(args.adapters, SLOTS + 48))
        guarded("register", lambda: bench.register([*range(4), *fresh]))
        for case, numbers in (
            ("warm", None),
            ("none loads", None),
            ("while loading", fresh[24:]),
            ("none again", None),
        ):
            guarded(case, lambda case=case, numbers=numbers: bench.gaps(case, numbers))  # type: ignore[misc]
    if "many" in args.parts:
        guarded("many", bench.many)
    bench.llm.shutdown()


# The parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--model", default=str(HERE / "models" / "llama-3.1-8b"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--adapters", type=int, default=1000, help="folders on disk")
    parser.add_argument("--host", type=int, default=320, help="adapters kept in host memory")
    parser.add_argument(
        "--many-seconds", type=float, default=60.0, help="requests of `many` that take longer are aborted"
    )
    parser.add_argument(
        "--folder", default="", help="adapters that a run before this one wrote, or where to write them"
    )
    parser.add_argument("--profile", action="store_true", help="after `speed`: which kernels the steps take longest in")
    parser.add_argument("--quick", action="store_true", help="few and short requests: only whether it runs")
    parser.add_argument(
        "--in-turn", action="store_true", help="captured steps shrink before the product, not beside it"
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        run_parts(args, lambda *names, **values: print("RESULT " + json.dumps([*names, values]), flush=True))
        return
    begin, results = time.perf_counter(), list[list[Any]]()
    root = Path(args.folder or tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    try:
        if not (root / "0").exists() and {"speed", "load", "many"} & set(args.parts):
            root.mkdir(exist_ok=True)
            write_adapters(root, json.loads((Path(args.model) / "config.json").read_text()), args.adapters, RANK)
            print(f"{args.adapters} adapters on disk after {time.perf_counter() - begin:.1f} s", flush=True)
        for group in PROCESSES:
            if wanted := [part for part in group if part in args.parts]:
                helps = all(values["helps"] for kind, _, values in results if kind == "overlap")
                more = [] if helps else ["--in-turn"]
                results += run_process(wanted, str(root), LIMITS[wanted[0]], more)
    finally:
        if not args.folder:
            shutil.rmtree(root, ignore_errors=True)
    report(results, time.perf_counter() - begin)


def run_process(parts: Sequence[str], folder: str, limit: float, more: Sequence[str]) -> list[list[Any]]:
    """Run parts in a process; returns its results, printed as they come."""
    command = [sys.executable, "-m", "benchmarks.gpu.adapters", *_without(sys.argv[1:], ("--parts", "--folder"))]
    command += ["--child", "--folder", folder, *more, "--parts", *parts]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=HERE.parent.parent)
    watch = threading.Timer(limit, process.kill)
    watch.start()
    results: list[list[Any]] = []
    assert process.stdout is not None
    for line in process.stdout:
        if not line.startswith("RESULT "):
            print(line, end="", flush=True)
            continue
        results.append(json.loads(line.removeprefix("RESULT ")))
        kind, name, values = results[-1]
        print(f"  {kind:14} {name:36} {values.get('text', '')}", flush=True)
    code = process.wait()
    watch.cancel()
    if code:
        results.append(["FAILED", " ".join(parts), {"text": f"exit status {code} (-9: longer than {limit} s)"}])
    return results


def _without(given: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Arguments without these flags and their values."""
    kept, skips = [], False
    for arg in given:
        if arg.startswith("--"):
            skips = arg in flags
        if not skips:
            kept.append(arg)
    return kept


def report(results: Sequence[Sequence[Any]], seconds: float) -> None:
    """The table, and the file."""
    if os.environ.get("OUT"):
        (Path(os.environ["OUT"]) / "adapters.json").write_text(json.dumps(results, indent=1))
    print("\n-- table")
    offs: dict[str, list[float]] = {}
    for kind, name, values in results:
        if name == "off":
            offs.setdefault(kind, []).append(values["value"])
    for kind, name, values in results:
        if kind in ("start", "profile") or (kind == "kernels" and "a layer" not in name):
            continue
        ratio = ""
        if kind in offs:
            ratio = f"  {values['value'] / (sum(offs[kind]) / len(offs[kind])):.3f} of off"
        print(f"{kind:14} {name:36} {values.get('text', '')}{ratio}")
    print(f"{seconds:.0f} s")


if __name__ == "__main__":
    main()
