"""The flags of `quire bench serve`. Names are vLLM's where it has them."""

from __future__ import annotations

import argparse
import math
import os
from typing import Any

from quire.cli.values import json_object, output_file, positive, size

PATHS = {
    "openai": "/v1/completions",
    "vllm": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
    "openai-embeddings": "/v1/embeddings",
}

# fmt: off


def add_server_flags(group: Any) -> None:
    """Where requests go."""
    group.add_argument("--base-url", "--url", default="http://127.0.0.1:8000", metavar="URL",
                       help="with or without /v1 (default: http://127.0.0.1:8000)")
    group.add_argument("--backend", choices=tuple(PATHS), default="openai",
                       help="openai, vllm: /v1/completions; openai-chat: /v1/chat/completions; openai-embeddings: "
                            "/v1/embeddings, of which only e2el is timed (default: openai)")
    group.add_argument("--endpoint", metavar="PATH", help="another path than the backend's")
    group.add_argument("--model", metavar="NAME", help="the first of /v1/models if not given")
    group.add_argument("--api-key", metavar="KEY", default=os.environ.get("OPENAI_API_KEY"),
                       help="sent as a bearer token (default: $OPENAI_API_KEY)")
    group.add_argument("--header", action="append", default=[], metavar="NAME=VALUE",
                       help="sent with every request; may be given several times")
    group.add_argument("--timeout", type=_seconds, metavar="S", help="give a request up after so many seconds")
    group.add_argument("--ready-check-timeout-sec", type=float, default=0.0, metavar="S",
                       help="wait so long for the server to be there (default: 0)")
    group.add_argument("--debug", action="store_true", help="show a traceback when something goes wrong")


def add_load_flags(group: Any) -> None:
    """When they leave."""
    group.add_argument("--num-prompts", type=positive, metavar="N",
                       help="requests (default: 100; all lines of a file or trace)")
    group.add_argument("--request-rate", type=float, default=math.inf, metavar="R",
                       help="requests a second; inf is all at once (default: inf)")
    group.add_argument("--burstiness", type=float, default=1.0, metavar="X",
                       help="how the gaps vary: 1 is Poisson, less comes in clumps, more is steadier (default: 1)")
    group.add_argument("--burst-size", type=positive, default=1, metavar="N",
                       help="so many leave together; the rate stays (default: 1)")
    group.add_argument("--max-concurrency", type=positive, metavar="N",
                       help="never more than so many at once; without a rate this is a closed loop")
    group.add_argument("--trace", metavar="FILE",
                       help="replay a trace: lines of JSON with timestamp, input_length and output_length")
    group.add_argument("--trace-time-unit", choices=("ms", "s"), default="ms", help="of its timestamps (default: ms)")
    group.add_argument("--trace-speed", type=float, default=1.0, metavar="X", help="2 is twice as fast (default: 1)")
    group.add_argument("--warmup", "--num-warmups", type=size, default=1, metavar="N",
                       help="requests before the run that are not counted (default: 1)")


def add_request_flags(group: Any) -> None:
    """What they ask."""
    group.add_argument("--dataset-name", choices=("random", "prefix_repetition", "custom", "sharegpt"),
                       default="random", help="custom is lines of JSON with prompt or messages (default: random)")
    group.add_argument("--dataset-path", metavar="FILE", help="the file of custom or sharegpt")
    group.add_argument("--input-len", "--random-input-len", type=positive, default=128, metavar="N",
                       help="random prompts: their length (default: 128)")
    group.add_argument("--input-unit", choices=("tokens", "chars"), default="tokens",
                       help="what --input-len counts (default: tokens)")
    group.add_argument("--output-len", "--random-output-len", type=positive, metavar="N",
                       help="most tokens an answer may have (default: 128, or what the dataset says)")
    group.add_argument("--range-ratio", "--random-range-ratio", type=float, default=0.0, metavar="X",
                       help="draw random lengths from those given ±X; 0.5 is half to one and a half (default: 0)")
    group.add_argument("--prefix-len", "--random-prefix-len", "--prefix-repetition-prefix-len", type=size, default=0,
                       metavar="N", help="tokens at the beginning that prompts share (default: 0)")
    group.add_argument("--num-prefixes", "--prefix-repetition-num-prefixes", type=positive, default=10, metavar="N",
                       help="prefix_repetition: so many different beginnings (default: 10)")
    group.add_argument("--ignore-eos", action="store_true", help="ask for full-length answers (not every server can)")
    group.add_argument("--temperature", type=float, metavar="X", help="the server's own if not given")
    group.add_argument("--extra-body", type=json_object, default={}, metavar="JSON",
                       help="more fields of every request")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of arrivals and random prompts (default: 0)")


def add_report_flags(group: Any) -> None:
    """What is said about them."""
    group.add_argument("--goodput", nargs="+", default=[], metavar="NAME:MS",
                       help="limits a good request keeps: ttft:200 tpot:50 itl:300 e2el:5000")
    group.add_argument("--percentile-metrics", default="ttft,tpot,itl,e2el", metavar="NAMES",
                       help="which times are reported (default: ttft,tpot,itl,e2el)")
    group.add_argument("--metric-percentiles", default="90,99", metavar="NUMBERS",
                       help="percentiles of each (default: 90,99)")
    group.add_argument("--save-result", "--output-json", type=output_file, metavar="FILE",
                       help="write the figures as JSON")
    group.add_argument("--save-detailed", action="store_true", help="with every request's own times")
    group.add_argument("--plot", type=output_file, metavar="FILE.svg", help="draw distributions and a timeline")

# fmt: on


def _seconds(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value
