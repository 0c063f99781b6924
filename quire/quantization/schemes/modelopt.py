"""NVIDIA ModelOpt: `quantization_config` with `quant_algo`, or the older hf_quant_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from quire.errors import CheckpointError
from quire.quantization.formats.base import Format
from quire.quantization.formats.fp4 import Fp4Format
from quire.quantization.formats.scaled import BlockFormat, ScaledFormat
from quire.quantization.schemes.base import DescribedScheme, names_in, object_in, unsupported

_LABEL = "ModelOpt"


def _nvfp4(activations: str) -> Fp4Format:
    return Fp4Format(
        True, "weight", "weight_scale_2", divides=False, inputs="input_scale", activations=activations, label=_LABEL
    )


FORMATS: Mapping[str, Format] = {
    "FP8": ScaledFormat(per="tensor", inputs="tensor", label=_LABEL),
    "FP8_PER_CHANNEL_PER_TOKEN": ScaledFormat(per="channel", inputs="token", label=_LABEL),
    "FP8_PB_WO": BlockFormat(scale="weight_scale", label=_LABEL),
    "NVFP4": _nvfp4("fp4"),
    "W4A16_NVFP4": _nvfp4("none"),
    "MXFP8": BlockFormat((1, 32), "weight_scale", powers=True, label=f"mxfp8, {_LABEL}"),
}


class ModelOptScheme(DescribedScheme):
    """All matrices but those that a wildcard excludes, or each by its own name (MIXED_PRECISION)."""

    name = "modelopt"

    def __init__(self, config: Mapping[str, Any], dtypes: Mapping[str, str] | None = None) -> None:
        """`config`: either form."""
        super().__init__(dtypes)
        given = config.get("quantization", config)
        if not isinstance(given, Mapping):
            raise CheckpointError(f"hf_quant_config.json: quantization is {given!r}; an object is needed")
        self._excluded = names_in(given, "exclude_modules", "ignore")
        algorithm = str(given.get("quant_algo") or "").upper()
        self._layers: dict[str, Format | None] = {}
        self._all: Format | None = None
        if algorithm == "MIXED_PRECISION":
            layers = given.get("quantized_layers")
            if not isinstance(layers, Mapping):
                raise CheckpointError("quantization_config: MIXED_PRECISION without quantized_layers")
            for name in layers:
                each = object_in(layers, name)
                self._layers[name] = _format(str(each.get("quant_algo") or "").upper(), each)
        elif algorithm:
            self._all = _format(algorithm, given)
        elif not given.get("kv_cache_quant_algo"):
            raise CheckpointError("quantization_config: modelopt without quant_algo")

    def described(self, module: str) -> Format | None:
        if any(fnmatchcase(module, pattern) for pattern in self._excluded):
            return None
        return self._layers.get(module, self._all)


def _format(algorithm: str, given: Mapping[str, Any]) -> Format:
    known = FORMATS.get(algorithm)
    if known is None:
        raise unsupported(f"modelopt: quant_algo {algorithm!r}", f"{', '.join(FORMATS)} are")
    group = given.get("group_size")
    if isinstance(known, Fp4Format) and group not in (None, 0, 16):
        raise unsupported(f"modelopt: {algorithm} with groups of {group}", "groups of 16 are")
    return known
