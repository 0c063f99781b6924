"""Timelines against what plans and results said, kept whole by the test."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

from quire.executor.null import NullExecutor
from quire.kvcache.block_tables import BlockTables
from quire.kvcache.prefix_cache import ContentKeys
from quire.messages.request import NewRequest
from quire.messages.sampling import SamplingParams
from quire.scheduler import timelines
from quire.scheduler.policies.registry import make_policy
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.timelines import Timelines

SIZE = 4


def make(blocks: int, rows: int) -> Scheduler:
    keys = ContentKeys(SIZE, b"test")
    scheduler = Scheduler(BlockTables(blocks, SIZE), make_policy("fcfs"), keys, max_rows=rows, token_budget=24)
    scheduler.requests.timelines = Timelines()
    return scheduler


def request(name: str, prompt: list[int], tokens: int) -> NewRequest:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return NewRequest(name, prompt, params, limit=len(prompt) + tokens, arrival=1.0)


def run(scheduler: Scheduler, rows: int, ahead: int = 0) -> tuple[dict[str, list[tuple[int, int]]], dict[str, int]]:
    """Run to the end, `ahead` steps in flight; returns (step, tokens) of each request by the plans, and preemptions."""
    executor = NullExecutor(rows)
    seen: dict[str, list[tuple[int, int]]] = defaultdict(list)
    preempted: dict[str, int] = defaultdict(int)
    flying = []
    while scheduler.unfinished or flying:
        plan = scheduler.schedule()
        if plan is not None:
            owners = {row: scheduler.rows.requests[row] for row in plan.rows.tolist()}
            for row, count in zip(plan.rows.tolist(), plan.counts.tolist(), strict=True):
                owner = owners[row]
                assert owner is not None
                seen[owner.id].append((plan.step, count))
            flying.append(executor.submit(plan))
        if flying and (plan is None or len(flying) > ahead):
            scheduler.update(flying.pop(0))
        for key in scheduler.take_outputs().preempted:
            preempted[key[0]] += 1
    return seen, preempted


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("seed", range(3))
def test_every_step_of_every_request_is_found_again(seed: int, ahead: int) -> None:
    """Few blocks: requests are preempted, and come back in other rows."""
    choose = random.Random(seed)
    scheduler = make(blocks=40, rows=6)
    sizes = {}
    for number in range(24):
        prompt = [choose.randrange(50) for _ in range(choose.randrange(1, 40))]
        sizes[str(number)] = choose.randrange(1, 40)
        scheduler.add(request(str(number), prompt, sizes[str(number)]))
    seen, preempted = run(scheduler, 6, ahead)
    assert preempted  # otherwise this says little
    for name, tokens in sizes.items():
        told = scheduler.requests.timelines.of(name)
        assert told is not None and told.is_whole and told.finish_reason == "length"
        assert [(step.step, step.computed) for step in told.steps] == seen[name]
        kinds = [event.kind for event in told.events]
        assert kinds[0] == "waiting" and kinds[-1] == "finished" and told.events[-1].value == tokens
        assert kinds.count("preempted") == preempted[name]
        stays = kinds.count("admitted") - preempted[name]
        assert stays == 1 or (ahead and not stays)  # a draw in flight may end what was preempted
        drawn = sum(step.drew for step in told.steps) + kinds.count("drawn")
        if not ahead:  # a draw in flight at a preemption counts, though its step is the last of that stay
            assert drawn == tokens


def test_sequences_of_one_prompt_have_their_own_steps() -> None:
    scheduler = make(blocks=60, rows=4)
    params = SamplingParams(n=3, max_tokens=5, ignore_eos=True)
    scheduler.add(NewRequest("many", list(range(9)), params, limit=14))
    run(scheduler, 4)
    told = scheduler.requests.timelines.of("many")
    assert told is not None
    rows = {sequence: {step.row for step in told.steps if step.sequence == sequence} for sequence in range(3)}
    assert all(len(one) == 1 for one in rows.values()) and len({*map(tuple, rows.values())}) == 3
    for sequence in range(3):
        assert sum(step.drew for step in told.steps if step.sequence == sequence) == 4  # and one with the prompt


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timelines, "MOST_STEPS", 10)
    monkeypatch.setattr(timelines, "MOST_REQUESTS", 5)
    monkeypatch.setattr(timelines, "MOST_STEP_ROWS", 12)
    scheduler = make(blocks=60, rows=4)
    for number in range(9):
        scheduler.add(request(str(number), [number] * 5, 30))
    run(scheduler, 4)
    kept = scheduler.requests.timelines
    assert [kept.of(str(number)) is not None for number in range(9)] == [False] * 4 + [True] * 5
    told = kept.of("8")
    assert told is not None and not told.is_whole
    steps = kept.recent_steps(100)
    assert len(steps) <= 10 and sum(step[3] + step[4] for step in steps) <= 12


def test_ids_of_clients_find_the_latest_request() -> None:
    scheduler = make(blocks=60, rows=4)
    for name in ("abc-1", "abc-2", "abcd-3", "abc-x"):
        scheduler.add(request(name, [1, 2, 3], 2))
    run(scheduler, 4)
    kept = scheduler.requests.timelines
    found = {given: None if (one := kept.of(given)) is None else one.id for given in ("abc", "abc-1", "ab", "abcd")}
    assert found == {"abc": "abc-2", "abc-1": "abc-1", "ab": None, "abcd": "abcd-3"}
