"""Validates engine settings: allowed values, and which settings exclude or need each other."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.config import EngineConfig

PILLOW_PIXELS = 178_956_970
"""Pillow refuses images of more."""
MAX_LORA_RANK = 512
MAX_PIPELINE_DEPTH = 4
"""Most steps in flight besides the one being collected: with more, finished requests are only noticed later."""


def check(config: EngineConfig) -> None:
    """Raise `ConfigError` for the first invalid setting."""
    _check_counts(config)
    _check_shares(config)
    _check_tiers(config)
    _check_model_len(config)
    _check_quantization(config)
    _check_budgets(config)
    _check_stretch(config)
    _check_parallel(config)
    _check_experts(config)
    _check_invariant(config)
    _check_tenants(config)
    _check_speculation(config)
    _check_media(config)
    _check_energy(config)
    _check_adapters(config)


def _check_adapters(config: EngineConfig) -> None:
    _check_integer(config, "max_loras", 1)
    _check_integer(config, "max_lora_rank", 1)
    if config.max_lora_rank > MAX_LORA_RANK:
        raise ConfigError(
            f"max_lora_rank must be at most {MAX_LORA_RANK}, got {config.max_lora_rank}",
            "max_lora_rank",
            config.max_lora_rank,
        )
    if config.max_cpu_loras is not None:
        _check_integer(config, "max_cpu_loras", config.max_loras)
    if config.enable_lora and config.batch_invariant:
        raise ConfigError(
            "batch_invariant with enable_lora is not implemented: use one of them", "batch_invariant", True
        )
    if config.enable_lora and config.steps_together:
        raise ConfigError(
            "enable_lora with experts that are spread over replicas (enable_expert_parallel with data_parallel_size > "
            "1) is not implemented",
            "enable_lora",
            True,
        )


def _check_counts(config: EngineConfig) -> None:
    for name, least in (
        ("block_size", 1), ("max_num_seqs", 1), ("max_num_batched_tokens", 1), ("kv_cache_memory_bytes", 1),
        ("num_gpu_blocks_override", 1), ("pipeline_depth", 0), ("max_logprobs", -1), ("max_engine_restarts", 0),
        ("threads", 0),
        ("step_timeout", 0), ("grammar_timeout", 1), ("max_tenant_grammars", 1), ("ray_placement_timeout", 0),
        ("max_tenant_sessions", 0), ("max_tenant_session_tokens", 0), ("max_tenant_session_bytes", 0),
        ("max_image_pixels", 1), ("max_image_bytes", 1), ("max_video_frames", 1), ("max_decode_bytes", 1),
    ):  # fmt: skip
        if getattr(config, name) is not None:
            _check_integer(config, name, least)
    if (depth := config.pipeline_depth or 0) > MAX_PIPELINE_DEPTH:
        raise ConfigError(f"pipeline_depth must be at most {MAX_PIPELINE_DEPTH}, got {depth}", "pipeline_depth", depth)


def _check_integer(config: EngineConfig, name: str, least: int) -> None:
    value = getattr(config, name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} must be an integer of at least {least}, got {value!r}", name, value)


def _check_shares(config: EngineConfig) -> None:
    if config.encoder_cache_tokens < 1:
        raise ConfigError(
            f"encoder_cache_tokens must be at least 1, got {config.encoder_cache_tokens}",
            "encoder_cache_tokens",
            config.encoder_cache_tokens,
        )
    if config.image_cache_bytes < 0:
        raise ConfigError(
            f"image_cache_bytes must be 0 or more, got {config.image_cache_bytes}",
            "image_cache_bytes",
            config.image_cache_bytes,
        )
    if not 0 <= config.weight_copy_share <= 1:
        raise ConfigError(
            f"weight_copy_share must be between 0 and 1, got {config.weight_copy_share}",
            "weight_copy_share",
            config.weight_copy_share,
        )
    for name in ("gpu_memory_utilization", "cpu_kv_cache_share"):
        value = getattr(config, name)
        if not isinstance(value, (int, float)) or not math.isfinite(value) or not 0 < value <= 1:
            raise ConfigError(f"{name} must be in (0, 1], got {value!r}", name, value)


def _check_tiers(config: EngineConfig) -> None:
    for name, least in (("swap_space", 0), ("kv_disk_size", 2**-20)):
        value = getattr(config, name)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not least <= value < math.inf:
            raise ConfigError(f"{name} must be a number of GiB of at least {least:g}, got {value!r}", name, value)

    if config.kv_store != "disk" and config.kv_disk is None:
        raise ConfigError(f"kv_store={config.kv_store!r} needs kv_disk, a folder", "kv_store", config.kv_store)

    if config.kv_tier_dtype != "auto":
        if not config.swap_space and config.kv_disk is None:
            raise ConfigError(
                f"kv_tier_dtype={config.kv_tier_dtype!r} needs swap_space or kv_disk: no blocks are kept without",
                "kv_tier_dtype",
                config.kv_tier_dtype,
            )
        if config.batch_invariant:
            raise ConfigError(
                f"kv_tier_dtype {config.kv_tier_dtype} rounds blocks that leave the device, so that a request's tokens "
                "depend on which blocks did: with batch_invariant use auto",
                "kv_tier_dtype",
                config.kv_tier_dtype,
            )

    idle = config.session_idle_seconds
    if idle is not None and (not isinstance(idle, (int, float)) or isinstance(idle, bool) or not idle >= 0):
        raise ConfigError(f"session_idle_seconds must be at least 0, got {idle!r}", "session_idle_seconds", idle)


def _check_model_len(config: EngineConfig) -> None:
    value = config.max_model_len
    if value in (None, "auto", -1):
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 2:
        raise ConfigError(
            f"max_model_len must be an integer of at least 2, or 'auto'; got {value!r}", "max_model_len", value
        )


def _check_quantization(config: EngineConfig) -> None:
    value = config.quantization
    if value in ("None", ""):
        object.__setattr__(config, "quantization", None)
    elif value is not None and not isinstance(value, str):
        raise ConfigError(f"quantization must be a name, a file or JSON, got {value!r}", "quantization", value)
    elif value is not None and value.startswith("auto"):
        try:
            bits = float(value.removeprefix("auto:"))
        except ValueError:
            bits = 0.0
        if not 4 <= bits <= 16:
            raise ConfigError(
                f"quantization auto:BITS needs the average bits of a weight, 4 to 16, as auto:5; got {value!r}",
                "quantization",
                value,
            )


def _check_budgets(config: EngineConfig) -> None:
    rows, tokens = config.max_num_seqs, config.max_num_batched_tokens
    if rows is not None and tokens is not None and tokens < rows:
        raise ConfigError(
            f"max_num_batched_tokens ({tokens}) is below max_num_seqs ({rows}): a step needs a token for each request",
            "max_num_batched_tokens",
            tokens,
        )


def _check_stretch(config: EngineConfig) -> None:
    value = config.max_step_stretch
    if value is None:
        return
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 1:
        raise ConfigError(
            f"max_step_stretch must be a number above 1 (inf: no limit), got {value!r}", "max_step_stretch", value
        )
    if not config.enable_chunked_prefill and math.isfinite(value):
        raise ConfigError(
            f"max_step_stretch ({value}) splits prompts into chunks, which enable_chunked_prefill=False forbids: "
            "unset one of them",
            "max_step_stretch",
            value,
        )


def _check_parallel(config: EngineConfig) -> None:
    backend = config.distributed_executor_backend
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        _check_integer(config, name, 1)
    _check_stages(config)
    if backend == "uni" and config.num_ranks > 1:
        name = "tensor_parallel_size" if config.tensor_parallel_size > 1 else "pipeline_parallel_size"
        raise ConfigError(
            f"distributed_executor_backend 'uni' runs one rank, but {name} is {getattr(config, name)}: use 'mp'",
            "distributed_executor_backend",
            backend,
        )
    _check_ray(config)
    _check_in_process(config)
    if config.record is not None and config.data_parallel_size > 1:
        raise ConfigError(
            f"record works with one engine, but data_parallel_size is {config.data_parallel_size}: use one replica",
            "record",
            config.record,
        )
    if backend == "ray" and config.kv_disk is not None:
        raise ConfigError(
            "kv_disk needs all ranks on the engine's machine, but distributed_executor_backend is 'ray': unset "
            "kv_disk, or use 'mp'",
            "kv_disk",
            config.kv_disk,
        )


def _check_in_process(config: EngineConfig) -> None:
    if not config.in_process:
        return
    for name in ("data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size"):
        if (value := getattr(config, name)) > 1:
            raise ConfigError(
                f"in_process runs one engine with one rank, in the caller's process, but {name} is {value}: use one of "
                "them",
                "in_process",
                True,
            )
    for name, refused in (("distributed_executor_backend", ("mp", "ray")), ("model_impl", ("transformers",))):
        if (chosen := getattr(config, name)) in refused:
            raise ConfigError(
                f"in_process runs one rank of quire's own models, in the caller's process, but {name} is {chosen!r}: "
                "use one of them",
                "in_process",
                True,
            )


def _check_ray(config: EngineConfig) -> None:
    if config.distributed_executor_backend == "ray":
        return
    for name in ("ray_address", "ray_placement_timeout", "ray_env"):
        if getattr(config, name) not in (None, ()):
            raise ConfigError(
                f"{name} is set, but distributed_executor_backend is {config.distributed_executor_backend!r}: set it "
                f"to 'ray', or unset {name}",
                name,
                getattr(config, name),
            )


def _check_stages(config: EngineConfig) -> None:
    if config.pipeline_layers is None:
        return
    given, stages = config.pipeline_layers, config.pipeline_parallel_size
    try:
        counts = [int(str(each)) for each in (given.split(",") if isinstance(given, str) else given)]
    except (TypeError, ValueError):
        counts = []
    if len(counts) != stages or min(counts) < 1:
        raise ConfigError(
            f"pipeline_layers must give each of the {stages} stages (pipeline_parallel_size) at least 1 layer, "
            f"as {','.join(['8'] * stages)}; got {given!r}",
            "pipeline_layers",
            given,
        )
    object.__setattr__(config, "pipeline_layers", ",".join(map(str, counts)))


def _check_experts(config: EngineConfig) -> None:
    for name in ("num_redundant_experts", "expert_rebalance_interval"):
        _check_integer(config, name, 0)
        if (value := getattr(config, name)) and not config.enable_expert_parallel:
            raise ConfigError(
                f"{name} ({value}) needs enable_expert_parallel: without it every rank has a slice of every expert",
                name,
                value,
            )
    if config.steps_together and config.executor_name != "uni":
        raise ConfigError(
            f"enable_expert_parallel over {config.data_parallel_size} replicas (data_parallel_size) supports only "
            "engines of one rank: unset tensor_parallel_size, pipeline_parallel_size and distributed_executor_backend",
            "enable_expert_parallel",
            True,
        )


def _check_invariant(config: EngineConfig) -> None:
    """Refuses settings under which the order of a floating-point sum depends on the batch."""
    if not config.batch_invariant:
        return
    if config.tensor_parallel_size > 2:
        raise ConfigError(
            f"batch_invariant supports at most 2 tensor-parallel ranks, tensor_parallel_size is "
            f"{config.tensor_parallel_size}: with more, the order of sums depends on the batch",
            "batch_invariant",
            True,
        )
    for name in ("num_redundant_experts", "expert_rebalance_interval"):
        if value := getattr(config, name):
            raise ConfigError(
                f"batch_invariant needs a fixed placement of experts, but {name} is {value}: unset one of them",
                name,
                value,
            )


def _check_tenants(config: EngineConfig) -> None:
    for name in ("tenant_weights", "tenant_max_rows", "tenant_max_blocks"):
        table = getattr(config, name)
        if table is None:
            continue
        if not isinstance(table, Mapping):
            raise ConfigError(f'{name} must map tenants to numbers, as {{"*": 1}}; got {table!r}', name, table)
        if config.scheduling_policy in ("fcfs", "priority"):
            raise ConfigError(
                f"{name} needs scheduling_policy='fair'; {config.scheduling_policy!r} ignores tenants", name, table
            )
        for tenant, value in table.items():
            if not isinstance(tenant, str):
                raise ConfigError(f"{name} must have tenant names as keys, got {tenant!r}", name, tenant)
            _check_tenant_value(name, tenant, value)


def _check_energy(config: EngineConfig) -> None:
    for name in ("watts_per_core", "power_budget"):
        value = getattr(config, name)
        if value is None:
            continue
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
            raise ConfigError(f"{name} must be a number of watts above 0, got {value!r}", name, value)
    is_used = config.report_energy or config.power_budget is not None or config.energy_policy is not None
    if config.allow_gpu_power_control and config.power_budget is None and config.energy_policy is None:
        raise ConfigError(
            "allow_gpu_power_control needs power_budget or energy_policy, which say what to lower",
            "allow_gpu_power_control",
            True,
        )
    if is_used and config.distributed_executor_backend == "ray":
        raise ConfigError(
            "energy is metered on the engine's machine, but distributed_executor_backend is 'ray': use 'mp'",
            "report_energy",
            config.report_energy,
        )
    if is_used and config.steps_together and (config.power_budget is not None or config.energy_policy is not None):
        raise ConfigError(
            "power_budget and energy_policy hold back one engine's steps, but replicas that share experts step "
            "together: unset enable_expert_parallel, or these",
            "power_budget",
            config.power_budget,
        )
    if config.data_parallel_size > 1 and "rapl" in config.energy_meter.split("+"):
        raise ConfigError(
            f"energy_meter 'rapl' counts the whole machine, but data_parallel_size is {config.data_parallel_size}: "
            "each engine would count the others' energy too. Use 'own'",
            "energy_meter",
            config.energy_meter,
        )


def _check_speculation(config: EngineConfig) -> None:
    speculation = config.speculation
    if speculation is None:
        return
    # Other processes read it again: without the keys that have no effect, of which there was a warning.
    object.__setattr__(config, "speculative_config", speculation.to_dict())
    if speculation.has_model and config.pipeline_parallel_size > 1:
        raise ConfigError(
            f"speculative_config: method {speculation.method!r} needs the whole model on each rank, but "
            f"pipeline_parallel_size is {config.pipeline_parallel_size}: use ngram or suffix",
            "speculative_config",
            config.speculative_config,
        )


def _check_tenant_value(name: str, tenant: str, value: object) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if name == "tenant_weights":
        if not is_number or not 0 < value < math.inf:  # type: ignore[operator]
            raise ConfigError(f"{name}[{tenant!r}] must be a number above 0, got {value!r}", name, value)
    elif not is_number or not (0 < value < 1 or (isinstance(value, int) and value >= 1)):  # type: ignore[operator]
        raise ConfigError(
            f"{name}[{tenant!r}] must be an integer of at least 1 (a count) or a number between 0 and 1 (a share), "
            f"got {value!r}",
            name,
            value,
        )


def _check_media(config: EngineConfig) -> None:
    if config.max_image_pixels > PILLOW_PIXELS:
        raise ConfigError(
            f"max_image_pixels is at most {PILLOW_PIXELS}, which Pillow itself allows; got {config.max_image_pixels}",
            "max_image_pixels",
            config.max_image_pixels,
        )
    for kind, value in (config.limit_mm_per_prompt or {}).items():
        count = value.get("count") if isinstance(value, Mapping) else value
        is_count = isinstance(count, int) and not isinstance(count, bool) and count >= 0
        if kind not in ("image", "video", "audio") or not is_count:
            raise ConfigError(
                f'limit_mm_per_prompt is an object such as {{"image": 4, "video": 0}}, with counts of at least 0; got '
                f"{kind}: {value!r}",
                "limit_mm_per_prompt",
                value,
            )
    seconds = config.media_timeout
    if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not 0 < seconds < math.inf:
        raise ConfigError(f"media_timeout must be a number of seconds, got {seconds!r}", "media_timeout", seconds)
    for host in config.allowed_media_hosts:
        if not isinstance(host, str) or not host or "/" in host or "@" in host:
            raise ConfigError(
                f"allowed_media_hosts holds {host!r}; a host is a name as images.example.com, *.example.com or *",
                "allowed_media_hosts",
                host,
            )
    if config.allowed_local_media_path and not os.path.isdir(config.allowed_local_media_path):
        raise ConfigError(
            f"allowed_local_media_path is {config.allowed_local_media_path!r}, which is not a folder",
            "allowed_local_media_path",
            config.allowed_local_media_path,
        )
