"""Joules are shared out completely: what requests were charged, what is carried and idle is what the meter shows."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.energy.account import EnergyAccount

IDLE, BUSY = 30.0, 150.0


class World:
    """A machine with a known power draw, an account of it, and what each request was told."""

    def __init__(self) -> None:
        self.account = EnergyAccount()
        self.now = self.joules = 0.0
        self.told: dict[str, float] = defaultdict(float)
        self.ended: set[str] = set()
        self.sample()

    def sample(self) -> None:
        self.account.sample(self.joules, self.now)
        self.take()

    def rest(self, seconds: float, watts: float = IDLE) -> None:
        self.now += seconds
        self.joules += watts * seconds

    def step(self, work: dict[str, int], num_decodes: int, seconds: float, watts: float = BUSY) -> None:
        self.now += seconds
        self.joules += watts * seconds
        opened = [request not in self.ended for request in work]
        self.account.step(list(work), list(work.values()), num_decodes, seconds, opened)
        self.take()

    def end(self, request: str) -> None:
        self.sample()
        self.ended.add(request)
        self.account.end([request])

    def take(self) -> None:
        for request, joules in zip(*self.account.take(), strict=True):
            assert request not in self.ended, "an ended request was charged"
            self.told[request] += joules

    def check(self) -> None:
        account = self.account
        account.sample(self.joules, self.now)
        self.take()
        assert account.total == pytest.approx(self.joules, abs=1e-6)
        assert sum(self.told.values()) + account.carried + account.idle == pytest.approx(self.joules, abs=1e-6)
        assert min([account.prompt, account.decode, account.idle, *self.told.values()]) >= -1e-9


steps = st.tuples(
    st.lists(st.integers(1, 64), min_size=1, max_size=5),  # tokens of each request
    st.integers(0, 5),  # how many of them are decodes
    st.floats(0.001, 0.5),  # seconds
    st.floats(20, 400),  # watts
    st.floats(0, 0.3),  # pause after it
    st.sampled_from(["", "sample", "end"]),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(steps, max_size=30))
def test_whatever_happens_the_parts_are_the_whole(history: list[tuple]) -> None:
    world = World()
    first = 0  # requests are numbered, the oldest ends first
    for counts, decodes, seconds, watts, pause, then in history:
        work = {str(first + i): 1 if i < decodes else count for i, count in enumerate(counts)}
        world.step(work, min(decodes, len(work)), seconds, watts)
        world.rest(pause)
        if then == "sample":
            world.sample()
        elif then == "end":
            world.end(str(first))
            first += 1
    world.check()


def test_after_the_last_sample_nothing_is_carried() -> None:
    world = World()
    world.rest(1.0)
    world.sample()
    for number in range(50):
        world.step({"a": 1, "b": 1}, 2, 0.02, watts=100 + number)
    world.end("a")
    world.end("b")
    world.check()
    assert abs(world.account.carried) < 1e-9
    assert world.told["a"] == pytest.approx(world.told["b"])


def test_idle_time_between_steps_is_not_charged_to_requests() -> None:
    world = World()
    world.rest(5.0)
    world.sample()  # measures idle power
    for _ in range(20):
        world.step({"a": 1}, 1, 0.01)
        world.rest(0.09)
    world.end("a")
    world.rest(3.0)
    world.check()
    assert world.told["a"] == pytest.approx(20 * 0.01 * BUSY, rel=1e-6)
    assert world.account.idle == pytest.approx((5 + 20 * 0.09 + 3) * IDLE, rel=1e-6)


def test_work_is_shared_by_the_measured_cost_of_tokens() -> None:
    """A prompt token costs a tenth of a decode here; both kinds are measured alone first, then they share a step."""
    world = World()
    for _ in range(40):
        world.step({"d": 1}, 1, 0.010)
        world.step({"p": 100}, 0, 0.100)
    world.sample()
    before = dict(world.told)
    world.step({"d": 1, "p": 100}, 1, 0.110)
    world.sample()
    assert world.told["d"] - before["d"] == pytest.approx(0.010 * BUSY, rel=0.05)
    assert world.told["p"] - before["p"] == pytest.approx(0.100 * BUSY, rel=0.05)
    world.check()


def test_what_ended_requests_still_compute_goes_to_the_others() -> None:
    world = World()
    world.step({"a": 1, "b": 1}, 2, 0.1)
    world.end("a")
    told = world.told["a"]
    world.step({"a": 1, "b": 1}, 2, 0.1)  # a's row was in flight already
    world.end("b")
    world.check()
    assert world.told["a"] == told
    assert world.told["b"] == pytest.approx(3 * told)


def test_a_charge_does_not_wait_for_a_sample() -> None:
    world = World()
    world.step({"a": 1}, 1, 0.1)
    world.sample()
    world.step({"a": 1}, 1, 0.1)
    assert world.told["a"] == pytest.approx(0.2 * BUSY)
