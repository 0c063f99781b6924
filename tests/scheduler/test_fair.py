"""Fair shares: weights, caps, limited credit for idle tenants, and all requests finish."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.config import EngineConfig
from quire.errors import ConfigError, ValidationError
from quire.kvcache.block_tables import BlockTables
from quire.kvcache.prefix_cache import ContentKeys
from quire.messages.request import NewRequest, Request
from quire.messages.sampling import SamplingParams
from quire.scheduler.policies.fair import LEEWAY, FairShare
from quire.scheduler.policies.registry import make_policy
from quire.scheduler.request_table import RequestTable
from tests.scheduler.harness import Bench, rng_of
from tests.scheduler.sequences import Sequences
from tests.scheduler.test_storm import EngineShape, Storm


def fair(**settings: object) -> EngineConfig:
    return EngineConfig(scheduling_policy="fair", **settings)  # type: ignore[arg-type]


class Counters:
    """The policy over one row: each request is admitted, computed whole, and finished. Only its cost matters."""

    def __init__(self, config: EngineConfig, rows: int = 1) -> None:
        self.policy = make_policy("fair", config)
        self.requests = RequestTable(BlockTables(1001, 1), self.policy, ContentKeys(1, b""), rows)
        self.served: Counter[str] = Counter()
        self._numbers = itertools.count()

    def add(self, tenant: str, priority: int = 0, arrival: float = 0.0) -> Request:
        number = next(self._numbers)
        source = NewRequest(
            str(number), [1], SamplingParams(), limit=4, tenant=tenant, priority=priority, arrival=arrival
        )
        request = Request(source, 0, number)
        self.policy.add(request)
        return request

    def serve(self, cost: int) -> Request:
        request = self.policy.next()
        assert request is not None
        self.policy.remove(request)
        assert isinstance(self.policy, FairShare)
        self.requests.rows.take(request, 0, 1, 0)
        self.policy.charge(request, cost)
        self.requests.rows.give_back(request)
        self.served[request.source.tenant] += cost
        return request


WEIGHTS = st.lists(st.sampled_from([0.25, 0.5, 1, 1, 2, 3, 10]), min_size=2, max_size=5)


@settings(max_examples=60, deadline=None)
@given(WEIGHTS, st.lists(st.integers(1, 50), min_size=30, max_size=150))
def test_shares_match_the_weights_to_within_a_request(weights: list[float], costs: list[int]) -> None:
    table = {f"t{i}": weight for i, weight in enumerate(weights)}
    counters = Counters(fair(tenant_weights=table))
    for tenant in table:
        counters.add(tenant)
    for cost in costs:
        counters.add(counters.serve(cost).source.tenant)
        counters.policy.add(counters.policy.next())  # type: ignore[arg-type]  # again: nothing changes
        per_weight = {tenant: counters.served[tenant] / weight for tenant, weight in table.items()}
        for one, other in itertools.permutations(table, 2):
            most = max(costs) / table[one] + max(costs) / table[other]
            assert abs(per_weight[one] - per_weight[other]) <= most + 1e-6


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 400), st.lists(st.integers(1, 500), min_size=10, max_size=100))
def test_idle_tenants_save_up_no_more_than_the_leeway(away: int, costs: list[int]) -> None:
    counters = Counters(fair())
    counters.add("late")
    for tenant in ("a", "b"):
        counters.add(tenant)
        counters.add(tenant)
    while counters.serve(1).source.tenant != "late":
        pass
    for _ in range(away):
        counters.add(counters.serve(700).source.tenant)
    counters.served.clear()
    counters.add("late")
    for cost in costs:
        counters.add(counters.serve(cost).source.tenant)
    assert counters.served["a"] - counters.served["late"] <= 2 * max(costs)
    assert counters.served["late"] - counters.served["a"] <= LEEWAY + 700 + 2 * max(costs)


def test_a_tenant_that_used_less_than_its_share_has_no_claim_on_the_rest() -> None:
    """The clock alone would be behind: it assumes that every tenant uses all of its share."""
    counters = Counters(fair(tenant_weights={"modest": 100}), rows=2)
    modest = counters.add("modest")
    counters.policy.remove(modest)
    counters.requests.rows.take(modest, 0, 1, 0)
    counters.add("a")
    for _ in range(100):
        counters.add("a")
        counters.serve(1000)
    counters.add("new")
    counters.served.clear()
    for _ in range(20):
        counters.add(counters.serve(1000).source.tenant)
    assert abs(counters.served["new"] - counters.served["a"]) <= LEEWAY + 2000


def test_priorities_count_and_age_within_a_tenant_and_not_between_tenants() -> None:
    counters = Counters(fair())
    counters.add("loud", priority=-1000)
    counters.add("loud", priority=-1000)
    counters.add("a", priority=2)
    counters.add("a", priority=0)
    counters.add("a", priority=1)
    counters.add("a", priority=0, arrival=100.0)
    order = [counters.serve(1).source for _ in range(6)]
    assert [source.tenant for source in order[:4]] == ["loud", "a", "loud", "a"]
    assert [source.id for source in order if source.tenant == "a"] == ["3", "4", "2", "5"]


def test_an_endless_stream_of_new_tenants_starves_no_request() -> None:
    counters = Counters(fair())
    counters.add("patient")
    counters.add("patient")
    counters.serve(5000)
    names = (f"new{i}" for i in itertools.count())
    for _ in range(3):
        counters.add(next(names))
    for _ in range(300):
        counters.add(next(names))
        if counters.serve(100).source.tenant == "patient":
            break
    assert counters.served["patient"] == 5100
    for _ in range(3):
        counters.serve(10)
    assert isinstance(counters.policy, FairShare)
    assert len(counters.policy._tenants) < 64, "idle tenants are dropped"


# In the engine


@pytest.mark.parametrize("depth", [0, 1])
def test_under_contention_tokens_are_shared_by_weight(depth: int) -> None:
    bench = Bench(blocks=400, max_rows=8, policy="fair", depth=depth, config=fair(tenant_weights={"heavy": 3}))
    for i in range(120):
        bench.add(f"heavy{i}", 5, 8, tenant="heavy")
        bench.add(f"light{i}", 5, 8, tenant="light")
    for _ in range(100):
        bench.step()
    received = Counter[str]()
    for (id, _), sequence in bench.sequences.items():
        received[id[:5]] += len(sequence.tokens)
    assert 2.6 < received["heavy"] / received["light"] < 3.4
    bench.run(4000)
    bench.assert_right()


def latencies(policy: str, greedy: int, prompt: int, output: int) -> list[int]:
    """Steps from arrival to finish, for one request after the other, beside a tenant with very many."""
    bench = Bench(blocks=600, max_rows=8, budget=16, policy=policy, config=fair() if policy == "fair" else None)
    for i in range(greedy):
        bench.add(f"greedy{i}", prompt, 60, tenant="greedy")
    for _ in range(20):
        bench.step()
    steps = []
    for i in range(5):
        bench.add(f"light{i}", 8, output, tenant="light")
        steps.append(0)
        while bench.sequences[(f"light{i}", 0)].finished is None:
            bench.step()
            steps[-1] += 1
    bench.run(40_000)
    bench.assert_right()
    return steps


@pytest.mark.parametrize("prompt", [3, 40])
def test_a_greedy_tenant_slows_a_light_one_by_no_more_than_its_share(prompt: int) -> None:
    (alone,) = set(latencies("fair", 0, prompt, 6))
    assert alone == 6
    beside = latencies("fair", 200, prompt, 6)
    assert max(beside) <= 2 * alone + 1, beside
    first = latencies("fcfs", 200, prompt, 6)[0]
    assert first > 50 * alone, "first come, first served, in contrast"


def test_a_tenant_that_returns_gets_its_share_of_blocks() -> None:
    bench = Bench(blocks=40, block_size=4, max_rows=8, policy="fair")
    for i in range(4):
        bench.add(f"greedy{i}", 30, 60, tenant="greedy")
    for _ in range(12):
        bench.step()
    bench.add("light", 30, 4, tenant="light")
    for _ in range(8):
        bench.step()
    assert bench.sequences[("light", 0)].finished is not None
    bench.run()
    bench.assert_right()


def test_a_preempted_tenant_does_not_preempt_in_return() -> None:
    bench = Bench(blocks=400, max_rows=4, policy="fair")
    for i in range(8):
        bench.add(f"a{i}", 4, 50, tenant="a")
    bench.step()
    for i in range(8):
        bench.add(f"b{i}", 4, 50, tenant="b")
    for _ in range(30):
        bench.step()
    assert bench.scheduler.stats.preemptions == 2, "two rows each, once and for all"
    bench.run()
    bench.assert_right()


# Caps


def test_caps_hold_while_rows_are_free() -> None:
    config = fair(tenant_max_rows={"a": 2, "*": 0.5}, tenant_max_blocks={"c": 4})
    bench = Bench(blocks=100, block_size=4, max_rows=8, policy="fair", config=config)
    for i, tenant in itertools.product(range(8), "abc"):
        bench.add(f"{tenant}{i}", 5, 6, tenant=tenant)
    bench.step()
    assert Counter(id[0] for id, _ in bench.running()) == {"a": 2, "b": 4, "c": 2}
    bench.run()
    bench.assert_right()


def test_a_request_larger_than_its_tenants_cap_is_refused() -> None:
    bench = Bench(blocks=100, block_size=4, policy="fair", config=fair(tenant_max_blocks={"a": 3}))
    bench.add("fits", 6, 7, tenant="a")
    with pytest.raises(ValidationError, match="may grow to 14 tokens .*'a' may hold 3 blocks of 4, enough for 13"):
        bench.add("large", 7, 7, tenant="a")
    bench.add("other", 7, 7, tenant="b")
    source = bench.request("open", 5, 50, tenant="a")
    source.params.max_tokens = None
    bench.put(source)
    assert source.limit == 13, "without max_tokens it ends where the cap is reached"
    bench.run()


def test_growth_beyond_the_cap_preempts_the_tenants_own_row() -> None:
    config = fair(tenant_max_blocks={"a": 6})
    bench = Bench(blocks=100, block_size=4, policy="fair", config=config)
    bench.add("b", 4, 30, tenant="b")
    for i in range(3):
        bench.add(f"a{i}", 7, 13, tenant="a")
    while bench.core.has_work:
        bench.step()
        held = sum(len(request.blocks) for request in bench.scheduler.rows.running() if request.source.tenant == "a")
        assert held <= 6
    bench.assert_right()
    lost = {id for (id, _), sequence in bench.sequences.items() if sequence.finished and sequence.finished.preemptions}
    assert lost and lost <= {"a1", "a2"}, "not its oldest, and no other tenant's"
    bench.scheduler.check_idle()


def test_sequences_and_beams_respect_the_caps_too() -> None:
    config = fair(tenant_max_rows={"*": 2})
    bench = Bench(blocks=100, max_rows=8, policy="fair", config=config)
    bench.add("many", 5, 6, n=7, tenant="a")
    bench.add("one", 5, 6, tenant="b")
    while bench.core.has_work:
        bench.step()
        assert sum(id == "many" for id, _ in bench.running()) <= 2
    bench.assert_right()
    for rows in (1, 3):
        beams = Sequences(policy="fair", config=fair(tenant_max_rows={"*": rows}))
        beams.search("wide", [3, 4, 5, 6, 7], width=4, output=5)
        while beams.core.has_work:
            beams.step()
            assert beams.scheduler.rows.used <= rows
        beams.assert_right()
        beams.scheduler.check_idle()


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"tenant_weights": {"a": 0}}, r"tenant_weights\['a'\] must be a number above 0, got 0"),
        ({"tenant_weights": {"a": float("inf")}}, "must be a number above 0, got inf"),
        ({"tenant_weights": {"a": True}}, "must be a number above 0, got True"),
        ({"tenant_weights": [1]}, r"must map tenants to numbers, as {\"\*\": 1}; got \[1\]"),
        ({"tenant_weights": {1: 1}}, "tenant names as keys, got 1"),
        ({"tenant_max_rows": {"*": 0}}, "an integer of at least 1 .a count. or a number between 0 and 1 .a share."),
        ({"tenant_max_rows": {"*": 1.5}}, "got 1.5"),
        ({"tenant_max_blocks": {"a": "3"}}, "got '3'"),
        (
            {"tenant_max_blocks": {"a": 3}, "scheduling_policy": "fcfs"},
            "needs scheduling_policy='fair'; 'fcfs' ignores",
        ),
    ],
)
def test_invalid_shares_are_refused_in_one_line(settings: dict[str, object], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        EngineConfig(**{"scheduling_policy": "fair", **settings})  # type: ignore[arg-type]


# Storms


class FairStorm(Storm):
    """After every step no cap is exceeded, and the policy's counts match the rows."""

    def _step(self) -> None:
        super()._step()
        policy, rows, pool = self.bench.scheduler.policy, self.bench.scheduler.rows, self.bench.tables.pool
        assert isinstance(policy, FairShare)
        held_rows, held_blocks = Counter[str](), Counter[str]()
        for request in rows.running():
            held_rows[request.source.tenant] += 1
            held_blocks[request.source.tenant] += len(request.blocks)
        for name, tenant in policy._tenants._by_name.items():
            assert policy._tenants.rows[tenant.place] == held_rows[name]
            assert policy._tenants.waiting[tenant.place] == len(tenant.queue)
            assert held_rows[name] <= policy.shares.row_cap(name, rows.size)
            assert held_blocks[name] <= policy.shares.block_cap(name, pool.capacity)
        assert not set(held_rows) - set(policy._tenants._by_name)


CAPPED = fair(
    tenant_weights={"a": 3, "b": 0.5}, tenant_max_rows={"a": 3, "*": 0.7}, tenant_max_blocks={"b": 0.8, "c": 30}
)
TENANTS = ("a", "b", "c", "d")
STORMS = [
    EngineShape(policy="fair", tenants=TENANTS, config=config, depth=depth, **shape)  # type: ignore[arg-type]
    for config in (fair(), CAPPED)
    for depth, shape in [
        (0, {}),
        (1, {}),
        (2, {"blocks": 25, "failure_rate": 0.02}),
        (1, {"blocks": 200, "failure_rate": 0.02, "budget": 9}),
        (0, {"rows": 2, "blocks": 22}),
        (1, {"rows": 16, "blocks": 30, "prefix_caching": False}),
        (1, {"chunked": False, "budget": 9}),
        (0, {"budget": 1}),
        (1, {"block_size": 1, "blocks": 90, "abort_rate": 0.5}),
        (1, {"empty_rate": 0.1}),
    ]
]


@pytest.mark.parametrize("shape", STORMS, ids=range(len(STORMS)))
def test_storms_of_tenants(shape: EngineShape) -> None:
    FairStorm(shape, requests=150, seed=4).run()


@pytest.mark.parametrize("seed", [13, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(100, 400))])
def test_long_storms_of_tenants(seed: int) -> None:
    rng = rng_of("tenants", seed)
    tenants = tuple(f"t{i}" for i in range(rng.choice([1, 2, 5, 40])))
    shape = rng.choice(STORMS)
    shape = EngineShape(**{**vars(shape), "tenants": tenants, "rows": rng.choice([1, 2, 5, 16])})
    FairStorm(shape, requests=300, seed=seed).run()
