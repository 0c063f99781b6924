"""Where requests go: to their prefix, unless waiting there costs more; sessions stay; the dead get nothing."""

from __future__ import annotations

import random

import pytest

from quire.errors import EngineDeadError, ValidationError
from quire.router import RoutedFlight, RoutedRequest, Router
from tests.router.prompts import BLOCK, KEYS, Clock, request, router_of, words


def send(router: Router, asked: RoutedRequest) -> RoutedFlight:
    return router.launched(asked, router.choose(asked))


def serve(router: Router, asked: RoutedRequest) -> str:
    """Where it went, from beginning to end."""
    flight = send(router, asked)
    router.progress(flight, 1)
    router.finished(flight)
    return flight.replica


SYSTEM, DOCUMENT = words(1, 2000), words(2, 4000)


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

    def test_what_was_generated_is_known_too_if_someone_says_so(self) -> None:
        router = router_of("a", "b")
        prompt, answer = words(3, 200), words(4, 3000)
        flight = router.launched(request(prompt), "b")
        router.progress(flight, len(answer))
        router.finished(flight, KEYS.of(prompt + answer))
        assert send(router, request(prompt, answer, words(5, 20))).uncached <= 20 + BLOCK

    def test_tenants_are_not_drawn_to_each_others_blocks(self) -> None:
        router = router_of("a", "b")
        serve(router, request(SYSTEM, tenant="one"))
        flight = send(router, request(SYSTEM, tenant="two"))
        assert flight.uncached == len(SYSTEM)

    def test_a_hot_prefix_spills_to_a_second_replica_and_is_cached_there_too(self) -> None:
        router = router_of("a", "b", "c", clock=Clock())
        home = serve(router, request(DOCUMENT))
        asked = [request(DOCUMENT, words(i, 300)) for i in range(10, 50)]
        flights = [send(router, one) for one in asked]
        assert flights[0].replica == home
        spilled = next(flight for flight in flights if flight.replica != home)
        assert spilled.uncached > len(DOCUMENT)  # it is computed there once…
        later = [flight for flight in flights if flight.replica == spilled.replica and flight is not spilled]
        assert later
        assert max(flight.uncached for flight in later) < 320  # …and found from then on

    def test_what_a_replica_has_no_room_for_is_not_believed_to_be_there(self) -> None:
        router = router_of("a", "b", blocks=200)
        home = serve(router, request(SYSTEM))
        router.finished(router.launched(request(words(5, 200 * BLOCK)), home))
        assert send(router, request(SYSTEM)).uncached == len(SYSTEM)

    def test_outputs_under_way_take_room_from_what_is_cached(self) -> None:
        router = router_of("a", blocks=200)
        serve(router, request(SYSTEM))
        flight = router.launched(request(words(5, 16)), "a")
        router.progress(flight, 150 * BLOCK)
        router.launched(request(words(6, 16)), "a")
        assert router.launched(request(SYSTEM), "a").uncached > len(SYSTEM) // 2


class TestLoad:
    def test_prompts_like_no_other_are_shared_out_evenly(self) -> None:
        clock = Clock()
        router = router_of("a", "b", "c", "d", clock=clock)
        rng = random.Random(0)
        tokens = dict.fromkeys("abcd", 0)
        for i in range(400):
            flight = send(router, request(words(i, rng.randint(50, 1500))))
            clock.now += flight.uncached / 10_000
            router.progress(flight, 1)
            router.finished(flight)
            tokens[flight.replica] += flight.uncached
        assert max(tokens.values()) < 1.02 * sum(tokens.values()) / 4

    def test_rows_count_though_their_prompts_are_done(self) -> None:
        clock = Clock()
        router = router_of("a", "b", clock=clock, rows=8)
        for i in range(12):
            router.progress(router.launched(request(words(i, 16)), "a"), 1)
        clock.now += 3600  # the work is forgotten, the rows are there
        assert router.choose(request(words(99, 16))) == "b"
        assert router.choose(request(words(99, 16), samples=4)) == "b"

    def test_a_replica_that_is_slower_gets_less(self) -> None:
        clock = Clock()
        router = router_of("fast", "slow", clock=clock)
        speeds, ends, sent = {"fast": 16_000, "slow": 4_000}, {"fast": 0.0, "slow": 0.0}, {"fast": 0, "slow": 0}
        running: list[tuple[float, RoutedFlight]] = []
        for i in range(600):
            clock.now += 0.06
            for end, flight in sorted(running, key=lambda pair: pair[0]):
                if end <= clock.now:
                    clock.now, now = end, clock.now
                    router.progress(flight, 1, 0)
                    router.finished(flight)
                    clock.now = now
                    running.remove((end, flight))
            flight = send(router, request(words(i, 800)))
            name = flight.replica
            sent[name] += 1
            ends[name] = max(ends[name], clock.now) + 800 / speeds[name]
            running.append((ends[name], flight))
        assert 2.5 < sent["fast"] / sent["slow"] < 6
        measured = {figures.name: figures.prefill_speed for figures in router.figures()}
        assert measured == {name: pytest.approx(speed, rel=0.3) for name, speed in speeds.items()}

    def test_a_replica_that_hangs_does_not_look_free(self) -> None:
        clock = Clock()
        router = router_of("a", "b", clock=clock)
        for i in range(4):
            router.launched(request(words(i, 4000)), "a")
        clock.now += 3600
        assert {serve(router, request(words(i, 1000))) for i in range(10, 30)} == {"b"}

    def test_a_replica_that_fails_everything_at_once_does_not_draw_all_there_is(self) -> None:
        clock = Clock()
        router = router_of("good", "bad", clock=clock)
        sent = {"good": 0, "bad": 0}
        for i in range(400):
            flight = send(router, request(words(i, 500)))
            sent[flight.replica] += 1
            if flight.replica == "good":
                clock.now += 0.05
                router.progress(flight, 1)
            router.finished(flight)
        assert sent["bad"] < 1.1 * sent["good"]

    def test_what_the_replica_says_was_cached_replaces_what_was_believed(self) -> None:
        router = router_of("a")
        flight = router.launched(request(SYSTEM), "a")
        router.progress(flight, 1, cached=1984)
        assert flight.uncached == 16
        assert router.figures()[0].queued_tokens == 0


class TestSessions:
    def test_a_session_goes_where_it_lives_however_busy_that_is(self) -> None:
        router = router_of("a", "b")
        home = serve(router, request(words(1, 64), session="s"))
        for i in range(2, 40):
            router.launched(request(words(i, 4000)), home)
        assert router.choose(request(words(1, 64), session="s")) == home
        assert router.choose(request(words(1, 64))) != home
        assert router.home_of("", "s") == home

    def test_names_are_the_tenants_own(self) -> None:
        router = router_of("a", "b")
        router.launched(request(words(1, 64), session="s", tenant="one"), "a")
        router.launched(request(words(1, 64), session="s", tenant="two"), "b")
        assert [router.home_of(tenant, "s") for tenant in ("one", "two", "three")] == ["a", "b", None]

    def test_a_session_moves_when_its_home_is_gone_and_stays_where_it_moved(self) -> None:
        router = router_of("a", "b")
        router.finished(router.launched(request(words(1, 64), session="s"), "a"))
        router.remove("a")
        assert router.home_of("", "s") is None
        assert serve(router, request(words(1, 64), session="s")) == "b"
        router.add("a", 10_000, 64)
        assert router.choose(request(words(1, 64), session="s")) == "b"

    def test_a_session_that_was_not_used_meanwhile_is_free_when_its_home_comes_back_empty(self) -> None:
        router = router_of("a", "b")
        router.finished(router.launched(request(words(1, 64), session="s"), "a"))
        router.remove("a")
        router.add("a", 10_000, 64)
        assert router.home_of("", "s") is None

    def test_only_so_many_homes_are_remembered_the_latest_used(self) -> None:
        router = router_of("a", max_sessions=3)
        for name in "pqrps":
            serve(router, request(words(1, 64), session=name))
        assert [router.home_of("", name) for name in "pqrs"] == ["a", None, "a", "a"]
        router.forget_session("", "p")
        assert router.home_of("", "p") is None


class TestDeath:
    def test_what_was_not_begun_is_handed_back_and_what_was_is_reported(self) -> None:
        router = router_of("a", "b")
        first, second, third = (request(words(i, 64), name=f"r{i}") for i in range(3))
        router.launched(first, "a")
        begun = router.launched(second, "a")
        router.progress(begun, 1)
        router.launched(third, "a")
        router.finished(router.launched(request(words(4, 64)), "a"))
        lost = router.remove("a")
        assert lost.unstarted == [first, third]
        assert lost.started == [second]
        assert [router.choose(one) for one in lost.unstarted] == ["b", "b"]
        assert router.remove("a") == router.remove("nobody")

    def test_one_that_comes_back_is_empty_and_idle(self) -> None:
        router = router_of("a")
        router.launched(request(DOCUMENT), "a")
        router.remove("a")
        router.add("a", 10_000, 64)
        (figures,) = router.figures()
        assert (figures.open_requests, figures.queued_tokens, figures.kv_tokens, figures.known_blocks) == (0, 0, 0, 0)
        assert send(router, request(DOCUMENT)).uncached == len(DOCUMENT)

    def test_late_news_of_a_flight_that_is_over_changes_nothing(self) -> None:
        router = router_of("a", "b")
        asked = request(words(1, 64))
        old = router.launched(asked, "a")
        router.remove("a")
        router.add("a", 10_000, 64)
        router.launched(asked, "a")
        before = router.figures()
        router.progress(old, 5)
        router.finished(old)
        assert router.figures() == before

    def test_with_nobody_left_it_says_so(self) -> None:
        router = router_of("a")
        router.remove("a")
        with pytest.raises(EngineDeadError, match="no replica is alive"):
            router.choose(request(SYSTEM))
        with pytest.raises(EngineDeadError, match="'a' is gone"):
            router.launched(request(SYSTEM), "a")

    def test_a_name_is_taken_once_and_room_is_needed(self) -> None:
        router = router_of("a")
        with pytest.raises(ValidationError, match="'a' is there already"):
            router.add("a", 10, 1)
        with pytest.raises(ValidationError, match="0 blocks"):
            router.add("b", 0, 1)
        assert router.alive == ["a"]
