"""Splits a text into pieces, and parses it piece by piece."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from hypothesis import strategies as st

from quire.output.parsers.deltas import Delta, ParsedAnswer, gather
from quire.output.parsers.incremental import IncrementalParser


def pieces_of(text: str, cuts: Iterable[int]) -> list[str]:
    places = [0, *sorted(cuts), len(text)]
    return [text[start:end] for start, end in pairwise(places)]


@st.composite
def cut(draw: st.DrawFn, texts: st.SearchStrategy[str]) -> tuple[str, list[str]]:
    """A text and the pieces it arrives in: random ones (some empty), or single characters."""
    text = draw(texts)
    if draw(st.booleans()):
        return text, list(text)
    return text, pieces_of(text, draw(st.lists(st.integers(0, len(text)), max_size=12)))


def stream(machine: IncrementalParser, pieces: Iterable[str]) -> list[Delta]:
    return [delta for piece in pieces for delta in machine.push(piece)] + machine.finish()


def read(machine: IncrementalParser, pieces: Iterable[str]) -> ParsedAnswer:
    return gather(stream(machine, pieces))
