"""JSON that arrives in pieces, against the standard library's parser."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.output.parsers.tools.json_scanner import JsonScanner
from tests.output.parsers.cuts import cut

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
documents = st.builds(
    lambda value, ascii, indent: json.dumps({"value": value}, ensure_ascii=ascii, indent=indent),
    values,
    st.booleans(),
    st.sampled_from([None, 0, 2]),
)
soup = st.lists(
    st.sampled_from(
        [*'{}[]:,"\\ \n', '"a"', '":', "\\u12", "\\ud83d", "1", "-", "0", ".5", "e9", "true", "None", "é😀"]
    ),
    max_size=24,
).map(lambda parts: '{"a":' + "".join(parts))


def scan(pieces: list[str]) -> tuple[JsonScanner, str, int]:
    scanner, written, read = JsonScanner(), "", 0
    for piece in pieces:
        read += scanner.feed(piece, 0)
        written += scanner.take()
    return scanner, written, read


def is_json(text: str) -> bool:
    def refuse(word: str) -> None:
        raise ValueError(word)

    try:
        json.loads(text, parse_constant=refuse)
    except ValueError:
        return False
    return True


@settings(deadline=None)
@given(cut(documents))
def test_valid_json_passes_unchanged(document: tuple[str, list[str]]) -> None:
    text, pieces = document
    scanner, written, read = scan(pieces)
    assert scanner.done and not scanner.failed
    assert (written, read) == (text, len(text))


@settings(deadline=None)
@given(documents, st.text(min_size=1))
def test_stops_where_the_value_ends(text: str, rest: str) -> None:
    scanner = JsonScanner()
    assert scanner.feed(text + rest, 0) == len(text)
    assert scanner.done


@settings(deadline=None)
@given(cut(soup))
def test_it_accepts_exactly_valid_json(document: tuple[str, list[str]]) -> None:
    text, pieces = document
    scanner, written, read = scan(pieces)
    if scanner.done:
        assert is_json(written)
    if is_json(text):
        assert scanner.done
        assert written == text.rstrip()
    whole, whole_written, whole_read = scan([text])
    assert (scanner.done, scanner.failed, written) == (whole.done, whole.failed, whole_written)
    if not scanner.failed:
        assert scanner.take_pending() == whole.take_pending()
        assert read == whole_read


@pytest.mark.parametrize(
    "written, value",
    [
        ('{"code": "a\nb\tc\x01"}', {"code": "a\nb\tc\x01"}),
        (r'{"pattern": "\d+\.\u00e9\u12"}', {"pattern": "\\d+\\.é\\u12"}),
        (r'{"said": "it\'s"}', {"said": "it\\'s"}),
        ('{"a": True, "b": [False, None]}', {"a": True, "b": [False, None]}),
    ],
)
def test_unambiguous_mistakes_are_repaired(written: str, value: object) -> None:
    for pieces in ([written], list(written)):
        scanner, mended, _ = scan(pieces)
        assert scanner.done
        assert json.loads(mended) == value


@pytest.mark.parametrize(
    "text",
    ["{a", '{"a" 1', '{"a": 01}', '{"a": 1.}', '{"a": NaN}', '{"a": 1,}', "[1 2", '{"a": tru}', "[}", '{"a": "b"c'],
)
def test_anything_else_fails(text: str) -> None:
    assert scan([text])[0].failed
    assert scan(list(text))[0].failed
