"""Structured output: the output matches its grammar in every state of the engine."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from quire import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from quire.engine.grammar.xgrammar_backend import MAX_WHITESPACE
from quire.errors import StepError
from quire.platforms.cpu import CpuPlatform
from tests.conftest import assert_idle
from tests.engine.fork_server import SharedForkServer
from tests.kernels.triton_target import ON_GPU

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "mood": {"enum": ["glad", "sad"]},
    },
    "required": ["name", "age", "mood"],
}
PHONE = r"\(\d{3}\) \d{3}-\d{4}"
SUM = 'root ::= term (" + " term)*\nterm ::= [0-9]{1,3}'
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": "<get>",
        "content": {"type": "json_schema", "json_schema": {"type": "object", "properties": {"a": {"type": "boolean"}}}},
        "end": "</get>",
    },
}
LEGACY_TAG = {"structures": [{"begin": "<get>", "schema": {"type": "boolean"}, "end": "</get>"}], "triggers": ["<get"]}
Constraint = StructuredOutputsParams


def is_person(text: str) -> bool:
    return jsonschema_rs.validator_for(PERSON).is_valid(json.loads(text))


def is_tag(text: str) -> bool:
    found = re.fullmatch("<get>(.*)</get>", text, re.DOTALL)
    return found is not None and isinstance(json.loads(found[1]), dict)


CONSTRAINTS: dict[str, tuple[Constraint, Callable[[str], Any]]] = {
    "json": (Constraint(json=PERSON), is_person),
    "json as text, one line": (
        Constraint(json=json.dumps(PERSON), disable_any_whitespace=True),
        lambda text: is_person(text) and json.dumps(json.loads(text), ensure_ascii=False) == text,
    ),
    "regex": (Constraint(regex=PHONE), lambda text: re.fullmatch(PHONE, text)),
    "choice": (Constraint(choice=["red", 'a "b" \\n', "bl|ue"]), lambda text: text in ("red", 'a "b" \\n', "bl|ue")),
    "grammar": (Constraint(grammar=SUM), lambda text: re.fullmatch(r"\d{1,3}( \+ \d{1,3})*", text)),
    "tag": (Constraint(structural_tag=TAG), is_tag),
}

PROMPT = [20 + 3 * i for i in range(30)]


def params(constraint: Constraint | None, **fields: Any) -> SamplingParams:
    return SamplingParams(
        **({"temperature": 0.9, "seed": 5, "max_tokens": 120, "structured_outputs": constraint} | fields)
    )


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(sample.token_ids) for output in outputs for sample in output.outputs]


@pytest.fixture(scope="module")
def engines(tiny_model: Path) -> Iterator[Callable[..., LLM]]:
    """Engines over the tiny model, one for each setting."""
    shared = SharedForkServer(tiny_model)
    yield functools.cache(shared.engine)
    shared.close()


DEPTHS = pytest.mark.parametrize("depth", [0, 1])


@DEPTHS
@pytest.mark.parametrize("kind", CONSTRAINTS)
def test_the_output_matches_its_grammar(engines: Callable[..., LLM], kind: str, depth: int) -> None:
    constraint, check = CONSTRAINTS[kind]
    everything = {"top_k": 20, "top_p": 0.8, "min_p": 0.01, "top_n_sigma": 2.0, "xtc_probability": 0.5}
    for fields in ({}, {"temperature": 0}, {"temperature": 1.3, **everything}):
        (output,) = engines(pipeline_depth=depth).generate([PROMPT], params(constraint, **fields), use_tqdm=False)
        (sample,) = output.outputs
        if sample.finish_reason == "length":
            assert kind == "grammar"  # a sum may never end
            continue
        assert output.error is None and sample.finish_reason == "stop", output
        assert check(sample.text), sample.text


def test_steps_in_flight_change_no_token(engines: Callable[..., LLM]) -> None:
    wanted = [params(constraint, n=2) for constraint, _ in CONSTRAINTS.values()] + [
        params(None),
        params(None, temperature=0),
    ]
    prompts = [PROMPT[: 5 + 3 * i] for i in range(len(wanted))]
    results = [tokens_of(engines(pipeline_depth=depth).generate(prompts, wanted, use_tqdm=False)) for depth in (0, 1)]
    assert results[0] == results[1]


@DEPTHS
def test_unconstrained_rows_draw_the_same_tokens_as_alone(engines: Callable[..., LLM], depth: int) -> None:
    llm = engines(pipeline_depth=depth)
    free = [
        params(None, max_tokens=20, ignore_eos=True),
        params(None, max_tokens=20, temperature=0, ignore_eos=True),
        params(None, max_tokens=20, top_k=7, frequency_penalty=0.7, ignore_eos=True),
    ]
    prompts = [PROMPT[:9], PROMPT[3:20], PROMPT[7:]]
    alone = [tokens_of(llm.generate([p], [wanted], use_tqdm=False))[0] for p, wanted in zip(prompts, free, strict=True)]
    constraints = [params(CONSTRAINTS["json"][0]), params(CONSTRAINTS["regex"][0])]
    together = llm.generate([*prompts, PROMPT, PROMPT[2:]], [*free, *constraints], use_tqdm=False)
    assert tokens_of(together)[:3] == alone
    assert is_person(together[3].outputs[0].text) and re.fullmatch(PHONE, together[4].outputs[0].text)


@DEPTHS
def test_chunks_hits_and_preemption_change_no_token(engines: Callable[..., LLM], depth: int) -> None:
    """A cache of 26 blocks of 4 for requests that may need more, and prompts in chunks of seven tokens."""
    wanted = [params(CONSTRAINTS["json"][0], seed=i, max_tokens=60, logprobs=2) for i in range(6)]
    prompts = [PROMPT[: 10 + i] for i in range(6)]
    roomy = engines(pipeline_depth=0)
    expected = tokens_of([roomy.generate([p], [w], use_tqdm=False)[0] for p, w in zip(prompts, wanted, strict=True)])
    tight = engines(pipeline_depth=depth, num_gpu_blocks_override=26, block_size=4, max_num_batched_tokens=8)
    before = tight.llm_engine.core.scheduler.stats.preemptions
    assert tokens_of(tight.generate(prompts, wanted, use_tqdm=False)) == expected
    assert tight.llm_engine.core.scheduler.stats.preemptions > before


@DEPTHS
def test_a_failed_step_changes_no_token(
    engines: Callable[..., LLM], depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engines(pipeline_depth=depth)
    wanted = [params(CONSTRAINTS["json"][0]), params(CONSTRAINTS["regex"][0]), params(None, max_tokens=20)]
    expected = tokens_of(llm.generate([PROMPT] * 3, wanted, use_tqdm=False))
    executor = llm.llm_engine.core._executor
    for name, at in (("submit", 7), ("supply", 5), ("collect", 6)):
        calls = iter(range(1000))
        real = getattr(executor, name)

        def failing(*arguments: Any, real: Any = real, calls: Any = calls, at: int = at) -> Any:
            if next(calls) == at:
                raise StepError("a test's own failure")
            return real(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(executor, name, failing)
            assert tokens_of(llm.generate([PROMPT] * 3, wanted, use_tqdm=False)) == expected


def test_white_space_in_json_is_limited(engines: Callable[..., LLM]) -> None:
    """JSON allows white space almost anywhere; without a limit this answer would be nothing else."""
    llm = engines(pipeline_depth=0)
    line_breaks = {llm.get_tokenizer().convert_tokens_to_ids("Ċ"): 100.0}  # which no JSON string can contain
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["a"]}
    for constraint in (Constraint(json=schema), Constraint(json_object=True)):
        fields = {"logit_bias": line_breaks, "max_tokens": 200, "temperature": 0}
        (sample,) = llm.generate([PROMPT[:9]], params(constraint, **fields), use_tqdm=False)[0].outputs
        runs = [len(run) for run in re.findall(r"\s+", sample.text)]
        assert max(runs) == MAX_WHITESPACE
        if constraint.json is not None:  # an object may have any number of members
            assert sample.finish_reason == "stop" and set(json.loads(sample.text)) == {"a"}


# Together with other parameters


@pytest.fixture
def tiny(engines: Callable[..., LLM]) -> Iterator[LLM]:
    llm = engines(pipeline_depth=0)
    yield llm
    assert_idle(llm)


def only(llm: LLM, wanted: SamplingParams) -> RequestOutput:
    return llm.generate([PROMPT], [wanted], use_tqdm=False)[0]


def test_sequences_of_one_prompt_differ(tiny: LLM) -> None:
    output = only(tiny, params(Constraint(regex="[a-z]{6}"), n=4, temperature=1.5))
    texts = [sample.text for sample in output.outputs]
    assert all(re.fullmatch("[a-z]{6}", text) for text in texts) and len(set(texts)) > 1


def test_min_tokens_delays_the_end_where_the_grammar_allows(tiny: LLM) -> None:
    sample = only(tiny, params(Constraint(regex="[a-z]*"), min_tokens=15)).outputs[0]
    assert len(sample.token_ids) > 15 and re.fullmatch("[a-z]+", sample.text)


def test_a_complete_output_ends_before_min_tokens_and_with_ignore_eos(tiny: LLM) -> None:
    for fields in ({"min_tokens": 50}, {"ignore_eos": True}):
        output = only(tiny, params(Constraint(choice=["yes", "no"]), **fields))
        assert output.outputs[0].text in ("yes", "no") and output.outputs[0].finish_reason == "stop"


def test_penalties_biases_and_logprobs_work_with_a_grammar(tiny: LLM) -> None:
    a, b = (tiny.get_tokenizer().convert_tokens_to_ids(letter) for letter in "ab")
    constraint = Constraint(regex="[ab]{8}")
    assert only(tiny, params(constraint, temperature=0, logit_bias={a: 90.0})).outputs[0].text == "a" * 8
    assert only(tiny, params(constraint, temperature=0, bad_words=["a"])).outputs[0].text == "b" * 8
    assert only(tiny, params(constraint, temperature=0, allowed_token_ids=[b, 1])).outputs[0].text == "b" * 8
    mixed = only(tiny, params(constraint, temperature=0, frequency_penalty=2.0, repetition_penalty=1.5, logprobs=3))
    assert set(mixed.outputs[0].text) == {"a", "b"}
    assert len(mixed.outputs[0].logprobs or []) == len(mixed.outputs[0].token_ids)


def test_stop_strings_and_stop_ids_end_the_output_early(tiny: LLM) -> None:
    at = tiny.get_tokenizer().convert_tokens_to_ids("@")
    constraint = Constraint(regex="[a-z]{3}@[a-z]{3}!")
    by_text = only(tiny, params(constraint, stop=["@"])).outputs[0]
    assert re.fullmatch("[a-z]{3}", by_text.text) and by_text.stop_reason == "@"
    by_id = only(tiny, params(constraint, stop_token_ids=[at])).outputs[0]
    assert re.fullmatch("[a-z]{3}", by_id.text) and by_id.stop_reason == at


def test_the_grammar_may_start_after_a_text(tiny: LLM) -> None:
    constraint = Constraint(choice=["yes", "no"], after="the")
    output = only(tiny, params(constraint, max_tokens=200, temperature=1.2, logit_bias={100: 4.0}))
    before, found, answer = output.outputs[0].text.partition("the")
    assert found and answer.endswith(("yes", "no")) and len(before) > 0
    assert output.outputs[0].finish_reason == "stop"


def test_the_grammar_starts_at_once_or_after_a_part_that_the_output_opens(tiny: LLM) -> None:
    constraint = Constraint(choice=["yes", "no"], after=["the", "er"], opening=["<think>", "\n<think>"])
    less, new_line, the = tiny.get_tokenizer().convert_tokens_to_ids(["<", "Ċ", "the"])
    for first in (less, new_line):
        fields = {"max_tokens": 200, "temperature": 1.2, "logit_bias": {first: 20.0, the: 22.0}}
        text = only(tiny, params(constraint, **fields)).outputs[0].text
        opening, _, thought = text.partition("<think>")
        assert opening == ("\n" if first == new_line else "")
        assert re.fullmatch(r"(?s).*?(the|er)(yes|no)", thought)
    at_once = only(tiny, params(constraint, logit_bias={less: -100.0, new_line: -100.0})).outputs[0]
    assert at_once.text in ("yes", "no") and at_once.finish_reason == "stop"


def test_a_request_that_excludes_every_allowed_token_fails_alone(tiny: LLM) -> None:
    b = tiny.get_tokenizer().convert_tokens_to_ids("b")
    wanted = [params(Constraint(regex="a+"), allowed_token_ids=[b]), params(Constraint(regex="a{3}"))]
    failed, good = tiny.generate([PROMPT] * 2, wanted, use_tqdm=False)
    assert failed.outputs[0].finish_reason == "error" and "excludes every token" in (failed.error or "")
    assert good.outputs[0].text == "aaa"


def test_a_grammar_that_matches_no_text_fails_alone(tiny: LLM) -> None:
    wanted = [params(Constraint(json={"$ref": "#"})), params(Constraint(regex="a{3}"))]
    failed, good = tiny.generate([PROMPT] * 2, wanted, use_tqdm=False)
    assert failed.outputs[0].finish_reason == "error" and "no text has this form" in (failed.error or "")
    assert good.outputs[0].text == "aaa"


@pytest.mark.parametrize(
    "constraint, message",
    [
        (Constraint(grammar="root ::= missing"), 'Rule "missing" is not defined'),
        (Constraint(grammar="root :: x"), "EBNF"),
        (Constraint(regex="(a"), "parenthesis is not closed"),
        (Constraint(json={"type": "strong"}), "Unsupported type"),
        (Constraint(structural_tag={"format": {"type": "nothing"}}), "nothing"),
        (Constraint(structural_tag={"structures": [{}]}), "begin"),
    ],
)
def test_a_grammar_that_does_not_compile_is_refused_with_the_reason(
    tiny: LLM, constraint: Constraint, message: str
) -> None:
    for _ in range(2):  # the second time from the cached refusal
        output = only(tiny, params(constraint))
        assert output.outputs[0].finish_reason == "error" and output.outputs[0].token_ids == []
        assert message in (output.error or "") and "/project/" not in (output.error or "")


def test_the_legacy_format_of_structural_tags(tiny: LLM) -> None:
    less = tiny.get_tokenizer().convert_tokens_to_ids("<")
    output = only(
        tiny, params(Constraint(structural_tag=LEGACY_TAG), logit_bias={less: 2.0}, max_tokens=100, stop=["</get>"])
    )
    found = re.search("<get>(.*)", output.outputs[0].text, re.DOTALL)
    assert found is None or found[1] in ("true", "false")


# Over the GPU's kernels


@pytest.mark.skipif(ON_GPU, reason="on a GPU the kernels are compiled: tests/gpu runs the engine there")
def test_the_gpu_kernels_draw_the_same_tokens(engines: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [
        params(Constraint(regex="[a-z]{4}")),
        params(Constraint(regex="[a-z]{4}"), temperature=0),
        params(Constraint(regex="[a-z]{4}"), n=2, top_k=9, top_p=0.9),
        params(Constraint(choice=["aa", "bb"]), logprobs=1, presence_penalty=0.5),
        params(None, max_tokens=5),
    ]
    prompts = [PROMPT[: 4 + 3 * i] for i in range(len(wanted))]
    expected = tokens_of(engines(pipeline_depth=0).generate(prompts, wanted, use_tqdm=False))
    monkeypatch.setattr(CpuPlatform, "ops", "quire.kernels.triton.ops.TritonOps")
    monkeypatch.setattr(CpuPlatform, "attention", "triton")
    llm = engines(enforce_eager=True, pipeline_depth=1, num_gpu_blocks_override=64)
    assert tokens_of(llm.generate(prompts, wanted, use_tqdm=False)) == expected
