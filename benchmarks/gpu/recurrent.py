"""Recurrent layers on a GPU: gated delta net and Mamba 2, checked against plain torch and timed in CUDA graphs.

    python -m benchmarks.gpu.recurrent [--quick]

Shapes of Qwen3.5-35B-A3B (32 value heads, 16 key heads, 128 x 128) and of Nemotron-H-8B (128 heads in 8 groups,
64 x 128). Decodes: microseconds of a layer and the share of memory bandwidth, over states that are not in L2. Drafts:
microseconds of a layer to verify them and to commit the tokens that count, beside a plain decode; outputs and states
must have the bits of plain decodes. Prompts: microseconds of a layer, by variants of the kernels, and of each kernel.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from quire.kernels.reference import TorchOps
from quire.kernels.states import StateReplay
from quire.kernels.triton.launch import let_threads_launch
from quire.kernels.triton.ops import TritonOps
from quire.kernels.triton.recurrent import commit, decode, delta_net, mamba2
from quire.kernels.triton.recurrent.decode import DecodeConfig
from quire.kernels.triton.recurrent.delta_net import DeltaNetConfig
from quire.kernels.triton.recurrent.mamba2 import Mamba2Config
from quire.kernels.triton.skinny_gemm.timing import GraphTimer, raise_clocks
from quire.layers.attention.base import AttentionInputs
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
DRAFTS = {
    "delta": [DecodeConfig(8, 128), DecodeConfig(8, 168), DecodeConfig(8, 192)],
    "mamba": [DecodeConfig(4, 128), DecodeConfig(4, 168), DecodeConfig(4, 255)],
}
"""Of as many warps as a plain decode has, so that sums have the same order."""
COMMITS = [(32, 4), (32, 2), (64, 4), (64, 8)]
"""Value dimensions and warps of a program."""
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


def kernel_of(name: str) -> Callable[..., None]:
    return decode.delta_net_decode if name == "delta" else decode.mamba2_decode


def cold_states(layer: Any, rows: int) -> tuple[Any, Sequence[torch.Tensor], int]:
    """(states, tables of as many steps as exceed L2, bytes of the state of a row)."""
    parts = state_parts(layer, DTYPE)
    state = parts[0].count * parts[0].piece_bytes
    copies = max(2, -(-COLD_BYTES // (rows * state)))
    view, tables = random_states(parts, rows * copies, PAGE, "cuda")
    return view, tables.split(rows), state


def decode_times(name: str, layer: Any, rows: int, timer: GraphTimer) -> list[str]:
    """Microseconds of each variant."""
    view, tables, state = cold_states(layer, rows)
    steps = [step_of(part, [1] * rows, [1000] * rows) for part in tables]
    x = random_inputs(layer, rows, DTYPE)
    out = x.new_empty(rows, layer.width)
    found = []
    for config in DECODES[name]:

        def chain(config: DecodeConfig = config) -> None:
            for step in steps:
                kernel_of(name)(x, layer, view, step, out, rows, True, config)

        us = timer.replay(chain) / len(steps)
        share = 2 * rows * state / us / 1e3 / BANDWIDTH
        found.append(f"{us:8.1f} ({share:4.0%})")
    return found


def verifying(tables: torch.Tensor, widths: Sequence[int], contexts: Sequence[int]) -> AttentionInputs:
    """A step of rows that verify drafts, whose last tokens are at `contexts`."""
    step = step_of(tables, widths, contexts)
    return replace(
        step, num_decodes=0, num_verifying=len(widths), width=max(widths), num_verified=sum(widths),
        replay=StateReplay(),
    )  # fmt: skip


def check_drafts(name: str, layer: Any) -> None:
    """Bits of outputs and states against plain decodes."""
    widths, begins, accepted = [4, 1, 8, 3, 2], [900, 2, 77, 0, 11], [2, 1, 8, 3, 0]
    view, tables = random_states(state_parts(layer, DTYPE), len(widths), PAGE, "cuda")
    view.write(0, tables, 0.1 * view.read(0, tables))
    plain = copied(view)
    step = verifying(tables, widths, [begin + width for begin, width in zip(begins, widths, strict=True)])
    x = random_inputs(layer, sum(widths), DTYPE)
    out = x.new_empty(sum(widths), layer.width)
    kernel_of(name)(x, layer, view, step, out, len(widths), False)
    assert step.replay is not None
    untouched = torch.equal(view.memory, plain.memory)
    step.replay.commit(torch.tensor(accepted, dtype=torch.int32, device="cuda"))
    starts = step.query_starts.tolist()
    outputs, states = [], []
    for place in range(max(widths) + 1):
        for row in (row for row in range(len(widths)) if accepted[row] == place):
            own = tables[row : row + 1]
            states += [torch.equal(view.read(part, own), plain.read(part, own)) for part in range(2)]
        left = [row for row in range(len(widths)) if widths[row] > place]
        if not left:
            break
        tokens = [starts[row] + place for row in left]
        decodes = step_of(tables[left], [1] * len(left), [begins[row] + place + 1 for row in left])
        expected = x.new_empty(len(left), layer.width)
        kernel_of(name)(x[tokens], layer, plain, decodes, expected, len(left))
        outputs += (out[tokens] == expected).all(1).tolist()
    print(
        f"{name} drafts: states untouched {untouched}; bits of plain decodes: "
        f"{sum(outputs)} of {len(outputs)} outputs, {sum(states)} of {len(states)} states and rings",
        flush=True,
    )
    if not untouched:
        raise SystemExit(f"{name}: verification changed states")


def draft_times(name: str, layer: Any, rows: int, width: int, timer: GraphTimer) -> str:
    """Microseconds of a plain decode, of verification by variant, and of the commit by variant."""
    view, tables, _ = cold_states(layer, rows)
    x = random_inputs(layer, rows * width, DTYPE)
    out = x.new_empty(rows * width, layer.width)
    accepted = torch.full((rows,), width, dtype=torch.int32, device="cuda")
    plain_steps = [step_of(part, [1] * rows, [1000] * rows) for part in tables]
    steps = [verifying(part, [width] * rows, [1000] * rows) for part in tables]

    def plain() -> None:
        for step in plain_steps:
            kernel_of(name)(x, layer, view, step, out, rows)

    def verify(config: DecodeConfig, commits: bool) -> None:
        for step in steps:
            step.replay = StateReplay()
            kernel_of(name)(x, layer, view, step, out, rows, False, config)
        for step in steps if commits else ():
            assert step.replay is not None
            step.replay.commit(accepted)

    base = timer.replay(plain) / len(steps)
    alone = [timer.replay(partial(verify, config, False)) / len(steps) for config in DRAFTS[name]]
    best = DRAFTS[name][alone.index(min(alone))]
    commits = []
    for values, warps in COMMITS:
        commit.VALUES, commit.WARPS = values, warps
        commits.append(timer.replay(partial(verify, best, True)) / len(steps) - min(alone))
    total = (min(alone) + min(commits)) / base
    times = "  ".join(f"{us:6.1f}" for us in alone), "  ".join(f"{us:6.1f}" for us in commits)
    return (
        f"  {rows:4} rows x {width}: plain {base:6.1f}  verify {times[0]}  commit {times[1]}  both {total:.2f} x plain"
    )


def warm_up(tasks: Sequence[Callable[[], None]]) -> None:
    """Compile in parallel."""
    let_threads_launch()
    with ThreadPoolExecutor(12) as pool:
        for done in [pool.submit(task) for task in tasks]:
            done.result()
    torch.cuda.synchronize()


def prompt_kernel(name: str) -> Callable[..., None]:
    return delta_net.delta_net_prompts if name == "delta" else mamba2.mamba2_prompts


def tasks_of(name: str, layer: Any) -> list[Callable[[], None]]:
    """One launch of each variant."""
    view, tables = random_states(state_parts(layer, DTYPE), 1, PAGE, "cuda")
    step, x = step_of(tables, [1], [100]), random_inputs(layer, 1, DTYPE)
    out = x.new_empty(1, layer.width)
    tasks: list[Callable[[], None]] = []
    tasks += [partial(kernel_of(name), x, layer, view, step, out, 1, True, config) for config in DECODES[name]]
    step = verifying(tables, [1], [100])
    tasks += [partial(kernel_of(name), x, layer, view, step, out, 1, False, config) for config in DRAFTS[name]]
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
    parser.add_argument("--drafts", action="store_true", help="only decodes and drafts")
    arguments = parser.parse_args()
    quick = arguments.quick
    torch.manual_seed(0)
    known = layers()
    warm_up([task for name, layer in known.items() for task in tasks_of(name, layer)])
    with torch.inference_mode():
        for name, layer in known.items():
            check(name, layer)
            check_drafts(name, layer)
        raise_clocks()
        timer = GraphTimer(replays=4)
        for name, layer in () if arguments.drafts else known.items():
            for rows, tokens in ((1, 2048), (16, 512)) if quick else ((1, 2048), (1, 8192), (16, 512)):
                prompt_times(name, layer, rows, tokens, timer)
        lines = []
        for name, layer in known.items():
            heads = "  ".join(f"{c.warps} warps {c.registers}" for c in DECODES[name])
            lines.append(f"{name}: us of a decode (share of {BANDWIDTH:.0f} GB/s), by variant: {heads}")
            sizes = (1, 64) if quick else (1, 8, 64, 256)
            lines += [f"  {rows:4} rows: {' '.join(decode_times(name, layer, rows, timer))}" for rows in sizes]
            registers = [config.registers for config in DRAFTS[name]]
            lines.append(
                f"{name}: us with drafts; verify by registers {registers}, commit by (values, warps) {COMMITS}"
            )
            for rows in (1, 64):
                lines += [draft_times(name, layer, rows, width, timer) for width in (1, 2, 4)]
    print("\n" + "\n".join(lines))


if __name__ == "__main__":
    main()
