"""compressed-tensors (llm-compressor): groups of modules by exact name, regular expression or class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from quire.errors import CheckpointError, UnsupportedModelError
from quire.quantization.formats.base import Format
from quire.quantization.formats.fp4 import Fp4Format
from quire.quantization.formats.grouped import PackedFormat
from quire.quantization.formats.scaled import BlockFormat, ScaledFormat
from quire.quantization.schemes.base import DescribedScheme, block_in, names_in, object_in, search, unsupported

_LABEL = "compressed-tensors"
_RECOMPRESS = "use a checkpoint in another scheme (FP8_DYNAMIC, W8A8, W4A16, NVFP4A16 are supported)"
_CODES = {"int-quantized": torch.int8, "float-quantized": torch.float8_e4m3fn}
_SPARSE = ("sparse-bitmask", "sparse-24-bitmask", "marlin-24")


@dataclass(frozen=True)
class Args:
    """How weights or activations are quantized."""

    bits: int = 8
    kind: str = "int"
    strategy: str = "tensor"
    symmetric: bool = True
    dynamic: bool = False
    group: int | None = None
    block: tuple[int, int] | None = None
    ordered: bool = False

    @classmethod
    def read(cls, given: Mapping[str, Any], where: str) -> Args:
        """From the configuration of `where`."""
        if not isinstance(given, Mapping):
            raise CheckpointError(f"quantization_config: {where} is {given!r}; an object is needed")
        group = given.get("group_size")
        usual = "tensor" if group is None else "channel" if group == -1 else "group"
        bits = given.get("num_bits", 8)
        if not isinstance(bits, int) or (group is not None and not isinstance(group, int)):
            raise CheckpointError(f"quantization_config: num_bits {bits!r}, group_size {group!r} of {where}")
        strategy = str(given.get("strategy") or usual).lower()
        if strategy in ("group", "tensor_group") and (group is None or group <= 0):
            raise CheckpointError(f"quantization_config: {where} is quantized by groups of {group!r}")
        return cls(
            bits=bits,
            kind=str(given.get("type") or "int").lower(),
            strategy=strategy,
            symmetric=bool(given.get("symmetric", True)),
            dynamic=bool(given.get("dynamic", False)),  # "local": scales of groups are computed
            group=group if strategy in ("group", "tensor_group") else None,
            block=block_in(given, "block_structure", f" of {where}"),
            # `weight` and `static` changed the calibration, not the format.
            ordered=given.get("actorder") in (True, "group", "dynamic"),
        )

    def __str__(self) -> str:
        symmetry = "" if self.symmetric else ", asymmetric"
        scope = f"{self.strategy} of {self.group}" if self.group else self.strategy
        return f"{self.kind}{self.bits} by {scope}{symmetry}, {'dynamic' if self.dynamic else 'static'}"


_INT8_TOKENS = Args(8, "int", "token", dynamic=True)
_FP8_TOKENS = Args(8, "float", "token", dynamic=True)
_NVFP4 = Args(4, "float", "tensor_group", group=16)
_MXFP4 = Args(4, "float", "group", group=32)
_MXFP8 = Args(8, "float", "group", group=32)
PRESETS: Mapping[str, tuple[Args, Args | None]] = {
    **{f"W{bits}A16": (Args(bits, "int", "group", group=128), None) for bits in range(2, 9)},
    **{f"W{bits}A8": (Args(bits, "int", "group", group=128), _INT8_TOKENS) for bits in range(2, 8)},
    "W4A16_ASYM": (Args(4, "int", "group", group=128, symmetric=False), None),
    "W8A8": (Args(8, "int", "channel"), _INT8_TOKENS),
    "INT8": (Args(8, "int", "channel"), _INT8_TOKENS),
    "W4AFP8": (Args(4, "int", "group", group=128), _FP8_TOKENS),
    "FP8": (Args(8, "float", "tensor"), Args(8, "float", "tensor")),
    "FP8_DYNAMIC": (Args(8, "float", "channel"), _FP8_TOKENS),
    "FP8_BLOCK": (
        Args(8, "float", "block", block=(128, 128)), Args(8, "float", "group", dynamic=True, group=128)
    ),
    "NVFP4A16": (_NVFP4, None),
    "NVFP4": (_NVFP4, Args(4, "float", "tensor_group", dynamic=True, group=16)),
    "MXFP4A16": (_MXFP4, None),
    "MXFP4": (_MXFP4, Args(4, "float", "group", dynamic=True, group=32)),
    "MXFP8A16": (_MXFP8, None),
    "MXFP8": (_MXFP8, Args(8, "float", "group", dynamic=True, group=32)),
}  # fmt: skip
"""(weights, input activations) of the groups that are named rather than written out."""


@dataclass(frozen=True)
class ModuleGroup:
    """Modules that are quantized in one way."""

    name: str
    targets: tuple[str, ...]
    weights: Args | None
    inputs: Args | None
    format: str | None
    outputs: bool
    """Whether their results are quantized too."""

    @classmethod
    def read(cls, name: str, given: Any, default: str | None) -> ModuleGroup:
        if isinstance(given, (list, tuple)):
            if name.upper() not in PRESETS:
                raise UnsupportedModelError(
                    f"quantization_config: group {name!r} names no preset; known: {', '.join(sorted(PRESETS))}"
                )
            weights, inputs = PRESETS[name.upper()]
            return cls(name, tuple(map(str, given)), weights, inputs, default, False)
        if not isinstance(given, Mapping):
            raise CheckpointError(f"quantization_config: group {name!r} is {given!r}; an object is needed")
        read = {
            key: None if given.get(key) is None else Args.read(given[key], f"{key} of group {name!r}")
            for key in ("weights", "input_activations", "output_activations")
        }
        return cls(
            name,
            names_in(given, "targets"),
            read["weights"],
            read["input_activations"],
            _format_name(given) or default,
            read["output_activations"] is not None,
        )


class CompressedTensorsScheme(DescribedScheme):
    """`quant_method: compressed-tensors`."""

    name = "compressed-tensors"

    def __init__(self, config: Mapping[str, Any], dtypes: Mapping[str, str] | None = None) -> None:
        super().__init__(dtypes)
        _check_sparsity(config)
        default = _format_name(config)
        groups = object_in(config, "config_groups")
        # Each group has its own format if they are mixed.
        default = None if default == "mixed-precision" else default
        self._groups = [ModuleGroup.read(name, group, default) for name, group in groups.items()]
        ignored = names_in(config, "ignore")
        self._ignored = frozenset(ignored)
        self._ignored_patterns = [name for name in ignored if name.startswith("re:") or name == "Linear"]
        self._check_status(config)

    def _check_status(self, config: Mapping[str, Any]) -> None:
        status = config.get("quantization_status", "compressed")
        if status == "compressed":
            return
        if not any(self.header.is_quantized(module) for module in self.header):
            raise CheckpointError(
                f"quantization_config: quantization_status is {status!r}, not 'compressed': the weights are not in few "
                "bits (save the model with save_compressed=True)"
            )
        self._note(f"quantization_status is {status!r} by the description, but weights are stored in few bits")

    def described(self, module: str) -> Format | None:
        if module in self._ignored or any(self._matches(module, target) for target in self._ignored_patterns):
            return None
        group = self._group_of(module)
        return None if group is None or group.weights is None else _format(group, module)

    def describes_head(self, module: str) -> bool:
        return any(self._by_name(module, target) for group in self._groups for target in group.targets)

    def _group_of(self, module: str) -> ModuleGroup | None:
        """By exact name before regular expression before class, as the library decides."""
        found = [
            ((target != module, not target.startswith("re:"), target), group)
            for group in self._groups
            for target in group.targets
            if self._matches(module, target)
        ]
        return min(found, key=lambda each: each[0])[1] if found else None

    @staticmethod
    def _by_name(module: str, target: str) -> bool:
        return search(target[3:], module) if target.startswith("re:") else target == module

    def _matches(self, module: str, target: str) -> bool:
        # The class of everything that has a matrix to quantize.
        return target == "Linear" or self._by_name(module, target)


def _format_name(given: Mapping[str, Any]) -> str | None:
    name = given.get("format")
    if name is not None and not isinstance(name, str):
        raise CheckpointError(f"quantization_config: format is {name!r}; a name is needed")
    return name


def _check_sparsity(config: Mapping[str, Any]) -> None:
    sparsity = object_in(config, "sparsity_config")
    names = [config.get("format"), sparsity.get("format"), *_formats_of(config.get("config_groups"))]
    for name in names:
        if name in _SPARSE:
            raise unsupported(f"the sparse format {name!r} (compressed-tensors)", "use a dense checkpoint of the model")
    if object_in(config, "transform_config").get("config_groups"):
        raise unsupported(
            "transform_config (rotated weights, compressed-tensors)", "use a checkpoint quantized without transforms"
        )


def _formats_of(groups: Any) -> list[Any]:
    values = groups.values() if isinstance(groups, Mapping) else ()
    return [group.get("format") for group in values if isinstance(group, Mapping)]


def _format(group: ModuleGroup, module: str) -> Format:
    """The format of a group's matrices."""
    weights, inputs = group.weights, group.inputs
    assert weights is not None

    def refused(what: str) -> UnsupportedModelError:
        return unsupported(f"{module}: {what} (compressed-tensors, group {group.name!r})", _RECOMPRESS)

    if group.outputs and not module.endswith(("k_proj", "v_proj")):
        raise refused("output_activations")
    if inputs is not None and not inputs.symmetric:
        raise refused(f"asymmetric activations ({inputs})")
    kind = group.format or _inferred(weights, inputs)
    if kind == "naive-quantized":
        kind = "int-quantized" if weights.kind == "int" else "float-quantized"
    if kind in _CODES:
        return _scaled(kind, weights, inputs, refused)
    if kind == "pack-quantized":
        if inputs is not None:
            raise refused(f"packed {weights.kind}{weights.bits} weights with {inputs.kind}{inputs.bits} activations")
        if weights.kind != "int" or not 2 <= weights.bits <= 8 or weights.strategy not in ("group", "channel"):
            raise refused(f"pack-quantized weights in {weights}")
        ordered = weights.ordered and weights.group is not None
        return PackedFormat(weights.bits, weights.group, not weights.symmetric, ordered)
    if kind in ("nvfp4-pack-quantized", "mxfp4-pack-quantized"):
        nvidia = kind.startswith("nvfp4")
        if (weights.bits, weights.kind, weights.group) != (4, "float", 16 if nvidia else 32) or not weights.symmetric:
            raise refused(f"{kind} weights in {weights}")
        activations = "none" if inputs is None else f"fp{inputs.bits}"
        return Fp4Format(nvidia, activations=activations, label=_LABEL)
    if kind == "mxfp8-quantized":
        if (weights.bits, weights.kind, weights.group) != (8, "float", 32) or inputs is None or inputs.bits != 8:
            raise refused(f"mxfp8 weights in {weights} with activations {inputs or 'in 16 bits'}")
        return BlockFormat((1, 32), "weight_scale", powers=True, label=f"mxfp8, {_LABEL}")
    if kind in ("dense", "fakequant"):
        raise CheckpointError(f"{module}: the format {kind!r} has no weights in few bits, but its group has some")
    raise refused(f"the format {kind!r}")


def _scaled(kind: str, weights: Args, inputs: Args | None, refused: Any) -> Format:
    code = _CODES[kind]
    wanted = "int" if code is torch.int8 else "float"
    if weights.kind != wanted or not weights.symmetric or weights.dynamic or (wanted == "float" and weights.bits != 8):
        raise refused(f"{kind} weights in {weights}")
    if inputs is not None and (inputs.kind != wanted or inputs.bits != 8):
        raise refused(f"{kind} weights with activations in {inputs}")
    if weights.strategy == "block" and wanted == "float" and weights.block is not None:
        if inputs is None or not inputs.dynamic or (inputs.group or weights.block[1]) != weights.block[1]:
            raise refused(f"weights in {weights} with activations {inputs or 'in 16 bits'}")
        return BlockFormat(weights.block, "weight_scale", label=_LABEL)
    if weights.strategy not in ("tensor", "channel"):
        raise refused(f"{kind} weights in {weights}")
    if inputs is not None and inputs.strategy not in ("token", "tensor"):
        raise refused(f"{kind} weights with activations in {inputs}")
    # Scales of a whole batch would make tokens depend on their neighbours: dynamic means by token.
    how = "none" if inputs is None else "token" if inputs.dynamic else "tensor"
    return ScaledFormat(code, weights.strategy, how, label=_LABEL)


def _inferred(weights: Args, inputs: Args | None) -> str:
    """The format that the library writes where the description names none."""
    if weights.kind == "float" and weights.bits == 4:
        return "mxfp4-pack-quantized" if weights.group == 32 else "nvfp4-pack-quantized"
    if weights.kind == "float":
        return "mxfp8-quantized" if weights.group == 32 else "float-quantized"
    return "pack-quantized" if inputs is None else "int-quantized"
