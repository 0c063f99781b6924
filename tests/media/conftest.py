"""Servers of a tiny model that sees."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.media.seeing_model import write_seeing_model
from tests.server.conftest import Host, Live, host, live, plain_server  # noqa: F401 - fixtures


@pytest.fixture(scope="session")
def seeing_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeing_model(tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="session")
def media_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("media")


@pytest.fixture(scope="session")
def seeing_host(seeing_model: Path, media_folder: Path) -> Iterator[Host]:
    made = Host(
        seeing_model,
        num_gpu_blocks_override=512,
        max_model_len=512,
        allowed_media_hosts=("*",),
        allowed_local_media_path=str(media_folder),
        media_timeout=2.0,
        max_image_bytes=1 << 20,
        max_image_pixels=1_000_000,
        limit_mm_per_prompt={"image": 4, "video": 1},
    )
    yield made
    made.close()


@pytest.fixture(scope="session")
def seeing_server(seeing_host: Host) -> Iterator[Live]:
    started, stop = seeing_host.start()
    yield started
    stop()


@pytest.fixture
def seeing(seeing_server: Live) -> Iterator[Live]:
    """A server with a model that takes images; checked to be idle after the test."""
    yield seeing_server
    seeing_server.assert_idle()
