"""The n-gram proposer: what followed the last time that a row's latest tokens occurred in it, prompt and output.

It looks for the longest run of the last tokens, between `prompt_lookup_min` and `prompt_lookup_max` of them, and of its
places for the latest. No weights, no cache: it reads the token ids that the batch keeps. `suffix.py` has the same for
the host (`NgramLookup`).
"""

from __future__ import annotations

from typing import Any

import torch

from quire.errors import ConfigError
from quire.kernels.cpu.build import Library, library
from quire.layers.build_context import BuildContext
from quire.layers.caches import LayerCache
from quire.speculative.config import SpeculativeConfig
from quire.speculative.device import ProposalStep

MAX_ROWS = 1 << 14
"""Most rows of a step, on a GPU."""


def make(config: SpeculativeConfig, target: Any, build: BuildContext) -> NgramProposer:
    """The proposer for a device."""
    bounds = config.shortest_ngram, config.longest_ngram
    if build.device.type != "cpu":
        return TritonNgramProposer(*bounds, build.device)
    native = library()
    return NgramProposer(*bounds) if native is None else NativeNgramProposer(*bounds, native)


class NgramProposer:
    """In torch operations over all rows at once."""

    feature_layers: tuple[int, ...] = ()
    needs_hidden = False
    needs_following = False
    caches: list[LayerCache] = []  # noqa: RUF012  # never changed

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest

    def propose(self, step: ProposalStep) -> None:
        if not step.count:
            return
        batch, rows = step.batch, step.rows
        tokens, counts = self._row_tokens(step)
        width = tokens.shape[1]
        # matches[r, p]: the last tokens of row r also end before position p, and p is one of its tokens
        matches = torch.zeros_like(tokens, dtype=torch.bool)
        torch.eq(tokens[:, :-1], batch.last_token[rows, None], out=matches[:, 1:])
        matches &= torch.arange(width, device=tokens.device) < counts[:, None]
        lengths = matches.to(torch.int32)
        for i in range(1, min(self._longest, width - 1)):
            wanted = tokens.gather(1, (counts - 1 - i).clamp(min=0)[:, None])
            matches[:, : i + 1] = False
            matches[:, i + 1 :] &= tokens[:, : width - i - 1] == wanted
            lengths += matches
        place_bits = width.bit_length()
        best = ((lengths << place_bits) + torch.arange(width, dtype=torch.int32, device=tokens.device)).amax(1).long()
        places = best & ((1 << place_bits) - 1)
        is_found = best >> place_bits >= self._shortest
        after = torch.arange(step.count, device=tokens.device)
        # What follows the row's end are the drafts themselves.
        positions = places[:, None] + after % (counts - places).clamp(min=1)[:, None]
        batch.drafts[rows, : step.count] = tokens.gather(1, positions.clamp(max=width - 1)).to(batch.drafts.dtype)
        batch.num_drafts[rows] = (is_found * step.count).to(batch.num_drafts.dtype)

    def _row_tokens(self, step: ProposalStep) -> tuple[torch.Tensor, torch.Tensor]:
        """[rows, tokens] of the rows, and how many each has."""
        batch, rows = step.batch, step.rows
        counts = batch.num_tokens[rows]
        tokens = batch.row_tokens(rows, max(step.attention[0].max_context_len + 1, 2))
        # The last one was drawn just now: it is not among the computed ones.
        tokens.scatter_(1, (counts - 1).clamp(0, tokens.shape[1] - 1)[:, None], batch.last_token[rows, None])
        return tokens, counts


class NativeNgramProposer(NgramProposer):
    """In C++, on a CPU: about a microsecond a row, where torch's operations take 200."""

    def __init__(self, shortest: int, longest: int, native: Library) -> None:
        super().__init__(shortest, longest)
        self._kernel = native.kernel("ngram")

    def propose(self, step: ProposalStep) -> None:
        if not step.count:
            return
        batch, rows = step.batch, step.rows.contiguous()
        in_pages, tables = batch.kv.has_tokens, batch.block_table
        tokens = batch.kv.tokens if in_pages else batch.token_ids
        run, pack = self._kernel[torch.int32]
        pointers = (rows, batch.num_tokens, batch.last_token, tokens, tables, batch.drafts, batch.num_drafts)
        run(
            pack(
                *(tensor.data_ptr() for tensor in pointers), len(rows), tables.stride(0), batch.token_ids.stride(0),
                batch.drafts.stride(0), batch.kv.block_size if in_pages else 0, self._shortest, self._longest,
                step.count,
            )
        )  # fmt: skip


class TritonNgramProposer(NgramProposer):
    """In two kernels, which a graph can hold."""

    def __init__(self, shortest: int, longest: int, device: torch.device) -> None:
        super().__init__(shortest, longest)
        self._best = torch.zeros(MAX_ROWS, dtype=torch.int64, device=device)

    def propose(self, step: ProposalStep) -> None:
        from quire.kernels.triton.ngram import propose_ngrams  # only on machines with Triton

        if not step.count:
            return
        if len(step.rows) > MAX_ROWS:
            raise ConfigError(f"n-gram drafts for {len(step.rows)} rows; at most {MAX_ROWS} are supported")
        context = step.attention[0].max_context_len + 1
        propose_ngrams(step.batch, step.rows, self._best, step.count, self._shortest, self._longest, context)
