"""Builds an engine from a configuration."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence

from quire.adapters.slots import AdapterSlots
from quire.config import EngineConfig
from quire.distributed.lockstep import LockstepAddress
from quire.engine.core import EngineCore
from quire.engine.energy import make_energy
from quire.engine.engine_info import EngineInfo
from quire.engine.grammar.grammars import Grammars
from quire.engine.grammar.wire import ForkServerSpec
from quire.engine.memory_watch import MemoryWatch, StepMemory, give_back_heap
from quire.engine.tiers import kv_fingerprint, make_sessions, make_tiers, stored_dtype
from quire.errors import ConfigError
from quire.executor.base import ExecutorSpec, StepLimits
from quire.executor.recording import RecordingExecutor
from quire.executor.registry import executor_backend
from quire.kvcache.block_tables import BlockTables
from quire.kvcache.prefix_cache import ContentKeys
from quire.loading.files import ModelFiles
from quire.loading.model_config import ModelConfig
from quire.messages.memory_use import MemoryUse
from quire.messages.plan import MAX_WIDTH
from quire.messages.speculation import DeviceDrafts
from quire.platforms.base import Platform
from quire.platforms.cpu import CoreWatch, CpuPlatform, set_threads
from quire.quantization.find import resolve_cpu_weights
from quire.scheduler.drafting import Drafting
from quire.scheduler.pacing import Pacer
from quire.scheduler.policies.registry import make_policy
from quire.scheduler.prefix_groups import PrefixGroups
from quire.scheduler.scheduler import Scheduler
from quire.sessions.keeper import SessionKeeper
from quire.sessions.quota import SessionQuota
from quire.speculative.registry import make_host_proposer
from quire.speculative.resolve_draft import resolve_draft
from quire.worker.sensitivity import resolve_auto

logger = logging.getLogger(__name__)

MOST_TOKENS = 1 << 40
"""Tokens that a cache without a full group is said to hold: a request takes the same blocks whatever its length."""
MATCHER_BYTES = 1 << 30
"""Memory that a matcher process may use to compile and match a grammar."""


def longest_position(model: ModelConfig) -> int:
    """The model's context length, times its rope scaling factor if the config gives the length before scaling."""
    rope = model.rope
    factor = float(rope.get("factor") or 1.0)
    if rope.get("rope_type") in ("linear", "dynamic"):
        return int(model.max_position * factor)
    if rope.get("rope_type") == "yarn" and rope.get("original_max_position_embeddings"):
        return max(model.max_position, int(rope["original_max_position_embeddings"] * factor))
    return model.max_position


def make_engine(
    config: EngineConfig,
    files: ModelFiles,
    model: ModelConfig,
    default_stretch: float = math.inf,
    lockstep: LockstepAddress | None = None,
    default_grammars: int | None = None,
    quota: SessionQuota | None = None,
    grammar_ends: Sequence[int] = (),
) -> tuple[EngineCore, EngineInfo]:
    """Load the model, size the cache, and assemble the loop.

    `default_stretch`, `default_grammars`: `max_step_stretch` and `max_tenant_grammars` if the configuration leaves them
    unset. `lockstep`: this engine among those that share the experts. `quota`: what each tenant's sessions may use, if
    not as configured. `grammar_ends`: the end-of-sequence tokens if requests with a grammar are to be expected.
    """
    begin = time.monotonic()
    backend = executor_backend(config)
    platform = backend.choose_platform(config)
    if config.threads or platform.device.type == "cpu":
        set_threads(config.threads)
    if isinstance(platform, CpuPlatform) and (slow := platform.why_slow()):
        logger.warning("%s", slow)
    config = resolve_draft(resolve_auto(config, files, model, platform))
    config = resolve_cpu_weights(config, files, model, platform.device.type == "cpu")
    longest = model_len(config, model)
    rows, tokens = budgets(config, platform, longest)
    limits = StepLimits(longest, rows, tokens)
    most_grammars = config.max_tenant_grammars or default_grammars
    grammars = Grammars(_fork_server_spec(config, files, model, rows), config.grammar_timeout, most_grammars)
    grammars.prepare(grammar_ends)  # while the weights are loaded
    started = backend.start(ExecutorSpec(config, files, model, platform, limits, lockstep))
    if platform.device.type == "cpu":
        give_back_heap()  # what loading and re-laying the weights took
    memory = started.memory
    tables = BlockTables(memory.num_blocks, config.block_size, config.enable_prefix_caching, started.groups)
    dtype = stored_dtype(config, files, model, started.dtype)
    fingerprint = kv_fingerprint(config, files, model, dtype, started.layout)
    keys = ContentKeys(config.block_size, fingerprint)
    tiers = make_tiers(config, fingerprint, tables, started.host_room)

    def keeper() -> SessionKeeper:
        own = SessionQuota.of(config, SessionQuota()) if quota is None else quota
        return make_sessions(config, model, fingerprint, tables, keys, tiers, longest, own)

    stages = config.pipeline_parallel_size
    depth = _pipeline_depth(config, platform)
    scheduler = Scheduler(
        tables, make_policy(config.scheduling_policy, config), keys, rows, tokens, config.enable_chunked_prefill,
        groups=PrefixGroups(config.block_size) if started.reads_groups else None,
        pacer=_pacer(config, default_stretch), tiers=tiers, sessions=None if config.kv_disk is None else keeper(),
        microbatches=None if stages == 1 else depth + 1,
        drafting=_make_drafting(config, started.drafts, grammars, model.vocab_size),
        encoder=started.encoder,
        adapters=AdapterSlots(config.max_loras) if config.enable_lora else None,
    )  # fmt: skip
    executor = started.executor
    if config.record is not None:
        executor = RecordingExecutor(
            executor, config, files, max_model_len=longest, max_num_seqs=rows, max_num_batched_tokens=tokens,
            num_blocks=memory.num_blocks, cache_bytes=memory.cache, device=started.device, dtype=started.dtype,
        )  # fmt: skip
    steps = StepMemory(memory.room, memory.activations, memory.step_tokens)

    def trim() -> None:
        grammars.drop_idle()
        give_back_heap()

    cores = CoreWatch(config.threads) if isinstance(platform, CpuPlatform) and config.num_ranks == 1 else None

    def measure() -> MemoryUse | None:
        if cores is not None:
            cores.tick()
        return executor.memory_use()

    watch = MemoryWatch(scheduler, measure, steps, trim)
    core = EngineCore(
        scheduler, executor, depth, not config.disable_log_stats, config.step_timeout, grammars, keeper, watch,
        make_energy(config, scheduler, platform),
    )  # fmt: skip
    cache_tokens = min(tables.tokens_in(tables.pool.capacity), MOST_TOKENS)
    info = EngineInfo(
        files=files,
        model=model,
        device=started.device,
        dtype=started.dtype.removeprefix("torch."),
        max_model_len=_fitting_len(config, longest, cache_tokens + 1),
        max_num_seqs=rows,
        max_num_batched_tokens=tokens,
        block_size=config.block_size,
        num_blocks=tables.pool.capacity,
        cache_tokens=cache_tokens,
        weight_bytes=started.weight_bytes,
        kv_bytes=started.cache_bytes,
        memory=memory,
        start_seconds=time.monotonic() - begin,
        keys=keys,
        encoder=started.encoder,
    )
    logger.info(
        "%s on %s (%s): weights %.2f GiB, KV cache %.2f GiB = %d tokens in %d blocks of %d; ready in %.1f s",
        files.name, info.device, info.dtype, info.weight_bytes / 2**30, info.kv_bytes / 2**30,
        info.cache_tokens, info.num_blocks, info.block_size, info.start_seconds,
    )  # fmt: skip
    logger.info("start: %s", ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in started.phases.items()))
    if platform.device.type != "cpu":
        logger.info("memory of %s:\n%s", info.device, memory)
    return core, info


def _pipeline_depth(config: EngineConfig, platform: Platform) -> int:
    """Steps in flight beside the one that is collected."""
    if config.pipeline_depth is not None:
        return config.pipeline_depth
    stages = config.pipeline_parallel_size
    return platform.pipeline_depth if stages == 1 else stages - 1


def _fork_server_spec(config: EngineConfig, files: ModelFiles, model: ModelConfig, rows: int) -> ForkServerSpec:
    """The tokenizer and limits of grammars; loaded when the first request needs one."""
    return ForkServerSpec(
        tokenizer=config.tokenizer,
        files=files.to_plain(),
        trust_remote_code=config.trust_remote_code,
        revision=config.tokenizer_revision,
        vocab_size=model.vocab_size,
        end_ids=[],
        rows=rows,
        memory_bytes=MATCHER_BYTES,
        places=1 if config.speculation is None else MAX_WIDTH,
    )


def _make_drafting(config: EngineConfig, device: DeviceDrafts, grammars: Grammars, vocab_size: int) -> Drafting | None:
    """Where drafts come from, and how many a decode verifies; None: no drafts."""
    speculation = config.speculation
    if speculation is None:
        return None
    return Drafting(
        speculation.most_drafts,
        host=make_host_proposer(speculation, config.pipeline_parallel_size),
        device=device,
        tunes=speculation.tune,
        most_rows=speculation.disable_by_batch_size,
        longest=speculation.max_model_len,
        certain=grammars.certain_drafts,
        vocab_size=vocab_size,
    )


def _pacer(config: EngineConfig, default_stretch: float) -> Pacer | None:
    stretch = default_stretch if config.max_step_stretch is None else config.max_step_stretch
    return Pacer(stretch) if math.isfinite(stretch) and config.enable_chunked_prefill else None


def model_len(config: EngineConfig, model: ModelConfig) -> int:
    """The longest sequence to prepare for."""
    own = longest_position(model)
    wanted = config.max_model_len
    if wanted is None or config.wants_longest_len:
        return own
    if int(wanted) > own:
        raise ConfigError(
            f"max_model_len ({wanted}) is above the model's {own} positions; "
            "lower it, or extend the model with hf_overrides (rope_scaling)",
            "max_model_len",
            wanted,
        )
    return int(wanted)


def _fitting_len(config: EngineConfig, longest: int, cache_tokens: int) -> int:
    """The length requests may reach: the model's, or what fits in the cache if no length was configured."""
    if longest <= cache_tokens:
        return longest
    if config.max_model_len is None or config.wants_longest_len:
        level = logging.INFO if config.wants_longest_len else logging.WARNING
        logger.log(
            level, "the KV cache holds %d tokens: max_model_len is lowered to that from %d", cache_tokens, longest
        )
        return cache_tokens
    logger.warning("the KV cache holds %d tokens; requests that may reach %d are refused", cache_tokens, longest)
    return longest


def budgets(config: EngineConfig, platform: Platform, longest: int) -> tuple[int, int]:
    """The most rows and tokens of a step."""
    rows = config.max_num_seqs
    tokens = config.max_num_batched_tokens
    if rows is None:
        rows = platform.max_num_seqs if tokens is None else min(platform.max_num_seqs, tokens)
    if tokens is None:
        tokens = max(platform.max_num_batched_tokens, rows)
        if not config.enable_chunked_prefill:
            tokens = max(tokens, longest)
    if not config.enable_chunked_prefill and tokens < longest:
        raise ConfigError(
            f"without chunked prefill a step must hold a whole prompt: max_num_batched_tokens ({tokens}) is below "
            f"max_model_len ({longest})",
            "max_num_batched_tokens",
            tokens,
        )
    return rows, tokens
