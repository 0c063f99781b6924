"""Replicas on one machine: each one's share."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from quire import EngineConfig
from quire.api.engine import LLMEngine
from quire.engine.device_split import own_devices, replica_config, warn_of_orphans
from quire.errors import ConfigError


@pytest.mark.parametrize(
    ("visible", "count", "replicas", "each", "wanted"),
    [
        (None, 4, 4, 1, ["0", "1", "2", "3"]),
        (None, 8, 2, 2, ["0,1", "2,3"]),
        ("3,1,2,0", 4, 2, 2, ["3,1", "2,0"]),
        ("GPU-a,GPU-b", 2, 2, 1, ["GPU-a", "GPU-b"]),
        ("5,6,-1,7", 2, 2, 1, ["5", "6"]),  # CUDA ignores what follows an invalid device
    ],
)
def test_every_engine_has_a_slice_of_the_devices(
    visible: str | None, count: int, replicas: int, each: int, wanted: list[str]
) -> None:
    assert [own_devices(visible, count, replica, replicas, each) for replica in range(replicas)] == wanted


def test_too_few_gpus_are_refused_with_the_numbers() -> None:
    with pytest.raises(
        ConfigError, match="data_parallel_size is 2 with 4 GPUs each: 8 are needed, and this machine shows 6"
    ):
        own_devices(None, 6, 0, 2, 4)


def test_settings_for_the_machine_are_divided() -> None:
    whole = EngineConfig(
        data_parallel_size=4, swap_space=8.0, cpu_kv_cache_share=0.4, kv_disk="kv", kv_disk_size=100.0, max_num_seqs=32
    )
    part = replica_config(whole, 2)
    assert (part.swap_space, part.cpu_kv_cache_share, part.kv_disk_size) == (2.0, 0.1, 25.0)
    assert part.kv_disk == "kv/replica-2" and part.max_num_seqs == 32 and part.data_parallel_size == 1
    alone = EngineConfig(swap_space=8.0, kv_disk="kv")
    assert replica_config(alone, 0) is alone


@pytest.mark.parametrize(
    ("folders", "replicas", "described"),
    [
        (["replica-0", "replica-1"], 2, ""),
        (["replica-0", "replica-1", "replica-2"], 2, "replica-2"),
        (["sessions"], 2, "sessions"),
        (["sessions"], 1, ""),
        (["replica-0"], 1, "replica-0"),
    ],
)
def test_sessions_of_another_replica_count_are_warned_about(
    folders: list[str], replicas: int, described: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in folders:
        (tmp_path / name).mkdir()
    with caplog.at_level(logging.WARNING, "quire"):
        warn_of_orphans(EngineConfig(kv_disk=str(tmp_path), data_parallel_size=replicas))
    assert (
        (f"holds {described} of a run with another data_parallel_size" in caplog.text)
        if described
        else not caplog.records
    )


def test_an_in_process_engine_has_no_replicas() -> None:
    with pytest.raises(ConfigError, match="use LLM, AsyncLLM or the server"):
        LLMEngine(EngineConfig(data_parallel_size=2))
