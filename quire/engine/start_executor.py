"""What runs the plans: a worker in this process, or ranks in processes of their own."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import torch

from quire.config import EngineConfig
from quire.distributed.groups import Ranks
from quire.distributed.lockstep import LockstepAddress, LockstepAgreement
from quire.engine.device_split import shares_gpu
from quire.errors import ConfigError
from quire.executor.base import Executor
from quire.executor.expert_balance import ExpertBalance
from quire.executor.links import StartedRanks
from quire.executor.local import LocalExecutor
from quire.executor.lockstep import LockstepExecutor
from quire.layers.moe import has_experts
from quire.loading.files import ModelFiles
from quire.loading.model_config import ModelConfig
from quire.platforms import choose
from quire.platforms.base import Platform
from quire.platforms.cuda import RemoteCudaPlatform
from quire.worker.building import build_model
from quire.worker.memory import MemoryNeeds, MemoryPlan, no_room
from quire.worker.moves import HostTierInfo
from quire.worker.worker import Worker

JOIN_SECONDS = 600.0
"""So long engines that step together wait for each other while they load, and where `step_timeout` sets no limit."""


@dataclass(frozen=True)
class Limits:
    """The most a sequence and a step have."""

    model_len: int
    rows: int
    tokens: int


@dataclass(frozen=True)
class Workers:
    """An executor that takes plans, and what is behind it."""

    executor: Executor
    memory: MemoryPlan
    """Where the memory of the (first) device goes."""
    device: str
    dtype: str
    weight_bytes: int
    """Of all ranks together; so is the cache."""
    cache_bytes: int
    reads_groups: bool
    host_room: HostTierInfo | None = None
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds each part of the start took."""


def choose_platform(config: EngineConfig) -> Platform:
    """The platform the ranks run on. On a Ray cluster they have GPUs if the cluster has, whatever this machine has."""
    if config.distributed_executor_backend != "ray" or config.device == "cpu":
        return choose(config.device)
    from quire.executor import ray_cluster

    ray_cluster.connect(config.ray_address)
    kinds = {name for node in ray_cluster.alive_nodes().values() for name, count in node["Resources"].items() if count}
    if config.device == "cuda" or "GPU" in kinds:
        label = "accelerator_type:"
        return RemoteCudaPlatform({kind.removeprefix(label) for kind in kinds if kind.startswith(label)})
    return choose("cpu")


def start_workers(
    config: EngineConfig,
    files: ModelFiles,
    model: ModelConfig,
    platform: Platform,
    limits: Limits,
    place: LockstepAddress | None = None,
) -> Workers:
    """Load the model and give the cache what is left; where it does not fit, say what would.

    `place`: this engine's, where several share the experts.
    """
    if config.is_multiprocess:
        return _start_ranks(config, files, model, platform, limits)
    if config.steps_together and place is None:
        raise ConfigError(
            "enable_expert_parallel over replicas needs them in processes of their own: use AsyncLLM or quire serve",
            "data_parallel_size",
            config.data_parallel_size,
        )
    return _start_here(config, files, model, platform, limits, place)


def estimate_needs(
    config: EngineConfig,
    files: ModelFiles,
    model: ModelConfig,
    platform: Platform,
    longest: int,
    rows: int,
    tokens: int,
) -> MemoryNeeds:
    """What the model would take on each rank, or on those of the heaviest stage; asked of models that have shapes and
    no weights."""
    stages: list[MemoryNeeds] = []
    is_mixture = False
    for stage in range(config.pipeline_parallel_size):
        ranks = Ranks(0, config.tensor_parallel_size, stage, config.pipeline_parallel_size, config.stage_layers)
        shapes = build_model(config, files, model, platform, longest, ranks, torch.device("meta"))
        stages.append(MemoryNeeds.of(shapes, config, model, longest, rows, tokens))
        is_mixture = is_mixture or has_experts(shapes)  # type: ignore[arg-type]
    if config.enable_expert_parallel and not is_mixture:  # a stage may have none
        raise ConfigError(
            f"enable_expert_parallel needs a mixture of experts, and {model.architecture} has none: leave it out",
            "enable_expert_parallel",
            True,
        )
    heaviest = max(stages, key=lambda needs: needs.weight_bytes)
    return dataclasses.replace(heaviest, block_bytes=max(needs.block_bytes for needs in stages))


def _start_here(
    config: EngineConfig,
    files: ModelFiles,
    model: ModelConfig,
    platform: Platform,
    limits: Limits,
    place: LockstepAddress | None,
) -> Workers:
    before = platform.free_memory()
    needs = estimate_needs(config, files, model, platform, limits.model_len, limits.rows, limits.tokens)
    needs.check_weights(config, platform, before)
    doing = "while the model was loaded and a first step tried"
    # Before anything is loaded: on a GPU the first step meets the others' already.
    world = None if place is None else _join(platform, place)
    replica = 0 if place is None else place.rank
    try:
        worker = Worker(
            config, files, model, platform, limits.model_len, limits.rows, limits.tokens, replica=replica
        )  # fmt: skip
        memory = worker.needs.plan(config, platform, before, platform.free_memory())
        doing = f"with a KV cache of {memory.cache / 2**30:.2f} GiB"
        worker.make_cache(memory.num_blocks)
    except torch.OutOfMemoryError as error:
        raise no_room(error, needs, platform, doing) from error
    executor: Executor = (local := LocalExecutor(worker, can_give_up=config.step_timeout > 0))
    if world is not None:
        executor = LockstepExecutor(local, worker, world, ExpertBalance.of(config))
        if config.step_timeout:  # loading may take longer than a step
            world.limit(config.step_timeout)
    return Workers(
        executor=executor,
        memory=memory,
        device=platform.describe(),
        dtype=str(worker.needs.dtype),
        weight_bytes=worker.needs.weight_bytes,
        cache_bytes=memory.cache,
        reads_groups=worker.reads_groups,
        host_room=None if worker.mover is None else worker.mover.tier_info(),
        phases=worker.phases,
    )


def _join(platform: Platform, place: LockstepAddress) -> LockstepAgreement:
    backend = platform.collectives
    if shares_gpu():  # several to a card, which NCCL refuses
        backend = "gloo"
    return LockstepAgreement(place, backend, JOIN_SECONDS)


def _start_ranks(
    config: EngineConfig, files: ModelFiles, model: ModelConfig, platform: Platform, limits: Limits
) -> Workers:
    from quire.executor.multiprocess import MultiprocessExecutor

    ranks: StartedRanks | None = None
    # A model that cannot be cut, or does not fit, is refused before any process is started.
    needs = estimate_needs(config, files, model, platform, limits.model_len, limits.rows, limits.tokens)
    if config.distributed_executor_backend == "ray":
        from quire.executor.ray_ranks import RayRanks

        # Each rank is to use what Ray gives it, not whatever else it finds on its node.
        config = dataclasses.replace(config, device=platform.device.type)
        ranks = RayRanks(config, files, config.num_ranks, on_gpus=config.device == "cuda")
    else:
        _check_devices(config, platform)
        needs.check_weights(config, platform, platform.free_memory())
    executor = MultiprocessExecutor(config, files, limits.model_len, limits.rows, limits.tokens, ranks)
    return Workers(
        executor=executor,
        memory=executor.memory,
        device=executor.device,
        dtype=executor.first.dtype,
        weight_bytes=executor.weight_bytes,
        cache_bytes=executor.cache_bytes,
        reads_groups=executor.first.reads_groups,
        host_room=executor.host_room,
        phases=executor.first.phases,
    )


def _check_devices(config: EngineConfig, platform: Platform) -> None:
    size = config.num_ranks
    if shares_gpu():
        return
    if platform.device.type == "cuda" and size > torch.cuda.device_count():
        raise ConfigError(
            f"{_sizes(config)}, and this machine shows {torch.cuda.device_count()} GPUs; "
            "lower it, or look at CUDA_VISIBLE_DEVICES",
            "tensor_parallel_size" if config.tensor_parallel_size > 1 else "pipeline_parallel_size",
            size,
        )


def _sizes(config: EngineConfig) -> str:
    """The sizes that ask for several ranks."""
    names = ("tensor_parallel_size", "pipeline_parallel_size")
    return " and ".join(f"{name} is {getattr(config, name)}" for name in names if getattr(config, name) > 1)
