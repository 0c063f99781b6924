"""The table of vLLM's environment variables that decide who gets in or what is served: read, or refused by name.

All other `VLLM_*` variables concern speed, logs, builds or features that quire lacks: they are ignored, and one log
line names them. Command line and keywords override what is read.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from quire.errors import ConfigError

PREFIX = "VLLM_"
_TRUE, _FALSE = ("1", "true", "yes", "on", "y", "t"), ("", "0", "false", "no", "off", "n", "f", "none")


@dataclass(frozen=True)
class Variable:
    """A variable that is not ignored."""

    setting: str = ""
    """The setting it sets; empty: it is refused unless it is off."""
    parse: Callable[[str], Any] = str
    instead: str = ""
    """Why it is refused, and what to do."""
    reader: str = ""
    """What reads it, if not this module."""


def _switch(text: str) -> bool:
    if text.lower() not in (*_TRUE, *_FALSE):
        raise ValueError("give 1 or 0")
    return text.lower() in _TRUE


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError("give an integer of at least 1")
    return value


def _refused(instead: str) -> Variable:
    return Variable(instead=instead)


_ADAPTERS = "unset it, and name the folders of adapters with --allowed-lora-path"
_RESOLVERS = "quire looks for no adapters by itself; unset it, and load them by name"
_NODES = "use --data-parallel-size: quire starts its engines itself"

VARIABLES = {
    # Who gets in.
    "VLLM_API_KEY": Variable("api_key", reader="the server, if neither --api-key nor QUIRE_API_KEY is given"),
    "VLLM_SERVER_DEV_MODE": _refused("it opens routes to everyone; use --admin-key for quire's /admin routes"),
    "VLLM_HTTP_MAX_REQUEST_BODY_SIZE": Variable("max_body_bytes", _count),
    "VLLM_MAX_N_SEQUENCES": Variable("max_samples", _count),
    "VLLM_MAX_COMPLETION_PROMPTS": Variable("max_prompts", _count),
    # What is served.
    "VLLM_USE_MODELSCOPE": _refused("quire downloads from the Hugging Face Hub; unset it, or give a folder"),
    "VLLM_MODEL_REDIRECT_PATH": _refused("unset it, and give the model that it redirects to"),
    "VLLM_PLUGINS": _refused("quire runs none of vLLM's plugins; unset it"),
    "VLLM_TEST_FORCE_LOAD_FORMAT": _refused("use --load-format"),
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": _refused(_ADAPTERS),
    "VLLM_LORA_RESOLVER_CACHE_DIR": _refused(_RESOLVERS),
    "VLLM_LORA_RESOLVER_HF_REPO_LIST": _refused(_RESOLVERS),
    "VLLM_SKIP_MODEL_NAME_VALIDATION": Variable("accept_any_model_name", _switch),
    "VLLM_ENABLE_COHERE_API": _refused("quire has no /cohere routes; unset it"),
    "VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS": _refused("it changes the prompt of gpt-oss; unset it"),
    "VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS": _refused("quire runs no tools itself; unset it"),
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": _refused(
        "a length beyond the model's needs --hf-overrides with its rope settings; unset it"
    ),
    "VLLM_DP_SIZE": Variable(instead=_NODES, parse=lambda text: int(text) > 1),
    "VLLM_DP_RANK": Variable(instead=_NODES, parse=lambda text: int(text) > 0),
    # How it is computed.
    "VLLM_BATCH_INVARIANT": Variable("batch_invariant", _switch),
    "VLLM_PP_LAYER_PARTITION": Variable("pipeline_layers"),
    "VLLM_REGEX_COMPILATION_TIMEOUT_S": Variable("grammar_timeout", _count),
    "VLLM_CPU_KVCACHE_SPACE": Variable("QUIRE_CPU_KVCACHE_SPACE", reader="the engine, on a CPU"),
    "VLLM_LOGGING_LEVEL": Variable("log_level", reader="quire serve"),
}
"""By name. A refused variable may be set to 0, false or nothing."""


@dataclass(frozen=True)
class Environment:
    """What vLLM's variables say."""

    settings: Mapping[str, Any]
    """Settings of quire, by name."""
    ignored: tuple[str, ...]
    """Variables without effect."""

    def of(self, config: type) -> dict[str, Any]:
        """The settings that are fields of a configuration."""
        names = {field.name for field in dataclasses.fields(config)}
        return {name: value for name, value in self.settings.items() if name in names}

    def report(self, logger: logging.Logger) -> None:
        """Name the ignored variables, once for each set of them."""
        if self.ignored:
            _report(logger, self.ignored)


@functools.lru_cache(maxsize=64)
def _report(logger: logging.Logger, names: tuple[str, ...]) -> None:
    logger.info("environment variables of vLLM that have no effect here: %s", ", ".join(names))


def read(variables: Mapping[str, str]) -> Environment:
    """Read vLLM's variables; raises for one that must not be ignored and cannot be honoured."""
    settings: dict[str, Any] = {}
    ignored = []
    for name in sorted(variables):
        if not name.startswith(PREFIX):
            continue
        variable, text = VARIABLES.get(name), variables[name].strip()
        if variable is None:
            ignored.append(name)
        elif variable.reader or not text:
            continue
        elif variable.setting:
            settings[variable.setting] = _parsed(name, variable, text)
        elif _is_on(name, variable, text):
            raise ConfigError(f"{name}={text} is not supported by quire: {variable.instead}", name, text)
    return Environment(settings, tuple(ignored))


def _parsed(name: str, variable: Variable, text: str) -> Any:
    try:
        return variable.parse(text)
    except ValueError as error:
        raise ConfigError(f"{name}={text!r} cannot be read: {error}", name, text) from None


def _is_on(name: str, variable: Variable, text: str) -> bool:
    return text.lower() not in _FALSE if variable.parse is str else bool(_parsed(name, variable, text))
