"""All engine settings and their help texts; CLI flags and docs/configuration.md are generated from them."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire import config_checks
from quire.errors import ConfigError
from quire.speculative.config import SpeculativeConfig

DTYPES = ("auto", "float32", "float", "bfloat16", "float16", "half")
KV_CACHE_DTYPES = (
    *("auto", "bfloat16", "float16", "float32"),
    *("fp8", "fp8_e4m3", "fp8_per_token_head", "int8_per_token_head"),
)
KV_TIER_DTYPES = ("auto", "int8_per_token_head")
LOAD_FORMATS = ("auto", "safetensors", "pt", "gguf", "dummy")
CPU_WEIGHTS = ("auto", "dense", "packed")
MODEL_IMPLS = ("auto", "quire", "vllm", "transformers")


def option(default: Any, help: str, group: str, **details: Any) -> Any:
    """A field with its help text, the group it is listed in, and details such as `choices`."""
    return dataclasses.field(default=default, metadata={"help": help, "group": group, **details})


@dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine: validated when created, immutable afterwards."""

    model: str = option("smollm2-135m", "Hub id, local folder, .gguf file, or alias", "model")
    tokenizer: str | None = option(None, "Hub id or folder of the tokenizer; unset: the model's own", "model")
    skip_tokenizer_init: bool = option(False, "Load no tokenizer: only token ids in and out", "model")
    trust_remote_code: bool = option(False, "Run Python code that comes with the tokenizer", "model")
    revision: str | None = option(None, "Branch, tag or commit on the Hub", "model")
    tokenizer_revision: str | None = option(None, "Branch, tag or commit of the tokenizer on the Hub", "model")
    hf_token: str | None = option(None, "Access token for the Hub; unset: HF_TOKEN", "model")
    hf_overrides: Mapping[str, Any] | None = option(
        None, "Fields that override those of the model's config.json (JSON)", "model"
    )
    download_dir: str | None = option(None, "Folder for downloads; unset: the Hub's own cache", "model")
    load_format: str = option(
        "auto", "Weight format; dummy: random weights with the model's shapes", "model", choices=LOAD_FORMATS
    )
    model_impl: str = option(
        "auto",
        "Whose code computes the model: quire, or transformers with quire's attention, matrices and cache. auto: "
        "quire's if it has the architecture, else transformers'; vllm: the same as quire",
        "model",
        choices=MODEL_IMPLS,
    )
    dtype: str = option(
        "auto",
        "Data type of weights and activations. auto: the checkpoint's; float32 on CPUs without bfloat16 units, and "
        "for GGUF files on any CPU",
        "model",
        choices=DTYPES,
    )
    quantization: str | None = option(
        None,
        "Weights in few bits. unset: as the checkpoint says; fp8, int8, int4, mxfp4: quantize the matrices of a 16-bit "
        "checkpoint (or a GGUF file) while loading; a .json file, or JSON: which of these (or 16bit) each module gets, "
        "by name or regex; auto:5: int4, int8 or 16 bits by measured sensitivity, 5 bits a weight on average; awq, "
        "gptq, compressed-tensors, …: refuse a checkpoint of another kind",
        "model",
    )
    cpu_weights: str = option(
        "auto",
        "On a CPU, matrices in few bits (GGUF, AWQ, GPTQ, compressed-tensors, BitNet). packed: kept in few bits and "
        "multiplied with activations rounded to 8 bits: faster, in a fifth of the memory, with other tokens where two "
        "are close; dense: a GGUF file is dequantized while loading, others at every product; auto: packed where "
        "there are kernels for the file and the machine",
        "model",
        choices=CPU_WEIGHTS,
    )
    weight_cache: str | None = option(
        None,
        "On a CPU, a folder where weights are kept as they lie in memory: later starts map the file instead of "
        "loading the checkpoint, and processes that do share its memory; unset: not kept. One rank, without drafts",
        "model",
    )
    weight_copy_share: float = option(
        0.2,
        "Share of the free device memory that 16-bit copies of weight-only quantized weights (int4, fp4, GGUF) may "
        "take: with copies, steps of many rows are as fast as in 16 bits; 0: no copies",
        "memory",
    )
    seed: int = option(0, "Seed for requests without their own", "model")
    max_model_len: int | str | None = option(
        None, "Maximum tokens of a sequence, prompt plus output; auto: the most that fit the KV cache", "model"
    )
    max_logprobs: int = option(20, "Most logprobs a request may ask for; -1: the whole vocabulary", "model")
    generation_config: str = option(
        "auto",
        "auto: generation_config.json of the model sets defaults and extra end tokens; none, vllm: ignore it; or a "
        "folder that has another",
        "model",
    )
    override_generation_config: Mapping[str, Any] | None = option(
        None,
        'Sampling defaults that override those of generation_config, as {"temperature": 0.6} (JSON)',
        "model",
    )
    disable_any_whitespace: bool = option(
        False, "JSON of structured outputs on one line, as if every request had disable_any_whitespace", "model"
    )
    pooling: str = option(
        "last",
        "How an embedding is pooled unless the request says: the last token's hidden state, or the mean of all tokens'",
        "model",
        choices=("last", "mean"),
    )
    chat_template: str | None = option(None, "Chat template, inline or a file; unset: the model's own", "model")
    logits_processors: tuple[str | type, ...] = option(
        (), "Dotted paths of custom logits processors (see worker/logits.py)", "model", many=True
    )

    device: str = option("auto", "Device of the model: auto, cpu, cuda, or a platform by dotted path", "device")
    threads: int = option(
        0,
        "Threads that an engine computes on, on a CPU, its ranks together; 0: OMP_NUM_THREADS, else as many as its "
        "processor affinity and the CPU quota of its container allow",
        "device",
    )
    attention_backend: str = option("auto", "Attention backend, by name or dotted path", "device")
    enforce_eager: bool = option(False, "Do not capture CUDA graphs", "device")
    batch_invariant: bool = option(
        False,
        "Bitwise the same result whatever else is in the batch; on a GPU, with 16-bit weights, somewhat slower",
        "device",
    )
    pipeline_depth: int | None = option(
        None,
        "Steps planned and launched before the oldest is collected; unset: one less than pipeline_parallel_size; "
        "without pipeline stages, 1 on a GPU and 0 on a CPU",
        "device",
    )
    tensor_parallel_size: int = option(1, "Ranks that each layer is split over", "device")
    pipeline_parallel_size: int = option(1, "Pipeline stages; each has its own layers and ranks", "device")
    pipeline_layers: str | Sequence[int] | None = option(
        None, "Layers of each pipeline stage, as 7,9; unset: spread evenly", "device"
    )
    data_parallel_size: int = option(
        1,
        "Engines (replicas) behind one front, each on its own devices; routing_policy picks one per request",
        "device",
    )
    routing_policy: str = option(
        "prefix",
        "With data_parallel_size > 1, which engine gets a request: prefix (the one that has its prompt cached, unless "
        "its wait is longer), least_loaded, or a dotted path",
        "device",
    )
    max_engine_restarts: int = option(
        5,
        "How often in a row, without a token in between, an engine that died is replaced by a new one, where its "
        "requests go on, before they fail; 0: they fail at once",
        "device",
    )
    in_process: bool = option(
        False,
        "Run the engine in the server's own process, in a thread: less memory; a crash in native code or a step that "
        "hangs ends the server, and the engine computes on one rank, with quire's own models. LLM always does so",
        "device",
    )
    distributed_executor_backend: str | None = option(
        None,
        "How ranks run: uni (in the engine's own process), mp (one process per rank, on this machine), ray (one actor "
        "per rank, on the nodes of a Ray cluster), null (no model: constant tokens), or a dotted path; unset: mp with "
        "several ranks, else uni",
        "device",
    )
    ray_address: str | None = option(
        None,
        "Address of the Ray cluster's head, as 10.0.0.1:6379; local: start a cluster on this machine. unset: "
        "RAY_ADDRESS, else the cluster that runs on this machine, else a new one",
        "device",
    )
    ray_placement_timeout: int | None = option(
        None,
        "Seconds to wait for the Ray cluster to have GPUs (or CPUs) for all ranks; unset: 60 if they are in use, 5 if "
        "the cluster has too few",
        "device",
    )
    ray_env: tuple[str, ...] = option(
        (), "Environment variables passed from the engine to ranks on Ray, besides QUIRE_*, HF_*, CUDA_*, NCCL_* and "
        "similar", "device", many=True,
    )  # fmt: skip
    enable_expert_parallel: bool = option(
        False,
        "Place whole experts on the ranks instead of a slice of every expert; with data_parallel_size > 1 over all "
        "replicas, which then step together and exchange tokens",
        "device",
    )
    num_redundant_experts: int = option(
        0, "With enable_expert_parallel: slots, over all ranks, for copies of the most used experts", "device"
    )
    expert_rebalance_interval: int = option(
        0,
        "With enable_expert_parallel: steps between rebalances, which place experts by their load since the last one; "
        "0: only on demand (rebalance_experts)",
        "device",
    )

    block_size: int = option(16, "Tokens per KV block", "memory")
    gpu_memory_utilization: float = option(0.92, "Share of GPU memory for weights, activations and KV cache", "memory")
    cpu_kv_cache_share: float = option(
        0.25, "On a CPU, share of free memory for the KV cache; QUIRE_CPU_KVCACHE_SPACE (GiB) overrides it", "memory"
    )
    kv_cache_memory_bytes: int | None = option(
        None, "Size of the KV cache in bytes; overrides the two shares above", "memory"
    )
    num_gpu_blocks_override: int | None = option(
        None, "Number of KV blocks, on any device; overrides all sizes above", "memory"
    )
    enable_prefix_caching: bool = option(
        True, "Keep full KV blocks and reuse them for requests with the same prefix", "memory"
    )
    swap_space: float = option(
        0.0,
        "GiB of host memory for KV blocks that leave the device: preempted rows, cached prefixes, idle sessions. "
        "0: none",
        "memory",
    )
    kv_disk: str | None = option(
        None,
        "Folder for KV blocks and sessions on disk, the tier below swap_space; they survive a restart. One process may "
        "use it at a time",
        "memory",
    )
    kv_disk_size: float = option(
        32.0, "With kv_disk: most GiB of KV blocks in it; token ids of sessions are not counted", "memory"
    )
    kv_store: str = option(
        "disk", "With kv_disk: how blocks are stored there: disk, or a dotted path to a BlockStore class", "memory"
    )
    kv_tier_dtype: str = option(
        "auto",
        "How swap_space and kv_disk keep keys and values. auto: exactly, as the device does; int8_per_token_head: in 8 "
        "bits with a scale for each token and head, about half of 16 bits. Tokens after blocks that were there may "
        "differ from those of an engine without this; refused with batch_invariant",
        "memory",
        choices=KV_TIER_DTYPES,
    )
    isolate_tenants: bool = option(
        True,
        "Tenants share no cached prefixes, so that latency reveals nothing about the prompts of others. Over HTTP the "
        "tenant is the API key, or the X-Tenant header without keys",
        "memory",
    )
    max_tenant_sessions: int | None = option(
        None,
        "Most sessions of one tenant; more are refused (429). 0: no limit; unset: 10000 for AsyncLLM and the server, "
        "no limit for LLM. Several engines have equal shares of this and of the next two",
        "memory",
    )
    max_tenant_session_tokens: int | None = option(
        None,
        "Most tokens of one tenant's sessions together, a fork counted in full. 0: no limit; unset: 134217728 for "
        "AsyncLLM and the server, no limit for LLM",
        "memory",
    )
    max_tenant_session_bytes: int | None = option(
        None,
        "Most bytes of one tenant's sessions in the session log, with metadata and a fork counted in full. 0: no "
        "limit; unset: 1073741824 for AsyncLLM and the server, no limit for LLM",
        "memory",
    )
    session_idle_seconds: float | None = option(
        60.0,
        "Seconds without a turn after which a session is offloaded to host memory or disk; unset: only when the device "
        "needs its blocks",
        "memory",
    )
    kv_cache_dtype: str = option(
        "auto",
        "How keys and values are stored. auto: in the dtype of activations, or in fp8 if the checkpoint says so; fp8: "
        "e4m3 with the checkpoint's scales (1 if it has none); fp8_per_token_head, int8_per_token_head: in 8 bits with "
        "a scale for each token and head. The name of a dtype must be that of activations",
        "memory",
        choices=KV_CACHE_DTYPES,
    )

    max_num_seqs: int | None = option(None, "Most requests in one step; unset: by device", "scheduling")
    max_num_batched_tokens: int | None = option(None, "Most tokens in one step; unset: by device", "scheduling")
    enable_chunked_prefill: bool = option(
        True, "Split long prompts into chunks that share steps with decodes", "scheduling"
    )
    encoder_cache_tokens: int = option(
        16384,
        "Embeddings of images and videos (and of prompt_embeds) that are kept on the device; a larger image is refused",
        "scheduling",
    )
    vision: str = option(
        "on",
        "The encoder of a model that takes images: on, lazy (its weights are read when the first image comes) or off",
        "model",
        choices=("on", "lazy", "off"),
    )
    enable_prompt_embeds: bool = option(
        False, "Take prompts as embeddings: they are not checked against anything but their shape", "model"
    )
    prefix_group_attention: bool = option(
        True, "On a GPU, read the KV of a prefix shared by many running requests once for all of them", "scheduling"
    )
    max_step_stretch: float | None = option(
        None,
        "How much longer a step may take when it also computes prompts, as a multiple of a decode-only step; raised "
        "when many prompts wait. unset: 1.7 for AsyncLLM and the server, inf (no limit) for LLM",
        "scheduling",
    )
    grammar_timeout: int = option(
        5,
        "Seconds a schema, regex or grammar of structured_outputs may take to compile before its request is refused",
        "scheduling",
    )
    max_tenant_grammars: int | None = option(
        None,
        "Most schemas, regexes and grammars of one tenant's requests, waiting to be compiled or in use; more requests "
        "are refused (429). unset: 256 for AsyncLLM and the server, no limit for LLM",
        "scheduling",
    )
    scheduling_policy: str = option(
        "fcfs",
        "fcfs, priority (lowest value first, with ageing), fair (shares between tenants), or a dotted path",
        "scheduling",
    )
    tenant_weights: Mapping[str, float] | None = option(
        None,
        'With fair: weight of each tenant by name; twice the weight is twice the share. "*": all others, 1 if unset '
        "(JSON)",
        "scheduling",
    )
    tenant_max_rows: Mapping[str, float] | None = option(
        None,
        'With fair: most rows of a tenant, by name or "*"; a count, or below 1 a share of max_num_seqs (JSON)',
        "scheduling",
    )
    tenant_max_blocks: Mapping[str, float] | None = option(
        None,
        'With fair: most KV blocks of a tenant\'s rows, by name or "*"; a count, or below 1 a share of all blocks '
        "(JSON)",
        "scheduling",
    )

    speculative_config: Mapping[str, Any] | str | None = option(
        None,
        'Speculative decoding: vLLM\'s keys, as {"method": "ngram", "num_speculative_tokens": 5}; docs/speculative.md '
        "has them all (JSON)",
        "scheduling",
    )
    step_timeout: int = option(
        300,
        "Seconds a step may take; a step that takes longer is logged and the engine exits. 0: no limit",
        "scheduling",
    )

    limit_mm_per_prompt: Mapping[str, Any] | None = option(
        None,
        'Most images and videos of one prompt, as {"image": 4, "video": 0}; unset: 64 images and 8 videos (JSON)',
        "images",
    )
    mm_processor_kwargs: Mapping[str, Any] | None = option(
        None, 'Settings of the model\'s image processor, as {"max_pixels": 1003520} (JSON)', "images"
    )
    allowed_media_hosts: tuple[str, ...] = option(
        (),
        "Hosts that images and videos may be fetched from by https, as images.example.com; *.example.com: every host "
        "below it; *: any host with a public address; unset: no URL is fetched",
        "images",
        many=True,
    )
    allowed_local_media_path: str | None = option(
        None, "Folder whose files requests may name as file:// URLs or paths; unset: none", "images"
    )
    max_image_pixels: int = option(
        50_000_000,
        "Most pixels of an image, or of a frame of a video; all of one request may have four times as many. Checked "
        "before decoding",
        "images",
    )
    image_cache_bytes: int = option(
        256 * 2**20,
        "Memory in bytes for images that are resized already, for when they come again; off (0) with isolate_tenants",
        "images",
    )
    max_image_bytes: int = option(20 * 2**20, "Longest image or video file in bytes, sent or fetched", "images")
    max_video_frames: int = option(256, "Most frames of a video", "images")
    max_decode_bytes: int = option(
        2**30, "Memory in bytes for images that are decoded at the same time; others wait for it", "images"
    )
    media_timeout: float = option(10.0, "Seconds that fetching one image may take, redirects included", "images")
    report_energy: bool = option(
        False,
        "Meter energy: joules of each request in usage, of the server in /metrics. docs/energy.md says how",
        "energy",
    )
    energy_meter: str = option(
        "auto",
        "What measures energy: rapl (processors and memory), nvml (GPUs), estimate (CPU time times watts_per_core), "
        "several joined by +, or a dotted path. auto: nvml or rapl by device, else estimate; own: the same without "
        "rapl, which counts other programs too",
        "energy",
    )
    watts_per_core: float = option(6.0, "With the estimate: watts of a busy core", "energy")
    power_budget: float | None = option(
        None, "Most watts on average: steps are held back, at most 1 s each; several engines have equal shares",
        "energy",
    )  # fmt: skip
    energy_policy: str | None = option(
        None,
        "performance: no step waits; balanced, saver: steps wait for more requests to share them, first tokens at most "
        "0.02 s or 0.2 s later; or a dotted path. unset: performance, and saver on battery",
        "energy",
    )
    allow_gpu_power_control: bool = option(
        False,
        "Let power_budget lower the GPUs' power limits, and saver their clocks, where the driver permits it; put back "
        "at the end",
        "energy",
    )
    enable_lora: bool = option(False, "Serve LoRA adapters beside the model: requests may name one", "adapters")
    max_loras: int = option(
        8,
        "With enable_lora: adapters on the device at once; a step may mix them, others wait in host memory",
        "adapters",
    )
    max_lora_rank: int = option(16, "With enable_lora: largest rank of an adapter", "adapters")
    max_cpu_loras: int | None = option(
        None, "With enable_lora: adapters kept in host memory; at least max_loras. unset: twice max_loras", "adapters"
    )
    lora_dtype: str = option(
        "auto", "With enable_lora: data type of adapters; auto: that of activations", "adapters", choices=DTYPES
    )

    disable_log_stats: bool = option(False, "Do not log statistics every ten seconds", "logging")
    record: str | None = option(
        None,
        "Write every plan and result to this file for `quire replay`; it contains the token ids of prompts",
        "logging",
    )

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
        hosts = self.allowed_media_hosts
        object.__setattr__(self, "allowed_media_hosts", (hosts,) if isinstance(hosts, str) else tuple(hosts or ()))
        config_checks.check(self)

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """`speculative_config`, read and checked; None: no drafts."""
        return None if self.speculative_config is None else SpeculativeConfig.parse(self.speculative_config)

    @property
    def executor_name(self) -> str:
        """Name or dotted path of the executor backend, resolved by `executor/registry.py`."""
        return self.distributed_executor_backend or ("mp" if self.num_ranks > 1 else "uni")

    @property
    def num_ranks(self) -> int:
        """Ranks of the model: pipeline stages times tensor-parallel ranks."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def stage_layers(self) -> tuple[int, ...]:
        """`pipeline_layers` as integers; empty: spread evenly."""
        return tuple(map(int, self.pipeline_layers.split(","))) if isinstance(self.pipeline_layers, str) else ()

    @property
    def steps_together(self) -> bool:
        """Whether replicas share experts, and therefore run every step together."""
        return self.enable_expert_parallel and self.data_parallel_size > 1

    @property
    def expert_ranks(self) -> int:
        """Ranks that whole experts are placed on."""
        if not self.enable_expert_parallel:
            return 1
        return self.data_parallel_size if self.steps_together else self.tensor_parallel_size

    @property
    def wants_longest_len(self) -> bool:
        """Whether the model length is the most that fits the KV cache."""
        return self.max_model_len in ("auto", -1)

    @property
    def cpu_kv_cache_bytes(self) -> int | None:
        """QUIRE_CPU_KVCACHE_SPACE (or vLLM's variable) in bytes, or None if it is not set."""
        name = "QUIRE_CPU_KVCACHE_SPACE"
        text = os.environ.get(name, "")
        if not text and (theirs := os.environ.get("VLLM_CPU_KVCACHE_SPACE", "")) != "0":  # its 0 means unset
            name, text = "VLLM_CPU_KVCACHE_SPACE", theirs
        if not text:
            return None
        try:
            gib = float(text)
        except ValueError:
            gib = -1.0
        if not 0 < gib < math.inf:
            raise ConfigError(f"{name} must be a number of GiB above 0, got {text!r}")
        return int(gib * 2**30)
