"""Converts a beam search's hypotheses to the caller's outputs."""

from __future__ import annotations

from quire.messages.beams import BeamSearchParams, Hypothesis
from quire.messages.outputs import BeamSearchOutput, BeamSearchSequence, CompletionOutput, Logprob, RequestOutput
from quire.messages.request import NewRequest
from quire.output.detokenizer import Vocabulary


def sequence_of(
    found: Hypothesis, request: NewRequest, search: BeamSearchParams, vocabulary: Vocabulary | None
) -> BeamSearchSequence:
    """The sequence with its prompt, without the token that ended it unless `include_stop_str_in_output`."""
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


def as_request_output(
    output: BeamSearchOutput, vocabulary: Vocabulary | None, skip_special: bool = True
) -> RequestOutput:
    """A search's sequences as those of a request, best first; the text of each is the generated part alone."""
    prompt = output.prompt_token_ids
    outputs = []
    for index, found in enumerate(output.sequences):
        tokens = found.tokens[len(prompt) :]
        text = ""
        if vocabulary is not None:
            reader = vocabulary.detokenizer(prompt, skip_special)
            text = reader.push(tokens) + reader.flush()
        outputs.append(
            CompletionOutput(
                index=index,
                text=text,
                token_ids=tokens,
                cumulative_logprob=found.cum_logprob,
                logprobs=found.logprobs,
                finish_reason=found.finish_reason,
                stop_reason=found.stop_reason,
            )
        )
    return RequestOutput(
        request_id=output.request_id,
        prompt=None,
        prompt_token_ids=prompt,
        outputs=outputs,
        finished=output.finished,
        metrics=output.metrics,
        num_cached_tokens=output.num_cached_tokens,
        error=output.error,
    )
