"""Changes to logits that only some rows have: penalties, lists, and custom processors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from quire.messages.sampling import SamplingParams
from quire.registry import resolve
from quire.worker.batch import DeviceBatch
from quire.worker.extras import RowExtras, RowKind

NEGATIVE_INFINITY = float("-inf")


class LogitsProcessor(Protocol):
    """A custom change to logits, named by dotted path in `logits_processors`.

    Parameters reach it through `SamplingParams.extra_args`; it is called only for requests that have some.
    """

    def applies(self, params: SamplingParams) -> bool:
        """Whether this processor applies to a request with these parameters."""
        ...

    def apply(
        self, logits: torch.Tensor, prompt: torch.Tensor, output: torch.Tensor, params: SamplingParams
    ) -> torch.Tensor:
        """The new logits [vocab] of a row, given its tokens so far."""
        ...


def load_processors(paths: Sequence[str | type]) -> list[LogitsProcessor]:
    """Processors by dotted path (or given as classes)."""
    return [(resolve("logits processor", path, {}) if isinstance(path, str) else path)() for path in paths]


def apply_penalties(
    batch: DeviceBatch, logits: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, longest: int
) -> torch.Tensor:
    """Repetition over prompt and output; presence and frequency over the output alone. `lengths`: tokens that count."""
    tokens = batch.row_tokens(rows, longest).clamp_(0, logits.shape[-1] - 1)
    position = torch.arange(tokens.shape[1], device=tokens.device)
    exists = position < lengths[:, None]
    is_output = exists & (position >= batch.prompt_len[rows, None])
    seen = torch.zeros_like(logits).scatter_add_(1, tokens, exists.to(logits.dtype)) > 0
    count = torch.zeros_like(logits).scatter_add_(1, tokens, is_output.to(logits.dtype))
    scalars = batch.scalars_of(rows)
    repetition = scalars["repetition_penalty"][:, None]
    frequency, presence = scalars["frequency_penalty"][:, None], scalars["presence_penalty"][:, None]
    logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    return logits - frequency * count - presence * (count > 0)


def apply_lists(
    batch: DeviceBatch,
    logits: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    host_rows: np.ndarray,
    longest: int,
    processors: Sequence[LogitsProcessor],
) -> None:
    """In place: lists of all rows at once, and processors row by row. `lengths`: tokens before each draw."""
    places = np.flatnonzero(batch.kinds[host_rows] & RowKind.LISTED)
    listed = [(i, batch.extras[row]) for i, row in zip(places.tolist(), host_rows[places].tolist(), strict=True)]
    _keep_allowed(batch, logits, [(i, extras) for i, extras in listed if extras.params.allowed_token_ids])
    _hold_stops_back(
        batch, logits, lengths - batch.prompt_len[rows], [(i, extras) for i, extras in listed if len(extras.stop_ids)]
    )
    _add_biases(batch, logits, [(i, extras) for i, extras in listed if extras.params.logit_bias])
    _ban_bad_words(batch, logits, rows, lengths, [(i, extras) for i, extras in listed if len(extras.bad_lasts)])
    if processors:
        _apply_processors(batch, logits, rows, lengths, listed, longest, processors)


Lists = list[tuple[int, np.ndarray]]
"""Token ids of some rows of logits, by row number."""


def _pairs(lists: Lists) -> tuple[np.ndarray, np.ndarray]:
    """(row, token) pairs of all lists, as two arrays."""
    counts = [len(ids) for _, ids in lists]
    return np.repeat([i for i, _ in lists], counts), np.concatenate([ids for _, ids in lists])


def _keep_allowed(batch: DeviceBatch, logits: torch.Tensor, listed: list[tuple[int, RowExtras]]) -> None:
    if listed:
        ruled, where, ids = _pairs_on_device(batch, [(i, extras.allowed) for i, extras in listed])
        allowed = logits[where, ids]
        logits[ruled] = NEGATIVE_INFINITY
        logits[where, ids] = allowed


def _pairs_on_device(
    batch: DeviceBatch, lists: list[tuple[int, torch.Tensor]]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(row indices, rows of all (row, token) pairs, their tokens). The lists are on the device: they may have thousands
    of tokens."""
    rows, counts = batch.upload([i for i, _ in lists], [len(ids) for _, ids in lists])
    ids = torch.cat([ids for _, ids in lists])
    return rows, rows.repeat_interleave(counts, output_size=len(ids)), ids


def _hold_stops_back(
    batch: DeviceBatch, logits: torch.Tensor, outputs: torch.Tensor, listed: list[tuple[int, RowExtras]]
) -> None:
    """Ban stop ids before `min_tokens`. `outputs`: output tokens before each draw."""
    if listed:
        least = [extras.params.min_tokens for _, extras in listed]
        counts = [len(extras.stop_ids) for _, extras in listed]
        where, ids, limits = batch.upload(
            *_pairs([(i, extras.stop_ids) for i, extras in listed]), np.repeat(least, counts)
        )
        too_early = outputs[where] < limits
        logits[where, ids] = torch.where(too_early, NEGATIVE_INFINITY, logits[where, ids])


def _add_biases(batch: DeviceBatch, logits: torch.Tensor, listed: list[tuple[int, RowExtras]]) -> None:
    if listed:
        _, where, ids = _pairs_on_device(batch, [(i, extras.bias_ids) for i, extras in listed])
        logits[where, ids] += torch.cat([extras.bias for _, extras in listed]).to(logits.dtype)


def _ban_bad_words(
    batch: DeviceBatch,
    logits: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    listed: list[tuple[int, RowExtras]],
) -> None:
    """Ban the last token of a bad word if the output ends in the tokens before it."""
    if not listed:
        return
    counts = np.concatenate([extras.bad_begun_counts for _, extras in listed])
    words = np.repeat(np.arange(len(counts)), counts)
    distances = np.repeat(np.cumsum(counts), counts) - np.arange(len(words))
    where, last, least, word, back, begun = batch.upload(
        *_pairs([(i, extras.bad_lasts) for i, extras in listed]),
        counts,
        words,
        distances,
        np.concatenate([extras.bad_begun for _, extras in listed]),
    )
    owners = where[word]
    differs = (batch.tokens_at(rows[owners], lengths[owners] - back) != begun).long()
    is_safe = torch.zeros_like(least).index_add_(0, word, differs) > 0
    is_safe |= (lengths - batch.prompt_len[rows])[where] < least
    # Added, because words of a row may end in the same token.
    bans = torch.where(is_safe, 0.0, NEGATIVE_INFINITY).to(logits.dtype)
    logits.index_put_((where, last), bans, accumulate=True)


def _apply_processors(
    batch: DeviceBatch,
    logits: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    listed: list[tuple[int, RowExtras]],
    longest: int,
    processors: Sequence[LogitsProcessor],
) -> None:
    wanted = [
        (i, extras, chosen)
        for i, extras in listed
        if (chosen := [processor for processor in processors if processor.applies(extras.params)])
    ]
    if not wanted:
        return
    (where,) = batch.upload([i for i, _, _ in wanted])
    tokens, counts = batch.row_tokens(rows[where], longest), lengths[where].tolist()
    for (i, extras, chosen), own, length in zip(wanted, tokens, counts, strict=True):
        prompt, output = own[: extras.prompt_len], own[extras.prompt_len : length]
        for processor in chosen:
            logits[i] = processor.apply(logits[i], prompt, output, extras.params)
