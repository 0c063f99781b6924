"""Latent attention on an NVIDIA GPU: absorbed for decodes, those that verify drafts too, in two parts for prompts
(`kernels/triton/latent`)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch

from quire.kernels.triton.latent.decode import DecodePlan, LatentDecode
from quire.kernels.triton.latent.products import absorb, values_of_context, values_of_rows
from quire.kernels.triton.latent.prompt import attend_context, attend_own_tokens, context_tokens, prompt_tile
from quire.kernels.triton.prefill_attention import plan_tiles
from quire.layers.attention.base import AttentionInputs, LatentShape

EXPANDED_QUERIES = 128
"""Queries of a chunk from which on keys and values of earlier context are computed: 2 * rank * (nope + value)
operations a head and token, for a third of the operations of each pair."""
PIECE_BYTES = 128 << 20
"""Bytes of keys and values of a piece, which has at least MIN_PIECE tokens."""
MIN_PIECE = 1024


@dataclass(frozen=True)
class _Piece:
    """Some of the tokens that prompts had cached before a step, and which of them are whose."""

    blocks: torch.Tensor
    offsets: torch.Tensor
    """[tokens] int64: where they are."""
    starts: torch.Tensor
    ends: torch.Tensor
    """[S] int32: row i's are tokens starts[i] to ends[i] of the piece."""


def _upload(values: list[Any], device: torch.device) -> torch.Tensor:
    numbers = torch.tensor(values, dtype=torch.int32, pin_memory=device.type == "cuda")
    return numbers.to(device, non_blocking=True)


class TritonLatentAttention:
    """Plans each step once, in its first layer, on the device; the other layers read the plan. One object serves all
    layers of the same shape: they share its workspace."""

    def __init__(self, heads: int, shape: LatentShape) -> None:
        self._heads = heads
        self._shape = shape
        self._kernels: dict[tuple[int, torch.dtype, int], LatentDecode] = {}

    def prepare(self, kv: torch.Tensor, inputs: AttentionInputs) -> None:
        if inputs.rows is None:
            inputs.rows = torch.arange(inputs.num_rows, dtype=torch.int32, device=kv.device)
        decodes = inputs.num_verifying or inputs.num_decodes
        if decodes and "latent" not in inputs.plans:
            kernel = self._decode_kernel(kv, inputs)
            inputs.plans["latent"] = (kernel, kernel.plan(inputs.context_lens, inputs.rows, decodes))
        if decodes < inputs.num_rows and "latent tiles" not in inputs.plans:
            tile = prompt_tile(max(self._shape.nope, self._shape.value), kv.element_size())
            inputs.plans["latent tiles"] = self._tiles(inputs, tile.block_m)
            if inputs.contexts is None or (any(inputs.contexts) and not self._expands(inputs)):
                inputs.plans["latent context"] = self._tiles(inputs, context_tokens(self._heads))
            elif any(inputs.contexts):
                inputs.plans["latent pieces"] = self._pieces(kv, inputs)

    def attend(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        kv: torch.Tensor,
        up: torch.Tensor,
        inputs: AttentionInputs,
        scale: float,
    ) -> torch.Tensor:
        out = torch.empty(len(q), self._heads * self._shape.value, dtype=q.dtype, device=q.device)
        decodes = inputs.num_verifying or inputs.num_decodes
        tokens = inputs.num_verified or inputs.num_decodes
        assert inputs.rows is not None
        if decodes:
            kernel: LatentDecode
            plan: DecodePlan
            kernel, plan = inputs.plans["latent"]
            starts = inputs.query_starts if inputs.num_verifying else None
            absorbed = absorb(q[:tokens], up, self._shape.nope)
            kernel.attend(q, absorbed, kv, inputs.block_tables, inputs.rows, inputs.context_lens, plan, scale, starts)
            values_of_rows(absorbed, up, out, inputs.context_lens, plan, kernel, self._shape.nope, decodes, starts)
        if decodes < inputs.num_rows:
            self._attend_prompts(q, latent, kv, up, inputs, scale, out)
        return out

    def _attend_prompts(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        kv: torch.Tensor,
        up: torch.Tensor,
        inputs: AttentionInputs,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        shape, first = self._shape, inputs.num_verified or inputs.num_decodes  # tokens of the rows before
        keys = torch.nn.functional.linear(latent[first:, : shape.rank], up.flatten(0, 1))
        sizes = (shape.rank, shape.nope, shape.rope, shape.value)
        tiles = inputs.plans["latent tiles"]
        context, pieces = inputs.plans.get("latent context"), inputs.plans.get("latent pieces", ())
        stats = None
        if context is not None or pieces:
            stats = torch.empty(len(q), self._heads, 2, dtype=torch.float32, device=q.device)
            # Tokens of ended rows and padding are in no tile.
            stats[:, :, 1] = float("-inf")
        attend_own_tokens(q, keys, latent, out, stats, tiles, inputs.query_starts, sizes, scale, first)
        for piece in pieces:
            cached = kv[piece.blocks, piece.offsets]
            keys = torch.nn.functional.linear(cached[:, : shape.rank], up.flatten(0, 1))
            attend_own_tokens(q, keys, cached, out, stats, tiles, piece.starts, sizes, scale, 0, key_ends=piece.ends)
        if context is None or stats is None:
            return
        assert inputs.rows is not None
        absorbed = absorb(q[first:], up, shape.nope)
        attend_context(
            q, absorbed, kv, stats, inputs.block_tables, inputs.rows, context, inputs.query_starts, shape.nope, scale,
            first,
        )  # fmt: skip
        values_of_context(absorbed, up, out[first:], stats[first:], shape.nope)

    def _tiles(self, inputs: AttentionInputs, tokens: int) -> torch.Tensor:
        """The prompts' tokens in tiles, with the numbers of their rows in this step."""
        if "row numbers" not in inputs.plans:
            inputs.plans["row numbers"] = torch.arange(
                inputs.num_rows, dtype=torch.int32, device=inputs.query_starts.device
            )
        return plan_tiles(
            inputs.query_starts, inputs.context_lens, inputs.plans["row numbers"],
            inputs.num_verifying or inputs.num_decodes, inputs.num_rows, inputs.num_tokens, tokens,
        )  # fmt: skip

    def _expands(self, inputs: AttentionInputs) -> bool:
        """Whether computing keys and values of earlier context pays: by the queries that read each of its tokens."""
        assert inputs.contexts is not None
        lengths = inputs.query_lens or [inputs.max_query_len]
        pairs = sum(length * context for length, context in zip(lengths, inputs.contexts, strict=True))
        return pairs >= EXPANDED_QUERIES * sum(inputs.contexts)

    def _pieces(self, kv: torch.Tensor, inputs: AttentionInputs) -> list[_Piece]:
        """The earlier context of all prompts, one after another, cut into pieces."""
        assert inputs.contexts is not None and inputs.rows is not None
        first, counts, block_size = inputs.num_decodes, inputs.contexts, kv.shape[1]
        ends = list(itertools.accumulate(counts))
        total, device = ends[-1], kv.device
        size = max(MIN_PIECE, PIECE_BYTES // (self._heads * (self._shape.nope + self._shape.value) * kv.element_size()))
        pad = [0] * (-inputs.num_rows % 16)  # kernels are compiled for aligned pointers
        spans = [
            [
                [0] * first + [min(max(place - begin, 0), size) for place in places] + pad
                for places in ([0, *ends[:-1]], ends)
            ]
            for begin in range(0, total, size)
        ]
        numbers = _upload([*counts, *(e - c for e, c in zip(ends, counts, strict=True))], device)
        lengths, begins = numbers.long().chunk(2)
        owner = torch.repeat_interleave(lengths, output_size=total)
        position = torch.arange(total, device=device) - begins[owner]
        blocks = inputs.block_tables[inputs.rows[first:][owner].long(), position // block_size].long().split(size)
        offsets = (position % block_size).split(size)
        bounds = _upload(spans, device)
        return [_Piece(*cut, *bound) for *cut, bound in zip(blocks, offsets, bounds, strict=True)]

    def _decode_kernel(self, kv: torch.Tensor, inputs: AttentionInputs) -> LatentDecode:
        """The kernel with its workspace; made when first used."""
        rows = max(len(inputs.block_tables) - 1, inputs.num_rows)  # the last one is padding
        queries = 1 if not inputs.num_verifying else 4 if inputs.width <= 4 else 8
        key = (rows, kv.dtype, queries)
        if key not in self._kernels:
            shape = self._shape
            self._kernels[key] = LatentDecode(
                self._heads, shape.nope, shape.rank, shape.rope, rows, kv.dtype, kv.device, queries
            )
        return self._kernels[key]
