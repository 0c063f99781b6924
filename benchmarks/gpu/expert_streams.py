"""MXFP4 experts of one to eight tokens, gpt-oss-20b's shapes: the tensor-core kernels against the vector kernels.

    python -m benchmarks.gpu.expert_streams [--quick]

Every variant is checked against the vector kernel, then timed in a CUDA graph over routings whose experts differ. The
last table is microseconds, and TB/s of the experts' bytes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from quire.kernels.triton.launch import let_threads_launch
from quire.kernels.triton.moe.common import ChosenExperts, GemmTile
from quire.kernels.triton.quantized.expert_stacks import Stack, stack_of
from quire.kernels.triton.quantized.expert_streams import stream_gate_up
from quire.kernels.triton.quantized.expert_vectors import vector_gate_up
from quire.kernels.triton.skinny_gemm.timing import GraphTimer, raise_clocks
from quire.kernels.weights.fp4 import Fp4Weight

EXPERTS, TOP, WIDTH, HIDDEN = 32, 4, 2880, 2880
ROUTINGS = 8
DTYPE = torch.bfloat16
TOLERANCE = 1e-2
GATE_UPS = [(4, 6, 3), (4, 6, 4), (4, 3, 4), (4, 2, 5), (8, 3, 2), (8, 3, 3), (2, 4, 6), (2, 6, 8)]
"""(warps, pieces in flight, programs a multiprocessor)."""


def random_stack(outputs: int, inputs: int) -> Stack:
    def zeros(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device="cuda")

    weight = Fp4Weight.allocate((EXPERTS, outputs, inputs), DTYPE, zeros)
    weight.codes.random_(0, 256)
    weight.scale.random_(119, 122)
    stack = stack_of(weight)
    assert stack is not None
    return stack


def random_routings(tokens: int) -> list[ChosenExperts]:
    """Routings one after the other of which no expert of the last is chosen again, for few tokens."""
    found = []
    for number in range(ROUTINGS):
        order = torch.randperm(EXPERTS, device="cuda") if tokens > 1 else torch.arange(EXPERTS, device="cuda").roll(
            -TOP * number)  # fmt: skip
        chosen = order.repeat(-(-tokens * TOP // EXPERTS))[: tokens * TOP].view(tokens, TOP)
        found.append(ChosenExperts(TOP, torch.rand(tokens, TOP, device="cuda"), chosen.int()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only 1 and 8 tokens")
    options = parser.parse_args()
    began = time.perf_counter()
    let_threads_launch()
    raise_clocks()
    stack = random_stack(2 * WIDTH, HIDDEN)
    bias = torch.randn(EXPERTS, 2 * WIDTH, dtype=DTYPE, device="cuda")
    gain = torch.rand(HIDDEN, dtype=DTYPE, device="cuda") + 0.5
    timer = GraphTimer(replays=5)
    table = []
    for tokens in (1, 8) if options.quick else (1, 2, 4, 8):
        x = torch.randn(tokens, HIDDEN, dtype=DTYPE, device="cuda")
        routings = random_routings(tokens)
        norm = (gain, 1e-5) if tokens == 1 else None
        runs: dict[str, Callable[[ChosenExperts], torch.Tensor]] = {
            f"vector n{n} w{warps}": lambda routing, n=n, warps=warps: vector_gate_up(  # type: ignore[misc]
                x,
                routing,
                stack,
                bias,
                GemmTile(n, warps=warps),
                "clamped_swiglu",
                norm,  # noqa: B023
            )
            for n, warps in ((4, 2),)
        }
        for warps, stages, programs in GATE_UPS:
            runs[f"stream w{warps} d{stages} p{programs}"] = lambda routing, tile=GemmTile(8, programs, warps, stages): (
                stream_gate_up(  # type: ignore[misc]
                    x,
                    routing,
                    stack,
                    bias,
                    tile,
                    "clamped_swiglu",
                    norm,  # noqa: B023
                )
            )
        with ThreadPoolExecutor() as pool:
            results = {name: pool.submit(run, routings[-1]) for name, run in runs.items()}
        expected = next(iter(results.values())).result().float()
        pairs = len({*routings[0].experts.flatten().tolist()})
        nbytes = pairs * 2 * WIDTH * HIDDEN * (1 / 2 + 1 / 32)
        for name, run in runs.items():
            try:
                error = ((results[name].result().float() - expected).norm() / expected.norm()).item()
                if not error < TOLERANCE:
                    print(f"WRONG {tokens} {name}: {error:.1e}", flush=True)
                us = timer.replay(lambda: [run(routing) for routing in routings] and None) / ROUTINGS  # noqa: B023
            except Exception as failure:  # the others may still be timed
                print(f"FAILED {tokens} {name}: {type(failure).__name__} {str(failure)[:300]}", flush=True)
                continue
            table.append(f"{tokens:3} gate_up {name:20} {us:7.1f} us {nbytes / us / 1e6:5.2f} TB/s")
            print(table[-1], flush=True)
        print(f"after {time.perf_counter() - began:.0f} s", flush=True)
    print("\n" + "\n".join(table))


if __name__ == "__main__":
    main()
