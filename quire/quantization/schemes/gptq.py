"""`quant_method: gptq` (AutoGPTQ, GPTQModel) and AutoRound checkpoints in GPTQ's or AWQ's layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.errors import CheckpointError
from quire.quantization.formats.base import Format
from quire.quantization.formats.grouped import GptqFormat
from quire.quantization.schemes.awq import AwqScheme
from quire.quantization.schemes.base import DescribedScheme, names_in, number_in, object_in, search, unsupported

_VERSIONS = {"gptq": 1, "gptq_v2": 2}
_BITS = (2, 3, 4, 8)


class GptqScheme(DescribedScheme):
    """All matrices, or those listed, in 2, 3, 4 or 8 bits; `dynamic` has exceptions by regular expression."""

    name = "gptq"

    def __init__(self, config: Mapping[str, Any], dtypes: Mapping[str, str] | None = None) -> None:
        super().__init__(dtypes)
        layout = str(config.get("checkpoint_format") or config.get("format") or "gptq").lower()
        if layout not in _VERSIONS:
            raise unsupported(f"gptq: the layout {layout!r}", f"use a checkpoint in {' or '.join(_VERSIONS)}")
        if config.get("is_marlin_format"):
            raise unsupported("gptq: the layout of Marlin (is_marlin_format)", "use a checkpoint in gptq or gptq_v2")
        if str(config.get("pack_dtype") or "int32").removeprefix("torch.") != "int32":
            raise unsupported(f"gptq: pack_dtype {config['pack_dtype']!r}", "use a checkpoint packed in int32")
        self._format = _override(GptqFormat(zeros=True, version=_VERSIONS[layout]), {"bits": 4, "sym": True, **config})
        self._head = bool(config.get("lm_head", False))
        self._wanted = names_in(config, "modules_in_block_to_quantize", "inside_layer_modules")
        self._skipped = names_in(config, "modules_to_not_convert")
        rules = object_in(config, "dynamic")
        self._rules = [
            (pattern[2:] if pattern[:2] in ("+:", "-:") else pattern, None if pattern.startswith("-:") else changes)
            for pattern, changes in rules.items()
        ]

    def described(self, module: str) -> Format | None:
        if self._wanted and not self._is_head(module) and not any(name in module for name in self._wanted):
            return None
        if any(name in module for name in self._skipped):
            return None
        for pattern, changes in self._rules:
            if search(pattern, module):
                return None if changes is None else _override(self._format, changes)
        return self._format

    def describes_head(self, module: str) -> bool:
        return self._head

    def ignores(self, tensor: str) -> bool:
        # AutoGPTQ wrote a bias, of zeros, for every matrix; models that have one read it.
        return super().ignores(tensor) or (tensor.endswith(".bias") and "qweight" in self.header.of(tensor[:-5]))

    def _is_head(self, module: str) -> bool:
        return module.rpartition(".")[2] == "lm_head"


def _override(format: GptqFormat, config: Mapping[str, Any]) -> GptqFormat:
    """The format with other bits, groups, order or symmetry."""
    if not isinstance(config, Mapping):
        raise CheckpointError(f"quantization_config: dynamic holds {config!r}; an object is needed")
    bits = number_in(config, format.bits, "bits")
    if bits not in _BITS:
        raise unsupported(f"gptq: {bits} bits", f"{', '.join(map(str, _BITS))} are")
    group = number_in(config, -1 if format.group is None else format.group, "group_size")
    if group < 1 and group != -1:
        raise CheckpointError(f"quantization_config: group_size is {group}")
    # Within one group the order of inputs means nothing.
    ordered = bool(config.get("desc_act", format.ordered)) and group != -1
    zeros = not bool(config.get("sym", not format.zeros))
    return replace(format, bits=bits, group=None if group == -1 else group, ordered=ordered, zeros=zeros)


def auto_round(config: Mapping[str, Any], dtypes: Mapping[str, str] | None = None) -> DescribedScheme:
    """`quant_method: auto-round`, where the matrices are packed as GPTQ or AWQ packs them."""
    packing = str(config.get("packing_format") or config.get("backend") or "auto_round")
    if packing not in ("auto_round:auto_gptq", "auto_round:auto_awq"):
        raise unsupported(
            f"auto-round: packing_format {packing!r}",
            "export the model in the format auto_gptq, auto_awq or llm_compressor",
        )
    skipped = []
    for name, changes in object_in(config, "extra_config").items():
        if not isinstance(changes, Mapping) or number_in({**config, **changes}, 4, "bits") < 16:
            raise unsupported(f"auto-round: extra_config of {name!r}", "only entries with 16 bits are")
        skipped.append(name)
    plain = {key: config[key] for key in ("bits", "group_size", "sym") if key in config}
    plain["modules_to_not_convert"] = skipped
    if packing.endswith("awq"):
        return AwqScheme({**plain, "zero_point": True}, dtypes)
    return GptqScheme(plain, dtypes)
