"""Passes of a proposer's layers from a recording, on a device that makes such (`Ops.capture`): the CPU's tape.

A pass over a few tokens is some twenty native calls, and calling them from Python takes longer than they do. On a GPU
the proposer is part of the step's graph, and nothing is recorded here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from quire.kernels.base import Ops
from quire.layers.attention.base import AttentionInputs
from quire.speculative.device import ProposalStep

MOST_TOKENS = 32
"""The largest pass that is recorded: longer ones take so long that Python keeps up."""
MOST_PASSES = 64
"""Recordings that are kept, each of a shape."""

Tensors = tuple[torch.Tensor, ...]
Attention = tuple[AttentionInputs, ...]


@dataclass
class _Recording:
    tensors: Tensors
    attention: Attention
    result: Tensors
    replay: Callable[[], None]
    kv: Sequence[Any]


class PassRecorder:
    """Computes passes of one kind."""

    def __init__(self, ops: Ops, compute: Callable[..., Tensors]) -> None:
        """`compute`: called with the first of the attention inputs, the layers' caches and tensors. Attention reads
        only native kernels' results there, or nothing is recorded."""
        self._ops = ops
        self._compute = compute
        self._is_enabled = True
        self._recordings: dict[Any, _Recording] = {}

    def __call__(self, step: ProposalStep, attention: Attention, *tensors: torch.Tensor) -> Tensors:
        """What the pass computes, until the next one of the same shape."""
        first = attention[0]
        if not self._is_enabled or first.num_tokens > MOST_TOKENS or first.slots.device.type != "cpu":
            return self._compute(first, step.kv, *tensors)
        shape = (first.num_rows, first.num_tokens, first.max_query_len, first.num_decodes, first.num_verifying)
        # A recorded call has its number of threads and the addresses of caches in it.
        key = (*shape, len(first.block_tables), torch.get_num_threads())
        found = self._recordings.get(key)
        if found is not None and found.kv is step.kv:
            _fill(found, attention, tensors)
            found.replay()
            return found.result
        if found is None and len(self._recordings) == MOST_PASSES:
            return self._compute(first, step.kv, *tensors)
        return self._record(key, step, attention, tensors)

    def _record(self, key: Any, step: ProposalStep, attention: Attention, tensors: Tensors) -> Tensors:
        own = tuple(tensor.clone() for tensor in tensors)
        width = max(given.block_tables.shape[1] for given in attention)
        tables = getattr(step.batch, "block_tables", None)
        groups = tuple(_own(given, width if tables is None else tables.shape[-1]) for given in attention)
        for group in groups:
            group.siblings = groups if len(groups) > 1 else ()
        compute: Any = lambda: self._compute(groups[0], step.kv, *own)  # noqa: E731
        result, replay = self._ops.capture(compute)
        if replay is None:
            self._is_enabled = False  # these layers cannot be recorded
        else:
            self._recordings[key] = _Recording(own, groups, result, replay, step.kv)  # type: ignore[arg-type]
        return result  # type: ignore[return-value]


def _own(given: AttentionInputs, width: int) -> AttentionInputs:
    """Buffers for a cache group, filled from the first pass; tables as wide as they can get."""
    tables = given.block_tables.new_zeros(len(given.block_tables), max(width, given.block_tables.shape[1]))
    tables[:, : given.block_tables.shape[1]] = given.block_tables
    return replace(
        given, slots=given.slots.clone(), query_starts=given.query_starts.clone(),
        context_lens=given.context_lens.clone(), block_tables=tables, last=None, features=None, plans={}, common={},
    )  # fmt: skip


def _fill(recording: _Recording, attention: Attention, tensors: Tensors) -> None:
    for own, tensor in zip(recording.tensors, tensors, strict=True):
        own.copy_(tensor)
    for buffers, given in zip(recording.attention, attention, strict=True):
        buffers.slots.copy_(given.slots)
        buffers.query_starts.copy_(given.query_starts)
        buffers.context_lens.copy_(given.context_lens)
        buffers.block_tables[:, : given.block_tables.shape[1]].copy_(given.block_tables)


def is_recordable(step: ProposalStep) -> bool:
    """Whether a step's own pass is best computed whole, from a recording, instead of only where tokens are drawn."""
    attention = step.attention[0]
    is_small = attention.num_tokens <= MOST_TOKENS and attention.slots.device.type == "cpu"
    return is_small and attention.num_rows in (attention.num_decodes, attention.num_verifying)


def joined(ops: Ops, *parts: torch.Tensor) -> torch.Tensor:
    """The parts [T, width] beside each other, by an operation that can be recorded."""
    if parts[0].device.type != "cpu":
        return torch.cat(parts, dim=-1)
    out, at = parts[0].new_empty(len(parts[0]), sum(part.shape[1] for part in parts)), 0
    for part in parts:
        ops.copy_stream(part, None, out[:, at : at + part.shape[1]])
        at += part.shape[1]
    return out
