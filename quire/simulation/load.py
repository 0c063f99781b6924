"""The requests of a simulation: drawn from distributions, or read from a trace."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quire.errors import ValidationError
from quire.messages.adapter_use import AdapterUse
from quire.messages.media import IMAGE, MediaItem, Span
from quire.simulation.trace_files import TRACE_BLOCK, json_lines

VOCABULARY = 30_000
"""Token ids are drawn below this."""
TEXT_BLOCK = 16
"""Tokens of a trace's text that two lines share together, or not at all."""
CHARACTERS_PER_TOKEN = 4
"""Of such a text, about."""
PLACEHOLDER = 5
"""Token id where an image is."""


@dataclass(frozen=True)
class Turn:
    """One request of a conversation."""

    new_tokens: int
    """Prompt tokens after those of the turns before…"""
    output: int
    pause: float = 0.0
    """…which came this many seconds after the end of the turn before: a person reads, a tool runs."""
    images: tuple[tuple[str, int], ...] = ()
    """(name, tokens) of images before the turn's text. Images of the same name are the same."""

    @property
    def length(self) -> int:
        """Tokens that the turn adds, output included."""
        return self.new_tokens + self.output + sum(count for _, count in self.images)


@dataclass(frozen=True)
class Conversation:
    """Requests that follow each other; most have a single turn."""

    at: float
    """When it begins, in seconds."""
    turns: tuple[Turn, ...]
    prefix: tuple[tuple[str, int], ...] = ()
    """Parts that it begins with, (name, tokens): conversations with parts of the same names share their tokens."""
    tenant: str = ""
    priority: int = 0
    adapter: str = ""
    """Name of the LoRA adapter of its requests; empty: none."""

    @property
    def length(self) -> int:
        """Tokens of its last turn, output included."""
        return sum(count for _, count in self.prefix) + sum(turn.length for turn in self.turns)


def token_ids(name: str, count: int) -> list[int]:
    """`count` random tokens; the same name gives the same ones."""
    import numpy as np  # here, because `quire bench serve` reads traces and does without it

    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    return np.random.default_rng(seed).integers(10, VOCABULARY, count).tolist()


shared_token_ids = functools.lru_cache(maxsize=4096)(token_ids)
"""Kept, because many prompts begin with them."""


@functools.cache
def _adapter_use(name: str) -> AdapterUse:
    return AdapterUse(name, "", hashlib.blake2b(name.encode(), digest_size=32).digest())


def adapter_uses(name: str) -> list[AdapterUse]:
    """The adapters of a request that names this one; none for an empty name."""
    return [_adapter_use(name)] if name else []


@functools.lru_cache(maxsize=4096)
def _image(name: str, tokens: int) -> MediaItem:
    import numpy as np

    pixels = {"pixels": np.zeros(1, np.uint8)}  # a device that only takes time does not look at them
    return MediaItem(hashlib.blake2b(name.encode(), digest_size=32).digest(), IMAGE, tokens, pixels)


@dataclass(frozen=True)
class LoadOptions:
    """A load that is drawn. Lengths are uniform within ±spread."""

    input_len: int = 512
    output_len: int = 128
    spread: float = 0.0
    prefix_len: int = 0
    """Tokens of a shared beginning…"""
    num_prefixes: int = 1
    """…of which there are so many, each as likely as the others."""
    turns: int = 1
    pause: float = 5.0
    """Mean seconds between turns, exponentially distributed."""
    tenants: int = 1
    seed: int = 0
    adapters: int = 0
    """Different LoRA adapters; 0: none…"""
    adapter_skew: float = 1.0
    """…of which the k-th is named in proportion to 1 / k^skew (0: all equally often)."""
    images: int = 0
    """Images of each turn…"""
    image_tokens: int = 576
    """…how many tokens each has…"""
    num_images: int = 0
    """…and how many different ones there are; 0: no two are the same."""


def draw_load(options: LoadOptions, times: Sequence[float]) -> list[Conversation]:
    """A conversation for each of these arrival times."""
    import numpy as np

    chance = np.random.default_rng(options.seed)
    shares = np.arange(1, options.adapters + 1, dtype=np.float64) ** -options.adapter_skew

    def length(mean: int) -> int:
        low, high = round(mean * (1 - options.spread)), round(mean * (1 + options.spread))
        return max(1, int(chance.integers(low, high + 1)))

    def turn(number: int) -> Turn:
        pause = float(chance.exponential(options.pause)) if number else 0.0
        lengths = length(options.input_len), length(options.output_len)
        return Turn(*lengths, pause, tuple(image() for _ in range(options.images)))

    def image() -> tuple[str, int]:
        number = int(chance.integers(options.num_images)) if options.num_images else next(names)
        return f"image {number}", options.image_tokens

    names = itertools.count()
    found = []
    for at in times:
        group = int(chance.integers(options.num_prefixes))
        prefix = ((f"prefix {group}", options.prefix_len),) if options.prefix_len else ()
        tenant = f"tenant {int(chance.integers(options.tenants))}" if options.tenants > 1 else ""
        adapter = f"adapter {int(chance.choice(len(shares), p=shares / shares.sum()))}" if len(shares) else ""
        turns = tuple(turn(number) for number in range(options.turns))
        found.append(Conversation(at, turns, prefix, tenant, adapter=adapter))
    return found


def read_trace(path: str, count: int | None = None, speed: float = 1.0, unit: float = 1e-3) -> list[Conversation]:
    """A trace as `quire bench serve --trace` reads it: `timestamp` in units of `unit` seconds, `input_length`,
    `output_length`, and Mooncake's `hash_ids`, whose blocks are shared by all lines that name them; or a `prompt` or
    `messages`, whose text is shared as far as it is the same. Also `tenant`, `adapter`, and `images`: for each image
    its tokens, which `input_length` does not count, or [name, tokens] if it may come again."""
    if not speed > 0:
        raise ValidationError(f"--trace-speed must be above 0, got {speed:g}")
    found = []
    for where, line in json_lines(path):
        at, output = _number(line, "timestamp", where), int(_number(line, "output_length", where))
        prompt = line.get("messages", line.get("prompt"))
        prefix, tokens = _lengths(line, where) if prompt is None else _text_blocks(_text(prompt, where))
        if tokens < 1 or output < 1:
            raise ValidationError(f"{where}: input_length and output_length must be at least 1")
        images = _images(line.get("images") or [], where)
        tenant, adapter = str(line.get("tenant", "")), str(line.get("adapter", ""))
        found.append(
            Conversation(at * unit / speed, (Turn(tokens, output, images=images),), prefix, tenant, adapter=adapter)
        )
    found.sort(key=lambda conversation: conversation.at)
    start = found[0].at
    return [replace(each, at=each.at - start) for each in found[:count]]


def _lengths(line: dict[str, Any], where: str) -> tuple[tuple[tuple[str, int], ...], int]:
    """The shared blocks of a line, and its tokens after them."""
    tokens, ids = int(_number(line, "input_length", where)), line.get("hash_ids") or []
    if not isinstance(ids, list):
        raise ValidationError(f"{where}: hash_ids must be a list")
    shared = ids[: max(0, tokens - 1) // TRACE_BLOCK]
    return tuple((f"block {block}", TRACE_BLOCK) for block in shared), tokens - TRACE_BLOCK * len(shared)


def _text(prompt: Any, where: str) -> str:
    """The text of a prompt, or of messages."""
    if isinstance(prompt, str):
        return prompt
    texts = []
    for message in prompt if isinstance(prompt, list) else [None]:
        if not isinstance(message, dict):
            raise ValidationError(f"{where}: a prompt is a text, and messages are a list of objects")
        content = message.get("content") or ""
        parts = content if isinstance(content, list) else [{"text": content}]
        texts += [str(part["text"]) for part in parts if isinstance(part, dict) and "text" in part]
    return " ".join(texts)


def _text_blocks(text: str) -> tuple[tuple[tuple[str, int], ...], int]:
    """A text as blocks that are named by all that is in and before them, and the tokens after these; about."""
    size, digest, blocks = TEXT_BLOCK * CHARACTERS_PER_TOKEN, hashlib.blake2b(digest_size=16), []
    for start in range(0, len(text) - size, size):  # at least a character is left
        digest.update(text[start : start + size].encode())
        blocks.append((f"text {digest.hexdigest()}", TEXT_BLOCK))
    return tuple(blocks), max(1, (len(text) - size * len(blocks)) // CHARACTERS_PER_TOKEN)


def _images(value: Any, where: str) -> tuple[tuple[str, int], ...]:
    """The images of a trace's line."""
    found = []
    for index, each in enumerate(value if isinstance(value, list) else [None]):
        name, tokens = each if isinstance(each, list) and len(each) == 2 else (f"{where}, {index}", each)
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
            raise ValidationError(f"{where}: images must be a list of tokens, or of [name, tokens]; got {value!r}")
        found.append((str(name), tokens))
    return tuple(found)


def _number(line: dict[str, Any], name: str, where: str) -> float:
    value = line.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e15:
        raise ValidationError(f"{where}: {name} must be a number from 0, got {value!r}")
    return float(value)


@dataclass
class OpenConversation:
    """A conversation under way: the tokens so far, and which turn comes next."""

    source: Conversation
    number: int
    seed: int
    tokens: list[int] = field(default_factory=list)
    media: list[MediaItem] = field(default_factory=list)
    """Images so far…"""
    spans: list[Span] = field(default_factory=list)
    """…and where they are."""
    turn: int = 0

    def prompt(self) -> list[int]:
        """The prompt of the next turn."""
        if not self.turn:
            self.tokens = [
                token for name, count in self.source.prefix for token in shared_token_ids(f"{self.seed}/{name}", count)
            ]
        new = self.source.turns[self.turn].new_tokens
        for name, count in self.source.turns[self.turn].images:
            self.spans.append(Span(len(self.tokens), count, len(self.media)))
            self.media.append(_image(name, count))
            self.tokens += [PLACEHOLDER] * count
        self.tokens += token_ids(f"{self.seed}/{self.number}/{self.turn}", new)
        return list(self.tokens)

    def end_turn(self, output: Sequence[int]) -> float | None:
        """The turn has ended with this output; seconds until the next one, or None."""
        self.tokens += output
        self.turn += 1
        return self.source.turns[self.turn].pause if self.turn < len(self.source.turns) else None
