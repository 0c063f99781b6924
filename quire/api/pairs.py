"""Pairs of texts for `score` and `/rerank`: how similar two are, or what a classifier of pairs says of them.

Without a classifier the score is the cosine of two embeddings. A classifier with one class reads both texts as one
prompt: by a chat template that was set for it, with the tokenizer's separators, or one text after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.api.chat import ChatRenderer
from quire.api.inputs import InputProcessor, PromptType
from quire.api.text_encoding import SHORT_CHARACTERS, encode_text
from quire.errors import ValidationError
from quire.loading.class_head import ClassHeadConfig
from quire.loading.model_config import ModelConfig
from quire.messages.outputs import PoolingRequestOutput, ScoringOutput, ScoringRequestOutput


def check_scores(model: ModelConfig) -> None:
    """Raise if the model scores no pairs: it has classes, and the score would be of one of them."""
    if (head := model.class_head) is not None and not head.scores_pairs:
        raise ValidationError(
            f"{model.architecture} has {head.count} classes; pairs are scored by a model with one (num_labels = 1), or "
            "by their embeddings",
            "model",
        )


class PairEncoder:
    """Makes one prompt of two texts."""

    def __init__(
        self,
        inputs: InputProcessor,
        head: ClassHeadConfig,
        renderer: Callable[[], ChatRenderer],
        template: str | None = None,
    ) -> None:
        """`template`: a chat template for the roles query and document. The model's own is not used: it is most often
        that of the model that the classifier was trained from."""
        self._inputs = inputs
        self._separates = head.separates
        self._renderer = renderer
        self._template = template

    def encode(self, query: Any, document: Any, keep: int | None = None) -> list[int]:
        """Tokens of a pair, at most `keep` of them."""
        for text, name in ((query, "data_1"), (document, "data_2")):
            if not isinstance(text, str):
                raise ValidationError(f"a classifier of pairs reads two texts; got {type(text).__name__}", name)
        tokenizer = self._inputs.tokenizer
        if tokenizer is None:
            raise ValidationError("pairs need a tokenizer, and skip_tokenizer_init is set", "data_1")
        if len(query) + len(document) > SHORT_CHARACTERS:
            self._inputs.encode_bounded(query + document)  # refuses what is far too long
        if self._template is not None:
            messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
            text = self._renderer().render_text(messages, add_generation_prompt=False, chat_template=self._template)
            tokens = encode_text(tokenizer, text, "data_1", add_special_tokens=True)
        elif not self._separates:
            tokens = encode_text(tokenizer, query + document, "data_1", add_special_tokens=True)
        else:
            encode_text(tokenizer, query + document, "data_1", add_special_tokens=False)  # refuses lone surrogates
            cut = {} if keep is None else {"truncation": True, "max_length": keep}
            tokens = list(tokenizer(text=query, text_pair=document, **cut)["input_ids"])
        return tokens[:keep]


class Pairs:
    """Prompts that are compared: one with one, one with each of many, or pair by pair."""

    def __init__(self, first: Sequence[Any], second: Sequence[Any]) -> None:
        if not first or not second:
            raise ValidationError(
                f"score compares at least one prompt with one; got {len(first)} and {len(second)}", "data_1"
            )
        if len(first) not in (1, len(second)):
            raise ValidationError(
                f"score compares one prompt with many, or as many with each other; got {len(first)} and {len(second)}",
                "data_1",
                len(first),
            )
        self.prompts: list[PromptType] = [*first, *second]
        """Each once, for their embeddings."""
        self._count = len(first)

    def joined(self, encoder: PairEncoder, keep: int | None) -> list[PromptType]:
        """A prompt for each pair, for a classifier."""
        first, second = self._split(self.prompts)
        return [encoder.encode(one, other, keep) for one, other in zip(first, second, strict=True)]

    def scored(self, embedded: Sequence[PoolingRequestOutput]) -> list[ScoringRequestOutput]:
        """The pairs' scores, given all embeddings in order."""
        return [similarity(one, other) for one, other in zip(*self._split(embedded), strict=True)]

    def _split(self, values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        first, second = list(values[: self._count]), list(values[self._count :])
        return (first * len(second) if self._count == 1 else first), second


def similarity(one: PoolingRequestOutput, other: PoolingRequestOutput) -> ScoringRequestOutput:
    """The cosine of two embeddings."""
    return ScoringRequestOutput(
        request_id=f"{one.request_id}_{other.request_id}",
        outputs=ScoringOutput(cosine(one.outputs.data, other.outputs.data)),
        prompt_token_ids=one.prompt_token_ids + other.prompt_token_ids,
        num_cached_tokens=(one.num_cached_tokens or 0) + (other.num_cached_tokens or 0),
        finished=one.finished and other.finished,
    )


def cosine(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """Of two vectors; 0 if one of them is empty or zero."""
    if len(one) != len(other):
        return 0.0
    a, b = one.astype(np.float64), other.astype(np.float64)
    length = float(np.linalg.norm(a)) * float(np.linalg.norm(b))
    return float(a @ b) / length if length else 0.0
