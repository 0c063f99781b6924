"""A request whose blocks are in host memory: alone, it joins the step that loads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.messages.plan import StepPlan
from tests.scheduler.harness import Bench


def suspended(folder: Path, length: int = 22, **settings: object) -> tuple[Bench, list[int]]:
    """A session in host memory, with no block on the device; its tokens."""
    bench = Bench(blocks=60, block_size=4, max_rows=4, budget=64, host_slots=100, sessions=folder, **settings)  # type: ignore[arg-type]
    keeper = bench.core.sessions
    assert keeper is not None
    prompt = [2 + i % 30 for i in range(length)]
    keeper.create("s", prompt)
    bench.put(bench.request("before", prompt, 3, session="s"))
    bench.run()
    keeper.suspend("s")
    bench.run()
    bench.tables.reset_prefix()
    assert bench.tiers is not None and bench.tiers.saved
    bench.plans.clear()
    return bench, list(keeper.tokens("s"))


def awaited(plans: list[StepPlan]) -> list[StepPlan]:
    return [plan for plan in plans if plan.moves is not None and plan.moves.awaited]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("more", [[], [5] * 9], ids=["the last token", "a turn's input"])
@pytest.mark.parametrize("length", [21, 22])
def test_its_first_plan_loads_the_blocks_and_computes(tmp_path: Path, depth: int, more: list[int], length: int) -> None:
    bench, tokens = suspended(tmp_path, length, depth=depth)
    bench.core.sessions.append("s", more)
    bench.put(bench.request("after", tokens + more, 6, session="s"))
    bench.run()
    first = bench.plans[0]
    assert awaited(bench.plans) == [first]
    assert first.moves is not None and len(first.moves.back) == -(-(len(tokens) - 1) // 4)
    assert first.num_tokens == len(more) + 1, "what lower tiers have is not computed again"
    assert not first.copies
    bench.assert_right("after")


def test_with_other_requests_the_device_does_not_wait(tmp_path: Path) -> None:
    bench, tokens = suspended(tmp_path)
    bench.add("other", 6, 20)
    bench.step()
    bench.put(bench.request("after", tokens, 6, session="s"))
    bench.run()
    assert not awaited(bench.plans)
    assert any(plan.moves is not None and plan.moves.back for plan in bench.plans)
    bench.assert_right("after", "other")


def test_two_waiting_requests_do_not_wait_for_each_other(tmp_path: Path) -> None:
    bench, tokens = suspended(tmp_path)
    for name in ("one", "two"):
        bench.put(bench.request(name, tokens, 6))
    bench.run()
    assert not awaited(bench.plans)
    bench.assert_right("one", "two")


@pytest.mark.parametrize("how", ["submit", "collect"])
def test_a_failed_step_has_loaded_nothing(tmp_path: Path, how: str) -> None:
    """Later requests do not hit the blocks it was to load."""
    failing = []

    def fails(plan: StepPlan, requests: set[str]) -> str:
        if awaited([plan]) and not failing:
            failing.append(plan.step)
            return how
        return ""

    bench, tokens = suspended(tmp_path, fails=fails)
    bench.put(bench.request("after", tokens, 6, session="s"))
    bench.run()
    assert failing
    bench.add("other", tokens, 6)
    bench.run()
    bench.assert_right("after", "other")


def test_an_aborted_request_leaves_nothing(tmp_path: Path) -> None:
    bench, tokens = suspended(tmp_path, depth=1)
    bench.put(bench.request("after", tokens, 20, session="s"))
    bench.step()
    assert awaited(bench.plans)
    bench.core.abort("after")
    bench.run()
