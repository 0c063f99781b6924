"""MXFP4 experts of gpt-oss-20b's shape: `expert_hopper.py` against the kernels that are chosen without it.

    python -m benchmarks.gpu.expert_products [--quick] [--chosen] [--tokens 256 512]

Every variant is checked against dequantized matrices in float32, then timed in CUDA graphs over several routings; a
layer's experts exceed L2 many times. The last table is microseconds of a layer by number of tokens: gate and up, down,
and everything between routing and result. A variant is block_m.warps.stages, and .1 if the scales of a span lie
together. `otherwise` is what is chosen with `USE_HOPPER` off, `copies` multiplies 16-bit copies, `chosen` is what an
engine uses; --chosen times these alone.
"""

from __future__ import annotations

import argparse
import functools
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

import torch

from benchmarks.gpu.quantized_moe import Layer, random_weight, reference
from quire.kernels.triton import compiler
from quire.kernels.triton.launch import let_threads_launch
from quire.kernels.triton.moe import experts as moe
from quire.kernels.triton.moe.common import ChosenExperts, ExpertsConfig, ExpertsShape
from quire.kernels.triton.moe.layout import ExpertLayout, arrange
from quire.kernels.triton.moe.tile import combine
from quire.kernels.triton.moe.timing import random_logits
from quire.kernels.triton.moe.tuning import choose_experts
from quire.kernels.triton.quantized import expert_hopper
from quire.kernels.triton.quantized.expert_hopper import gather_rows, operand_order, products
from quire.kernels.triton.quantized.expert_scratch import dequantize_stack
from quire.kernels.triton.quantized.expert_stacks import Stack
from quire.kernels.triton.quantized.experts import config_of, expert_outputs
from quire.kernels.triton.skinny_gemm.timing import GraphTimer, raise_clocks

SHAPE = ExpertsShape(32, 4, 2880, 2880)
DTYPE = torch.bfloat16
TOLERANCE = 1e-2
ACTIVATION = "clamped_swiglu"
BANDWIDTH = 4.3e6
"""Bytes a microsecond of an H200, measured."""


class Variant(NamedTuple):
    block_m: int
    warps: int
    stages: int
    by_span: int = 0

    def __str__(self) -> str:
        return ".".join(map(str, self))


VARIANTS = {
    8: [Variant(16, 8, 6), Variant(16, 16, 6)],
    64: [Variant(16, 8, 6), Variant(16, 16, 6), Variant(32, 8, 6)],
    128: [Variant(16, 8, 6), Variant(32, 8, 6), Variant(64, 8, 5)],
    256: [Variant(64, 8, 6), Variant(64, 8, 6, 1), Variant(64, 8, 5), Variant(64, 16, 5), Variant(32, 8, 6)],
    512: [Variant(64, 8, 5), Variant(128, 8, 4)],
    1024: [Variant(64, 8, 6), Variant(64, 8, 6, 1), Variant(64, 16, 5), Variant(128, 8, 4)],
    2048: [Variant(128, 8, 4)],
    4096: [Variant(128, 8, 4)],
    8192: [Variant(64, 8, 6), Variant(128, 8, 4)],
}
"""By number of tokens."""
QUICK = {
    8: [Variant(16, 8, 6)],
    64: [Variant(16, 8, 6), Variant(16, 16, 6)],
    128: [Variant(16, 8, 6), Variant(32, 8, 6)],
    256: [Variant(64, 8, 5), Variant(32, 8, 6)],
    512: [Variant(64, 8, 5), Variant(128, 8, 4)],
    1024: [Variant(64, 8, 5), Variant(128, 8, 4)],
    2048: [Variant(128, 8, 4)],
}
CHOSEN: dict[int, list[Variant]] = {tokens: [] for tokens in (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)}


def span_scales(scale: torch.Tensor, by_span: bool) -> torch.Tensor:
    """Scales uint8 [experts, lines, groups] as int16 [experts, lines, spans]; `by_span`: a span's lie together."""
    spans = scale.view(torch.int16)
    return spans.transpose(1, 2).contiguous().transpose(1, 2) if by_span else spans


class Experts:
    """The experts of a layer."""

    def __init__(self) -> None:
        count, _, width, hidden = SHAPE
        self.layer = Layer(
            random_weight("mxfp4", (count, 2 * width, hidden)), random_weight("mxfp4", (count, hidden, width))
        )
        self.stacks = self.layer.stacks
        self.scales = [[span_scales(stack.scale, by_span) for by_span in (False, True)] for stack in self.stacks]
        self.biases = tuple(torch.randn(stack.shape[:2], dtype=DTYPE, device="cuda") for stack in self.stacks)

    def gate_up(self, x: torch.Tensor, layout: ExpertLayout, variant: Variant) -> torch.Tensor:
        scales = self.scales[0][variant.by_span]
        return products(
            x, layout, self.stacks[0].codes, scales, self.biases[0], *variant[:3], gated=True, activation=ACTIVATION
        )  # fmt: skip

    def down(self, features: torch.Tensor, layout: ExpertLayout, variant: Variant) -> torch.Tensor:
        scales = self.scales[1][variant.by_span]
        return products(features, layout, self.stacks[1].codes, scales, self.biases[1], *variant[:3], gated=False)

    def whole(self, x: torch.Tensor, routing: ChosenExperts, variant: Variant) -> torch.Tensor:
        layout = arrange(routing.experts, SHAPE.experts, variant.block_m)
        features = self.gate_up(gather_rows(x, layout, SHAPE.top_k), layout, variant)
        return combine(self.down(features, layout, variant), routing.weights, routing.experts, SHAPE.experts)

    def configs(self, tokens: int) -> dict[str, ExpertsConfig]:
        """What is chosen, with the kernels of Hopper and without, and what multiplies copies."""
        chosen = config_of(*self.stacks, SHAPE.top_k, tokens, False)
        expert_hopper.USE_HOPPER = False
        otherwise = config_of(*self.stacks, SHAPE.top_k, tokens, False)
        expert_hopper.USE_HOPPER = True
        found = {"otherwise": otherwise, "chosen": chosen}
        if tokens >= 256:
            found["copies"] = replace(choose_experts(SHAPE, tokens, DTYPE), kernel="scratch")
        return found

    def copies(self) -> tuple[Stack, Stack]:
        """The stacks with 16-bit copies."""
        gate_up, down = (replace(stack, copy=dequantized(stack)) for stack in self.stacks)
        return gate_up, down

    def run(
        self, x: torch.Tensor, routing: ChosenExperts, config: ExpertsConfig, stacks: tuple[Stack, Stack] | None = None
    ) -> torch.Tensor:
        return expert_outputs(x, routing, *(stacks or self.stacks), config, *self.biases, ACTIVATION)


def dequantized(stack: Stack) -> torch.Tensor:
    return dequantize_stack(stack, torch.empty(stack.shape, dtype=DTYPE, device="cuda").view(-1))


def routing_of(tokens: int, skewed: int = 0) -> ChosenExperts:
    return ChosenExperts(
        SHAPE.top_k, *moe.route(random_logits(SHAPE, tokens, DTYPE, skewed), SHAPE.top_k, True, None)
    )  # fmt: skip


def check(experts: Experts, variant: Variant) -> bool:
    """Whether a variant is right: for few tokens, and for many of which some experts have most."""
    x = torch.randn(3, SHAPE.hidden, dtype=DTYPE, device="cuda")
    layout = arrange(routing_of(3).experts, SHAPE.experts, variant.block_m)
    tokens = layout.order.long() // SHAPE.top_k
    good = torch.equal(gather_rows(x, layout, SHAPE.top_k), operand_order(x)[tokens])
    for tokens, skewed in ((2, 0), (40, 0), (300, 0), (300, 6)):
        x, routing = torch.randn(tokens, SHAPE.hidden, dtype=DTYPE, device="cuda"), routing_of(tokens, skewed)
        expected = reference(x, routing.weights, routing.experts, experts.layer, True, experts.biases)
        out = experts.whole(x, routing, variant)
        error = ((out.float() - expected).norm() / expected.norm()).item()
        same = torch.equal(out, experts.whole(x, routing, variant))
        if not (error < TOLERANCE and same):
            print(f"WRONG {variant} {tokens} tokens, skewed {skewed}: error {error:.1e}, repeatable {same}", flush=True)
            good = False
    return good


class Watchdog:
    """Ends the process if nothing is reported for a while: a kernel may hang."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.what, self.seen = seconds, "start", time.perf_counter()
        threading.Thread(target=self._watch, daemon=True).start()

    def report(self, what: str) -> None:
        self.what, self.seen = what, time.perf_counter()

    def _watch(self) -> None:
        while time.perf_counter() - self.seen < self.seconds:
            time.sleep(0.5)
        print(f"HUNG in {self.what}", flush=True)
        os._exit(1)


def timed(timer: GraphTimer, run: Callable[[int], object], count: int) -> float:
    def chain() -> None:
        for index in range(count):
            run(index)

    return timer.replay(chain) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer variants")
    parser.add_argument("--chosen", action="store_true", help="no variants, only what is chosen and its alternatives")
    parser.add_argument("--tokens", nargs="*", type=int, help="these numbers of tokens only")
    options = parser.parse_args()
    began = time.perf_counter()
    variants = CHOSEN if options.chosen else QUICK if options.quick else VARIANTS
    if options.tokens:
        variants = {tokens: variants.get(tokens, []) for tokens in options.tokens}
    watchdog = Watchdog(60)
    let_threads_launch()
    raise_clocks()
    experts = Experts()
    distinct = list(dict.fromkeys(variant for found in variants.values() for variant in found))
    x, routing = torch.randn(2, SHAPE.hidden, dtype=DTYPE, device="cuda"), routing_of(2)
    configs = dict.fromkeys(config for tokens in variants for config in experts.configs(tokens).values())
    tasks = [functools.partial(experts.run, x, routing, config) for config in configs]
    tasks += [functools.partial(experts.whole, x, routing, variant) for variant in distinct]
    compiler.Compilers(tasks, f"expert products {time.time()}").wait()
    watchdog.report("compiled")
    with ThreadPoolExecutor() as pool:
        compiled = {variant: pool.submit(experts.whole, x, routing, variant) for variant in distinct}
        for future in [pool.submit(experts.run, x, routing, config) for config in configs]:
            future.result()
    copies = experts.copies()
    good = []
    for variant in distinct:
        watchdog.report(f"checking {variant}")
        try:
            compiled[variant].result()
            if check(experts, variant):
                good.append(variant)
        except Exception as failure:  # the others may still be timed
            print(f"FAILED {variant}: {type(failure).__name__} {str(failure)[:300]}", flush=True)
    print(f"right: {' '.join(map(str, good))}; after {time.perf_counter() - began:.0f} s", flush=True)
    table = []
    for tokens, found in variants.items():
        timer = GraphTimer(replays=4 if tokens <= 1024 else 1)
        count = 6 if tokens <= 1024 else 2
        x = torch.randn(tokens, SHAPE.hidden, dtype=DTYPE, device="cuda")
        routings = [routing_of(tokens) for _ in range(count)]
        used = len(routings[0].experts.unique())
        nbytes = used / SHAPE.experts * sum(part.nbytes for part in experts.layer)
        first = None
        for name, config in experts.configs(tokens).items():
            stacks = copies if name == "copies" else experts.stacks
            watchdog.report(f"{name} {tokens}")
            out = experts.run(x, routings[0], config, stacks).float()
            first = out if first is None else first
            wrong = "" if (out - first).norm() / first.norm() < TOLERANCE else " WRONG"
            us = timed(timer, lambda index: experts.run(x, routings[index], config, stacks), count)  # noqa: B023
            label = f"{name} {config.kernel} {config.block_m or ''}"
            table.append(f"{tokens:5} {label:24} whole {us:7.1f} us; bytes alone {nbytes / BANDWIDTH:5.1f}{wrong}")
            print(table[-1], flush=True)
        for variant in found:
            if variant not in good:
                continue
            watchdog.report(f"timing {variant} {tokens}")
            layouts = [arrange(one.experts, SHAPE.experts, variant.block_m) for one in routings]
            rows = [gather_rows(x, layout, SHAPE.top_k) for layout in layouts]
            features = experts.gate_up(rows[0], layouts[0], variant)
            first = timed(timer, lambda i: experts.gate_up(rows[i], layouts[i], variant), count)  # noqa: B023
            second = timed(timer, lambda i: experts.down(features, layouts[i], variant), count)  # noqa: B023
            whole = timed(timer, lambda i: experts.whole(x, routings[i], variant), count)  # noqa: B023
            table.append(
                f"{tokens:5} {variant!s:18} gate_up {first:7.1f} down {second:7.1f} whole {whole:7.1f} us "
                f"{nbytes / whole / BANDWIDTH:4.0%} of memory speed"
            )
            print(table[-1], flush=True)
    print(f"after {time.perf_counter() - began:.0f} s\n\n" + "\n".join(table))


if __name__ == "__main__":
    main()
