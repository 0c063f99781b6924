"""The cost of a token does not depend on the length of the output."""

from __future__ import annotations

import dataclasses
import time

import pytest

from quire.messages.outputs import Finished, RequestOutput, Started, StepOutputs
from quire.messages.request import NewRequest
from quire.messages.sampling import RequestOutputKind, SamplingParams
from quire.output.detokenizer import Vocabulary
from quire.output.processor import OutputProcessor
from tests.conftest import tiny_tokenizer

STEPS = 20_000
WORD = 110
"""A token of several characters."""


@pytest.mark.parametrize("stop", [None, ["never said"]], ids=["plain", "stop string"])
def test_the_cost_of_a_token_does_not_grow_with_the_text(stop: list[str] | None) -> None:
    processor = OutputProcessor(Vocabulary(tiny_tokenizer()))
    params = SamplingParams(output_kind=RequestOutputKind.DELTA, stop=stop, max_tokens=None)
    processor.add(NewRequest("a", [5], params, limit=10**6), None)
    step = StepOutputs(keys=[("a", 0)], tokens=[WORD] * 8, counts=[8])
    times = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        ((view,), _) = processor.process(step)
        times.append(time.perf_counter() - begin)
        assert len(view.outputs[0].token_ids) == 8  # type: ignore[union-attr]
    early, late = sorted(times[:2000])[1000], sorted(times[-2000:])[1000]
    assert late < 3 * early, (early, late)
    assert len(view.outputs[0].text) > 8  # type: ignore[union-attr]


def test_a_request_that_goes_on_at_another_engine_has_its_tokens_and_its_first_times() -> None:
    processor = OutputProcessor(Vocabulary(tiny_tokenizer()))
    params = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, max_tokens=3, n=2)
    request = NewRequest("a", [5], params, limit=4)
    processor.add(request, "x")
    assert processor.continued("a") is request
    end = Finished(("a", 1), "stop")
    started = Started(("a", 0), 7.0, 16)
    processor.process(StepOutputs(keys=[("a", 0), ("a", 1)], tokens=[WORD, WORD], finished=[end], started=[started]))
    metrics = dataclasses.replace(processor.tracked("a").metrics)
    assert processor.continued("a").drawn == [[WORD], None] and not request.drawn
    end, started = Finished(("a", 0), "length"), Started(("a", 0), 9.0, 0)
    ((view,), _) = processor.process(StepOutputs(keys=[("a", 0)], tokens=[WORD + 1], finished=[end], started=[started]))
    assert isinstance(view, RequestOutput) and view.metrics is not None
    assert [one.token_ids for one in view.outputs] == [[WORD, WORD + 1], [WORD]]
    assert view.num_cached_tokens == 16 and view.metrics.scheduled_ts == 7.0 and view.prompt == "x"
    assert view.metrics.queued_ts == metrics.queued_ts and view.metrics.first_token_ts == metrics.first_token_ts
