"""docs/configuration.md, written from the fields themselves: `python -m quire.cli.reference`."""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Iterator
from typing import Any

import msgspec

from quire.config import EngineConfig
from quire.messages.sampling import HELP, SamplingParams
from quire.server.config import ServerConfig

INTRODUCTION = """\
<!-- Written by `make docs` from the configuration classes and quire/messages/sampling.py. Do not edit. -->

# Configuration

Every field of `EngineConfig` is a keyword of `LLM(...)` and a flag of the commands that run a model: `max_model_len` is
`LLM(max_model_len=4096)` and `--max-model-len 4096`. On the command line `_` and `-` are equal in names, a boolean is
`--flag` or `--no-flag`, mappings are JSON, lists repeat their flag, and `max-model-len`, `max-num-batched-tokens`,
`kv-cache-memory-bytes` and the server's limits in bytes or tokens take suffixes: `4k` is 4000, `4K` is 4096, `2G` is
2 GiB. A wrong value is refused when the engine is made, with the value and what would be right.
"""
GROUPS = {
    "model": "The model",
    "device": "Where it runs",
    "memory": "The KV cache",
    "scheduling": "Who runs when",
    "logging": "Reports",
    "listening": "Where it listens",
    "access": "Who may ask",
    "answers": "What it answers",
    "limits": "Limits",
    "observability": "Logs, metrics, traces",
}
SERVER = """\
# The server

Flags of `quire serve` beside those above, and keys of its `--config` file (YAML), where the command line wins.
"""
SAMPLING = """\
# Sampling parameters

Fields of `SamplingParams`, as vLLM's of the same name in default and meaning. `quire generate` and `quire chat` have
flags for most of them. With `sampling_params=None` the model's own `generation_config.json` sets the defaults.
"""
ENVIRONMENT = """\
# Environment variables

| variable | meaning |
|---|---|
| `QUIRE_CACHE` | downloads, kernels, what `quire tune` found; `$XDG_CACHE_HOME/quire` or `~/.cache/quire` if unset |
| `QUIRE_CPU_KVCACHE_SPACE` | GiB of KV cache on a CPU, for all ranks and engines there; `kv_cache_memory_bytes` wins |
| `HF_TOKEN`, `HF_HOME`, `HF_ENDPOINT`, `HF_HUB_OFFLINE` | as the Hugging Face libraries define them |
| `QUIRE_API_KEY` | as `--api-key`; several are parted by commas |
| `QUIRE_ADMIN_KEY` | as `--api-key` of `quire inspect --url` |
| `OMP_NUM_THREADS` | threads on a CPU |
| `CUDA_VISIBLE_DEVICES` | which GPUs are seen; the first is used, or one a rank |
| `QUIRE_SHARE_GPU` | `1`: ranks may share a GPU, over gloo, mostly without captured graphs: for tests, not for speed |
| `TRITON_CACHE_DIR` | where Triton keeps compiled GPU kernels; `~/.triton/cache` if unset |
| `CXX` | compiler of the CPU kernels; `g++` or `clang++` if unset |
"""


def reference() -> str:
    """The whole page."""
    parts = [INTRODUCTION, *_settings(EngineConfig), SERVER, *_settings(ServerConfig), SAMPLING, *_sampling(), ""]
    return "\n".join([*parts, ENVIRONMENT.rstrip("\n")])


def _settings(config: type) -> Iterator[str]:
    fields = dataclasses.fields(config)
    for group, members in itertools.groupby(fields, key=lambda field: field.metadata["group"]):
        yield f"## {GROUPS.get(group, group.capitalize())}\n"
        yield "| field | default | meaning |"
        yield "|---|---|---|"
        for field in members:
            choices = field.metadata.get("choices")
            listed = f". One of {', '.join(f'`{choice}`' for choice in choices)}" if choices else ""
            meaning = _cell(field.metadata["help"]) + listed
            yield f"| `{field.name}` | {_default(field.default)} | {meaning} |"
        yield ""


def _sampling() -> Iterator[str]:
    yield "| field | default | meaning |"
    yield "|---|---|---|"
    for field in msgspec.structs.fields(SamplingParams):
        yield f"| `{field.name}` | {_default(field.default)} | {_cell(HELP[field.name])} |"


def _default(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return f"`{value.name}`"
    return "" if value is None or value == () else f"`{value!r}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(reference())
