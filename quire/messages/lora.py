"""`LoRARequest`: the adapter that a caller wants. Names are vLLM's."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import msgspec

from quire.errors import ValidationError, short_repr
from quire.messages.adapter_use import AdapterUse

MAX_NAME_LENGTH = 256


class LoRARequest(msgspec.Struct, frozen=True):
    """An adapter by name, number and folder. The number is vLLM's; here the content tells adapters apart."""

    lora_name: str
    lora_int_id: int
    lora_path: str | os.PathLike[str] = ""
    base_model_name: str | None = None
    tensorizer_config_dict: dict[str, Any] | None = None
    load_inplace: bool = False
    """Read the folder again: without it, an adapter's content is that of its first use."""
    is_3d_lora_weight: bool = False
    """How experts are stored; it is found from the tensors."""
    weight: float = 1.0
    """Factor on what the adapter adds."""
    pinned: bool = False
    """It leaves the device only if no other adapter can make room."""

    def __post_init__(self) -> None:
        check_adapter_name(self.lora_name, "lora_name")
        number = self.lora_int_id
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ValidationError(
                f"lora_int_id must be an integer of at least 1, got {number!r}", "lora_int_id", number
            )
        if not isinstance(self.lora_path, (str, os.PathLike)) or not os.fspath(self.lora_path):
            raise ValidationError(
                f"lora_path must be the adapter's folder, got {short_repr(self.lora_path)}", "lora_path", self.lora_path
            )
        if self.tensorizer_config_dict:
            raise ValidationError(
                "tensorizer_config_dict is not supported by quire: give a folder with safetensors",
                "tensorizer_config_dict",
            )
        check_weight(self.weight)

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def path(self) -> str:
        return os.fspath(self.lora_path)

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id


def lora_request_of(adapters: Sequence[AdapterUse]) -> LoRARequest | list[LoRARequest] | None:
    """The adapters of a request, as its caller gave them; None for none."""
    requests = [LoRARequest(use.name, use.number or 1, use.path, weight=use.weight) for use in adapters]
    return requests[0] if len(requests) == 1 else requests or None


def check_adapter_name(name: object, parameter: str) -> str:
    """A name that can be a model's name in the API, a label and a word in a log line."""
    if not isinstance(name, str) or not name or len(name) > MAX_NAME_LENGTH or not name.isprintable():
        raise ValidationError(
            f"an adapter's name must have 1 to {MAX_NAME_LENGTH} printable characters, got {short_repr(name)}",
            parameter,
            name,
        )
    return name


def check_weight(weight: object) -> float:
    """The factor of an adapter."""
    if not isinstance(weight, (int, float)) or isinstance(weight, bool) or not math.isfinite(weight):
        raise ValidationError(
            f"an adapter's weight must be a finite number, got {short_repr(weight)}", "weight", weight
        )
    return float(weight)
