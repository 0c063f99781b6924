"""Replicas on one machine: the share of its devices, cores, memory and disk that each gets."""

from __future__ import annotations

import dataclasses
import logging
import os
from pathlib import Path
from typing import Any

from quire.config import EngineConfig
from quire.distributed.groups import shares_gpu
from quire.errors import ConfigError
from quire.executor.registry import executor_backend

logger = logging.getLogger(__name__)

VISIBLE = "CUDA_VISIBLE_DEVICES"
CPU_SPACE = "QUIRE_CPU_KVCACHE_SPACE"


def replica_config(config: EngineConfig, replica: int) -> EngineConfig:
    """The settings of one replica: those that mean the whole machine are divided."""
    replicas = config.data_parallel_size
    if replicas == 1:
        return config
    share: dict[str, Any] = {
        "data_parallel_size": replicas if config.steps_together else 1,
        "cpu_kv_cache_share": config.cpu_kv_cache_share / replicas,
        "swap_space": config.swap_space / replicas,
        "kv_disk_size": config.kv_disk_size / replicas,
    }
    if config.power_budget is not None:
        share["power_budget"] = config.power_budget / replicas
    if config.energy_meter == "auto":
        share["energy_meter"] = "own"
    if shares_gpu():
        share["gpu_memory_utilization"] = config.gpu_memory_utilization / replicas
    if config.kv_disk is not None:
        share["kv_disk"] = str(replica_folder(config.kv_disk, replica))
    return dataclasses.replace(config, **share)


def replica_folder(kv_disk: str, replica: int) -> Path:
    """A replica's folder for blocks and sessions: a folder has one owner."""
    return Path(kv_disk).expanduser() / f"replica-{replica}"


def warn_of_orphans(config: EngineConfig) -> None:
    """Warn of sessions on disk that are not loaded because `data_parallel_size` was different when they were stored."""
    if config.kv_disk is None:
        return
    folder, replicas = Path(config.kv_disk).expanduser(), config.data_parallel_size
    others = sorted(
        path.name
        for path in folder.glob("replica-*")
        if path.name[8:].isdecimal() and (replicas == 1 or int(path.name[8:]) >= replicas)
    )
    if replicas > 1 and (folder / "sessions").is_dir():
        others.append("sessions")
    if others:
        logger.warning(
            "%s holds %s of a run with another data_parallel_size: it is not loaded with data_parallel_size %d",
            folder, ", ".join(others), replicas,
        )  # fmt: skip


def limit_to_share(config: EngineConfig, replica: int, replicas: int) -> None:
    """Limit this process to its replica's threads, memory and GPUs. Before anything uses a device."""
    if replicas == 1:
        return
    import torch

    from quire.platforms.cpu import set_threads

    set_threads()
    torch.set_num_threads(max(1, torch.get_num_threads() // replicas))
    if (space := config.cpu_kv_cache_bytes) is not None:
        os.environ[CPU_SPACE] = str(space / replicas / 2**30)
    if config.device == "cpu" or shares_gpu() or not executor_backend(config).uses_local_devices:
        return
    # Counted through NVML: initializing CUDA would fix the devices this process sees.
    if count := torch.cuda.device_count():
        os.environ[VISIBLE] = own_devices(os.environ.get(VISIBLE), count, replica, replicas, config.num_ranks)


def own_devices(visible: str | None, count: int, replica: int, replicas: int, each: int) -> str:
    """CUDA_VISIBLE_DEVICES of one replica: its slice of the `count` visible GPUs."""
    if replicas * each > count:
        raise ConfigError(
            f"data_parallel_size is {replicas} with {each} GPU{'s' if each > 1 else ''} each: {replicas * each} are "
            f"needed, and this machine shows {count}; lower it, or check {VISIBLE}",
            "data_parallel_size",
            replicas,
        )
    names = visible.split(",")[:count] if visible else [str(number) for number in range(count)]
    return ",".join(names[replica * each : (replica + 1) * each])
