"""Bloom (arXiv 2211.05100): Falcon's oldest form with a norm after the embedding, and ALiBi positions."""

from __future__ import annotations

import torch

from quire.layers.attention.layer import alibi_slopes
from quire.layers.build_context import BuildContext
from quire.layers.linear import Heads
from quire.models.falcon import FalconForCausalLM, FalconVariant


class BloomVariant(FalconVariant):
    """With biases that are added to the scaled scores."""

    def slopes(self, build: BuildContext, heads: Heads) -> torch.Tensor | None:
        return alibi_slopes(build, heads)


class BloomForCausalLM(FalconForCausalLM):
    """Bloom and Bloomz."""

    def __init__(self, build: BuildContext) -> None:
        # `slow_but_exact` names another order of the same sums.
        variant = BloomVariant(
            bias=True,
            activation="gelu_pytorch_tanh",
            is_parallel=False,
            has_alibi=True,
            embedding_norm="word_embeddings_layernorm",
        )
        super().__init__(build, variant)
