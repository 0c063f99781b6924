"""What a row needs beyond scalar parameters: lists, masks, reports. Most rows need none of it."""

from __future__ import annotations

import enum

import numpy as np
import torch

from quire.messages.plan import NewRow


class RowKind(enum.IntFlag):
    """What sampling a row takes, so that a step does only the work its rows ask for."""

    GREEDY = 0
    RANDOM = 1
    FILTERED = 2
    """top-k, top-p or min-p."""
    PENALISED = 4
    LISTED = 8
    """Logit bias, allowed ids, bad words, min_tokens or a custom processor."""
    LOGPROBS = 16
    """Reports how likely what it draws is."""
    PROMPT_LOGPROBS = 32
    GUIDED = 64
    """Draws under a mask that the host supplies while the step runs."""
    LAST = 256
    MEAN = 512
    POOLED = LAST | MEAN
    """Draws nothing: its hidden states become a vector."""
    SPECIAL = PENALISED | LISTED
    """What changes logits before a draw."""

    @staticmethod
    def of(new: NewRow) -> RowKind:
        """The kind of a new row."""
        p = new.params
        kind = RowKind.GREEDY if p.is_greedy else RowKind.RANDOM
        if p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0:
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
            kind |= RowKind.GUIDED
        if new.pooling is not None:
            kind |= RowKind.MEAN if new.pooling == "mean" else RowKind.LAST
        return kind


class RowExtras:
    """Parameters of a row that are lists; an empty one asks for nothing."""

    def __init__(self, new: NewRow, device: torch.device) -> None:
        p = new.params
        self.params = p
        self.prompt_len = new.prompt_len
        self.bias_ids = np.array([*(p.logit_bias or ())], np.int64)
        self.bias = np.array([*(p.logit_bias or {}).values()], np.float64)
        self.allowed = np.array(p.allowed_token_ids or (), np.int64)
        # Masks know when their row may end.
        held_back = p.min_tokens and p.structured_outputs is None
        self.stop_ids = np.array(new.stop_ids if held_back else (), np.int64)
        self.bad_words = [torch.tensor(word).to(device, non_blocking=True) for word in new.bad_words]
        self.num_seen = new.num_computed
        """Tokens of the chunks so far (prompt logprobs)."""
        self.last_hidden: torch.Tensor | None = None
        """Of the chunk before: it predicts the first token of the next one (prompt logprobs)."""
        self.total: torch.Tensor | None = None
        """Hidden states of the chunks so far, added up (pooling by their mean)."""
