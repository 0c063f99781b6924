"""One rank: its part of the model, its cache, and its batch."""

from __future__ import annotations

import torch

from quire.config import EngineConfig
from quire.distributed.groups import Ranks
from quire.kernels.base import Ops
from quire.layers.attention.registry import attention_backend
from quire.layers.build import Build
from quire.layers.targets import collect_targets
from quire.loading.files import ModelFiles
from quire.loading.load import load_weights, open_checkpoint
from quire.loading.model_config import ModelConfig
from quire.messages.plan import StepPlan
from quire.models.base import CausalLM
from quire.models.registry import model_class
from quire.platforms.base import Platform
from quire.registry import resolve
from quire.worker.batch import DeviceBatch
from quire.worker.dtypes import choose_dtype
from quire.worker.graphs import DecodeGraphs
from quire.worker.kv import KVCache
from quire.worker.logits import load_processors
from quire.worker.memory import MemoryNeeds
from quire.worker.runner import PendingStep, Runner


def make_ops(platform: Platform) -> Ops:
    """The platform's kernels."""
    ops: Ops = resolve("kernels", platform.ops, {})()
    return ops


def build_model(
    config: EngineConfig,
    files: ModelFiles,
    model: ModelConfig,
    platform: Platform,
    max_model_len: int,
    ranks: Ranks = Ranks(),
    device: torch.device | None = None,
) -> CausalLM:
    """The model's layers, their weights not filled. `device` other than the platform's: "meta" for shapes alone."""
    backend = platform.attention if config.attention_backend == "auto" else config.attention_backend
    build = Build(
        config=model,
        ranks=ranks,
        dtype=choose_dtype(config.dtype, model, files, platform),
        device=device or platform.device,
        ops=make_ops(platform),
        attention=attention_backend(backend)(),
        max_model_len=max_model_len,
    )
    return model_class(model.architecture)(build)  # type: ignore[call-arg]


class Worker:
    """Loads the model, then runs plans. Knows no policy."""

    def __init__(
        self,
        config: EngineConfig,
        files: ModelFiles,
        model: ModelConfig,
        platform: Platform,
        max_model_len: int,
        max_rows: int,
        ranks: Ranks = Ranks(),
    ) -> None:
        self._config = config
        self._device = platform.device
        self._ops = make_ops(platform)
        self._vocab_size = model.vocab_size
        self._max_model_len = max_model_len
        self._max_rows = max_rows
        self.model = build_model(config, files, model, platform, max_model_len, ranks)
        targets = collect_targets(self.model)  # type: ignore[arg-type]
        checkpoint = open_checkpoint(files, config.load_format, targets=targets, seed=config.seed)
        load_weights(targets, self.model.ignores, checkpoint)
        self.needs = MemoryNeeds.of(self.model, config, model, max_model_len, max_rows)
        self._runner: Runner | None = None

    def make_cache(self, num_blocks: int) -> None:
        """Allocate the cache and the batch; plans can come from here on."""
        kv = KVCache(self.model.kv_shape, num_blocks, self._config.block_size, self.needs.dtype, self._device)
        batch = DeviceBatch(self._max_rows, self._max_model_len, self._vocab_size, kv, self._device)
        width = batch.block_table.shape[1]
        graphs = DecodeGraphs(self.model, kv.layers, self._ops, width, enabled=not self._config.enforce_eager)
        self._runner = Runner(self.model, batch, graphs, load_processors(self._config.logits_processors))

    def launch(self, plan: StepPlan) -> PendingStep:
        """Start a step."""
        if self._runner is None:
            raise RuntimeError("a plan came before the cache was made")
        return self._runner.launch(plan)

    def shutdown(self) -> None:
        """Let go of the model and the cache."""
        self._runner = None
        del self.model
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
