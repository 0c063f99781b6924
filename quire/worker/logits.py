"""Changes to logits that only some rows ask for: penalties, lists, and the user's own processors."""

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
    """A user's own change to logits, named by dotted path in `logits_processors`.

    Parameters reach it through `SamplingParams.extra_args`; it is called only for requests that have some.
    """

    def applies(self, params: SamplingParams) -> bool:
        """Whether a request with these parameters wants this processor."""
        ...

    def apply(
        self, logits: torch.Tensor, prompt: torch.Tensor, output: torch.Tensor, params: SamplingParams
    ) -> torch.Tensor:
        """The new logits [vocab] of a row, given its tokens so far."""
        ...


def load_processors(paths: Sequence[str | type]) -> list[LogitsProcessor]:
    """Processors by dotted path (or given as classes)."""
    return [(resolve("logits processor", path, {}) if isinstance(path, str) else path)() for path in paths]


def apply_penalties(batch: DeviceBatch, logits: torch.Tensor, rows: torch.Tensor, longest: int) -> torch.Tensor:
    """Repetition over prompt and output; presence and frequency over the output alone."""
    tokens = batch.row_tokens(rows, longest).clamp_(0, logits.shape[-1] - 1)
    position = torch.arange(tokens.shape[1], device=tokens.device)
    exists = position < batch.num_tokens[rows, None]
    is_output = exists & (position >= batch.prompt_len[rows, None])
    seen = torch.zeros_like(logits).scatter_add_(1, tokens, exists.to(logits.dtype)) > 0
    count = torch.zeros_like(logits).scatter_add_(1, tokens, is_output.to(logits.dtype))
    repetition = batch.repetition[rows, None]
    logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    return logits - batch.frequency[rows, None] * count - batch.presence[rows, None] * (count > 0)


def apply_lists(
    batch: DeviceBatch,
    logits: torch.Tensor,
    rows: torch.Tensor,
    host_rows: np.ndarray,
    longest: int,
    processors: Sequence[LogitsProcessor],
) -> None:
    """In place: fixed lists of all rows at once, and what depends on a row's tokens row by row."""
    listed = [(i, batch.extras[row]) for i, row in enumerate(host_rows.tolist()) if batch.kinds[row] & RowKind.LISTED]
    _keep_allowed(batch, logits, [(i, extras.allowed) for i, extras in listed if len(extras.allowed)])
    _hold_stops_back(batch, logits, rows, [(i, extras) for i, extras in listed if len(extras.stop_ids)])
    _add_biases(batch, logits, [(i, extras) for i, extras in listed if len(extras.bias)])
    for i, extras in listed:
        if extras.bad_words or processors:
            row = rows[i : i + 1]  # a number instead, as an index, would be read by the host: it would wait
            tokens = batch.row_tokens(row, longest)[0]
            _ban_bad_words(batch, logits[i], row, tokens, extras)
            _apply_processors(batch, logits[i], int(host_rows[i]), tokens, extras, processors)


Lists = list[tuple[int, np.ndarray]]
"""Token ids of some rows of logits, by the row's number."""


def _places(lists: Lists) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of rows, and the tokens, of all pairs."""
    counts = [len(ids) for _, ids in lists]
    return np.repeat([i for i, _ in lists], counts), np.concatenate([ids for _, ids in lists])


def _keep_allowed(batch: DeviceBatch, logits: torch.Tensor, lists: Lists) -> None:
    if lists:
        where, ids, ruled = batch.upload(*_places(lists), [i for i, _ in lists])
        allowed = logits[where, ids]
        logits[ruled] = NEGATIVE_INFINITY
        logits[where, ids] = allowed


def _hold_stops_back(
    batch: DeviceBatch, logits: torch.Tensor, rows: torch.Tensor, listed: list[tuple[int, RowExtras]]
) -> None:
    """Nothing that ends a row is drawn before its `min_tokens`."""
    if listed:
        least = [extras.params.min_tokens for _, extras in listed]
        counts = [len(extras.stop_ids) for _, extras in listed]
        where, ids, limits = batch.upload(
            *_places([(i, extras.stop_ids) for i, extras in listed]), np.repeat(least, counts)
        )
        too_early = (batch.num_tokens[rows] - batch.prompt_len[rows])[where] < limits
        logits[where, ids] = torch.where(too_early, NEGATIVE_INFINITY, logits[where, ids])


def _add_biases(batch: DeviceBatch, logits: torch.Tensor, listed: list[tuple[int, RowExtras]]) -> None:
    if listed:
        biases = np.concatenate([extras.bias for _, extras in listed])
        where, ids, bits = batch.upload(*_places([(i, extras.bias_ids) for i, extras in listed]), biases.view(np.int64))
        logits[where, ids] += bits.view(torch.float64).to(logits.dtype)


def _ban_bad_words(
    batch: DeviceBatch, logits: torch.Tensor, row: torch.Tensor, tokens: torch.Tensor, extras: RowExtras
) -> None:
    """The last token of a bad word is banned where the output ends in the rest of it."""
    length, output_len = batch.num_tokens[row], batch.num_tokens[row] - batch.prompt_len[row]
    for word in extras.bad_words:
        begun = word[:-1]
        if len(begun) > len(tokens):
            continue
        tail = tokens[(length - len(begun) + torch.arange(len(begun), device=tokens.device)).clamp(min=0)]
        matches = (tail == begun).all() & (output_len >= len(begun))
        last = word[-1:]
        logits[last] = torch.where(matches, NEGATIVE_INFINITY, logits[last])


def _apply_processors(
    batch: DeviceBatch,
    logits: torch.Tensor,
    row: int,
    tokens: torch.Tensor,
    extras: RowExtras,
    processors: Sequence[LogitsProcessor],
) -> None:
    wanted = [processor for processor in processors if processor.applies(extras.params)]
    if wanted:
        length = int(batch.num_tokens[row])
        prompt, output = tokens[: extras.prompt_len], tokens[extras.prompt_len : length]
        for processor in wanted:
            logits.copy_(processor.apply(logits, prompt, output, extras.params))
