"""Whatever happens in whatever order: nothing goes to the dead, the books are right, and memory is bounded."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quire.router import RoutedFlight, RoutedRequest
from tests.router.prompts import Clock, request, router_of, words

NAMES = ("a", "b", "c")
MAX_INDEX = 40
MAX_SESSIONS = 3


class Books(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.router = router_of(clock=self.clock, max_index_blocks=MAX_INDEX, max_sessions=MAX_SESSIONS)
        self.open: list[RoutedFlight] = []
        self.over: list[RoutedFlight] = []
        self.returned: list[RoutedRequest] = []
        self.homes: dict[str, str] = {}
        self.alive: set[str] = set()

    @rule(name=st.sampled_from(NAMES), blocks=st.integers(1, 60))
    def comes(self, name: str, blocks: int) -> None:
        if name not in self.alive:
            self.router.add(name, blocks, max_rows=2)
            self.alive.add(name)

    @rule(name=st.sampled_from(NAMES))
    def dies(self, name: str) -> None:
        lost = self.router.remove(name)
        there = [flight for flight in self.open if flight.replica == name]
        assert lost.unstarted == [flight.request for flight in there if flight.started is None]
        assert lost.started == [flight.request for flight in there if flight.started is not None]
        self.open = [flight for flight in self.open if flight.replica != name]
        self.over += there
        self.returned += lost.unstarted
        self.alive.discard(name)
        self.homes = {session: home for session, home in self.homes.items() if home != name}

    @precondition(lambda self: self.alive)
    @rule(
        texts=st.lists(st.integers(1, 4), min_size=1, max_size=4),
        rest=st.integers(0, 40),
        session=st.sampled_from(["", "", "s", "t"]),
        samples=st.integers(1, 3),
    )
    def is_asked(self, texts: list[int], rest: int, session: str, samples: int) -> None:
        prompt = [words(text, 48) for text in texts]
        self.launch(request(*prompt, words(9, rest), session=session, samples=samples))

    @precondition(lambda self: self.alive and self.returned)
    @rule()
    def sends_again(self) -> None:
        self.launch(self.returned.pop(0))

    def launch(self, asked: RoutedRequest) -> None:
        name = self.router.choose(asked)
        assert name in self.alive
        assert self.homes.get(asked.session, name) == name
        if asked.session:
            self.homes[asked.session] = name
        self.open.append(self.router.launched(asked, name))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), more=st.integers(0, 50), cached=st.one_of(st.none(), st.integers(0, 16)))
    def gets_on(self, data: st.DataObject, more: int, cached: int | None) -> None:
        flight = data.draw(st.sampled_from(self.open))
        self.router.progress(flight, flight.generated + more, cached)
        assert flight.started is not None

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def ends(self, data: st.DataObject) -> None:
        flight = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        self.router.finished(flight)
        self.over.append(flight)

    @precondition(lambda self: self.over)
    @rule(data=st.data())
    def hears_late(self, data: st.DataObject) -> None:
        flight = data.draw(st.sampled_from(self.over))
        self.router.progress(flight, 1000)
        self.router.finished(flight)

    @rule(seconds=st.floats(0, 100))
    def waits(self, seconds: float) -> None:
        self.clock.now += seconds

    @invariant()
    def books_are_right(self) -> None:
        figures = self.router.figures()
        assert {one.name for one in figures} == self.alive == set(self.router.alive)
        for one in figures:
            flights = [flight for flight in self.open if flight.replica == one.name]
            assert one.open_requests == len(flights)
            assert one.rows == sum(flight.request.samples for flight in flights)
            assert one.queued_tokens == sum(flight.uncached for flight in flights if flight.started is None)
            assert one.kv_tokens == sum(flight.request.prompt_tokens + flight.generated for flight in flights)
            assert one.wait_seconds >= 0
            assert one.prefill_speed > 0
        assert sum(one.known_blocks for one in figures) <= MAX_INDEX

    def teardown(self) -> None:
        for flight in self.open:
            self.router.finished(flight)
        for one in self.router.figures():
            assert (one.open_requests, one.rows, one.queued_tokens, one.kv_tokens, one.wait_seconds) == (0, 0, 0, 0, 0)


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
