"""A request's states: which transitions are legal, and which tokens it has."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from quire.messages.request import NewRequest, Request, RequestState
from quire.messages.sampling import SamplingParams

LEGAL = {
    ("waiting", "loading"), ("waiting", "compiling"), ("waiting", "running"), ("waiting", "finished"),
    ("loading", "waiting"), ("loading", "running"), ("loading", "finished"),
    ("waiting", "adapting"), ("adapting", "waiting"), ("adapting", "finished"),
    ("compiling", "waiting"), ("compiling", "finished"),
    ("waiting", "adapting"), ("adapting", "waiting"), ("adapting", "finished"),
    ("running", "preempted"), ("running", "waiting"), ("running", "finished"),
    ("preempted", "loading"), ("preempted", "running"), ("preempted", "waiting"), ("preempted", "finished"),
}  # fmt: skip


def made(**fields: object) -> NewRequest:
    return NewRequest(**{"id": "r", "prompt": [1, 2, 3], "params": SamplingParams(), "limit": 9, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("old", "new"), list(itertools.product(RequestState, RequestState)), ids=lambda state: state.value
)
def test_transitions(old: RequestState, new: RequestState) -> None:
    request = Request(made(), 2, 0)
    request.state = old
    if (old.value, new.value) in LEGAL:
        request.move(new)
        assert request.state is new
    else:
        with pytest.raises(RuntimeError, match=f"r/2 cannot go from {old.value} to {new.value}"):
            request.move(new)
        assert request.state is old


def test_a_new_request_is_waiting_and_holds_nothing() -> None:
    request = Request(made(keys=[b"k"]), 1, 5)
    assert (request.state, request.row, request.blocks, request.key) == (RequestState.WAITING, -1, [], ("r", 1))
    assert request.known == 3 and not request.is_finished
    assert request.keys == [b"k"] and request.keys is not request.source.keys


def test_tokens_span_prompt_and_output() -> None:
    request = Request(made(prompt=[1, 2, 3]), 0, 0)
    request.output += [4, 5, 6]
    everything = [1, 2, 3, 4, 5, 6]
    for start, stop in itertools.combinations(range(7), 2):
        assert request.tokens(start, stop) == everything[start:stop]
    assert request.known == 6


@pytest.mark.parametrize(
    ("ignore_eos", "eos", "own", "ids"),
    [
        (False, [7, 8], None, [7, 8]),
        (False, [7], [5, 7], [7, 5]),
        (True, [7], [5], [5]),
        (True, [7], [7], [7]),
        (True, [7], None, []),
    ],
)
def test_stop_ids(ignore_eos: bool, eos: list[int], own: list[int] | None, ids: list[int]) -> None:
    assert made(eos_ids=eos, params=SamplingParams(ignore_eos=ignore_eos, stop_token_ids=own)).stop_ids == ids


def test_a_new_request_round_trips_through_bytes() -> None:
    source = made(
        keys=[b"\0\xff" * 16], bad_words=[[1, 2]], salt="é", seed=2**64 - 1, priority=-4, arrival=1.5, reads_cache=False
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(source), type=NewRequest) == source
