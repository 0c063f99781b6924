"""Latent attention in plain torch, absorbed: runs anywhere, and is the reference for the kernels."""

from __future__ import annotations

import torch

from quire.layers.attention.base import AttentionInputs

MAX_ELEMENTS = 1 << 26
"""Elements of the largest intermediate tensor: rows are processed in groups, queries in spans."""


class TorchLatentAttention:
    """Gathers each row's blocks, pads to the longest context, masks. Decodes and longer rows run separately."""

    def prepare(self, kv: torch.Tensor, inputs: AttentionInputs) -> None:
        """Nothing to compute ahead."""

    def attend(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        kv: torch.Tensor,
        up: torch.Tensor,
        inputs: AttentionInputs,
        scale: float,
    ) -> torch.Tensor:
        tokens, heads, _ = q.shape
        rank = up.shape[2]
        rope = kv.shape[2] - rank
        nope = q.shape[2] - rope
        absorbed = torch.einsum("thn,hnr->thr", q[..., :nope].float(), up[:, :nope].float())
        queries = torch.cat((absorbed, q[..., nope:].float()), dim=-1)
        # One row more than there are tokens, for the outputs of padding queries.
        out = queries.new_zeros(tokens + 1, heads * rank)
        if inputs.num_decodes:
            self._attend_rows(out, queries, kv, inputs, 0, inputs.num_decodes, 1, scale)
        if inputs.num_decodes < inputs.num_rows:
            self._attend_rows(
                out, queries, kv, inputs, inputs.num_decodes, inputs.num_rows, inputs.max_query_len, scale
            )
        latents = out[:tokens].view(tokens, heads, rank)
        return torch.einsum("thr,hvr->thv", latents, up[:, nope:].float()).flatten(1).to(q.dtype)

    def _attend_rows(
        self,
        out: torch.Tensor,
        q: torch.Tensor,
        kv: torch.Tensor,
        inputs: AttentionInputs,
        first: int,
        last: int,
        length: int,
        scale: float,
    ) -> None:
        """Rows first to last, with at most `length` queries each, into their tokens' rows of `out`."""
        tokens, heads, width = q.shape
        rank, block_size = out.shape[1] // heads, kv.shape[1]
        blocks = min(-(-inputs.max_context_len // block_size), inputs.block_tables.shape[1])
        context = blocks * block_size
        tables = inputs.own_tables(blocks)
        group = max(1, MAX_ELEMENTS // (max(context, length * heads) * width))
        for start in range(first, last, group):
            stop = min(start + group, last)
            context_lens = inputs.context_lens[start:stop].long().unsqueeze(1)
            query_starts = inputs.query_starts[start:stop].long().unsqueeze(1)
            query_lens = inputs.query_starts[start + 1 : stop + 1].long().unsqueeze(1) - query_starts
            cached = torch.arange(context, device=q.device)
            keys = kv[tables[start:stop].long()].flatten(1, 2).float()
            # Slots past a row's end may hold anything, even NaN, and 0 * NaN would reach the sum.
            keys = keys.masked_fill((cached >= context_lens)[:, :, None], 0)
            span = max(1, MAX_ELEMENTS // ((stop - start) * heads * context))
            for begin in range(0, length, span):
                query = torch.arange(begin, min(begin + span, length), device=q.device)
                index = torch.where(query < query_lens, query_starts + query, tokens)
                visible = cached <= (context_lens - query_lens + query).unsqueeze(-1)
                scores = torch.einsum("sqhw,skw->sqhk", q[index.clamp(max=tokens - 1)], keys).mul_(scale)
                # Not -inf: a row that sees nothing (an inactive one) must not become NaN.
                scores.masked_fill_(~visible.unsqueeze(2), torch.finfo(scores.dtype).min)
                result = torch.einsum("sqhk,skr->sqhr", scores.softmax(-1), keys[..., :rank])
                out.index_copy_(0, index.flatten(), result.flatten(2).flatten(0, 1))
