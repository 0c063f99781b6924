"""vLLM's arguments that quire does not have: values that change nothing are accepted, all others refused by name."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping
from typing import Any

from quire.config import EngineConfig
from quire.errors import ConfigError, UnknownSettingError, ValidationError

Neutral = Mapping[str, tuple[Any, ...]]
"""Accepted values by name: those with no effect beyond what quire does anyway."""

ENGINE: Neutral = {
    "runner": ("auto", "generate", "pooling"),
    "convert": ("auto", "none", "embed"),
    "task": ("auto", "generate", "embed"),
    "tokenizer_mode": ("auto", "hf", "slow"),
    "quantization_config": (None,),
    "cpu_offload_gb": (0, 0.0),
    "offload_group_size": (0,),
    "kv_offloading_size": (None,),
    "kv_transfer_config": (None,),
    "disable_custom_all_reduce": (True, False),
    "disable_log_requests": (True, False),
    "use_v2_block_manager": (True, False),
    "async_scheduling": (None, True, False),
    "enable_lora": (False,),
    "max_loras": (None, 1),
    "max_lora_rank": (None, 16),
    "max_cpu_loras": (None,),
    "enable_sleep_mode": (False,),
    "enable_prompt_embeds": (False,),
    "compilation_config": (None, 0, 1, 2, 3),
    "attention_config": (None,),
    "structured_outputs_config": (None, {}),
    "pooler_config": (None,),
    "profiler_config": (None,),
    "performance_mode": ("balanced",),
    "prefix_caching_hash_algo": ("sha256",),
    "logprobs_mode": ("raw_logprobs",),
    "long_prefill_token_threshold": (0,),
    "stream_interval": (1,),
    "disable_sliding_window": (False,),
    "max_seq_len_to_capture": (None, 8192),
    "limit_mm_per_prompt": (None, {}),
    "mm_processor_kwargs": (None,),
    "allowed_local_media_path": ("",),
    "allowed_media_domains": (None,),
    "code_revision": (None,),
    "hf_config_path": (None,),
    "served_model_name": (None,),
    "override_generation_config": (None, {}),
    "num_scheduler_steps": (1,),
    "nnodes": (1,),
    "node_rank": (0,),
    "language_model_only": (False,),
}
"""Engine arguments: `LLM(...)`, and flags of commands that run an engine."""

SERVER: Neutral = {
    "chat_template_content_format": ("auto", "string", "openai"),
    "response_role": ("assistant",),
    "enable_prompt_tokens_details": (True, False),
    "enable_server_load_tracking": (True, False),
    "enable_log_outputs": (False,),
    "disable_fastapi_docs": (True, False),
    "disable_frontend_multiprocessing": (False,),
    "lora_modules": (None,),
}
"""Flags of `quire serve`."""

CALL: Neutral = {
    "lora_request": (None,),
    "tokenization_kwargs": (None, {}),
    "mm_processor_kwargs": (None, {}),
    "chat_template_content_format": ("auto", "string", "openai"),
    "trace_headers": (None, {}),
    "data_parallel_rank": (None,),
}
"""Arguments of `generate`, `chat` and the like."""


SPECULATION = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}
"""Engine arguments that are keys of `speculative_config`."""


def drop_neutral(arguments: dict[str, Any]) -> dict[str, Any]:
    """`arguments` without vLLM's that have no effect here; any other that is not an engine setting raises. None selects
    the default, except for settings with a None of their own."""
    arguments = with_speculation(arguments)
    kept = {name: value for name, value in arguments.items() if name not in ENGINE}
    refuse({name: value for name, value in arguments.items() if name in ENGINE}, ENGINE, ConfigError)
    _refuse_unknown(kept)
    return {name: value for name, value in kept.items() if value is not None or _FIELDS[name]}


def with_speculation(arguments: dict[str, Any]) -> dict[str, Any]:
    """`arguments` with those of `SPECULATION` as keys of `speculative_config`."""
    keys = {SPECULATION[name]: value for name, value in arguments.items() if name in SPECULATION and value is not None}
    arguments = {name: value for name, value in arguments.items() if name not in SPECULATION}
    if keys and isinstance(given := arguments.get("speculative_config") or {}, Mapping):
        arguments["speculative_config"] = {**keys, **given}
    return arguments


def check_call(vllm_arguments: Mapping[str, Any], method: str) -> None:
    """Refuse arguments that would have an effect in vLLM; one that vLLM does not have either is a TypeError."""
    for name in vllm_arguments:
        if name not in CALL:
            raise TypeError(f"{method}() got an unexpected keyword argument {name!r}")
    refuse(vllm_arguments, CALL, ValidationError)


def refuse(arguments: Mapping[str, Any], neutral: Neutral, kind: type[ValidationError]) -> None:
    """Raise for values that are not neutral."""
    for name, value in arguments.items():
        if value is not None and value not in neutral[name]:
            raise kind(f"{name}={value!r} is not supported by quire; leave it out", name, value)


_FIELDS = {field.name: "None" in str(field.type) for field in dataclasses.fields(EngineConfig)}
"""Engine settings, and whether None is one of their values."""


def _refuse_unknown(arguments: Mapping[str, Any]) -> None:
    for name, value in arguments.items():
        if name not in _FIELDS:
            close = difflib.get_close_matches(name, _FIELDS, n=1)
            hint = f"did you mean {close[0]}?" if close else "docs/configuration.md lists them all"
            raise UnknownSettingError(f"there is no setting {name!r} (given {value!r}); {hint}", name, value)


class EngineArgs(EngineConfig):
    """vLLM's name for `EngineConfig`. Also accepts vLLM's arguments that change nothing, as `LLM` does."""

    def __init__(self, model: str | os.PathLike[str] = EngineConfig.model, **settings: Any) -> None:
        super().__init__(model=os.fspath(model), **drop_neutral(settings))


AsyncEngineArgs = EngineArgs
