"""Paged attention in plain torch: runs anywhere, and is the reference for the fast backends."""

from __future__ import annotations

import torch

from quire.kernels.kv import LayerKV, QuantizedKV
from quire.layers.attention.base import AttentionInputs, AttentionSpec, LatentBackend, LatentShape

# Elements of the largest intermediate tensor (256 MiB in float32): rows are processed in groups, queries in spans.
_MAX_ELEMENTS = 1 << 26


class TorchPagedAttention:
    """Gathers each row's blocks, pads to the longest context, masks. Decodes and longer rows run separately."""

    graph_safe = False

    def latent(self, heads: int, shape: LatentShape) -> LatentBackend:
        """The same for latent caches."""
        from quire.layers.attention.torch_latent import TorchLatentAttention

        return TorchLatentAttention()

    def prepare(self, heads: int, kv: LayerKV, inputs: AttentionInputs, spec: AttentionSpec) -> None:
        """Nothing to compute ahead."""

    def attend(self, q: torch.Tensor, kv: LayerKV, inputs: AttentionInputs, spec: AttentionSpec) -> torch.Tensor:
        tokens, heads, dim = q.shape
        # One row more than there are tokens, for the outputs of padding queries.
        out = q.new_zeros(tokens + 1, heads * dim)
        if inputs.num_decodes:
            self._attend_rows(out, q, kv, inputs, 0, inputs.num_decodes, 1, spec)
        if inputs.num_decodes < inputs.num_rows:
            self._attend_rows(out, q, kv, inputs, inputs.num_decodes, inputs.num_rows, inputs.max_query_len, spec)
        return out[:tokens]

    def _attend_rows(
        self,
        out: torch.Tensor,
        q: torch.Tensor,
        kv: LayerKV,
        inputs: AttentionInputs,
        first: int,
        last: int,
        length: int,
        spec: AttentionSpec,
    ) -> None:
        """Rows first to last, with at most `length` queries each, into their tokens' rows of `out`."""
        tokens, heads, dim = q.shape
        _, _, kv_heads, block_size, _ = kv.shape
        ahead = inputs.seen_ahead(spec)
        blocks = min(-(-inputs.max_context_len // block_size), inputs.block_tables.shape[1])
        context = blocks * block_size
        tables = inputs.own_tables(blocks)
        group = max(1, _MAX_ELEMENTS // (max(context * kv_heads, length * heads) * dim))
        for start in range(first, last, group):
            stop = min(start + group, last)
            context_lens = inputs.context_lens[start:stop].long().unsqueeze(1)
            query_starts = inputs.query_starts[start:stop].long().unsqueeze(1)
            query_lens = inputs.query_starts[start + 1 : stop + 1].long().unsqueeze(1) - query_starts
            numbers = tables[start:stop].long()
            cached = torch.arange(context, device=q.device)
            # Slots past a row's end may hold anything, even NaN, and 0 * NaN would reach the sum.
            unseen = cached >= context_lens
            if spec.window is not None:
                behind = context_lens - query_lens - spec.window + 1  # tokens before the first query's window
                unseen |= cached < behind
                numbers = numbers.masked_fill(cached[::block_size] + block_size <= behind, 0)
            keys, values = _gather(kv, numbers)
            values = values.masked_fill(unseen[:, :, None], 0)
            span = max(1, _MAX_ELEMENTS // ((stop - start) * heads * context))
            for begin in range(0, length, span):
                query = torch.arange(begin, min(begin + span, length), device=q.device)
                index = torch.where(query < query_lens, query_starts + query, tokens)
                position = (context_lens - query_lens + query).unsqueeze(-1)
                visible = cached <= position
                if ahead is not None:
                    visible = cached <= position + ahead[index.clamp(max=tokens - 1)].unsqueeze(-1)
                if spec.window is not None:
                    visible &= cached > position - spec.window
                distance = None if spec.slopes is None else cached - position
                result = _softmax_attention(q[index.clamp(max=tokens - 1)], keys, values, visible, distance, spec)
                out.index_copy_(0, index.flatten(), result.flatten(0, 1).to(out.dtype))


def _gather(kv: LayerKV, tables: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of rows' blocks [rows, blocks], each as [kv_heads, rows, context, dim] float32."""
    if isinstance(kv, QuantizedKV):
        return kv.gather(0, tables), kv.gather(1, tables)
    keys, values = kv.permute(1, 2, 0, 3, 4)
    # Heads lead, so that blocks and their slots are adjacent and flatten without a second copy.
    return keys[:, tables].flatten(2, 3).float(), values[:, tables].flatten(2, 3).float()


def _softmax_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    distance: torch.Tensor | None,
    spec: AttentionSpec,
) -> torch.Tensor:
    """q [rows, queries, heads, dim] over keys and values [kv_heads, rows, context, dim], where `visible`
    [rows, queries, context]; returns [rows, queries, heads * dim] float32. `distance`: of keys from their queries, of
    the same shape, for slopes; negative: the key comes before."""
    rows, queries, _, dim = q.shape
    kv_heads = keys.shape[0]
    # Query heads that share a KV head are more queries to it: [kv_heads, rows, heads / kv_heads * queries, dim].
    grouped = q.float().view(rows, queries, kv_heads, -1, dim).permute(2, 0, 3, 1, 4).flatten(2, 3)
    scores = (grouped @ keys.transpose(-1, -2)).mul_(spec.scale).unflatten(2, (-1, queries))
    if spec.soft_cap is not None:
        scores = scores.div_(spec.soft_cap).tanh_().mul_(spec.soft_cap)
    if spec.slopes is not None and distance is not None:
        scores += spec.slopes.view(kv_heads, 1, -1, 1, 1) * distance.unsqueeze(1)
    # Not -inf: a row that sees nothing (an inactive one) must not become NaN.
    scores.masked_fill_(~visible.unsqueeze(1), torch.finfo(scores.dtype).min)
    if spec.sinks is not None:
        sinks = spec.sinks.float().view(kv_heads, 1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    result = weights.flatten(2, 3) @ values
    return result.unflatten(2, (-1, queries)).permute(1, 3, 0, 2, 4).flatten(2)
