"""Logprobs of sampled and prompt tokens: computed on the device for many rows at a time, read once the step is done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch

from quire.messages.plan import StepPlan, TokenLogprobs
from quire.worker.batch import DeviceBatch, StepInputs
from quire.worker.extras import RowKind

LOGIT_ROWS = 512
"""Logits exist for at most this many rows at a time: a row of a large vocabulary is half a megabyte."""
LOGPROB_ROWS = 256
"""Logprobs, which take more memory per row, for at most this many."""
COPIED_AT_ONCE = 1024
"""Up to this many logprobs per row stay on the device until all can be copied at once; whole vocabularies would fill
it."""
_NOT_REQUESTED = -2


class PendingLogprobs:
    """For each row of logits [n, vocab] its token's logprob, then the highest ones; being copied to the host."""

    def __init__(self, parts: Iterable[tuple[torch.Tensor, torch.Tensor]], count: int) -> None:
        """`parts`: logits, and a token a row. `count` -1: the whole vocabulary. Does not wait for the device."""
        packed: Iterable[torch.Tensor] = (
            _pack(some, owns, count)
            for logits, tokens in parts
            for some, owns in zip(logits.split(LOGPROB_ROWS), tokens.split(LOGPROB_ROWS), strict=True)
        )
        if 0 <= count <= COPIED_AT_ONCE and (whole := list(packed)):
            packed = [torch.cat(whole)]
        # Into pinned memory, from a GPU.
        self._packed = [part.to("cpu", non_blocking=True) for part in packed]

    def take(self) -> list[TokenLogprobs]:
        """One entry per row. The step must be done."""
        return [entry for part in self._packed for entry in _unpack(part.numpy())]


class PendingTokenLogprobs:
    """For each row of logits its token's logprob, then those of the tokens that `ids` names, with their ranks."""

    def __init__(self, logits: torch.Tensor, tokens: torch.Tensor, ids: torch.Tensor) -> None:
        logprobs = logits.float().log_softmax(-1)
        wanted = torch.cat([tokens[:, None], ids.expand(len(tokens), -1)], dim=1)
        values = logprobs.gather(1, wanted)
        # One id at a time: [rows, ids, vocabulary] at once would be large.
        ranks = torch.stack([(logprobs > value).sum(-1) + 1 for value in values.unsqueeze(-1).unbind(1)], dim=1)
        self._wanted, self._values, self._ranks = (
            part.to("cpu", non_blocking=True) for part in (wanted.to(torch.int32), values, ranks.to(torch.int32))
        )

    def take(self) -> list[TokenLogprobs]:
        """One entry per row. The step must be done."""
        columns = (part.tolist() for part in (self._wanted, self._values, self._ranks))
        return [TokenLogprobs(ids, values, ranks[0], ranks[1:]) for ids, values, ranks in zip(*columns, strict=True)]


AnyPending = PendingLogprobs | PendingTokenLogprobs


def sampled_logprobs(
    batch: DeviceBatch, logits: torch.Tensor, rows: torch.Tensor, host_rows: np.ndarray, start: int
) -> list[tuple[list[int], AnyPending]]:
    """Logprobs of the tokens these rows drew, from logits no parameter has changed, for the rows that request them.

    Returns (places, their logprobs) pairs; `start` is the first of these places among all of the step.
    """
    counts = np.full(len(host_rows), _NOT_REQUESTED)
    by_ids: dict[tuple[int, ...], list[int]] = {}
    for index in np.flatnonzero(batch.kinds[host_rows] & RowKind.LOGPROBS).tolist():
        params = batch.extras[int(host_rows[index])].params
        if params.logprob_token_ids:
            by_ids.setdefault(tuple(params.logprob_token_ids), []).append(index)
        else:
            counts[index] = params.logprobs or 0
    tokens = batch.drawn_at(rows.long(), start)
    found: list[tuple[list[int], AnyPending]] = []
    for ids, indices in by_ids.items():
        chosen, uploaded = batch.upload(indices, ids)
        pending_ids = PendingTokenLogprobs(logits[chosen], tokens[chosen], uploaded)
        found.append(([index + start for index in indices], pending_ids))
    for count in np.unique(counts[counts != _NOT_REQUESTED]).tolist():
        wanted = np.flatnonzero(counts == count)
        if len(wanted) < len(counts):
            (chosen,) = batch.upload(wanted)
            pending = PendingLogprobs([(logits[chosen], tokens[chosen])], count)
        else:
            pending = PendingLogprobs([(logits, tokens)], count)
        found.append(((wanted + start).tolist(), pending))
    return found


def prompt_logprobs(
    plan: StepPlan,
    batch: DeviceBatch,
    inputs: StepInputs,
    hidden: torch.Tensor,
    logits: Callable[[torch.Tensor, np.ndarray], torch.Tensor],
) -> dict[int, tuple[int, PendingLogprobs]]:
    """Logprobs of this step's prompt tokens, for the rows that request them. `logits`: of hidden states and their rows.

    Returns, by index into the plan's rows, the first token's position and the logprobs. A chunk's first token is
    predicted by the last hidden state of the previous chunk, which is kept with the row.
    """
    results: dict[int, tuple[int, PendingLogprobs]] = {}
    kinds = batch.kinds[plan.rows]
    ends = np.cumsum(plan.counts)
    for i in np.flatnonzero(kinds & RowKind.PROMPT_LOGPROBS).tolist():
        if i < plan.num_decodes:
            continue
        begin, end = int(ends[i] - plan.counts[i]), int(ends[i])
        extras = batch.extras[int(plan.rows[i])]
        start, extras.num_seen = extras.num_seen, extras.num_seen + end - begin
        predictors, tokens = hidden[begin : end - 1], inputs.tokens[begin + 1 : end]
        if start > 0 and extras.last_hidden is not None:
            predictors, tokens = torch.cat([extras.last_hidden, predictors]), inputs.tokens[begin:end]
        else:
            start += 1
        extras.last_hidden = hidden[end - 1 : end].clone()
        inside = max(0, extras.prompt_len - start)  # a preempted row recomputes its output too
        predictors, tokens = predictors[:inside], tokens[:inside]
        parts = (slice(at, at + LOGIT_ROWS) for at in range(0, len(tokens), LOGIT_ROWS))
        owners = np.full(len(tokens), plan.rows[i])
        scores = ((logits(predictors[part], owners[part]), tokens[part]) for part in parts)
        results[i] = start, PendingLogprobs(scores, extras.params.prompt_logprobs or 0)
    return results


def _pack(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> torch.Tensor:
    """[n, 2 * (1 + count) + 1] int32: ids, the bits of the logprobs, and the token's rank."""
    logprobs = logits.float().log_softmax(-1)
    own = logprobs.gather(1, tokens[:, None])
    rank = (logprobs > own).sum(-1, keepdim=True) + 1
    vocab = logits.shape[-1]
    best = logprobs.topk(vocab if count < 0 else min(count, vocab))
    ids, values = torch.cat([tokens[:, None], best.indices], dim=1), torch.cat([own, best.values], dim=1)
    return torch.cat([ids.to(torch.int32), values.view(torch.int32), rank.to(torch.int32)], dim=1)


def _unpack(packed: np.ndarray) -> Iterator[TokenLogprobs]:
    width = packed.shape[1] // 2
    ids, values = packed[:, :width], np.ascontiguousarray(packed[:, width:-1]).view(np.float32)
    columns = ids.tolist(), values.tolist(), packed[:, -1].tolist()
    return (TokenLogprobs(*entry) for entry in zip(*columns, strict=True))
