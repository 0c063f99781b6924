"""`quire simulate`: the real scheduler and router over a virtual clock, with a cost model in place of the device."""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quire.cli.engine_flags import add_common
from quire.cli.parser import Parser
from quire.cli.values import output_file, positive, size
from quire.errors import ValidationError

if TYPE_CHECKING:
    from quire.simulation.costs import CostModel
    from quire.simulation.device import DraftModel
    from quire.simulation.fleet import FleetOptions
    from quire.simulation.load import Conversation
    from quire.simulation.measurements import SimulationResult

WHAT = """\
Serve a load with the real scheduler, KV cache, prefix cache, policies, pacer and router, over a virtual clock: only the
device is a model, of how long a step takes. `quire calibrate` measures one for the device at hand.

One run prints throughput and latencies. --sweep repeats it for every combination of settings and marks the best; --goal
finds the smallest number of replicas that keeps the limits."""
EXAMPLES = """
  quire simulate --request-rate 12 --num-prompts 2000 --input-len 512 --output-len 256
  quire simulate --replicas 4 --turns 6 --prefix-len 2K --num-prefixes 20 --request-rate 4
  quire simulate --request-rate 40 --goal ttft_p99:500,tpot_p99:50
  quire simulate --request-rate 20 --sweep max_num_seqs=64,128,256 --sweep max_step_stretch=1.3,1.7,inf --best ttft_p99
  quire simulate --trace conversation_trace.jsonl --replicas 8 --kill 2@100
  quire simulate --request-rate 2 --acceptance 0.8,0.7,0.6 --draft-seconds 0.0003
  quire simulate --request-rate 20 --replicas 4 --adapters 100 --adapter-skew 1.2 --max-loras 8
  quire simulate --turns 8 --pause 30 --host-blocks 200K --disk-blocks 2M --tensor-parallel-size 2
  quire simulate --request-rate 4 --images 2 --image-tokens 1K --num-images 500
"""
MOST_REPLICAS = 4096
"""Largest fleet that --goal tries."""
MOST_PROMPTS = 10_000_000
"""Conversations of a run: all are held in memory."""
SLOWEST = 20
"""Requests whose timelines are written."""
HOST_RATE, DISK_RATE = 50e9, 2e9
"""Bytes a second, if neither the user nor the cost model says."""
SWEPT: dict[str, type] = {
    "max_num_seqs": int, "max_num_batched_tokens": int, "num_blocks": int, "replicas": int, "concurrency": int,
    "scheduling_policy": str, "routing_policy": str, "max_step_stretch": float, "host_blocks": int,
    "adapter_slots": int, "adapter_seconds": float, "disk_blocks": int, "encoder_rows": int,
}  # fmt: skip


def configure(parser: Parser) -> None:
    """The flags of `quire simulate`."""
    parser.describe(run, WHAT, EXAMPLES)
    load = parser.add_argument_group("load")
    load.add_argument("--num-prompts", type=positive, metavar="N", help="conversations (default: 1000, or the trace's)")
    load.add_argument("--input-len", type=positive, default=512, metavar="N", help="new prompt tokens of a turn (512)")
    load.add_argument("--output-len", type=positive, default=128, metavar="N", help="output tokens of a turn (128)")
    load.add_argument("--range-ratio", type=float, default=0.0, metavar="R", help="lengths vary by ±R (default: 0)")
    load.add_argument("--request-rate", type=float, default=math.inf, metavar="R",
                      help="conversations a second (default: inf, all at once)")  # fmt: skip
    load.add_argument("--burstiness", type=float, default=1.0, metavar="B", help="1: Poisson; less: burstier")
    load.add_argument("--max-concurrency", type=positive, metavar="N", help="most open requests: a closed loop")
    load.add_argument("--prefix-len", type=size, default=0, metavar="N", help="tokens of a shared beginning")
    load.add_argument("--num-prefixes", type=positive, default=1, metavar="N", help="different shared beginnings")
    load.add_argument("--turns", type=positive, default=1, metavar="N", help="turns of a conversation")
    load.add_argument("--pause", type=float, default=5.0, metavar="S", help="mean seconds between turns (default: 5)")
    load.add_argument("--tenants", type=positive, default=1, metavar="N", help="tenants that share the load")
    load.add_argument("--adapters", type=size, default=0, metavar="N", help="LoRA adapters that requests name (none)")
    load.add_argument("--adapter-skew", type=float, default=1.0, metavar="X",
                      help="the k-th adapter is named in proportion to 1 / k^X (default: 1)")  # fmt: skip
    load.add_argument("--images", type=positive, default=0, metavar="N", help="images of a turn (none)")
    load.add_argument("--image-tokens", type=size, default=576, metavar="N", help="tokens of an image (576)")
    load.add_argument(
        "--num-images", type=size, default=0, metavar="N", help="different images (default: no two alike)"
    )
    load.add_argument("--trace", metavar="FILE", help="requests of a trace (Mooncake's format) instead of these")
    load.add_argument("--trace-time-unit", choices=("ms", "s"), default="ms", help="unit of its timestamps (ms)")
    load.add_argument("--trace-speed", type=float, default=1.0, metavar="X", help="replay it X times as fast")
    load.add_argument("--seed", type=int, default=0, metavar="N")
    fleet = parser.add_argument_group("fleet")
    fleet.add_argument("--profile", default="h200-llama-3.1-8b", metavar="NAME|FILE",
                       help="cost model of a replica's device (default: h200-llama-3.1-8b)")  # fmt: skip
    fleet.add_argument("--replicas", type=positive, default=1, metavar="N")
    fleet.add_argument("--max-num-seqs", type=positive, metavar="N", help="most running requests of a replica")
    fleet.add_argument("--max-num-batched-tokens", type=positive, metavar="N", help="most tokens of a step")
    fleet.add_argument("--num-blocks", type=positive, metavar="N", help="KV blocks of a replica")
    fleet.add_argument("--scheduling-policy", default="fcfs", metavar="NAME", help="or a dotted path")
    fleet.add_argument("--routing-policy", default="prefix", metavar="NAME", help="or a dotted path")
    fleet.add_argument("--max-step-stretch", type=float, default=None, metavar="X",
                       help="how much prompts may lengthen a step (default: as `quire serve`; inf: any)")  # fmt: skip
    fleet.add_argument("--no-prefix-caching", action="store_true")
    fleet.add_argument("--kill", action="append", default=[], metavar="REPLICA@SECOND", help="a replica dies then")
    fleet.add_argument("--restart-seconds", type=float, default=30.0, metavar="S", help="until it is back (30)")
    fleet.add_argument("--tensor-parallel-size", type=positive, default=1, metavar="N",
                       help="ranks of a replica; the cost of several is modelled, not measured")  # fmt: skip
    fleet.add_argument("--pipeline-parallel-size", type=positive, default=1, metavar="N", help="stages; likewise")
    fleet.add_argument("--rank-latency-us", type=float, default=8.0, metavar="US", help="of an all-reduce or hop (8)")
    fleet.add_argument("--rank-gbps", type=float, default=400.0, metavar="GB", help="GB/s between ranks (400)")
    fleet.add_argument("--host-blocks", type=size, default=0, metavar="N", help="KV blocks in host memory (default: 0)")
    fleet.add_argument("--host-gbps", type=float, metavar="GB",
                       help="GB/s to and from it (default: the cost model's, else 50, assumed)")  # fmt: skip
    fleet.add_argument("--disk-blocks", type=size, default=0, metavar="N", help="KV blocks on disk, below that (0)")
    fleet.add_argument("--disk-gbps", type=float, metavar="GB", help="GB/s to and from it (likewise; else 2)")
    fleet.add_argument("--expert-parallel-size", type=positive, default=1, metavar="N",
                       help="replicas that share their experts and step together; modelled")  # fmt: skip
    fleet.add_argument("--image-seconds", type=float, default=0.02, metavar="S",
                       help="to encode an image, in a step (default: 0.02, an assumption)")  # fmt: skip
    fleet.add_argument("--encoder-cache-tokens", type=size, default=16384, metavar="N",
                       help="tokens of encoded images that a device keeps (16384)")  # fmt: skip
    fleet.add_argument("--watts", type=float, metavar="W",
                       help="mean power of a replica while it computes (default: as the cost model says)")  # fmt: skip
    fleet.add_argument("--max-loras", type=positive, default=8, metavar="N",
                       help="adapters that a device has room for at a time (default: 8)")  # fmt: skip
    fleet.add_argument("--adapter-seconds", type=float, default=0.1, metavar="S",
                       help="to load an adapter, beside steps (default: 0.1, an assumption)")  # fmt: skip
    fleet.add_argument("--acceptance", metavar="R,R,…",
                       help="speculation: how often each draft is accepted if those before it are")  # fmt: skip
    fleet.add_argument("--draft-seconds", type=float, default=0.0, metavar="S",
                       help="what the proposer takes for one more draft of a step (default: 0)")  # fmt: skip
    fleet.add_argument("--no-draft-tuning", action="store_true", help="always verify all drafts")
    ask = parser.add_argument_group("questions")
    ask.add_argument("--sweep", action="append", default=[], metavar="SETTING=V,V,…",
                     help=f"run every combination; settings: {', '.join(SWEPT)}")  # fmt: skip
    ask.add_argument("--best", default="throughput", metavar="METRIC",
                     help="what --sweep looks for: throughput, or the lowest of, for example, ttft_p99")  # fmt: skip
    ask.add_argument("--goal", metavar="LIMITS", help="smallest fleet with, for example, ttft_p99:500,tpot_p99:50 (ms)")
    ask.add_argument("--dollars-per-hour", type=float, metavar="D", help="of a replica: adds the cost")
    ask.add_argument("--output-json", type=output_file, metavar="FILE", help="write all figures")
    ask.add_argument("--timeline", type=output_file, metavar="FILE", help="write the steps as a trace for Perfetto")
    ask.add_argument("--request-timelines", type=output_file, metavar="FILE",
                     help=f"write the {SLOWEST} slowest requests as the page's timelines")  # fmt: skip
    ask.add_argument("--plot", type=output_file, metavar="FILE", help="write latencies and throughput as an SVG")
    add_common(parser)


def run(args: argparse.Namespace) -> int:
    """Simulate and print."""
    from quire.simulation.costs import read_profile
    from quire.simulation.measurements import read_goal

    costs = _costs(args, read_profile(args.profile))
    load = _read_load(args)
    options = _options(args, costs)
    if args.goal and args.sweep:
        raise ValidationError("--goal and --sweep are two questions: ask one at a time")
    if (args.timeline or args.plot or args.request_timelines) and (args.goal or args.sweep):
        raise ValidationError("--timeline, --request-timelines and --plot show one run: leave out --goal and --sweep")
    if args.goal:
        found = _smallest_fleet(args, costs, options, load, read_goal(args.goal))
    elif args.sweep:
        found = _sweep(args, costs, options, load)
    else:
        result = _simulate(args, costs, options, load)
        found = _figures(args, result)
        _print(args, result, found)
        if args.plot:
            from quire.cli.simulation_plot import write_plot

            write_plot(args.plot, result)
    if args.output_json:
        from quire.cli.bench.load.report import write_json

        write_json(args.output_json, found, "--output-json")
    return 0


def _read_load(args: argparse.Namespace) -> list[Conversation]:
    from quire.cli.bench.load.datasets import arrival_times
    from quire.simulation.load import LoadOptions, draw_load, read_trace

    if not 0 <= args.range_ratio <= 1:
        raise ValidationError(f"--range-ratio must be from 0 to 1, got {args.range_ratio:g}")
    if not 0 <= args.pause < math.inf:
        raise ValidationError(f"--pause must be at least 0, got {args.pause:g}")
    if (args.num_prompts or 0) > MOST_PROMPTS:
        raise ValidationError(f"--num-prompts must be at most {MOST_PROMPTS}, got {args.num_prompts}")
    if args.seed < 0:
        raise ValidationError(f"--seed must be at least 0, got {args.seed}")
    if not 0 <= args.adapter_skew <= 100:
        raise ValidationError(f"--adapter-skew must be from 0 to 100, got {args.adapter_skew:g}")
    if args.trace and args.adapters:
        raise ValidationError("a trace names its adapters itself, in the field `adapter`: leave out --adapters")
    if args.trace and args.images:
        raise ValidationError("a trace has its images itself, in the field `images`: leave out --images")
    if args.trace:
        return read_trace(args.trace, args.num_prompts, args.trace_speed, {"ms": 1e-3, "s": 1.0}[args.trace_time_unit])
    options = LoadOptions(
        args.input_len, args.output_len, args.range_ratio, args.prefix_len, args.num_prefixes, args.turns, args.pause,
        args.tenants, args.seed, args.adapters, args.adapter_skew, args.images, args.image_tokens, args.num_images,
    )  # fmt: skip
    times = arrival_times(args.num_prompts or 1000, args.request_rate, args.burstiness, 1, args.seed)
    return draw_load(options, times)


def _costs(args: argparse.Namespace, costs: CostModel) -> CostModel:
    """The cost model of a replica: of its ranks, if it has several."""
    import msgspec

    from quire.simulation.ranks import RankConnection, over_ranks, share_experts

    rates = [rate for rate in (args.rank_gbps, args.host_gbps, args.disk_gbps) if rate is not None]
    if not all(rate > 0 for rate in rates) or not args.rank_latency_us >= 0:
        raise ValidationError("--rank-gbps, --host-gbps and --disk-gbps must be above 0, --rank-latency-us at least 0")
    if args.dollars_per_hour is not None and not 0 <= args.dollars_per_hour < math.inf:
        raise ValidationError(f"--dollars-per-hour must be at least 0, got {args.dollars_per_hour:g}")
    if args.watts is not None and not 0 < args.watts < math.inf:
        raise ValidationError(f"--watts must be above 0, got {args.watts:g}")
    if args.watts is not None:
        costs = msgspec.structs.replace(costs, watts=args.watts)
    link = RankConnection(1e-6 * args.rank_latency_us, 1e9 * args.rank_gbps)
    costs = share_experts(costs, args.expert_parallel_size, link)
    return over_ranks(costs, args.tensor_parallel_size, args.pipeline_parallel_size, link)


def _rate(gbps: float | None, measured: float | None, assumed: float) -> float:
    """Bytes a second: what the user says, else what was measured, else an assumption."""
    return 1e9 * gbps if gbps is not None else assumed if measured is None else measured


def _drafts(args: argparse.Namespace) -> DraftModel | None:
    from quire.messages.plan import MAX_WIDTH
    from quire.simulation.device import DraftModel

    if not args.acceptance:
        return None
    try:
        rates = tuple(float(rate) for rate in args.acceptance.split(","))
    except ValueError:
        rates = ()
    if not 0 < len(rates) < MAX_WIDTH or not all(0 <= rate <= 1 for rate in rates):
        raise ValidationError(
            f"--acceptance takes 1 to {MAX_WIDTH - 1} probabilities such as 0.8,0.7; got {args.acceptance!r}"
        )
    if not 0 <= args.draft_seconds < math.inf:
        raise ValidationError(f"--draft-seconds must be at least 0, got {args.draft_seconds:g}")
    return DraftModel(rates, args.draft_seconds, args.seed)


def _options(args: argparse.Namespace, costs: CostModel) -> FleetOptions:
    from quire.scheduler.pacing import STREAM_STRETCH
    from quire.simulation.fleet import FleetOptions
    from quire.simulation.ranks import host_link

    stretch = STREAM_STRETCH if args.max_step_stretch is None else args.max_step_stretch
    if not stretch >= 1:
        raise ValidationError(f"--max-step-stretch must be at least 1, got {stretch:g}")
    return FleetOptions(
        replicas=args.replicas,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        num_blocks=args.num_blocks,
        scheduling_policy=args.scheduling_policy,
        routing_policy=args.routing_policy,
        max_step_stretch=stretch,
        prefix_caching=not args.no_prefix_caching,
        concurrency=args.max_concurrency,
        kills=tuple(_read_kill(text) for text in args.kill),
        restart_seconds=args.restart_seconds,
        drafts=_drafts(args),
        tunes_drafts=not args.no_draft_tuning,
        adapter_slots=args.max_loras,
        adapter_seconds=args.adapter_seconds,
        host_blocks=args.host_blocks,
        link=host_link(
            costs,
            _rate(args.host_gbps, costs.host_out_rate, HOST_RATE),
            _rate(args.host_gbps, costs.host_back_rate, HOST_RATE),
        )
        if args.host_blocks
        else None,
        disk_blocks=args.disk_blocks,
        disk_rate=_rate(args.disk_gbps, costs.disk_rate, DISK_RATE),
        encoder_rows=args.encoder_cache_tokens,
        image_seconds=args.image_seconds,
        lockstep=args.expert_parallel_size,
    )


def _read_kill(text: str) -> tuple[int, float]:
    number, _, second = text.partition("@")
    try:
        victim, at = int(number), float(second)
    except ValueError:
        victim, at = -1, -1.0
    if victim < 0 or not 0 <= at < math.inf:
        raise ValidationError(f"--kill takes a replica and a second, such as 2@100; got {text!r}")
    return victim, at


def _simulate(
    args: argparse.Namespace, costs: CostModel, options: FleetOptions, load: Sequence[Conversation]
) -> SimulationResult:
    from quire.simulation.fleet import Fleet
    from quire.simulation.timeline import SlowestRequests, Timeline

    timeline = Timeline() if args.timeline else None
    slowest = SlowestRequests(SLOWEST) if args.request_timelines else None
    result = Fleet(costs, options, timeline.note if timeline else None, slowest).run(load, args.seed)
    if slowest is not None:
        slowest.write(args.request_timelines)
    if timeline is not None:
        timeline.write(args.timeline)
    return result


def _figures(args: argparse.Namespace, result: SimulationResult) -> dict[str, Any]:
    found = result.to_json()
    if args.dollars_per_hour is not None:
        cost = args.dollars_per_hour * result.replicas * result.duration / 3600
        found["dollars"] = cost
        found["dollars_per_million_output_tokens"] = 1e6 * cost / result.output_tokens if result.output_tokens else None
    return found


def _print(args: argparse.Namespace, result: SimulationResult, found: Mapping[str, Any]) -> None:
    from quire.cli.terminal import table
    from quire.simulation.measurements import METRICS, PERCENTILES

    costs = result.costs
    fitted = "not fitted to measured steps" if costs.error is None else f"fitted within {100 * costs.error:.1f}%"
    rows = [
        ("device", f"{result.replicas} × {costs.name} ({fitted})"),
        ("requests", f"{result.completed} completed, {result.failed} failed, in {result.duration:.2f} simulated s"),
        ("throughput", f"{result.per_second(result.completed):.2f} requests/s, "
                       f"{result.per_second(result.output_tokens):.1f} output tokens/s"),
        ("tokens", f"{result.input_tokens} in ({result.cached_tokens} cached), {result.output_tokens} out"),
        ("steps", f"{result.steps}, {found['tokens_per_step']:.1f} tokens each; devices busy "
                  f"{100 * result.utilization:.0f}%; {result.preemptions} preemptions"),
    ]  # fmt: skip
    if result.drafts:
        share = 100 * result.accepted_drafts / result.drafts
        rows.append(("drafts", f"{result.drafts} verified, {share:.0f}% accepted, at the rates given"))
    if result.has_adapters:
        rows.append(("adapters", f"{result.adapter_loads} loads, {result.adapter_evictions} in the place of another"))
    if result.images_encoded:
        rows.append(("images", f"{result.images_encoded} encoded, {result.images_cached} found encoded; "
                               f"{1000 * result.image_seconds:g} ms each, given"))  # fmt: skip
    if result.disk_writes:
        rows.append(("disk", f"{result.disk_writes} blocks written, {result.disk_reads} read"))
    if result.saved_blocks:
        rows.append(("host memory", f"{result.saved_blocks} blocks saved, {result.loaded_blocks} loaded"))
    if result.deaths:
        rows.append(("deaths", f"{result.deaths}; {result.retried} requests went on elsewhere"))
    if result.joules is not None and result.output_tokens:
        rows.append(("energy", f"{result.joules / result.output_tokens:.3f} J per output token, modelled"))
    if "dollars" in found:
        million = found["dollars_per_million_output_tokens"]
        rows.append(
            ("cost", f"${found['dollars']:.2f}" + (f"; ${million:.3f} per million output tokens" if million else ""))
        )
    print(table(rows, "simulation"))
    print()
    print(f"{'milliseconds':14}" + "".join(f"{name:>10}" for name in ("mean", *(f"p{each}" for each in PERCENTILES))))
    for name in METRICS:
        values = [found[f"mean_{name}_ms"], *(found[f"p{each}_{name}_ms"] for each in PERCENTILES)]
        print(f"{name:14}" + "".join(f"{value:10.2f}" for value in values))


# Questions


def _read_sweep(words: Sequence[str]) -> dict[str, list[Any]]:
    """`max_num_seqs=64,128` as values by setting."""
    found: dict[str, list[Any]] = {}
    for word in words:
        name, equals, values = word.partition("=")
        name = name.replace("-", "_")
        if name not in SWEPT or not equals or not values:
            raise ValidationError(f"--sweep takes SETTING=V,V,… with one of {', '.join(SWEPT)}; got {word!r}")
        try:
            found[name] = [SWEPT[name](value) for value in values.split(",")]
        except ValueError:
            raise ValidationError(
                f"--sweep {name} takes values of type {SWEPT[name].__name__}; got {values!r}"
            ) from None
        if SWEPT[name] is not str and not min(found[name]) > 0:
            raise ValidationError(f"--sweep {name}: values must be above 0, got {values!r}")
        if name == "max_step_stretch" and not min(found[name]) >= 1:
            raise ValidationError(f"--sweep {name}: values must be at least 1, got {values!r}")
    return found


def _read_best(text: str) -> str | None:
    """The name of a latency among the figures; None: throughput."""
    from quire.simulation.measurements import METRICS, PERCENTILES

    names = {f"{metric}_p{percent}": f"p{percent}_{metric}_ms" for metric in METRICS for percent in PERCENTILES}
    if text != "throughput" and text not in names:
        raise ValidationError(f"--best is throughput or one of {', '.join(names)}; got {text!r}")
    return names.get(text)


def _sweep(
    args: argparse.Namespace, costs: CostModel, options: FleetOptions, load: Sequence[Conversation]
) -> dict[str, Any]:
    """Every combination. The best has the most output tokens a second, of equals the lowest p99 of the first token, or
    the lowest of the latency that --best names, of equals the most tokens."""
    metric = _read_best(args.best)
    swept = _read_sweep(args.sweep)
    runs = []
    for values in itertools.product(*swept.values()):
        settings = dict(zip(swept, values, strict=True))
        result = _simulate(args, costs, replace(options, **settings), load)
        runs.append({"settings": settings, **_figures(args, result)})
    if metric is None:
        best = max(runs, key=lambda each: (round(each["output_throughput"], 1), -each["p99_ttft_ms"]))
    else:
        best = min(runs, key=lambda each: (round(each[metric], 2), -each["output_throughput"]))
    names = "  ".join(f"{name:>{max(12, len(name))}}" for name in swept)
    print(f"{names}  {'out tok/s':>10}  {'ttft p50':>9}  {'ttft p99':>9}  {'tpot p50':>9}  {'tpot p99':>9}")
    for each in runs:
        cells = "  ".join(f"{each['settings'][name]!s:>{max(12, len(name))}}" for name in swept)
        times = "  ".join(f"{each[f'p{p}_{m}_ms']:9.1f}" for m in ("ttft", "tpot") for p in (50, 99))
        print(f"{cells}  {each['output_throughput']:10.1f}  {times}{'  ← best' if each is best else ''}")
    return {"runs": runs, "best": best["settings"]}


def _smallest_fleet(
    args: argparse.Namespace,
    costs: CostModel,
    options: FleetOptions,
    load: Sequence[Conversation],
    goals: Mapping[tuple[str, int], float],
) -> dict[str, Any]:
    """Doubles the fleet until it keeps the limits, then bisects."""
    from quire.simulation.measurements import meets

    tried: dict[int, dict[str, Any]] = {}

    def keeps(replicas: int) -> bool:
        result = _simulate(args, costs, replace(options, replicas=replicas), load)
        tried[replicas] = {"kept": meets(result, goals), **_figures(args, result)}
        values = ", ".join(
            f"{m}_p{p} {1000 * result.percentile(m, p):.1f} of {limit:g} ms" for (m, p), limit in goals.items()
        )
        print(f"{replicas:5} replicas: {values}{'  kept' if tried[replicas]['kept'] else ''}", flush=True)
        return bool(tried[replicas]["kept"])

    low, high = 0, options.replicas
    while not keeps(high):
        low, high = high, 2 * high
        if high > MOST_REPLICAS or low >= len(load):  # each conversation has had a replica of its own
            raise ValidationError(
                f"{low} replicas do not keep these limits: a single request may already be slower, or the cost model "
                "is that of another device"
            )
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if keeps(middle) else (middle, high)
    print(f"smallest fleet: {high}")
    return {"replicas": high, "tried": {str(count): tried[count] for count in sorted(tried)}}
