"""Matrices quantized and compressed by the compressed-tensors library."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
import torch.nn.functional as F

needed = pytest.mark.skipif(
    importlib.util.find_spec("compressed_tensors") is None, reason="compressed-tensors is not installed"
)


def compress(
    values: torch.Tensor,
    weights: dict[str, Any],
    format: str,
    inputs: dict[str, Any] | None = None,
    scale_dtype: torch.dtype = torch.float32,
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """(tensors, what they mean in float32) of a matrix; `weights`, `inputs`: as in config_groups."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, input_activations=inputs)
    state = {"weight": values.to(scale_dtype)}
    height, width = values.shape
    if args.strategy == "block":
        rows, columns = args.block_structure
        padded = F.pad(values, (0, -width % columns, 0, -height % rows))
        cells = padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns)).transpose(1, 2).flatten(2)
    elif args.strategy in ("group", "tensor_group"):
        cells = values.unflatten(1, (-1, args.group_size))
    else:
        cells = values.unsqueeze(1) if args.strategy == "channel" else values.flatten()[None, None]
    scalar = None
    if args.strategy == "tensor_group":
        scalar = state["weight_global_scale"] = generate_gparam(values.min(), values.max()).reshape(1)
    scale, zero = calculate_qparams(cells.amin(-1), cells.amax(-1), args, global_scale=scalar)
    if args.strategy == "tensor":
        scale, zero = scale.reshape(1), zero.reshape(1)
    state |= {"weight_scale": scale.to(scale_dtype), "weight_zero_point": zero}
    reader = BaseCompressor.get_value_from_registry(format)
    compressed = reader.compress(state, scheme)
    meant = reader.decompress({name: _wide(name, tensor) for name, tensor in compressed.items()}, scheme)["weight"]
    return {name: tensor.data.contiguous() for name, tensor in compressed.items()}, meant.float()


def _wide(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Scales in float32: the library computes in their dtype."""
    narrow = name == "weight_scale" and tensor.dtype in (torch.bfloat16, torch.float16)
    return tensor.float() if narrow else tensor
