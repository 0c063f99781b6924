"""Synthetic traffic with shared prefixes: conversations, agents, one popular document, and unrelated prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from quire.kvcache.prefix_cache import ContentKeys

BLOCK = 16
Tokens = list[int]


@dataclass(frozen=True, eq=False)
class Arrival:
    """One request of a trace: its time, its prompt, and the length of its output."""

    at: float
    prompt_tokens: int
    output_tokens: int
    keys: list[bytes]
    """Of all full blocks, including those of the output."""

    @property
    def prompt_keys(self) -> list[bytes]:
        return self.keys[: self.prompt_tokens // BLOCK]


@dataclass(frozen=True)
class Turn:
    """A request before its keys are computed."""

    at: float
    prompt: Tokens
    output: Tokens


class Writer:
    """Generates requests of people and programs. Deterministic by its seed."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def text(self, least: int, most: int) -> Tokens:
        """Random tokens."""
        length = int(self.rng.integers(least, most + 1))
        return list(self.rng.integers(0, 50_000, length).tolist())

    def zipf(self, count: int, exponent: float) -> Callable[[], int]:
        """Draws an index below `count` from a Zipf distribution."""
        weights = 1 / np.arange(1, count + 1) ** exponent
        shares = weights / weights.sum()
        return lambda: int(self.rng.choice(count, p=shares))

    def poisson(self, rate: float, seconds: float) -> Iterator[float]:
        """Times of arrivals."""
        at = self.rng.exponential(1 / rate)
        while at < seconds:
            yield at
            at += self.rng.exponential(1 / rate)

    def dialogue(
        self, begin: float, context: Tokens, turns: int, asked: tuple[int, int], answer: tuple[int, int], pause: float
    ) -> Iterator[Turn]:
        """Turns that each extend the previous prompt and output."""
        history, at = list(context), begin
        for _ in range(turns):
            history = history + self.text(*asked)
            output = self.text(*answer)
            yield Turn(at, history, output)
            history = history + output
            at += 2.0 + self.rng.exponential(pause)

    def chat(self, rate: float, seconds: float) -> Iterator[Turn]:
        """People: 160 system prompts, a few of them popular, and conversations of some turns."""
        systems = [self.text(300, 3000) for _ in range(160)]
        draw = self.zipf(160, 1.0)
        for at in self.poisson(rate, seconds):
            yield from self.dialogue(at, systems[draw()], int(self.rng.geometric(0.25)), (20, 200), (40, 250), 10.0)

    def agents(self, rate: float, seconds: float) -> Iterator[Turn]:
        """Programs: 60 long contexts, and runs of many short steps, each with a tool's result."""
        contexts = [self.text(3000, 9000) for _ in range(60)]
        draw = self.zipf(60, 0.9)
        for at in self.poisson(rate, seconds):
            yield from self.dialogue(at, contexts[draw()], int(self.rng.integers(3, 11)), (50, 600), (20, 120), 1.0)

    def crowd(self, rate: float, seconds: float) -> Iterator[Turn]:
        """All requests are about the same document: more than one replica can answer."""
        document = self.text(6000, 6000)
        for at in self.poisson(rate, seconds):
            yield Turn(at, document + self.text(100, 500), self.text(50, 200))

    def alone(self, rate: float, seconds: float) -> Iterator[Turn]:
        """Unrelated prompts."""
        for at in self.poisson(rate, seconds):
            yield Turn(at, self.text(100, 3000), self.text(20, 200))


def trace(name: str, seed: int, seconds: float = 120.0, rate: float = 1.0) -> list[Arrival]:
    """A trace by name, in order of arrival; `rate` scales its traffic."""
    writer = Writer(seed)
    parts: dict[str, list[Callable[[], Iterator[Turn]]]] = {
        "chat": [lambda: writer.chat(7 * rate, seconds)],
        "agents": [lambda: writer.agents(1.8 * rate, seconds)],
        "crowd": [lambda: writer.crowd(16 * rate, seconds), lambda: writer.alone(6 * rate, seconds)],
        "mixed": [
            lambda: writer.chat(2.5 * rate, seconds),
            lambda: writer.agents(0.8 * rate, seconds),
            lambda: writer.alone(4 * rate, seconds),
        ],
        "alone": [lambda: writer.alone(16 * rate, seconds)],
    }
    keys = ContentKeys(BLOCK)
    turns = sorted((turn for part in parts[name] for turn in part()), key=lambda turn: turn.at)
    return [
        Arrival(turn.at, len(turn.prompt), len(turn.output), keys.of(turn.prompt + turn.output))
        for turn in turns
        if turn.at < seconds
    ]


TRACES = ("chat", "agents", "crowd", "mixed", "alone")
