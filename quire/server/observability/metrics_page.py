"""Writes docs/metrics.md from the table of metrics: `python -m quire.server.observability.metrics_page`."""

from __future__ import annotations

from collections.abc import Sequence

from quire.messages.metric_table import (
    ADAPTER_METRICS,
    BY_MODEL_LENGTH,
    ENERGY_METRICS,
    ENGINE_METRICS,
    REQUEST_METRICS,
    ROUTER_METRICS,
    SERVER_METRICS,
    SPECULATION_METRICS,
    MetricSpec,
)

HEAD = """\
# Metrics

`GET /metrics` answers in Prometheus' text format. Every metric has our prefix, `quire:`. Each metric that vLLM has too
is also shown as `vllm:…`, under the same name with the same labels and buckets, so that dashboards and alerts made for
vLLM work unchanged; `--no-vllm-metric-names` leaves these out. Metrics have the labels `model_name` and `engine`; in
the exposition format counters end in `_total`, histograms in `_bucket`, `_count` and `_sum`. The process metrics
(`process_*`, `python_*`) are those of the front process; of several fronts (`--api-server-count`) those of the first,
and all other metrics are of all together.

Reading the page never waits long: an engine that is busy or dead for more than a second keeps its last values, and
`quire:engine_up` says whether it is up. With API keys, `/metrics` needs one like every route but `/health` and `/ping`.

`deploy/` holds a Compose file with Prometheus and a Grafana dashboard for these metrics:
`docker compose -f deploy/compose.yaml up --build`, then http://localhost:3000.

This page is generated from `quire/messages/metric_table.py` (`make docs`).
"""

REQUESTS = """
## Requests

Counted in the front process. Times start when the server receives the request, before templates and tokenizing.
Histograms of whole requests count those that finished by stop or length.
"""
ENGINE = """
## Engine

Reported by the engine when the page is read. They restart at zero with the engine.
"""
SPECULATION = """
## Speculative decoding

Reported by engines with `speculative_config`, and shown for each; without it they are left out. Those from
`quire:spec_decode_probes` on are of the [tuner](speculative.md#it-tunes-itself): what it chose for the last step, and
from what. `GET /admin/stats` has all of them under `speculation`.
"""
ENERGY = """
## Of each engine that meters energy

With `--report-energy`, `--power-budget` or `--energy-policy`, or on a machine with a battery ([energy.md](energy.md)).
"""
ROUTER = """
## Router

With several engines (`--data-parallel-size`), engine metrics and these are shown for each engine, with `engine` from
"0" on. Request metrics are then of all engines together, with `engine="all"`.
"""
SERVER = """
## Server
"""
ELSEWHERE = """
## In the response, in the log, in a trace

The same measurements for one request: `"return_metrics": true` in its body (or `--enable-per-request-metrics` for all)
adds `metrics` to the response: `queue_time_ms`, `time_to_first_token_ms`, `generation_time_ms`, `mean_itl_ms`,
`tokens_per_second`, `cached_tokens`, `preemptions`, and if drafts were verified `draft_tokens` and `accepted_tokens`.

The log has a line for each request (`--log-format json` for machines): method, path, status, duration, request id,
tenant, prompt, output and cached tokens, drafts that were verified and accepted, time in the queue, time to the first
token, finish reason. Prompts are logged only with `--enable-log-requests`.

With the extra `traces` (`pip install 'quire[traces]'`) and `--otlp-traces-endpoint http://localhost:4318/v1/traces`
each request that generates is a span with attributes of the `gen_ai` conventions, inside the caller's trace if it sends
a W3C `traceparent`. Spans are sent in the background; if the collector is down, only the spans are lost.
"""

ADAPTERS = """
With `--enable-lora`:
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
            SPECULATION,
            _table(SPECULATION_METRICS),
            ENERGY,
            _table(ENERGY_METRICS),
            ADAPTERS,
            _table(ADAPTER_METRICS),
            ROUTER,
            _table(ROUTER_METRICS),
            SERVER,
            _table(SERVER_METRICS),
            ELSEWHERE,
        ]
    )


def _table(specs: Sequence[MetricSpec]) -> str:
    lines = ["", "| name | type | labels | meaning | as `vllm:` |", "|---|---|---|---|---|"]
    return "\n".join([*lines, *map(_row, specs), ""])


def _row(spec: MetricSpec) -> str:
    name = spec.name if spec.is_bare else f"quire:{spec.name}"
    suffix = "_total" if spec.kind == "counter" else ""
    meaning = spec.help
    if spec.bounds == BY_MODEL_LENGTH:
        meaning += " (buckets 1, 2, 5, 10, … up to the model's length)"
    elif spec.bounds:
        meaning += f" (buckets {spec.bounds[0]:g} … {spec.bounds[-1]:g})"
    labels = ", ".join(f"`{label}`" for label in spec.labels)
    as_theirs = "" if spec.is_ours else "the same" if spec.is_bare else "yes"
    return f"| `{name}{suffix}` | {spec.kind} | {labels} | {meaning} | {as_theirs} |"


if __name__ == "__main__":
    print(page(), end="")
