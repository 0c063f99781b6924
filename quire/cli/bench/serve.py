"""`quire bench serve`: load test of any OpenAI-compatible server."""

from __future__ import annotations

import argparse
import asyncio
import datetime
import math
import os
import random
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from quire.cli.bench.images import add_images, with_noise
from quire.cli.parser import Parser
from quire.cli.values import json_object, output_file, positive, size
from quire.errors import QuireError, ValidationError

if TYPE_CHECKING:
    from quire.cli.bench.load.client import Client
    from quire.cli.bench.load.datasets import BenchRequest
    from quire.cli.bench.load.drive import LoadRun
    from quire.cli.bench.load.http import Host
    from quire.cli.bench.load.measure import RunMeasurements

T = TypeVar("T")

WHAT = """\
Send requests to an OpenAI-compatible server and time every token of the responses. Requests are sent at
--request-rate (Poisson; all at once by default) with at most --max-concurrency open, or at the times of a --trace.
Ctrl-C ends the run early and reports the results so far."""
EXAMPLES = """
  quire bench serve --num-prompts 200 --request-rate 10
  quire bench serve --base-url http://gpu1:8000 --max-concurrency 32 --input-len 512 --output-len 256 --ignore-eos
  quire bench serve --backend openai-chat --dataset-name sharegpt --dataset-path sharegpt.json --request-rate 4
  quire bench serve --backend openai-embeddings --input-len 512 --max-concurrency 16
  quire bench serve --trace traffic.jsonl --trace-speed 2 --goodput ttft:200 tpot:50
  quire bench serve --request-rate 8 --save-result run.json --plot run.svg
"""
PATHS = {
    "openai": "/v1/completions",
    "vllm": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
    "openai-embeddings": "/v1/embeddings",
}
"""Route of each backend."""
EMBEDDINGS = "openai-embeddings"
"""The backend without streaming."""
WARMUP_CONCURRENCY = 8
"""Requests at once during warmup."""


class ServerError(QuireError):
    """The server is unreachable or refuses the requests."""


def configure(parser: Parser) -> None:
    """The flags of `quire bench serve`."""
    parser.describe(run, WHAT, EXAMPLES)
    add_server_flags(parser.add_argument_group("server"))
    add_load_flags(parser.add_argument_group("load"))
    add_request_flags(parser.add_argument_group("requests"))
    add_report_flags(parser.add_argument_group("report"))


def run(args: argparse.Namespace) -> int:
    """Run the load, print the report, and write the result files."""
    from quire.cli.bench.load.http import Host
    from quire.cli.bench.load.measure import METRICS, RunMeasurements, read_goals
    from quire.cli.bench.load.plot import plot
    from quire.cli.bench.load.report import print_report, result_metrics, write_json, write_text

    goals = read_goals(args.goodput)
    percents = _percents(args.metric_percentiles)
    metrics = ["e2el"] if args.backend == EMBEDDINGS else args.percentile_metrics.split(",")
    if unknown := set(metrics) - set(METRICS):
        raise ValidationError(f"--percentile-metrics are {', '.join(METRICS)}; got {', '.join(sorted(unknown))!r}")
    requests = _read_dataset(args)
    times = _times(args, requests)
    host = Host(args.base_url, _headers(args))
    seen, model = _run_loop(_measure(args, host, requests, times))
    measured = RunMeasurements(seen, goals)
    title = f"{model} at {host.url}"
    print_report(measured, metrics, percents, title)
    found = {
        **_run_settings(args, model, len(requests)),
        **result_metrics(measured, metrics, percents, args.save_detailed),
    }
    if args.save_result:
        write_json(args.save_result, found, "--save-result")
    if args.plot:
        write_text(args.plot, plot(measured, title, _subtitle(args, measured)), "--plot")
    if seen.was_stopped:
        return 130
    return 0 if measured.done else 1


async def _measure(
    args: argparse.Namespace, host: Host, requests: list[BenchRequest], times: list[float]
) -> tuple[LoadRun, str]:
    from quire.cli.bench.load.client import Client
    from quire.cli.bench.load.drive import LoadProgress, send_all

    model = await _model(args, host)
    models = _models(args, model, len(requests))
    bodies = [_body(args, one, request) for one, request in zip(models, requests, strict=True)]
    client = Client(host, args.endpoint or PATHS[args.backend], args.timeout, args.backend != EMBEDDINGS)
    await _warm_up(client, [_body(args, model, request) for request in _warmup_requests(args)])
    client.counters = type(client.counters)()
    async with LoadProgress(client.counters, len(bodies), "sending"):
        return await send_all(client, bodies, times, args.max_concurrency), model


async def _warm_up(client: Client, bodies: Sequence[bytes]) -> None:
    """Send warmup requests; raises if the server refuses all of them."""
    from quire.cli.bench.load.drive import send_all

    seen = await send_all(client, bodies, [0.0] * len(bodies), WARMUP_CONCURRENCY)
    if seen.was_stopped:
        raise KeyboardInterrupt
    if bodies and not any(result.ok for result in seen.results):
        failed = seen.results[0]
        raise ServerError(f"{client.host.url}{client.path}: {failed.failure}: {failed.detail}")


async def _model(args: argparse.Namespace, host: Host) -> str:
    """The given model, or the first that the server lists; waits until the server is ready."""
    from quire.cli.bench.load.client import error_message, first_model
    from quire.cli.bench.load.http import LostConnectionError

    patience = args.ready_check_timeout_sec
    if args.model and not patience:
        return str(args.model)
    loop = asyncio.get_running_loop()
    until = loop.time() + patience
    while True:
        try:
            answer = await host.get("/v1/models")
            if answer.status == 200 or loop.time() >= until:
                break
        except LostConnectionError as error:
            if loop.time() >= until:
                raise ServerError(f"{error}; is the server running?") from error
        await asyncio.sleep(0.5)
    if args.model:
        return str(args.model)
    where = f"{host.url}/v1/models"
    if answer.status != 200:
        raise ServerError(f"{where}: HTTP {answer.status}: {error_message(bytes(answer.body))}")
    if (name := first_model(bytes(answer.body))) is None:
        raise ServerError(f"{where} lists no model: give one with --model")
    return name


def _run_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run on uvloop if it is installed: it takes half the CPU time of the standard loop."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)


def _read_dataset(args: argparse.Namespace) -> list[BenchRequest]:
    from quire.cli.bench.load.datasets import DATASETS, DatasetOptions

    if not 0 <= args.range_ratio <= 1:
        raise ValidationError(f"--range-ratio must be from 0 to 1, got {args.range_ratio:g}")
    if not args.trace_speed > 0:
        raise ValidationError(f"--trace-speed must be above 0, got {args.trace_speed:g}")
    options = DatasetOptions(
        count=args.num_prompts, input_len=args.input_len, output_len=args.output_len, seed=args.seed,
        spread=args.range_ratio, unit=args.input_unit, path=args.trace or args.dataset_path,
        prefix_len=args.prefix_len, num_prefixes=args.num_prefixes, time_unit=args.trace_time_unit,
        speed=args.trace_speed,
    )  # fmt: skip
    return _with_images(args, DATASETS["trace" if args.trace else args.dataset_name](options), args.seed)


def _with_images(args: argparse.Namespace, requests: list[BenchRequest], seed: int) -> list[BenchRequest]:
    """The requests with synthetic images, of which no two are alike."""
    if args.images:
        if not (args.endpoint or PATHS[args.backend]).endswith("/chat/completions"):
            raise ValidationError("--images are parts of messages: use --backend openai-chat")
        for number, request in enumerate(requests):
            request.prompt = with_noise(request.prompt, args.images, args.image_size, (seed << 20) + number)
    return requests


def _warmup_requests(args: argparse.Namespace) -> list[BenchRequest]:
    """Requests of the same length with other text: the measured prompts must not be in a prefix cache."""
    from quire.cli.bench.load.datasets import DatasetOptions, random_text

    options = DatasetOptions(args.warmup, args.input_len, args.output_len, args.seed + 1, unit=args.input_unit)
    return _with_images(args, random_text(options), args.seed + 1)


def _times(args: argparse.Namespace, requests: list[BenchRequest]) -> list[float]:
    from quire.cli.bench.load.datasets import arrival_times

    if args.trace:
        if math.isfinite(args.request_rate):
            raise ValidationError("--request-rate and --trace exclude each other: a trace has its own times")
        return [request.at or 0.0 for request in requests]
    return arrival_times(len(requests), args.request_rate, args.burstiness, args.burst_size, args.seed)


def _body(args: argparse.Namespace, model: str, request: BenchRequest) -> bytes:
    """The body of a request for the backend's route. Responses are streamed, with token counts at the end."""
    import msgspec

    if args.backend == EMBEDDINGS:
        if not isinstance(request.prompt, str):
            raise ValidationError("the dataset has messages: use --backend openai-chat")
        return msgspec.json.encode({"model": model, "input": request.prompt, **args.extra_body})
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": request.output_len,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if (args.endpoint or PATHS[args.backend]).endswith("/chat/completions"):
        is_text = isinstance(request.prompt, str)
        body["messages"] = [{"role": "user", "content": request.prompt}] if is_text else request.prompt
    elif isinstance(request.prompt, str):
        body["prompt"] = request.prompt
    else:
        raise ValidationError("the dataset has messages: use --backend openai-chat")
    if args.ignore_eos:
        body["ignore_eos"] = True
    if args.temperature is not None:
        body["temperature"] = args.temperature
    return msgspec.json.encode({**body, **args.extra_body})


def _models(args: argparse.Namespace, model: str, count: int) -> list[str]:
    """The model of each request: the same for all, or adapters drawn at random."""
    return random.Random(args.seed).choices(args.lora_modules or [model], k=count)


def _headers(args: argparse.Namespace) -> dict[str, str]:
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    for header in args.header:
        name, equals, value = header.partition("=")
        if not equals or not name.strip():
            raise ValidationError(f"--header takes NAME=VALUE, got {header!r}")
        headers[name.strip()] = value.strip()
    return headers


def _percents(text: str) -> list[float]:
    try:
        percents = [float(each) for each in text.split(",")]
    except ValueError:
        percents = [-1.0]
    if not all(0 < percent <= 100 for percent in percents):
        raise ValidationError(f"--metric-percentiles are numbers up to 100 such as 50,90,99; got {text!r}")
    return percents


def _run_settings(args: argparse.Namespace, model: str, count: int) -> dict[str, Any]:
    """The settings of the run, for the result file."""
    return {
        "date": datetime.datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": args.backend,
        "backend": args.backend,
        "model_id": model,
        "lora_modules": args.lora_modules,
        "dataset_name": "trace" if args.trace else args.dataset_name,
        "num_prompts": count,
        "request_rate": args.request_rate if math.isfinite(args.request_rate) else "inf",
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        "seed": args.seed,
    }


def _subtitle(args: argparse.Namespace, measured: RunMeasurements) -> str:
    load = f"{args.request_rate:g} requests/s" if math.isfinite(args.request_rate) else "all at once"
    load = f"trace {args.trace}" if args.trace else load
    if args.max_concurrency:
        load += f", at most {args.max_concurrency} at once"
    done, failed = len(measured.done), sum(measured.failures.values())
    rate = measured.per_second(measured.output_tokens)
    return f"{load}; {done} completed, {failed} failed; {rate:,.0f} output tokens/s"


# fmt: off


def add_server_flags(group: Any) -> None:
    """Flags of the server to test."""
    group.add_argument("--base-url", "--url", default="http://127.0.0.1:8000", metavar="URL",
                       help="with or without /v1 (default: http://127.0.0.1:8000)")
    group.add_argument("--backend", choices=tuple(PATHS), default="openai",
                       help="openai, vllm: /v1/completions; openai-chat: /v1/chat/completions; openai-embeddings: "
                            "/v1/embeddings, which reports only e2el (default: openai)")
    group.add_argument("--endpoint", metavar="PATH", help="path to use instead of the backend's")
    group.add_argument("--model", metavar="NAME", help="default: the first of /v1/models")
    group.add_argument("--lora-modules", nargs="+", default=[], metavar="NAME",
                       help="adapters that the server has loaded: each request is for one of them, drawn at random")
    group.add_argument("--api-key", metavar="KEY", default=os.environ.get("OPENAI_API_KEY"),
                       help="sent as a bearer token (default: $OPENAI_API_KEY)")
    group.add_argument("--header", action="append", default=[], metavar="NAME=VALUE",
                       help="sent with every request; may be given several times")
    group.add_argument("--timeout", type=_seconds, metavar="S", help="seconds after which a request has failed")
    group.add_argument("--ready-check-timeout-sec", type=float, default=0.0, metavar="S",
                       help="seconds to wait for the server to be ready (default: 0)")
    group.add_argument("--debug", action="store_true", help="show a traceback when something goes wrong")


def add_load_flags(group: Any) -> None:
    """Flags of arrival times."""
    group.add_argument("--num-prompts", type=positive, metavar="N",
                       help="requests (default: 100; all lines of a file or trace)")
    group.add_argument("--request-rate", type=float, default=math.inf, metavar="R",
                       help="requests per second; inf: all at once (default: inf)")
    group.add_argument("--burstiness", type=float, default=1.0, metavar="X",
                       help="shape of the arrival gaps: 1 is Poisson, less is burstier, more is steadier (default: 1)")
    group.add_argument("--burst-size", type=positive, default=1, metavar="N",
                       help="requests sent together; the mean rate stays the same (default: 1)")
    group.add_argument("--max-concurrency", type=positive, metavar="N",
                       help="most requests open at once; without --request-rate this is a closed loop")
    group.add_argument("--trace", metavar="FILE",
                       help="replay a trace: lines of JSON with timestamp, input_length and output_length")
    group.add_argument("--trace-time-unit", choices=("ms", "s"), default="ms", help="unit of timestamps (default: ms)")
    group.add_argument("--trace-speed", type=float, default=1.0, metavar="X", help="2 is twice as fast (default: 1)")
    group.add_argument("--warmup", "--num-warmups", type=size, default=1, metavar="N",
                       help="requests before the run that are not counted (default: 1)")


def add_request_flags(group: Any) -> None:
    """Flags of the requests' content."""
    group.add_argument("--dataset-name", choices=("random", "prefix_repetition", "custom", "sharegpt"),
                       default="random", help="custom: JSONL of prompts (and images) or messages (default: random)")
    group.add_argument("--dataset-path", metavar="FILE", help="the file of custom or sharegpt")
    group.add_argument("--input-len", "--random-input-len", type=positive, default=128, metavar="N",
                       help="length of random prompts (default: 128)")
    group.add_argument("--input-unit", choices=("tokens", "chars"), default="tokens",
                       help="unit of --input-len (default: tokens)")
    group.add_argument("--output-len", "--random-output-len", type=positive, metavar="N",
                       help="max_tokens of a request (default: the dataset's, else 128)")
    group.add_argument("--range-ratio", "--random-range-ratio", type=float, default=0.0, metavar="X",
                       help="draw lengths within ±X of the given ones; 0.5: from half to one and a half (default: 0)")
    group.add_argument("--prefix-len", "--random-prefix-len", "--prefix-repetition-prefix-len", type=size, default=0,
                       metavar="N", help="tokens of the shared prefix (default: 0)")
    group.add_argument("--num-prefixes", "--prefix-repetition-num-prefixes", type=positive, default=10, metavar="N",
                       help="prefix_repetition: number of different prefixes (default: 10)")
    add_images(group)
    group.add_argument("--ignore-eos", action="store_true",
                       help="ask for full-length outputs (not every server supports it)")
    group.add_argument("--temperature", type=float, metavar="X", help="default: the server's")
    group.add_argument("--extra-body", type=json_object, default={}, metavar="JSON",
                       help="additional fields of every request")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="seed of arrivals and prompts (default: 0)")


def add_report_flags(group: Any) -> None:
    """Flags of the report."""
    group.add_argument("--goodput", nargs="+", default=[], metavar="NAME:MS",
                       help="latency limits in ms that a good request meets: ttft:200 tpot:50 itl:300 e2el:5000")
    group.add_argument("--percentile-metrics", default="ttft,tpot,itl,e2el", metavar="NAMES",
                       help="latencies to report (default: ttft,tpot,itl,e2el)")
    group.add_argument("--metric-percentiles", default="90,99", metavar="NUMBERS",
                       help="percentiles of each latency (default: 90,99)")
    group.add_argument("--save-result", "--output-json", type=output_file, metavar="FILE",
                       help="write the metrics as JSON")
    group.add_argument("--save-detailed", action="store_true", help="include the times of every request")
    group.add_argument("--plot", type=output_file, metavar="FILE.svg", help="plot distributions and a timeline")

# fmt: on


def _seconds(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value
