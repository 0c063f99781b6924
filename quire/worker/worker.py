"""One rank: its part of the model, its cache, and its batch."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from quire.config import EngineConfig
from quire.distributed.collectives import is_shared
from quire.distributed.groups import Ranks
from quire.distributed.pipeline import Pipeline
from quire.errors import ConfigError
from quire.layers.attention.base import PrefixGroupBackend, attention_backend
from quire.layers.attention.scales import load_kv_scales
from quire.layers.build_context import collect_targets
from quire.layers.expert_placement import Placement
from quire.layers.moe import expert_counts, rearrange_experts, reset_expert_counts, serve_others
from quire.loading.files import ModelFiles
from quire.loading.gguf import GGUFCheckpoint
from quire.loading.load import load_weights, open_checkpoint
from quire.loading.model_config import ModelConfig
from quire.messages.plan import NewRow, StepMasks, StepPlan
from quire.messages.sampling import SamplingParams
from quire.messages.speculation import DeviceDrafts
from quire.platforms.base import Platform
from quire.speculative.config import PROBABILISTIC, REJECTION, SpeculativeConfig
from quire.vision.loading import make_shape
from quire.worker.adapter_rows import AdapterRows
from quire.worker.batch import DeviceBatch, StepInputs
from quire.worker.building import (
    backend_name,
    build_model,
    build_proposer,
    encoder_limits,
    ignored_tensors,
    load_proposer,
    load_vision,
    make_adapters,
    make_ops,
    proposer_caches,
)
from quire.worker.encoded_items import EncodedItems
from quire.worker.geometry import assign_groups, model_geometry
from quire.worker.kv import KVCache
from quire.worker.logits import LogitsProcessor, load_processors
from quire.worker.memory import MemoryNeeds, logit_bytes, profile_activations
from quire.worker.moves import HostMemory, Mover, host_slots
from quire.worker.page_copies import page_copies
from quire.worker.paths import EagerPath, StepPath, TapeDecodePath, forward
from quire.worker.runner import PendingStep, Runner
from quire.worker.weight_copies import make_copies
from quire.worker.weight_image import WeightImage

if TYPE_CHECKING:
    from quire.worker.warmup import WarmUp

logger = logging.getLogger(__name__)


ADAPTED_TOKENS = 1024
"""Tokens of a step that loads the kernels of adapters for steps that are neither captured nor large."""


def empty_cache_plan(lengths: list[int], adapter: int = -1) -> StepPlan:
    """A step of prompts of these lengths whose blocks are all the null block. `adapter`: the slot that they have."""
    rows = np.arange(len(lengths), dtype=np.int32)
    none = np.empty(0, np.int32)
    added = [
        NewRow(
            row=row, request="", prompt_len=length, num_tokens=length, num_computed=0, limit=length + 1, seed=0,
            sequence=0, params=SamplingParams(), stop_ids=[], bad_words=[], adapter=adapter,
        )
        for row, length in enumerate(lengths)
    ]  # fmt: skip
    return StepPlan(
        step=-1, rows=rows, counts=np.array(lengths, np.int32), num_decodes=0, tokens=np.zeros(sum(lengths), np.int32),
        samples=rows, sample_rows=rows, block_rows=none, block_indices=none, blocks=none, max_context=max(lengths),
        reset=True, add=added,
    )  # fmt: skip


class Worker:
    """Loads the model, then runs plans. Makes no scheduling decisions."""

    def __init__(
        self,
        config: EngineConfig,
        files: ModelFiles,
        model: ModelConfig,
        platform: Platform,
        max_model_len: int,
        max_rows: int,
        max_tokens: int,
        ranks: Ranks = Ranks(),
        host_comes_later: bool = False,
        replica: int = 0,
    ) -> None:
        """`max_rows`, `max_tokens`: the most a step has. `host_comes_later`: host memory is given with the cache.
        `replica`: this engine's number among those that share the experts."""
        self.phases: dict[str, float] = {}
        """Seconds each part of the start took."""
        self._since = time.monotonic()
        self._config = config
        self._ranks = ranks
        self._max_tokens = max_tokens
        self._device = platform.device
        self._ops = make_ops(config, platform)
        self._vocab_size = model.vocab_size
        self._max_model_len = max_model_len
        self._max_rows = max_rows
        image = WeightImage.find(config, files, model, platform, max_model_len)
        self.model = build_model(config, files, model, platform, max_model_len, ranks, replica=replica, image=image)
        self.adapters = make_adapters(config, self.model, self._device)
        """The slots of LoRA adapters, if the engine serves any."""
        self.proposer = build_proposer(config, files, self.model)
        """Makes drafts on the device, if configured."""
        self.drafts = DeviceDrafts(
            proposes=self.proposer is not None,
            keeps_cache=self.proposer is not None and bool(self.proposer.caches),
            needs_following=self.proposer is not None and self.proposer.needs_following,
            verifies_with_prompts=not self._ops.whole_steps,
        )
        self.encoder = None if config.vision == "off" else make_shape(self.model.build)
        """What images are encoded with, if the model takes any; without weights until these are loaded."""
        self.limits = encoder_limits(config, self.model, self.encoder)
        """What requests may have beside token ids."""
        self.items: EncodedItems | None = None
        self.geometry = model_geometry(self.model, config.block_size, drafts=proposer_caches(self.proposer))
        """The cache groups, and where each layer's cache lies in the pages."""
        if config.speculation is not None and ranks.pp_size > 1 and any(group.pages for group in self.geometry.groups):
            raise ConfigError(
                "drafts for a model with recurrent layers on several pipeline stages are not implemented: only the "
                "last stage knows how many tokens its states advance by. Use tensor_parallel_size, or no "
                "speculative_config",
                "pipeline_parallel_size",
                ranks.pp_size,
            )
        assign_groups(self.model, self.geometry, self.proposer)  # type: ignore[arg-type]
        backend = attention_backend(backend_name(config, platform))
        self._graph_safe = backend.graph_safe and getattr(self.model, "graph_safe", True)
        self.reads_groups = (
            config.prefix_group_attention
            and not config.batch_invariant
            and issubclass(backend, PrefixGroupBackend)
            and self._ops.whole_steps
            and None in model.windows
            and self.geometry.has_full_group
            and max_rows > 1
        )
        """Whether plans should name prefix groups."""
        self._runner: Runner | None = None
        self.mover: Mover | None = None
        """Copies blocks to host memory and back, if there is a host tier; set when the cache is made."""
        self.needs = MemoryNeeds.estimate(self.model, config, model, max_model_len, max_rows, max_tokens, self.proposer)
        self.needs = self.needs.with_encoder(self.encoder, self.limits, ranks.is_first_stage)
        self._pipeline: Pipeline | None = None
        if ranks.pp_size > 1:
            most = max_tokens + max_rows  # a step that is padded may have more than it was planned with
            self._pipeline = Pipeline(ranks, model.hidden_size, most, self.needs.dtype, self._device)
        self.slot_bytes = page_copies(config.kv_tier_dtype, self.geometry).slot_bytes
        """Bytes of a block in host memory."""
        self.host_slots = host_slots(config, self.slot_bytes)
        """Blocks the host tier has room for."""
        self._host_memory = None if host_comes_later else self._start_host_memory()
        trial = self._make_runner(2, capture=False) if self._device.type == "cuda" else None
        warming = self._start_compiling(trial)
        self._done("model")
        targets = collect_targets(self.model)  # type: ignore[arg-type]
        checkpoint = open_checkpoint(files, config.load_format, targets=targets, seed=config.seed)
        memory = self.model.build.memory
        if image is None or not image.fills(self.model, memory):  # type: ignore[arg-type]
            load_weights(targets, ignored_tensors(self.model), checkpoint, progress=ranks.rank == 0)
            if image is not None:
                image.save(self.model, memory)  # type: ignore[arg-type]
        memory.release()
        if isinstance(checkpoint, GGUFCheckpoint):
            checkpoint.release()
        load_kv_scales(self.model, checkpoint)  # type: ignore[arg-type]
        load_proposer(self.proposer, config, progress=ranks.rank == 0)
        if self.encoder is not None and ranks.is_first_stage:
            self.encoder = load_vision(config, files, self.model.build)
        if self.limits.cache_rows:
            self.items = EncodedItems(self.model, self.encoder, model.hidden_size, self.needs.dtype)
        if self._device.type == "cuda" and config.weight_copy_share and not config.batch_invariant:
            make_copies(self.model, int(config.weight_copy_share * platform.free_memory()))  # type: ignore[arg-type]
        self._done("weights")
        if warming is not None:
            warming.wait()
            self._done("compiling")
        if trial is not None:
            peak = profile_activations(lambda: self._run_largest_step(trial), self._device)
            if self.encoder is not None and config.vision == "on" and ranks.is_first_stage:
                peak = max(peak, profile_activations(self._encode_largest, self._device))
            self.needs = self.needs.measured(max(peak, logit_bytes(model, max_rows)))
            self._done("first step")

    def _done(self, phase: str) -> None:
        now = time.monotonic()
        self.phases[phase] = now - self._since
        self._since = now
        logger.info("starting: %s done in %.1f s", phase, self.phases[phase])

    def _start_host_memory(self) -> HostMemory | None:
        """The host tier, as large as configured."""
        slots, size = self.host_slots, self.slot_bytes
        return HostMemory(slots, size, pinned=self._device.type == "cuda") if slots else None

    def _start_compiling(self, trial: Runner | None) -> WarmUp | None:
        """Compile kernels while the weights are read."""
        if trial is None or not self._ops.whole_steps:
            return None
        from quire.worker.warmup import warm_up

        model, ops, batch = self.model, self._ops, trial.batch
        return warm_up(model, ops, batch, self._max_tokens, self.reads_groups, self.proposer)  # type: ignore[arg-type]

    def _run_largest_step(self, runner: Runner) -> None:
        runner.launch(self._largest_plan(self._max_tokens)).result()
        if self.adapters is not None:  # the same with adapters, for its memory and to load its kernels
            for tokens in sorted({min(tokens, self._max_tokens) for tokens in (ADAPTED_TOKENS, self._max_tokens)}):
                runner.launch(self._largest_plan(tokens, adapter=0)).result()
        if runner.batch.proposer_error is not None:  # at start nothing is lost by saying so
            raise runner.batch.proposer_error

    @torch.inference_mode()
    def _encode_largest(self) -> None:
        assert self.encoder is not None
        self.encoder.encode([self.encoder.largest(self.limits.cache_rows)])

    def _largest_plan(self, tokens: int, adapter: int = -1) -> StepPlan:
        """A step of so many tokens, in prompts as long as they may be, over an empty cache."""
        lengths = [self._max_model_len] * (tokens // self._max_model_len)
        lengths = [*lengths, tokens - sum(lengths)][: self._max_rows]
        plan = empty_cache_plan([length for length in lengths if length], adapter)
        if self.proposer is not None and self._config.speculation is not None:
            plan.proposals = self._config.speculation.most_drafts
        return plan

    def make_cache(self, num_blocks: int, host: HostMemory | None = None) -> None:
        """Allocate the cache and the batch; plans can run after this. `host`: the host memory that comes later."""
        self._host_memory = host or self._host_memory
        self._runner = self._make_runner(num_blocks, capture=not self._config.enforce_eager)
        if self._host_memory is not None:
            copies = page_copies(self._config.kv_tier_dtype, self.geometry)
            self.mover = self._runner.mover = Mover(self._runner.batch.kv, self._host_memory, copies)
        reset_expert_counts(self.model)  # type: ignore[arg-type]  # of warm-up steps
        self._done("cache, graphs")

    def _make_runner(self, num_blocks: int, capture: bool) -> Runner:
        """`capture`: whether decodes may be captured."""
        kv = KVCache.of(self.geometry, num_blocks, self._device)
        processors = load_processors(self._config.logits_processors)
        if self._ops.whole_steps:
            return self._make_cuda_runner(kv, processors, capture)
        batch = DeviceBatch(self._max_rows, self._max_model_len, self._vocab_size, kv, self._device)
        self._connect(batch)
        paths: list[StepPath] = [self._eager_path(batch)]
        # A tape holds only native calls, no collectives.
        if capture and not is_shared(self._ranks) and not self._config.steps_together:
            paths.insert(0, TapeDecodePath(self.model, batch, self._ops, self.proposer))
        return Runner(self.model, batch, paths, processors, self._pipeline, self.proposer, self.items)

    def _eager_path(self, batch: DeviceBatch) -> EagerPath:
        return EagerPath(self.model, batch, self._ranks.is_last_stage, self.proposer, self.items)

    def _make_cuda_runner(self, kv: KVCache, processors: list[LogitsProcessor], capture: bool) -> Runner:
        from quire.worker.cuda_batch import IN_FLIGHT, CudaBatch

        batch = CudaBatch(
            self._max_rows, self._max_model_len, self._vocab_size, kv, self._device, self._max_tokens,
            max(IN_FLIGHT, self._ranks.pp_size + 2),
        )  # fmt: skip
        self._connect(batch)
        capture = capture and self._can_capture()
        paths: list[StepPath] = [self._eager_path(batch)]
        if capture:
            from quire.worker.cuda_graphs import captured_paths

            is_last = self._ranks.is_last_stage
            captured = captured_paths(
                self.model, batch, self._max_rows, is_last, self.reads_groups, self.proposer,
                self.encoder if self._ranks.is_first_stage else None,
            )  # fmt: skip
            paths = [*captured, *paths]
        runner = Runner(self.model, batch, paths, processors, self._pipeline, self.proposer, self.items)
        if capture:  # torch keeps a large step's memory for the next one: no new allocation
            self._run_largest_step(runner)
        return runner

    def _sampled_drafts(self, speculation: SpeculativeConfig) -> int:
        """Drafts of a row whose probabilities are kept: those that the proposer draws, if their ratio decides."""
        by_ratio = speculation.rejection_sample_method == REJECTION and speculation.draft_sample_method == PROBABILISTIC
        return speculation.most_drafts if by_ratio and self.proposer is not None else 0

    def _connect(self, batch: DeviceBatch) -> None:
        """Give the batch the buffer of the previous stage's hidden states: graphs have its address in them."""
        if (speculation := self._config.speculation) is not None:
            batch.speculate(speculation.acceptance_rates, self._sampled_drafts(speculation), speculation.is_custom)
        if self.adapters is not None:
            batch.adapters = AdapterRows(self.adapters, self._max_rows, self._max_tokens, self._ops.whole_steps)
        if self._pipeline is not None:
            batch.previous_hidden = self._pipeline.received
        if self.limits.mrope:
            batch.use_deltas()

    def _can_capture(self) -> bool:
        """Whether steps can be CUDA graphs. With experts on other replicas they cannot: how much is sent depends on
        the tokens, and the host must know it. Nor in Triton's interpreter, which has no CUDA device."""
        return self._graph_safe and self._device.type == "cuda" and not self._config.steps_together

    def launch(self, plan: StepPlan) -> PendingStep:
        """Start a step."""
        if self._runner is None:
            raise RuntimeError("got a plan before the cache was made")
        return self._runner.launch(plan)

    @torch.inference_mode()
    def run_sequence(self, inputs: StepInputs) -> torch.Tensor:
        """Hidden states of all tokens of a step outside any plan. Overwrites the cache: not to be mixed with plans."""
        if self._runner is None:
            raise RuntimeError("got a sequence before the cache was made")
        return forward(self.model, self._runner.batch, inputs)

    def supply(self, step: PendingStep, masks: StepMasks) -> None:
        """Give a step the masks it waits for, so that it samples."""
        if self._runner is not None:
            self._runner.supply(step, masks)

    def expert_counts(self) -> dict[int, list[int]]:
        """How often each expert was chosen since the start, by layer. Waits for the device."""
        return {} if self._runner is None else expert_counts(self.model)  # type: ignore[arg-type]

    @torch.inference_mode()
    def serve_others(self) -> None:
        """A pass without own tokens, for the engines that share the experts."""
        serve_others(self.model)  # type: ignore[arg-type]

    @torch.inference_mode()
    def place_experts(self, placements: Mapping[int, Placement]) -> None:
        """Hold other experts from the next step on, in the layers named. All ranks call this together."""
        rearrange_experts(self.model, placements)  # type: ignore[arg-type]

    def shutdown(self) -> None:
        """Free the model and the cache."""
        self._runner = self.mover = self._host_memory = None
        del self.model
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
