"""Stop strings, against the definition: the first moment at which the text so far contains one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire import SamplingParams
from quire.messages.outputs import Finished
from quire.messages.request import NewRequest
from quire.output.tracked import StopStrings, TrackedSequence

PIECES = st.lists(st.text("abc", max_size=4), max_size=12)
STOPS = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4)


def first_stop(pieces: list[str], stops: list[str]) -> tuple[int, str, int] | None:
    """(piece that completes it, stop string, its end): the earliest end, ties by list order."""
    for count in range(1, len(pieces) + 1):
        text = "".join(pieces[:count])
        ends = [
            (end, order, stop)
            for order, stop in enumerate(stops)
            for end in range(len(stop), len(text) + 1)
            if text[end - len(stop) : end] == stop
        ]
        if ends:
            end, _, stop = min(ends)
            return count - 1, stop, end
    return None


@given(pieces=PIECES, stops=STOPS, include=st.booleans())
def test_the_first_string_to_complete_is_found(pieces: list[str], stops: list[str], include: bool) -> None:
    watcher, text, found = StopStrings(stops, include), "", None
    for at, piece in enumerate(pieces):
        text += piece
        hit = watcher.find(text, len(piece))
        if hit is not None:
            found = (at, hit[0], hit[1])
            break
    expected = first_stop(pieces, stops)
    if expected is not None:
        at, stop, end = expected
        expected = (at, stop, end if include else end - len(stop))
    assert found == expected


def test_text_that_ends_in_no_prefix_of_a_stop_string_is_not_searched() -> None:
    class Unsearched(str):
        def find(self, *_: object) -> int:
            raise AssertionError("searched")

    watcher = StopStrings(["stop", "end."], include=False)
    assert watcher.find(Unsearched("here we sto"), 3) is None
    assert watcher.find("here we stop", 1) == ("stop", 8)


class _Pieces:
    """A vocabulary whose token i is the i-th piece."""

    def __init__(self, pieces: list[str]) -> None:
        self._pieces = pieces

    def detokenizer(self, *_: object) -> _Pieces:
        return self

    def push(self, tokens: list[int]) -> str:
        return "".join(self._pieces[token] for token in tokens)

    def flush(self) -> str:
        return ""


@given(pieces=PIECES, stops=STOPS, include=st.booleans(), least=st.integers(0, 4), by=st.integers(1, 3))
def test_a_stream_never_shows_text_that_is_cut_off_later(
    pieces: list[str], stops: list[str], include: bool, least: int, by: int
) -> None:
    """Tokens arrive one or several at a time; what has been shown is always a prefix of the final text."""
    params = SamplingParams(
        stop=list(stops), include_stop_str_in_output=include, min_tokens=least, max_tokens=max(least, len(pieces), 1)
    )
    sample = TrackedSequence(NewRequest("r", [0], params, limit=100), 0, _Pieces(pieces))  # type: ignore[arg-type]
    shown, joined, found = [], "", None
    for start in range(0, len(pieces), by):
        tokens = list(range(start, min(start + by, len(pieces))))
        found = sample.append(tokens, None)
        if found is not None:
            break
        view = sample.view(delta=True)
        joined += view.text
        shown.append(joined)
    if found is None:
        sample.close("length", None)
    else:
        sample.close("stop", found[0])
    joined += sample.view(delta=True).text
    assert joined == sample.view(delta=False).text
    assert all(joined.startswith(earlier) for earlier in shown)
    # Matches that complete within the first `least` tokens do not count.
    text, ignored = "".join(pieces), len("".join(pieces[:least]))
    ends = [
        (end, order, stop)
        for order, stop in enumerate(stops)
        for end in range(max(len(stop), ignored + 1), len(text) + 1)
        if text[end - len(stop) : end] == stop
    ]
    if ends:
        end, _, stop = min(ends)
        assert found is not None and found[0] == stop
        assert joined == text[: end if include else end - len(stop)]
    else:
        assert found is None and joined == text


def test_a_stop_token_has_no_text() -> None:
    params = SamplingParams(stop_token_ids=[2])
    sample = TrackedSequence(NewRequest("r", [0], params, limit=100), 0, _Pieces(["a", "b", "END"]))  # type: ignore[arg-type]
    assert sample.append([0], None) is None
    assert sample.append([1, 2], Finished(("r", 0), "stop", 2)) is None
    sample.close("stop", 2)
    view = sample.view(delta=False)
    assert (view.text, view.token_ids, view.stop_reason) == ("ab", [0, 1, 2], 2)
