"""Grammars of several tenants: turns, shares of the processes, and limits."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.engine.grammar.grammars import Grammars
from quire.engine.grammar.tenants import TenantForms
from quire.errors import BusyError
from tests.engine.fork_server import SharedForkServer, grammars_of

PROMPT = [20 + 3 * i for i in range(30)]


class FakeMatcher:
    """A matcher as `TenantForms` sees it."""

    def __init__(self, form: str, users: set[str]) -> None:
        self.form = form
        self.users = users
        self.is_compiled = False


class Queue:
    """Requests of tenants, each with its own form, compiled one after the other."""

    def __init__(self, slots: int = 1, processes: int = 32, most: int | None = None) -> None:
        self.forms = TenantForms(most)
        self.unstarted: list[Any] = []
        self.started: list[Any] = []
        self._slots, self._processes = slots, processes

    def add(self, tenant: str, count: int = 1) -> None:
        for _ in range(count):
            number = len(self.unstarted) + len(self.started)
            name = f"{tenant}{number}"
            self.forms.add(name, tenant, name.encode())
            self.unstarted.append(FakeMatcher(name, {name}))

    def start(self) -> list[str]:
        """Start what may start now; the tenants' names."""
        begun = []
        while (one := self.forms.choose(self.unstarted, self.started, self._slots, self._processes)) is not None:
            self.unstarted.remove(one)
            self.started.append(one)
            begun.append(one.form[0])
        return begun

    def end_oldest(self, is_in_use: bool = False) -> None:
        """The compilation that began first has ended; its request too, unless it is in use."""
        oldest = next(matcher for matcher in self.started if not matcher.is_compiled)
        oldest.is_compiled = True
        if not is_in_use:
            for user in oldest.users:
                self.forms.remove(user)
            oldest.users = set()


class TestTurns:
    def test_a_tenant_waits_for_no_compilation_of_another(self) -> None:
        queue = Queue(slots=1)
        queue.add("a", 30)
        assert queue.start() == ["a"]
        queue.add("b")
        assert queue.start() == ["b"]  # beside that of the first tenant
        queue.add("c")
        assert queue.start() == []  # two at once are enough
        queue.end_oldest()
        assert queue.start() == ["c"]

    def test_tenants_take_turns(self) -> None:
        queue = Queue(slots=1)
        queue.add("a", 10)
        queue.add("b", 3)
        queue.add("c", 3)
        order = queue.start()
        while queue.unstarted:
            queue.end_oldest()
            order += queue.start()
        assert Counter(order[:9]) == {"a": 3, "b": 3, "c": 3} and set(order[9:]) == {"a"}

    def test_one_compilation_of_a_tenant_while_others_wait(self) -> None:
        queue = Queue(slots=4)
        for tenant in "abcd":
            queue.add(tenant, 5)
        assert sorted(queue.start()) == ["a", "b", "c", "d"]

    def test_a_tenant_alone_has_all_slots(self) -> None:
        queue = Queue(slots=4)
        queue.add("a", 10)
        assert queue.start() == ["a"] * 4

    def test_some_processes_are_kept_for_tenants_without_any(self) -> None:
        queue = Queue(slots=32, processes=32)
        queue.add("a", 40)
        assert queue.start() == ["a"] * 28
        while any(not matcher.is_compiled for matcher in queue.started):
            queue.end_oldest(is_in_use=True)
        assert queue.start() == []
        queue.add("b", 2)
        assert queue.start() == ["b"]


class TestLimits:
    def test_forms_of_a_tenant(self) -> None:
        queue = Queue(most=3)
        queue.add("a", 3)
        with pytest.raises(BusyError, match=r"3 schemas, patterns or grammars of this tenant.*max_tenant_grammars"):
            queue.add("a")
        queue.add("b", 3)
        queue.forms.add("again", "a", b"a0")  # a form that is there already
        queue.forms.remove("again")
        queue.forms.remove("a0")
        queue.add("a")

    def test_forms_of_all_tenants(self) -> None:
        queue = Queue(most=3)
        for tenant in "abcd":
            queue.add(tenant, 3)
        with pytest.raises(BusyError, match="12 schemas, patterns or grammars of all tenants"):
            queue.add("e")

    def test_nothing_is_left_of_requests_that_ended(self) -> None:
        queue = Queue(most=3)
        queue.add("a", 3)
        queue.start()
        with pytest.raises(BusyError):
            queue.add("a")
        for name in ("a0", "a1", "a2", "a3", "unknown"):
            queue.forms.remove(name)
        assert not queue.forms._owners and not queue.forms._forms and not queue.forms._turns


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    shared = SharedForkServer(tiny_model)
    yield shared.engine(grammar_timeout=2, max_tenant_grammars=12)
    shared.close()


def params(form: StructuredOutputsParams) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=20, structured_outputs=form)


def slow(number: int) -> StructuredOutputsParams:
    """A form that takes longer to compile than it may."""
    properties = {f"p{number}_{i}": {"type": "string"} for i in range(2000)}
    return StructuredOutputsParams(json={"type": "object", "properties": properties})


def test_a_flood_of_slow_grammars_delays_no_other_tenant(llm: LLM) -> None:
    """Ten forms of two seconds each, and one of another tenant: it is compiled before the second of the ten."""
    engine, grammars = llm.llm_engine, grammars_of(llm)
    assert isinstance(grammars, Grammars)
    for number in range(10):
        engine.add_request(f"slow {number}", PROMPT, params(slow(number)), tenant="flood")
    deadline = time.monotonic() + 60
    while not any(matcher.pid for matcher in grammars._matchers.values()):
        engine.step()
        assert time.monotonic() < deadline
    engine.add_request("quick", PROMPT, params(StructuredOutputsParams(regex="b[0-9]z")), tenant="other")
    ended: list[str] = []
    while "quick" not in ended:
        ended += [output.request_id for output in engine.step() if output.finished]
        assert time.monotonic() < deadline
    assert len(ended) <= 2
    with pytest.raises(BusyError):
        for number in range(10, 20):
            engine.add_request(f"slow {number}", PROMPT, params(slow(number)), tenant="flood")
    for number in range(20):
        engine.abort_request(f"slow {number}")
    while engine.has_unfinished_requests():
        engine.step()
    assert not grammars._tenants._owners
