"""What goes into a step: decodes first, prompts in chunks, prefix hits, forks, within the budgets."""

from __future__ import annotations

from typing import Any

import pytest

from quire.errors import CacheTooSmallError, ValidationError
from quire.messages.request import RequestState
from tests.scheduler.harness import STOP, Bench, draw

DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2])


@DEPTHS
def test_one_request_yields_its_tokens_and_ends_by_length(depth: int) -> None:
    bench = Bench(depth=depth)
    bench.add("a", prompt=6, output=5)
    bench.run()
    bench.assert_right("a")
    assert len(bench.sequences[("a", 0)].tokens) == 5


@DEPTHS
def test_a_stop_token_ends_a_request_and_is_its_reason(depth: int) -> None:
    bench = Bench(depth=depth, draws=lambda id, index, position: STOP if position == 8 else draw(id, index, position))
    bench.add("a", prompt=6, output=20)
    bench.run()
    received = bench.sequences[("a", 0)]
    assert received.tokens[-1] == STOP and len(received.tokens) == 3
    assert (received.finished.reason, received.finished.stop_reason) == ("stop", STOP)  # type: ignore[union-attr]
    assert bench.device.stale_draws == depth, "ends are seen late, and what came after is dropped"
    bench.assert_right("a")


def test_the_end_of_sequence_is_no_stop_reason() -> None:
    bench = Bench(draws=lambda id, sequence, position: 0)
    bench.add("a", output=9)
    bench.run()
    assert bench.sequences[("a", 0)].tokens == [0]
    assert bench.sequences[("a", 0)].finished.stop_reason is None  # type: ignore[union-attr]


def test_decodes_come_first_and_prompts_get_the_rest_of_the_budget() -> None:
    bench = Bench(budget=10, max_rows=4)
    for id in "abc":
        bench.add(id, prompt=2, output=20)
    bench.step()
    bench.add("long", prompt=30, output=2)
    for left in (7, 7, 7, 7):
        bench.step()
        plan = bench.plans[-1]
        assert plan.num_decodes == 3 and plan.counts.tolist() == [1, 1, 1, left]
    bench.step()
    assert bench.plans[-1].counts.tolist() == [1, 1, 1, 2]
    assert len(bench.plans[-1].samples) == 4, "the last chunk draws"
    bench.run()
    bench.assert_right()


def test_chunks_that_do_not_finish_a_prompt_draw_nothing() -> None:
    bench = Bench(budget=4)
    bench.add("a", prompt=10, output=1)
    bench.run()
    assert [plan.counts.tolist() for plan in bench.plans] == [[4], [4], [2]]
    assert [len(plan.samples) for plan in bench.plans] == [0, 0, 1]


def test_without_chunking_a_prompt_waits_for_a_step_that_holds_it() -> None:
    bench = Bench(budget=10, chunked=False)
    bench.add("a", prompt=8, output=2)
    bench.add("b", prompt=8, output=2)
    bench.run()
    assert [plan.counts.tolist() for plan in bench.plans] == [[8], [1, 8], [1]]
    bench.assert_right()


@DEPTHS
def test_without_chunking_a_prompt_longer_than_any_step_still_finishes(depth: int) -> None:
    bench = Bench(budget=10, chunked=False, depth=depth)
    bench.add("long", prompt=25, output=2)
    bench.add("short", prompt=3, output=2)
    bench.run(60)
    bench.assert_right()


def test_a_budget_below_the_rows_serves_the_best_ranked_first() -> None:
    bench = Bench(budget=2, max_rows=6)
    for id in "abcd":
        bench.add(id, prompt=1, output=6)
    bench.run(100)
    assert max(plan.num_tokens for plan in bench.plans) == 2
    bench.assert_right()


def test_rows_are_never_exceeded_and_admission_follows_arrival() -> None:
    bench = Bench(max_rows=2)
    for id in "abcd":
        bench.add(id, output=3)
    bench.step()
    assert bench.running() == {("a", 0), ("b", 0)}
    assert bench.scheduler.waiting == 2
    bench.run()
    assert [start.key[0] for start in bench.started] == list("abcd")
    bench.assert_right()


# Prefix hits


def test_requests_of_one_step_share_a_prefix_written_in_that_step() -> None:
    bench = Bench(block_size=4)
    prompt = list(range(2, 14))
    bench.add("a", [*prompt, 20], 2)
    bench.add("b", [*prompt, 21], 2)
    bench.step()
    assert bench.plans[0].counts.tolist() == [1, 13], "one has a single token left to compute: it decodes"
    assert [start.num_cached for start in bench.started] == [0, 12]
    bench.run()
    bench.assert_right()


def test_a_later_request_hits_prompt_and_output_of_a_finished_one() -> None:
    bench = Bench(block_size=4)
    first = bench.add("a", 6, 10)
    bench.run()
    history = first.prompt + bench.sequences[("a", 0)].tokens
    bench.add("b", [*history, 3, 3], 2)
    bench.run()
    assert bench.started[-1].num_cached == 12, "15 of 16 tokens have KV: three blocks of four"
    bench.assert_right()


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
def test_a_hit_leaves_at_least_the_last_token_to_compute(length: int) -> None:
    bench = Bench(block_size=4)
    prompt = list(range(2, 2 + length))
    bench.add("a", prompt, 1)
    bench.run()
    bench.add("b", prompt, 1)
    bench.run()
    assert bench.started[-1].num_cached == (length - 1) // 4 * 4
    assert bench.plans[-1].num_tokens == length - (length - 1) // 4 * 4
    bench.assert_right()


def test_salts_separate_tenants_and_reads_cache_can_be_off() -> None:
    bench = Bench(block_size=4)
    prompt = list(range(2, 15))
    for id, more in {"a": {}, "b": {"salt": "x"}, "c": {"salt": "x"}, "d": {"reads_cache": False}, "e": {}}.items():
        bench.add(id, prompt, 1, **more)
        bench.run()
    assert [start.num_cached for start in bench.started] == [0, 0, 12, 0, 12]


def test_a_reset_empties_the_prefix_cache_and_says_whether_rows_run() -> None:
    bench = Bench(block_size=4)
    prompt = list(range(2, 15))
    bench.add("a", prompt, 1)
    bench.run()
    assert bench.scheduler.reset_prefix_cache()
    bench.add("b", prompt, 5)
    bench.step()
    assert bench.started[-1].num_cached == 0
    assert not bench.scheduler.reset_prefix_cache()
    bench.run()
    bench.assert_right()


# Several sequences


@DEPTHS
@pytest.mark.parametrize("prompt", [6, 8])
def test_sequences_share_one_forward_pass_and_fork_at_the_next_write(depth: int, prompt: int) -> None:
    bench = Bench(depth=depth, block_size=4)
    bench.add("a", prompt, output=5, n=4)
    bench.step()
    first = bench.plans[0]
    assert first.counts.tolist() == [prompt] and len(first.sample_rows) == 4 and len(first.forks) == 3
    assert not first.copies
    bench.step()
    copies = bench.plans[1].copies
    assert len(copies) == (3 if prompt == 6 else 0), "all but the last holder of a partly filled block copy it"
    assert len({source for source, _ in copies}) <= 1
    bench.run()
    bench.assert_right("a")
    outputs = [tuple(bench.sequences[("a", i)].tokens) for i in range(4)]
    assert len(set(outputs)) == 4


@DEPTHS
def test_more_sequences_than_rows_are_queued_and_all_finish(depth: int) -> None:
    bench = Bench(max_rows=3, depth=depth)
    bench.add("a", 9, output=4, n=8)
    bench.add("b", 5, output=2)
    bench.run()
    assert bench.scheduler.stats.finished == 9
    bench.assert_right()


@DEPTHS
def test_sequences_finish_in_a_cache_that_holds_exactly_one_of_them(depth: int) -> None:
    bench = Bench(blocks=3, block_size=4, depth=depth)
    bench.add("a", 6, output=7, n=3)
    bench.run(300)
    bench.assert_right()


def test_copies_of_one_step_need_no_order() -> None:
    bench = Bench(blocks=8, block_size=16, max_rows=16)
    for i in range(6):
        bench.add(f"r{i}", 10 + i, output=30, n=3)
    bench.run(2000)  # the device refuses a step that copies from a block it also copies to
    assert bench.scheduler.stats.preemptions > 0 and bench.device.copied > 0
    bench.assert_right()


# What can never fit


def test_a_request_that_can_never_fit_is_refused_with_the_numbers() -> None:
    bench = Bench(blocks=4, block_size=4)
    bench.add("fits", prompt=10, output=7)  # the last token needs no slot
    with pytest.raises(
        CacheTooSmallError, match=r"request big may grow to 18 tokens \(prompt 10\).*5 blocks of 4.* has 4\."
    ):
        bench.add("big", prompt=10, output=8)
    bench.run()
    bench.assert_right("fits")


def test_an_id_in_use_is_refused_and_can_be_reused_later() -> None:
    bench = Bench()
    bench.add("a")
    with pytest.raises(ValidationError, match="'a'"):
        bench.core.add(bench.request("a"))
    bench.run()
    bench.assert_right("a")
    bench.add("a")
    bench.run()
    bench.assert_right("a")


def test_waste_is_a_share_of_used_blocks_even_while_sequences_share_them() -> None:
    bench = Bench(block_size=16, max_rows=16, budget=32)
    bench.add("a", 17, output=2, n=16)
    bench.run()
    stats = bench.scheduler.stats
    assert 0 < stats.waste < 1
    assert stats.waste_if_reserved(2048) > stats.waste


def test_states_follow_the_request() -> None:
    bench = Bench(max_rows=1)
    bench.add("a", output=2)
    bench.add("b", output=2)
    one, other = (bench.scheduler.requests.sequences(id)[0] for id in "ab")
    assert one.state is other.state is RequestState.WAITING
    bench.step()
    assert (one.state, other.state) == (RequestState.RUNNING, RequestState.WAITING)
    bench.run()
    assert one.is_finished and other.is_finished


def test_admission_does_not_scan_all_admitted_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(budget=1000, max_rows=100, blocks=400)
    for i in range(100):
        bench.add(str(i), prompt=8, output=2)
    calls, missing = [0], bench.scheduler.tables.missing

    def counted(*arguments: Any) -> int:
        calls[0] += 1
        return missing(*arguments)

    monkeypatch.setattr(bench.scheduler.tables, "missing", counted)
    bench.step()
    assert len(bench.plans[-1].rows) == 100
    assert calls[0] <= 200
    bench.run()
    bench.assert_right()
