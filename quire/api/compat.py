"""vLLM's engine arguments that quire does not have: harmless values are accepted, all others refused by name."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from quire.config import EngineConfig
from quire.errors import ConfigError

# Values that ask for nothing quire does not do anyway.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "runner": ("auto", "generate", "pooling"),
    "convert": ("auto", "none", "embed"),
    "task": ("auto", "generate", "embed"),
    "tokenizer_mode": ("auto", "hf", "slow"),
    "quantization": (None, "gguf"),
    "cpu_offload_gb": (0, 0.0),
    "disable_custom_all_reduce": (True, False),
    "disable_log_requests": (True, False),
    "use_v2_block_manager": (True, False),
    "async_scheduling": (None, True, False),
    "enable_lora": (False,),
    "enable_sleep_mode": (False,),
    "speculative_config": (None,),
    "compilation_config": (None, 0, 1, 2, 3),
    "max_seq_len_to_capture": (None, 8192),
    "limit_mm_per_prompt": (None,),
    "mm_processor_kwargs": (None,),
    "code_revision": (None,),
    "served_model_name": (None,),
    "override_generation_config": (None, {}),
    "num_scheduler_steps": (1,),
    "language_model_only": (False,),
}


def drop_neutral(arguments: dict[str, Any]) -> dict[str, Any]:
    """`arguments` without those of vLLM's that mean nothing here; any other that is not a setting of ours raises."""
    kept = {}
    for name, value in arguments.items():
        if name not in _NEUTRAL:
            kept[name] = value
        elif value not in _NEUTRAL[name]:
            raise ConfigError(f"{name}={value!r} is not supported by quire; leave it out", name, value)
    _refuse_unknown(kept)
    return kept


def _refuse_unknown(arguments: dict[str, Any]) -> None:
    known = [field.name for field in dataclasses.fields(EngineConfig)]
    for name, value in arguments.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else "docs/configuration.md lists them all"
            raise ConfigError(f"there is no setting {name!r} (given {value!r}); {hint}", name, value)
