"""One rank: its part of the model, its cache, and its batch."""

from __future__ import annotations

import logging
import math

import torch

from quire.config import EngineConfig
from quire.distributed.groups import Ranks
from quire.errors import CacheTooSmallError
from quire.layers.attention.registry import attention_backend
from quire.layers.build import Build
from quire.layers.targets import collect_targets
from quire.loading.files import ModelFiles
from quire.loading.load import load_weights, open_checkpoint
from quire.loading.model_config import ModelConfig
from quire.messages.plan import StepPlan
from quire.models.registry import model_class
from quire.platforms.base import Platform
from quire.registry import resolve
from quire.worker.batch import DeviceBatch
from quire.worker.dtypes import choose_dtype
from quire.worker.kv import KVCache, block_bytes
from quire.worker.logits import load_processors
from quire.worker.runner import PendingStep, Runner

logger = logging.getLogger(__name__)


class Worker:
    """Loads the model, then runs plans. Knows no policy."""

    def __init__(
        self,
        config: EngineConfig,
        files: ModelFiles,
        model_config: ModelConfig,
        platform: Platform,
        max_model_len: int,
        max_rows: int,
        ranks: Ranks = Ranks(),
    ) -> None:
        self._config = config
        self._platform = platform
        self._model_config = model_config
        self._max_model_len = max_model_len
        self._max_rows = max_rows
        self.dtype = choose_dtype(config.dtype, model_config, files, platform)
        backend = platform.attention if config.attention_backend == "auto" else config.attention_backend
        build = Build(
            config=model_config,
            ranks=ranks,
            dtype=self.dtype,
            device=platform.device,
            ops=resolve("kernels", platform.ops, {})(),
            attention=attention_backend(backend)(),
            max_model_len=max_model_len,
        )
        self.model = model_class(model_config.architecture)(build)  # type: ignore[call-arg]
        targets = collect_targets(self.model)  # type: ignore[arg-type]
        checkpoint = open_checkpoint(files, config.load_format, targets=targets, seed=config.seed)
        load_weights(targets, self.model.ignores, checkpoint)
        self._runner: Runner | None = None

    @property
    def weight_bytes(self) -> int:
        """Bytes of this rank's parameters."""
        return sum(p.numel() * p.itemsize for p in self.model.parameters())  # type: ignore[attr-defined]

    @property
    def block_bytes(self) -> int:
        """Bytes one KV block takes here."""
        return block_bytes(self.model.kv_shape, self._config.block_size, self.dtype)

    def fitting_blocks(self) -> int:
        """How many KV blocks this rank has room for, the reserved one included."""
        config = self._config
        if config.num_gpu_blocks_override is not None:
            return config.num_gpu_blocks_override + 1
        budget = config.kv_cache_memory_bytes or self._kv_budget()
        blocks = budget // self.block_bytes
        if blocks < 2:
            raise CacheTooSmallError(
                f"{budget} bytes for the KV cache do not hold one block of {config.block_size} tokens "
                f"({self.block_bytes} bytes; two are needed, one is reserved). Raise kv_cache_memory_bytes or the "
                "memory share, or lower block_size"
            )
        # More than every row at full length can never be used.
        return min(blocks, self._max_rows * math.ceil(self._max_model_len / config.block_size) + 1)

    def _kv_budget(self) -> int:
        config, free = self._config, self._platform.free_memory()
        if self._platform.device.type == "cpu":
            return config.cpu_kv_cache_bytes or int(free * config.cpu_kv_cache_share)
        total = torch.cuda.get_device_properties(self._platform.device).total_memory
        return max(0, int(free - total * (1 - config.gpu_memory_utilization) - self._activation_bytes()))

    def _activation_bytes(self) -> int:
        """A step's working memory: a few token matrices, and logits for one slice of rows."""
        shape, tokens = self._model_config, self._config.max_num_batched_tokens or self._platform.max_num_batched_tokens
        widest = 4 * max(shape.intermediate_size, shape.hidden_size) * tokens * self.dtype.itemsize
        return widest + 4 * 4 * shape.vocab_size * min(512, self._max_rows) + 2**30

    def make_cache(self, num_blocks: int) -> None:
        """Allocate the cache and the batch; plans can come from here on."""
        device = self._platform.device
        kv = KVCache(self.model.kv_shape, num_blocks, self._config.block_size, self.dtype, device)
        batch = DeviceBatch(self._max_rows, self._max_model_len, self._model_config.vocab_size, kv, device)
        self._runner = Runner(self.model, batch, load_processors(self._config.logits_processors))

    def launch(self, plan: StepPlan) -> PendingStep:
        """Start a step."""
        if self._runner is None:
            raise RuntimeError("a plan came before the cache was made")
        return self._runner.launch(plan)

    def shutdown(self) -> None:
        """Let go of the model and the cache."""
        self._runner = None
        del self.model
        if self._platform.device.type == "cuda":
            torch.cuda.empty_cache()
