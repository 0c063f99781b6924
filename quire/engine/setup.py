"""From a configuration to a running loop."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass

import torch

from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.facts import Facts
from quire.engine.grammar.grammars import Grammars
from quire.engine.grammar.wire import Setup
from quire.engine.tiers import kv_fingerprint, make_sessions, make_tiers
from quire.errors import ConfigError
from quire.executor.local import LocalExecutor
from quire.loading.files import ModelFiles
from quire.loading.model_config import ModelConfig
from quire.memory.prefix import ContentKeys
from quire.memory.sessions import SessionKeeper
from quire.memory.tables import BlockTables
from quire.platforms import choose
from quire.platforms.base import Platform
from quire.scheduler.groups import PrefixGroups
from quire.scheduler.pacing import Pacer
from quire.scheduler.policies.registry import make_policy
from quire.scheduler.scheduler import Scheduler
from quire.worker.building import build_model
from quire.worker.memory import MemoryNeeds, MemoryPlan, no_room
from quire.worker.worker import Worker

logger = logging.getLogger(__name__)

GUIDE_BYTES = 1 << 30
"""Memory a grammar may take to compile and to follow."""


@dataclass(frozen=True)
class EngineFacts(Facts):
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
    config: EngineConfig, files: ModelFiles, model: ModelConfig, usual_stretch: float = math.inf
) -> tuple[EngineCore, EngineFacts]:
    """Load the model, size the cache, and put the loop together.

    `usual_stretch`: what `max_step_stretch` is where the configuration leaves it open.
    """
    begin = time.monotonic()
    platform = choose(config.device)
    longest = model_len(config, model)
    rows, tokens = budgets(config, platform, longest)
    worker, memory = _make_worker(config, files, model, platform, longest, rows, tokens)
    needs = worker.needs
    tables = BlockTables(memory.num_blocks, config.block_size, config.enable_prefix_caching)
    fingerprint = kv_fingerprint(config, files, model, str(needs.dtype))
    keys = ContentKeys(config.block_size, fingerprint)
    tiers = make_tiers(config, fingerprint, tables, worker.mover)

    def keeper() -> SessionKeeper:
        return make_sessions(config, model, fingerprint, tables, keys, tiers)

    scheduler = Scheduler(
        tables, make_policy(config.scheduling_policy, config), keys, rows, tokens, config.enable_chunked_prefill,
        groups=PrefixGroups(config.block_size) if worker.reads_groups else None,
        pacer=_pacer(config, usual_stretch), tiers=tiers, sessions=None if config.kv_disk is None else keeper(),
    )  # fmt: skip
    depth = platform.pipeline_depth if config.pipeline_depth is None else config.pipeline_depth
    executor = LocalExecutor(worker, can_give_up=config.step_timeout > 0)
    grammars = Grammars(_vocabulary(config, files, model, rows), config.grammar_timeout)
    core = EngineCore(scheduler, executor, depth, not config.disable_log_stats, config.step_timeout, grammars, keeper)
    facts = EngineFacts(
        files=files,
        model=model,
        device=platform.describe(),
        dtype=str(needs.dtype).removeprefix("torch."),
        max_model_len=_fitting_len(config, longest, tables.pool.capacity * config.block_size + 1),
        max_num_seqs=rows,
        max_num_batched_tokens=tokens,
        block_size=config.block_size,
        num_blocks=tables.pool.capacity,
        weight_bytes=needs.weight_bytes,
        kv_bytes=memory.cache,
        memory=memory,
        start_seconds=time.monotonic() - begin,
        keys=keys,
    )
    logger.info(
        "%s on %s (%s): weights %.2f GiB, KV cache %.2f GiB = %d tokens in %d blocks of %d; ready in %.1f s",
        files.name, facts.device, facts.dtype, facts.weight_bytes / 2**30, facts.kv_bytes / 2**30,
        facts.cache_tokens, facts.num_blocks, facts.block_size, facts.start_seconds,
    )  # fmt: skip
    logger.info("start: %s", ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in worker.phases.items()))
    if platform.device.type != "cpu":
        logger.info("memory of %s:\n%s", facts.device, memory)
    return core, facts


def estimate_needs(
    config: EngineConfig,
    files: ModelFiles,
    model: ModelConfig,
    platform: Platform,
    longest: int,
    rows: int,
    tokens: int,
) -> MemoryNeeds:
    """What the model would take, asked of one that has shapes and no weights."""
    shapes = build_model(config, files, model, platform, longest, device=torch.device("meta"))
    return MemoryNeeds.of(shapes, config, model, longest, rows, tokens)


def _vocabulary(config: EngineConfig, files: ModelFiles, model: ModelConfig, rows: int) -> Setup:
    """Whose tokens grammars are made of; loaded when the first request needs one."""
    places = {"path": files.path, "gguf": files.gguf, "folder": files.folder}
    return Setup(
        tokenizer=config.tokenizer,
        files={"name": files.name, **{name: None if path is None else str(path) for name, path in places.items()}},
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


def _make_worker(
    config: EngineConfig,
    files: ModelFiles,
    model: ModelConfig,
    platform: Platform,
    longest: int,
    rows: int,
    tokens: int,
) -> tuple[Worker, MemoryPlan]:
    """Load the model and give the cache what is left; where it does not fit, say what would."""
    before = platform.free_memory()
    needs = estimate_needs(config, files, model, platform, longest, rows, tokens)
    needs.check_weights(config, platform, before)
    doing = "while the model was loaded and a first step tried"
    try:
        worker = Worker(config, files, model, platform, longest, rows, tokens)
        memory = worker.needs.plan(config, platform, before, platform.free_memory())
        doing = f"with a KV cache of {memory.cache / 2**30:.2f} GiB"
        worker.make_cache(memory.num_blocks)
    except torch.OutOfMemoryError as error:
        raise no_room(error, needs, platform, doing) from error
    return worker, memory


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
