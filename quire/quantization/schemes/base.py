"""What the readers of descriptions share: the tensors' dtypes, which are the truth where the two disagree."""

from __future__ import annotations

import abc
import re
from collections.abc import Iterator, Mapping
from typing import Any

from quire.errors import CheckpointError, UnsupportedModelError
from quire.quantization.formats.base import Format

_SIXTEEN_BITS = {"BF16", "F16", "F32", "F64"}
_PACKED = {"qweight", "weight_packed"}
_WEIGHT_SCALES = {"weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale", "weight_zero_point"}
_TEXT_PARTS = ("model.language_model", "model.text_model")
"""What files of models that also take images have in place of `model`."""
LARGEST_BLOCK = 1 << 16
"""Rows or columns of a block: more than any matrix needs."""
_KV_SCALES = re.compile(r"(^|\.)(k_scale|v_scale|q_scale|prob_scale|kv_scale|k_zero_point|v_zero_point|q_zero_point)$")
_OUTPUT_SCALES = re.compile(r"\.(k_proj|v_proj|qkv_proj)\.output_(scale|zero_point)$")


class Header:
    """The dtypes of a checkpoint's tensors by module; empty where they are not known."""

    def __init__(self, dtypes: Mapping[str, str] | None) -> None:
        """`dtypes`: safetensors' name of the dtype ("BF16", "F8_E4M3", "I32") by the tensor's name."""
        self.known = dtypes is not None
        self._modules: dict[str, dict[str, str]] = {}
        for name, dtype in (dtypes or {}).items():
            module, _, tensor = name.rpartition(".")
            self._modules.setdefault(module, {})[tensor] = dtype
        self._first = {name.split(".", 1)[0] for name in self._modules}

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def of(self, module: str) -> Mapping[str, str]:
        """The dtypes of a module's tensors, by their names within it. Checkpoints of a bare base model lack its prefix,
        those of a larger model have one more."""
        return self._modules.get(self.stored_as(module), {})

    def stored_as(self, module: str) -> str:
        """The name that the checkpoint has a module under; as it is, if none is found."""
        first, _, rest = module.partition(".")
        names = [module, rest if first not in self._first else "", *(f"{prefix}.{module}" for prefix in self._first)]
        names += [f"{part}.{rest}" for part in _TEXT_PARTS if first == "model"]
        return next((name for name in names if name in self._modules), module)

    def is_quantized(self, module: str) -> bool | None:
        """Whether a module's matrix is stored in few bits; None: not known, or there is none."""
        tensors = self.of(module)
        weight = tensors.get("weight")
        if _PACKED & tensors.keys() or (weight is not None and weight not in _SIXTEEN_BITS):
            return True
        if weight is None:
            return None
        left = sorted(_WEIGHT_SCALES & tensors.keys())
        if left:
            raise CheckpointError(
                f"{module}.weight is stored as {weight}, but {module}.{left[0]} says that it is quantized: the "
                "checkpoint was saved before its weights were compressed"
            )
        return False


class DescribedScheme(abc.ABC):
    """A scheme by a checkpoint's description, corrected by its tensors."""

    name: str

    def __init__(self, dtypes: Mapping[str, str] | None = None) -> None:
        self.header = Header(dtypes)
        self.disagreements: list[str] = []

    @abc.abstractmethod
    def described(self, module: str) -> Format | None:
        """The format that the description alone gives a module's matrix."""
        ...

    def describes_head(self, module: str) -> bool:
        """Whether the description says of the output matrix in particular that it is quantized."""
        return False

    def format_of(self, module: str) -> Format | None:
        """The format of a module's matrix; None: 16 bits."""
        quantized = self.header.is_quantized(module)
        if quantized is None and is_head(module):
            # Tied to the embeddings, or there are no tensors to ask.
            return self.described(module) if self.describes_head(module) and not self.header.known else None
        described = self._described(module, bool(quantized))
        if quantized is False and described is not None:
            if not is_head(module) or self.describes_head(module):
                self._note(f"{module} is {described.describe()} by the description, but stored in 16 bits")
            return None
        if quantized and described is None:
            held = ", ".join(f"{name} {dtype}" for name, dtype in sorted(self.header.of(module).items()))
            raise CheckpointError(
                f"{module} is stored in few bits ({held}), but the checkpoint's description ({self.name}) leaves it out"
            )
        return described

    def _described(self, module: str, is_quantized: bool) -> Format | None:
        """By the name that the checkpoint has the module under, where that is in a part of a larger model."""
        stored = self.header.stored_as(module)
        if not stored.startswith(_TEXT_PARTS):
            return self.described(module)
        found = self.described(stored)
        return self.described(module) if found is None and is_quantized else found

    def ignores(self, tensor: str) -> bool:
        """Whether a tensor, by its full name, is a scale of the KV cache."""
        return bool(_KV_SCALES.search(tensor) or _OUTPUT_SCALES.search(tensor))

    def _note(self, disagreement: str) -> None:
        if disagreement not in self.disagreements:
            self.disagreements.append(disagreement)


def is_head(module: str) -> bool:
    """Whether a module is the output matrix, which stays in 16 bits unless its tensors say otherwise."""
    return module.rpartition(".")[2] == "lm_head"


def names_in(config: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    """The first list of names under one of the keys; lists within lists are flattened."""
    found: Any = next((config[key] for key in keys if config.get(key)), [])
    flat: list[str] = []
    for name in found if isinstance(found, (list, tuple)) else [found]:
        flat.extend(name if isinstance(name, (list, tuple)) else [name])
    wrong = [name for name in flat if not isinstance(name, str)]
    if wrong:
        raise CheckpointError(f"quantization_config: {keys[0]} holds {wrong[0]!r}, which is no module's name")
    return tuple(flat)


def number_in(config: Mapping[str, Any], default: int, *keys: str) -> int:
    """The first integer under one of the keys."""
    value = next((config[key] for key in keys if config.get(key) is not None), default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise CheckpointError(f"quantization_config: {keys[0]} is {value!r}; an integer is needed")
    return value


def object_in(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The object under a key; empty if there is none."""
    value = config.get(key)
    if value is not None and value != [] and not isinstance(value, Mapping):
        raise CheckpointError(f"quantization_config: {key} is {value!r}; an object is needed")
    return value or {}


def block_in(config: Mapping[str, Any], key: str, where: str = "") -> tuple[int, int] | None:
    """The rows and columns of blocks that share a scale; None if there are no blocks. Also as text, "128x128"."""
    value = config.get(key)
    if value in (None, [], ""):
        return None
    sizes = [int(size) if size.isdigit() else 0 for size in value.split("x")] if isinstance(value, str) else value
    is_pair = isinstance(sizes, (list, tuple)) and len(sizes) == 2
    if not is_pair or not all(type(size) is int and 0 < size <= LARGEST_BLOCK for size in sizes):
        raise CheckpointError(
            f"quantization_config: {key}{where} is {value!r}; [rows, columns], each from 1 to {LARGEST_BLOCK}"
        )
    return sizes[0], sizes[1]


def search(pattern: str, name: str) -> bool:
    """Whether a regular expression of a checkpoint's description matches a name from its start."""
    try:
        return re.match(pattern, name) is not None
    except re.error as error:
        raise CheckpointError(f"quantization_config: {pattern!r} is no regular expression ({error})") from None


def unsupported(what: str, remedy: str) -> UnsupportedModelError:
    """An error that names what a checkpoint has and what can be done."""
    return UnsupportedModelError(f"{what} is not supported; {remedy}")
