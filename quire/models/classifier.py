"""Decoders with a head for classes in place of the one for tokens (`…ForSequenceClassification`).

The hidden state of the last token, after the final norm, times a matrix with a row for each class. It is small, so each
rank holds all of it, in float32.
"""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar, cast

import torch
from torch import nn

from quire.layers.build_context import BuildContext
from quire.layers.embedding import LMHead
from quire.loading.class_head import ClassHeadConfig
from quire.loading.weights import AnyTarget, Target
from quire.models.base import CausalLM


class ClassHead(nn.Module):
    """A number for each class."""

    def __init__(self, build: BuildContext, name: str, head: ClassHeadConfig) -> None:
        super().__init__()
        config = build.config
        self.head = head
        if head.tokens:  # their rows in the LM head of the model that the classifier is made of
            self.source = "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
            self.shape = (config.vocab_size, config.hidden_size)
        else:
            self.source, self.shape = f"{name}.weight", (head.count, config.hidden_size)
        rows = (len(head.tokens) or head.count, config.hidden_size)
        self.weight = nn.Parameter(build.memory.zeros(rows, torch.float32), requires_grad=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden size] -> [n, classes], float32."""
        values = hidden.float() @ self.weight.T
        return values[:, 1:] - values[:, :1] if self.head.is_difference else values

    def targets(self) -> dict[str, list[AnyTarget]]:
        """The matrix, or the rows that it is made of."""
        if not self.head.tokens:
            return {self.source: [Target(self.weight, self.shape)]}
        rows = enumerate(self.head.tokens)
        return {
            self.source: [
                Target(self.weight[at : at + 1], self.shape, (slice(token, token + 1),)) for at, token in rows
            ]
        }


class Classifier:
    """What `classifier_class` adds to a language model."""

    is_classifier: ClassVar[bool] = True
    score: ClassHead | None

    def __init__(self, build: BuildContext) -> None:
        super().__init__(build)  # type: ignore[call-arg]
        module = cast(nn.Module, self)
        heads = [name for name, child in module.named_children() if isinstance(child, LMHead)]
        self._unread = frozenset(f"{name}.weight" for name in (*heads, "lm_head"))
        for name in heads:
            setattr(module, name, None)
        self._vocab_size = build.config.vocab_size
        head = build.config.class_head
        assert head is not None
        self.score = ClassHead(build, "score", head) if build.ranks.is_last_stage else None

    def classify(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden size] -> [n, classes], float32; on the last stage only."""
        return self.score(hidden)  # type: ignore[misc]  # there on the last stage

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """For steps that only measure or warm up: no token is ever drawn."""
        return hidden.new_zeros(len(hidden), self._vocab_size)

    def ignores(self, name: str) -> bool:
        """Also the head for tokens that some checkpoints still have, and a head for classes of another stage."""
        is_other = name.startswith("score.") and self.score is None
        return name in self._unread or is_other or bool(super().ignores(name))  # type: ignore[misc]


@cache
def classifier_class(base: type[CausalLM]) -> type[CausalLM]:
    """The class of classifiers whose body is that of the language model `base`."""
    members: dict[str, Any] = {"__doc__": f"{base.__name__} with a head for classes.", "__module__": base.__module__}
    return cast("type[CausalLM]", type(f"{base.__name__}Classifier", (Classifier, base), members))
