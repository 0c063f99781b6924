"""Finds how a checkpoint describes its quantization, and who reads that description."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from quire.errors import CheckpointError, UnsupportedModelError
from quire.quantization.formats.base import Scheme
from quire.quantization.schemes.base import Header
from quire.registry import resolve

_HERE = "quire.quantization.schemes"
SCHEMES: Mapping[str, str] = {
    "compressed-tensors": f"{_HERE}.compressed_tensors.CompressedTensorsScheme",
    "fp8": f"{_HERE}.fp8.Fp8Scheme",
    "fbgemm_fp8": f"{_HERE}.fp8.FbgemmFp8Scheme",
    "awq": f"{_HERE}.awq.AwqScheme",
    "gptq": f"{_HERE}.gptq.GptqScheme",
    "auto-round": f"{_HERE}.gptq.auto_round",
    "bitnet": f"{_HERE}.bitnet.BitNetScheme",
    "modelopt": f"{_HERE}.modelopt.ModelOptScheme",
    "modelopt_fp4": f"{_HERE}.modelopt.ModelOptScheme",
    "mxfp4": f"{_HERE}.mxfp4.Mxfp4Scheme",
}
"""By `quant_method`. Called with the description and the tensors' dtypes."""

_DEQUANTIZE = "load the model in 16 bits elsewhere, save it, and quantize it on load here"
_REFUSED: Mapping[str, str] = {
    "bitsandbytes": f"{_DEQUANTIZE}, or use an AWQ, GPTQ, FP8 or GGUF checkpoint",
    "torchao": "use an FP8, AWQ, GPTQ or compressed-tensors checkpoint of the model",
    "quark": "use an FP8, AWQ, GPTQ or compressed-tensors checkpoint of the model",
    "gemma": "use the unquantized model, or a GGUF file",
    "hqq": f"{_DEQUANTIZE}, or use an AWQ or GPTQ checkpoint",
    "aqlm": "use an AWQ, GPTQ or GGUF checkpoint of the model",
    "quip": "use an AWQ, GPTQ or GGUF checkpoint of the model",
    "vptq": "use an AWQ, GPTQ or GGUF checkpoint of the model",
    "eetq": f"{_DEQUANTIZE} (int8)",
    "quanto": f"{_DEQUANTIZE}",
    "higgs": "use an AWQ, GPTQ or GGUF checkpoint of the model",
    "spqr": "use an AWQ, GPTQ or GGUF checkpoint of the model",
    "fp_quant": "use an NVFP4 or MXFP4 checkpoint in compressed-tensors form",
    "sinq": f"{_DEQUANTIZE}",
    "four_over_six": "use an NVFP4 checkpoint in compressed-tensors form",
    "marlin": "use the GPTQ checkpoint that it was made from",
    "gptq_marlin": "use the GPTQ checkpoint that it was made from",
    "awq_marlin": "use the AWQ checkpoint that it was made from",
    "deepspeedfp": f"{_DEQUANTIZE}",
    "sparseml": "use a dense checkpoint of the model",
}
"""Known methods without a reader, and what can be done instead."""

_OLDER: tuple[tuple[str, str], ...] = (
    ("hf_quant_config.json", "modelopt"),
    ("quantize_config.json", "gptq"),
    ("quant_config.json", "awq"),
)
"""Files beside config.json that described a quantization before `quantization_config` did."""


def scheme_of(
    config: Mapping[str, Any],
    read_file: Callable[[str], Mapping[str, Any] | None] = lambda name: None,
    dtypes: Mapping[str, str] | None = None,
) -> Scheme | None:
    """The scheme of a checkpoint; None: its weights are in 16 or 32 bits.

    `config` is config.json, `read_file` gives another JSON file of the folder by name (None: there is none), `dtypes`
    are the tensors' dtypes in the safetensors headers ("BF16"), where they are known.
    """
    method, description = _description(config, read_file)
    if method is None:
        _check_plain(dtypes)
        return None
    if method in _REFUSED:
        raise UnsupportedModelError(f"the checkpoint is quantized by {method!r}, which is not read: {_REFUSED[method]}")
    if method not in SCHEMES:  # never a dotted path: what a downloaded file names must not be imported
        raise UnsupportedModelError(
            f"the checkpoint is quantized by {method!r}, which is not known; known: {', '.join(sorted(SCHEMES))}"
        )
    return cast(Scheme, resolve("quantization scheme", method, SCHEMES)(description, dtypes))


def _description(
    config: Mapping[str, Any], read_file: Callable[[str], Mapping[str, Any] | None]
) -> tuple[str | None, Mapping[str, Any]]:
    """(quant_method, what describes it)."""
    text = config.get("text_config")
    for owner in (config, text if isinstance(text, Mapping) else {}):
        for key in ("quantization_config", "compression_config"):
            found = owner.get(key)
            if not found:
                continue
            if not isinstance(found, Mapping):
                raise CheckpointError(f"config.json: {key} is {found!r}; an object is needed")
            return _method(found), found
    for name, method in _OLDER:
        found = read_file(name)
        if found:
            given = found.get("quant_method")
            return (str(given).lower() if given else method), found
    return None, {}


def _method(description: Mapping[str, Any]) -> str:
    given = description.get("quant_method")
    if given:
        method = str(given).lower()
        return {"compressed_tensors": "compressed-tensors", "auto_round": "auto-round"}.get(method, method)
    if "quant_algo" in description:
        return "modelopt"
    if "config_groups" in description:
        return "compressed-tensors"
    if description.get("load_in_4bit") or description.get("load_in_8bit"):
        return "bitsandbytes"
    raise CheckpointError("config.json: quantization_config has no quant_method")


def _check_plain(dtypes: Mapping[str, str] | None) -> None:
    """Raise CheckpointError if a checkpoint without a description has weights in few bits."""
    header = Header(dtypes)
    found = next((module for module in header if header.is_quantized(module)), None)
    if found is not None:
        held = ", ".join(f"{name} {dtype}" for name, dtype in sorted(header.of(found).items()))
        raise CheckpointError(
            f"{found} is stored in few bits ({held}), but config.json has no quantization_config that says how"
        )
