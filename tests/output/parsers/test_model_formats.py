"""The notations of single model families: calls, reasoning and content, the same whole or in any pieces."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.output.parsers.answer import AnswerReader
from quire.output.parsers.deltas import CallArguments, CallEnd, CallStart, Reasoning, gather
from quire.output.parsers.reasoning import REASONING_PARSERS, guess_reasoning_parser, make_reasoning_split
from quire.output.parsers.toolcalls import ToolPlan, guess_parser
from quire.output.parsers.tools.base import TOOL_PARSERS, make_tool_parser, notation_of
from tests.output.parsers import test_tools
from tests.output.parsers.cuts import cut, pieces_of, read
from tests.output.parsers.test_tools import Call, calls_of, ids

PROPERTIES = {
    "text": {"type": "string"},
    "maybe": {"type": ["string", "null"]},
    "count": {"type": "integer"},
    "ratio": {"type": "number"},
    "is_on": {"type": "boolean"},
    "items": {"type": "array"},
    "more": {"anyOf": [{"type": "object"}, {"type": "null"}]},
}
SCHEMA = {"type": "object", "properties": PROPERTIES}
OFFERED = {"get_weather": SCHEMA, "f": SCHEMA}

DEEPSEEK = {
    "begin": "<｜tool▁calls▁begin｜>",
    "call": "<｜tool▁call▁begin｜>",
    "sep": "<｜tool▁sep｜>",
    "call_end": "<｜tool▁call▁end｜>",
    "end": "<｜tool▁calls▁end｜>",
}


def make(name: str, offered: Any = OFFERED) -> Any:
    return make_tool_parser(name, offered, ids())


def plain(value: Any) -> str:
    """A value as the templates of XML formats write it."""
    return value if isinstance(value, str) else json.dumps(value)


def objects(calls: list[Call]) -> str:
    return json.dumps([{"name": name, "arguments": arguments} for name, arguments in calls])


def deepseek_v3(calls: list[Call]) -> str:
    mark = DEEPSEEK
    each = [
        f"{mark['call']}function{mark['sep']}{name}\n```json\n{json.dumps(arguments)}\n```{mark['call_end']}"
        for name, arguments in calls
    ]
    return mark["begin"] + "\n".join(each) + mark["end"]


def deepseek_v31(calls: list[Call]) -> str:
    mark = DEEPSEEK
    each = [f"{mark['call']}{name}{mark['sep']}{json.dumps(arguments)}{mark['call_end']}" for name, arguments in calls]
    return mark["begin"] + "".join(each) + mark["end"]


def kimi_k2(calls: list[Call]) -> str:
    each = [
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{json.dumps(arguments)}<|tool_call_end|>"
        for i, (name, arguments) in enumerate(calls)
    ]
    return "<|tool_calls_section_begin|>" + "".join(each) + "<|tool_calls_section_end|>"


def invokes(calls: list[Call], wrapper: str, mark: str, says_kind: bool) -> str:
    lines = [f"<{mark}{wrapper}>"]
    for name, arguments in calls:
        lines.append(f'<{mark}invoke name="{name}">')
        for key, value in arguments.items():
            kind = f' string="{"true" if isinstance(value, str) else "false"}"' if says_kind else ""
            lines.append(f'<{mark}parameter name="{key}"{kind}>{plain(value)}</{mark}parameter>')
        lines.append(f"</{mark}invoke>")
    return "\n".join([*lines, f"</{mark}{wrapper}>"])


def functions(calls: list[Call], wrapper: str, around: str) -> str:
    text = ""
    for name, arguments in calls:
        text += f"<{wrapper}>\n<function={name}>\n"
        for key, value in arguments.items():
            text += f"<parameter={key}>{around}{plain(value)}{around}</parameter>\n"
        text += f"</function>\n</{wrapper}>\n"
    return text.rstrip("\n")


def glm45(calls: list[Call]) -> str:
    text = ""
    for name, arguments in calls:
        text += f"<tool_call>{name}\n"
        for key, value in arguments.items():
            text += f"<arg_key>{key}</arg_key>\n<arg_value>{plain(value)}</arg_value>\n"
        text += "</tool_call>\n"
    return text.rstrip("\n")


def gemma(calls: list[Call], opening: str, closing: str, quote: str) -> str:
    def write(value: Any) -> str:
        if isinstance(value, str):
            return f"{quote}{value}{quote}"
        if isinstance(value, dict):
            return "{" + ",".join(f"{quote}{key}{quote}:{write(each)}" for key, each in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(write, value)) + "]"
        return json.dumps(value)

    def bare(arguments: dict[str, Any]) -> str:
        return "{" + ",".join(f"{key}:{write(value)}" for key, value in arguments.items()) + "}"

    return "".join(f"{opening}call:{name}{bare(arguments)}{closing}" for name, arguments in calls)


def harmony(calls: list[Call]) -> str:
    return "".join(
        f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        f"{json.dumps(arguments)}<|call|>"
        for name, arguments in calls
    )


def cohere(calls: list[Call]) -> str:
    listed = [
        {"tool_call_id": str(i), "tool_name": name, "parameters": arguments}
        for i, (name, arguments) in enumerate(calls)
    ]
    return f"<|START_ACTION|>{json.dumps(listed, indent=1)}<|END_ACTION|>"


def olmo3(calls: list[Call]) -> str:
    lines = [f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in calls]
    return "\n".join(["<function_calls>", *lines, "</function_calls>"])


def lfm2(calls: list[Call]) -> str:
    each = [f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in calls]
    return f"<|tool_call_start|>[{', '.join(each)}]<|tool_call_end|>"


def each_object(calls: list[Call], opening: str, closing: str, key: str = "arguments") -> str:
    return "".join(opening + json.dumps({"name": name, key: given}) + closing for name, given in calls)


def step3(calls: list[Call]) -> str:
    each = []
    for name, arguments in calls:
        given = "".join(
            f'<steptml:parameter name="{key}">{plain(value)}</steptml:parameter>' for key, value in arguments.items()
        )
        invoke = f'<steptml:invoke name="{name}">{given}</steptml:invoke>'
        each.append(f"<｜tool_call_begin｜>function<｜tool_sep｜>{name}\n{invoke}<｜tool_call_end｜>")
    return "<｜tool_calls_begin｜>" + "<｜tool_sep｜>".join(each) + "<｜tool_calls_end｜>"


def hy_v3(calls: list[Call]) -> str:
    text = "<tool_calls>\n"
    for name, arguments in calls:
        text += f"<tool_call>{name}<tool_sep>\n"
        for key, value in arguments.items():
            text += f"<arg_key>{key}</arg_key>\n<arg_value>{plain(value)}</arg_value>\n"
        text += "</tool_call>\n"
    return text + "</tool_calls>"


def minicpm5(calls: list[Call]) -> str:
    text = ""
    for name, arguments in calls:
        given = "".join(f'<param name="{key}">{plain(value)}</param>' for key, value in arguments.items())
        text += f'<function name="{name}">{given}</function>\n'
    return text.rstrip("\n")


WRITERS: dict[str, Callable[[list[Call]], str]] = {
    "apertus": lambda calls: f"<|tools_prefix|>{json.dumps([{name: given} for name, given in calls])}<|tools_suffix|>",
    "dots": lambda calls: invokes(calls, "dots_function_call", "", False),
    "minicpm5": minicpm5,
    "deepseek_v4": lambda calls: invokes(calls, "tool_calls", "｜DSML｜", True),
    "gigachat3": lambda calls: each_object(calls, "<|message_sep|>\n\nfunction call<|role_sep|>\n", ""),
    "granite-20b-fc": lambda calls: each_object(calls, "<function_call> ", "\n").rstrip(),
    "hy_v3": hy_v3,
    "internlm": lambda calls: each_object(calls, "<|action_start|><|plugin|>\n", "<|action_end|>", "parameters"),
    "lfm2": lfm2,
    "longcat": lambda calls: each_object(calls, "<longcat_tool_call>\n", "\n</longcat_tool_call>\n").rstrip(),
    "step3": step3,
    "xlam": lambda calls: "<tool_call>" + objects(calls) + "</tool_call>",
    "cohere_command3": cohere,
    "olmo3": olmo3,
    "deepseek_v3": deepseek_v3,
    "deepseek_v31": deepseek_v31,
    "deepseek_v32": lambda calls: invokes(calls, "function_calls", "｜DSML｜", True),
    "functiongemma": lambda calls: gemma(calls, "<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma4": lambda calls: gemma(calls, "<|tool_call>", "<tool_call|>", '<|"|>'),
    "glm45": glm45,
    "granite": lambda calls: "<|tool_call|>" + objects(calls),
    "jamba": lambda calls: f"<tool_calls>{objects(calls)}</tool_calls>",
    "kimi_k2": kimi_k2,
    "minimax_m2": lambda calls: invokes(calls, "minimax:tool_call", "", False),
    "openai": harmony,
    "phi4_mini_json": lambda calls: "functools" + objects(calls),
    "qwen3_coder": lambda calls: functions(calls, "tool_call", "\n"),
    "seed_oss": lambda calls: functions(calls, "seed:tool_call", ""),
}
SAME = {
    "cohere_command4": "cohere_command3",
    "ernie45": "hermes",
    "glm47": "glm45",
    "granite4": "hermes",
    "hunyuan_a13b": "jamba",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "mimo": "qwen3_coder",
    "poolside_v1": "glm45",
    "qwen3_xml": "qwen3_coder",
    "step3p5": "qwen3_coder",
}


def test_every_format_is_tested() -> None:
    assert {*WRITERS, *SAME, *test_tools.EVERY} == set(TOOL_PARSERS)
    assert all(TOOL_PARSERS[name] == TOOL_PARSERS[same] for name, same in SAME.items())


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), max_size=12)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts.filter(bool), inner, max_size=3),
    max_leaves=6,
)
arguments = st.fixed_dictionaries(
    {},
    optional={
        "text": texts,
        "maybe": st.none() | texts.filter(lambda text: text.strip() not in ("null", "None")),
        "count": st.integers(),
        "ratio": st.floats(allow_nan=False, allow_infinity=False),
        "is_on": st.booleans(),
        "items": st.lists(json_values, max_size=3),
        "more": st.none() | st.dictionaries(texts.filter(bool), json_values, max_size=3),
    },
)
calls = st.lists(st.tuples(st.sampled_from(sorted(OFFERED)), arguments), min_size=1, max_size=3)
prose = st.text(st.characters(exclude_characters="<", exclude_categories=["Cs"]), max_size=20).map(str.strip)


@pytest.mark.parametrize("name", WRITERS)
@settings(deadline=None, max_examples=15)
@given(before=prose, asked=calls, data=st.data())
def test_calls_are_found_whole_and_in_pieces(name: str, before: str, asked: list[Call], data: st.DataObject) -> None:
    text = before + WRITERS[name](asked)
    whole = make(name).parse(text)
    assert calls_of(whole) == asked
    assert whole.content == before
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=12))
    assert read(make(name), pieces_of(text, places)) == whole
    assert read(make(name), text) == whole


EXAMPLE: list[Call] = [("get_weather", {"text": 'a "b"\n', "count": 3, "items": [1, "x"]}), ("f", {})]


@pytest.mark.parametrize("name", WRITERS)
def test_every_place_to_cut_an_answer(name: str) -> None:
    text = "I will look.\n" + WRITERS[name](EXAMPLE)
    whole = make(name).parse(text)
    assert calls_of(whole) == EXAMPLE and whole.content == "I will look."
    for place in range(len(text)):
        assert read(make(name), [text[:place], text[place:]]) == whole, text[place:]


@pytest.mark.parametrize("name", WRITERS)
def test_an_answer_that_is_cut_off_has_no_call_that_looks_complete(name: str) -> None:
    text = WRITERS[name]([("get_weather", {"text": "Rome", "count": 3})])
    for place in range(len(text)):
        for call in make(name).parse(text[:place]).calls:
            assert not call.complete or json.loads(call.arguments) == {"text": "Rome", "count": 3}


FRAGMENTS = [
    *["<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=text>", "</parameter>", "<arg_key>"],
    *["text</arg_key>", "<arg_value>", "</arg_value>", "<minimax:tool_call>", '<invoke name="f">', "</invoke>"],
    *['<parameter name="count">', "</minimax:tool_call>", "<｜DSML｜function_calls>", '<｜DSML｜invoke name="f">'],
    *DEEPSEEK.values(),
    *["function", "f", "```json", "```", "{", "}", '{"a": 1}', "1", "null", "x", "\n", " ", "<", "</", "😀", "\ud83d"],
    *[
        "<|start|>assistant",
        "<|channel|>analysis",
        "<|channel|>final",
        "<|channel|>commentary",
        "<|message|>",
        "<|end|>",
    ],
    *[" to=functions.f", "<|call|>", "<|constrain|>json", "<|return|>", "functools", "<|tool_call|>", "[", "]", ","],
    *['{"name": "f", "arguments": {}}', "<|tool_call>", "call:f{", "text:", '<|"|>', "<tool_call|>", "<escape>"],
    *["<start_function_call>", "<tool_calls>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>f:0"],
    "<|tool_call_argument_begin|>",
]


@pytest.mark.parametrize("name", WRITERS)
@settings(deadline=None, max_examples=30)
@given(answer=cut(st.lists(st.sampled_from(FRAGMENTS), max_size=20).map("".join)), known=st.booleans())
def test_any_text_reads_the_same_in_any_pieces(name: str, answer: tuple[str, list[str]], known: bool) -> None:
    text, pieces = answer
    offered = OFFERED if known else None
    whole = make(name, offered).parse(text)
    assert read(make(name, offered), pieces) == whole
    if not whole.calls and name not in ("openai", "cohere_command3"):
        assert whole.content == text
    rest = iter(text)
    assert all(character in rest for character in whole.content), "content is in the order of the text, nothing twice"
    for call in whole.calls:
        if call.complete:
            assert isinstance(json.loads(call.arguments), dict)


@pytest.mark.parametrize("name", WRITERS)
def test_instructions_for_templates_without_tools_show_a_call(name: str) -> None:
    written = notation_of(name).replace("a tool's name", "f").replace("a parameter", "text")
    written = written if name == "cohere_command3" else written.replace("tool_name", "f")
    (call,) = make(name).parse(written.partition(":\n")[2].replace("a_parameter", "text")).calls
    assert (call.name, json.loads(call.arguments)) == ("f", {"text": "its value"})


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("text", "12", "12"),
        ("text", "true", "true"),
        ("text", '"quoted"', '"quoted"'),
        ("text", " spaced ", " spaced "),
        ("maybe", "null", None),
        ("maybe", "12", "12"),
        ("count", "12", 12),
        ("count", "twelve", "twelve"),
        ("is_on", "True", True),
        ("more", "None", None),
        ("more", '{"a": [1]}', {"a": [1]}),
        ("ratio", "1e999", "1e999"),
        ("unknown", "12", 12),
        ("unknown", "some text", "some text"),
        ("unknown", '"quoted"', '"quoted"'),
    ],
)
def test_schemas_tell_numbers_from_strings(key: str, written: str, value: Any) -> None:
    text = f"<tool_call>f\n<arg_key>{key}</arg_key>\n<arg_value>{written}</arg_value>\n</tool_call>"
    assert calls_of(make("glm45").parse(text)) == [("f", {key: value})]
    offered = {"f": {"properties": {"of": {"enum": [1, 2]}, "or": {"enum": ["1", "2"]}}}}
    text = "<tool_call>\n<function=f>\n<parameter=of>\n1\n</parameter>\n<parameter=or>\n1\n</parameter>\n</function>"
    assert calls_of(make("qwen3_coder", offered).parse(text)) == [("f", {"of": 1, "or": "1"})]


def test_strings_in_tags_are_streamed_as_they_arrive() -> None:
    parser = make("qwen3_coder")
    assert parser.push("<tool_call>\n<function=f>\n<parameter=text>\nso") == [
        CallStart(0, "call_0", "f"),
        CallArguments(0, '{"text": "so'),
    ]
    assert parser.push(' "far"\n') == [CallArguments(0, ' \\"far\\"')]
    assert parser.push("on\n</para") == [CallArguments(0, "\\non")]
    assert parser.push("meter>\n</function>") == [CallArguments(0, '"}'), CallEnd(0, True)]
    assert parser.push("\n</tool_call>") == [] and parser.finish() == []


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("part", ["<", "<|", "\n", "own"])
def test_no_text_takes_more_than_linear_time(name: str, part: str) -> None:
    part = WRITERS[name](EXAMPLE)[:20] if part == "own" else part
    text = part * (30_000 // len(part))
    seconds, answer = test_tools.seconds_to_read(make(name), text)
    assert len(answer.content) + sum(len(call.arguments) for call in answer.calls) <= len(text) + 10
    assert seconds < 2


def test_the_id_of_a_call_of_kimi_is_its_own() -> None:
    answer = make_tool_parser("kimi_k2").parse(kimi_k2([("f", {}), ("get_weather", {})]))
    assert [call.id for call in answer.calls] == ["functions.f:0", "functions.get_weather:1"]
    unnumbered = kimi_k2([("f", {})]).replace("functions.f:0", "f")
    assert make_tool_parser("kimi_k2").parse(unnumbered).calls[0].id.startswith("call_")


@pytest.mark.parametrize("name", ["kimi_k2", "deepseek_v31", "deepseek_v3"])
def test_a_broken_call_in_a_section_does_not_hide_the_next(name: str) -> None:
    text = WRITERS[name]([("f", {"count": 1}), ("f", {"count": 2})]).replace('{"count": 1}', '{"count": 1')
    broken, good = make(name).parse(text).calls
    assert not broken.complete and (good.complete, good.arguments) == (True, '{"count": 2}')


def test_other_ways_of_dots_and_minicpm() -> None:
    call = '<dots_function_call>{"name": "f", "arguments": {"count": 1}}</dots_function_call>'
    assert calls_of(make("dots").parse(call + call)) == [("f", {"count": 1})] * 2
    section = (
        '<function name="f"><param name="text"><![CDATA[a </param> b]]></param><param name="count">1</param></function>'
    )
    assert calls_of(make("minicpm5").parse(section)) == [("f", {"text": "a </param> b", "count": 1})]


def test_other_places_of_xlam() -> None:
    calls = objects([("f", {"count": 1})])
    for before in ("<think>Hm.</think>", "I look.[TOOL_CALLS]", "I look.\n", "I look.\n```json\n"):
        for pieces in ([before + calls], before + calls):
            answer = read(make("xlam"), pieces)
            assert calls_of(answer) == [("f", {"count": 1})]
            assert answer.content == ("I look." if "look" in before else before)
    assert make("xlam").parse(f"see {calls}").calls == []


def test_gemma_may_leave_out_commas_after_strings() -> None:
    text = "<start_function_call>call:f{text:<escape>NYC<escape>count:3,maybe:<escape>x<escape>}<end_function_call>"
    assert calls_of(make("functiongemma").parse(text)) == [("f", {"text": "NYC", "count": 3, "maybe": "x"})]


# Harmony: reasoning, content and calls in one format.

ANALYSIS = "<|channel|>analysis<|message|>I think.\nSo.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>The <b>answer</b>."
CALL = '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"text": "x"}<|call|>'


def harmony_reader(prompt: str = "<|start|>assistant", calls: bool = True) -> AnswerReader:
    return AnswerReader(make_reasoning_split("openai_gptoss", prompt), make("openai") if calls else None)


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "called"),
    [
        (ANALYSIS + FINAL, "I think.\nSo.", "The <b>answer</b>.", []),
        (ANALYSIS + FINAL + "<|return|>", "I think.\nSo.", "The <b>answer</b>.", []),
        (ANALYSIS + CALL, "I think.\nSo.", "", [("f", {"text": "x"})]),
        (ANALYSIS + CALL.removesuffix("<|call|>"), "I think.\nSo.", "", [("f", {"text": "x"})]),
        (' to=functions.f<|channel|>commentary json<|message|>{"text": "x"}', "", "", [("f", {"text": "x"})]),
        (
            "<|channel|>commentary<|message|>Let me look.<|end|>" + CALL + CALL,
            "",
            "Let me look.",
            [("f", {"text": "x"}), ("f", {"text": "x"})],
        ),
        ("<|start|>assistant" + ANALYSIS + "<|start|>assistant" + ANALYSIS, "I think.\nSo.\nI think.\nSo.", "", []),
        ("<|channel|>analysis<|message|>cut off", "cut off", "", []),
        ("<|channel|>analysis<|message|>no end" + FINAL, "no end", "The <b>answer</b>.", []),
        ("An answer without marks, a < b.", "", "An answer without marks, a < b.", []),
        ("<|channel|>analysis to=browser.search<|message|>{}<|call|>", "", "", [("browser.search", {})]),
    ],
)
def test_harmony(text: str, reasoning: str, content: str, called: list[Call]) -> None:
    for place in range(len(text) + 1):
        reader = harmony_reader()
        answer = gather(reader.push(text[:place]) + reader.push(text[place:]) + reader.finish())
        assert (answer.reasoning, answer.content, calls_of(answer)) == (reasoning, content, called)
    alone = make("openai").parse(text)  # without the reasoning parser
    assert (alone.reasoning, alone.content, calls_of(alone)) == (reasoning, content, called)


def test_harmony_is_streamed() -> None:
    reader = harmony_reader()
    assert reader.needs_special_tokens
    assert reader.push("<|channel|>ana") == []
    assert reader.push("lysis<|message|>I th") == [Reasoning("I th")]
    assert reader.push("ink.<|en") == [Reasoning("ink.")]
    assert reader.push("d|><|start|>assistant to=functions.f<|channel|>commentary<|message|>") == []
    assert reader.push('{"text": "so') == [CallStart(0, "call_0", "f"), CallArguments(0, '{"text": "so')]
    assert reader.push(' far"}') == [CallArguments(0, ' far"}'), CallEnd(0, True)]
    assert reader.push("<|call|>") == [] and reader.finish() == []


@settings(deadline=None, max_examples=100)
@given(answer=cut(st.lists(st.sampled_from(FRAGMENTS), max_size=20).map("".join)), opened=st.booleans())
def test_any_harmony_reads_the_same_in_any_pieces(answer: tuple[str, list[str]], opened: bool) -> None:
    text, pieces = answer
    prompt = "<|start|>assistant" if opened else ""
    for calls in (True, False):
        reader = harmony_reader(prompt, calls)
        deltas = [delta for piece in pieces for delta in reader.push(piece)] + reader.finish()
        assert gather(deltas) == harmony_reader(prompt, calls).parse(text)


def test_a_required_call_of_gpt_oss_is_json_in_the_final_channel() -> None:
    split = make_reasoning_split("openai_gptoss", "…<|start|>assistant")
    assert type(split).opens("…<|start|>assistant") and not type(split).opens("…<|message|>")
    text = f'{ANALYSIS}<|start|>assistant{type(split).closing}[{{"name": "f", "parameters": {{}}}}]'
    assert calls_of(AnswerReader(split, make("json")).parse(text)) == [("f", {})]


# Reasoning.


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("granite", "Here is my thought process: I think. Here is it. Here is my response: Yes."),
        ("granite", "Here's my thought process:\nI think. Here is it.\nHere's my response:\nYes."),
        ("cohere_command3", "<|START_THINKING|>I think. Here is it.<|END_THINKING|>Yes."),
        ("seed_oss", "<seed:think>I think. Here is it.</seed:think>Yes."),
        ("gemma4", "<|channel>thought\nI think. Here is it.<channel|>Yes."),
        ("glm45", "\n<think>I think. Here is it.</think>\nYes."),
        ("deepseek_v3", "<think>I think. Here is it.</think>\n\nYes."),
        ("minimax_m2", "<think>\nI think. Here is it.\n</think>\n\nYes."),
        ("poolside_v1", "<think>\nI think. Here is it.\n</think>\n\nYes."),
    ],
)
def test_reasoning_of_model_families(name: str, text: str) -> None:
    for place in range(len(text) + 1):
        answer = read(make_reasoning_split(name), [text[:place], text[place:]])
        assert (answer.reasoning, answer.content) == ("I think. Here is it.", "Yes.")


def test_reasoning_that_stays_in_the_content() -> None:
    split = make_reasoning_split("minimax_m2_append_think", "]~b]ai\n<think>\n")
    answer = split.parse("Hm.\n</think>\n\nYes.")
    assert (answer.reasoning, answer.content) == ("", "<think>Hm.\n</think>\n\nYes.")


def test_marks_around_an_answer_of_cohere_are_dropped() -> None:
    reader = AnswerReader(make_reasoning_split("cohere_command3"), make("cohere_command3"))
    answer = reader.parse("<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>")
    assert (answer.reasoning, answer.content, answer.calls) == ("Hm.", "Yes.", [])


@pytest.mark.parametrize("name", REASONING_PARSERS)
def test_an_answer_without_reasoning_is_content(name: str) -> None:
    split = make_reasoning_split(name)
    assert (split.parse("Here is the answer.").reasoning, split.parse("").content) == ("", "")
    assert make_reasoning_split(name).parse("Here is the answer.").content == "Here is the answer."


# Which parser a chat template calls for.


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        ("<|start|>assistant<|channel|>final<|message|>", "openai"),
        ("<tool_call>\n<function=example_function_name>\n<parameter=x>", "qwen3_coder"),
        ("<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>", "glm45"),
        ("<minimax:tool_call>\n<invoke name=", "minimax_m2"),
        ("'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool", "deepseek_v3"),
        ("'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ tool['function']['name'] + '<｜tool▁sep｜>'", "deepseek_v31"),
        ("'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+tool['type']+'<｜tool▁sep｜>'", "deepseek_v3"),
        ("<start_function_call>call:", "functiongemma"),
        ("<|tool_call>call:", "gemma4"),
        ("List of tools: <|tool_list_start|>[", "lfm2"),
        ("<tool_calls>\n<tool_call>f<tool_sep>\n<arg_key>", "hy_v3"),
        ("<｜DSML｜tool_calls>", "deepseek_v4"),
        ("<tool_call>\n{{name}}\n</tool_call>", "hermes"),
        ("no marks", "json"),
        (None, "json"),
    ],
)
def test_the_parser_is_chosen_by_the_chat_template(template: str | None, parser: str) -> None:
    assert guess_parser(template) == parser
    assert guess_reasoning_parser(template) == ("openai_gptoss" if parser == "openai" else None)


def test_a_plan_gives_its_parser_the_schemas() -> None:
    class Function:
        name, description, parameters = "f", None, SCHEMA

    parser = ToolPlan([Function()], parser="glm45").make_parser()
    assert parser is not None
    text = "<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>12</arg_value>\n</tool_call>"
    (call,) = parser.parse(text).calls
    assert json.loads(call.arguments) == {"text": "12"}
