"""Every setting of the engine, documented once: CLI flags and docs/configuration.md come from here."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire import config_checks
from quire.errors import ConfigError

DTYPES = ("auto", "float32", "float", "bfloat16", "float16", "half")
LOAD_FORMATS = ("auto", "safetensors", "pt", "gguf", "dummy")


def option(default: Any, help: str, group: str, **facts: Any) -> Any:
    """A field with its help text, the group it is shown in, and facts such as `choices`."""
    return dataclasses.field(default=default, metadata={"help": help, "group": group, **facts})


@dataclass(frozen=True)
class EngineConfig:
    """How an engine is set up. Validated when it is made; nothing is changed afterwards."""

    model: str = option("smollm2-135m", "Hub id, local folder, .gguf file, or alias", "model")
    tokenizer: str | None = option(None, "Tokenizer's Hub id or folder; the model's own if unset", "model")
    skip_tokenizer_init: bool = option(False, "Token ids in and out only; no tokenizer is loaded", "model")
    trust_remote_code: bool = option(False, "Run Python code that comes with the tokenizer", "model")
    revision: str | None = option(None, "Branch, tag or commit on the Hub", "model")
    tokenizer_revision: str | None = option(None, "The same for the tokenizer", "model")
    hf_token: str | None = option(None, "Token for the Hub; HF_TOKEN if unset", "model")
    hf_overrides: Mapping[str, Any] | None = option(
        None, "Fields that replace those of the model's config.json (JSON)", "model"
    )
    download_dir: str | None = option(None, "Where downloads go; the Hub's own cache if unset", "model")
    load_format: str = option(
        "auto", "Weight format; dummy: random weights of the real shapes", "model", choices=LOAD_FORMATS
    )
    dtype: str = option(
        "auto",
        "Weights and activations. auto: the checkpoint's own; float32 on CPUs without bfloat16 units, and for "
        "GGUF files on any CPU",
        "model",
        choices=DTYPES,
    )
    seed: int = option(0, "Seed for requests that bring none", "model")
    max_model_len: int | str | None = option(
        None, "Longest sequence, prompt and output together; auto: the largest that fits the cache", "model"
    )
    max_logprobs: int = option(20, "Most logprobs a request may ask for; -1: the whole vocabulary", "model")
    generation_config: str = option(
        "auto", "auto: the model's generation_config.json sets defaults and extra end tokens; none, vllm: ignored",
        "model", choices=("auto", "none", "vllm"),
    )  # fmt: skip
    pooling: str = option(
        "last",
        "What an embedding is made of, where a request does not say: the last token's hidden state, or the mean of all",
        "model",
        choices=("last", "mean"),
    )
    chat_template: str | None = option(None, "Chat template, inline or a file; the model's own if unset", "model")
    logits_processors: tuple[str | type, ...] = option(
        (), "Dotted paths of custom logits processors (see worker/logits.py)", "model", many=True
    )

    device: str = option("auto", "Where the model runs: auto, cpu, cuda, or a platform by dotted path", "device")
    attention_backend: str = option("auto", "Attention implementation, by name or dotted path", "device")
    enforce_eager: bool = option(False, "No captured graphs on a GPU", "device")
    batch_invariant: bool = option(
        False, "The same tokens whatever else is in the batch, bit by bit; on a GPU, in 16 bits, at some cost", "device"
    )
    pipeline_depth: int | None = option(
        None,
        "Steps planned and launched before the oldest is collected; unset: one for each stage but one, without "
        "stages 1 on a GPU, 0 on a CPU",
        "device",
    )
    tensor_parallel_size: int = option(1, "Ranks the layers are split over", "device")
    pipeline_parallel_size: int = option(1, "Stages the layers are spread over, each in ranks of its own", "device")
    pipeline_layers: str | Sequence[int] | None = option(
        None, "How many layers each of these stages has, as 7,9; unset: spread evenly", "device"
    )
    data_parallel_size: int = option(
        1,
        "Engines behind one front, each with its own share of the devices; a request goes where its beginning is "
        "cached, unless it would wait longer there",
        "device",
    )
    distributed_executor_backend: str | None = option(
        None,
        "How ranks run: uni (in the engine's own process), mp (a process each, on this machine), ray (an actor each, "
        "on the nodes of a Ray cluster); unset: mp where there are several",
        "device",
    )
    ray_address: str | None = option(
        None,
        "The Ray cluster's head, as 10.0.0.1:6379; local: one of our own on this machine. unset: RAY_ADDRESS, the "
        "cluster that runs on this machine, or one of our own",
        "device",
    )
    ray_placement_timeout: int | None = option(
        None,
        "Seconds to wait until the Ray cluster has GPUs (or CPUs) for all ranks; unset: 60 if others use them, 5 if "
        "there are too few",
        "device",
    )
    ray_env: tuple[str, ...] = option(
        (), "Variables that ranks on Ray get from the engine's environment, besides QUIRE_*, HF_*, CUDA_*, NCCL_* and "
        "the like", "device", many=True,
    )  # fmt: skip
    enable_expert_parallel: bool = option(
        False,
        "Spread a mixture's experts whole over the ranks, rather than a part of each; with data_parallel_size > 1 over "
        "all replicas, which then step together and send each other tokens",
        "device",
    )
    num_redundant_experts: int = option(
        0, "With enable_expert_parallel: slots, over all ranks, for second copies of experts that are chosen often",
        "device",
    )  # fmt: skip
    expert_rebalance_interval: int = option(
        0,
        "With enable_expert_parallel: steps after which experts are moved to where the load since the last time says "
        "they had better be; 0: only when asked (rebalance_experts)",
        "device",
    )

    block_size: int = option(16, "Tokens a KV block holds", "memory")
    gpu_memory_utilization: float = option(0.92, "Share of a GPU's memory for weights, activations and cache", "memory")
    cpu_kv_cache_share: float = option(
        0.25,
        "Share of the machine's free memory the cache takes on a CPU; QUIRE_CPU_KVCACHE_SPACE (GiB) overrides",
        "memory",
    )
    kv_cache_memory_bytes: int | None = option(None, "Size of the KV cache; overrides the shares", "memory")
    num_gpu_blocks_override: int | None = option(
        None, "Number of KV blocks, on any device; overrides every size", "memory"
    )
    enable_prefix_caching: bool = option(
        True, "Keep finished blocks and share them with requests that begin alike", "memory"
    )
    swap_space: float = option(
        0.0,
        "GiB of host memory below the device's cache: preempted rows, cached prefixes and sleeping sessions move "
        "there and come back. 0: none",
        "memory",
    )
    kv_disk: str | None = option(
        None, "Folder of the tier below that: blocks and sessions that survive a restart. One process owns it", "memory"
    )
    kv_disk_size: float = option(32.0, "GiB of blocks in that folder at most; sessions' tokens come on top", "memory")
    isolate_tenants: bool = option(
        True,
        "Requests of different tenants share no cached prefixes: how fast one is answered tells nothing about others. "
        "Over HTTP a tenant is an API key, or X-Tenant without keys",
        "memory",
    )
    session_idle_seconds: float | None = option(
        60.0, "A session without a turn for so long leaves the device for the tiers below; unset: only when it must",
        "memory",
    )  # fmt: skip
    kv_cache_dtype: str = option("auto", "Element type of the cache; auto: the model's", "memory", choices=("auto",))

    max_num_seqs: int | None = option(None, "Most requests in one step; unset: by device", "scheduling")
    max_num_batched_tokens: int | None = option(None, "Most tokens in one step; unset: by device", "scheduling")
    enable_chunked_prefill: bool = option(
        True, "Cut long prompts into chunks that share steps with decodes", "scheduling"
    )
    prefix_group_attention: bool = option(
        True,
        "On a GPU, read the cache of a beginning that many running requests share once for all of them",
        "scheduling",
    )
    max_step_stretch: float | None = option(
        None,
        "How many times as long as a step of running requests alone one that also computes prompts may take; more "
        "where many prompts wait. unset: 1.7 for AsyncLLM and the server, inf (no bound) for LLM",
        "scheduling",
    )
    grammar_timeout: int = option(
        5, "Seconds a schema, regex or grammar of structured_outputs may take to compile; then its request is refused",
        "scheduling",
    )  # fmt: skip
    scheduling_policy: str = option(
        "fcfs", "fcfs, priority (lower first, ageing), fair (shares between tenants), or a dotted path", "scheduling"
    )
    tenant_weights: Mapping[str, float] | None = option(
        None,
        'With fair: how many times as much as others a tenant gets, by name; "*" is everyone else, 1 if unset (JSON)',
        "scheduling",
    )
    tenant_max_rows: Mapping[str, float] | None = option(
        None,
        'With fair: most rows a tenant has, by name or "*"; a count, or below 1 a share of max_num_seqs (JSON)',
        "scheduling",
    )
    tenant_max_blocks: Mapping[str, float] | None = option(
        None,
        'With fair: most KV blocks a tenant\'s rows hold, by name or "*"; a count, or below 1 a share of all (JSON)',
        "scheduling",
    )

    step_timeout: int = option(
        300,
        "Seconds a step may take: one that hangs is named in the log and ends the engine. 0: wait for ever",
        "scheduling",
    )

    disable_log_stats: bool = option(False, "No info line every ten seconds", "logging")

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"model must be a name or a path, got {self.model!r}", "model", self.model)
        for field in dataclasses.fields(self):
            choices = field.metadata.get("choices")
            value = getattr(self, field.name)
            if choices and value not in choices:
                raise ConfigError(f"{field.name} must be one of {', '.join(choices)}; got {value!r}", field.name, value)
        for name in ("logits_processors", "ray_env"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        config_checks.check(self)

    @property
    def is_multiprocess(self) -> bool:
        """Whether ranks run in processes of their own."""
        return self.num_ranks > 1 or self.distributed_executor_backend in ("mp", "ray")

    @property
    def num_ranks(self) -> int:
        """Processes the model is cut over: stages, times the ranks of each."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def stage_layers(self) -> tuple[int, ...]:
        """`pipeline_layers` as numbers; empty: spread evenly."""
        return tuple(map(int, self.pipeline_layers.split(","))) if isinstance(self.pipeline_layers, str) else ()

    @property
    def steps_together(self) -> bool:
        """Whether replicas share the experts: then all of them make every step."""
        return self.enable_expert_parallel and self.data_parallel_size > 1

    @property
    def expert_ranks(self) -> int:
        """Processes that whole experts are spread over."""
        if not self.enable_expert_parallel:
            return 1
        return self.data_parallel_size if self.steps_together else self.tensor_parallel_size

    @property
    def wants_longest_len(self) -> bool:
        """Whether the model length is to be whatever fits."""
        return self.max_model_len in ("auto", -1)

    @property
    def cpu_kv_cache_bytes(self) -> int | None:
        """QUIRE_CPU_KVCACHE_SPACE in bytes, if it is set."""
        text = os.environ.get("QUIRE_CPU_KVCACHE_SPACE", "")
        if not text:
            return None
        try:
            gib = float(text)
        except ValueError:
            gib = -1.0
        if not 0 < gib < math.inf:
            raise ConfigError(f"QUIRE_CPU_KVCACHE_SPACE must be a number of GiB above 0, got {text!r}")
        return int(gib * 2**30)
