"""Writes checkpoints in the compressed-tensors format, which vLLM and transformers read too.

A `WriteScheme` is one way to store matrices: the tensors of a matrix and the words that describe them in config.json.
`CheckpointWriter` writes tensors into safetensors files of limited size as they come, and their index.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from quire.errors import ValidationError
from quire.kernels.weights.fp4 import VALUES
from quire.kernels.weights.scaled import encode, quantize_rows
from quire.loading.files import SAFETENSORS_INDEX
from quire.quantization.formats.bits import powers_of_two, unpack_pairs
from quire.quantization.gptq import DAMPING, gptq_groups, gptq_steps
from quire.quantization.rounding import (
    Rounded,
    fp4_codes,
    restore_groups,
    round_blocks,
    round_channels,
    round_groups,
    round_mxfp4,
    round_nvfp4,
)

SHARD_BYTES = 5 * 10**9
"""The most bytes of tensors in a file."""
_DYNAMIC_TOKEN = {"strategy": "token", "dynamic": True, "symmetric": True}


@dataclass(frozen=True)
class WriteScheme:
    """How matrices are stored. `numbers`: int, fp8, mxfp4 or nvfp4."""

    name: str
    format: str
    numbers: str
    bits: int
    strategy: str
    """What a scale covers: channel, group, block or tensor_group."""
    group: int | None = None
    symmetric: bool = True
    inputs: Mapping[str, Any] | None = None
    """How activations are quantized; None: they are not."""

    @property
    def is_grouped(self) -> bool:
        """Whether it is integers in groups, of any size."""
        return self.numbers == "int" and self.strategy == "group"

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Refuse a matrix whose width the groups do not divide."""
        if self.group is not None and shape[-1] % self.group:
            fitting = [str(size) for size in (16, 32, 64, 128, 256) if shape[-1] % size == 0]
            raise ValidationError(
                f"{name} has {shape[-1]} inputs, which groups of {self.group} do not divide; "
                + (f"group sizes that do: {', '.join(fitting)}" if fitting else "leave it out with --ignore"),
                "group_size",
                self.group,
            )

    def round(
        self, weight: torch.Tensor, scale_dtype: torch.dtype, peak: torch.Tensor | None = None, search: bool = False
    ) -> dict[str, torch.Tensor]:
        """The tensors of a matrix, rounded to nearest. `peak`: as in `round_nvfp4`; `search`: as in `round_groups`."""
        if self.numbers == "mxfp4":
            codes, scale = round_mxfp4(weight)
            return {"weight_packed": pack_pairs(codes), "weight_scale": scale}
        if self.numbers == "nvfp4":
            codes, scale, divisor = round_nvfp4(weight, peak)
            return {
                "weight_packed": pack_pairs(codes), "weight_scale": scale, "weight_global_scale": divisor.reshape(1)
            }  # fmt: skip
        if self.strategy == "group":
            assert self.group is not None
            return self.pack(
                round_groups(weight, self.bits, self.group, self.symmetric, scale_dtype, search), weight.shape
            )
        if self.strategy == "block":
            codes, scale = round_blocks(weight, scale_dtype=scale_dtype)
            return {"weight": codes, "weight_scale": scale}
        code = torch.int8 if self.numbers == "int" else torch.float8_e4m3fn
        codes, scale = round_channels(weight, code, scale_dtype)
        return {"weight": codes, "weight_scale": scale.unsqueeze(-1)}

    def round_by_gptq(
        self,
        weight: torch.Tensor,
        hessian: torch.Tensor,
        scale_dtype: torch.dtype,
        peak: torch.Tensor | None = None,
        damping: float = DAMPING,
        by_importance: bool = True,
    ) -> dict[str, torch.Tensor]:
        """The tensors of a matrix, codes chosen by GPTQ. Scales of integers in groups are searched."""
        if self.is_grouped:
            assert self.group is not None
            rounded = gptq_groups(
                weight, hessian, self.bits, self.group, self.symmetric, scale_dtype, damping, by_importance
            )
            return self.pack(rounded, weight.shape)
        tensors = self.round(weight, scale_dtype, peak)
        spread = self._spread(tensors, weight.shape)
        if self.numbers in ("mxfp4", "nvfp4"):
            table = _fp4_values(weight.device)
            steps = gptq_steps(
                weight, hessian, spread, lambda values, _: table[fp4_codes(values).long()], damping, by_importance
            )
            return tensors | {"weight_packed": pack_pairs(fp4_codes(steps))}
        code = tensors["weight"].dtype
        steps = gptq_steps(
            weight, hessian, spread, lambda values, _: encode(values, code).float(), damping, by_importance
        )
        return tensors | {"weight": steps.to(code)}

    def pack(self, rounded: Rounded, shape: Sequence[int]) -> dict[str, torch.Tensor]:
        """The tensors of a matrix of integers in groups."""
        tensors = {
            "weight_packed": pack_integers(rounded.codes, self.bits),
            "weight_scale": rounded.scale,
            "weight_shape": torch.tensor(tuple(shape), dtype=torch.int64),
        }
        if rounded.zero is not None:
            tensors["weight_zero_point"] = pack_integers(rounded.zero.t(), self.bits).t().contiguous()
        return tensors

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The values of a matrix, in float32."""
        if self.is_grouped:
            assert self.group is not None
            rows, width = tensors["weight_shape"].tolist()
            codes = unpack_integers(tensors["weight_packed"], self.bits)[:, :width]
            zero = tensors.get("weight_zero_point")
            if zero is not None:
                zero = unpack_integers(zero.t(), self.bits)[:, :rows].t()
            return restore_groups(Rounded(codes, tensors["weight_scale"], zero), self.bits, self.group)
        if self.numbers in ("mxfp4", "nvfp4"):
            codes = unpack_pairs(tensors["weight_packed"])
            values = _fp4_values(codes.device)[codes.long()]
        else:
            values = tensors["weight"].float()
        return values * self._spread(tensors, values.shape)

    def restore_input(self, x: torch.Tensor) -> torch.Tensor:
        """Activations [tokens, in] as the product sees them, in float32."""
        if self.inputs is None:
            return x.float()
        code = torch.int8 if self.inputs["type"] == "int" else torch.float8_e4m3fn
        group = self.inputs.get("group_size")
        codes, scale = quantize_rows(x, code, group)
        return codes.float() * (scale if group is None else scale.repeat_interleave(group, -1)[:, : x.shape[-1]])

    def _spread(self, tensors: Mapping[str, torch.Tensor], shape: Sequence[int]) -> torch.Tensor:
        """The scale of each value [out, in], in float32; not of integers in groups."""
        scale, (rows, columns) = tensors["weight_scale"], shape
        if self.numbers == "mxfp4":
            return powers_of_two(scale).repeat_interleave(32, -1)
        if self.numbers == "nvfp4":
            return (scale.float() / tensors["weight_global_scale"]).repeat_interleave(16, -1)
        if self.strategy == "block":
            return scale.float().repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        return scale.float().expand(rows, columns)

    def describe(self, ignore: Sequence[str], order: bool = False) -> dict[str, Any]:
        """`quantization_config` of config.json. `order`: GPTQ chose the codes in the order of the inputs' importance,
        which changes nothing for a reader."""
        weights = {
            "num_bits": self.bits,
            "type": "int" if self.numbers == "int" else "float",
            "symmetric": self.symmetric,
            "strategy": self.strategy,
            "group_size": self.group,
            "block_structure": [128, 128] if self.strategy == "block" else None,
            "dynamic": False,
            "actorder": "weight" if order else None,
            "scale_dtype": {"mxfp4": "torch.uint8", "nvfp4": "torch.float8_e4m3fn"}.get(self.numbers),
        }
        group = {
            "targets": ["Linear"],
            "weights": {key: value for key, value in weights.items() if value is not None},
            "input_activations": None if self.inputs is None else dict(self.inputs),
            "output_activations": None,
            "format": self.format,
        }
        return {
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "format": self.format,
            "config_groups": {"group_0": group},
            "ignore": list(ignore),
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }


_FP8_TOKEN = {"num_bits": 8, "type": "float", **_DYNAMIC_TOKEN}
_FP8_GROUP = {**_FP8_TOKEN, "strategy": "group", "group_size": 128}
_INT8_TOKEN = {"num_bits": 8, "type": "int", **_DYNAMIC_TOKEN}
SCHEMES = {
    scheme.name: scheme
    for scheme in (
        WriteScheme("FP8_DYNAMIC", "float-quantized", "fp8", 8, "channel", inputs=_FP8_TOKEN),
        WriteScheme("FP8_BLOCK", "float-quantized", "fp8", 8, "block", inputs=_FP8_GROUP),
        WriteScheme("W8A8", "int-quantized", "int", 8, "channel", inputs=_INT8_TOKEN),
        WriteScheme("W8A16", "pack-quantized", "int", 8, "group", 128),
        WriteScheme("W4A16", "pack-quantized", "int", 4, "group", 128),
        WriteScheme("W4A16_ASYM", "pack-quantized", "int", 4, "group", 128, symmetric=False),
        WriteScheme("MXFP4A16", "mxfp4-pack-quantized", "mxfp4", 4, "group", 32),
        WriteScheme("NVFP4A16", "nvfp4-pack-quantized", "nvfp4", 4, "tensor_group", 16),
    )
}
"""By the names that compressed-tensors has for them."""
ALIASES = {"FP8": "FP8_DYNAMIC", "INT8": "W8A8", "MXFP4": "MXFP4A16", "NVFP4": "NVFP4A16", "INT4": "W4A16"}


def find_scheme(name: str, group_size: int | None = None) -> WriteScheme:
    """The scheme of this name, with another group size if one is given."""
    upper = name.upper().replace("-", "_")
    scheme = SCHEMES.get(ALIASES.get(upper, upper))
    if scheme is None:
        raise ValidationError(f"scheme {name!r} is not one of {', '.join((*SCHEMES, *ALIASES))}", "scheme", name)
    if group_size is None or group_size == scheme.group:
        return scheme
    if not scheme.is_grouped:
        fixed = "has no groups" if scheme.group is None else f"has groups of {scheme.group}"
        raise ValidationError(f"group_size {group_size}: {scheme.name} {fixed}", "group_size", group_size)
    if group_size < 8 or group_size % 8:
        raise ValidationError(f"group_size must be a multiple of 8, got {group_size}", "group_size", group_size)
    return replace(scheme, group=group_size)


def pack_integers(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Unsigned codes [rows, n] of 4 or 8 bits as int32 [rows, ceil(n * bits / 32)], the first in the lowest bits."""
    per_word = 32 // bits
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % per_word)).to(torch.int32)
    words = torch.zeros(*padded.shape[:-1], padded.shape[-1] // per_word, dtype=torch.int32, device=codes.device)
    for place in range(per_word):
        words |= padded[..., place::per_word] << (bits * place)
    return words


def unpack_integers(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `pack_integers`; padding included."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> shifts) & (2**bits - 1)).flatten(-2).to(torch.uint8)


def pack_pairs(codes: torch.Tensor) -> torch.Tensor:
    """4-bit codes [..., n] as bytes [..., n / 2]: even places in the low half."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def _fp4_values(device: torch.device) -> torch.Tensor:
    return torch.tensor([*VALUES, *(-value for value in VALUES)], device=device)


class CheckpointWriter:
    """Tensors into the safetensors files of a folder, a file of at most `shard_bytes` at a time."""

    def __init__(self, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []
        self.names: set[str] = set()
        self.num_bytes = 0
        """Written so far."""

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor, now or with the next file."""
        if name in self.names:
            raise ValueError(f"the tensor {name} is written twice")
        held = tensor.detach().to("cpu").contiguous()
        if held.data_ptr() == tensor.data_ptr():  # the caller may change its memory before the file is written
            held = held.clone()
        if self._pending and self._pending_bytes + held.nbytes > self._shard_bytes:
            self._flush()
        self.names.add(name)
        self._pending[name] = held
        self._pending_bytes += held.nbytes
        self.num_bytes += held.nbytes

    def close(self) -> None:
        """Write what is left, name the files by their number, and write the index if there are several."""
        self._flush()
        count = len(self._shards)
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards, 1):
            final = "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
            self._part(number).rename(self._folder / final).chmod(0o644)  # safetensors makes files private
            weight_map |= dict.fromkeys(names, final)
        if count > 1:
            index = {"metadata": {"total_size": self.num_bytes}, "weight_map": dict(sorted(weight_map.items()))}
            (self._folder / SAFETENSORS_INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _flush(self) -> None:
        if self._pending:
            self._shards.append(list(self._pending))
            save_file(self._pending, self._part(len(self._shards)), metadata={"format": "pt"})
            self._pending, self._pending_bytes = {}, 0

    def _part(self, number: int) -> Path:
        return self._folder / f"part-{number:05d}.safetensors.unfinished"
