"""`quire bench`: each measurement is a file here."""

from __future__ import annotations

from importlib import import_module

from quire.cli.parser import Parser

BENCHMARKS = {
    "throughput": "many random prompts at once: tokens and requests a second",
    "latency": "one batch from start to end: how long it takes",
    "serve": "load for any OpenAI-compatible server: latencies, throughput, goodput",
    "waste": "how much of the KV cache holds no token; needs no model",
}


def configure(parser: Parser) -> None:
    """The benchmarks, each with its own flags."""
    parser.description = "Measure this machine. Flag names and the keys of --output-json are vLLM's where it has them."
    benchmarks = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    for name, summary in BENCHMARKS.items():
        module = import_module(f"quire.cli.bench.{name}")
        module.configure(benchmarks.add_parser(name, help=summary))
