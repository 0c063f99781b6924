"""Latent attention on an NVIDIA GPU: absorbed for decodes, in two parts for prompts (`kernels/triton/latent`)."""

from __future__ import annotations

import torch

from quire.kernels.triton.latent.decode import DecodePlan, LatentDecode
from quire.kernels.triton.latent.products import absorb, values_of_context, values_of_rows
from quire.kernels.triton.latent.prompt import attend_context, attend_own_tokens, context_tokens, prompt_tile
from quire.kernels.triton.prefill_attention import plan_tiles
from quire.layers.attention.base import AttentionInputs, LatentShape


class TritonLatentAttention:
    """Plans each step once, in its first layer, on the device; the other layers read the plan. One object serves all
    layers of the same shape: they share its workspace."""

    def __init__(self, heads: int, shape: LatentShape) -> None:
        self._heads = heads
        self._shape = shape
        self._kernels: dict[tuple[int, torch.dtype], LatentDecode] = {}

    def prepare(self, kv: torch.Tensor, inputs: AttentionInputs) -> None:
        if inputs.rows is None:
            inputs.rows = torch.arange(inputs.num_rows, dtype=torch.int32, device=kv.device)
        decodes = inputs.num_decodes
        if decodes and "latent" not in inputs.plans:
            kernel = self._decode_kernel(kv, inputs)
            inputs.plans["latent"] = (kernel, kernel.plan(inputs.context_lens, inputs.rows, decodes))
        if decodes < inputs.num_rows and "latent tiles" not in inputs.plans:
            own = prompt_tile(kv.element_size()).block_m
            inputs.plans["latent tiles"] = self._tiles(inputs, own)
            if inputs.has_context:
                inputs.plans["latent context"] = self._tiles(inputs, context_tokens(self._heads))

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
        decodes = inputs.num_decodes
        assert inputs.rows is not None
        if decodes:
            kernel: LatentDecode
            plan: DecodePlan
            kernel, plan = inputs.plans["latent"]
            absorbed = absorb(q[:decodes], up, self._shape.nope)
            kernel.attend(q, absorbed, kv, inputs.block_tables, inputs.rows, inputs.context_lens, plan, scale)
            values_of_rows(absorbed, up, out, inputs.context_lens, plan, kernel, self._shape.nope, decodes)
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
        shape, first = self._shape, inputs.num_decodes  # every row before has one token
        keys = torch.nn.functional.linear(latent[first:, : shape.rank], up.flatten(0, 1))
        sizes = (shape.rank, shape.nope, shape.rope, shape.value)
        tiles = inputs.plans["latent tiles"]
        context = inputs.plans.get("latent context")
        stats = None
        if context is not None:
            stats = torch.empty(len(q), self._heads, 2, dtype=torch.float32, device=q.device)
            # Tokens of ended rows and padding are in no tile.
            stats[:, :, 1] = float("-inf")
        attend_own_tokens(q, keys, latent, out, stats, tiles, inputs.query_starts, sizes, scale, first)
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
            inputs.query_starts, inputs.context_lens, inputs.plans["row numbers"], inputs.num_decodes, inputs.num_rows,
            inputs.num_tokens, tokens,
        )  # fmt: skip

    def _decode_kernel(self, kv: torch.Tensor, inputs: AttentionInputs) -> LatentDecode:
        """The kernel with its workspace; made when first used."""
        rows = max(len(inputs.block_tables) - 1, inputs.num_rows)  # the last one is padding
        key = (rows, kv.dtype)
        if key not in self._kernels:
            shape = self._shape
            self._kernels[key] = LatentDecode(
                self._heads, shape.nope, shape.rank, shape.rope, rows, kv.dtype, kv.device
            )
        return self._kernels[key]
