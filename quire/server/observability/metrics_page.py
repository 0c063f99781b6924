"""docs/metrics.md, from the table of figures: `python -m quire.server.observability.metrics_page > docs/metrics.md`."""

from __future__ import annotations

from collections.abc import Sequence

from quire.server.observability.metric_table import (
    BY_MODEL_LENGTH,
    ENGINE_METRICS,
    REQUEST_METRICS,
    ROUTER_METRICS,
    SERVER_METRICS,
    MetricSpec,
)

HEAD = """\
# Metrics

`GET /metrics` answers in Prometheus' text format. Every figure has our prefix, `quire:`. With `--vllm-metric-names`
each one that vLLM has too is shown a second time as `vllm:…`, under the same name with the same labels and buckets, so
that boards and alerts made for vLLM work unchanged. Figures carry the labels `model_name` and `engine`; counters end in
`_total` on the wire, histograms in `_bucket`, `_count` and `_sum`. The figures of a process (`process_*`, `python_*`)
are those of the front process.

A look never waits long: an engine that is busy or dead for more than a second leaves its last figures standing, and
`quire:engine_up` says which it is. With API keys, `/metrics` needs one like every route but `/health`.

`deploy/` holds a Compose file with Prometheus and a Grafana board for these figures:
`docker compose -f deploy/compose.yaml up --build`, then http://localhost:3000.

This page is made from `quire/server/observability/metric_table.py` (`make docs`).
"""

REQUESTS = """
## Requests

Counted in the front process. Times begin when the server has the request, before templates and tokenizing. Histograms
of whole requests count those that ended by themselves (stop, length).
"""
ENGINE = """
## Engine

Asked of the engine when somebody looks. They begin at zero again when it is restarted.
"""
ROUTER = """
## Router

Where there are several engines (`--data-parallel-size`), the figures of engines come once for each, with `engine` from
"0" on, and so do these. Figures of requests are then of all engines together, with `engine="all"`.
"""
SERVER = """
## Server
"""
ELSEWHERE = """
## In an answer, in the log, in a trace

The same truth about one request: `"return_metrics": true` in its body (or `--enable-per-request-metrics` for all) puts
`metrics` into the answer: `queue_time_ms`, `time_to_first_token_ms`, `generation_time_ms`, `mean_itl_ms`,
`tokens_per_second`, `cached_tokens`, `preemptions`.

The log has a line for each request (`--log-format json` for machines): method, path, status, duration, request id,
tenant, prompt, output and cached tokens, time in the queue, time to the first token, how it ended. Prompts are logged
only with `--enable-log-requests`.

With the extra `traces` (`pip install 'quire[traces]'`) and `--otlp-traces-endpoint http://localhost:4318/v1/traces`
each request that generates is a span with attributes of the `gen_ai` conventions, inside the caller's trace if it sends
a W3C `traceparent`. Spans go out in the background; a collector that is not there costs nothing but the spans.
"""


def page() -> str:
    """The whole page."""
    return "".join(
        [
            HEAD,
            REQUESTS,
            _table(REQUEST_METRICS),
            ENGINE,
            _table(ENGINE_METRICS),
            ROUTER,
            _table(ROUTER_METRICS),
            SERVER,
            _table(SERVER_METRICS),
            ELSEWHERE,
        ]
    )


def _table(figures: Sequence[MetricSpec]) -> str:
    lines = ["", "| name | type | labels | what it tells | as `vllm:` |", "|---|---|---|---|---|"]
    return "\n".join([*lines, *map(_row, figures), ""])


def _row(figure: MetricSpec) -> str:
    name = figure.name if figure.is_bare else f"quire:{figure.name}"
    suffix = "_total" if figure.kind == "counter" else ""
    what = figure.help
    if figure.bounds == BY_MODEL_LENGTH:
        what += " (buckets 1, 2, 5, 10, … up to the model's length)"
    elif figure.bounds:
        what += f" (buckets {figure.bounds[0]:g} … {figure.bounds[-1]:g})"
    labels = ", ".join(f"`{label}`" for label in figure.labels)
    as_theirs = "" if figure.is_ours else "the same" if figure.is_bare else "yes"
    return f"| `{name}{suffix}` | {figure.kind} | {labels} | {what} | {as_theirs} |"


if __name__ == "__main__":
    print(page(), end="")
