"""Every metric, described once: name, kind, labels, buckets, how engines' values combine, help.

The engine's stats, merging over several engines, the /metrics page and docs/metrics.md read this table. Names, labels
and buckets are vLLM's where it has the metric; only the prefix is ours.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.messages.histogram import COMPILE_BOUNDS

STEP_TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Tokens."""
GAP_BOUNDS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0
)  # fmt: skip
"""Seconds between tokens."""
FIRST_TOKEN_BOUNDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
"""Seconds."""
LATENCY_BOUNDS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
"""Seconds."""
SEQUENCE_BOUNDS = (1, 2, 5, 10, 20)
PREEMPTION_BOUNDS = (1, 2, 3, 4, 5, 10, 20)
"""The first is of requests that were preempted once or not at all."""
HTTP_BOUNDS = (0.1, 0.5, 1.0)
"""Seconds."""
HTTP_FINE_BOUNDS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 7.5, 10.0, 30.0, 60.0
)  # fmt: skip
"""Seconds."""

BY_MODEL_LENGTH = (-1.0,)
"""Placeholder for bounds that depend on the model's length: 1, 2, 5, 10, 20, 50, …"""


@dataclass(frozen=True)
class MetricSpec:
    """One metric. It has the labels `model_name` and `engine` too, unless it is bare."""

    name: str
    """Without a prefix; counters get `_total` in the exposition format."""
    kind: str
    """counter, gauge or histogram."""
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()
    merge: str = "sum"
    """How the values of several engines combine: sum, mean or max."""
    is_ours: bool = False
    """vLLM has no such metric: it is shown under our prefix only."""
    is_bare: bool = False
    """Shown without prefix, model and engine, under the name that web servers' instrumentation uses."""


def _counter(name: str, help: str, *labels: str, **options: bool) -> MetricSpec:
    return MetricSpec(name, "counter", help, labels, **options)  # type: ignore[arg-type]


def _gauge(name: str, help: str, *labels: str, merge: str = "sum", **options: bool) -> MetricSpec:
    return MetricSpec(name, "gauge", help, labels, (), merge, **options)


def _histogram(name: str, help: str, bounds: tuple[float, ...], *labels: str, **options: bool) -> MetricSpec:
    return MetricSpec(name, "histogram", help, labels, bounds, **options)  # type: ignore[arg-type]


ENGINE_METRICS = (
    _gauge("num_requests_running", "Sequences that have a row in the batch"),
    _gauge("num_requests_waiting", "Sequences that wait for a row or for their grammar"),
    _gauge(
        "num_requests_waiting_by_reason",
        "Sequences that wait for a row (capacity) or for their grammar (deferred)",
        "reason",
    ),
    _gauge("kv_cache_usage_perc", "Fraction of the KV blocks in use, 0 to 1", merge="mean"),
    _counter("prefix_cache_queries", "Tokens of admitted requests that were looked up in the prefix cache"),
    _counter("prefix_cache_hits", "Tokens of admitted requests that were found in the prefix cache"),
    _gauge("adapters_loaded", "LoRA adapters in slots of the device", is_ours=True),
    _gauge("adapter_requests_waiting", "Requests whose LoRA adapter is not loaded yet", is_ours=True),
    _counter("adapter_loads", "LoRA adapters copied into slots", is_ours=True),
    _counter("adapter_evictions", "LoRA adapters whose slot was given to another", is_ours=True),
    _counter("adapter_load_failures", "LoRA adapters that could not be loaded", is_ours=True),
    _counter("adapter_load_seconds", "Time from planning to load a LoRA adapter until it could be used", is_ours=True),
    _counter("mm_cache_queries", "Images and videos of prompts that were looked up in the encoder's cache"),
    _counter("mm_cache_hits", "Images and videos that were found there, and not encoded"),
    _counter("encoded_items", "Images and videos encoded", is_ours=True),
    _counter("encoded_tokens", "Embeddings that the encoder made of them", is_ours=True),
    _gauge("num_items_waiting", "Images and videos of running requests that wait to be encoded", is_ours=True),
    _gauge("encoder_cache_tokens_used", "Embeddings in the encoder's cache", is_ours=True),
    _counter("num_preemptions", "Preemptions: a running sequence lost its row because blocks ran out"),
    _histogram(
        "iteration_tokens_total",
        "Tokens generated in each step with outputs, and of prompts that got their first one, cached ones left out",
        STEP_TOKEN_BOUNDS,
    ),
    _histogram("step_tokens", "Tokens computed in each step", STEP_TOKEN_BOUNDS, is_ours=True),
    _counter("steps", "Steps of the engine's loop", is_ours=True),
    _gauge(
        "kv_cache_waste",
        "Fraction of the allocated token slots that held no token, averaged over time",
        merge="mean",
        is_ours=True,
    ),
    _gauge("num_blocks_used", "KV blocks in use", is_ours=True),
    _gauge("num_blocks_free", "KV blocks that can be allocated", is_ours=True),
    _histogram(
        "grammar_compile_seconds", "Time to compile a grammar that was not cached", COMPILE_BOUNDS, is_ours=True
    ),
    _counter("swaps", "Preemptions whose blocks were swapped to host memory, not recomputed", is_ours=True),
    _counter("blocks_saved", "KV blocks copied to host memory", is_ours=True),
    _counter("blocks_loaded", "KV blocks copied back from host memory", is_ours=True),
    _counter("host_blocks_lost", "KV blocks evicted from full host memory that were stored nowhere else", is_ours=True),
    _gauge("host_blocks_used", "Block slots of host memory in use", is_ours=True),
    _gauge("host_blocks_owned", "KV blocks in host memory that belong to swapped rows or sessions", is_ours=True),
    _gauge("disk_blocks", "KV blocks on disk", is_ours=True),
    _gauge("pressure_device", "Watermarks exceeded by the device's KV cache: 0, 1 or 2", merge="max", is_ours=True),
    _gauge("pressure_host", "Watermarks exceeded by owned blocks in host memory: 0, 1 or 2", merge="max", is_ours=True),
    _gauge("pressure_disk", "Watermarks exceeded by owned blocks on disk: 0, 1 or 2", merge="max", is_ours=True),
    _counter("admissions_slowed", "Steps in which admission was held back by cache pressure", is_ours=True),
    _gauge(
        "memory_used_device",
        "Share of the device's memory in use, of what weights and KV cache leave, as if the largest step were running",
        merge="max",
        is_ours=True,
    ),
    _gauge("memory_used_host", "Share of the machine's (or container's) memory in use", merge="max", is_ours=True),
    _gauge(
        "memory_pressure_device",
        "Thresholds (90%, 95%) exceeded by memory_used_device: 0, 1 or 2",
        merge="max",
        is_ours=True,
    ),
    _gauge(
        "memory_pressure_host",
        "Thresholds (90%, 95%) exceeded by memory_used_host: 0, 1 or 2",
        merge="max",
        is_ours=True,
    ),
    _gauge(
        "step_token_budget", "Most tokens of a step now; below max_num_batched_tokens if memory is short", is_ours=True
    ),
    _counter("steps_out_of_memory", "Steps that failed because the device's memory ran out", is_ours=True),
    _counter("step_budget_lowered", "Times steps were made smaller because memory was short", is_ours=True),
    _counter("step_budget_raised", "Times steps were made larger again", is_ours=True),
    _counter("memory_trims", "Times unused heap and idle grammars were given back", is_ours=True),
    _gauge("sessions", "Sessions that exist", is_ours=True),
    _gauge("session_tokens", "Tokens of all sessions, those of forks counted in full", is_ours=True),
    _gauge("session_bytes", "Bytes of all sessions in the session log, forks counted in full", is_ours=True),
    _counter("sessions_refused", "Operations refused because a tenant's sessions use all they may", is_ours=True),
    _gauge("sessions_on_device", "Sessions with a running turn or with blocks on the device", is_ours=True),
    _counter("sessions_slept", "Times a session was suspended from the device", is_ours=True),
    _counter("sessions_dropped", "Times a session lost its device blocks because blocks ran out", is_ours=True),
    _counter("expert_tokens", "Times an expert was chosen for a token, over all experts and layers", is_ours=True),
    _gauge(
        "expert_load_max_over_mean",
        "Tokens of the layer's busiest expert over the mean of its experts; 1 is balanced",
        "layer",
        merge="mean",
        is_ours=True,
    ),
    _gauge(
        "expert_rank_load_max_over_mean",
        "With enable_expert_parallel: tokens of the layer's busiest rank over the mean of its ranks, since the last "
        "rebalancing",
        "layer",
        merge="mean",
        is_ours=True,
    ),
)
"""Reported by the engine when /metrics is read. They restart at zero with the engine."""

SPECULATION_METRICS = (
    _counter("spec_decode_num_drafts", "Draws that verified drafts"),
    _counter("spec_decode_num_draft_tokens", "Drafts that were verified"),
    _counter("spec_decode_num_accepted_tokens", "Drafts that were accepted"),
    _counter(
        "spec_decode_num_accepted_tokens_per_pos", "Drafts that were accepted, by their place in the draw", "position"
    ),
    _counter("spec_decode_decodes", "Decodes by the number of drafts chosen for them", "drafts", is_ours=True),
    _counter(
        "spec_decode_decodes_without_drafts",
        "Decodes without drafts by reason: they may have none (excluded), there were none (unavailable), or they were "
        "not expected to pay (unprofitable)",
        "reason",
        is_ours=True,
    ),
    _counter(
        "spec_decode_probes",
        "Decodes with drafts that were not expected to pay, to find out whether that has changed",
        is_ours=True,
    ),
    _gauge(
        "spec_decode_drafts_per_decode", "Drafts of a decode in the last step, on average", merge="mean", is_ours=True
    ),
    _gauge(
        "spec_decode_expected_tokens_per_decode",
        "Tokens that a decode of that step is expected to yield",
        merge="mean",
        is_ours=True,
    ),
    _gauge(
        "spec_decode_acceptance_rate",
        "Share of drafts at a place that are expected to be accepted if all before them are",
        "position",
        merge="mean",
        is_ours=True,
    ),
    _gauge(
        "spec_decode_step_seconds",
        "Expected time of a step with as many decodes as the last, by drafts of each decode",
        "drafts",
        merge="mean",
        is_ours=True,
    ),
    _gauge(
        "spec_decode_draft_cost",
        "Share of the time of a step without drafts that a draft for every decode costs",
        merge="mean",
        is_ours=True,
    ),
    _gauge(
        "spec_decode_proposal_cost",
        "Share of the time of a step without drafts that it takes to make a draft for every decode on the device",
        merge="mean",
        is_ours=True,
    ),
)
"""Reported by an engine with `speculative_config`, from the probes on only if it tunes itself. Without it none is
shown."""

ENERGY_METRICS = (
    _counter("energy_joules", "Energy by what it was for: prompt, decode, or idle (no step ran)", "kind", is_ours=True),
    _gauge(
        "energy_estimated", "1 if energy is estimated, 0 if it is measured, by what it comes from", "source",
        merge="max", is_ours=True,
    ),
    _gauge("power_watts", "Power over about the last 10 s", is_ours=True),
    _gauge("power_idle_watts", "Power while no step runs", is_ours=True),
    _gauge("power_budget_watts", "power_budget; 0: none", is_ours=True),
    _counter(
        "energy_held_seconds",
        "Seconds that steps were held back, by reason: the budget, the temperature or the policy",
        "reason",
        is_ours=True,
    ),
    _gauge("energy_policy", "1; the label is the policy in use", "policy", merge="max", is_ours=True),
    _gauge(
        "temperature_headroom_celsius", "Degrees below the temperature at which the device slows down", is_ours=True
    ),
    _gauge("gpu_power_limit_watts", "With allow_gpu_power_control: what the GPUs are limited to", is_ours=True),
)  # fmt: skip
"""Reported by an engine with `report_energy`, `power_budget` or `energy_policy`, or on battery. Without, none is
shown."""

ADAPTER_METRICS = (
    _gauge(
        "lora_requests_info",
        "Unix time of the figure; the labels list the LoRA adapters of running and of waiting requests",
        "max_lora",
        "waiting_lora_adapters",
        "running_lora_adapters",
        merge="max",
    ),
)
"""Reported by an engine with `enable_lora`."""

OPTIONAL_METRICS = (*SPECULATION_METRICS, *ENERGY_METRICS, *ADAPTER_METRICS)
"""Shown only if an engine reports them."""

INTERNAL_METRICS = (_gauge("num_requests_deferred", "Sequences that wait for their grammar"),)
"""Reported by the engine; /metrics shows them within another metric."""

ROUTER_METRICS = (
    _gauge("router_open_requests", "Requests sent to the engine that have not ended", is_ours=True),
    _gauge("router_queued_tokens", "Estimated prompt tokens that the engine has yet to compute", is_ours=True),
    _gauge("router_wait_seconds", "Estimated time that a new prompt would wait at the engine", is_ours=True),
    _gauge("router_known_blocks", "KV blocks that the router believes the engine has cached", is_ours=True),
    _counter("router_prompt_tokens", "Prompt tokens sent to the engine", is_ours=True),
    _counter("router_expected_hits", "Prompt tokens sent to the engine that the router expected cached", is_ours=True),
)
"""Known in the front process, for each of several engines."""

SERVER_METRICS = (
    _gauge("cache_config_info", "1; the labels describe the KV cache"),
    _gauge("engine_up", "Whether the engine accepts requests: 1 or 0", is_ours=True),
    _counter("engine_restarts", "Engine restarts after a crash; reloads do not count", is_ours=True),
    _counter(
        "requests_resumed", "Requests that went on at another engine after theirs died or was replaced", is_ours=True
    ),
    _counter("requests_rejected", "Requests answered with 429, by the limit they reached", "reason", is_ours=True),
    _counter(
        "request_fields_ignored",
        "Requests with a field that had no effect, by its name; names beyond the first 64 count as other",
        "field",
        is_ours=True,
    ),
    _counter("adapter_requests", "Requests with a LoRA adapter that have ended, by its name", "adapter", is_ours=True),
    _counter(
        "adapter_prompt_tokens",
        "Prompt tokens of requests with a LoRA adapter, by its name; names beyond the first 256 count as other",
        "adapter",
        is_ours=True,
    ),
    _counter("adapter_generation_tokens", "Tokens generated with a LoRA adapter, by its name", "adapter", is_ours=True),
    _gauge("stored_response_bytes", "Bytes of stored responses and conversations, of all tenants", is_ours=True),
    _counter(
        "stored_responses_dropped",
        "Stored responses and conversations removed because of a bound (size) or unused for too long (age)",
        "reason",
        is_ours=True,
    ),
    _gauge("background_responses", "Background responses under way", is_ours=True),
    _counter("media_items", "Images and videos decoded, by kind", "kind", is_ours=True),
    _counter("media_bytes", "Bytes of their files, as they were sent or fetched", is_ours=True),
    _counter("media_pixels", "Pixels of them", is_ours=True),
    _counter("media_seconds", "Seconds of fetching, decoding and resizing them, over all threads", is_ours=True),
    _counter("media_refused", "Requests with an image or a video that was refused, by reason", "reason", is_ours=True),
    _counter("prompt_tokens_image", "Prompt tokens that stood for images and videos", is_ours=True),
    _counter("tool_call_parser_invocations", "Answers parsed for tool calls", "mode", "outcome", "request_type"),
    _counter("http_responses", "HTTP responses by exact status", "handler", "method", "status", is_ours=True),
    _counter("http_requests", "HTTP responses by class of status", "handler", "method", "status", is_bare=True),
    _histogram(
        "http_request_duration_seconds",
        "Time to the end of the response",
        HTTP_BOUNDS,
        "handler",
        "method",
        is_bare=True,
    ),
    _histogram(
        "http_request_duration_highr_seconds",
        "Time to the end of the response, over all routes, in finer buckets",
        HTTP_FINE_BOUNDS,
        is_bare=True,
    ),
)

REQUEST_METRICS = (
    _counter("prompt_tokens", "Prompt tokens of requests that have had an output"),
    _counter("prompt_tokens_cached", "Prompt tokens found in the prefix cache"),
    _counter("prompt_tokens_by_source", "Prompt tokens by where their KV came from", "source"),
    _counter("generation_tokens", "Tokens generated"),
    _counter(
        "request_success", "Requests that have ended, by finish reason; a disconnected client aborts", "finished_reason"
    ),
    _histogram("time_to_first_token_seconds", "From a request's arrival to its first token", FIRST_TOKEN_BOUNDS),
    _histogram("inter_token_latency_seconds", "Time between two tokens of a sequence", GAP_BOUNDS),
    _histogram(
        "request_time_per_output_token_seconds", "Mean time between tokens of a request with two or more", GAP_BOUNDS
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
    _histogram("request_generation_tokens", "Tokens generated for a request, over all its sequences", BY_MODEL_LENGTH),
    _histogram("request_max_num_generation_tokens", "Tokens of a request's longest sequence", BY_MODEL_LENGTH),
    _histogram("request_num_preemptions", "Times a request's sequences were preempted", PREEMPTION_BOUNDS),
    _histogram("request_params_n", "Sequences (n) of a request", SEQUENCE_BOUNDS),
    _histogram("request_params_max_tokens", "max_tokens of a request", BY_MODEL_LENGTH),
)
"""Histograms of whole requests count those that finished by stop or length."""

ALL_METRICS = (*REQUEST_METRICS, *ENGINE_METRICS, *OPTIONAL_METRICS, *ROUTER_METRICS, *SERVER_METRICS)
"""What /metrics shows."""

SPECS = {spec.name: spec for spec in (*ALL_METRICS, *INTERNAL_METRICS)}
"""By name, without a prefix."""


def bounds_by_length(longest: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, … up to the model's length."""
    bounds, scale = [], 1
    while scale <= longest:
        bounds += [step * scale for step in (1, 2, 5) if step * scale <= longest]
        scale *= 10
    return tuple(float(bound) for bound in bounds)
