"""Tiny checkpoints in the formats of the Hub, packed value by value from their descriptions, beside what they mean."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.conftest import write_tiny_model

GROUP = 32
NUMBERS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
Tensors = dict[str, torch.Tensor]
Packed = tuple[Tensors, torch.Tensor]
"""A matrix's tensors, and its values [out, in] in float32."""


def words(codes: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """4-bit codes [rows, n] as int32 [rows, n / 8]: nibble i of a word is code order[i] of its eight."""
    eight = codes.view(len(codes), -1, 8)[..., list(order)].long()
    packed = (eight << (4 * torch.arange(8))).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def grouped_codes(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes 0..15 [out, in], zeros [out, groups], scales [out, groups] that float16 holds)."""
    groups = matrix.view(len(matrix), -1, GROUP)
    low, high = groups.amin(-1), groups.amax(-1)
    scale = ((high - low) / 15).half().float()
    zero = (-low / scale).round().clamp(1, 15)
    codes = ((groups / scale.unsqueeze(-1)).round() + zero.unsqueeze(-1)).clamp(0, 15)
    return codes.view(matrix.shape).int(), zero.int(), scale


def grouped_values(codes: torch.Tensor, zero: torch.Tensor | int, scale: torch.Tensor) -> torch.Tensor:
    zeros = zero.repeat_interleave(GROUP, 1) if isinstance(zero, torch.Tensor) else zero
    return (codes - zeros).float() * scale.repeat_interleave(GROUP, 1)


def awq(matrix: torch.Tensor) -> Packed:
    codes, zero, scale = grouped_codes(matrix)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {"qweight": words(codes.t(), order), "qzeros": words(zero.t(), order), "scales": scale.t().half()}
    return tensors, grouped_values(codes, zero, scale)


def gptq(matrix: torch.Tensor) -> Packed:
    codes, zero, scale = grouped_codes(matrix)
    tensors = {
        "qweight": words(codes).t(),
        "qzeros": words((zero - 1).t()),
        "scales": scale.t().half(),
        "g_idx": (torch.arange(matrix.shape[1]) // GROUP).int(),
    }
    return tensors, grouped_values(codes, zero, scale)


def packed(matrix: torch.Tensor) -> Packed:
    """compressed-tensors, symmetric."""
    groups = matrix.view(len(matrix), -1, GROUP)
    scale = groups.abs().amax(-1) / 7
    codes = (groups / scale.unsqueeze(-1)).round().clamp(-8, 7).view(matrix.shape).int()
    tensors = {"weight_packed": words(codes + 8), "weight_scale": scale, "weight_shape": torch.tensor(matrix.shape)}
    return tensors, grouped_values(codes, 0, scale)


def mxfp4(matrix: torch.Tensor) -> Packed:
    groups = matrix.view(len(matrix), -1, GROUP)
    exponent = groups.abs().amax(-1).log2().floor() - 2
    scaled = groups / torch.exp2(exponent).unsqueeze(-1)
    codes = (scaled.abs().unsqueeze(-1) - NUMBERS).abs().argmin(-1)
    values = NUMBERS[codes] * scaled.sign() * torch.exp2(exponent).unsqueeze(-1)
    codes = (codes + 8 * (scaled < 0)).view(*matrix.shape[:1], -1, 2).to(torch.uint8)
    tensors = {
        "weight_packed": codes[..., 0] | codes[..., 1] << 4,
        "weight_scale": (exponent + 127).to(torch.uint8),
    }
    return tensors, values.view(matrix.shape)


def by_output(code: torch.dtype, largest: float) -> Callable[[torch.Tensor], Packed]:
    def pack(matrix: torch.Tensor) -> Packed:
        scale = matrix.abs().amax(1, keepdim=True) / largest
        codes = matrix / scale
        codes = (codes.round() if code is torch.int8 else codes).to(code)
        return {"weight": codes, "weight_scale": scale}, codes.float() * scale

    return pack


def blocks(matrix: torch.Tensor) -> Packed:
    """All of it is one block of 128x128, or less."""
    assert max(matrix.shape) <= 128
    scale = matrix.abs().amax() / 448
    codes = (matrix / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scale.view(1, 1)}, codes.float() * scale


def _compressed(format: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors", "format": format, "ignore": ["lm_head"],
        "quantization_status": "compressed", "config_groups": {"group_0": group},
    }  # fmt: skip


_TOKEN = {"num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
_GROUPS = {"num_bits": 4, "symmetric": True, "strategy": "group", "group_size": GROUP}
SCHEMES: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], Packed]]] = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, awq),
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False,
         "checkpoint_format": "gptq"}, gptq,
    ),
    "packed": (_compressed("pack-quantized", _GROUPS | {"type": "int"}), packed),
    "mxfp4": (_compressed("mxfp4-pack-quantized", _GROUPS | {"type": "float", "scale_dtype": "torch.uint8"}), mxfp4),
    "int8": (
        _compressed("int-quantized", {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
                    _TOKEN | {"type": "int"}), by_output(torch.int8, 127),
    ),
    "fp8": (
        _compressed("float-quantized", {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"},
                    _TOKEN | {"type": "float"}), by_output(torch.float8_e4m3fn, 448),
    ),
    "fp8 blocks": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}, blocks,
    ),
}  # fmt: skip
WEIGHT_ONLY = ("awq", "gptq", "packed", "mxfp4")


def write(folder: Path, name: str) -> Tensors:
    """The tiny model with its layers' matrices in that format. Returns the tensors that it means, in float32."""
    write_tiny_model(folder)
    description, pack = SCHEMES[name]
    stored: Tensors = {}
    means: Tensors = {}
    for tensor, values in load_file(folder / "model.safetensors").items():
        if not tensor.endswith("_proj.weight"):
            stored[tensor] = means[tensor] = values
            continue
        parts, means[tensor] = pack(values)
        stored |= {f"{tensor.removesuffix('.weight')}.{key}": part.contiguous() for key, part in parts.items()}
    save_file(stored, folder / "model.safetensors")
    change_config(folder, quantization_config=description)
    return means


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change_tensors(folder: Path, change: Callable[[Tensors], None]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
