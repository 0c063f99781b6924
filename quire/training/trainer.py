"""Trains a head: EAGLE-3's training-time test, in which later draft steps read the head's own outputs.

The loss of step k at position p is the cross-entropy between the target's distribution after token p + k and the
head's, over the draft vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from quire.training.head import DraftHead
from quire.training.store import Batch, FeatureStore

Embed = Callable[[torch.Tensor], torch.Tensor]

STEP_DECAY = 0.8
"""Weight of each draft step's loss relative to the step before: a draft counts only if those before are accepted."""
WARM_UP = 0.03
"""Share of the training in which the learning rate rises."""
LAST_RATE = 0.02
"""The learning rate at the end, relative to its highest."""
CLIP_NORM = 1.0
SAVE_SECONDS = 60.0


@dataclass(frozen=True)
class TrainSettings:
    """How a head is trained."""

    steps: int = 5
    """Draft steps that are unrolled."""
    epochs: int = 10
    batch_tokens: int = 16384
    """Tokens of a batch, padding included."""
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    seed: int = 0
    seconds: float | None = None
    """Training ends after this time; the learning rate follows whichever limit is nearer."""


@dataclass
class HeldOutAcceptance:
    """How often the target would accept a chain of drafts, under greedy decoding."""

    chains: int
    """Positions from which drafts were made."""
    by_position: list[float]
    """Share of the chains whose first 1, 2, ... drafts are all accepted."""

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a step yields on average, with as many drafts as there are positions."""
        return 1.0 + sum(self.by_position)


@dataclass
class TrainState:
    """Where a training is."""

    step: int = 0
    epoch: int = 0
    place: int = 0
    """Batches of the epoch that are done."""
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    """Mean loss of the first draft step over each 50 steps."""


class Trainer:
    """Owns the optimizer and the order of the batches. The same state and settings give the same head."""

    def __init__(self, head: DraftHead, store: FeatureStore, embed: Embed, settings: TrainSettings) -> None:
        self.head, self.settings, self.state = head, settings, TrainState()
        self._store, self._embed = store, embed
        self._lookup = draft_index(head)
        device = next(head.parameters()).device
        self._half = device.type == "cuda"
        matrices = [p for p in head.parameters() if p.ndim == 2]
        vectors = [p for p in head.parameters() if p.ndim == 1]
        groups: list[dict[str, Any]] = [
            {"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}
        ]  # fmt: skip
        self._optimizer = torch.optim.AdamW(
            groups, lr=settings.learning_rate, betas=(0.9, 0.95), fused=device.type == "cuda"
        )
        self._batches = epoch_batches(store.lengths(), settings, 0)
        self.total = len(self._batches) * settings.epochs

    @property
    def progress(self) -> float:
        """Share of the training that is done, 0 to 1."""
        done = self.state.step / max(1, self.total)
        limit = self.settings.seconds
        return min(1.0, max(done, self.state.seconds / limit if limit else 0.0))

    def run(self, show: Callable[[Trainer, float], None] = lambda *_: None, checkpoint: Path | None = None) -> None:
        """Train to the end, from the state it is in. `show(trainer, loss)` after each step; the state is saved to
        `checkpoint` every minute."""
        self.head.train()
        saved = last = time.monotonic()
        sums: list[torch.Tensor] = []
        while self.progress < 1.0:
            loss = self._step()
            sums.append(loss)
            if len(sums) == 50:
                self.state.losses.append(float(torch.stack(sums).mean()))
                sums.clear()
            if self._half and self.state.step % 10 == 0:
                torch.cuda.synchronize()  # so that the clock below sees what was done
            now = time.monotonic()
            self.state.seconds += now - last
            last = now
            show(self, loss)  # type: ignore[arg-type]
            if checkpoint is not None and now - saved > SAVE_SECONDS:
                self.save(checkpoint)
                saved = last = time.monotonic()
        if checkpoint is not None:
            self.save(checkpoint)
        self.head.eval()

    def _step(self) -> torch.Tensor:
        state = self.state
        if state.place == len(self._batches):
            state.epoch, state.place = state.epoch + 1, 0
            self._batches = epoch_batches(self._store.lengths(), self.settings, state.epoch)
        batch = self._store.batch(self._batches[state.place], self.settings.steps)
        rate = self.settings.learning_rate * schedule(self.progress)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        losses = self._losses(batch)
        weights = [STEP_DECAY**step for step in range(len(losses))]
        total = sum(weight * loss for weight, loss in zip(weights, losses, strict=True)) / sum(weights)
        assert isinstance(total, torch.Tensor)
        self._optimizer.zero_grad(set_to_none=True)
        total.backward()
        nn.utils.clip_grad_norm_(self.head.parameters(), CLIP_NORM)
        self._optimizer.step()
        state.step += 1
        state.place += 1
        return losses[0].detach()

    def _losses(self, batch: Batch) -> list[torch.Tensor]:
        device = batch.features.device.type
        with torch.autocast(device, torch.bfloat16, enabled=self._half):
            outputs = self.head.unroll(batch.features, batch.tokens, self._embed, self.settings.steps)
            return [self._loss(output, batch, step) for step, output in enumerate(outputs, 1)]

    def _loss(self, output: torch.Tensor, batch: Batch, step: int) -> torch.Tensor:
        """Mean cross-entropy over the positions whose token is to be learned."""
        ahead = slice(step, step + batch.length)
        probabilities = batch.probabilities[:, ahead]
        chosen = probabilities[..., 0] > 0
        wanted = probabilities[chosen].float()
        places = self._lookup[batch.ids[:, ahead][chosen].long()]
        wanted = wanted.masked_fill(places < 0, 0)
        logits = self.head.logits(output[chosen]).float()
        # Probability outside of the draft vocabulary and the kept tokens has no term.
        terms = wanted.sum(-1) * logits.logsumexp(-1) - (wanted * logits.gather(-1, places.clamp(min=0))).sum(-1)
        return terms.sum() / max(1, len(terms))

    def save(self, path: Path) -> None:
        """Write the state, so that training can go on in another process."""
        made = {
            "head": self.head.state_dict(), "scale": self.head.scale, "optimizer": self._optimizer.state_dict(),
            "state": vars(self.state),
        }  # fmt: skip
        scratch = path.with_suffix(".part")
        torch.save(made, scratch)
        scratch.replace(path)

    def load(self, path: Path) -> None:
        """Go on where another process was."""
        made = torch.load(path, map_location=self.head.scale.device, weights_only=True)
        self.head.load_state_dict(made["head"])
        self.head.scale.copy_(made["scale"])
        self._optimizer.load_state_dict(made["optimizer"])
        self.state = TrainState(**made["state"])
        self._batches = epoch_batches(self._store.lengths(), self.settings, self.state.epoch)


def schedule(progress: float) -> float:
    """The learning rate at this share of the training, relative to its highest: up in a line, down in a cosine."""
    if progress < WARM_UP:
        return 0.02 + 0.98 * progress / WARM_UP
    done = (progress - WARM_UP) / (1 - WARM_UP)
    return LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * done))


def epoch_batches(lengths: np.ndarray, settings: TrainSettings, epoch: int) -> list[list[int]]:
    """Sequences of each batch: in random order, those of similar length together."""
    random = np.random.default_rng([settings.seed, epoch])
    order = random.permutation(len(lengths))
    pool = max(1, 32 * settings.batch_tokens // max(1, int(lengths.max(initial=1))))
    batches: list[list[int]] = []
    for start in range(0, len(order), pool):
        some = order[start : start + pool]
        batch: list[int] = []
        for index in some[np.argsort(-lengths[some], kind="stable")]:  # the first of a batch is its longest
            if batch and (len(batch) + 1) * lengths[batch[0]] > settings.batch_tokens:
                batches.append(batch)
                batch = []
            batch.append(int(index))
        batches.append(batch)
    random.shuffle(batches)
    return batches


def draft_index(head: DraftHead) -> torch.Tensor:
    """[vocabulary]: each token's place in the draft vocabulary; -1: not in it."""
    tokens = head.draft_tokens
    found = torch.full((head.shape.vocab_size,), -1, dtype=torch.int64, device=tokens.device)
    found[tokens] = torch.arange(len(tokens), device=tokens.device)
    return found


@torch.no_grad()
def measure(
    head: DraftHead, store: FeatureStore, embed: Embed, steps: int, batch_tokens: int, sequences: Sequence[int] = ()
) -> HeldOutAcceptance:
    """Acceptance on a store's sequences (or some of them).

    A draft is right if it is the target's likeliest token. Steps read the text's own tokens, which are the drafts as
    long as all of them are right, if the text is what the target writes under greedy decoding.
    """
    was_training = head.training
    head.eval()
    half = next(head.parameters()).device.type == "cuda"
    accepted, chains = np.zeros(steps), 0
    settings = TrainSettings(batch_tokens=batch_tokens)
    chosen = list(sequences) or list(range(len(store)))
    tokens = head.draft_tokens
    for batch_of in epoch_batches(store.lengths()[chosen], settings, 0):
        batch = store.batch([chosen[index] for index in batch_of], steps)
        length = batch.length
        # Chains whose every draft has a token to compare with.
        whole = torch.stack([batch.probabilities[:, k : k + length, 0] > 0 for k in range(1, steps + 1)]).all(0)
        with torch.autocast(batch.features.device.type, torch.bfloat16, enabled=half):
            outputs = head.unroll(batch.features, batch.tokens, embed, steps)
            right = torch.ones_like(whole)[whole]
            for step, output in enumerate(outputs, 1):
                drafts = tokens[head.logits(output[whole]).argmax(-1)]
                right = right & (drafts == batch.ids[:, step : step + length, 0][whole])
                accepted[step - 1] += int(right.sum())
        chains += int(whole.sum())
    head.train(was_training)
    return HeldOutAcceptance(chains, [float(count) / max(1, chains) for count in accepted])
