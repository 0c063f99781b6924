"""The table of vLLM's arguments that quire lacks: which values have no effect here, and what to use instead of others.

A row is one argument: a keyword of vLLM's `LLM(...)`, its methods and parameters, a flag of its `serve` or `run-batch`.
Names are those of all releases from 0.6 to 0.33. `api/compat.py` applies the table to keywords, `cli/engine_flags.py`
to flags, and docs/from-vllm.md is generated from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from quire.errors import ValidationError, short_repr

Kind = Literal["value", "switch", "list"]
"""How the flag is written: with a value, as `--flag` or `--no-flag`, with several values."""
Accepted = tuple[Any, ...] | Mapping[str, "tuple[Any, ...] | None"] | None
"""Values without effect; for an object, values of each of its keys; None: any value."""


@dataclass(frozen=True)
class ForeignArgument:
    """An argument of vLLM that is no setting of quire."""

    name: str
    accepts: Accepted
    kind: Kind = "value"
    instead: str = ""
    """What to use instead of a value that is refused, or why there is nothing."""
    short: str = ""
    """Its short flag."""

    def allows(self, value: Any) -> bool:
        """Whether the value has no effect here. None always means the default."""
        if value is None or self.accepts is None:
            return True
        if isinstance(self.accepts, Mapping):
            return isinstance(value, Mapping) and not any(True for _ in self.refused_keys(value))
        return any(_equal(value, one) for one in self.accepts)

    def refused_keys(self, value: Mapping[str, Any]) -> Iterator[str]:
        """Keys of an object whose values would have an effect."""
        assert isinstance(self.accepts, Mapping)
        for key, given in value.items():
            accepted = self.accepts.get(key, ())
            if not (given is None or accepted is None or any(_equal(given, one) for one in accepted)):
                yield key


def _equal(value: Any, accepted: Any) -> bool:
    """Equal, and not a number for a truth value."""
    return bool(value == accepted) and (isinstance(value, bool) == isinstance(accepted, bool))


def check_argument(argument: ForeignArgument, value: Any, kind: type[ValidationError] = ValidationError) -> None:
    """Raise for a value that would have an effect in vLLM."""
    if argument.allows(value):
        return
    name, shown = argument.name, short_repr(value)
    if isinstance(argument.accepts, Mapping) and isinstance(value, Mapping):
        key = next(iter(argument.refused_keys(value)))
        name, shown = f"{name}.{key}", short_repr(value[key])
    raise kind(f"{name}={shown} is not supported by quire: {argument.instead or 'leave it out'}", argument.name, value)


def _any(names: str, kind: Kind = "value", **short: str) -> Iterator[ForeignArgument]:
    """Arguments whose values have no effect here: kernels, caches of what quire lacks, logs, numbers of workers."""
    for name in names.split():
        yield ForeignArgument(name, None, kind, short=short.get(name, ""))


def _only(name: str, *accepted: Any, instead: str = "", kind: Kind = "value", short: str = "") -> ForeignArgument:
    return ForeignArgument(name, accepted, kind, instead, short)


def _off(names: str, instead: str, **short: str) -> Iterator[ForeignArgument]:
    """Switches that may only be off."""
    for name in names.split():
        yield ForeignArgument(name, (False,), "switch", instead, short.get(name, ""))


def _unset(names: str, instead: str, kind: Kind = "value", **short: str) -> Iterator[ForeignArgument]:
    """Arguments that may only have an empty value."""
    for name in names.split():
        yield ForeignArgument(name, (None, "", (), [], {}), kind, instead, short.get(name, ""))


def _keys(name: str, instead: str, short: str = "", **accepted: tuple[Any, ...] | None) -> ForeignArgument:
    """An object: the values that each of its keys may have."""
    return ForeignArgument(name, accepted, "value", instead, short)


def _table(*parts: ForeignArgument | Iterator[ForeignArgument]) -> dict[str, ForeignArgument]:
    rows = [row for part in parts for row in ([part] if isinstance(part, ForeignArgument) else part)]
    table = {row.name: row for row in rows}
    assert len(table) == len(rows), "an argument is listed twice"
    return table


_PROMPT_ADAPTERS = "quire has LoRA adapters (enable_lora), and no prompt adapters"
_OLD_SPECULATION = 'use speculative_config, as {"method": "ngram", "num_speculative_tokens": 5}'
_NODES = "a server of quire runs on one machine, or over a Ray cluster (distributed_executor_backend ray)"
_GRAMMARS = ("auto", "xgrammar", "guidance", "outlines", "lm-format-enforcer")

# fmt: off
ENGINE = _table(
    # The model and its files.
    _only("runner", "auto", "generate", "pooling", instead="one engine generates and embeds"),
    _only("tokenizer_mode", "auto", "hf", "slow", instead="quire reads tokenizers as transformers does"),
    _only("config_format", "auto", "hf", instead="quire reads config.json"),
    _unset("hf_config_path code_revision", "quire reads configuration and code from the model's own folder"),
    _unset("model_class_overrides", "use model_impl"),
    _unset("model_weights", "give the weights' folder as the model"),
    _unset("quantization_config", "use quantization, which also takes a .json file"),
    _unset("quantization_param_path qlora_adapter_name_or_path", "quire reads scales from the checkpoint"),
    _unset("override_neuron_config override_attention_dtype", "quire does not run on that device"),
    _off("disable_sliding_window", "set max_model_len to the window"),
    _any("allow_deprecated_quantization use_tqdm_on_load", "switch"),
    _any("model_loader_extra_config pt_load_map_location max_parallel_loading_workers safetensors_load_strategy"),
    _any("safetensors_prefetch_num_threads safetensors_prefetch_block_size renderer_num_workers"),
    _any("ignore_patterns", "list"),
    # Answers.
    _only("logprobs_mode", "raw_logprobs", instead="quire reports logprobs before penalties and filters"),
    _keys(
        "structured_outputs_config",
        "quire enforces grammars with xgrammar; reasoning_parser is a setting of its own",
        backend=_GRAMMARS, disable_fallback=None, disable_any_whitespace=(True, False),
        disable_additional_properties=(True, False), reasoning_parser=("",), reasoning_parser_plugin=("",),
        enable_in_reasoning=(False,),
    ),
    _only("guided_decoding_backend", *_GRAMMARS, instead="quire enforces grammars with xgrammar"),
    _off("guided_decoding_disable_any_whitespace", "use disable_any_whitespace"),
    _any("guided_decoding_disable_additional_properties guided_decoding_disable_fallback", "switch"),
    _any("enable_reasoning use_fp64_gumbel", "switch"),
    _unset("reasoning_config", "requests have no budget of thinking"),
    _unset("logits_processor_pattern", "use logits_processors"),
    _unset("reasoning_parser_plugin", "give reasoning_parser a dotted path"),
    _unset("io_processor_plugin", "send prompts as text or token ids"),
    _off("return_sampling_mask enable_return_routed_experts enable_trace_replay", "quire does not report that"),
    _unset("aux_output_config watermark_config engram_config", "quire has no such thing"),
    _unset("diffusion_config", "quire generates token by token", diffusion_config="-dc"),
    # Kernels, graphs, compiling: speed only.
    _any("compilation_config", compilation_config="-cc"),
    _any("attention_config", attention_config="-ac"),
    _any("optimization_level", optimization_level="-O"),
    _any("kernel_config mamba_config ir_op_priority moe_backend linear_backend all2all_backend mamba_backend"),
    _any("mamba_ssu_algorithm mamba_cache_philox_rounds gdn_prefill_backend kda_prefill_backend kda_decode_backend"),
    _any("sparse_indexer_topk_backend dcp_comm_backend max_cudagraph_capture_size max_seq_len_to_capture"),
    _any("cudagraph_capture_sizes cuda_graph_sizes numa_bind_nodes numa_bind_cpus", "list"),
    _any("disable_custom_all_reduce disable_cascade_attn enable_flashinfer_autotune monokernel numa_bind", "switch"),
    _any("disable_nccl_for_dp_synchronization enable_bf16x3_router_gemm enable_shm_tensor_arena", "switch"),
    _any("enable_batch_sharded_sampling enable_cumem_allocator enable_nccl_comm_suspend dcp_q_replicate", "switch"),
    _any("enable_dbo enable_hc_sp enable_ep_weight_filter ray_workers_use_nsight", "switch"),
    _any("dbo_decode_token_threshold dbo_prefill_token_threshold ubatch_size dp_sync_interval"),
    # Ranks and nodes.
    _only("nnodes", 1, instead=_NODES, short="-n"),
    _only("node_rank", 0, instead=_NODES, short="-r"),
    _any("master_addr master_port distributed_timeout_seconds cpu_distributed_timeout_seconds"),
    _unset("device_ids", "set CUDA_VISIBLE_DEVICES", "list"),
    _only("decode_context_parallel_size", 1, instead="use tensor_parallel_size", short="-dcp"),
    _only("prefill_context_parallel_size", 1, instead="use tensor_parallel_size", short="-pcp"),
    _any("cp_kv_cache_interleave_size dcp_kv_cache_interleave_size expert_placement_strategy"),
    _unset("data_parallel_rank", _NODES, data_parallel_rank="-dpn"),
    _only("data_parallel_start_rank", 0, instead=_NODES, short="-dpr"),
    _unset("data_parallel_size_local", "use data_parallel_size", data_parallel_size_local="-dpl"),
    _unset("data_parallel_address", _NODES, data_parallel_address="-dpa"),
    _any("data_parallel_rpc_port", data_parallel_rpc_port="-dpp"),
    _only("data_parallel_backend", "mp", instead=_NODES, short="-dpb"),
    _off("data_parallel_hybrid_lb data_parallel_external_lb data_parallel_multi_port_external_lb",
         "quire balances between its own engines (routing_policy)", data_parallel_hybrid_lb="-dph",
         data_parallel_external_lb="-dpe", data_parallel_multi_port_external_lb="-dpm"),
    _off("enable_eplb", "use num_redundant_experts and expert_rebalance_interval"),
    _unset("eplb_config", "use num_redundant_experts and expert_rebalance_interval"),
    _any("eplb_step_interval eplb_window_size"),
    _any("eplb_log_balancedness", "switch"),
    _off("enable_elastic_ep enable_fault_tolerance", "a failed engine is restarted; its size is fixed"),
    _any("elastic_ep_max_dp_size fault_tolerance_config watchdog_config"),
    _off("worker_use_ray", "use distributed_executor_backend ray"),
    _only("worker_cls", "auto", instead="use distributed_executor_backend, which takes a dotted path"),
    _unset("worker_extension_cls", "use distributed_executor_backend, which takes a dotted path"),
    _unset("additional_config", "quire has no platform plugins with settings of their own"),
    # The KV cache and its tiers.
    _only("prefix_caching_hash_algo", "sha256", "sha256_cbor", "sha256_cbor_64bit", "xxhash", "xxhash_cbor", "builtin"),
    _any("prefix_match_unit prefix_cache_retention_interval mamba_block_size mamba_cache_mode replayssm_buffer_len"),
    _any("kv_sharing_fast_prefill swa_bounded_replay use_replayssm disable_hybrid_kv_cache_manager", "switch"),
    _any("enable_mamba_shared_prefix_checkpoint enable_mamba_fine_grained_prefix_cache", "switch"),
    _unset("kv_cache_dtype_skip_layers", "kv_cache_dtype is of all layers", "list"),
    _off("calculate_kv_scales", "use kv_cache_dtype fp8_per_token_head, which needs no scales"),
    _off("enable_mamba_cache_stochastic_rounding", "states are kept in the model's dtype"),
    _only("mamba_cache_dtype", "auto", instead="states are kept in the model's dtype"),
    _only("mamba_ssm_cache_dtype", "auto", instead="states are kept in the model's dtype"),
    _only("kv_offloading_backend", "native", instead="use swap_space and kv_disk"),
    _unset("kv_transfer_config", "use swap_space and kv_disk; KV does not move between servers"),
    _keys("kv_events_config", "quire publishes no cache events", enable_kv_cache_events=(False,), publisher=("null",)),
    _unset("ec_transfer_config ec_manager_config", "images are encoded by the engine that uses them"),
    _only("cpu_offload_gb", 0, instead="weights stay on the device: use quantization or tensor_parallel_size"),
    _only("offload_group_size", 0, instead="weights stay on the device: use quantization or tensor_parallel_size"),
    _any("offload_backend offload_num_in_group offload_prefetch_step"),
    _any("cpu_offload_params offload_params", "list"),
    # Scheduling.
    _any("async_scheduling scheduler_reserve_full_isl long_prefill_token_threshold_adaptive", "switch"),
    _any("use_v2_block_manager disable_async_output_proc multi_step_stream_outputs", "switch"),
    _any("long_prefill_token_threshold max_num_partial_prefills max_long_partial_prefills watermark"),
    _any("prefill_schedule_interval stream_interval num_scheduler_steps num_lookahead_slots preemption_mode"),
    _any("scheduler_delay_factor tokenizer_pool_size tokenizer_pool_type tokenizer_pool_extra_config"),
    _unset("scheduler_cls", "use scheduling_policy, which takes a dotted path"),
    _unset("max_num_scheduled_tokens", "use max_num_batched_tokens"),
    _unset("max_num_active_seqs", "use max_num_seqs"),
    _any("performance_mode"),
    # Drafts.
    _unset("speculative_model num_speculative_tokens ngram_prompt_lookup_max", _OLD_SPECULATION),
    _unset("ngram_prompt_lookup_min speculative_model_quantization speculative_max_model_len", _OLD_SPECULATION),
    _unset("speculative_disable_by_batch_size", _OLD_SPECULATION),
    _unset("speculative_draft_tensor_parallel_size", _OLD_SPECULATION,
           speculative_draft_tensor_parallel_size="-spec-draft-tp"),
    _only("spec_decoding_acceptance_method", "rejection_sampler", instead=_OLD_SPECULATION),
    _any("speculative_disable_mqa_scorer disable_logprobs_during_spec_decoding", "switch"),
    _any("typical_acceptance_sampler_posterior_threshold typical_acceptance_sampler_posterior_alpha"),
    # Adapters.
    _off("enable_prompt_adapter", _PROMPT_ADAPTERS),
    _unset("default_mm_loras", "name the adapter in each request"),
    _any("lora_extra_vocab_size max_lora_cls_labels"),
    _any("max_prompt_adapters max_prompt_adapter_token"),
    _any("long_lora_scaling_factors lora_target_modules", "list"),
    _any("fully_sharded_loras enable_lora_bias enable_tower_connector_lora specialize_active_lora", "switch"),
    _any("enable_mixed_moe_lora_format enable_moe_shared_loras", "switch"),
    # Images, audio, video: caches and kernels have no effect; what would let more in is refused.
    _any("mm_processor_cache_gb mm_processor_cache_type mm_hasher_algorithm mm_encoder_tp_mode"),
    _any("mm_shm_cache_max_object_size_mb mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path"),
    _any("mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin video_pruning_rate video_pruning_method"),
    _any("mm_tensor_ipc mm_processor_device mm_ipc_gpu_memory_gb"),
    _any("language_model_only interleave_mm_strings skip_mm_profiling disable_chunked_mm_input", "switch"),
    _any("mm_device_do_normalize enable_mm_processor_stats disable_mm_preprocessor_cache", "switch"),
    _any("enable_multimodal_encoder_data_parallel", "switch"),
    _unset("media_io_kwargs", "a video is a list of its frames, or an animation"),
    _off("mm_encoder_only enable_mm_embeds", "give images, which the engine encodes"),
    # Sleeping, training, profiling.
    _off("enable_sleep_mode", "quire cannot give its device memory back and keep running"),
    _any("sleep_mode_backend"),
    _any("sleep_mode_offload_cudagraph", "switch"),
    _any("sleep_preserve_parameter_names", "list"),
    _unset("weight_transfer_config", "weights are fixed while an engine runs"),
    _unset("profiler_config", "use `quire bench` or `--log-level debug`"),
    # Settings of the server that vLLM's `LLM(...)` takes too.
    _any("served_model_name", "list"),
    _any("enable_log_requests", "switch"),
    _any("shutdown_timeout"),
    _unset("reasoning_parser", "only the server separates reasoning from answers"),
    _unset("otlp_traces_endpoint", "only the server sends traces"),
    # Logs and metrics.
    _any("disable_log_requests aggregate_engine_logging kv_cache_metrics cudagraph_metrics", "switch"),
    _any("enable_mfu_metrics", "switch"),
    _any("enable_layerwise_nvtx_tracing enable_logging_iteration_details jit_monitor_verbose", "switch"),
    _any("kv_cache_metrics_sample jit_monitor_mode show_hidden_metrics_for_version custom_histogram_buckets"),
    _any("per_request_spec_decode_metrics logging_config log_config_file"),
    _any("collect_detailed_traces", "list"),
    _any("fail_on_environ_validation", "switch"),
)
# fmt: on
"""Engine arguments: keywords of `LLM(...)`, and flags of commands that run an engine."""

SERVER = _table(
    _only("chat_template_content_format", "auto", "string", "openai"),
    _only("response_role", "assistant", instead="answers have the role assistant"),
    _any("enable_server_load_tracking enable_log_deltas log_error_stack", "switch"),
    _any("enable_offline_docs disable_frontend_multiprocessing expand_tools_even_if_tool_choice_none", "switch"),
    _any("enable_tokenizer_info_endpoint cohere_is_reasoning_model", "switch"),
    _any("enable_flash_late_interaction use_gpu_for_pooling_score", "switch"),
    _any("h11_max_incomplete_event_size h11_max_header_count uvicorn_log_level disable_access_log_for_endpoints"),
    _any("cohere_format anthropic_disabled_thinking_effort data_parallel_supervisor_port"),
    _any("dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s dp_supervisor_probe_failure_threshold"),
    _off("enable_log_outputs", "quire logs no answers"),
    _off("return_tokens_as_token_ids", "requests have return_tokens_as_token_ids"),
    _off("tokens_only enable_scale_out", "quire serves its whole API"),
    _off("headless", _NODES),
    _off("grpc", "quire serves HTTP"),
    _unset("grpc_port", "quire serves HTTP"),
    _unset("tool_parser_plugin", "give tool_call_parser a dotted path"),
    _unset("tool_server", "quire runs no tools itself"),
    _unset("reasoning_effort_map", "use default_chat_template_kwargs"),
    _only("tool_strict_level", "auto", instead="tools say strict themselves"),
    _only("fingerprint_mode", "full", "hash", "none", instead="quire sends no system_fingerprint"),
    _unset("fingerprint_value", "quire sends no system_fingerprint"),
    _only("sse_keep_alive_interval", 0, instead="quire sends nothing while a stream is idle"),
    _unset("prompt_adapters", _PROMPT_ADAPTERS, "list"),
)
"""Flags of `quire serve`."""

BATCH = _table(_any("output_tmp_dir"))
"""Flags of `quire run-batch`."""

CALL = _table(
    _unset("tokenization_kwargs", "give prompt_token_ids"),
    _unset("mm_processor_kwargs", "give it in the prompt, beside multi_modal_data"),
    _only("chat_template_content_format", "auto", "string", "openai"),
    _any("trace_headers"),
    _unset("data_parallel_rank", "the engines' router chooses one (routing_policy)"),
    _unset("prompt_text session_id", "use sessions"),
)
"""Arguments of `generate`, `chat` and the like."""

PROMPT = _table(
    _unset("token_type_ids", "give text or token ids"),
    _unset("encoder_prompt decoder_prompt", "quire has no encoder-decoder models"),
)
"""Keys of a prompt that is a dict."""

SAMPLING = _table(
    _off("use_beam_search early_stopping", "use `beam_search`"),
    _only("length_penalty", 1.0, instead="use `beam_search`"),
    _only("best_of", 1, instead="give n, and choose among the sequences"),
    _unset("logits_processors", "give them to `LLM(logits_processors=...)`, and their parameters as extra_args"),
    _unset("guided_decoding", "use structured_outputs"),
    _unset("thinking_token_budget", "use max_tokens"),
    _unset("repetition_detection", "use repetition_penalty"),
    _unset("trace_decode_token_ids", "quire does not report that"),
    _off("skip_reading_prefix_cache", "give the prompt a cache_salt of its own"),
    _any("skip_clone", "switch"),
    _any("stream_interval routed_experts_prompt_start"),
)
"""Fields of `SamplingParams`."""

POOLING = _table(
    _unset("step_tag_id returned_token_ids additional_data", "quire has no reward models"),
    _any("skip_reading_prefix_cache requires_token_ids skip_clone", "switch"),
    _any("output_kind"),
)
"""Fields of `PoolingParams`."""

BEAMS = _table(_unset("structured_outputs", "use `generate`"))
"""Fields of `BeamSearchParams`."""

METHODS = {
    **dict.fromkeys(("sleep", "wake_up", "is_sleeping"), "it cannot give its device memory back and keep running"),
    **dict.fromkeys(("collective_rpc", "apply_model"), "its workers run no functions of others"),
    "reward": "it has no reward models; `classify` answers for classifiers",
    **dict.fromkeys(("start_profile", "stop_profile"), "use `quire bench`, or a profiler of your own"),
    **dict.fromkeys(
        ("init_weight_transfer_engine", "start_weight_update", "start_draft_weight_update", "update_weights",
         "finish_weight_update", "update_weight_version", "get_weight_version"),
        "weights are fixed while an engine runs",
    ),
    **dict.fromkeys(("pause_generation", "resume_generation", "is_paused"), "abort requests, and send them again"),
    "set_tokenizer": "give the tokenizer to the constructor",
    "reset_mm_cache": "images are cached by their content, and cannot be stale",
}  # fmt: skip
"""Methods of vLLM's engines that quire's lack, and why."""

RENAMED = {
    "allowed_media_domains": "allowed_media_hosts",
    "device_memory_utilization": "gpu_memory_utilization",
    "kv_offloading_size": "swap_space",
}
"""Engine arguments that are settings of quire under another name."""

RENAMED_SERVER = {
    "max_num_queued_reqs": "max_queued_requests",
    "max_num_queued_tokens": "max_queued_tokens",
}
"""The same for `quire serve`."""

SPECULATION = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}
"""Engine arguments that are keys of `speculative_config`."""

POOLER = ("pooler_config", "override_pooler_config")
"""Engine arguments whose `pooling_type` is the setting `pooling`."""

CLASSIFIERS = {
    "convert": (("auto", "none", "embed"), ("classify",)),
    "task": (("auto", "generate", "embed", "embedding"), ("classify", "score")),
}
"""Engine arguments that make a classifier of a model: values without effect, and values that are the key
`is_classifier` of `hf_overrides`."""

OVERRIDES = ("rope_scaling", "rope_theta")
"""Engine arguments that are keys of `hf_overrides`."""

GRAMMARS = "structured_outputs_config"
"""The engine argument whose key `disable_any_whitespace` is the setting of that name."""

VALUES = {
    "attention_backend": dict.fromkeys(
        (
            *("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION", "TORCH_SDPA", "XFORMERS", "CPU_ATTN"),
            *("FLASH_ATTN_VLLM_V1", "TRITON_ATTN_VLLM_V1", "FLASHINFER_VLLM_V1", "FLASHMLA", "FLASHINFER_MLA"),
            *("CUTLASS_MLA", "TRITON_MLA", "FLASH_ATTN_MLA"),
        ),
        "auto",
    ),
    "quantization": {"auto_awq": "awq", "auto_gptq": "gptq", "gpt_oss_mxfp4": "mxfp4", "inc": "auto-round"},
    "load_format": {
        "hf": "auto",
        "fastsafetensors": "safetensors",
        "instanttensor": "safetensors",
        "runai_streamer": "safetensors",
    },
}
"""vLLM's values of settings that quire has too, and the value of quire that does the same."""
