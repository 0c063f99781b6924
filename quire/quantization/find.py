"""Finds what the weights of a model are quantized to: by its checkpoint, or by the user's wish."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Mapping
from pathlib import Path

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.kernels.weights.superblock import KINDS as GGUF_KINDS
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
    `on_cpu`: a GGUF file is dequantized while loading, unless `config.cpu_weights` is "packed", or
    `config.quantization` is "gguf": products with weights packed as on a GPU are slow there.
    """
    wish = config.quantization
    if config.cpu_weights == "packed":
        return _packed_on_cpu(config, files, on_cpu)
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


def _packed_on_cpu(config: EngineConfig, files: ModelFiles, on_cpu: bool) -> Scheme:
    """The scheme of a GGUF file whose matrices stay packed on a CPU; raises ConfigError where there is no such."""
    kind = files.kind if config.load_format == "auto" else config.load_format
    reason = ""
    if not on_cpu:
        reason = "the device is not a CPU; elsewhere the matrices of a GGUF file always stay packed"
    elif config.quantization not in (None, "gguf"):
        reason = f"quantization is {config.quantization!r}"
    elif files.gguf is None or kind not in ("gguf", "dummy"):
        reason = f"{files.name} is not a GGUF file"
    else:
        from quire.loading.gguf import GGUFCheckpoint
        from quire.quantization.schemes.gguf import GGUFScheme

        scheme = GGUFScheme(GGUFCheckpoint(files.gguf), interleaved=True)
        if not scheme.is_empty:
            return scheme
        reason = f"{files.name} has no matrix in one of {', '.join(GGUF_KINDS)}"
    raise ConfigError(f"cpu_weights is 'packed', but {reason}", "cpu_weights", "packed")


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
    from quire.loading.file_checkpoint import find_shards

    states = [(path, path.stat()) for path in find_shards(files, "safetensors").files]
    found: dict[str, str] = {}
    for path, state in states:
        found |= _header_dtypes(path, state.st_size, state.st_mtime_ns)
    return found


@functools.lru_cache(maxsize=512)
def _header_dtypes(path: Path, size: int, changed: int) -> Mapping[str, str]:
    """Of one file. Ranks and estimates ask several times; `size` and `changed` tell a rewritten file apart."""
    from quire.loading.safetensors import SafetensorsFile

    return SafetensorsFile(path).dtypes()


def _reported(scheme: Scheme) -> Scheme:
    logger.info("the checkpoint's weights are quantized: %s", scheme.name)
    return scheme
