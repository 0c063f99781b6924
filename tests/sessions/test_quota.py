"""What one tenant may store: sessions, tokens and bytes, whichever operation adds them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quire.config import EngineConfig
from quire.errors import SessionQuotaError, ValidationError
from quire.kvcache.block_tables import BlockTables
from quire.kvcache.prefix_cache import ContentKeys
from quire.messages.request import NewRequest
from quire.messages.sampling import SamplingParams
from quire.server.errors import as_api_error
from quire.sessions.keeper import SessionKeeper
from quire.sessions.log import SessionStore, owner_id, session_key
from quire.sessions.log.catalog import SPARE_DUE
from quire.sessions.quota import SERVED, SessionQuota
from quire.sessions.session_kv import SessionKV

Open = Callable[..., SessionKeeper]


@pytest.fixture
def open_keeper(tmp_path: Path) -> Iterator[Open]:
    opened: list[SessionKeeper] = []

    def start(quota: SessionQuota, max_model_len: int = 1000) -> SessionKeeper:
        for keeper in opened:
            keeper.close()
        store = SessionStore.open(tmp_path / "sessions")
        kv = SessionKV(BlockTables(8, 16, True), ContentKeys(16, b"m"), store, b"m")
        opened.append(SessionKeeper(store, kv, vocab_size=512, max_model_len=max_model_len, quota=quota))
        return opened[-1]

    yield start
    opened[-1].close()


def turn(session: str, prompt: list[int]) -> NewRequest:
    return NewRequest(id="1", prompt=prompt, params=SamplingParams(), limit=1000, session=session)


def test_a_tenant_has_no_more_sessions_than_its_quota_and_others_have_theirs(open_keeper: Open) -> None:
    keeper = open_keeper(SessionQuota(sessions=2))
    ours = [session_key("us", name) for name in "abc"]
    keeper.create(ours[0], [1, 2, 3])
    keeper.fork(ours[0], ours[1])
    for act in (
        lambda: keeper.create(ours[2]),
        lambda: keeper.fork(ours[0], ours[2]),
        lambda: keeper.rewrite(ours[2], [1]),
        lambda: keeper.import_(keeper.export(ours[0]), lambda name: ours[2]),
    ):
        with pytest.raises(SessionQuotaError, match=r"use 2 of 2 sessions \(max_tenant_sessions\)"):
            act()
    keeper.create(session_key("them", "a"))
    keeper.append(ours[0], [4])
    keeper.delete(ours[1])
    keeper.create(ours[2])
    assert keeper.refused == 4
    assert keeper.use(owner_id("us")).sessions == 2


def test_every_way_to_add_tokens_is_bounded(open_keeper: Open) -> None:
    keeper = open_keeper(SessionQuota(tokens=100))
    keeper.create("a", range(60))
    for act in (
        lambda: keeper.create("b", range(41)),
        lambda: keeper.append("a", range(41)),
        lambda: keeper.append("a", range(51), at=50),
        lambda: keeper.rewrite("a", range(101)),
        lambda: keeper.fork("a", "b"),
        lambda: keeper.fork("a", "b", 41),
        lambda: keeper.import_(keeper.export("a"), lambda name: "b"),
    ):
        with pytest.raises(SessionQuotaError, match=r"use 60 of 100 tokens \(max_tenant_session_tokens\)"):
            act()
        assert keeper.use("").tokens == 60, "a refused operation changes nothing"
    keeper.append("a", range(50), at=50)
    assert keeper.use("").tokens == 100
    with pytest.raises(SessionQuotaError, match="this needs 1 more"):
        keeper.begin(turn("a", keeper.tokens("a")))
    keeper.append("a", [1], at=99)  # what does not grow is not refused
    keeper.cut("a", 40)
    keeper.fork("a", "b")
    assert keeper.use("").tokens == 80
    keeper.begin(turn("a", keeper.tokens("a")))


def test_metadata_and_small_appends_count_as_bytes(open_keeper: Open) -> None:
    keeper = open_keeper(SessionQuota(bytes=20_000))
    keeper.create("a", meta={"k": "x" * 4000})
    before = keeper.use("").bytes
    assert before > 4000
    keeper.append("a", [1])
    assert keeper.use("").bytes >= before + 100, "the frame that holds one token"
    with pytest.raises(SessionQuotaError, match=r"of 20000 bytes of sessions \(max_tenant_session_bytes\)"):
        for number in itertools.count():
            keeper.create(f"m{number}", meta={"k": "x" * 4000})
    assert number == 3
    with pytest.raises(SessionQuotaError, match="bytes of sessions"):
        keeper.update("a", meta={"k": "y" * 4090})


def test_use_survives_a_restart(open_keeper: Open) -> None:
    keeper = open_keeper(SessionQuota())
    for name, tokens in (("a", 700), ("b", 10), ("c", 300)):
        keeper.create(session_key("us", name), range(tokens))
    keeper.fork(session_key("us", "a"), session_key("us", "d"), 600)
    keeper.delete(session_key("us", "b"))
    keeper.create("z", range(5))
    before = keeper.use(owner_id("us"))
    assert (before.sessions, before.tokens) == (3, 1600)
    again = open_keeper(SessionQuota(sessions=3))
    assert again.use(owner_id("us")) == before
    with pytest.raises(SessionQuotaError):
        again.create(session_key("us", "e"))


def test_an_import_is_not_longer_than_the_model(open_keeper: Open) -> None:
    keeper = open_keeper(SessionQuota(), max_model_len=500)
    keeper.create("a", range(500))
    assert keeper.import_(keeper.export("a"), lambda name: "b").num_tokens == 500
    keeper.append("a", [1])
    with pytest.raises(ValidationError, match="501 tokens, and max_model_len is 500"):
        keeper.import_(keeper.export("a"), lambda name: "c")


def test_expired_sessions_make_room(open_keeper: Open) -> None:
    keeper = open_keeper(SessionQuota(sessions=1))
    keeper.store._clock = lambda: 1e9
    keeper.create("a", ttl=5)
    keeper.store._clock = lambda: 2e9
    keeper.create("b")


def test_settings_become_bounds_with_a_share_for_each_engine() -> None:
    config = EngineConfig("m", max_tenant_sessions=0, max_tenant_session_tokens=100)
    quota = SessionQuota.of(config, SERVED)
    assert quota == SessionQuota(None, 100, SERVED.bytes)
    assert quota.share(3) == SessionQuota(None, 34, -(-SERVED.bytes // 3))  # type: ignore[operator]
    assert SessionQuota.of(EngineConfig("m"), SessionQuota()) == SessionQuota()


def test_the_error_is_a_429() -> None:
    assert as_api_error(SessionQuotaError("full")).status == 429


def test_changing_the_time_to_live_again_and_again_keeps_the_queue_short(open_keeper: Open) -> None:
    keeper = open_keeper(SessionQuota())
    keeper.create("a", ttl=1e6)
    for number in range(1000):
        keeper.update("a", ttl=1e6 + (number if number % 2 else -number), durable=False)
    assert len(keeper.store._expiry._due) <= 2 + SPARE_DUE
    keeper.store._clock = lambda: 4e9
    assert keeper.store.sweep() == ["a"]
