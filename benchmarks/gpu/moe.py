"""Mixtures of experts on a GPU: every kernel checked, measured against the GPU's limits, and tuned.

    python -m benchmarks.gpu.moe --seconds 120 --out table.json

Checks routing and experts for 1 to 8192 tokens, routed evenly and to a few experts only; times every part of a layer of
Qwen3-30B-A3B in CUDA graphs over several layers of weights; then measures the candidates of
`quire/kernels/triton/moe/tuning.py` for `--seconds` and writes the best to `--out`: entries for
`quire/kernels/triton/tables`. `--merge` writes them into that table.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F

from quire.kernels.triton import compiler
from quire.kernels.triton import ops as triton_ops
from quire.kernels.triton.moe import experts as moe
from quire.kernels.triton.moe import tuning as moe_tuning
from quire.kernels.triton.moe.common import ChosenExperts, ExpertsConfig, ExpertsShape
from quire.kernels.triton.moe.layout import arrange
from quire.kernels.triton.moe.tile import combine
from quire.kernels.triton.moe.timing import (
    ROUTINGS,
    ExpertTensors,
    GraphExpertsTimer,
    compile_experts,
    random_logits,
)
from quire.kernels.triton.moe.tuning import BUCKETS, INVARIANT, MAX_VECTOR_TOKENS, ExpertsTuner, candidates
from quire.kernels.triton.skinny_gemm.timing import GraphTimer, raise_clocks
from quire.kernels.triton.tuning_table import (
    Entry,
    TuningTables,
    bucket_of,
    current_gpu,
    read_table,
    shipped_path,
    write_table,
)

SHAPES = {
    "Qwen3-30B-A3B": ExpertsShape(128, 8, 768, 2048),
    "Mixtral-8x7B": ExpertsShape(8, 2, 14336, 4096),
    "Qwen1.5-MoE-A2.7B": ExpertsShape(60, 4, 1408, 2048),
    "Qwen3.5-35B-A3B": ExpertsShape(257, 9, 512, 2048),  # with the shared expert
}
CHECKED = (1, 2, 3, 4, 8, 16, 64, 256, 1024, 8192)
SKEW = 4
"""Experts that all tokens are routed to, where routing is skewed."""
BANDWIDTH, TENSOR = 4300.0, 790.0
"""GB/s and TFLOP/s of an H200, measured."""
TOLERANCE = 1e-2
"""Relative error of bfloat16 results: features and every expert's result are rounded before the sum."""
DTYPE = torch.bfloat16
TUNED_BUCKETS = (1, 256, 8192, 2, 4, 128, 16384, 8, 64, 512, 4096, 16, 32, 1024, 2048)
"""Token counts, the most important first."""


def reference(x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, experts: ExpertTensors) -> torch.Tensor:
    """Expert by expert, in float32."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for index in chosen.unique().tolist():
        tokens, slots = (chosen == index).nonzero(as_tuple=True)
        gate, up = F.linear(x[tokens].float(), experts.gate_up[index].float()).chunk(2, dim=1)
        result = F.linear(F.silu(gate) * up, experts.down[index].float())
        out.index_add_(0, tokens, result * weights[tokens, slots, None])
    return out


def error_of(out: torch.Tensor, expected: torch.Tensor) -> float:
    return ((out.float() - expected).norm() / expected.norm()).item()


def poison(size: int) -> None:
    """Leave NaN in the memory that the allocator hands out next."""
    torch.full((size,), float("nan"), dtype=DTYPE, device="cuda")


def check(shape: ExpertsShape, experts: ExpertTensors, tokens: int, used: int) -> list[str]:
    """What is wrong for `tokens` tokens: routing, the first candidate of every group, the fused norm, determinism."""
    wrong = []
    logits = random_logits(shape, tokens, DTYPE, used)
    counts = torch.zeros(shape.experts, dtype=torch.int64, device="cuda")
    weights, chosen = moe.route(logits, shape.top_k, True, counts)
    wide = logits.float()
    best = wide.sort(dim=-1, descending=True, stable=True).indices[:, : shape.top_k]
    shares = wide.softmax(-1).gather(1, best)
    if not torch.equal(chosen.long(), best):
        wrong.append("route: other experts")
    if not torch.allclose(weights, shares / shares.sum(1, keepdim=True), rtol=1e-4, atol=1e-6):
        wrong.append("route: other weights")
    if not torch.equal(counts, torch.bincount(best.flatten(), minlength=shape.experts)):
        wrong.append("route: other counts")
    x = torch.randn(tokens, shape.hidden, dtype=DTYPE, device="cuda")
    expected = reference(x, weights, chosen, experts)
    groups = candidates(shape, bucket_of(tokens, BUCKETS) or BUCKETS[-1], DTYPE, current_gpu())
    for config in [*(group.base for group in groups), INVARIANT]:
        poison(tokens * shape.top_k * shape.hidden)
        out = moe.experts(x, weights, chosen, *experts, config)
        if not (error := error_of(out, expected)) < TOLERANCE:
            wrong.append(f"{config}: error {error:.1e}")
        if any(not torch.equal(moe.experts(x, weights, chosen, *experts, config), out) for _ in range(3)):
            wrong.append(f"{config}: other bits each time")
    invariant = moe.experts(x, weights, chosen, *experts, INVARIANT)
    one = tokens // 2
    alone = moe.experts(x[one : one + 1], weights[one : one + 1], chosen[one : one + 1], *experts, INVARIANT)
    if not torch.equal(alone[0], invariant[one]):
        wrong.append("batch-invariant: another result alone")
    if tokens <= MAX_VECTOR_TOKENS:
        gain = torch.randn(shape.hidden, dtype=DTYPE, device="cuda")
        base = next(group.base for group in groups if group.base.kernel == "vector")
        routing = ChosenExperts(shape.top_k, weights, chosen)
        out = moe.vector_experts(x, routing, *experts, base, (gain, 1e-6))
        normed = F.rms_norm(x.float(), (shape.hidden,), gain.float(), 1e-6)
        if not (error := error_of(out, reference(normed, weights, chosen, experts))) < TOLERANCE:
            wrong.append(f"fused norm, {base}: error {error:.1e}")
    return wrong


def limits(shape: ExpertsShape, tokens: int, used: int, part: str) -> tuple[float, float]:
    """(bytes, operations) of a part, or of both."""
    experts = used or shape.experts * (1 - (1 - shape.top_k / shape.experts) ** tokens)
    matrices = {"gate_up": 2, "down": 1}.get(part, 3)
    weights = shape.width * shape.hidden * matrices
    pairs = tokens * shape.top_k
    moved = {"gate_up": tokens * shape.hidden + pairs * shape.width, "down": pairs * (shape.width + shape.hidden)}
    through = moved.get(part, tokens * 2 * shape.hidden)
    return 2 * (experts * weights + through), 2.0 * pairs * weights


def rates(shape: ExpertsShape, tokens: int, used: int, part: str, us: float) -> str:
    size, operations = limits(shape, tokens, used, part)
    limit = max(size / BANDWIDTH / 1e3, operations / TENSOR / 1e6)
    return f"{us:9.1f} us {size / us / 1e3:6.0f} GB/s {operations / us / 1e6:5.0f} TFLOP/s {limit / us:5.0%}"


def timed(graphs: GraphTimer, run: Callable[[int], object], count: int = 2 * ROUTINGS) -> float:
    """Microseconds of `run`, which gets the number of the call."""

    def chain() -> None:
        for index in range(count):
            run(index)

    run(0)
    return graphs.replay(chain) / count


def show(shape: ExpertsShape, tokens: int, used: int, timer: GraphExpertsTimer, config: ExpertsConfig) -> float:
    """Print every part's time; returns microseconds of a whole layer, from the stream to what is added to it."""
    graphs, layers = GraphTimer(), timer.weights(shape, DTYPE)
    logits = [random_logits(shape, tokens, DTYPE, used) for _ in range(ROUTINGS)]
    routed = [moe.route(one, shape.top_k, True, None) for one in logits]
    counts = torch.zeros(shape.experts, dtype=torch.int64, device="cuda")
    name = f"{tokens:5} tokens" + (f" to {used} experts" if used else "")
    print(f"\n{name}: {moe_tuning.describe(moe_tuning.entry_of(config))}")
    us = timed(graphs, lambda index: moe.route(logits[index % ROUTINGS], shape.top_k, True, counts))
    print(f"  route    {us:9.1f} us")
    if config.kernel == "tile":
        us = timed(graphs, lambda index: arrange(routed[index % ROUTINGS][1], shape.experts, config.block_m))
        print(f"  arrange  {us:9.1f} us")
    for part in ("gate_up", "down"):
        us = timer.time(shape, logits, DTYPE, config, part)
        print(f"  {part:8} {rates(shape, tokens, used, part, us)}")
    if config.kernel == "tile":
        results = torch.randn(tokens * shape.top_k, shape.hidden, dtype=DTYPE, device="cuda")
        us = timed(graphs, lambda index: combine(results, *routed[index % ROUTINGS], shape.experts))
        print(f"  combine  {us:9.1f} us {results.numel() * 2 / us / 1e3:6.0f} GB/s")
        del results
    us = timer.time(shape, logits, DTYPE, config)
    print(f"  experts  {rates(shape, tokens, used, '', us)}")
    return whole_layer(shape, tokens, used, layers, config)


def whole_layer(
    shape: ExpertsShape, tokens: int, used: int, layers: list[ExpertTensors], config: ExpertsConfig
) -> float:  # fmt: skip
    """Microseconds of norm, router, routing and experts, as `TritonOps` does them."""
    ops = triton_ops.TritonOps()
    gain = torch.ones(shape.hidden, dtype=DTYPE, device="cuda")
    x, residual = (torch.randn(tokens, shape.hidden, dtype=DTYPE, device="cuda") for _ in range(2))
    router = torch.randn(shape.experts, shape.hidden, dtype=DTYPE, device="cuda") * shape.hidden**-0.5
    if used:  # all tokens have one direction, which some experts prefer
        x, residual = x.abs(), residual.abs()
        router[:used] += 1.0
    # Other values each call, so that few tokens are routed to other experts.
    given = [x.roll(shift, 1) for shift in range(ROUTINGS)] if tokens <= 256 else [x]
    counts = torch.zeros(shape.experts, dtype=torch.int64, device="cuda")

    def run(index: int) -> None:
        ops.sparse_mlp(
            given[index % len(given)], residual, gain, 1e-6, router, *layers[index % len(layers)], shape.top_k, True,
            counts,
        )  # fmt: skip

    with mock.patch.object(triton_ops, "choose_experts", return_value=config):
        us = timed(GraphTimer(), run, max(len(layers), ROUTINGS))
    print(f"  layer    {rates(shape, tokens, used, '', us)}  (with norm and router)", flush=True)
    return us


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen3-30B-A3B", choices=list(SHAPES))
    parser.add_argument("--seconds", type=float, default=120.0, help="time for measuring candidates")
    parser.add_argument("--out", type=Path, help="file for the table")
    parser.add_argument("--merge", action="store_true", help="write the result into the shipped table")
    parser.add_argument("--layers", type=int, default=8, help="layers of weights rotated over")
    parser.add_argument("--tokens", nargs="*", type=int, default=[1, 2, 4, 8, 16, 64, 256, 1024, 8192])
    parser.add_argument("--buckets", nargs="*", type=int, default=list(TUNED_BUCKETS), help="tuned, in this order")
    parser.add_argument("--unchecked", action="store_true", help="measure only")
    parser.add_argument("--untuned", action="store_true", help="check and print only")
    options = parser.parse_args()
    shape, gpu = SHAPES[options.model], current_gpu()
    tuner = ExpertsTuner(TuningTables(gpu, shipped_path(gpu), None))
    timer = GraphExpertsTimer(options.layers)
    layer = timer.weights(shape, DTYPE)[0]

    compiler.TIMEOUT_S = 300.0
    began = time.perf_counter()
    used = {tuner.choose(shape, tokens, DTYPE) for tokens in options.tokens}
    configs = [*used, INVARIANT]
    configs += [
        group.base for tokens in CHECKED for group in candidates(shape, bucket_of(tokens, BUCKETS) or 0, DTYPE, gpu)
    ]
    if not options.untuned:
        configs += tuner.candidate_configs(shape, DTYPE, options.buckets)
    count = compile_experts(shape, layer, dict.fromkeys(configs))
    print(f"{gpu.name}: {count} kernels compiled in {time.perf_counter() - began:.0f} s", flush=True)
    raise_clocks()

    if not options.unchecked:
        wrong = 0
        for tokens in CHECKED:
            for skew in (0, max(SKEW, shape.top_k)):
                for line in check(shape, layer, tokens, min(skew, shape.experts)):
                    wrong += 1
                    print(f"WRONG {tokens} tokens{' skewed' if skew else ''}: {line}", flush=True)
        print(f"checked {len(CHECKED)} token counts, even and skewed: {wrong} wrong", flush=True)

    def show_all(title: str) -> None:
        print(f"\n{title}")
        times = {}
        for tokens in options.tokens:
            config = tuner.choose(shape, tokens, DTYPE)
            times[tokens] = show(shape, tokens, 0, timer, config)
            torch.cuda.empty_cache()
        for tokens in [tokens for tokens in (256, 8192) if tokens in options.tokens]:
            config = tuner.choose(shape, tokens, DTYPE)
            skewed = show(shape, tokens, max(SKEW, shape.top_k), timer, config)
            print(f"  skewed routing takes {skewed / times[tokens]:.2f} of the time of an even one")
        if options.model == "Qwen3-30B-A3B":
            totals = ", ".join(f"{tokens} tokens {us * 48 / 1000:.2f} ms" for tokens, us in times.items())
            print(f"\n48 layers: {totals}", flush=True)

    show_all("before tuning")
    if not options.untuned:
        deadline = time.perf_counter() + options.seconds
        print(f"\nmeasuring candidates for {options.seconds:.0f} s", flush=True)

        def progress(tokens: int, entry: Entry) -> None:
            print(f"{tokens:6} {entry['us']:9.1f} us  {moe_tuning.describe(entry)}", flush=True)

        found = tuner.tune(
            shape, DTYPE, options.buckets, timer, progress, lambda: time.perf_counter() > deadline
        )  # fmt: skip
        if options.out is not None:
            write_table(options.out, found)
            print(f"wrote {len(found)} entries to {options.out}")
        if options.merge:
            path = shipped_path(gpu)
            write_table(path, read_table(path) | found)
            print(f"merged {len(found)} entries into {path}")
        show_all("after tuning")


if __name__ == "__main__":
    main()
