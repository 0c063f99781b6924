"""After any sequence of events: removed replicas get nothing, the load is that of open requests, memory is bounded."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quire.router import OpenRequest
from tests.router.prompts import Clock, request, router_of, words

NAMES = ("a", "b", "c")
MAX_INDEX = 40


class RouterInvariants(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.router = router_of(clock=self.clock, max_index_blocks=MAX_INDEX)
        self.open: list[OpenRequest] = []
        self.over: list[OpenRequest] = []
        self.alive: set[str] = set()

    @rule(name=st.sampled_from(NAMES), blocks=st.integers(1, 60))
    def adds(self, name: str, blocks: int) -> None:
        if name not in self.alive:
            self.router.add(name, blocks, max_rows=2)
            self.alive.add(name)

    @rule(name=st.sampled_from(NAMES))
    def removes(self, name: str) -> None:
        self.router.remove(name)
        there = [opened for opened in self.open if opened.replica == name]
        assert all(opened.is_over for opened in there)
        self.open = [opened for opened in self.open if opened.replica != name]
        self.over += there
        self.alive.discard(name)

    @precondition(lambda self: self.alive)
    @rule(
        texts=st.lists(st.integers(1, 4), min_size=1, max_size=4),
        rest=st.integers(0, 40),
        sequences=st.integers(1, 3),
    )
    def sends(self, texts: list[int], rest: int, sequences: int) -> None:
        prompt = [words(text, 48) for text in texts]
        asked = request(*prompt, words(9, rest), sequences=sequences)
        name = self.router.choose(asked)
        assert name in self.alive
        self.open.append(self.router.launched(asked, name))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), more=st.integers(0, 50), cached=st.one_of(st.none(), st.integers(0, 16)))
    def progresses(self, data: st.DataObject, more: int, cached: int | None) -> None:
        opened = data.draw(st.sampled_from(self.open))
        self.router.progress(opened, opened.generated + more, cached)
        assert opened.started is not None

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def ends(self, data: st.DataObject) -> None:
        opened = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        self.router.finished(opened)
        self.over.append(opened)

    @precondition(lambda self: self.over)
    @rule(data=st.data())
    def gets_late_events(self, data: st.DataObject) -> None:
        opened = data.draw(st.sampled_from(self.over))
        self.router.progress(opened, 1000)
        self.router.finished(opened)

    @rule(seconds=st.floats(0, 100))
    def waits(self, seconds: float) -> None:
        self.clock.now += seconds

    @invariant()
    def load_matches_open_requests(self) -> None:
        stats = self.router.stats()
        assert {one.name for one in stats} == self.alive == set(self.router.alive)
        for one in stats:
            requests = [opened for opened in self.open if opened.replica == one.name]
            assert one.open_requests == len(requests)
            assert one.rows == sum(opened.request.sequences for opened in requests)
            assert one.queued_tokens == sum(opened.uncached for opened in requests if opened.started is None)
            assert one.kv_tokens == sum(opened.request.prompt_tokens + opened.generated for opened in requests)
            assert one.wait_seconds >= 0
            assert one.prefill_speed > 0
        assert sum(one.known_blocks for one in stats) <= MAX_INDEX

    def teardown(self) -> None:
        for opened in self.open:
            self.router.finished(opened)
        for one in self.router.stats():
            assert (one.open_requests, one.rows, one.queued_tokens, one.kv_tokens, one.wait_seconds) == (0, 0, 0, 0, 0)


TestRouterInvariants = RouterInvariants.TestCase
TestRouterInvariants.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
