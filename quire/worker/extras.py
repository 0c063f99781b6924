"""Sampling parameters of rows: scalars as packed columns, and lists, which few rows have."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

import numpy as np
import torch

from quire.messages.plan import NewRow
from quire.messages.sampling import COLUMN, SCALARS, SamplingParams, scalar_values

_NOTHING = torch.empty(0)


class RowKind(enum.IntFlag):
    """The sampling work of a row, so that a step does only what its rows need."""

    GREEDY = 0
    RANDOM = 1
    FILTERED = 2
    """A scalar restricts which tokens may be sampled (top-k, top-p, min-p, ...)."""
    PENALISED = 4
    LISTED = 8
    """Logit bias, allowed ids, bad words, min_tokens or a custom processor."""
    LOGPROBS = 16
    """Reports log-probabilities of its tokens."""
    PROMPT_LOGPROBS = 32
    STRUCTURED = 64
    """Samples under a grammar's mask, which the host supplies while the step runs."""
    LAST = 256
    MEAN = 512
    POOLED = LAST | MEAN
    """Samples nothing: its hidden states become a vector."""
    SPECIAL = PENALISED | LISTED
    """Changes logits before sampling."""

    @staticmethod
    def of(new: NewRow) -> RowKind:
        """The kind of a new row."""
        p = new.params
        kind = RowKind.GREEDY if p.is_greedy else RowKind.RANDOM
        if p.has_filters:
            kind |= RowKind.FILTERED
        if p.has_penalties:
            kind |= RowKind.PENALISED
        if p.logit_bias or p.allowed_token_ids or new.bad_words or p.min_tokens or p.extra_args:
            kind |= RowKind.LISTED
        if p.logprobs is not None:
            kind |= RowKind.LOGPROBS
        if p.prompt_logprobs is not None:
            kind |= RowKind.PROMPT_LOGPROBS
        if p.structured_outputs is not None:
            kind |= RowKind.STRUCTURED
        if new.pooling is not None:
            kind |= RowKind.MEAN if new.pooling == "mean" else RowKind.LAST
        return kind


_INT_COLUMNS = [column for column, scalar in enumerate(SCALARS) if scalar.kind is int]
_INT32_MAX = 2**31 - 1


def pack_scalars(params: Sequence[SamplingParams]) -> np.ndarray:
    """Scalar parameters as int32 [len(params), len(SCALARS)]: rows of `DeviceBatch.scalars`, floats by their bits."""
    packed = np.empty((len(params), len(SCALARS)), np.int32)
    floats = packed.view(np.float32)
    for i, p in enumerate(params):
        values = scalar_values(p)
        floats[i] = values
        for column in _INT_COLUMNS:
            packed[i, column] = min(values[column], _INT32_MAX)
    return packed


class ScalarColumns:
    """Scalar parameters of some rows, by name: `columns["top_p"]` is [rows] float32 (int32 for integers)."""

    def __init__(self, packed: torch.Tensor) -> None:
        self._ints = packed
        self._floats = packed.view(torch.float32)

    def __getitem__(self, name: str) -> torch.Tensor:
        column = COLUMN[name]
        return (self._ints if column in _INT_COLUMNS else self._floats)[:, column]


class RowExtras:
    """Parameters of a row that are lists; empty ones have no effect."""

    def __init__(self, new: NewRow, upload: Callable[..., list[torch.Tensor]]) -> None:
        p = new.params
        self.params = p
        self.prompt_len = new.prompt_len
        self.allowed = self.bias_ids = self.bias = _NOTHING
        if p.allowed_token_ids or p.logit_bias:  # may be long: kept on the device
            bias = p.logit_bias or {}
            values = np.array([*bias.values()], np.float64).view(np.int64)
            self.allowed, self.bias_ids, bits = upload(p.allowed_token_ids or [], [*bias], values)
            self.bias = bits.view(torch.float64)
        # Grammar masks allow the end only where the form is complete.
        held_back = p.min_tokens and p.structured_outputs is None
        self.stop_ids = np.array(new.stop_ids if held_back else (), np.int64)
        # Bad words: the last token of each, and the tokens before it, concatenated.
        self.bad_lasts = np.array([word[-1] for word in new.bad_words], np.int64)
        self.bad_begun = np.array([token for word in new.bad_words for token in word[:-1]], np.int64)
        self.bad_begun_counts = np.array([len(word) - 1 for word in new.bad_words], np.int64)
        self.num_seen = new.num_computed
        """Tokens in the chunks so far (prompt logprobs)."""
        self.last_hidden: torch.Tensor | None = None
        """Of the previous chunk: it predicts the first token of the next one (prompt logprobs)."""
        self.total: torch.Tensor | None = None
        """Sum of the hidden states of the chunks so far (mean pooling)."""
