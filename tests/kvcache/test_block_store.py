"""Block stores by name: the registry, the setting, and what a store may leave out."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.config import EngineConfig
from quire.errors import ConfigError, ValidationError
from quire.kvcache.offload.block_store import open_block_store
from quire.kvcache.offload.disk.store import DiskStore
from tests.scheduler.harness import MemoryStore


def test_a_store_is_opened_by_name_or_dotted_path(tmp_path: Path) -> None:
    disk = open_block_store("disk", tmp_path, b"model", 64, 1 << 16)
    assert isinstance(disk, DiskStore)
    disk.close()
    memory = open_block_store("tests.scheduler.harness.MemoryStore", tmp_path, b"model", 64, 1 << 16)
    assert isinstance(memory, MemoryStore) and memory.capacity == 1024
    with pytest.raises(ValidationError, match="unknown block store 'tape'; known: disk"):
        open_block_store("tape", tmp_path, b"model", 64, 1 << 16)


def test_optional_methods_have_defaults() -> None:
    store = MemoryStore(capacity=3)
    assert store.write(b"a", memoryview(b"1")) and len(store) == 1
    assert store.headroom == (3, 3)
    store.pin([b"a"])
    store.unpin([b"a"])
    assert store.free_space(100) == 0
    store.close()


def test_the_setting_needs_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kv_disk"):
        EngineConfig(model="m", kv_store="my_package.Store")
    assert EngineConfig(model="m", kv_store="my_package.Store", kv_disk=str(tmp_path)).kv_store == "my_package.Store"
