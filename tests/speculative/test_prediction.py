"""The output that a client expects, as drafts: no prediction changes a token, and a good one saves steps."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, RequestOutput, SamplingParams
from quire.errors import ValidationError
from quire.speculative.prediction import GRAM, MAX_PREDICTED_TOKENS, PredictedText
from tests.conftest import TINY_VOCAB, assert_idle
from tests.speculative.scripted import Tally

LENGTH = 32
SPECULATION = {
    "suffix": {"method": "suffix"},
    "ngram": {"method": "ngram", "tune": False},
    "grammar": {"method": "grammar"},
}
PROMPTS = [[20 + 3 * i for i in range(9)], [90 - 2 * i for i in range(14)], [40, 41, 42, 43, 44]]


# Where an output is in its prediction


def predicted_after(prediction: list[int], output: list[int]) -> PredictedText:
    text = PredictedText(prediction)
    text.read(output)
    return text


def test_a_prediction_is_followed_from_its_beginning() -> None:
    prediction = list(range(50))
    assert predicted_after(prediction, []).run(7) == prediction[:7]
    text = predicted_after(prediction, prediction[:20])
    assert text.run(7) == prediction[20:27] and (text.accepted, text.rejected) == (20, 30)
    text.read(prediction[20:])
    assert text.run(7) == [] and (text.accepted, text.rejected) == (50, 0)


def test_after_a_difference_it_is_found_again_and_trusted_as_far_as_it_agrees() -> None:
    prediction = list(range(100, 150))
    text = predicted_after(prediction, [*prediction[:10], 1, 2])  # something else is inserted
    assert text.run(7) == []
    text.read(prediction[10:12])
    assert text.run(7) == []
    text.read(prediction[12:13])
    assert text.run(7) == prediction[13:16]
    text.read(prediction[13:20])
    assert text.run(7) == prediction[20:27]
    text.read(prediction[30:34])  # something is left out
    assert text.run(2) == prediction[34:36] and text.accepted == 10 + 7 + 1


def test_of_several_places_it_goes_on_at_the_first_that_is_not_behind() -> None:
    line = [1, 2, 3]
    prediction = [*line, 10, *line, 11, *line, 12]
    assert predicted_after(prediction, [*line, 10, 99, *line]).run(1) == [11]
    assert predicted_after(prediction, [*line, 10, *line, 11, *line, 99, *line]).run(1) == [12]


def test_any_run_follows_what_the_output_ends_with() -> None:
    chance = random.Random(5)
    runs = 0
    for _ in range(200):
        prediction = [chance.randrange(4) for _ in range(chance.randrange(30))]
        text, output = PredictedText(prediction), list[int]()
        for _ in range(25):
            goes_on = text.run(1) if chance.random() < 0.7 else []
            new = [*goes_on, *(chance.randrange(4) for _ in range(chance.randrange(3)))]
            text.read(new)
            output += new
            if not (run := text.run(5)):
                continue
            runs += 1
            places = [at for at in range(len(prediction)) if prediction[at : at + len(run)] == run]
            tail = min(GRAM, len(output))
            is_start = output == prediction[: len(output)]
            assert is_start or any(at >= tail and prediction[at - tail : at] == output[-tail:] for at in places)
        assert text.num_read == len(output) and 0 <= text.accepted <= len(output)
    assert runs > 500


def test_a_prediction_is_bounded() -> None:
    assert PredictedText([1] * (MAX_PREDICTED_TOKENS + 5)).rejected == MAX_PREDICTED_TOKENS


# Engines


class Plain:
    """Engines, and what one without drafts yields."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._made: dict[str, LLM] = {}

    def __call__(self, **settings: Any) -> LLM:
        name = repr(settings)
        if name not in self._made:
            usual = {"dtype": "float32", "num_gpu_blocks_override": 128, "device": "cpu", "max_num_seqs": 8}
            self._made[name] = LLM(str(self._model), **(usual | settings))
        return self._made[name]

    def close(self) -> None:
        for llm in self._made.values():
            assert_idle(llm)
            llm.shutdown()


@pytest.fixture(scope="module")
def engines(tiny_model: Path) -> Iterator[Plain]:
    made = Plain(tiny_model)
    yield made
    made.close()


def wanted() -> list[SamplingParams]:
    usual = {"max_tokens": LENGTH, "ignore_eos": True, "detokenize": False}
    return [
        SamplingParams(temperature=0, **usual),
        SamplingParams(temperature=0.9, seed=4, n=2, **usual),
        SamplingParams(temperature=0.8, seed=5, top_p=0.9, repetition_penalty=1.2, min_tokens=9, logprobs=1, **usual),
    ]


def results(outputs: list[RequestOutput]) -> list[Any]:
    return [(list(sample.token_ids), sample.finish_reason) for output in outputs for sample in output.outputs]


def asked(predict: Callable[[int], list[int]]) -> list[Any]:
    return [{"prompt_token_ids": prompt, "prediction": predict(i)} for i, prompt in enumerate(PROMPTS)]


def garbage(number: int) -> list[int]:
    chance = random.Random(number)
    return [chance.randrange(TINY_VOCAB) for _ in range(60)]


TIGHT = {"num_gpu_blocks_override": 26, "block_size": 4, "max_num_batched_tokens": 12}


@pytest.mark.parametrize("method, settings", [
    ("suffix", {"pipeline_depth": 0}),
    ("ngram", {"pipeline_depth": 1}),
    ("grammar", {"pipeline_depth": 1, **TIGHT}),
], ids=["one by one", "overlapped", "preempted"])  # fmt: skip
def test_no_prediction_changes_a_token(engines: Plain, method: str, settings: dict[str, Any]) -> None:
    expected = engines(pipeline_depth=0).generate(asked(lambda _: []), wanted(), use_tqdm=False)
    right = [list(output.outputs[-1].token_ids) for output in expected]
    llm = engines(speculative_config=SPECULATION[method], **settings)
    tally = Tally(llm)
    predictions: list[Callable[[int], list[int]]] = [
        garbage,
        lambda i: right[i - 1],
        lambda i: [*right[i][:15], 7, 7, *right[i][20:]],
        lambda i: right[i],
    ]
    accepted = []
    for predict in predictions:
        before = tally.accepted
        assert results(llm.generate(asked(predict), wanted(), use_tqdm=False)) == results(expected)
        accepted.append(tally.accepted - before)
    if settings["pipeline_depth"] == 0:
        assert accepted[-1] > 2 * LENGTH and accepted[2] > LENGTH
    assert bool(llm.llm_engine.core.scheduler.stats.preemptions) == ("block_size" in settings)


@pytest.mark.parametrize("method", SPECULATION)
def test_a_right_prediction_takes_few_steps(engines: Plain, method: str) -> None:
    params = SamplingParams(temperature=0.9, seed=4, max_tokens=LENGTH + 1, ignore_eos=True, detokenize=False)
    (expected,) = engines(pipeline_depth=0).generate([{"prompt_token_ids": PROMPTS[0]}], params, use_tqdm=False)
    llm = engines(speculative_config=SPECULATION[method], pipeline_depth=0)
    prompt: Any = {"prompt_token_ids": PROMPTS[0], "prediction": list(expected.outputs[0].token_ids)}
    tally = Tally(llm)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert tally.steps == 1 + LENGTH // 8 and tally.verified == tally.accepted == LENGTH - LENGTH // 8


def test_predictions_that_cannot_be_used(engines: Plain) -> None:
    params = SamplingParams(temperature=0, max_tokens=5)
    for prediction in ([TINY_VOCAB + 5], [-1], "", [], "text"):
        prompt: Any = {"prompt": "abc", "prediction": prediction}
        for config in (None, SPECULATION["suffix"]):
            llm = engines(pipeline_depth=0, **({} if config is None else {"speculative_config": config}))
            assert len(llm.generate([prompt], params, use_tqdm=False)) == 1
    llm = engines(speculative_config=SPECULATION["suffix"], pipeline_depth=0)
    with pytest.raises(ValidationError):
        llm.generate([{"prompt": "abc", "prediction": 3}], params, use_tqdm=False)  # type: ignore[list-item]
