"""Sizes the KV cache: what weights, activations and a reserve leave of a device's memory.

On a GPU the largest possible step is run and its memory measured; of `gpu_memory_utilization` of the card, the cache
gets what weights, that step and a reserve leave. `MemoryPlan` is the table of all parts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quire.config import EngineConfig
from quire.errors import CacheTooSmallError, ModelTooLargeError
from quire.kernels.kv import KVFormat
from quire.layers.build_context import quantized_weights
from quire.layers.caches import StateCache
from quire.layers.moe import active_parameters, parameter_count, widest_mixture
from quire.loading.model_config import ModelConfig
from quire.messages.caches import FULL, CacheGroup
from quire.messages.media import EncoderLimits
from quire.messages.memory_use import MemoryUse
from quire.models.base import CausalLM
from quire.platforms.base import Platform
from quire.platforms.cpu import CpuPlatform
from quire.speculative.device import DeviceProposer
from quire.worker.geometry import model_geometry
from quire.worker.logprobs import LOGIT_ROWS

LOGIT_COPIES = 4
"""Logits, scaled logits, probabilities and their sums may exist at once."""
RESERVE_BYTES = 2**30
"""On a GPU, for captured graphs and the libraries' own workspaces, which are allocated after the cache."""
KEPT_FREE = 0.02
"""Fraction of a GPU's memory that is never allocated, however full it was before."""


@dataclass(frozen=True)
class MemoryPlan:
    """How a device's memory is divided, in bytes. The parts sum to the total."""

    total: int
    before: int
    """In use before this engine started: other programs, and the driver."""
    weights: int
    loaded: int
    """Allocated while the model was loaded, besides weights: compiled kernels, tables, buffers."""
    activations: int
    is_measured: bool
    """Whether `activations` was measured in a step; else it is an estimate."""
    step_tokens: int
    reserve: int
    cache: int
    num_blocks: int
    """Including the reserved null block."""
    block_size: int
    share: float | None
    """`gpu_memory_utilization`; None on a CPU."""
    full_groups: int = 1
    """Cache groups that keep every token: each takes a block for every `block_size` tokens of a request."""
    window_blocks: tuple[int, ...] = ()
    """For each group with a window: the most blocks of a request…"""
    state_pages: int = 0
    """…and the blocks of its recurrent states. Their snapshots come on top."""
    encoder: int = 0
    """Encoded images."""

    @property
    def free(self) -> int:
        """Bytes that are left."""
        taken = self.before + self.weights + self.loaded + self.activations + self.reserve + self.cache + self.encoder
        return self.total - taken

    @property
    def room(self) -> int:
        """Bytes of a GPU for steps, graphs and workspaces, and what stays free; 0 on a CPU, whose cache takes memory
        only as it is used."""
        held = self.before + self.weights + self.loaded + self.cache + self.encoder
        return 0 if self.share is None else self.total - held

    def blocks_for(self, tokens: int) -> int:
        """Blocks that a request of this many tokens takes."""
        blocks = -(-tokens // self.block_size)
        return self.full_groups * blocks + sum(min(blocks, most) for most in self.window_blocks) + self.state_pages

    @property
    def cache_tokens(self) -> int:
        """Tokens the cache holds of one request; without a full group it holds any number."""
        blocks = self.num_blocks - 1
        if not self.full_groups:
            return blocks * self.block_size
        low, high = 0, blocks // self.full_groups  # blocks of tokens; the request with `low` of them fits
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.blocks_for(middle * self.block_size) <= blocks
            low, high = (middle, high) if fits else (low, middle - 1)
        return low * self.block_size

    def _held(self) -> str:
        blocks = f"{self.num_blocks - 1:,} blocks of {self.block_size}"
        if self.full_groups == 1 and not self.window_blocks and not self.state_pages:
            return f"{self.cache_tokens:,} tokens in {blocks}"
        parts = [
            f"{self.full_groups} per {self.block_size} tokens" if self.full_groups else "",
            f"at most {sum(self.window_blocks)} in windows" if self.window_blocks else "",
            f"{self.state_pages} of states" if self.state_pages else "",
        ]
        return f"{blocks}; a request takes {', '.join(part for part in parts if part)}"

    def rows(self) -> list[tuple[str, str, str]]:
        """The table: name, size, and a note."""
        how = "measured" if self.is_measured else "estimated"
        rows = [
            ("total", self.total, ""),
            ("in use before", self.before, "other programs" if self.share is None else "other programs, the driver"),
            ("weights", self.weights, ""),
            ("kernels, buffers", self.loaded, "allocated while loading"),
            ("activations", self.activations, f"{how}, {self.step_tokens:,} tokens"),
            ("reserve", self.reserve, "captured graphs, workspaces"),
            ("encoder cache", self.encoder, "embeddings of images"),
            ("KV cache", self.cache, self._held()),
            ("free", self.free, "" if self.share is None else f"gpu_memory_utilization is {self.share:g}"),
        ]
        shown = [row for row in rows if row[1] or row[0] not in ("kernels, buffers", "reserve", "encoder cache")]
        return [(name, gib(size), note) for name, size, note in shown]

    def __str__(self) -> str:
        width = max(len(size) for _, size, _ in self.rows())
        return "\n".join(f"  {name:<16}  {size:>{width}}  {note}".rstrip() for name, size, note in self.rows())


@dataclass(frozen=True)
class MemoryNeeds:
    """Bytes that a rank's model, a step, and a block of the cache take."""

    dtype: torch.dtype
    parameters: int
    weight_bytes: int
    block_bytes: int
    activation_bytes: int
    most_blocks: int
    """Every row at full length: more blocks could never be used."""
    step_tokens: int
    """The most tokens and rows a step has."""
    step_rows: int
    is_measured: bool = False
    """Whether `activation_bytes` was measured in such a step."""
    reserve_bytes: int = RESERVE_BYTES
    kv_format: KVFormat | None = None
    """How blocks are stored; None: in `dtype`."""
    active_parameters: int = 0
    """Parameters used for one token: fewer than all in a mixture of experts."""
    groups: tuple[CacheGroup, ...] = (FULL,)
    layout: str = ""
    """Names the layout of pages, if it is not that of a plain model (`CacheGeometry.identity`)."""
    encoder_bytes: int = 0
    """What encoded images take at most."""

    @classmethod
    def estimate(
        cls,
        model: CausalLM,
        config: EngineConfig,
        shape: ModelConfig,
        max_model_len: int,
        max_rows: int,
        max_tokens: int | None = None,
        proposer: DeviceProposer | None = None,
    ) -> MemoryNeeds:
        """Weights are counted on the model, and on the layers of `proposer`, both of which may be on the meta device;
        activations are estimated."""
        weights = list(model.parameters())  # type: ignore[attr-defined]
        dtype = weights[0].dtype
        tokens = max_tokens or max(config.max_num_batched_tokens or 0, 8192)
        widest = max(4 * max(shape.intermediate_size, shape.hidden_size), widest_mixture(model))  # type: ignore[arg-type]
        widest *= tokens * dtype.itemsize
        geometry = model_geometry(model, config.block_size, drafts=[] if proposer is None else proposer.caches)
        if isinstance(proposer, nn.Module):
            weights += [*proposer.parameters(), *quantized_weights(proposer)]
        return cls(
            dtype=dtype,
            parameters=parameter_count(model),  # type: ignore[arg-type]
            active_parameters=active_parameters(model),  # type: ignore[arg-type]
            weight_bytes=sum(weight.nbytes for weight in [*weights, *quantized_weights(model)]),  # type: ignore[arg-type]
            block_bytes=geometry.block_bytes,
            groups=geometry.groups,
            layout=geometry.identity,
            kv_format=model.build.kv_format,
            activation_bytes=widest + logit_bytes(shape, max_rows),
            most_blocks=geometry.most_blocks(max_rows, max_model_len),
            step_tokens=tokens,
            step_rows=max_rows,
            reserve_bytes=RESERVE_BYTES + replay_bytes(model, config, max_rows),
        )

    def with_encoder(self, encoder: Any | None, limits: EncoderLimits, is_first_stage: bool) -> MemoryNeeds:
        """The same with an encoder of images, its weights maybe on the meta device, and a cache of what it yields."""
        if not limits.cache_rows or not is_first_stage:
            return self
        weights = [] if encoder is None else list(encoder.parameters())
        return dataclasses.replace(
            self,
            weight_bytes=self.weight_bytes + sum(weight.nbytes for weight in weights),
            encoder_bytes=limits.cache_rows * limits.width * self.dtype.itemsize,
        )

    def measured(self, activation_bytes: int) -> MemoryNeeds:
        """The same with measured activations; 0 (nothing was measured) keeps the estimate."""
        if not activation_bytes:
            return self
        return dataclasses.replace(self, activation_bytes=activation_bytes, is_measured=True)

    def plan(self, config: EngineConfig, platform: Platform, before: int, now: int | None = None) -> MemoryPlan:
        """Divide a device's memory. `before`: bytes free at the start; `now`: with the model loaded (None: it is not).

        Raises if two blocks of cache do not fit.
        """
        on_gpu = platform.device.type != "cpu"
        taken = self.weight_bytes if now is None else max(self.weight_bytes, before - now)
        budget = self._explicit_budget(config)
        if budget is None and on_gpu:
            budget = self._allowed(config, platform, before) - taken - self.activation_bytes - self.reserve_bytes
            budget -= self.encoder_bytes
            if budget < 2 * self.block_bytes:
                raise self._too_large(config, platform, before)
        elif budget is None:
            free = max(0, before - self.weight_bytes) if now is None else now
            budget = config.cpu_kv_cache_bytes or int(free * config.cpu_kv_cache_share)
        blocks = self._blocks(config, budget)
        return MemoryPlan(
            total=platform.total_memory(),
            before=platform.total_memory() - before,
            weights=self.weight_bytes,
            loaded=taken - self.weight_bytes if on_gpu else 0,  # on a CPU, other programs allocate and free meanwhile
            activations=self.activation_bytes,
            is_measured=self.is_measured,
            step_tokens=self.step_tokens,
            reserve=self.reserve_bytes if on_gpu else 0,
            encoder=self.encoder_bytes if on_gpu else 0,  # on a CPU memory is taken as it is used
            cache=blocks * self.block_bytes,
            num_blocks=blocks,
            block_size=config.block_size,
            share=config.gpu_memory_utilization if on_gpu else None,
            full_groups=sum(group.kind == "full" for group in self.groups),
            window_blocks=tuple(
                -(-(group.window - 1) // config.block_size) + 2 for group in self.groups if group.kind == "window"
            ),
            state_pages=sum(group.pages for group in self.groups),
        )

    def check_weights(self, config: EngineConfig, platform: Platform, before: int) -> None:
        """Raise if the weights alone do not fit on a device with `before` bytes free."""
        if platform.device.type == "cpu" and self.weight_bytes > before:
            raise ModelTooLargeError(
                f"the weights need {gib(self.weight_bytes)}, and {gib(before)} of {gib(platform.total_memory())} are "
                f"free here{_limits(platform)}: use a smaller model or one in few bits, or allow more memory"
            )
        if platform.device.type != "cpu" and self.weight_bytes > self._allowed(config, platform, before):
            raise self._too_large(config, platform, before)

    def _explicit_budget(self, config: EngineConfig) -> int | None:
        if config.num_gpu_blocks_override is not None:
            return (config.num_gpu_blocks_override + 1) * self.block_bytes
        return config.kv_cache_memory_bytes

    def _allowed(self, config: EngineConfig, platform: Platform, before: int) -> int:
        """Total bytes of a GPU that this engine may use."""
        total = platform.total_memory()
        return int(min(config.gpu_memory_utilization * total, before - KEPT_FREE * total))

    def _blocks(self, config: EngineConfig, budget: int) -> int:
        blocks = budget // self.block_bytes
        if blocks < 2:
            raise CacheTooSmallError(
                f"{budget} bytes for the KV cache do not hold one block of {config.block_size} tokens "
                f"({self.block_bytes} bytes; two are needed, one is reserved). Raise kv_cache_memory_bytes or the "
                "memory share, or lower block_size"
            )
        return blocks if config.num_gpu_blocks_override is not None else min(blocks, self.most_blocks)

    def _too_large(self, config: EngineConfig, platform: Platform, before: int) -> ModelTooLargeError:
        allowed = self._allowed(config, platform, before)
        share = config.gpu_memory_utilization
        work = self.activation_bytes + self.reserve_bytes + 2 * self.block_bytes
        fitting = math.ceil((self.weight_bytes + work) / share / 2**30)
        room = f"{gib(max(0, allowed))} of {platform.describe()} can be used ({gib(before)} of " + (
            f"{gib(platform.total_memory())} are free, gpu_memory_utilization is {share:g})"
        )
        if self.weight_bytes > allowed:
            smaller = "a smaller model" if self.dtype.itemsize <= 2 else "dtype bfloat16, a smaller model"
            return ModelTooLargeError(
                f"the weights need {gib(self.weight_bytes)}, and {room}: use {smaller}, or a GPU with at least "
                f"{fitting} GiB"
            )
        return ModelTooLargeError(
            f"weights ({gib(self.weight_bytes)}), activations of a step of {self.step_tokens} tokens "
            f"({gib(self.activation_bytes)}) and a reserve ({gib(self.reserve_bytes)}) leave no room for a KV cache: "
            f"{room}. Lower max_num_batched_tokens ({self.step_tokens}), max_num_seqs ({self.step_rows}) or "
            f"max_model_len, raise gpu_memory_utilization, or use a GPU with at least {fitting} GiB"
        )


def replay_bytes(model: CausalLM, config: EngineConfig, max_rows: int) -> int:
    """Bytes that recurrent layers keep of a step whose rows all verify as many drafts as they can."""
    if config.speculation is None:
        return 0
    caches = getattr(model, "caches", None) or ()
    of_token = sum(cache.replay_bytes for cache in caches if isinstance(cache, StateCache))
    return max_rows * (1 + config.speculation.most_drafts) * of_token


def logit_bytes(shape: ModelConfig, max_rows: int) -> int:
    """Bytes the sampler takes for the rows of logits it handles at once."""
    return LOGIT_COPIES * 4 * shape.vocab_size * min(LOGIT_ROWS, max_rows)


def _limits(platform: Platform) -> str:
    """What limits the memory of this process, in words; empty: nothing."""
    limits = getattr(platform, "memory_limits", None)
    return "" if limits is None or not (found := limits()) else f" ({found})"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that there was no memory for a tensor, on any device."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


def no_room(error: BaseException, needs: MemoryNeeds, platform: Platform, what: str) -> ModelTooLargeError:
    """The error for running out of memory at start: other programs took some, or the reserve is too small."""
    if platform.device.type == "cpu":
        return ModelTooLargeError(
            f"out of memory {what}: weights take {gib(needs.weight_bytes)}, {gib(platform.free_memory())} are free "
            f"now{_limits(platform)}. Lower kv_cache_memory_bytes or max_num_batched_tokens, use a smaller model, or "
            "allow more memory"
        )
    return ModelTooLargeError(
        f"out of memory on {platform.describe()} {what}: weights take {gib(needs.weight_bytes)}, "
        f"{gib(platform.free_memory())} are free now. Lower gpu_memory_utilization (or kv_cache_memory_bytes, "
        f"num_gpu_blocks_override), max_num_batched_tokens ({needs.step_tokens}) or max_num_seqs ({needs.step_rows}); "
        f"torch reports: {str(error).splitlines()[0]}"
    )


def profile_activations(run_step: Callable[[], None], device: torch.device) -> int:
    """Bytes a step takes at its peak beyond what was allocated before; 0 on a CPU, where it is not measured."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    run_step()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - allocated
    held = torch.cuda.max_memory_reserved(device) - reserved  # more than the peak if tensors leave gaps
    torch.cuda.empty_cache()
    return max(peak, held)


def measure_memory() -> MemoryUse:
    """Bytes in use now: of the GPU if this process uses one, and of the machine."""
    host = CpuPlatform()
    free, total = host.free_memory(), host.usable_memory()
    if not torch.cuda.is_initialized():
        return MemoryUse(free, total, free, total)
    device_free, device_total = torch.cuda.mem_get_info()
    cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return MemoryUse(device_free + cached, device_total, free, total)


def gib(size: float) -> str:
    """12.34 GiB; in MiB below 0.1 GiB."""
    return f"{size / 2**30:.2f} GiB" if abs(size) >= 2**30 / 10 or not size else f"{size / 2**20:.1f} MiB"
