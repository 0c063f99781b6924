"""Every figure that `/metrics` shows, described once: the collector, docs/metrics.md and the tests read this table.

Names, labels and buckets are vLLM's where it has the figure; only the prefix is ours.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.messages.histogram import COMPILE_BOUNDS
from quire.output.times import GAP_BOUNDS
from quire.scheduler.stats import STEP_TOKEN_BOUNDS

FIRST_TOKEN_BOUNDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
LATENCY_BOUNDS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
SAMPLE_BOUNDS = (1, 2, 5, 10, 20)
HTTP_BOUNDS = (0.1, 0.5, 1.0)
HTTP_FINE_BOUNDS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 7.5, 10.0, 30.0, 60.0
)  # fmt: skip

BY_MODEL_LENGTH = (-1.0,)
"""Stands for bounds that follow the model's length: 1, 2, 5, 10, 20, 50, …"""

FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")


@dataclass(frozen=True)
class MetricSpec:
    """One family of figures. Each has the labels `model_name` and `engine` too, unless it is bare."""

    name: str
    """Without a prefix; counters get `_total` on the wire."""
    kind: str
    """counter, gauge or histogram."""
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()
    is_ours: bool = False
    """vLLM has no such figure: it is shown under our prefix only."""
    is_bare: bool = False
    """Shown without a prefix, and without model and engine, as web servers' instruments name it."""


def _counter(name: str, help: str, *labels: str, **facts: bool) -> MetricSpec:
    return MetricSpec(name, "counter", help, labels, (), **facts)


def _gauge(name: str, help: str, *labels: str, **facts: bool) -> MetricSpec:
    return MetricSpec(name, "gauge", help, labels, (), **facts)


def _histogram(name: str, help: str, bounds: tuple[float, ...], *labels: str, **facts: bool) -> MetricSpec:
    return MetricSpec(name, "histogram", help, labels, bounds, **facts)


ENGINE_METRICS = (
    _gauge("num_requests_running", "Samples that have a row in the batch"),
    _gauge("num_requests_waiting", "Samples that wait for a row, or for their grammar"),
    _gauge(
        "num_requests_waiting_by_reason",
        "Samples that wait for a row (capacity), or a grammar (deferred)",
        "reason",
    ),
    _gauge("kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1"),
    _counter("prefix_cache_queries", "Tokens of admitted requests that were looked up in the prefix cache"),
    _counter("prefix_cache_hits", "Tokens of admitted requests that were found in the prefix cache"),
    _counter("num_preemptions", "Times a running sample lost its place to another and was computed again"),
    _histogram("iteration_tokens_total", "Tokens of each step", STEP_TOKEN_BOUNDS),
    _counter("steps", "Steps of the engine's loop", is_ours=True),
    _gauge("kv_cache_waste", "Share of the allocated token slots that held no token, over time", is_ours=True),
    _gauge("num_blocks_used", "KV blocks in use", is_ours=True),
    _gauge("num_blocks_free", "KV blocks that can be had", is_ours=True),
    _histogram(
        "grammar_compile_seconds", "Time it took to compile a grammar that was not cached", COMPILE_BOUNDS, is_ours=True
    ),
    _counter("swaps", "Of the preemptions, those whose blocks were put by instead of computed again", is_ours=True),
    _counter("blocks_saved", "KV blocks copied to host memory", is_ours=True),
    _counter("blocks_loaded", "KV blocks copied back from host memory", is_ours=True),
    _counter("host_blocks_lost", "KV blocks that host memory had no room for and that were nowhere else", is_ours=True),
    _gauge("host_blocks_used", "Slots of host memory in use", is_ours=True),
    _gauge("host_blocks_owned", "KV blocks in host memory that swapped rows or sessions own", is_ours=True),
    _gauge("disk_blocks", "KV blocks on disk", is_ours=True),
    _gauge("pressure_device", "Watermarks the device's cache is past: 0, 1 or 2", is_ours=True),
    _gauge("pressure_host", "Watermarks that what is owned in host memory is past", is_ours=True),
    _gauge("pressure_disk", "Watermarks that what is owned on disk is past", is_ours=True),
    _counter("admissions_slowed", "Steps in which requests waited for calmer times", is_ours=True),
    _gauge("sessions", "Sessions there are", is_ours=True),
    _gauge("sessions_on_device", "Sessions with a turn, or with blocks on the device", is_ours=True),
    _counter("sessions_slept", "Times a session left the device", is_ours=True),
    _counter("sessions_dropped", "Times a session lost its device blocks to a shortage", is_ours=True),
    _counter("expert_tokens", "Times an expert was chosen for a token, over all experts and layers", is_ours=True),
    _gauge(
        "expert_load_max_over_mean",
        "How often the layer's busiest expert was chosen, over the mean of its experts; 1 is even",
        "layer",
        is_ours=True,
    ),
    _gauge(
        "expert_rank_load_max_over_mean",
        "With enable_expert_parallel: the same of the ranks that hold the experts, since experts last moved",
        "layer",
        is_ours=True,
    ),
)
"""Told by the engine when somebody looks. They begin at zero again when it is restarted."""

ROUTER_METRICS = (
    _gauge("router_open_requests", "Requests sent to the engine and not over", is_ours=True),
    _gauge("router_queued_tokens", "Prompt tokens that the engine is believed to have to compute still", is_ours=True),
    _gauge("router_wait_seconds", "How long a prompt is believed to wait there", is_ours=True),
    _gauge("router_known_blocks", "KV blocks that the engine is believed to have cached", is_ours=True),
    _counter("router_prompt_tokens", "Prompt tokens sent to the engine", is_ours=True),
    _counter("router_expected_hits", "Of these, tokens that were believed to be cached there", is_ours=True),
)
"""Known in the front process, of each engine, where there are several."""

SERVER_METRICS = (
    _gauge("cache_config_info", "1; its labels tell how the KV cache is made"),
    _gauge("engine_up", "Whether there is an engine that takes requests: 1 or 0", is_ours=True),
    _counter("engine_restarts", "Engines brought back after one died", is_ours=True),
    _counter("requests_rejected", "Requests answered with 429, by the bound they met", "reason", is_ours=True),
    _counter(
        "tool_call_parser_invocations", "Answers that were read for tool calls", "mode", "outcome", "request_type"
    ),
    _counter("http_responses", "Answers by their exact status", "handler", "method", "status", is_ours=True),
    _counter("http_requests", "Answers by their class of status", "handler", "method", "status", is_bare=True),
    _histogram(
        "http_request_duration_seconds", "Time to the end of the answer", HTTP_BOUNDS, "handler", "method", is_bare=True
    ),
    _histogram(
        "http_request_duration_highr_seconds",
        "Time to the end of the answer, over all routes, in finer buckets",
        HTTP_FINE_BOUNDS,
        is_bare=True,
    ),
)

REQUEST_METRICS = (
    _counter("prompt_tokens", "Prompt tokens of requests that have yielded something"),
    _counter("prompt_tokens_cached", "Prompt tokens that were found in the prefix cache"),
    _counter("prompt_tokens_by_source", "Prompt tokens by where their KV came from", "source"),
    _counter("generation_tokens", "Tokens generated"),
    _counter("request_success", "Requests that have ended, by how; who hangs up aborts", "finished_reason"),
    _histogram("time_to_first_token_seconds", "From a request's arrival to its first token", FIRST_TOKEN_BOUNDS),
    _histogram("inter_token_latency_seconds", "Between two tokens of a sample: one fewer than its tokens", GAP_BOUNDS),
    _histogram(
        "request_time_per_output_token_seconds", "Mean time between tokens, of a request with two or more", GAP_BOUNDS
    ),
    _histogram("e2e_request_latency_seconds", "From a request's arrival to its end", LATENCY_BOUNDS),
    _histogram("request_queue_time_seconds", "From the engine's queue to the first step", LATENCY_BOUNDS),
    _histogram("request_inference_time_seconds", "From the first step to the last token", LATENCY_BOUNDS),
    _histogram("request_prefill_time_seconds", "From the first step to the first token", LATENCY_BOUNDS),
    _histogram("request_decode_time_seconds", "From the first token to the last", LATENCY_BOUNDS),
    _histogram("request_prompt_tokens", "Tokens of a request's prompt", BY_MODEL_LENGTH),
    _histogram(
        "request_prefill_kv_computed_tokens", "Tokens of a request's prompt that were not cached", BY_MODEL_LENGTH
    ),
    _histogram(
        "request_generation_tokens", "Tokens generated for a request, all its samples together", BY_MODEL_LENGTH
    ),
    _histogram("request_max_num_generation_tokens", "Tokens of a request's longest sample", BY_MODEL_LENGTH),
    _histogram("request_params_n", "Samples (n) a request asked for", SAMPLE_BOUNDS),
    _histogram("request_params_max_tokens", "max_tokens a request asked for", BY_MODEL_LENGTH),
)
"""Histograms of whole requests count those that ended by themselves (stop, length)."""

ALL_METRICS = (*REQUEST_METRICS, *ENGINE_METRICS, *ROUTER_METRICS, *SERVER_METRICS)


def bounds_by_length(longest: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, … up to the model's length."""
    bounds, scale = [], 1
    while scale <= longest:
        bounds += [step * scale for step in (1, 2, 5) if step * scale <= longest]
        scale *= 10
    return tuple(float(bound) for bound in bounds)
