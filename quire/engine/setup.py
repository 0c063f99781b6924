"""From a configuration to a running loop."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass

from quire.config import EngineConfig
from quire.distributed.lockstep import LockstepAddress
from quire.engine.core import EngineCore
from quire.engine.engine_info import EngineInfo
from quire.engine.grammar.grammars import Grammars
from quire.engine.grammar.wire import Setup
from quire.engine.start_executor import Limits, choose_platform, estimate_needs, start_workers
from quire.engine.tiers import kv_fingerprint, make_sessions, make_tiers
from quire.errors import ConfigError
from quire.kvcache.block_tables import BlockTables
from quire.kvcache.prefix_cache import ContentKeys
from quire.loading.files import ModelFiles
from quire.loading.model_config import ModelConfig
from quire.platforms.base import Platform
from quire.scheduler.pacing import Pacer
from quire.scheduler.policies.registry import make_policy
from quire.scheduler.prefix_groups import PrefixGroups
from quire.scheduler.scheduler import Scheduler
from quire.sessions.keeper import SessionKeeper
from quire.worker.memory import MemoryPlan

logger = logging.getLogger(__name__)

GUIDE_BYTES = 1 << 30
"""Memory a grammar may take to compile and to follow."""


@dataclass(frozen=True)
class EngineFacts(EngineInfo):
    """…and where every byte of the device went."""

    memory: MemoryPlan


def longest_position(model: ModelConfig) -> int:
    """The model's own length, stretched by its rope scaling where the config gives the length before stretching."""
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
    usual_stretch: float = math.inf,
    place: LockstepAddress | None = None,
) -> tuple[EngineCore, EngineFacts]:
    """Load the model, size the cache, and put the loop together.

    `usual_stretch`: what `max_step_stretch` is where the configuration leaves it open. `place`: this engine's, where
    several step together.
    """
    begin = time.monotonic()
    platform = choose_platform(config)
    longest = model_len(config, model)
    rows, tokens = budgets(config, platform, longest)
    workers = start_workers(config, files, model, platform, Limits(longest, rows, tokens), place)
    memory = workers.memory
    tables = BlockTables(memory.num_blocks, config.block_size, config.enable_prefix_caching)
    fingerprint = kv_fingerprint(config, files, model, workers.dtype)
    keys = ContentKeys(config.block_size, fingerprint)
    tiers = make_tiers(config, fingerprint, tables, workers.host_room)

    def keeper() -> SessionKeeper:
        return make_sessions(config, model, fingerprint, tables, keys, tiers)

    stages = config.pipeline_parallel_size
    depth = platform.pipeline_depth if stages == 1 else stages - 1
    if config.pipeline_depth is not None:
        depth = config.pipeline_depth
    scheduler = Scheduler(
        tables, make_policy(config.scheduling_policy, config), keys, rows, tokens, config.enable_chunked_prefill,
        groups=PrefixGroups(config.block_size) if workers.reads_groups else None,
        pacer=_pacer(config, usual_stretch), tiers=tiers, sessions=None if config.kv_disk is None else keeper(),
        waves=None if stages == 1 else depth + 1,
    )  # fmt: skip
    grammars = Grammars(_vocabulary(config, files, model, rows), config.grammar_timeout)
    core = EngineCore(
        scheduler, workers.executor, depth, not config.disable_log_stats, config.step_timeout, grammars, keeper
    )
    facts = EngineFacts(
        files=files,
        model=model,
        device=workers.device,
        dtype=workers.dtype.removeprefix("torch."),
        max_model_len=_fitting_len(config, longest, tables.pool.capacity * config.block_size + 1),
        max_num_seqs=rows,
        max_num_batched_tokens=tokens,
        block_size=config.block_size,
        num_blocks=tables.pool.capacity,
        weight_bytes=workers.weight_bytes,
        kv_bytes=workers.cache_bytes,
        memory=memory,
        start_seconds=time.monotonic() - begin,
        keys=keys,
    )
    logger.info(
        "%s on %s (%s): weights %.2f GiB, KV cache %.2f GiB = %d tokens in %d blocks of %d; ready in %.1f s",
        files.name, facts.device, facts.dtype, facts.weight_bytes / 2**30, facts.kv_bytes / 2**30,
        facts.cache_tokens, facts.num_blocks, facts.block_size, facts.start_seconds,
    )  # fmt: skip
    logger.info("start: %s", ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in workers.phases.items()))
    if platform.device.type != "cpu":
        logger.info("memory of %s:\n%s", facts.device, memory)
    return core, facts


def _vocabulary(config: EngineConfig, files: ModelFiles, model: ModelConfig, rows: int) -> Setup:
    """Whose tokens grammars are made of; loaded when the first request needs one."""
    return Setup(
        tokenizer=config.tokenizer,
        files=files.to_plain(),
        trust_remote_code=config.trust_remote_code,
        revision=config.tokenizer_revision,
        vocab_size=model.vocab_size,
        end_ids=[],
        rows=rows,
        memory_bytes=GUIDE_BYTES,
    )


def _pacer(config: EngineConfig, usual_stretch: float) -> Pacer | None:
    stretch = usual_stretch if config.max_step_stretch is None else config.max_step_stretch
    return Pacer(stretch) if math.isfinite(stretch) and config.enable_chunked_prefill else None


def model_len(config: EngineConfig, model: ModelConfig) -> int:
    """The longest sequence to prepare for."""
    own = longest_position(model)
    asked = config.max_model_len
    if asked is None or config.wants_longest_len:
        return own
    if int(asked) > own:
        raise ConfigError(
            f"max_model_len ({asked}) is above the {own} positions the model was made for; "
            "lower it, or stretch the model with hf_overrides (rope_scaling)",
            "max_model_len",
            asked,
        )
    return int(asked)


def _fitting_len(config: EngineConfig, longest: int, cache_tokens: int) -> int:
    """The length requests may reach: the model's, or what the cache holds where nobody insisted on a length."""
    if longest <= cache_tokens:
        return longest
    if config.max_model_len is None or config.wants_longest_len:
        level = logging.INFO if config.wants_longest_len else logging.WARNING
        logger.log(
            level, "the KV cache holds %d tokens: max_model_len is %d, not %d", cache_tokens, cache_tokens, longest
        )
        return cache_tokens
    logger.warning("the KV cache holds %d tokens; requests that may reach %d are refused", cache_tokens, longest)
    return longest


def budgets(config: EngineConfig, platform: Platform, longest: int) -> tuple[int, int]:
    """Rows and tokens a step may have."""
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


__all__ = ["EngineFacts", "budgets", "estimate_needs", "longest_position", "make_engine", "model_len"]
