"""Beam searches: what their rows are asked for."""

from __future__ import annotations

from quire.messages.beams import BeamSearchParams
from quire.messages.request import NewRequest
from quire.messages.sampling import RequestOutputKind, SamplingParams
from quire.scheduler.beam_search import num_candidates


def row_params(search: BeamSearchParams) -> SamplingParams:
    """A request with the search's bounds, to be checked like any other."""
    return SamplingParams(
        temperature=0,
        max_tokens=search.max_tokens,
        ignore_eos=search.ignore_eos,
        stop_token_ids=search.stop_token_ids,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def as_search(request: NewRequest, search: BeamSearchParams, vocab_size: int) -> NewRequest:
    """The request becomes a beam search: its rows report the likeliest tokens, and none of them ends by itself."""
    request.beams = search
    request.params.logprobs = min(num_candidates(search, len(request.stop_ids)), vocab_size)
    request.params.ignore_eos, request.params.stop_token_ids = True, None
    return request
