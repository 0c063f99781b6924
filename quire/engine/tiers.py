"""Builds the tiers below the device's cache, and the sessions stored in them, from a configuration."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

from quire.config import EngineConfig
from quire.kvcache.block_tables import BlockTables
from quire.kvcache.offload.block_store import open_block_store
from quire.kvcache.offload.costs import Costs
from quire.kvcache.offload.host_tier import HostTier
from quire.kvcache.offload.io_threads import IOThreads
from quire.kvcache.offload.manager import OffloadManager
from quire.kvcache.prefix_cache import ContentKeys
from quire.loading.files import ModelFiles
from quire.loading.model_config import ModelConfig, tokens_fingerprint, weights_fingerprint
from quire.models.registry import implementation
from quire.paths import scratch_prefix
from quire.quantization.find import on_load_identity
from quire.sessions.keeper import SessionKeeper
from quire.sessions.log import SessionStore
from quire.sessions.pinned_blocks import PinnedBlocks
from quire.sessions.quota import SessionQuota
from quire.sessions.session_kv import SessionKV
from quire.worker.building import DTYPES, resolve_kv_dtype
from quire.worker.moves import HostTierInfo

logger = logging.getLogger(__name__)

CHUNKS_AT_START = 1024
"""Chunks of 256 tokens whose blocks are pinned before the engine is ready."""
LAYOUT = 1
"""Version of the layout of a block's bytes."""


def stored_dtype(config: EngineConfig, files: ModelFiles, model: ModelConfig, dtype: str) -> str:
    """How blocks store keys and values that are computed in `dtype`, for `kv_fingerprint`."""
    name = resolve_kv_dtype(config, files, model)
    return dtype if name == "auto" or name in DTYPES else f"{dtype} as {name.removesuffix('_e4m3')}"


def kv_fingerprint(config: EngineConfig, files: ModelFiles, model: ModelConfig, dtype: str, layout: str = "") -> bytes:
    """What the content of blocks depends on besides their tokens. `dtype`: how they store keys and values; `layout`:
    where in a block each layer's are, if the model is not a plain one."""
    weights = weights_fingerprint(files, model, config.load_format, config.seed)
    # With several ranks a block is the concatenation of their parts.
    sizes = (config.tensor_parallel_size, config.pipeline_parallel_size, config.pipeline_layers)
    cut = "" if config.num_ranks == 1 else "|{}|{}|{}".format(*sizes)
    own = implementation(model.architecture, config.model_impl) == "quire"
    code = "" if own else "through transformers"
    packed = "packed on a CPU" if config.cpu_weights == "packed" else ""
    tiers = "" if config.kv_tier_dtype == "auto" else f"tiers {config.kv_tier_dtype}"
    more = "".join(f"|{part}" for part in (code, on_load_identity(config), packed, layout, tiers) if part)
    return weights + f"|{dtype}|{config.block_size}|{LAYOUT}{cut}{more}".encode()


def make_tiers(
    config: EngineConfig, fingerprint: bytes, tables: BlockTables, room: HostTierInfo | None
) -> OffloadManager | None:
    """Host memory, and a block store below it if `kv_disk` is set; None if there is no host tier."""
    if room is None:
        return None
    size = room.slot_bytes
    costs = Costs(size, room.out_rate, room.back_rate)
    if config.kv_disk is None:
        tiers = OffloadManager(tables, HostTier(room.num_slots), costs)
    else:
        folder = Path(config.kv_disk).expanduser() / "blocks"
        store = open_block_store(config.kv_store, folder, fingerprint, size, int(config.kv_disk_size * 2**30))
        host = HostTier(room.num_slots, is_backed=store.has)
        tiers = OffloadManager(tables, host, costs, IOThreads(store), room.slot)
        logger.info("block store %s in %s: %d KV blocks", config.kv_store, folder, len(store))
    logger.info(
        "host tier: %.2f GiB = %d blocks; %.1f GB/s from the device, %.1f GB/s to the device",
        room.num_slots * size / 2**30, room.num_slots, room.out_rate / 1e9, room.back_rate / 1e9,
    )  # fmt: skip
    return tiers


_scratch: list[tempfile.TemporaryDirectory[str]] = []
"""Folders of this process's sessions that end with it."""


def remove_scratch() -> None:
    """Remove what this process wrote to temporary folders: it is about to exit without cleaning up."""
    for folder in _scratch:
        folder.cleanup()


def make_sessions(
    config: EngineConfig, model: ModelConfig, fingerprint: bytes, tables: BlockTables, keys: ContentKeys,
    tiers: OffloadManager | None, max_model_len: int, quota: SessionQuota,
) -> SessionKeeper:  # fmt: skip
    """Sessions in the folder of the disk tier; without one, in a temporary folder: they end with the engine."""
    blocks = None if tiers is None else tiers.store
    scratch = None
    if config.kv_disk is None:
        scratch = tempfile.TemporaryDirectory(prefix=scratch_prefix(os.getpid()), ignore_cleanup_errors=True)
        _scratch.append(scratch)
        store = SessionStore.open(scratch.name)
    else:
        folder = Path(config.kv_disk).expanduser() / "sessions"
        store = SessionStore.open(folder, make_room=None if blocks is None else blocks.free_space)
    pinned = (
        None if blocks is None else PinnedBlocks(store, blocks, keys, fingerprint, tables if tables.others else None)
    )
    kv = SessionKV(tables, keys, store, fingerprint, tiers, pinned)
    if pinned is not None:
        kv.pin_loaded(CHUNKS_AT_START)  # the others when the engine is idle, and a few each second when it is not
        logger.info("%d sessions in %s", len(store), store.folder)
    return SessionKeeper(
        store, kv, tiers, config.session_idle_seconds, token_fingerprint=tokens_fingerprint(model),
        vocab_size=model.vocab_size, max_model_len=max_model_len, quota=quota, scratch=scratch,
    )  # fmt: skip
