"""A draft's files: its configuration, the names of its tensors, and how they are loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.layers.build_context import BuildContext, collect_targets
from quire.loading.files import ModelFiles, local_files
from quire.loading.load import load_weights, open_checkpoint
from quire.loading.model_config import ModelConfig, read_raw_config
from quire.loading.weights import Checkpoint
from quire.quantization.find import find_scheme


@dataclass(frozen=True)
class DraftCheckpoint:
    """A draft on this machine."""

    files: ModelFiles
    raw: Mapping[str, Any]
    """Its config.json."""
    names: frozenset[str] | None
    """Its tensors; None: it has only a config.json, and runs with random weights (load_format dummy)."""

    @classmethod
    def open(cls, path: str) -> DraftCheckpoint:
        """The draft in a folder or a GGUF file."""
        files = local_files(path, Path(path))
        names = None if files.kind is None else frozenset(weight.name for weight in open_checkpoint(files))
        return cls(files, read_raw_config(files), names)

    def has(self, name: str, otherwise: bool) -> bool:
        """Whether there is a tensor of this name, under any module; `otherwise`: if the weights will be random."""
        return otherwise if self.names is None else any(f".{each}".endswith(f".{name}") for each in self.names)

    def build_for(self, build: BuildContext, config: ModelConfig, quantization: str | None = None) -> BuildContext:
        """What the draft's layers are built from: the target's device, ranks and dtype, with the draft's own shape.

        `quantization`: the user's wish for the draft, as `EngineConfig.quantization`."""
        wish = EngineConfig(model=str(self.files.path), quantization=quantization)
        scheme = find_scheme(wish, self.files, config, on_cpu=build.device.type == "cpu")
        return replace(build, config=config, scheme=scheme, experts=None)

    def load(
        self, draft: nn.Module, ignores: Callable[[str], bool], load_format: str, seed: int, progress: bool
    ) -> Checkpoint:
        """Fill the draft's weights; missing and misshapen tensors are listed in one error."""
        targets = collect_targets(draft)
        checkpoint = open_checkpoint(self.files, load_format, targets=targets, seed=seed)
        load_weights(targets, ignores, checkpoint, progress=progress)
        return checkpoint


def refuse_misfit(what: str, draft: int, target: int, name: str) -> None:
    """Raise if a size of the draft is not the target's."""
    if draft != target:
        raise ConfigError(
            f"the draft {name} does not fit the model: its {what} is {draft}, the model's is {target}",
            "speculative_config",
            name,
        )
