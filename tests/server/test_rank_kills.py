"""One rank of several is killed under load: every request gets a response, and the server recovers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import children
from tests.server.attacked_server import AttackedServer, attacked_server
from tests.server.test_abuse_crowd import kills, run

pytestmark = pytest.mark.timeout(3000)


@pytest.fixture
def attacked(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackedServer]:
    """A server whose model is split over two processes."""
    with attacked_server(tiny_model, tmp_path_factory.mktemp("ranks"), "--tensor-parallel-size", "2") as made:
        yield made
        made.assert_unharmed()


def a_rank(engine: int, rng: random.Random) -> int:
    """Any of the engine's ranks."""
    ranks = [pid for pid in children(engine) if b"quire.executor.rank" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(ranks) == 2
    return rng.choice(ranks)


def test_one_kill(attacked: AttackedServer) -> None:
    run(attacked, kills(attacked, 1, settled=0.0, victim=a_rank, within=5.0))
    assert "was killed by SIGKILL" in attacked.stderr


@pytest.mark.slow
def test_fifty_kills(attacked: AttackedServer) -> None:
    """Each engine serves for a while first: the restart delay grows for engines that die soon after starting."""
    run(attacked, kills(attacked, 50, settled=10.5, victim=a_rank, within=5.0))
