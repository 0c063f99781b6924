"""Tiers below the device's cache, and the sessions that live in them: from a configuration to what the loop uses."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

from quire.config import EngineConfig
from quire.kvcache.block_tables import BlockTables
from quire.kvcache.offload.costs import Costs
from quire.kvcache.offload.disk.io_threads import DiskIO
from quire.kvcache.offload.disk.store import DiskStore
from quire.kvcache.offload.host_tier import HostTier
from quire.kvcache.offload.manager import OffloadManager
from quire.kvcache.prefix_cache import ContentKeys
from quire.loading.files import ModelFiles
from quire.loading.model_config import ModelConfig, tokens_fingerprint, weights_fingerprint
from quire.sessions.keeper import SessionKeeper
from quire.sessions.log import SessionStore
from quire.sessions.pinned_blocks import PinnedBlocks
from quire.sessions.session_kv import SessionKV
from quire.worker.moves import HostRoom

logger = logging.getLogger(__name__)

LAYOUT = 1
"""Of a block's bytes: goes up when they mean something else."""


def kv_fingerprint(config: EngineConfig, files: ModelFiles, model: ModelConfig, dtype: str) -> bytes:
    """What the content of blocks depends on besides their tokens."""
    weights = weights_fingerprint(files, model, config.load_format, config.seed)
    # Over several ranks a block is their parts one after another.
    sizes = (config.tensor_parallel_size, config.pipeline_parallel_size, config.pipeline_layers)
    cut = "" if config.num_ranks == 1 else "|{}|{}|{}".format(*sizes)
    return weights + f"|{dtype}|{config.block_size}|{LAYOUT}{cut}".encode()


def make_tiers(
    config: EngineConfig, fingerprint: bytes, tables: BlockTables, room: HostRoom | None
) -> OffloadManager | None:
    """Host memory, and disk if there is a folder for it; None where there is neither."""
    if room is None:
        return None
    size = room.slot_bytes
    costs = Costs(size, room.out_rate, room.back_rate)
    if config.kv_disk is None:
        tiers = OffloadManager(tables, HostTier(room.num_slots), costs)
    else:
        folder = Path(config.kv_disk).expanduser()
        store = DiskStore.open(folder / "blocks", fingerprint, size, int(config.kv_disk_size * 2**30))
        host = HostTier(room.num_slots, is_backed=store.has)
        tiers = OffloadManager(tables, host, costs, DiskIO(store), room.slot)
        logger.info("KV blocks on disk: %s, %d there", store.folder, len(store))
    logger.info(
        "tiers: %.2f GiB of host memory = %d blocks; %.1f GB/s out, %.1f GB/s back",
        room.num_slots * size / 2**30, room.num_slots, room.out_rate / 1e9, room.back_rate / 1e9,
    )  # fmt: skip
    return tiers


def make_sessions(
    config: EngineConfig, model: ModelConfig, fingerprint: bytes, tables: BlockTables, keys: ContentKeys,
    tiers: OffloadManager | None,
) -> SessionKeeper:  # fmt: skip
    """Sessions in the folder of the disk tier; without one they end with the engine."""
    disk = None if tiers is None or tiers.disk is None else tiers.disk.store
    scratch = None
    if config.kv_disk is None:
        scratch = tempfile.TemporaryDirectory(prefix="quire-sessions-", ignore_cleanup_errors=True)
        store = SessionStore.open(scratch.name)
    else:
        store = SessionStore.open(
            Path(config.kv_disk).expanduser() / "sessions", make_room=None if disk is None else disk.give_back
        )
    held = None if disk is None else PinnedBlocks(store, disk, keys, fingerprint)
    if held is not None:
        held.hold_all()
        logger.info("%d sessions on disk: %s", len(store), store.folder)
    kv = SessionKV(tables, keys, store, fingerprint, tiers, held)
    return SessionKeeper(
        store, kv, tiers, config.session_idle_seconds, token_fingerprint=tokens_fingerprint(model), scratch=scratch
    )
