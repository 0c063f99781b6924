"""Structured output with drafts: masks along the drafts, drafts that are certain, and the tokens without drafts."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from quire import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from quire.engine.grammar import grammars as module
from quire.engine.grammar.drafts import PlanDrafts
from quire.engine.grammar.free_part import FreePart
from quire.engine.grammar.wire import ForkServerSpec
from quire.engine.grammar.xgrammar_backend import MOST_CERTAIN, GrammarSequence, GrammarVocabulary, compile_form
from quire.errors import StepError
from quire.messages.plan import MAX_WIDTH, Drafts, NewRow, StepPlan
from quire.messages.request import NewRequest, Request
from tests.conftest import TINY_VOCAB, assert_idle, tiny_tokenizer
from tests.engine.fork_server import SharedForkServer
from tests.engine.test_grammar import CONSTRAINTS, PROMPT, params
from tests.speculative.scripted import SCRIPTED, Scripted, Tally

Constraint = StructuredOutputsParams
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "mood": {"enum": ["glad", "sad"]}},
    "required": ["name", "mood"],
}
ENDS = [1, 3]
WORDS = -(-TINY_VOCAB // 32)
TIGHT = {"num_gpu_blocks_override": 40, "block_size": 4, "max_num_batched_tokens": 12}


@pytest.fixture(scope="module")
def vocabulary() -> GrammarVocabulary:
    spec = ForkServerSpec(None, {}, False, None, TINY_VOCAB, ENDS, 4, 1 << 30, MAX_WIDTH)
    return GrammarVocabulary(spec, tiny_tokenizer())


class Matched:
    """A sequence, its tokens, and masks made from the start by another sequence: the reference."""

    def __init__(self, vocabulary: GrammarVocabulary, form: Constraint, min_tokens: int = 0, stops: Any = ()) -> None:
        grammar = compile_form(vocabulary.compiler, form)
        free = FreePart(form, vocabulary.bytes)
        self._make = lambda: GrammarSequence(grammar, ENDS, [*ENDS, *stops], min_tokens, free, vocabulary.bytes)
        self.sequence = self._make()
        self.tokens: list[int] = []
        self.lasts = {*ENDS, *stops}

    def accept(self, token: int) -> None:
        self.sequence.accept(token)
        self.tokens.append(token)

    def mask_after(self, drafts: list[int]) -> NDArray[np.int32]:
        other = self._make()
        for token in [*self.tokens, *drafts]:
            other.accept(token)
        mask = np.empty(WORDS, np.int32)
        other.fill(mask)
        return mask

    def allowed_after(self, drafts: list[int]) -> list[int]:
        bits = np.unpackbits(self.mask_after(drafts).view(np.uint8), bitorder="little")
        return np.flatnonzero(bits).tolist()


FORMS = {
    "json": (Constraint(json=PERSON), 0, ()),
    "one line": (Constraint(json=PERSON, disable_any_whitespace=True), 0, ()),
    "regex": (Constraint(regex=r"\(\d{3}\) [a-z]*(the)+!"), 0, ()),
    "ended by a stop id": (Constraint(regex=r"[a-z]+@[a-z]+"), 0, (35,)),
    "min_tokens": (Constraint(regex="[ab]*"), 6, ()),
    "after a text": (Constraint(choice=["yes", "no"], after="the"), 3, ()),
    "after a text, if one begins it": (
        Constraint(choice=["yes", "the <b> is"], after="!", opening=["the ", " a"]),
        0,
        (),
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_masks_along_drafts_are_those_of_the_drawn_tokens(vocabulary: GrammarVocabulary, name: str) -> None:
    """Random walks with drafts that are partly right: each mask is what a sequence with these tokens has, and the
    sequence itself has not moved."""
    chance = random.Random(name)
    form, min_tokens, stops = FORMS[name]
    lengths = set()
    for _ in range(4):
        matched = Matched(vocabulary, form, min_tokens, stops)
        while len(matched.tokens) < 24:
            drafts: list[int] = []
            count = chance.randrange(MAX_WIDTH)
            while len(drafts) < count and matched.lasts.isdisjoint(drafts):
                allowed = matched.allowed_after(drafts)
                usual = [token for token in allowed if chance.random() < 0.2 or token not in matched.lasts] or allowed
                found = [token for token in usual if vocabulary.bytes[token] == b"the" and chance.random() < 0.2]
                drafts.append(chance.choice(found or usual))
            wrong = chance.randrange(MAX_WIDTH) if chance.random() < 0.5 else count
            if wrong < len(drafts):
                refused = [t for t in (-1, 0, *range(TINY_VOCAB)) if t not in matched.allowed_after(drafts[:wrong])]
                drafts[wrong] = chance.choice(refused)
            ends = next((i for i, token in enumerate(drafts) if token in matched.lasts), len(drafts))
            right = min(wrong, ends, len(drafts))
            masks = np.empty((MAX_WIDTH, WORDS), np.int32)
            matched.sequence.fill(masks[0])
            assert matched.sequence.follow(drafts, masks) == drafts[:right]
            lengths.add(right)
            for place in range(right + 1):
                assert (masks[place] == matched.mask_after(drafts[:place])).all()
            allowed = [token for token in matched.allowed_after([]) if token not in matched.lasts]
            if not allowed:
                break
            matched.accept(chance.choice(allowed))
            mask = np.empty(WORDS, np.int32)
            matched.sequence.fill(mask)
            assert (mask == matched.mask_after([])).all()
    assert len(lengths) > 3


@pytest.mark.parametrize("choices", [["yes", "no"], ["<b>", "<a>"], ["the", "a"], ["<"]])
def test_a_free_part_begins_only_with_its_opening(vocabulary: GrammarVocabulary, choices: list[str]) -> None:
    """Every allowed token of random outputs, against a search by text."""
    openings, end = ["<a", "a the "], "er"
    chance = random.Random(repr(choices))
    seen = set()
    names = [each.decode("latin-1") for each in vocabulary.bytes]
    special = {name for name in names if name in ("<s>", "</s>", "<|user|>", "<|assistant|>")}
    for _ in range(40):
        form = Constraint(choice=choices, after=end, opening=openings)
        matched, text, free = Matched(vocabulary, form), "", ""
        phase = "opening"
        for _ in range(14):
            allowed = set(matched.allowed_after([]))
            if phase == "opening":
                wanted = {
                    token
                    for token, name in enumerate(names)
                    if name and any(o.startswith(text + name) or (text + name).startswith(o) for o in openings)
                }
                wanted |= {
                    token
                    for token, name in enumerate(names)
                    if name and name not in special and any(c.startswith(text + name) for c in choices)
                }
                wanted |= set(ENDS) if text in choices else set()
            elif phase == "free":
                wanted = set(range(len(names))) - set(ENDS)
                allowed &= set(range(len(names)))
            else:
                wanted = {
                    token
                    for token, name in enumerate(names)
                    if name and name not in special and any(c.startswith(text + name) for c in choices)
                }
                wanted |= set(ENDS) if text in choices else set()
            assert allowed == wanted, (phase, text)
            seen.add(phase)
            likely = [token for token in allowed if names[token] in ("er", "<", "a") and chance.random() < 0.5]
            token = chance.choice(likely or sorted(allowed))
            if token in ENDS:
                break
            matched.accept(token)
            text += names[token]
            found = next((o for o in openings if text.startswith(o)), None)
            if phase == "free":
                free += names[token]
            elif phase == "opening" and found is not None and not any(c.startswith(text) for c in choices):
                phase, free = "free", text[len(found) :]
            elif phase == "opening" and (found is not None or not any(o.startswith(text) for o in openings)):
                phase = "form"
            if phase == "free" and end in free:
                phase, text = "form", ""
    assert seen == {"opening", "free", "form"}


def texts(tokens: list[int], vocabulary: GrammarVocabulary) -> bytes:
    return b"".join(vocabulary.bytes[token] for token in tokens)


def test_a_certain_run_is_the_text_that_the_grammar_leaves_no_choice_about(vocabulary: GrammarVocabulary) -> None:
    matched = Matched(vocabulary, Constraint(json=PERSON, disable_any_whitespace=True))
    masks = np.empty((MAX_WIDTH, WORDS), np.int32)
    matched.sequence.fill(masks[0])
    run = matched.sequence.follow_certain(masks, seconds=math.inf)
    assert texts(run, vocabulary) == b'{"name": "' and len(run) <= MOST_CERTAIN
    for place in range(MAX_WIDTH):
        assert (masks[place] == matched.mask_after(run[:place])).all()
    for token in [*run, run[2], run[1]]:  # a name of one letter, and the quote after it
        matched.accept(token)
    matched.sequence.fill(masks[0])
    assert texts(matched.sequence.follow_certain(masks, seconds=math.inf), vocabulary) == b', "mood": "'


@pytest.mark.parametrize(
    "form, text",
    [
        (Constraint(regex="the(end)?"), b"the"),  # the longest of the tokens that begin it; then there is a choice
        (Constraint(regex="ab|ax"), b"a"),
        (Constraint(regex="[ab]"), b""),
        (Constraint(regex="ab"), b"ab"),  # the end itself is no draft: it is drawn where the last draft is verified
        (Constraint(choice=["yes"], after="the"), b""),
        (Constraint(choice=["the end"], after="x", opening=["<b>"]), b""),
        (Constraint(regex="a{40}"), b"a" * MOST_CERTAIN),
    ],
)
def test_where_a_certain_run_ends(vocabulary: GrammarVocabulary, form: Constraint, text: bytes) -> None:
    matched = Matched(vocabulary, form)
    masks = np.empty((MAX_WIDTH, WORDS), np.int32)
    matched.sequence.fill(masks[0])
    assert texts(matched.sequence.follow_certain(masks, seconds=math.inf), vocabulary) == text


def test_a_dead_end_behind_a_draft_is_an_error_only_once_it_is_reached(vocabulary: GrammarVocabulary) -> None:
    """The vocabulary has no é: after an a nothing can follow."""
    matched = Matched(vocabulary, Constraint(regex="(aé|b)+"))
    a, b = (vocabulary.bytes.index(text) for text in (b"a", b"b"))
    masks = np.empty((MAX_WIDTH, WORDS), np.int32)
    matched.sequence.fill(masks[0])
    assert matched.sequence.follow([b, a, b], masks) == [b]
    matched.accept(b)
    matched.sequence.accept(a)
    with pytest.raises(ValueError, match="no text has this form"):
        matched.sequence.fill(masks[0])


# Which drafts a row verifies


def plan_of(drafts: list[Drafts], added: list[int]) -> StepPlan:
    none = np.empty(0, np.int32)
    new = [NewRow(row, "", 0, 0, 0, 0, 0, 0, SamplingParams(), [], []) for row in added]
    return StepPlan(0, none, none, 0, none, none, none, none, none, none, 0, add=new, drafts=drafts)


def request_with(output: list[int], row: int = 5) -> Request:
    request = Request(NewRequest("r", [9, 8, 7], SamplingParams(), 99), 0, 0)
    request.output, request.row = output, row
    return request


@pytest.mark.parametrize(
    "start, run, output, width, verified",
    [
        (3, [1, 2, 3, 4], [], 3, [1, 2]),
        (3, [1, 2, 3, 4], [], 8, [1, 2, 3, 4]),
        (3, [1, 2, 3, 4], [1], 3, [2, 3]),  # one was drawn since
        (3, [1, 2, 3, 4], [1, 2, 3], 3, [4]),
        (3, [1, 2, 3, 4], [1, 2, 3, 4], 3, []),
        (3, [1, 2, 3, 4], [1, 2, 3, 4, 5], 3, []),
        (3, [1, 2, 3, 4], [6], 3, []),
        (3, [1, 2, 3, 4], [1, 6], 3, []),
        (4, [1, 2], [6, 1], 8, [2]),
        (3, [1, 2], [], 1, []),
    ],
)
def test_drafts_made_on_the_host(
    start: int, run: list[int], output: list[int], width: int, verified: list[int]
) -> None:
    plan = PlanDrafts(plan_of([Drafts(5, start, run)], [5]))
    assert plan.of(request_with(output), width, [50, 51, 52, 53, 54, 55, 56]) == verified


def test_drafts_made_on_the_device() -> None:
    proposed = [50, 51, 52]
    plan = PlanDrafts(plan_of([Drafts(4, 3, [1])], [6]))
    assert plan.of(request_with([1]), 3, proposed) == [50, 51]
    assert plan.of(request_with([1]), 8, proposed) == proposed
    assert plan.of(request_with([1]), 1, proposed) == []
    assert plan.of(request_with([1], row=6), 3, proposed) == []  # the row is new: its drafts went with its last row


# Engines


class Engines:
    """Engines with and without drafts, whose matchers come from one fork server."""

    def __init__(self, model: Path) -> None:
        self._shared = SharedForkServer(model, places=MAX_WIDTH)
        self._made: dict[str, LLM] = {}

    def __call__(self, **settings: Any) -> LLM:
        name = repr(settings)
        if name not in self._made:
            self._made[name] = self._shared.engine(**settings)
        return self._made[name]

    def close(self) -> None:
        self._shared.close()


@pytest.fixture(scope="module")
def engines(tiny_model: Path) -> Iterator[Engines]:
    made = Engines(tiny_model)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def usual_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CERTAIN_WAIT_SECONDS", 60.0)  # a machine may be busy
    for name, value in (("book", []), ("wrong", 0.2), ("fails", 0.0)):
        monkeypatch.setattr(Scripted, name, value)


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Every kind of grammar, greedy and seeded, and requests without one."""
    wanted = [
        params(constraint, **fields)
        for constraint, _ in CONSTRAINTS.values()
        for fields in (
            {"temperature": 0, "max_tokens": 30},
            {"temperature": 1.1, "n": 2, "top_p": 0.95, "max_tokens": 60},
        )
    ]
    free = {"max_tokens": 30, "ignore_eos": True}
    wanted += [
        params(None, bad_words=["the", "a", "er"], **free),
        params(None, temperature=0, stop=["er", "Q"], **free),
    ]
    thinking = Constraint(choice=["yes", "no", "not at all"], after="the")
    wanted += [params(thinking, temperature=1.2, logit_bias={100: 4.0}, seed=seed) for seed in (1, 2)]
    optional = msgspec.structs.replace(thinking, after=["the", "er"], opening=["<a", "\n<a", "no!"])
    biases = {33: 9.0, 70: 9.0, 101: 8.0}  # "<", "a", "the"
    fields = {"temperature": 1.2, "n": 2, "max_tokens": 40, "logit_bias": biases}
    wanted += [params(optional, seed=seed, **fields) for seed in (1, 2)]
    ended = Constraint(regex="[a-z]{3}@[a-z]{3}(the){3}!")
    wanted += [params(ended, stop=["@"]), params(ended, stop_token_ids=[35]), params(ended, min_tokens=30)]
    wanted += [params(Constraint(regex="[a-z]*"), min_tokens=15, logprobs=2, frequency_penalty=0.5)]
    return [PROMPT[: 5 + i] for i in range(len(wanted))], wanted


def results(outputs: list[RequestOutput]) -> list[Any]:
    return [
        (list(sample.token_ids), sample.finish_reason, sample.stop_reason, output.error)
        for output in outputs
        for sample in output.outputs
    ]


@pytest.fixture(scope="module")
def expected(engines: Engines) -> list[RequestOutput]:
    outputs = engines(pipeline_depth=0).generate(*requests(), use_tqdm=False)
    written = [sample.text for output in outputs for sample in output.outputs]
    assert any(re.fullmatch("<a.*(the|er)(yes|no|not at all)", text) for text in written), "one that thinks first"
    return outputs


@pytest.mark.parametrize(
    "settings",
    [
        {"pipeline_depth": 0},
        {"pipeline_depth": 1},
        {"pipeline_depth": 1, **TIGHT},
    ],
    ids=["one by one", "overlapped", "preempted"],
)
def test_drafts_change_no_token_of_structured_outputs(
    engines: Engines, expected: list[RequestOutput], settings: dict[str, Any]
) -> None:
    Scripted.learn(expected)
    llm = engines(speculative_config=SCRIPTED, **settings)
    tally = Tally(llm)
    before = llm.llm_engine.core.scheduler.stats.preemptions
    assert results(llm.generate(*requests(), use_tqdm=False)) == results(expected)
    assert tally.verified > tally.accepted > 100
    assert llm.llm_engine.core.scheduler.stats.preemptions > before or "block_size" not in settings


def test_certain_drafts_need_no_proposer(engines: Engines, expected: list[RequestOutput]) -> None:
    for depth in (0, 1):
        llm = engines(speculative_config={"method": "grammar"}, pipeline_depth=depth)
        tally = Tally(llm)
        assert results(llm.generate(*requests(), use_tqdm=False)) == results(expected)
        assert tally.accepted > 100


NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 2, "tune": False}


@pytest.mark.parametrize("depth", [0, 1])
def test_masks_follow_the_drafts_that_a_device_has_made(
    engines: Engines, expected: list[RequestOutput], depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without drafts from grammars, which would be preferred."""
    llm = engines(speculative_config=NGRAM, pipeline_depth=depth)
    monkeypatch.setattr(llm.llm_engine.core.scheduler.requests.drafting, "_certain", lambda key: [])
    tally = Tally(llm)
    assert results(llm.generate(*requests(), use_tqdm=False)) == results(expected)
    assert tally.verified > tally.accepted > 50


@pytest.mark.parametrize("depth", [0, 1])
def test_a_dead_end_behind_a_draft_ends_the_request_as_without_drafts(engines: Engines, depth: int) -> None:
    """The vocabulary has no é: after the a nothing can follow."""
    wanted = [params(Constraint(regex="b[bc]{2,9}aé"), seed=seed, max_tokens=30) for seed in range(5)]
    prompts = [PROMPT] * len(wanted)
    expected = engines(pipeline_depth=0).generate(prompts, wanted, use_tqdm=False)
    found = results(expected)
    assert all(reason == "error" and len(tokens) > 3 for tokens, reason, _, _ in found)
    Scripted.learn(expected)
    Scripted.wrong = 0.0
    llm = engines(speculative_config=SCRIPTED, pipeline_depth=depth)
    tally = Tally(llm)
    for _ in range(6):  # drafts are of random length
        assert results(llm.generate(prompts, wanted, use_tqdm=False)) == found
    assert tally.accepted > 10
    assert_idle(llm)


def test_predictions_of_structured_outputs(engines: Engines) -> None:
    """What a client expects, right, with something before it, and without its beginning."""
    form = params(Constraint(regex="[a-z]{30}!"), max_tokens=60)
    (expected,) = engines(pipeline_depth=0).generate([PROMPT], form, use_tqdm=False)
    llm = engines(speculative_config={"method": "grammar"}, pipeline_depth=0)
    right = list(expected.outputs[0].token_ids)
    for prediction, least in ((right, 20), ([95, 97, *right], 12), (right[5:], 10), ([95, 97], 0)):
        tally = Tally(llm)
        prompt: Any = {"prompt_token_ids": PROMPT, "prediction": prediction}
        assert results(llm.generate([prompt], form, use_tqdm=False)) == results([expected])
        assert tally.accepted >= least


def test_a_text_without_a_choice_takes_few_steps(engines: Engines) -> None:
    """A letter with the prompt, then seven drafts and the letter after them in each step, then the end."""
    llm = engines(speculative_config={"method": "grammar"}, pipeline_depth=0)
    tally = Tally(llm)
    (output,) = llm.generate([PROMPT], params(Constraint(regex="x{25}")), use_tqdm=False)
    assert output.outputs[0].text == "x" * 25
    assert tally.accepted == tally.verified == 21 and tally.steps == 5


def test_a_proposer_that_raises_costs_its_drafts_only(engines: Engines, expected: list[RequestOutput]) -> None:
    Scripted.learn(expected)
    Scripted.fails = 0.05
    llm = engines(speculative_config=SCRIPTED, pipeline_depth=1)
    tally = Tally(llm)
    assert results(llm.generate(*requests(), use_tqdm=False)) == results(expected)
    assert tally.accepted > 20


def test_a_failed_step_changes_no_token(
    engines: Engines, expected: list[RequestOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    Scripted.learn(expected)
    llm = engines(speculative_config=SCRIPTED, pipeline_depth=1)
    executor = llm.llm_engine.core._executor
    for name, at in (("submit", 9), ("supply", 5), ("collect", 7)):
        calls = iter(range(10000))
        real = getattr(executor, name)

        def failing(*arguments: Any, real: Any = real, calls: Any = calls, at: int = at) -> Any:
            if next(calls) == at:
                raise StepError("a test's own failure")
            return real(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(executor, name, failing)
            prompts, wanted = requests()
            assert results(llm.generate(prompts[:5], wanted[:5], use_tqdm=False)) == results(expected[:5])


def test_late_masks_change_no_token(
    engines: Engines, expected: list[RequestOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every mask that is not there at once is late: its request waits for it without a row."""
    Scripted.learn(expected)
    monkeypatch.setattr(module, "STEP_WAIT_SECONDS", 0.0)
    prompts, wanted = requests()
    llm = engines(speculative_config=SCRIPTED, pipeline_depth=1)
    assert results(llm.generate(prompts[:6], wanted[:6], use_tqdm=False)) == results(expected[:6])


def storm(llm: LLM, expected: list[RequestOutput], seed: int, steps: int) -> None:
    """Requests come and are aborted at any moment; those that end have the expected tokens, all others a part."""
    chance = random.Random(seed)
    engine = llm.llm_engine
    prompts, wanted = requests()
    running: dict[str, int] = {}
    for step in range(steps):
        if len(running) < 8 and chance.random() < 0.4:
            name, number = f"{seed}-{step}", chance.randrange(len(prompts))
            engine.add_request(name, prompts[number], wanted[number])
            running[name] = number
        if running and chance.random() < 0.05:
            aborted = chance.choice(list(running))
            engine.abort_request([aborted])
            del running[aborted]
        check_outputs(engine.step(), running, expected)
    while running:
        check_outputs(engine.step(), running, expected)
    assert_idle(llm)


def check_outputs(outputs: list[RequestOutput], running: dict[str, int], expected: list[RequestOutput]) -> None:
    for output in outputs:
        if output.request_id not in running:
            continue
        right = expected[running[output.request_id]]
        if output.finished:
            del running[output.request_id]
            assert results([output]) == results([right])
        for sample in output.outputs:
            whole = list(right.outputs[sample.index].token_ids)
            assert list(sample.token_ids) == whole[: len(sample.token_ids)]


def test_a_storm(engines: Engines, expected: list[RequestOutput]) -> None:
    Scripted.learn(expected)
    storm(engines(speculative_config=SCRIPTED, pipeline_depth=1, **TIGHT), expected, 0, 60)


@pytest.mark.slow
@pytest.mark.parametrize("speculation", [SCRIPTED, NGRAM, {"method": "suffix"}, {"method": "grammar"}], ids=str)
@pytest.mark.parametrize("depth", [0, 1])
def test_storms(engines: Engines, expected: list[RequestOutput], speculation: dict[str, Any], depth: int) -> None:
    Scripted.learn(expected)
    llm = engines(speculative_config=speculation, pipeline_depth=depth, **TIGHT)
    for seed in range(3):
        storm(llm, expected, seed, 400)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_ranks(engines: Engines, expected: list[RequestOutput], sizes: dict[str, int]) -> None:
    Scripted.learn(expected)
    llm = engines(speculative_config=SCRIPTED, **sizes)
    tally = Tally(llm)
    assert results(llm.generate(*requests(), use_tqdm=False)) == results(expected)
    assert tally.verified > tally.accepted > 100
