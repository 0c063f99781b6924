"""Where requests go: to their prefix, unless waiting there costs more; removed replicas get nothing."""

from __future__ import annotations

import math
import random

import pytest

from quire.config import EngineConfig
from quire.errors import EngineDeadError, ValidationError
from quire.router import OpenRequest, RoutedRequest, Router, make_routing_policy
from quire.router.policies.prefix import PrefixAware
from quire.router.replica_state import ReplicaState
from tests.router.prompts import BLOCK, KEYS, Clock, request, router_of, words


def send(router: Router, asked: RoutedRequest) -> OpenRequest:
    return router.launched(asked, router.choose(asked))


def serve(router: Router, asked: RoutedRequest) -> str:
    """Run it from launch to end; returns its replica."""
    opened = send(router, asked)
    router.progress(opened, 1)
    router.finished(opened)
    return opened.replica


SYSTEM, DOCUMENT = words(1, 2000), words(2, 4000)


@pytest.mark.parametrize("policy", ["prefix", "least_loaded"])
class TestAdapters:
    def test_requests_of_an_adapter_stay_together(self, policy: str) -> None:
        router = router_of("a", "b", "c", policy=make_routing_policy(policy))
        homes = {name: serve(router, request(words(i, 40), adapters=name)) for i, name in enumerate((b"x", b"y", b"z"))}
        assert len(set(homes.values())) == 3  # each was the least loaded when it came
        for i in range(10, 30):
            for name, home in homes.items():
                assert serve(router, request(words(100 * i + len(home), 40), adapters=name)) == home

    def test_but_not_behind_a_queue(self, policy: str) -> None:
        router = router_of("a", "b", policy=make_routing_policy(policy))
        home = serve(router, request(words(1, 40), adapters=b"x"))
        for i in range(2, 8):
            router.launched(request(words(i, 4000)), home)
        assert router.choose(request(words(9, 40), adapters=b"x")) != home

    def test_a_replica_has_room_for_few(self, policy: str) -> None:
        router = Router(BLOCK, make_routing_policy(policy), clock=Clock())
        router.add("a", 1000, 64, adapter_slots=2)
        router.add("b", 1000, 64, adapter_slots=2)
        for number, name in enumerate((b"x", b"y", b"x", b"z")):
            router.finished(router.launched(request(words(number, 40), adapters=name), "a"))
        router.finished(router.launched(request(words(50, 40), adapters=b"y"), "b"))
        # y was the least recently used at a, and made room for z.
        assert router.choose(request(words(60, 40), adapters=b"y")) == "b"
        assert router.choose(request(words(60, 40), adapters=b"z")) == "a"
        assert router.choose(request(words(60, 40), adapters=b"x")) == "a"


class TestPrefixes:
    def test_a_request_goes_where_its_prefix_is(self) -> None:
        router = router_of("a", "b", "c")
        homes = [serve(router, request(text, words(9, 30))) for text in (SYSTEM, DOCUMENT)]
        for i in range(10, 20):
            assert serve(router, request(SYSTEM, words(i, 30))) == homes[0]
            assert serve(router, request(DOCUMENT, words(i, 30))) == homes[1]

    def test_the_longest_of_several_prefixes_counts(self) -> None:
        router = router_of("a", "b")
        router.finished(router.launched(request(SYSTEM, words(3, 500)), "a"))
        router.finished(router.launched(request(SYSTEM, DOCUMENT), "b"))
        assert router.choose(request(SYSTEM, DOCUMENT, words(4, 50))) == "b"

    def test_generated_blocks_are_known_when_their_keys_are_given(self) -> None:
        router = router_of("a", "b")
        prompt, answer = words(3, 200), words(4, 3000)
        opened = router.launched(request(prompt), "b")
        router.progress(opened, len(answer))
        router.finished(opened, KEYS.of(prompt + answer))
        assert send(router, request(prompt, answer, words(5, 20))).uncached <= 20 + BLOCK

    def test_tenants_do_not_match_each_others_blocks(self) -> None:
        router = router_of("a", "b")
        serve(router, request(SYSTEM, tenant="one"))
        opened = send(router, request(SYSTEM, tenant="two"))
        assert opened.uncached == len(SYSTEM)

    def test_a_hot_prefix_spills_to_a_second_replica_and_is_cached_there_too(self) -> None:
        router = router_of("a", "b", "c", clock=Clock())
        home = serve(router, request(DOCUMENT))
        asked = [request(DOCUMENT, words(i, 300)) for i in range(10, 50)]
        requests = [send(router, one) for one in asked]
        assert requests[0].replica == home
        spilled = next(opened for opened in requests if opened.replica != home)
        assert spilled.uncached > len(DOCUMENT)  # it is computed there once…
        later = [opened for opened in requests if opened.replica == spilled.replica and opened is not spilled]
        assert later
        assert max(opened.uncached for opened in later) < 320  # …and found from then on

    def test_blocks_beyond_a_replicas_capacity_are_not_expected_there(self) -> None:
        router = router_of("a", "b", blocks=200)
        home = serve(router, request(SYSTEM))
        router.finished(router.launched(request(words(5, 200 * BLOCK)), home))
        assert send(router, request(SYSTEM)).uncached == len(SYSTEM)

    def test_outputs_being_generated_take_blocks_from_the_cache(self) -> None:
        router = router_of("a", blocks=200)
        serve(router, request(SYSTEM))
        opened = router.launched(request(words(5, 16)), "a")
        router.progress(opened, 150 * BLOCK)
        router.launched(request(words(6, 16)), "a")
        assert router.launched(request(SYSTEM), "a").uncached > len(SYSTEM) // 2


class TestLoad:
    def test_prompts_without_shared_prefixes_are_spread_evenly(self) -> None:
        clock = Clock()
        router = router_of("a", "b", "c", "d", clock=clock)
        rng = random.Random(0)
        tokens = dict.fromkeys("abcd", 0)
        for i in range(400):
            opened = send(router, request(words(i, rng.randint(50, 1500))))
            clock.now += opened.uncached / 10_000
            router.progress(opened, 1)
            router.finished(opened)
            tokens[opened.replica] += opened.uncached
        assert max(tokens.values()) < 1.02 * sum(tokens.values()) / 4

    def test_running_rows_count_after_their_prompts_are_done(self) -> None:
        clock = Clock()
        router = router_of("a", "b", clock=clock, rows=8)
        for i in range(12):
            router.progress(router.launched(request(words(i, 16)), "a"), 1)
        clock.now += 3600  # the work has decayed, the rows are still there
        assert router.choose(request(words(99, 16))) == "b"
        assert router.choose(request(words(99, 16), sequences=4)) == "b"

    def test_a_slower_replica_gets_less(self) -> None:
        clock = Clock()
        router = router_of("fast", "slow", clock=clock)
        speeds, ends, sent = {"fast": 16_000, "slow": 4_000}, {"fast": 0.0, "slow": 0.0}, {"fast": 0, "slow": 0}
        running: list[tuple[float, OpenRequest]] = []
        for i in range(600):
            clock.now += 0.06
            for end, opened in sorted(running, key=lambda pair: pair[0]):
                if end <= clock.now:
                    clock.now, now = end, clock.now
                    router.progress(opened, 1, 0)
                    router.finished(opened)
                    clock.now = now
                    running.remove((end, opened))
            opened = send(router, request(words(i, 800)))
            name = opened.replica
            sent[name] += 1
            ends[name] = max(ends[name], clock.now) + 800 / speeds[name]
            running.append((ends[name], opened))
        assert 2.5 < sent["fast"] / sent["slow"] < 6
        measured = {stats.name: stats.prefill_speed for stats in router.stats()}
        assert measured == {name: pytest.approx(speed, rel=0.3) for name, speed in speeds.items()}

    def test_a_replica_that_hangs_does_not_look_free(self) -> None:
        clock = Clock()
        router = router_of("a", "b", clock=clock)
        for i in range(4):
            router.launched(request(words(i, 4000)), "a")
        clock.now += 3600
        assert {serve(router, request(words(i, 1000))) for i in range(10, 30)} == {"b"}

    def test_a_replica_that_fails_every_request_at_once_does_not_attract_all_of_them(self) -> None:
        clock = Clock()
        router = router_of("good", "bad", clock=clock)
        sent = {"good": 0, "bad": 0}
        for i in range(400):
            opened = send(router, request(words(i, 500)))
            sent[opened.replica] += 1
            if opened.replica == "good":
                clock.now += 0.05
                router.progress(opened, 1)
            router.finished(opened)
        assert sent["bad"] < 1.1 * sent["good"]

    def test_reported_cache_hits_replace_the_estimate(self) -> None:
        router = router_of("a")
        opened = router.launched(request(SYSTEM), "a")
        router.progress(opened, 1, cached=1984)
        assert opened.uncached == 16
        assert router.stats()[0].queued_tokens == 0


class TestRemoval:
    def test_a_removed_replica_gets_nothing_and_its_requests_are_over(self) -> None:
        router = router_of("a", "b")
        waiting, started = (router.launched(request(words(i, 64)), "a") for i in range(2))
        router.progress(started, 1)
        router.remove("a")
        assert waiting.is_over and started.is_over
        assert router.choose(waiting.request) == "b"
        router.remove("unknown")  # no error
        assert router.alive == ["b"]

    def test_a_replica_that_is_added_again_is_empty_and_idle(self) -> None:
        router = router_of("a")
        router.launched(request(DOCUMENT), "a")
        router.remove("a")
        router.add("a", 10_000, 64)
        (stats,) = router.stats()
        assert (stats.open_requests, stats.queued_tokens, stats.kv_tokens, stats.known_blocks) == (0, 0, 0, 0)
        assert send(router, request(DOCUMENT)).uncached == len(DOCUMENT)

    def test_events_after_the_end_change_nothing(self) -> None:
        router = router_of("a", "b")
        asked = request(words(1, 64))
        old = router.launched(asked, "a")
        router.remove("a")
        router.add("a", 10_000, 64)
        router.launched(asked, "a")
        before = router.stats()
        router.progress(old, 5)
        router.finished(old)
        assert router.stats() == before

    def test_without_replicas_an_error_is_raised(self) -> None:
        router = router_of("a")
        router.remove("a")
        with pytest.raises(EngineDeadError, match="no replica is running"):
            router.choose(request(SYSTEM))
        with pytest.raises(EngineDeadError, match="'a' is gone"):
            router.launched(request(SYSTEM), "a")

    def test_names_are_unique_and_capacity_is_positive(self) -> None:
        router = router_of("a")
        with pytest.raises(ValidationError, match="'a' exists already"):
            router.add("a", 10, 1)
        with pytest.raises(ValidationError, match="0 blocks"):
            router.add("b", 0, 1)
        assert router.alive == ["a"]


class OnlyTo:
    """A custom policy: every request to one replica."""

    def cost(self, request: RoutedRequest, replica: ReplicaState, now: float) -> float:
        return 0.0 if replica.name == "c" else 1.0


class TestPolicies:
    def test_least_loaded_ignores_the_prefix(self) -> None:
        clock = Clock()
        router = router_of("a", "b", "c", clock=clock, policy=make_routing_policy("least_loaded"))
        used = {serve(router, request(DOCUMENT)) for _ in range(3)}
        assert used == {"a", "b", "c"}
        waiting = router.launched(request(words(7, 4000)), "a")
        clock.now += 3600  # the work has decayed; the open request still counts
        router.progress(waiting, 1)
        assert router.choose(request(DOCUMENT)) != "a"

    def test_the_default_is_the_prefix_policy(self) -> None:
        assert isinstance(make_routing_policy(EngineConfig.routing_policy), PrefixAware)

    def test_a_policy_by_its_dotted_path_decides(self) -> None:
        router = router_of("a", "b", "c", policy=make_routing_policy(f"{__name__}.OnlyTo"))
        assert [serve(router, request(words(i, 64))) for i in range(3)] == ["c"] * 3

    def test_infinite_costs_still_choose_a_replica(self) -> None:
        class Never:
            def cost(self, request: RoutedRequest, replica: ReplicaState, now: float) -> float:
                return math.inf

        assert router_of("a", "b", policy=Never()).choose(request(SYSTEM)) == "a"

    def test_an_unknown_name_is_refused_with_the_known_ones(self) -> None:
        with pytest.raises(ValidationError, match="unknown routing policy 'fastest'; known: least_loaded, prefix"):
            make_routing_policy("fastest")
