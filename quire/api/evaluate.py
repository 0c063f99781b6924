"""How well a model predicts a text, and how far it is from another: perplexity, agreement, KL divergence.

The text is tokenized once, as a prompt is, and read in windows of `window` tokens that begin `stride` tokens apart.
Each token but the first is scored once, in the first window that contains it: with at least window - stride tokens
before it, except in the first window. Probabilities are the softmax of the engine's logits, computed in float64.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from quire.config import EngineConfig
from quire.engine.setup import longest_position
from quire.errors import ValidationError
from quire.loading.hub import find_model
from quire.loading.model_config import read_model_config
from quire.loading.progress import count_bar
from quire.loading.tokenizer import tokenizer_of
from quire.platforms import choose
from quire.worker.sequences import SequenceModel

WINDOW = 1024
"""Tokens of a window, unless the model is shorter."""


@dataclass(frozen=True)
class ModelDistance:
    """A model against a reference, over the same scored tokens."""

    model: str
    """The reference."""
    perplexity: float
    """The reference's."""
    perplexity_ratio: float
    """The model's perplexity divided by the reference's."""
    greedy_agreement: float
    """Share of positions at which both have the same most likely token."""
    mean_kl: float
    """Mean of KL(reference || model) over positions, in nats."""
    max_kl: float


@dataclass(frozen=True)
class Evaluation:
    """How well a model predicts a text."""

    model: str
    perplexity: float
    """exp of the mean negative log-likelihood of the scored tokens, in nats."""
    tokens: int
    """Tokens of the text."""
    scored: int
    window: int
    stride: int
    seconds: float
    against: ModelDistance | None = None

    def as_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


@dataclass(frozen=True)
class Window:
    """Tokens `start` to `stop` of a text; those from `first` on are scored."""

    start: int
    stop: int
    first: int


def windows(tokens: int, window: int, stride: int) -> Iterator[Window]:
    """The windows over a text; every token but the first is scored exactly once."""
    start, scored = 0, 1
    while scored < tokens:
        stop = min(start + window, tokens)
        yield Window(start, stop, scored)
        scored = stop
        start += stride


class TextReader:
    """A loaded model that reads a text."""

    def __init__(self, config: EngineConfig, window: int | None) -> None:
        self.name = config.model
        files = find_model(config)
        model = read_model_config(files, config.hf_overrides)
        self.vocab_size = model.vocab_size
        limit = longest_position(model) if config.max_model_len in (None, "auto") else int(config.max_model_len or 0)
        self.window = min(window or WINDOW, limit)
        if window is not None and window > limit:
            raise ValidationError(f"a window of {window} tokens is longer than the model's {limit}", "window", window)
        self._tokenizer = tokenizer_of(config, files)
        self.model = SequenceModel(config, files, model, choose(config.device), self.window)

    def encode(self, text: str) -> list[int]:
        """The text's tokens."""
        return list(self._tokenizer(text, verbose=False)["input_ids"])


def evaluate(
    config: EngineConfig,
    text: str,
    reference: EngineConfig | None = None,
    window: int | None = None,
    stride: int | None = None,
    max_tokens: int | None = None,
) -> Evaluation:
    """Evaluate a model on a text; `reference`: compare it with that model. Both are in memory at the same time.

    `window`: at most the model's length; `stride`: half of it if None. `max_tokens`: the rest of the text is not read.
    """
    begin = time.monotonic()
    reader = TextReader(config, window)
    other = None if reference is None else TextReader(reference, reader.window)
    try:
        tokens = reader.encode(text)
        _check(tokens, reader, other, text)
        tokens = tokens[:max_tokens]
        if len(tokens) < 2:
            raise ValidationError(f"the text has {len(tokens)} tokens; at least 2 are needed", "text")
        step = reader.window // 2 if stride is None else stride
        if not 1 <= step < reader.window:  # a window's first token is not scored in it
            raise ValidationError(
                f"the stride must be 1 to {reader.window - 1}, less than the window; got {step}", "stride", step
            )
        sums = _Sums()
        with count_bar(f"reading with {reader.name}", len(tokens)) as show:
            for span in windows(len(tokens), reader.window, step):
                _score(tokens, span, reader.model, None if other is None else other.model, sums)
                show(span.stop)
        found = sums.comparison(other.name) if other is not None else None
        perplexity = math.exp(sums.loss / sums.count)
        return Evaluation(
            reader.name, perplexity, len(tokens), sums.count, reader.window, step, time.monotonic() - begin, found
        )
    finally:
        reader.model.close()
        if other is not None:
            other.model.close()


@dataclass
class _Sums:
    count: int = 0
    loss: float = 0.0
    other_loss: float = 0.0
    agreed: int = 0
    divergence: float = 0.0
    largest: float = 0.0

    def comparison(self, name: str) -> ModelDistance:
        count = self.count
        return ModelDistance(
            model=name,
            perplexity=math.exp(self.other_loss / count),
            perplexity_ratio=math.exp((self.loss - self.other_loss) / count),
            greedy_agreement=self.agreed / count,
            mean_kl=self.divergence / count,
            max_kl=self.largest,
        )


def _check(tokens: list[int], reader: TextReader, other: TextReader | None, text: str) -> None:
    if other is None:
        return
    if other.vocab_size != reader.vocab_size or other.encode(text) != tokens:
        raise ValidationError(
            f"{reader.name} and {other.name} have different vocabularies: their distributions cannot be compared",
            "against",
        )


@torch.inference_mode()
def _score(tokens: Sequence[int], span: Window, model: SequenceModel, other: SequenceModel | None, sums: _Sums) -> None:
    """Add a window's scored tokens. The logits of position i predict token i + 1."""
    ids = tokens[span.start : span.stop]
    first = span.first - span.start - 1
    wanted = ids[first + 1 :]
    mine = model.logits(ids[:-1], first)
    theirs = None if other is None else other.logits(ids[:-1], first)
    done = 0
    for logits in mine:
        logprobs = logits.double().log_softmax(-1)
        own = torch.tensor(wanted[done : done + len(logits)], device=logits.device).unsqueeze(-1)
        sums.loss -= float(logprobs.gather(1, own).sum())
        sums.count += len(logits)
        done += len(logits)
        if theirs is not None:
            reference = next(theirs).double().log_softmax(-1)
            sums.other_loss -= float(reference.gather(1, own).sum())
            sums.agreed += int((logprobs.argmax(-1) == reference.argmax(-1)).sum())
            # xlogy-like: a token that the reference excludes (-inf) adds nothing.
            terms = torch.where(reference == -torch.inf, 0.0, reference.exp() * (reference - logprobs))
            each = terms.sum(-1)
            sums.divergence += float(each.sum())
            sums.largest = max(sums.largest, float(each.max()))
