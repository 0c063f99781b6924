"""Experts in few bits on a GPU: checked against dequantized matrices, and every candidate measured.

    python -m benchmarks.gpu.quantized_moe [--quick] [--cases qwen3-fp8 qwen3-int4 gpt-oss-mxfp4] [--seconds 100]

Times are of CUDA graphs over several routings of one layer, whose experts exceed L2. The last lines are a table: the
fastest configuration by number of tokens, against bfloat16 experts of the same shape.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from quire.kernels.triton import compiler
from quire.kernels.triton.moe import experts as moe
from quire.kernels.triton.moe.common import ChosenExperts, ExpertsConfig, ExpertsShape, GemmTile
from quire.kernels.triton.moe.layout import arrange
from quire.kernels.triton.moe.timing import ROUTINGS, ExpertTensors, random_experts, random_logits
from quire.kernels.triton.moe.tuning import choose_experts
from quire.kernels.triton.quantized.expert_stacks import Stack, stack_of
from quire.kernels.triton.quantized.expert_streams import stream_down, stream_gate_up
from quire.kernels.triton.quantized.expert_tiles import encode, tile_down, tile_gate_up
from quire.kernels.triton.quantized.expert_vectors import vector_down, vector_gate_up
from quire.kernels.triton.quantized.experts import candidates, expert_outputs
from quire.kernels.triton.skinny_gemm.timing import GraphTimer, raise_clocks
from quire.kernels.weights.base import QuantizedWeight
from quire.kernels.weights.fp4 import Fp4Weight
from quire.kernels.weights.grouped import GroupedWeight
from quire.kernels.weights.scaled import BlockScaledWeight, ScaledWeight, quantize_rows

QWEN3, GPT_OSS = ExpertsShape(128, 8, 768, 2048), ExpertsShape(32, 4, 2880, 2880)
CASES = {
    "qwen3-fp8": ("block", QWEN3),
    "qwen3-int4": ("int4", QWEN3),
    "gpt-oss-mxfp4": ("mxfp4", GPT_OSS),
    "qwen3-fp8-row": ("fp8", QWEN3),
    "qwen3-int8-row": ("int8", QWEN3),
    "qwen3-nvfp4": ("nvfp4", QWEN3),
}
DEFAULT = ["qwen3-fp8", "gpt-oss-mxfp4", "qwen3-int4"]
TOKENS = (1, 4, 8, 64, 256, 1024, 2048, 8192)
CHECKED = (1, 3, 8, 40, 300)
BANDWIDTH = 4300.0
"""GB/s of an H200, measured."""
DTYPE = torch.bfloat16
TOLERANCE = 2e-2
"""Relative error: where features are quantized, a bfloat16 rounded the other way may be another code."""


class Layer(NamedTuple):
    gate_up: QuantizedWeight
    down: QuantizedWeight

    @property
    def stacks(self) -> tuple[Stack, Stack]:
        gate_up, down = stack_of(self.gate_up), stack_of(self.down)
        assert gate_up is not None and down is not None
        return gate_up, down


def random_weight(kind: str, shape: tuple[int, int, int]) -> QuantizedWeight:
    """Random codes of the full range, scaled so that outputs are about 1 for inputs about 1."""

    def zeros(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device="cuda")

    def fill(tensor: torch.Tensor) -> None:
        tensor.view(torch.uint8).random_(0, 256)

    size = shape[2] ** -0.5
    if kind in ("block", "fp8", "int8"):
        code = torch.int8 if kind == "int8" else torch.float8_e4m3fn
        made: BlockScaledWeight | ScaledWeight
        if kind == "block":
            made = BlockScaledWeight.allocate(shape, DTYPE, zeros)
        else:
            made = ScaledWeight.allocate(shape, DTYPE, zeros, code)
        for matrix in made.codes:
            codes, _ = quantize_rows(torch.randn(shape[1:], device="cuda"), code)
            matrix.copy_(codes)
        made.scale.uniform_(0.5, 1.5).mul_(size * 4 / (127 if kind == "int8" else 448))
        return made
    if kind == "int4":
        grouped = GroupedWeight.allocate(shape, DTYPE, zeros, 4, 128, zeros=True)
        fill(grouped.codes)
        assert grouped.zero is not None
        grouped.zero.random_(6, 10)
        grouped.scale.copy_(torch.empty(grouped.scale.shape, device="cuda").uniform_(0.5, 1.5) * size / 5)
        return grouped
    fp4 = Fp4Weight.allocate(shape, DTYPE, zeros, kind == "nvfp4")
    fill(fp4.codes)
    if fp4.factor is not None:
        fp4.scale.copy_(torch.empty(fp4.scale.shape, device="cuda").uniform_(64, 448).to(torch.float8_e4m3fn))
        fp4.factor.fill_(size / 700)
    else:
        fp4.scale.random_(119, 122)
    return fp4


def reference(
    x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, layer: Layer, clamped: bool = False,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:  # fmt: skip
    """Expert by expert, in float32, with activations quantized as the format says."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)

    def product(rows: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
        values = weight.dequantize().float()
        if isinstance(weight, BlockScaledWeight):
            lines, columns = weight.shape
            scale = weight.scale.repeat_interleave(weight.block[0], 0)[:lines]
            values = weight.codes.float() * scale.repeat_interleave(weight.block[1], 1)[:, :columns]
        elif isinstance(weight, ScaledWeight):
            values = weight.codes.float() * weight.scale[:, None]
        return F.linear(weight.quantize_input(rows), values)

    for index in chosen.unique().tolist():
        tokens, slots = (chosen == index).nonzero(as_tuple=True)
        both = product(x[tokens], layer.gate_up[index])
        if biases is not None:
            both = both + biases[0][index].float()
        gate, up = both.chunk(2, dim=1)
        if clamped:
            gate, up = gate.clamp(max=7), up.clamp(-7, 7)
            features = gate * torch.sigmoid(1.702 * gate) * (up + 1)
        else:
            features = F.silu(gate) * up
        result = product(features.to(x.dtype), layer.down[index])
        if biases is not None:
            result = result + biases[1][index].float()
        out.index_add_(0, tokens, result * weights[tokens, slots, None])
    return out


def run_config(
    config: ExpertsConfig, x: torch.Tensor, routing: ChosenExperts, stacks: tuple[Stack, Stack],
    biases: tuple[torch.Tensor, torch.Tensor] | None = None, clamped: bool = False,
) -> torch.Tensor:  # fmt: skip
    gate_bias, down_bias = biases or (None, None)
    return expert_outputs(x, routing, *stacks, config, gate_bias, down_bias, "clamped_swiglu" if clamped else "silu")


def check(name: str, shape: ExpertsShape, layer: Layer) -> int:
    """Number of wrong results."""
    wrong, worst = 0, 0.0
    for tokens in CHECKED:
        for skewed in (False, True):
            logits = random_logits(shape, tokens, DTYPE, shape.top_k if skewed else 0)
            weights, chosen = moe.route(logits, shape.top_k, True, None)
            x = torch.randn(tokens, shape.hidden, dtype=DTYPE, device="cuda")
            with_bias = name.startswith("gpt-oss")
            biases = None
            if with_bias:
                biases = tuple(  # type: ignore[assignment]
                    torch.randn(weight.shape[:2], dtype=DTYPE, device="cuda") for weight in layer
                )
            expected = reference(x, weights, chosen, layer, with_bias, biases)
            routing = ChosenExperts(shape.top_k, weights, chosen)
            for group in candidates(*layer.stacks, shape.top_k, tokens):
                for tma in {group.base.tma, False}:
                    config = replace(group.base, tma=tma)
                    torch.full((tokens * shape.top_k * shape.hidden,), float("nan"), dtype=DTYPE, device="cuda")
                    try:
                        out = run_config(config, x, routing, layer.stacks, biases, with_bias)
                    except (CompilationError, OutOfResources, PTXASError) as error:
                        print(f"  {config} cannot run: {str(error)[:200]}")
                        continue
                    error = ((out.float() - expected).norm() / expected.norm()).item()
                    worst = max(worst, error)
                    if not error < TOLERANCE:
                        wrong += 1
                        print(f"WRONG {name} {tokens} tokens{' skewed' if skewed else ''}, {config}: {error:.1e}")
                    again = run_config(config, x, routing, layer.stacks, biases, with_bias)
                    if not torch.equal(out, again):
                        wrong += 1
                        print(f"WRONG {name} {tokens} tokens, {config}: other bits each time")
    print(f"{name}: {wrong} wrong, largest error {worst:.1e}", flush=True)
    return wrong


class Timer:
    def __init__(self, shape: ExpertsShape, layer: Layer) -> None:
        self.shape, self.layer = shape, layer
        self._graphs, self._few = GraphTimer(replays=4), GraphTimer(replays=1)

    def inputs(self, tokens: int) -> None:
        shape = self.shape
        self.tokens = tokens
        self.x = torch.randn(tokens, shape.hidden, dtype=DTYPE, device="cuda")
        self.features = torch.randn(tokens * shape.top_k, shape.width, dtype=DTYPE, device="cuda")
        self.routings = []
        for _ in range(ROUTINGS if tokens <= 1024 else 2):
            routed = moe.route(random_logits(shape, tokens, DTYPE), shape.top_k, True, None)
            self.routings.append(ChosenExperts(shape.top_k, *routed))

    def time(self, run: Callable[[int], object]) -> float:
        """Microseconds of `run`, which gets the number of the call; infinity if it cannot run."""
        try:
            run(0)
            torch.cuda.synchronize()
        except (CompilationError, OutOfResources, PTXASError) as error:
            print(f"  cannot run: {str(error)[:160]}")
            return float("inf")
        count = len(self.routings)

        def chain() -> None:
            for index in range(count):
                run(index)

        return (self._graphs if self.tokens <= 1024 else self._few).replay(chain) / count

    def whole(self, config: ExpertsConfig) -> float:
        stacks = self.layer.stacks
        return self.time(lambda index: run_config(config, self.x, self.routings[index], stacks))

    def part(self, config: ExpertsConfig, part: str) -> float:
        gate_up, down = self.layer.stacks
        top_k = self.shape.top_k
        if config.kernel in ("vector", "stream"):
            kernels = (vector_gate_up, vector_down) if config.kernel == "vector" else (stream_gate_up, stream_down)
            if part == "gate_up":
                return self.time(lambda index: kernels[0](self.x, self.routings[index], gate_up, None, config.gate_up))
            return self.time(lambda index: kernels[1](self.features, self.routings[index], down, None, config.down))
        layouts = [arrange(routing.experts, self.shape.experts, config.block_m) for routing in self.routings]
        encoded = gate_up.kind == "block" and config.gate_up.n == 128
        if part == "gate_up":
            return self.time(
                lambda index: tile_gate_up(self.x, layouts[index], gate_up, None, top_k, config, "silu", encoded)
            )
        features, scales = encode(self.features, down) if down.quantizes else (self.features, None)
        return self.time(lambda index: tile_down(features, scales, layouts[index], down, None, top_k, config))


def describe(config: ExpertsConfig) -> str:
    text = (
        config.kernel
        if config.kernel in ("vector", "stream")
        else f"m{config.block_m}" + (" tma" if config.tma else "")
    )
    text = f"{config.kernel} {text}" if config.kernel in ("scratch", "hopper") else text
    for block in (config.gate_up, config.down):
        text += f" | n{block.n} w{block.warps}" + (f" k{block.k} s{block.stages}" if block.k else "")
    return text


def rates(shape: ExpertsShape, layer: Layer, tokens: int, us: float, matrices: int = 3) -> str:
    used = shape.experts * (1 - (1 - shape.top_k / shape.experts) ** tokens)
    size = used / shape.experts * (layer.gate_up.nbytes + layer.down.nbytes) * matrices / 3
    operations = 2.0 * tokens * shape.top_k * shape.width * shape.hidden * matrices
    return f"{us:8.1f} us {size / us / BANDWIDTH / 1e3:4.0%} of memory {operations / us / 1e6:5.0f} TFLOP/s"


def explore(name: str, timer: Timer, tokens: int, deadline: float) -> tuple[ExpertsConfig | None, float]:
    """Time every candidate; returns the fastest."""
    shape, layer = timer.shape, timer.layer
    timer.inputs(tokens)
    best, best_us = None, float("inf")
    for group in candidates(*layer.stacks, shape.top_k, tokens):
        if time.perf_counter() > deadline and best is not None:
            break
        chosen: dict[str, GemmTile] = {}
        if group.base.kernel in ("scratch", "hopper"):
            us = timer.whole(group.base)
            print(f"  {name} {tokens:5} whole    {describe(group.base)}: {us:.1f} us", flush=True)
            if us < best_us:
                best, best_us = group.base, us
            continue
        for part, blocks in (("gate_up", group.gate_ups), ("down", group.downs)):
            times = {}
            for block in blocks:
                config = replace(group.base, **{part: block})
                times[block] = timer.part(config, part)
                label = f"n{block.n} w{block.warps}" + (f" k{block.k} s{block.stages}" if block.k else "")
                head = group.base.kernel if group.base.kernel in ("vector", "stream") else f"m{group.base.block_m}"
                print(
                    f"  {name} {tokens:5} {head:6} {part:8} {label:16}"
                    f"{rates(shape, layer, tokens, times[block], 2 if part == 'gate_up' else 1)}",
                    flush=True,
                )
            chosen[part] = min(times, key=lambda block: times[block])
        config = replace(group.base, **chosen)
        for tma in sorted({config.tma, False}, reverse=True):
            one = replace(config, tma=tma)
            us = timer.whole(one)
            print(f"  {name} {tokens:5} whole    {describe(one)}: {us:.1f} us", flush=True)
            if us < best_us:
                best, best_us = one, us
    return best, best_us


def plain_time(shape: ExpertsShape, experts: ExpertTensors, tokens: int) -> float:
    """Microseconds of bfloat16 experts."""
    graphs = GraphTimer(replays=4 if tokens <= 1024 else 1)
    x = torch.randn(tokens, shape.hidden, dtype=DTYPE, device="cuda")
    count = ROUTINGS if tokens <= 1024 else 2
    routings = [moe.route(random_logits(shape, tokens, DTYPE), shape.top_k, True, None) for _ in range(count)]
    config = choose_experts(shape, tokens, DTYPE)

    def chain() -> None:
        for weights, chosen in routings:
            moe.experts(x, weights, chosen, *experts, config)

    moe.experts(x, *routings[0], *experts, config)
    return graphs.replay(chain) / count


def compile_all(layer: Layer, shape: ExpertsShape, tokens: list[int]) -> None:
    """Compile every candidate's kernels in parallel."""
    gate_up, down = layer.stacks
    tasks: dict[object, Callable[[], object]] = {}

    def zeros(*size: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device="cuda")

    def task(config: ExpertsConfig, biased: bool) -> Callable[[], object]:
        def launch() -> None:
            routing = ChosenExperts(
                shape.top_k, zeros(1, shape.top_k, dtype=torch.float32), zeros(1, shape.top_k, dtype=torch.int32)
            )
            biases = (zeros(*layer.gate_up.shape[:2]), zeros(*layer.down.shape[:2])) if biased else None
            run_config(config, zeros(1, shape.hidden), routing, (gate_up, down), biases, biased)

        return launch

    for count in {*tokens, *CHECKED}:
        for group in candidates(gate_up, down, shape.top_k, count):
            for index in range(max(len(group.gate_ups), len(group.downs))):
                config = replace(
                    group.base,
                    gate_up=group.gate_ups[index % len(group.gate_ups)],
                    down=group.downs[index % len(group.downs)],
                )
                for tma in {config.tma, False}:
                    for biased in {False, gate_up.kind == "mxfp4" and index == 0}:
                        tasks[replace(config, tma=tma), biased] = task(replace(config, tma=tma), biased)
    compiler.Compilers(list(tasks.values()), f"quantized experts {gate_up.kind} {shape} {time.time()}").wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=DEFAULT, choices=list(CASES))
    parser.add_argument("--tokens", nargs="*", type=int, default=list(TOKENS))
    parser.add_argument("--quick", action="store_true", help="the first case only, few token counts")
    parser.add_argument("--seconds", type=float, default=100.0, help="after this, only the first candidates are timed")
    parser.add_argument("--unchecked", action="store_true", help="measure only")
    options = parser.parse_args()
    cases, tokens = options.cases, options.tokens
    if options.quick:
        cases, tokens = cases[:1], [count for count in tokens if count in (1, 64, 8192)]
    compiler.TIMEOUT_S = 200.0
    began = time.perf_counter()
    deadline = began + options.seconds
    rows = []
    plain: dict[ExpertsShape, dict[int, float]] = {}
    for name in cases:
        kind, shape = CASES[name]
        layer = Layer(
            random_weight(kind, (shape.experts, 2 * shape.width, shape.hidden)),
            random_weight(kind, (shape.experts, shape.hidden, shape.width)),
        )
        compile_all(layer, shape, tokens)
        print(f"{name}: compiled, {time.perf_counter() - began:.0f} s", flush=True)
        raise_clocks()
        if not options.unchecked:
            check(name, shape, layer)
            print(f"{name}: checked, {time.perf_counter() - began:.0f} s", flush=True)
        if shape not in plain:
            experts = random_experts(shape, DTYPE)
            plain[shape] = {count: plain_time(shape, experts, count) for count in tokens}
            del experts
        timer = Timer(shape, layer)
        for count in tokens:
            config, us = explore(name, timer, count, deadline)
            text = "none" if config is None else describe(config)
            rows.append(
                f"{name:14} {count:5} {rates(shape, layer, count, us)}  {plain[shape][count] / us:5.2f} x bf16  {text}"
            )
            torch.cuda.empty_cache()
        del timer, layer
    print(f"\n{torch.cuda.get_device_name()}, {time.perf_counter() - began:.0f} s")
    print("\n".join(rows), flush=True)


if __name__ == "__main__":
    main()
