"""A draft model: a smaller model of any architecture with the target's vocabulary, which writes ahead.

It computes every token that the target computes, at the same positions, into layers' caches of its own beside the
target's; then token after token from each row's last one on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from quire.errors import UnsupportedModelError
from quire.layers.attention.base import AttentionInputs, LastTokens
from quire.layers.attention.scales import is_attention_scale, load_kv_scales
from quire.layers.build_context import BuildContext, create_weights
from quire.layers.caches import AttentionCache, LayerCache, StateCache
from quire.loading.model_config import read_model_config
from quire.models.base import CausalLM
from quire.models.registry import model_class
from quire.speculative.choice import choose, write
from quire.speculative.config import GREEDY, SpeculativeConfig
from quire.speculative.device import ProposalStep
from quire.speculative.draft_checkpoint import DraftCheckpoint, refuse_misfit
from quire.speculative.recording import PassRecorder, is_recordable


class DraftModelProposer(nn.Module):
    """Drafts by a model."""

    feature_layers: tuple[int, ...] = ()
    needs_hidden = False
    needs_following = False

    def __init__(
        self,
        checkpoint: DraftCheckpoint,
        build: BuildContext,
        method: str = GREEDY,
        quantization: str | None = None,
    ) -> None:
        """`build`: what the target's layers were built from. `quantization`: of the draft."""
        super().__init__()
        self.checkpoint, self.method = checkpoint, method
        config = read_model_config(checkpoint.files)
        name = checkpoint.files.name
        refuse_misfit("vocabulary", config.vocab_size, build.config.vocab_size, name)
        if checkpoint.has("d2t", False) or checkpoint.has("fc.weight", False):
            raise UnsupportedModelError(f"{name} is a draft head, not a model: set method to eagle3")
        own = checkpoint.build_for(build, config, quantization)
        draft: Any = model_class(config.architecture, "auto")(own)  # type: ignore[call-arg]
        create_weights(draft, own)
        self.draft = draft
        self.caches = caches_of(self.draft)
        if any(isinstance(cache, StateCache) for cache in self.caches):
            raise UnsupportedModelError(
                f"{name} ({config.architecture}) has recurrent layers, which a draft must not have: their states could "
                "not follow the drafts that are accepted; use a model with attention in every layer"
            )
        self._first_pass = PassRecorder(build.ops, self._compute_first)
        self._next = PassRecorder(build.ops, self._compute_next)

    def load(self, load_format: str = "auto", seed: int = 0, progress: bool = False) -> None:
        """Read the weights."""
        scheme = self.draft.build.scheme

        def ignores(name: str) -> bool:
            is_ignored = self.draft.ignores(name) or is_attention_scale(name)
            return is_ignored or (scheme is not None and scheme.ignores(name))

        load_kv_scales(self.draft, self.checkpoint.load(self.draft, ignores, load_format, seed, progress))

    def propose(self, step: ProposalStep) -> None:
        """Compute the step's tokens, then make the drafts of every row that draws, one after another."""
        draws = len(step.rows) > 0
        if is_recordable(step):
            self._first_pass(step, step.attention, step.tokens, step.positions)
        else:
            is_cut = draws and self.draft.supports_last_tokens
            last = LastTokens(step.ends, step.lay_out(-1)[1][0]) if is_cut else None
            self._compute_first(replace(step.attention[0], last=last), step.kv, step.tokens, step.positions)
        if not draws or not step.count:
            return
        drafts: list[torch.Tensor] = []
        token = step.batch.last_token[step.rows].long()
        for number in range(step.count):
            positions, attention = step.lay_out(number)
            (logits,) = self._next(step, attention, token, positions)
            token = choose(logits, step, number, self.method)
            drafts.append(token)
        write(step, drafts)

    def _compute_first(
        self, inputs: AttentionInputs, kv: Sequence[Any], tokens: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor]:
        return (self.draft(tokens, positions, kv, replace(inputs, features=None)),)

    def _compute_next(
        self, inputs: AttentionInputs, kv: Sequence[Any], tokens: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor]:
        return (self.draft.logits(self.draft(tokens, positions, kv, inputs)),)


def caches_of(model: Any) -> list[LayerCache]:
    """What each layer of a model keeps."""
    found: Sequence[LayerCache] | None = getattr(model, "caches", None)
    if found is not None:
        return list(found)
    spec = model.kv_shape
    return [AttentionCache(spec.num_kv_heads, spec.head_dim, model.build.kv_format)] * spec.num_layers


def make(config: SpeculativeConfig, model: CausalLM, build: BuildContext) -> DraftModelProposer:
    """The model in the folder `config.model`, its weights not filled."""
    return DraftModelProposer(
        DraftCheckpoint.open(str(config.model)), build, config.draft_sample_method, config.quantization
    )
