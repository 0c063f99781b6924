"""Recurrent layers on a GPU: gated delta net and Mamba 2, checked against plain torch and timed in CUDA graphs.

    python -m benchmarks.gpu.recurrent [--quick]

Shapes of Qwen3.5-35B-A3B (32 value heads, 16 key heads, 128 x 128) and of Nemotron-H-8B (128 heads in 8 groups,
64 x 128). Decodes: microseconds of a layer and the share of memory bandwidth, over states that are not in L2. Prompts:
microseconds of a layer, by variants of the kernels, and of each kernel.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from quire.kernels.reference import TorchOps
from quire.kernels.triton.launch import let_threads_launch
from quire.kernels.triton.ops import TritonOps
from quire.kernels.triton.recurrent import decode, delta_net, mamba2
from quire.kernels.triton.recurrent.decode import DecodeConfig
from quire.kernels.triton.recurrent.delta_net import DeltaNetConfig
from quire.kernels.triton.recurrent.mamba2 import Mamba2Config
from quire.kernels.triton.skinny_gemm.timing import GraphTimer, raise_clocks
from tests.kernels.recurrent_inputs import (
    copied,
    random_delta_net,
    random_inputs,
    random_mamba2,
    random_states,
    state_parts,
    step_of,
)

DTYPE = torch.bfloat16
BANDWIDTH = 4300.0
"""GB/s of an H200, measured."""
COLD_BYTES = 150 << 20
PAGE = 320 << 10
DECODES = {
    "delta": [
        DecodeConfig(8, 128), DecodeConfig(4, 255), DecodeConfig(8, 168), DecodeConfig(16, 112),
    ],
    "mamba": [DecodeConfig(8, 80), DecodeConfig(8, 128), DecodeConfig(4, 128), DecodeConfig(4, 168)],
}  # fmt: skip
PROMPTS: dict[str, list[Any]] = {
    "delta": [
        DeltaNetConfig(scan_stages=3),
        DeltaNetConfig(scan_values=64),
        DeltaNetConfig(scan_values=64, scan_stages=3),
        DeltaNetConfig(scan_values=64, scan_stages=1),
        DeltaNetConfig(scan_stages=3, solve_warps=8),
    ],
    "mamba": [Mamba2Config(8, 3), Mamba2Config(4, 1), Mamba2Config(8, 1)],
}


def layers() -> dict[str, Any]:
    return {
        "delta": random_delta_net(16, 32, 128, 128, DTYPE, "cuda"),
        "mamba": random_mamba2(128, 8, 64, 128, DTYPE, "cuda"),
    }


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the difference, relative to the values."""
    return ((actual.float() - expected.float()).norm() / expected.float().norm()).item()


def check(name: str, layer: Any) -> None:
    """A step of decodes and prompts with earlier states: outputs and states."""
    counts, contexts = [1, 1, 300, 64, 5, 700], [1000, 1, 1300, 64, 7, 700]
    view, tables = random_states(state_parts(layer, DTYPE), len(counts), PAGE, "cuda")
    view.write(0, tables, 0.1 * view.read(0, tables))
    step = step_of(tables, counts, contexts, in_batch=True)
    x = random_inputs(layer, sum(counts), DTYPE)
    expected_view = copied(view)
    op = "delta_net" if name == "delta" else "mamba2"
    expected = getattr(TorchOps(), op)(x, layer, expected_view, step)
    step.plans.clear()
    out = getattr(TritonOps(), op)(x, layer, view, step)
    torch.cuda.synchronize()
    errors = [error(out[:2], expected[:2]), error(out[2:], expected[2:])]
    errors += [error(view.read(part, tables), expected_view.read(part, tables)) for part in range(2)]
    text = "decodes {:.1e}, prompts {:.1e}, states {:.1e}, rings {:.1e}".format(*errors)
    print(f"{name}: relative errors of {text}", flush=True)
    if not max(errors) < 2e-2 or errors[3] > 0:
        raise SystemExit(f"{name}: wrong results")


def decode_times(name: str, layer: Any, rows: int, queries: int, timer: GraphTimer) -> list[str]:
    """Microseconds of each variant."""
    parts = state_parts(layer, DTYPE, queries)
    state = sum(part.count * part.piece_bytes for part in parts[:1])
    copies = max(2, -(-COLD_BYTES // (rows * state)))
    view, tables = random_states(parts, rows * copies, PAGE, "cuda")
    steps = [step_of(part, [queries] * rows, [1000] * rows) for part in tables.split(rows)]
    x = random_inputs(layer, rows * queries, DTYPE)
    out = x.new_empty(rows * queries, layer.width)
    kernel: Callable[..., None] = decode.delta_net_decode if name == "delta" else decode.mamba2_decode
    found = []
    for config in DECODES[name]:

        def chain(config: DecodeConfig = config) -> None:
            for step in steps:
                kernel(x, layer, view, step, out, rows, queries == 1, config)

        us = timer.replay(chain) / len(steps)
        share = 2 * rows * state / us / 1e3 / BANDWIDTH
        found.append(f"{us:8.1f} ({share:4.0%})")
    return found


def warm_up(tasks: Sequence[Callable[[], None]]) -> None:
    """Compile in parallel."""
    let_threads_launch()
    with ThreadPoolExecutor(12) as pool:
        for done in [pool.submit(task) for task in tasks]:
            done.result()
    torch.cuda.synchronize()


def prompt_kernel(name: str) -> Callable[..., None]:
    return delta_net.delta_net_prompts if name == "delta" else mamba2.mamba2_prompts


def tasks_of(name: str, layer: Any, queries: Sequence[int]) -> list[Callable[[], None]]:
    """One launch of each variant."""
    tasks: list[Callable[[], None]] = []
    for count in queries:
        view, tables = random_states(state_parts(layer, DTYPE, count), 1, PAGE, "cuda")
        step, x = step_of(tables, [count], [100]), random_inputs(layer, count, DTYPE)
        kernel = decode.delta_net_decode if name == "delta" else decode.mamba2_decode
        out = x.new_empty(count, layer.width)
        tasks += [partial(kernel, x, layer, view, step, out, 1, count == 1, config) for config in DECODES[name]]
    view, tables = random_states(state_parts(layer, DTYPE), 1, PAGE, "cuda")
    step, x = step_of(tables, [100], [100]), random_inputs(layer, 100, DTYPE)
    out = x.new_empty(100, layer.width)
    return [*tasks, *(partial(prompt_kernel(name), x, layer, view, step, out, config) for config in PROMPTS[name])]


def prompt_times(name: str, layer: Any, rows: int, tokens: int, timer: GraphTimer) -> None:
    """Microseconds of each variant, its error, and of each kernel of the first."""
    view, tables = random_states(state_parts(layer, DTYPE), rows, PAGE, "cuda")
    view.write(0, tables, 0.1 * view.read(0, tables))
    step = step_of(tables, [tokens] * rows, [tokens + 7] * rows)
    x = random_inputs(layer, rows * tokens, DTYPE)
    expected = None
    if rows * tokens <= 2048:
        op = TorchOps().delta_net if name == "delta" else TorchOps().mamba2
        expected = op(x, layer, copied(view), step)
        step.plans.clear()
    before = view.memory.clone()
    print(f"\n{name} prompts {rows} x {tokens}")
    for config in PROMPTS[name]:
        out = x.new_empty(rows * tokens, layer.width)
        view.memory.copy_(before)
        prompt_kernel(name)(x, layer, view, step, out, config)
        far = "" if expected is None else f"  error {error(out, expected):.1e}"
        us = timer.replay(partial(prompt_kernel(name), x, layer, view, step, out, config))
        print(f"  {us:8.1f} us{far}  {config}", flush=True)
    out = x.new_empty(rows * tokens, layer.width)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            prompt_kernel(name)(x, layer, view, step, out, PROMPTS[name][0])
        torch.cuda.synchronize()
    for event in profile.key_averages():
        if event.key.startswith("_"):
            print(f"    {event.key:16} {event.device_time_total / 3:8.1f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer shapes")
    quick = parser.parse_args().quick
    torch.manual_seed(0)
    known = layers()
    queries = [1] if quick else [1, 4]
    warm_up([task for name, layer in known.items() for task in tasks_of(name, layer, queries)])
    with torch.inference_mode():
        for name, layer in known.items():
            check(name, layer)
        raise_clocks()
        timer = GraphTimer(replays=4)
        for name, layer in known.items():
            for rows, tokens in ((1, 2048), (16, 512)) if quick else ((1, 2048), (1, 8192), (16, 512)):
                prompt_times(name, layer, rows, tokens, timer)
        lines = []
        for name, layer in known.items():
            heads = "  ".join(f"{c.warps} warps {c.registers}" for c in DECODES[name])
            lines.append(f"{name}: us of a decode (share of {BANDWIDTH:.0f} GB/s), by variant: {heads}")
            for count in queries:
                for rows in (1, 64) if quick else (1, 8, 64, 256):
                    times = " ".join(decode_times(name, layer, rows, count, timer))
                    lines.append(f"  {rows:4} rows x {count}: {times}")
    print("\n" + "\n".join(lines))


if __name__ == "__main__":
    main()
