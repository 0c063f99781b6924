"""Tool calls in answers: the same whole or in any pieces, and text that is not a call stays text."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import ValidationError
from quire.output.parsers.deltas import CallArguments, CallEnd, CallStart, Content, gather
from quire.output.parsers.tools.base import CallParser, make_tool_parser
from tests.output.parsers.cuts import cut, pieces_of, read, stream
from tests.output.parsers.test_json_scanner import values

OFFERED = {"get_weather", "f", "g.h"}
EVERY = ["hermes", "json", "llama3_json", "mistral", "pythonic"]
"""The others are in test_model_formats.py."""
Call = tuple[str, dict[str, Any]]


def ids() -> Callable[[], str]:
    numbers: Iterator[int] = count()
    return lambda: f"call_{next(numbers)}"


def make(name: str, offered: set[str] | None = OFFERED) -> Any:
    return make_tool_parser(name, offered, ids())


def calls_of(answer: Any) -> list[Call]:
    assert all(call.complete for call in answer.calls)
    assert [call.id for call in answer.calls] == [f"call_{i}" for i in range(len(answer.calls))]
    return [(call.name, json.loads(call.arguments)) for call in answer.calls]


# How a model writes calls in each format.


def written_object(call: Call, key: str = "arguments", ascii: bool = True, indent: int | None = None) -> str:
    return json.dumps({"name": call[0], key: call[1]}, ensure_ascii=ascii, indent=indent)


def hermes(calls: list[Call], ascii: bool) -> str:
    return "\n".join(f"<tool_call>\n{written_object(call, ascii=ascii)}\n</tool_call>" for call in calls)


def generic(calls: list[Call], ascii: bool) -> str:
    body = [{"arguments": arguments, "name": name} for name, arguments in calls]
    return f"\n{json.dumps(body, ensure_ascii=ascii, indent=2)}"


def llama3_json(calls: list[Call], ascii: bool) -> str:
    return "<|python_tag|>" + "; ".join(written_object(call, "parameters", ascii) for call in calls)


def mistral(calls: list[Call], ascii: bool) -> str:
    if ascii:
        return f"[TOOL_CALLS][{', '.join(written_object(call) for call in calls)}]"
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in calls)


def pythonic(calls: list[Call], ascii: bool) -> str:
    show = ascii_repr if ascii else repr
    return "\n[" + ", ".join(f"{n}({', '.join(f'{k}={show(v)}' for k, v in a.items())})" for n, a in calls) + "]"


ascii_repr = ascii
FORMATS = {"hermes": hermes, "json": generic, "llama3_json": llama3_json, "mistral": mistral, "pythonic": pythonic}

prose = st.text(st.characters(exclude_characters="<[{`", exclude_categories=["Cs"]), max_size=20).map(str.strip)
arguments = st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), values, max_size=3)
calls = st.lists(st.tuples(st.sampled_from(sorted(OFFERED)), arguments), min_size=1, max_size=3)


@pytest.mark.parametrize("name", EVERY)
@settings(deadline=None)
@given(before=prose, asked=calls, ascii=st.booleans(), after=prose, data=st.data())
def test_calls_are_found_whole_and_in_pieces(
    name: str, before: str, asked: list[Call], ascii: bool, after: str, data: st.DataObject
) -> None:
    text = before + FORMATS[name](asked, ascii) + ("\n" + after if after else "")
    whole = make(name).parse(text)
    assert calls_of(whole) == asked
    assert whole.content == before + ("\n" + after if after else "")
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=12))
    assert read(make(name), pieces_of(text, places)) == whole
    assert read(make(name), text) == whole


FRAGMENTS = [
    *[
        "<tool_call>",
        "</tool_call>",
        "<tool",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "<|python_tag|>",
        "<|python_start|>",
    ],
    *[
        "<|python_end|>",
        "```json",
        "```",
        "\n",
        " ",
        ";",
        ",",
        "{",
        "}",
        "[",
        "]",
        "(",
        ")",
        "=",
        '"',
        "'",
        "\\",
        "\\u00",
    ],
    *[
        '{"name": "f"',
        ', "arguments": {',
        '"a": 1',
        '"parameters": ',
        "f(",
        "a=1",
        '"x"',
        '"""',
        "None",
        "true",
        "text",
    ],
    *['{"name": "f", "arguments": {}}', '{"name": "nobody", "arguments": {}}', "[f(a=1)]", "😀", "\ud83d", "\\ud83d"],
]


@pytest.mark.parametrize("name", EVERY)
@settings(deadline=None)
@given(answer=cut(st.lists(st.sampled_from(FRAGMENTS), max_size=25).map("".join)), offered=st.booleans())
def test_any_text_reads_the_same_in_any_pieces(name: str, answer: tuple[str, list[str]], offered: bool) -> None:
    text, pieces = answer
    tools = OFFERED if offered else None
    whole = make(name, tools).parse(text)
    assert read(make(name, tools), pieces) == whole
    if not whole.calls:
        assert whole.content == text
    rest = iter(text)
    assert all(character in rest for character in whole.content), "content is in the order of the text, nothing twice"
    for call in whole.calls:
        if call.complete:
            assert isinstance(json.loads(call.arguments), dict)


LOOKALIKES = {
    "hermes": [
        "<tool_call>",
        "<tool_call>get_weather(city='Rome')</tool_call>",
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\ud83d\\"}"}</tool_call>',
        '<tool_call>{"name": f, "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "argu',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        "Use <tool_call> tags, I was told.\n",
    ],
    "json": [
        '{"name": "Ada", "born": 1815}',
        '{"name": "nobody", "arguments": {}}',
        'Send {"name": "f", "arguments": {}} there',
        '```python\nprint({"name": "f"})\n```\n',
        '{\n  "plan": [\n    {"name": "f", "arguments": {}}\n  ]\n}',
        "[1, 2, 3]",
        "{}",
    ],
    "llama3_json": ['<|python_tag|>brave_search.call(query="x")', '{"name": "Ada"}', "{'name': 'f'}", "a;b"],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS]f", "[TOOL_CALLS] f(x)", "[TOOL_CALLS][1]", "[TOOL_CALLS]f[ARGS][1]"],
    "pythonic": [
        "[link](https://x.y)",
        "[]",
        "[f]",
        "[f(1)]",
        "[f(a=open('x'))]",
        "[f(a=__import__('os').system('ls'))]",
        "[f(a=1+1)]",
        "[f(a=f'{1}')]",
        "[f(a={1})]",
        "[f(a={1: 2})]",
        "[f(a=b'x')]",
        "[f(a=1e999)]",
        f"[f(a={'9' * 5000})]",
        f"[f(a=0x{'f' * 5000})]",
        "[f(a=1, a=2)]",
        "[f(**{})]",
        "[f(a=" + "(" * 500,
        "[f(a=" + "-" * 50_000 + "1)]",
        "[f(a='never closed)]",
        "[nobody(a=1)]",
        "see [f(a=1)]",
    ],
}


@pytest.mark.parametrize("name, text", [(name, text) for name, texts in LOOKALIKES.items() for text in texts])
def test_text_that_only_looks_like_a_call_is_content(name: str, text: str) -> None:
    for pieces in ([text], text):
        answer = read(make(name), pieces)
        assert (answer.content, answer.calls) == (text, [])


@pytest.mark.parametrize("name, text", [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}}\n</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "id": [7], "name": "f"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>'),
    ("hermes", '<tool_call>[{"name": "f", "arguments": {"a": 1}}]</tool_call>'),
    ("json", '```json\n{"name": "f", "arguments": {"a": 1}}\n```'),
    ("json", '```\n{"name": "f", "arguments": {"a": 1}}'),
    ("llama3_json", ' {"type": "function", "name": "f", "parameters": {"a": 1}}'),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}'),
    ("mistral", '[TOOL_CALLS] {"name": "f", "arguments": {"a": 1}}'),
    ("mistral", '[TOOL_CALLS]f{"a": 1}'),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"a": 1}'),
    ("pythonic", "<|python_start|>[f(a=1)]<|python_end|>"),
    ("pythonic", "<|tool_call_start|>[f(a=1,),]<|tool_call_end|>"),
    ("pythonic", "[ f ( a = +1 ) ]\n"),
])  # fmt: skip
def test_other_ways_to_write_a_call(name: str, text: str) -> None:
    for pieces in ([text], text):
        answer = read(make(name), pieces)
        assert calls_of(answer) == [("f", {"a": 1})]
        assert answer.content == ""


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral", "json"])
def test_no_arguments_at_all(name: str) -> None:
    opening = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]"}.get(name, "")
    assert calls_of(make(name).parse(opening + '{"name": "f"}')) == [("f", {})]
    assert calls_of(make(name).parse(opening + '{"name": "f", "arguments": null}')) == [("f", {})]


def test_pythonic_values_become_json() -> None:
    text = (
        '[f(from="a\\"b", class=\'c\nd\', n=[1, -2.5, (True, None)], '
        'o={"k": false}, long="""x"y""", e="\\ud83d\\ude00")]'
    )
    for pieces in ([text], text):
        (call,) = read(make("pythonic"), pieces).calls
        assert json.loads(call.arguments) == {
            "from": 'a"b',
            "class": "c\nd",
            "n": [1, -2.5, [True, None]],
            "o": {"k": False},
            "long": 'x"y',
            "e": "😀",
        }


@pytest.mark.parametrize("text, content", [
    ('Here it is: {"name": "f", "parameters": {"a": 1}} More?', "Here it is: More?"),
    ('Here: {"name": "f", "parameters": {"a": 1}};{"name": "f", "parameters": {"a": 1}} I used {f} and {"a": 1}.',
     'Here: I used {f} and {"a": 1}.'),
    ('One [{"name": "f", "parameters": {"a": 1}}]', "One"),
    ('{"name": "f", "parameters": {"a": 1}}\n{"name": "f", "parameters": {"a": 1}}', ""),
])  # fmt: skip
def test_llama_calls_in_mid_line(text: str, content: str) -> None:
    for offered in (OFFERED, None):
        for pieces in ([text], text):
            answer = read(make("llama3_json", offered), pieces)
            assert set(map(str, calls_of(answer))) == {str(("f", {"a": 1}))}
            assert answer.content == content


@pytest.mark.parametrize("text", [
    '{"name": "f", "parameters": {invalid json}',
    'So: {"name": "f", "parameters": {"a": "cut off',
    '<|python_tag|>{"name": "f", "parameters": {"a": so}}',
    '{"plan": {"name": "f", "parameters": {}}}',
    '{"steps": [{"name": "f", "parameters": {}}]}',
])  # fmt: skip
def test_llama_never_yields_arguments_that_are_broken_or_part_of_other_json(text: str) -> None:
    for pieces in ([text], text):
        answer = read(make("llama3_json"), pieces)
        assert (answer.content, answer.calls) == (text, [])


@pytest.mark.parametrize("name, text, content", [
    ("pythonic", "[f(a=b'z'), f(a=1)]", "f(a=b'z')"),
    ("pythonic", "[f(a=1), f(a=1e999)]", "f(a=1e999)"),
    ("pythonic", "<|python_start|>[g.h(a=open('x')), f(a=1)]<|python_end|>", "g.h(a=open('x'))"),
    ("pythonic", "[f(a=1), f(a='x 'y', b='z')]", ", f(a='x 'y', b='z')]"),
    ("olmo3", "<function_calls>f(a=b'z')\nf(a=1)</function_calls>", "f(a=b'z')"),
    ("lfm2", "<|tool_call_start|>[f(a=1), bad(x=b'z')]<|tool_call_end|>", " bad(x=b'z')"),
])  # fmt: skip
def test_a_call_that_cannot_be_read_does_not_hide_those_beside_it(name: str, text: str, content: str) -> None:
    for pieces in ([text], text):
        answer = read(make(name), pieces)
        assert (calls_of(answer), answer.content.strip()) == ([("f", {"a": 1})], content.strip())


@pytest.mark.parametrize("written, arguments", [
    ("a={'urgent', 'bug'}", {"a": ["urgent", "bug"]}),
    ("a=07, b=-05, c=0.5, d=1e05, e=0, f='07'", {"a": 7, "b": -5, "c": 0.5, "d": 1e5, "e": 0, "f": "07"}),
    ("a='sed -n '360,450p' /x.py'", {"a": "sed -n '360,450p' /x.py"}),
    ("a='python3 -c \"from x import y\nprint(y(3*x, b='\\,'))\"', c=1",
     {"a": "python3 -c \"from x import y\nprint(y(3*x, b='\\,'))\"", "c": 1}),
    ("a=['it's', \"b\"], o={'k': 'it's'}", {"a": ["it's", "b"], "o": {"k": "it's"}}),
    ("a='printf a\0b'", {"a": "printf a\0b"}),
    ("a='grep -F \"]\" log.txt'", {"a": 'grep -F "]" log.txt'}),
    (r"a='Martha\'s', b='\"cool\"'", {"a": "Martha's", "b": '"cool"'}),
    ("", {}),
])  # fmt: skip
def test_what_lfm2_writes(written: str, arguments: dict[str, Any]) -> None:
    block = f"[f({written})]<|tool_call_end|>"
    for text in (f"<|tool_call_start|>{block}", f"<|tool_call_start|> {block}", f"<|tool_call_start|>{block}{block}"):
        for pieces in ([text], text):
            answer = read(make("lfm2"), pieces)
            assert (calls_of(answer), answer.content) == ([("f", arguments)], "")
    in_json = f"<|tool_call_start|>[{json.dumps({'name': 'f', 'arguments': arguments})}]<|tool_call_end|>"
    assert calls_of(make("lfm2").parse(in_json)) == [("f", arguments)]


def test_an_unknown_name_is_passed_on_with_markup_and_not_without() -> None:
    assert calls_of(make("hermes").parse('<tool_call>{"name": "nobody", "arguments": {}}</tool_call>')) == [
        ("nobody", {})
    ]
    assert calls_of(make("mistral").parse("[TOOL_CALLS]nobody[ARGS]{}")) == [("nobody", {})]
    assert calls_of(make("llama3_json", None).parse('{"name": "nobody", "parameters": {}}')) == [("nobody", {})]
    assert make("llama3_json").parse('{"name": "nobody", "parameters": {}}').calls == []


def test_arguments_are_streamed_as_they_arrive() -> None:
    parser = make("hermes")
    assert parser.push('Hm. <tool_call>\n{"name": "f", "argu') == [Content("Hm.")]
    assert parser.push('ments": {"a": "so') == [CallStart(0, "call_0", "f"), CallArguments(0, '{"a": "so')]
    assert parser.push(" far\\") == [CallArguments(0, " far")]
    assert parser.push('n"') == [CallArguments(0, '\\n"')]
    assert parser.push("}}\n</tool") == [CallArguments(0, "}"), CallEnd(0, True)]
    assert parser.push("_call>") == []
    assert parser.finish() == []


def test_content_is_not_held_back_longer_than_needed() -> None:
    parser = make("hermes")
    assert parser.push("a < b <to") == [Content("a < b")]
    assert parser.push("ol> c") == [Content(" <tool> c")]
    assert parser.push(" ") == []
    assert parser.finish() == [Content(" ")]


@pytest.mark.parametrize("text, given, rest", [
    ('<tool_call>{"name": "f", "arguments": {"a": "cut off', '{"a": "cut off', ""),
    ('<tool_call>{"name": "f", "arguments": {"a": "x\\', '{"a": "x\\', ""),
    ('<tool_call>{"name": "f", "arguments": {"a": "so: "hi""}}</tool_call>', '{"a": "so: "', 'hi""}}</tool_call>'),
    ('<tool_call>{"name": "f", "arguments": {"a": 1.2.3}}</tool_call>', '{"a": ', "1.2.3}}</tool_call>"),
])  # fmt: skip
def test_a_call_that_breaks_after_it_was_reported_is_marked_and_never_closed(text: str, given: str, rest: str) -> None:
    for pieces in ([text], text):
        answer = read(make("hermes"), pieces)
        assert [(call.arguments, call.complete) for call in answer.calls] == [(given, False)]
        assert answer.content == rest


def test_a_broken_call_does_not_hide_the_next() -> None:
    good = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    for broken in (
        '<tool_call>{"name": }</tool_call>',
        "<tool_call>",
        '<tool_call>{"name": "f, "arguments": {}}',
        "<<tool_",
    ):
        answer = make("hermes").parse(broken + good)
        assert (calls_of(answer), answer.content) == ([("f", {})], broken)


def test_ids() -> None:
    text = '{"name": "f", "arguments": {}}'
    (call,) = make_tool_parser("hermes").parse(f"<tool_call>{text}").calls
    assert re.fullmatch(r"call_[A-Za-z0-9]{24}", call.id)
    (call,) = make_tool_parser("mistral").parse(f"[TOOL_CALLS][{text}]").calls
    assert re.fullmatch(r"[A-Za-z0-9]{9}", call.id)


class ShoutParser(CallParser):
    """A custom format: `CALL name {…}`."""

    tags = ("CALL ",)

    def _calls(self, opener: str) -> Any:
        name = yield from self._take_run(re.compile(r"[a-z]+"))
        if (yield from self._skip_spaces()) == "{":
            yield from self._stream_arguments(name)


def test_a_custom_parser_by_dotted_path() -> None:
    parser: Any = make_tool_parser("tests.output.parsers.test_tools.ShoutParser", None, ids())
    assert calls_of(parser.parse('CALL f {"a": 1}')) == [("f", {"a": 1})]
    with pytest.raises(ValidationError, match="unknown tool-call parser 'hermit'; known: .*hermes, .*jamba, json"):
        make_tool_parser("hermit")


MEGABYTE = 1_000_000
LONG = {
    "hermes": '<tool_call>{"name": "f", "arguments": {"a": "%s"}}</tool_call>',
    "json": '{"name": "f", "arguments": {"a": "%s"}}',
    "llama3_json": '{"name": "f", "parameters": {"a": "%s"}}',
    "mistral": '[TOOL_CALLS]f[ARGS]{"a": "%s"}',
    "pythonic": '[f(a="%s")]',
}


def seconds_to_read(parser: Any, text: str) -> tuple[float, Any]:
    start = time.process_time()
    deltas = stream(parser, [text[i : i + 10] for i in range(0, len(text), 10)])
    return time.process_time() - start, gather(deltas)


@pytest.mark.parametrize("name", EVERY)
def test_a_megabyte_of_arguments_in_ten_byte_pieces(name: str) -> None:
    value = "some text, \\n, \\u00e9; " * (MEGABYTE // 23)
    seconds, answer = seconds_to_read(make(name), LONG[name] % value)
    assert calls_of(answer) == [("f", {"a": json.loads(f'"{value}"')})]
    assert seconds < 2


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize(
    "part", ["<", " ", "\n", "[", "\n{", '{"name":', "<tool_call>", '"', "\\", "<tool_call>{", "[f("]
)
def test_no_text_takes_more_than_linear_time(name: str, part: str) -> None:
    text = part * (MEGABYTE // 10 // len(part))
    seconds, answer = seconds_to_read(make(name), text)
    assert answer.content == text
    assert seconds < 2
