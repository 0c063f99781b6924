"""Short convolutions, Mamba 1 scans and ALiBi on a GPU: checked against plain torch and timed in CUDA graphs.

    python -m benchmarks.gpu.lfm2 [--quick]

Shapes of LFM2-2.6B (2048 channels, 3 taps), Jamba 1.5 Mini (8192 channels, 16 states) and Bloom-7B (32 heads of 128).
Microseconds of a layer; of scans also the share of memory bandwidth that their states take, over states not in L2.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from quire.kernels.reference import TorchOps
from quire.kernels.states import ShortConv
from quire.kernels.triton.ops import TritonOps
from quire.kernels.triton.recurrent.mamba import DECODE, PROMPT, ScanConfig, mamba
from quire.kernels.triton.skinny_gemm.timing import GraphTimer, raise_clocks
from quire.layers.attention.base import AttentionInputs, AttentionSpec
from quire.layers.attention.torch_paged import TorchPagedAttention
from quire.layers.attention.triton import TritonPagedAttention
from quire.layers.caches import StatePart, StateView
from tests.kernels.recurrent_inputs import (
    copied,
    random_inputs,
    random_mamba,
    random_short_conv,
    random_states,
    step_of,
)

DTYPE = torch.bfloat16
BANDWIDTH = 4300.0
"""GB/s of an H200, measured."""
COLD_BYTES = 150 << 20
PAGE = 256 << 10
CHANNELS, STATE, PIECE = 8192, 16, 32
SCANS = [PROMPT, ScanConfig(8, 4), ScanConfig(16, 8), ScanConfig(4, 4), ScanConfig(8, 2), ScanConfig(1, 1)]
DECODES = [DECODE, ScanConfig(1, 2), ScanConfig(1, 4)]


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the difference, relative to the values."""
    return ((actual.float() - expected.float()).norm() / expected.float().norm()).item()


class Convolution:
    """A layer, and what a step of it takes."""

    def __init__(self, gated: bool) -> None:
        channels, taps = (2048, 3) if gated else (CHANNELS, 4)
        made = random_short_conv(channels, DTYPE, "cuda", taps, bias=not gated)
        self.layer = ShortConv(made.conv, made.bias, gated)
        self.part = StatePart(channels // 256, (taps, 256), DTYPE)

    def run(self, ops: TorchOps, x: torch.Tensor, view: StateView, step: AttentionInputs) -> torch.Tensor:
        return ops.short_conv(x, self.layer, view, step)

    def inputs(self, tokens: int) -> torch.Tensor:
        return random_inputs(self.layer, tokens, DTYPE)


class Scan:
    """The same of a selective scan; its inputs are x | dt | B | C | x | z."""

    def __init__(self) -> None:
        self.layer = random_mamba(CHANNELS, STATE, "cuda")
        self.part = StatePart(CHANNELS // PIECE, (STATE, PIECE), torch.float32)

    def split(self, x: torch.Tensor) -> Sequence[Any]:
        """x, dt, B, C, and x | z."""
        return x.split([CHANNELS, CHANNELS, STATE, STATE, 2 * CHANNELS], dim=1)

    def run(self, ops: TorchOps, x: torch.Tensor, view: StateView, step: AttentionInputs) -> torch.Tensor:
        return ops.mamba(*self.split(x), self.layer, view, step)

    def inputs(self, tokens: int) -> torch.Tensor:
        return torch.randn(tokens, 4 * CHANNELS + 2 * STATE, device="cuda").to(DTYPE)


def check(name: str, kind: Convolution | Scan) -> None:
    """A step of decodes and prompts with earlier states: outputs and states."""
    counts, contexts = [1, 1, 300, 64, 2, 5], [1000, 1, 1300, 64, 2, 7]
    view, tables = random_states([kind.part], len(counts), PAGE, "cuda")
    step = step_of(tables, counts, contexts, in_batch=True)
    x = kind.inputs(sum(counts))
    expected_view = copied(view)
    expected = kind.run(TorchOps(), x, expected_view, step)
    step.plans.clear()
    out = kind.run(TritonOps(), x, view, step)
    errors = [error(out, expected), error(view.read(0, tables), expected_view.read(0, tables))]
    print(f"{name}: relative errors of outputs {errors[0]:.1e}, states {errors[1]:.1e}", flush=True)
    if not max(errors) < 1e-2:
        raise SystemExit(f"{name}: wrong results")


def convolution_times(kind: Convolution, rows: int, tokens: int, timer: GraphTimer) -> float:
    view, tables = random_states([kind.part], rows, PAGE, "cuda")
    step = step_of(tables, [tokens] * rows, [tokens + 7] * rows)
    x = kind.inputs(rows * tokens)
    kind.run(TritonOps(), x, view, step)
    again: Any = partial(kind.run, TritonOps(), x, view, step)
    return timer.replay(again)


def scan_times(kind: Scan, rows: int, tokens: int, configs: Sequence[ScanConfig], timer: GraphTimer) -> list[str]:
    """Microseconds of each variant."""
    state = kind.part.count * kind.part.piece_bytes
    copies = max(2, -(-COLD_BYTES // (rows * state))) if tokens == 1 else 1
    view, tables = random_states([kind.part], rows * copies, PAGE, "cuda")
    steps = [step_of(part, [tokens] * rows, [tokens + 7] * rows) for part in tables.split(rows)]
    parts = kind.split(kind.inputs(rows * tokens))
    found = []
    for config in configs:

        def chain(config: ScanConfig = config) -> None:
            for step in steps:
                mamba(*parts, kind.layer, view, step, decode=config, prompt=config)

        chain()
        us = timer.replay(chain) / len(steps)
        found.append(f"{us:8.1f} ({2 * rows * state / us / 1e3 / BANDWIDTH:4.0%})")
    return found


def attention_step(rows: int, queries: int, context: int) -> tuple[torch.Tensor, torch.Tensor, AttentionInputs]:
    """Queries, a cache and a step of rows with `queries` tokens that end at `context`."""
    blocks = context // 16
    tables = (torch.randperm(rows * blocks, device="cuda") + 1).view(rows, blocks).int()
    kv = torch.randn(rows * blocks + 1, 2, 32, 16, 128, device="cuda", dtype=DTYPE)
    q = torch.randn(rows * queries, 32, 128, device="cuda", dtype=DTYPE)
    return q, kv, step_of(tables, [queries] * rows, [context] * rows, in_batch=True)


def attention_times(rows: int, queries: int, context: int, timer: GraphTimer, checked: bool) -> list[str]:
    """Microseconds without and with slopes."""
    found = []
    slopes = 2.0 ** (-torch.arange(1, 33, device="cuda") / 4)
    for each in (None, slopes):
        q, kv, step = attention_step(rows, queries, context)
        backend, spec = TritonPagedAttention(), AttentionSpec(128**-0.5, slopes=each)
        backend.prepare(32, kv, step, spec)
        out = backend.attend(q, kv, step, spec)
        if checked and (far := error(out, TorchPagedAttention().attend(q, kv, step, spec))) > 1e-2:
            raise SystemExit(f"attention with slopes {each is not None}: error {far:.1e}")
        attend: Any = partial(backend.attend, q, kv, step, spec)
        found.append(f"{timer.replay(attend):8.1f}")
    return found


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer shapes")
    quick = parser.parse_args().quick
    torch.manual_seed(0)
    gated, plain, scan = Convolution(True), Convolution(False), Scan()
    for name, kind in (("gated convolution", gated), ("convolution", plain), ("scan", scan)):
        check(name, kind)
    raise_clocks()
    timer = GraphTimer(replays=4)
    lines = ["convolutions: us of LFM2's, of Jamba's"]
    for rows, tokens in ((1, 1), (256, 1), (1, 2048)):
        times = [f"{convolution_times(kind, rows, tokens, timer):8.1f}" for kind in (gated, plain)]
        lines.append(f"  {rows:4} x {tokens:5}: {' '.join(times)}")
    for name, configs, shapes in (
        ("decodes", DECODES, ((1, 1), (64, 1), (256, 1))),
        ("prompts", SCANS, ((1, 2048), (16, 512))),
    ):
        heads = "  ".join(f"{c.tokens} tokens {c.warps} warps" for c in configs)
        lines.append(f"scans, {name}: us (states' share of {BANDWIDTH:.0f} GB/s), by variant: {heads}")
        for rows, tokens in shapes[:2] if quick else shapes:
            lines.append(f"  {rows:4} x {tokens:5}: {' '.join(scan_times(scan, rows, tokens, configs, timer))}")
    lines.append("attention: us without and with ALiBi, rows x queries, context 2048")
    for rows, queries in ((1, 1), (64, 1), (4, 2048)):
        times = attention_times(rows, queries, 2048, timer, checked=rows == 4)
        lines.append(f"  {rows:4} x {queries:5}: {' '.join(times)}")
    print("\n" + "\n".join(lines))


if __name__ == "__main__":
    main()
