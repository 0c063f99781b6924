"""From logits to tokens.

Everything is masked by thresholds and drawn in vocabulary order from one uniform number per row, so that a row's token
depends on its own logits and its own random stream alone: not on the batch, and not on how a sort breaks ties.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from quire.kernels.philox import uniform
from quire.messages.sampling import ACCEPT_STREAM, XTC_STREAM
from quire.worker.batch import DeviceBatch
from quire.worker.extras import RowKind, ScalarColumns
from quire.worker.logits import NEGATIVE_INFINITY, LogitsProcessor, apply_lists, apply_penalties

FILTER_WINDOW = 1024
"""Tokens. Most nuclei are smaller; only rows with a larger one pay for a full sort."""


PENALTY_ROWS = 128
"""Rows whose tokens are counted at a time: counting takes six copies of their logits."""


class SampledTokens:
    """The tokens sampled for a slice of rows."""

    def __init__(self, tokens: torch.Tensor, invalid: torch.Tensor) -> None:
        self.tokens = tokens
        self.invalid = invalid
        """Rows without a single finite logit, or with NaN among them."""


class Sampler:
    """Samples one token for each row of logits."""

    def __init__(self, batch: DeviceBatch, processors: Sequence[LogitsProcessor] = ()) -> None:
        self._batch = batch
        self._processors = processors

    def adjust(
        self, logits: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, host_rows: np.ndarray, longest: int
    ) -> None:
        """Apply lists, processors and penalties to logits [n, vocab], in place. `lengths`: tokens before each draw."""
        kinds = self._batch.kinds[host_rows]
        if (kinds & RowKind.LISTED).any():
            apply_lists(self._batch, logits, rows, lengths, host_rows, longest, self._processors)
        penalised = np.flatnonzero(kinds & RowKind.PENALISED)
        for start in range(0, len(penalised), PENALTY_ROWS):
            where: slice | torch.Tensor = slice(start, start + PENALTY_ROWS)
            if len(penalised) < len(kinds):
                (where,) = self._batch.upload(penalised[where])
            logits[where] = apply_penalties(self._batch, logits[where], rows[where], lengths[where], longest)

    def draw(
        self, logits: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, host_rows: np.ndarray
    ) -> SampledTokens:
        """One token for each of these rows from logits [n, vocab]. `lengths`: tokens before each draw."""
        kinds = self._batch.kinds[host_rows]
        greedy = _argmax(logits)
        invalid = ~torch.isfinite(logits.amax(-1))  # amax propagates NaN
        if not (kinds & RowKind.RANDOM).any():
            return SampledTokens(greedy, invalid)
        (random,) = self._batch.upload(np.flatnonzero(kinds & RowKind.RANDOM))
        greedy[random] = self._draw_random(
            logits[random], rows[random], lengths[random], bool((kinds & RowKind.FILTERED).any())
        )
        return SampledTokens(greedy, invalid)

    def _draw_random(
        self, logits: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, filtered: bool
    ) -> torch.Tensor:
        batch = self._batch
        scalars = batch.scalars_of(rows)
        scaled = logits / scalars["temperature"][:, None]
        if filtered:
            scaled = filter_logits(scaled, scalars)
            if bool((scalars["xtc_probability"] > 0.0).any()):
                exclude_top_choices(scaled, scalars, self._uniform(rows, lengths, XTC_STREAM))
        probs = torch.softmax(scaled, dim=-1)
        if batch.draft_probs is not None:
            return self._accept_by_ratio(probs, rows, lengths, batch.draft_probs)
        return self._draw_from(probs, rows, lengths)

    def _draw_from(self, weights: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """A token for each row, each as likely as its part of the row's weights [n, vocab]."""
        cumulative = weights.cumsum(-1, dtype=torch.float64)
        threshold = self._uniform(rows, lengths) * cumulative[:, -1]
        drawn = torch.searchsorted(cumulative, threshold[:, None], right=True)[:, 0]
        return drawn.clamp(max=weights.shape[-1] - 1)  # only a row of NaN gets here; it is reported as invalid

    def _accept_by_ratio(
        self, probs: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, draft_probs: torch.Tensor
    ) -> torch.Tensor:
        """The draft at each place, with the probability target / draft; otherwise a token that the target has more of
        than the draft (arXiv 2211.17192). Together these are the target's distribution."""
        batch = self._batch
        place = (lengths - batch.num_tokens[rows]).clamp(max=draft_probs.shape[1] - 1)
        has_draft = batch.is_sampled[rows] & (lengths - batch.num_tokens[rows] < batch.num_drafts[rows])
        draft = batch.drafts[rows, place].long()
        others = draft_probs[rows, place]
        share = probs.gather(1, draft[:, None])[:, 0].double() / others.gather(1, draft[:, None])[:, 0].double()
        accepted = has_draft & (self._uniform(rows, lengths, ACCEPT_STREAM) < share)
        left = (probs - others).clamp(min=0.0)
        # Nothing is left where both are the same but for rounding, or the draft's probabilities are not numbers.
        left = torch.where((has_draft & (left.sum(-1) > 0.0))[:, None], left, probs)
        return torch.where(accepted, draft, self._draw_from(left, rows, lengths))

    def _uniform(self, rows: torch.Tensor, lengths: torch.Tensor, stream: int = 0) -> torch.Tensor:
        """A number in [0, 1) for the token of each row behind `lengths`; `stream`: 0 for the token itself."""
        batch = self._batch
        index = lengths - batch.prompt_len[rows]
        seed, sequence = batch.seed[rows], batch.sequence[rows] + stream
        if seed.device.type == "cpu":  # numpy's small-array overhead is a fifth of torch's
            return torch.from_numpy(uniform(seed.numpy(), index.numpy(), sequence.numpy()))
        return uniform(seed, index, sequence).to(torch.float64)


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    """The best token of each row, the first of equals."""
    if logits.device.type == "cpu":  # numpy's is vectorised: a tenth of torch's time
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.argmax(-1)


def filter_logits(logits: torch.Tensor, scalars: ScalarColumns) -> torch.Tensor:
    """Mask what top-n-sigma, min-p, top-k, then top-p among the rest exclude; ties with the last one kept stay in.

    logits [n, vocab] are divided by the temperature already.
    """
    best = logits.amax(-1)
    floor = best + scalars["min_p"].log()  # log 0 is -inf: off
    num_sigmas = scalars["top_n_sigma"]
    if bool((num_sigmas > 0.0).any()):
        lowest = best - num_sigmas * _deviation(logits)
        floor = torch.where(num_sigmas > 0.0, torch.maximum(floor, lowest), floor)
    logits = logits.masked_fill(logits < floor[:, None], NEGATIVE_INFINITY)
    top_k, top_p = scalars["top_k"], scalars["top_p"]
    top_k = torch.where(top_k > 0, top_k, logits.shape[-1])
    window = min(FILTER_WINDOW, logits.shape[-1])
    threshold, undecided = _threshold(logits, logits.topk(window).values, top_k, top_p)
    if bool(undecided.any()):
        wide = undecided.nonzero()[:, 0]
        ordered = logits[wide].sort(descending=True).values
        threshold[wide], _ = _threshold(logits[wide], ordered, top_k[wide], top_p[wide])
    return logits.masked_fill(logits < threshold[:, None], NEGATIVE_INFINITY)


def _deviation(logits: torch.Tensor) -> torch.Tensor:
    """The standard deviation of each row's finite logits."""
    finite = logits > NEGATIVE_INFINITY
    count = finite.sum(-1)
    mean = torch.where(finite, logits, 0.0).sum(-1, dtype=torch.float64) / count
    squares = torch.where(finite, logits - mean[:, None], 0.0) ** 2
    return (squares.sum(-1, dtype=torch.float64) / count).sqrt().to(logits.dtype)


def exclude_top_choices(logits: torch.Tensor, scalars: ScalarColumns, numbers: torch.Tensor) -> None:
    """XTC, in place: mask every token with a probability of at least `xtc_threshold`, except the least likely of them
    and its ties, in rows whose number is below `xtc_probability`.

    logits [n, vocab]: as the other filters left them; probabilities are those of what is left.
    """
    chosen = (numbers < scalars["xtc_probability"]).nonzero()[:, 0]
    if not len(chosen):
        return
    left = logits[chosen]
    is_top = (torch.softmax(left, dim=-1) >= scalars["xtc_threshold"][chosen, None]) & (left > NEGATIVE_INFINITY)
    ceiling = left.masked_fill(~is_top, float("inf")).amin(-1)
    logits[chosen] = left.masked_fill(left > ceiling[:, None], NEGATIVE_INFINITY)


def _threshold(
    logits: torch.Tensor, ordered: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The lowest logit kept in each row, given its best ones in order; and where those do not reach far enough."""
    width, vocab = ordered.shape[-1], logits.shape[-1]
    best = ordered[:, :1]
    in_k = torch.arange(width, device=logits.device) < top_k[:, None]
    weights = torch.where(in_k, (ordered - best).exp(), 0.0)
    # The mass that top-p is a share of: what top-k left, which without top-k is the whole vocabulary's.
    mass = torch.where(top_k >= vocab, (logits - best).exp().sum(-1), weights.sum(-1)) * top_p
    through = weights.cumsum(-1, dtype=torch.float64)
    in_p = (through - weights < mass[:, None]) | (top_p >= 1.0)[:, None]
    last = (in_k & in_p).sum(-1) - 1
    threshold = ordered.gather(1, last.clamp(min=0)[:, None])[:, 0]
    threshold = torch.where((top_k >= vocab) & (top_p >= 1.0), NEGATIVE_INFINITY, threshold)
    cut_off = (top_k < vocab) | ((top_p < 1.0) & (through[:, -1] < mass))
    return threshold, (top_k > width) & cut_off
