"""From what a beam search found to what its caller sees."""

from __future__ import annotations

from quire.messages.beams import BeamSearchParams, Hypothesis
from quire.messages.outputs import BeamSearchSequence, Logprob
from quire.messages.request import NewRequest
from quire.output.detokenizer import Vocabulary


def sequence_of(
    found: Hypothesis, request: NewRequest, search: BeamSearchParams, vocabulary: Vocabulary | None
) -> BeamSearchSequence:
    """The sequence with its prompt; the token that ended it is left out unless asked for."""
    keeps_end = found.reason != "stop" or search.include_stop_str_in_output
    shown = len(found.tokens) if keeps_end else len(found.tokens) - 1
    tokens = [*request.prompt, *found.tokens[:shown]]
    names = [None if vocabulary is None else vocabulary.text_of(token) for token in found.tokens[:shown]]
    reports = zip(found.tokens, found.logprobs, found.ranks, names, strict=False)
    return BeamSearchSequence(
        tokens=tokens,
        logprobs=[{token: Logprob(value, rank, name)} for token, value, rank, name in reports],
        cum_logprob=found.total,
        score=found.score,
        text=None if vocabulary is None else vocabulary.tokenizer.decode(tokens),
        finish_reason=found.reason,
        stop_reason=found.stop_reason,
    )
