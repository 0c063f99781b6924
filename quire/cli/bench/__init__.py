"""`quire bench`: one module for each benchmark."""

from __future__ import annotations

from importlib import import_module

from quire.cli.parser import Parser

BENCHMARKS = {
    "throughput": "many random prompts at once: tokens and requests per second",
    "latency": "time of one batch from start to end",
    "serve": "load test of any OpenAI-compatible server: latency, throughput, goodput",
    "waste": "share of KV cache slots without a token; needs no model",
}


def configure(parser: Parser) -> None:
    """Adds the benchmarks, each with its own flags."""
    parser.description = "Benchmarks. Flag names and the keys of --output-json are vLLM's where it has them."
    benchmarks = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    for name, summary in BENCHMARKS.items():
        module = import_module(f"quire.cli.bench.{name}")
        module.configure(benchmarks.add_parser(name, help=summary))
