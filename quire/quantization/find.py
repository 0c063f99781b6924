"""Finds what the weights of a model are quantized to: by its checkpoint, or by the user's wish."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from quire.config import EngineConfig
from quire.errors import ConfigError, QuireError
from quire.loading.files import ModelFiles, read_json
from quire.loading.model_config import ModelConfig
from quire.quantization.formats.base import Scheme
from quire.quantization.formats.on_load import KINDS
from quire.quantization.schemes.on_load import UNQUANTIZED, OnLoadScheme
from quire.quantization.schemes.registry import SCHEMES, scheme_of

logger = logging.getLogger(__name__)

_SAME = {
    "awq_marlin": "awq",
    "gptq_marlin": "gptq",
    "compressed_tensors": "compressed-tensors",
    "modelopt_fp4": "modelopt",
}
"""Other names that vLLM's users give."""


def find_scheme(config: EngineConfig, files: ModelFiles, model: ModelConfig, on_cpu: bool = False) -> Scheme | None:
    """How the model's matrices are, or will be, in few bits; None: they are not.

    `config.quantization` must agree with the checkpoint; matrices in 16 bits (or of a GGUF file) are quantized on load.
    `on_cpu`: matrices are packed for a CPU's products as `config.cpu_weights` says. Without that a GGUF file is
    dequantized while loading, unless `config.quantization` is "gguf": products with weights packed as on a GPU are slow
    there.
    """
    wish = config.quantization
    if resolve_cpu_weights(config, files, model, on_cpu).cpu_weights == "packed":
        return _packed_on_cpu(config, files, model, on_cpu)
    kind = files.kind if config.load_format == "auto" else config.load_format
    if table := on_load_kinds(wish):
        if kind != "gguf":
            found = _checkpoint_scheme(files, model, kind)
            if found is not None and found.name != wish:
                raise ConfigError(
                    f"quantization is {wish!r}, but {files.name} is already quantized ({found.name}): leave it out",
                    "quantization",
                    wish,
                )
            if found is not None:
                return _reported(found)
        return OnLoadScheme(table)
    if kind == "gguf":
        from quire.loading.gguf import GGUFCheckpoint
        from quire.quantization.schemes.gguf import GGUFScheme

        if wish is not None and wish != "gguf":
            raise ConfigError(f"quantization is {wish!r}, but {files.name} is a GGUF file", "quantization", wish)
        if files.gguf is None or (on_cpu and wish is None):
            return None
        return GGUFScheme(GGUFCheckpoint(files.gguf))
    found = _checkpoint_scheme(files, model, kind)
    wanted = _SAME.get(wish or "", wish)
    if wanted is not None and (found is None or found.name != wanted):
        actual = "not quantized" if found is None else f"quantized as {found.name!r}"
        raise ConfigError(f"quantization is {wish!r}, but {files.name} is {actual}", "quantization", wish)
    return None if found is None else _reported(found)


def resolve_cpu_weights(config: EngineConfig, files: ModelFiles, model: ModelConfig, on_cpu: bool) -> EngineConfig:
    """`config` with `cpu_weights` "auto" replaced by what it means for this model and device."""
    if config.cpu_weights != "auto":
        return config
    is_packed = False
    if on_cpu and config.quantization != "gguf":  # which asks for the layout of a GPU
        try:
            found = _few_bits(config, files, model)
        except QuireError:  # loading names what is wrong with the checkpoint
            found = ""
        if not isinstance(found, str):
            from quire.kernels.cpu.build import library

            is_packed = library() is not None  # without kernels, packed products are slower than dense ones
    return replace(config, cpu_weights="packed" if is_packed else "dense")


def _packed_on_cpu(config: EngineConfig, files: ModelFiles, model: ModelConfig, on_cpu: bool) -> Scheme:
    """The scheme of matrices that stay packed on a CPU; raises ConfigError where there are none."""
    found: Scheme | str = "the device is not a CPU; elsewhere matrices in few bits always stay packed"
    if on_cpu:
        found = _few_bits(config, files, model)
    if isinstance(found, str):
        raise ConfigError(f"cpu_weights is 'packed', but {found}", "cpu_weights", "packed")
    return found


def _few_bits(config: EngineConfig, files: ModelFiles, model: ModelConfig) -> Scheme | str:
    """The scheme of a checkpoint's matrices as a CPU's products take them, or why there is none."""
    from quire.quantization.formats.gguf import PACKED_ON_CPU
    from quire.quantization.schemes.on_cpu import PackedScheme

    kind = files.kind if config.load_format == "auto" else config.load_format
    wish = config.quantization
    if on_load_kinds(wish):
        return f"quantization is {wish!r}"
    if files.gguf is not None and kind in ("gguf", "dummy"):
        from quire.loading.gguf import GGUFCheckpoint
        from quire.quantization.schemes.gguf import GGUFScheme

        if wish not in (None, "gguf"):
            return f"quantization is {wish!r}"
        scheme = GGUFScheme(GGUFCheckpoint(files.gguf), interleaved=True)
        return f"{files.name} has no matrix in one of {', '.join(PACKED_ON_CPU)}" if scheme.is_empty else scheme
    if files.gguf is not None:
        return f"load_format is {config.load_format!r}, and {files.name} is a GGUF file"
    found = _checkpoint_scheme(files, model, kind)
    wanted = _SAME.get(wish or "", wish)
    if wanted is not None and (found is None or found.name != wanted):
        return f"quantization is {wish!r}"
    if found is None:
        return f"the matrices of {files.name} are not in few bits"
    packed = PackedScheme(found)
    return f"{files.name} has no integer matrices ({found.name})" if packed.is_empty else packed


def on_load_kinds(wish: str | None) -> Mapping[str, str] | str | None:
    """What the setting `quantization` rounds on load: a kind for all matrices, or one by name; None: nothing.

    Raises ConfigError for a setting that means nothing.
    """
    if wish is None or wish in _SAME or wish == "gguf":
        return None
    if wish in KINDS:
        return wish
    if wish in SCHEMES:
        return None
    if wish.startswith("auto:"):
        raise ValueError(f"quantization {wish!r} was not resolved: see worker/sensitivity.py")
    if wish.lstrip().startswith("{"):
        try:
            table = json.loads(wish)
        except ValueError as error:
            raise ConfigError(f"quantization is not valid JSON: {error}", "quantization", wish) from None
    elif wish.endswith(".json"):
        path = Path(wish).expanduser()
        if not path.is_file():
            raise ConfigError(f"quantization is {wish!r}, and there is no such file", "quantization", wish)
        table = read_json(path)
    else:
        known = ", ".join(sorted({*KINDS, *SCHEMES, "gguf"}))
        raise ConfigError(
            f"quantization must be one of {known}, auto:BITS, or a .json file; got {wish!r}", "quantization", wish
        )
    if not table or not all(isinstance(each, str) for each in table.values()):
        example = f'{{".*\\\\.down_proj": "int8", ".*_proj": "int4", "lm_head": "{UNQUANTIZED}"}}'
        raise ConfigError(
            f"quantization must give modules by name or regex, as {example}; got {table!r}", "quantization", wish
        )
    found: dict[str, str] = table
    return found


def on_load_identity(config: EngineConfig) -> str:
    """What quantizing on load changes about the model's numbers, as text: empty where it changes nothing."""
    table = on_load_kinds(config.quantization)
    return "" if table is None else json.dumps(table)


def _checkpoint_scheme(files: ModelFiles, model: ModelConfig, kind: str | None) -> Scheme | None:
    def read(name: str) -> Mapping[str, object] | None:
        path = files.file(name)
        return None if path is None else read_json(path)

    return scheme_of(model.raw, read, _dtypes(files) if kind == "safetensors" else None)


def _dtypes(files: ModelFiles) -> Mapping[str, str]:
    """The dtypes in the headers of safetensors files, by the tensors' names."""
    from quire.loading.bundle import locate
    from quire.loading.file_checkpoint import find_shards

    states = [(path, locate(path)) for path in find_shards(files, "safetensors").files]
    found: dict[str, str] = {}
    for path, state in states:
        found |= _header_dtypes(path, state.size, state.mtime_ns)
    return found


@functools.lru_cache(maxsize=512)
def _header_dtypes(path: Path, size: int, changed: int) -> Mapping[str, str]:
    """Of one file. Ranks and estimates ask several times; `size` and `changed` tell a rewritten file apart."""
    from quire.loading.safetensors import SafetensorsFile

    return SafetensorsFile(path).dtypes()


def _reported(scheme: Scheme) -> Scheme:
    logger.info("the checkpoint's weights are quantized: %s", scheme.name)
    return scheme
