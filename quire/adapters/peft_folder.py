"""Reads an adapter that PEFT wrote into memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from quire.adapters.adapter import Adapter, ExpertLowRank, LowRank
from quire.adapters.folder import DTYPES, AdapterFolder, adapter_digest, not_finite
from quire.adapters.folder import AdapterFacts as AdapterFacts
from quire.adapters.folder import describe_adapter as describe_adapter
from quire.adapters.layout import GATE_UP, LayoutReader, MatrixTensors
from quire.adapters.torch_file import read_torch, tensor_values
from quire.loading.stored_tensor import StoredTensor


def read_adapter(folder: Path, max_rank: int) -> Adapter:
    """Read and check an adapter. Raises `AdapterError` for anything that cannot be served exactly."""
    found = AdapterFolder(folder)
    settings = found.settings()
    if found.is_pickled:
        tensors = read_torch(found.weights)
    else:
        tensors = {
            name: StoredTensor(found.weights, name, at.start, at.shape, getattr(torch, DTYPES[at.dtype])).read()
            for name, at in found.header().items()
        }
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    layout = LayoutReader(found.weights, settings, max_rank, shapes).read()
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise not_finite(found.weights, name)
    experts = {name: _unfolded(tensors, stack) for name, stack in layout.stacks.items()}
    for name, group in layout.single_experts.items():
        experts |= {f"{name}.{parameter}": stack for parameter, stack in _stacked(tensors, group).items()}
    return Adapter(
        digest=adapter_digest(settings, tensor_values(tensors)),
        rank=layout.rank,
        matrices={module: _low_rank(tensors, names) for module, names in layout.matrices.items()},
        experts=experts,
        embeddings={module: _low_rank(tensors, names) for module, names in layout.embeddings.items()},
        replaced={parameter: tensors[name] for parameter, name in layout.replaced.items()},
        token_rows={module: (tokens, tensors[name]) for module, (tokens, name) in layout.token_rows.items()},
        invocation=settings.invocation,
    )


def _low_rank(tensors: Mapping[str, Tensor], names: MatrixTensors) -> LowRank:
    # PEFT adds the bias before it scales.
    bias = None if names.bias is None else tensors[names.bias].flatten() * names.scale
    magnitude = None if names.magnitude is None else tensors[names.magnitude].flatten()
    return LowRank(tensors[names.a], tensors[names.b], names.scale, bias, magnitude)


def _unfolded(tensors: Mapping[str, Tensor], names: MatrixTensors) -> ExpertLowRank:
    a, b = tensors[names.a], tensors[names.b]
    # Rows of A are by expert and rank, columns of B by rank and expert.
    b = b.reshape(b.shape[0], names.rank, names.experts).permute(2, 0, 1).contiguous()
    return ExpertLowRank(a.reshape(names.experts, names.rank, a.shape[1]), b, names.scale)


def _stacked(
    tensors: Mapping[str, Tensor], group: Mapping[str, Mapping[int, MatrixTensors]]
) -> dict[str, ExpertLowRank]:
    """Adapters of single experts as those of all."""
    count = 1 + max(number for matrices in group.values() for number in matrices)
    stacked = {matrix: _stack(tensors, matrices, count) for matrix, matrices in group.items()}
    gate, up = stacked.pop("gate_proj", None), stacked.pop("up_proj", None)
    if gate is not None or up is not None:
        stacked[GATE_UP] = _side_by_side(gate, up)
    return stacked


def _stack(tensors: Mapping[str, Tensor], matrices: Mapping[int, MatrixTensors], count: int) -> ExpertLowRank:
    first = next(iter(matrices.values()))
    (out, width), rank = first.shape, max(names.rank for names in matrices.values())
    scale = next((names.scale for names in matrices.values() if names.scale), 1.0)
    a = tensors[first.a].new_zeros(count, rank, width)
    b = tensors[first.b].new_zeros(count, out, rank)
    for number, names in matrices.items():
        a[number, : names.rank] = tensors[names.a]
        b[number, :, : names.rank] = _rescaled(tensors[names.b], names.scale, scale)
    return ExpertLowRank(a, b, scale)


def _side_by_side(gate: ExpertLowRank | None, up: ExpertLowRank | None) -> ExpertLowRank:
    """One product for both halves of gate_up_proj: its ranks are the gate's, then those of up."""
    halves = [half for half in (gate, up) if half is not None]
    some = halves[0]
    count, out, _ = some.b.shape
    b = some.b.new_zeros(count, 2 * out, sum(half.rank for half in halves))
    start = 0
    for place, half in enumerate((gate, up)):
        if half is not None:
            rows = _rescaled(half.b, half.scale, some.scale)
            b[:, place * out : (place + 1) * out, start : start + half.rank] = rows
            start += half.rank
    return ExpertLowRank(torch.cat([half.a for half in halves], dim=1), b, some.scale)


def _rescaled(b: Tensor, scale: float, other: float) -> Tensor:
    """`b` such that `other` is its scale; rounded once, in its own type, where they differ."""
    return b if scale == other else b * (scale / other)
