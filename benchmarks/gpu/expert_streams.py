"""MXFP4 experts of one to eight tokens, gpt-oss-20b's shapes: the tensor-core kernels against the vector kernels.

    python -m benchmarks.gpu.expert_streams [--quick]

Every variant is checked against the vector kernel, then timed in a CUDA graph over routings whose experts differ. The
last table is microseconds, and TB/s of the experts' bytes.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from quire.kernels.triton.launch import let_threads_launch
from quire.kernels.triton.moe.common import ChosenExperts, GemmTile
from quire.kernels.triton.quantized.expert_stacks import Stack, stack_of
from quire.kernels.triton.quantized.expert_streams import stream_down, stream_gate_up
from quire.kernels.triton.quantized.expert_vectors import vector_down, vector_gate_up
from quire.kernels.triton.skinny_gemm.timing import GraphTimer, raise_clocks
from quire.kernels.weights.fp4 import Fp4Weight

EXPERTS, TOP, WIDTH, HIDDEN = 32, 4, 2880, 2880
ROUTINGS = 8
DTYPE = torch.bfloat16
TOLERANCE = 1e-2
GATE_UPS = [(4, 6, 3), (4, 6, 4), (4, 3, 4), (4, 2, 5), (8, 3, 2), (8, 3, 3), (2, 4, 6), (2, 6, 8)]
"""(warps, pieces in flight, programs a multiprocessor)."""
DOWNS = [(8, 6), (8, 4), (8, 12), (4, 6), (4, 12), (16, 6), (16, 3)]
"""(warps, pieces in flight)."""
Run = Callable[[ChosenExperts], torch.Tensor]


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
    """For one token, routings that have no expert in common."""
    found = []
    for number in range(ROUTINGS):
        order = torch.randperm(EXPERTS, device="cuda")
        if tokens == 1:
            order = torch.arange(EXPERTS, device="cuda").roll(-TOP * number)
        chosen = order.repeat(-(-tokens * TOP // EXPERTS))[: tokens * TOP].view(tokens, TOP)
        found.append(ChosenExperts(TOP, torch.rand(tokens, TOP, device="cuda"), chosen.int()))
    return found


class Layer:
    """The experts of a layer."""

    def __init__(self) -> None:
        self.gate_up, self.down = random_stack(2 * WIDTH, HIDDEN), random_stack(HIDDEN, WIDTH)
        self.gate_up_bias = torch.randn(EXPERTS, 2 * WIDTH, dtype=DTYPE, device="cuda")
        self.down_bias = torch.randn(EXPERTS, HIDDEN, dtype=DTYPE, device="cuda")
        self.gain = torch.rand(HIDDEN, dtype=DTYPE, device="cuda") + 0.5

    def set_tokens(self, tokens: int) -> None:
        self.x = torch.randn(tokens, HIDDEN, dtype=DTYPE, device="cuda")
        self.features = torch.randn(tokens * TOP, WIDTH, dtype=DTYPE, device="cuda")
        self.norm = (self.gain, 1e-5) if tokens == 1 else None

    def run_gate_up(self, kernel: Callable[..., torch.Tensor], tile: GemmTile, routing: ChosenExperts) -> torch.Tensor:
        return kernel(self.x, routing, self.gate_up, self.gate_up_bias, tile, "clamped_swiglu", self.norm)

    def run_down(self, kernel: Callable[..., torch.Tensor], tile: GemmTile, routing: ChosenExperts) -> torch.Tensor:
        return kernel(self.features, routing, self.down, self.down_bias, tile)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only 1 and 8 tokens")
    options = parser.parse_args()
    began = time.perf_counter()
    let_threads_launch()
    raise_clocks()
    layer, timer = Layer(), GraphTimer(replays=5)
    gate_ups: dict[str, Run] = {
        "vector n4 w2": functools.partial(layer.run_gate_up, vector_gate_up, GemmTile(4, warps=2))
    }
    for warps, stages, programs in GATE_UPS:
        tile = GemmTile(8, programs, warps, stages)
        gate_ups[f"stream w{warps} d{stages} p{programs}"] = functools.partial(layer.run_gate_up, stream_gate_up, tile)
    downs: dict[str, Run] = {"vector n2 w4": functools.partial(layer.run_down, vector_down, GemmTile(2, warps=4))}
    for warps, stages in DOWNS:
        tile = GemmTile(16, 0, warps, stages)
        downs[f"stream w{warps} d{stages}"] = functools.partial(layer.run_down, stream_down, tile)
    table = []
    for tokens in (1, 8) if options.quick else (1, 2, 4, 8):
        layer.set_tokens(tokens)
        routings = random_routings(tokens)
        distinct = len({*routings[0].experts.flatten().tolist()})
        both = []
        for title, runs, lines in (("gate_up", gate_ups, 2 * WIDTH), ("down", downs, HIDDEN)):
            with ThreadPoolExecutor() as pool:
                results = {name: pool.submit(run, routings[-1]) for name, run in runs.items()}
            expected = next(iter(results.values())).result().float()
            nbytes = distinct * lines * 2880 * (1 / 2 + 1 / 32)
            times = []
            for name, run in runs.items():

                def chain(run: Run = run, routings: list[ChosenExperts] = routings) -> None:
                    for routing in routings:
                        run(routing)

                try:
                    error = ((results[name].result().float() - expected).norm() / expected.norm()).item()
                    if not error < TOLERANCE:
                        print(f"WRONG {tokens} {title} {name}: {error:.1e}", flush=True)
                        continue
                    us = timer.replay(chain) / ROUTINGS
                except Exception as failure:  # the others may still be timed
                    print(f"FAILED {tokens} {title} {name}: {type(failure).__name__} {str(failure)[:300]}", flush=True)
                    continue
                times.append((us, name))
                print(f"{tokens:3} {title:8} {name:20} {us:7.1f} us {nbytes / us / 1e6:5.2f} TB/s", flush=True)
            best = min(times)
            both.append(runs[best[1]])
            table.append(f"{tokens:3} {title:8} {times[0][0]:7.1f} -> {best[0]:7.1f} us {best[1]}, "
                         f"{nbytes / best[0] / 1e6:5.2f} TB/s")  # fmt: skip
        for title, pair in (("vector", [*gate_ups.values()][:1] + [*downs.values()][:1]), ("best", both)):

            def layers(pair: list[Run] = pair, routings: list[ChosenExperts] = routings) -> None:
                for routing in routings:
                    for run in pair:
                        run(routing)

            table.append(f"{tokens:3} both, {title}: {timer.replay(layers) / ROUTINGS:7.1f} us")
        print(f"after {time.perf_counter() - began:.0f} s", flush=True)
    print("\n" + "\n".join(table))


if __name__ == "__main__":
    main()
