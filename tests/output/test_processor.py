"""The cost of a token does not depend on the length of the output."""

from __future__ import annotations

import time

import pytest

from quire.messages.outputs import Finished, StepOutputs
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


def test_a_restarted_request_keeps_its_arrival_time_and_has_no_output_yet() -> None:
    processor = OutputProcessor(Vocabulary(tiny_tokenizer()))
    params = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, max_tokens=3)
    processor.add(NewRequest("a", [5], params, limit=4), "x")
    arrived = processor.tracked("a").metrics.queued_ts
    processor.process(StepOutputs(keys=[("a", 0)], tokens=[WORD]))
    processor.begin_again("a")
    assert processor.tracked("a").metrics.queued_ts == arrived and processor.tracked("a").prompt == "x"
    end = Finished(("a", 0), "length")
    ((view,), _) = processor.process(StepOutputs(keys=[("a", 0)], tokens=[WORD + 1], finished=[end]))
    assert view.outputs[0].token_ids == [WORD + 1]  # type: ignore[union-attr]
