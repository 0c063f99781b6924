"""What a model implements, and the helpers every model has for its pipeline stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from quire.errors import ConfigError, UnsupportedModelError
from quire.kernels.kv import LayerKV
from quire.layers.attention.base import AttentionInputs, KVSpec
from quire.layers.build_context import BuildContext
from quire.loading.model_config import ModelConfig


class CausalLM(Protocol):
    """A language model, or this stage and slice of one: an `nn.Module` made from a `BuildContext`."""

    build: BuildContext
    supports_last_tokens: bool
    """Whether `forward` returns only the hidden states of `inputs.last` if that is given."""
    supports_features: bool
    """Whether `forward` fills `inputs.features`."""

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        kv: Sequence[LayerKV],
        inputs: AttentionInputs,
        hidden: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One step over T tokens: hidden states [T, hidden_size], after the final norm on the last stage.

        tokens   [T] int64
        positions[T] int64
        kv       for each layer of this stage that keeps something, its cache: [blocks, 2, kv_heads, block_size,
                 head_dim], [blocks, block_size, width] if it is latent, a `StateView` of a recurrent layer
        hidden   what the previous stage returned; may be overwritten. None on the first stage.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, hidden_size] -> [S, vocab_size]; on the last stage only."""
        ...

    def ignores(self, name: str) -> bool:
        """Whether a checkpoint may hold a tensor of this name that has no target here."""
        ...

    @property
    def kv_shape(self) -> KVSpec:
        """The cache this stage and rank needs, if all layers keep the same.

        A model whose layers differ has `caches` instead: what each layer of the whole model keeps on this rank
        (`layers/caches.py`). If some layers keep nothing they are not listed, and `cache_stages` has the range of
        `caches` of each pipeline stage.
        """
        ...


def stage_layers(build: BuildContext) -> range:
    """The layers of this pipeline stage; each stage must have one."""
    if build.config.num_layers < build.ranks.pp_size:
        raise ConfigError(
            f"{build.config.num_layers} layers cannot fill {build.ranks.pp_size} pipeline stages",
            "pipeline_parallel_size",
            build.ranks.pp_size,
        )
    return build.ranks.layers(build.config.num_layers)


def in_other_stage(name: str, prefix: str, build: BuildContext) -> bool:
    """Whether `name` belongs to a layer ("<prefix>.<number>....") of another pipeline stage."""
    number = name.removeprefix(f"{prefix}.").partition(".")[0] if name.startswith(f"{prefix}.") else ""
    if not number.isdigit():
        return False
    total = build.config.num_layers
    return int(number) < total and int(number) not in build.ranks.layers(total)


def refuse_other_values(config: ModelConfig, implemented: Mapping[str, Any]) -> None:
    """Raise if a field of the config, where it is given, has another value than the only one that is implemented."""
    for name, value in implemented.items():
        if (given := config.raw.get(name)) is not None and given != value:
            raise UnsupportedModelError(
                f"{config.architecture} with {name} = {given!r} is not implemented; only {value!r} is"
            )
