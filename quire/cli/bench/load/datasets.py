"""What requests ask: random text, prompts from files, prompts that share beginnings, and traces of real traffic."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import ValidationError

Message = dict[str, Any]


@dataclass
class BenchRequest:
    """One request before it has a form."""

    prompt: str | list[Message]
    output_len: int
    input_len: int = 0
    """About how many tokens the prompt has; the server's own count is what is reported."""
    at: float | None = None
    """Seconds after the start, in a trace."""


@dataclass(frozen=True)
class DatasetOptions:
    """The lengths asked for, and what they are drawn with."""

    count: int | None
    """How many requests; None is the dataset's own number."""
    input_len: int
    output_len: int | None
    """None is what the dataset says, where it says anything."""
    seed: int
    spread: float = 0.0
    """Lengths are drawn evenly from ±spread around those given."""
    unit: str = "tokens"
    path: str | None = None
    prefix_len: int = 0
    num_prefixes: int = 1
    time_unit: str = "ms"
    speed: float = 1.0

    @property
    def total(self) -> int:
        """The number of requests, where nothing else tells it."""
        return DEFAULT_COUNT if self.count is None else self.count

    @property
    def output(self) -> int:
        """The output's length, where nothing else tells it."""
        return DEFAULT_OUTPUT if self.output_len is None else self.output_len


DEFAULT_COUNT = 100
DEFAULT_OUTPUT = 128
TRACE_BLOCK = 512
"""Tokens for each of a trace's `hash_ids`, as in the traces Mooncake published."""
SHAREGPT_MIN_TOKENS, SHAREGPT_MAX_TOKENS = 4, 1024
"""Conversations outside of these, in tokens, are left out: too short to time, or too long for a small context."""


def random_text(shape: DatasetOptions) -> list[BenchRequest]:
    """Random words, or with `unit` chars random characters; the first `prefix_len` are the same for all."""
    draw = random.Random(shape.seed)
    write = random_words if shape.unit == "tokens" else random_characters
    opening = write(shape.prefix_len, draw) + " " if shape.prefix_len else ""
    asks = []
    for _ in range(shape.total):
        length, output = (
            _draw_length(shape.input_len, shape.spread, draw),
            _draw_length(shape.output, shape.spread, draw),
        )
        text = opening + write(length, draw)
        tokens = shape.prefix_len + length if shape.unit == "tokens" else estimate_tokens(text)
        asks.append(BenchRequest(text, output, tokens))
    return asks


def prefix_repetition(shape: DatasetOptions) -> list[BenchRequest]:
    """`num_prefixes` beginnings of `prefix_len` tokens, each with many ends of `input_len`, in random order."""
    draw = random.Random(shape.seed)
    openings = [random_words(shape.prefix_len, draw) for _ in range(shape.num_prefixes)]
    asks = [
        BenchRequest(
            f"{opening} {random_words(shape.input_len, draw)}", shape.output, shape.prefix_len + shape.input_len
        )
        for opening in itertools.islice(itertools.cycle(openings), shape.total)
    ]
    draw.shuffle(asks)
    return asks


def prompts_file(shape: DatasetOptions) -> list[BenchRequest]:
    """A line of JSON each: `prompt` (text) or `messages` (a conversation), and perhaps `output_tokens`."""
    asks = []
    for where, line in _lines(shape):
        prompt = line.get("messages", line.get("prompt"))
        if not isinstance(prompt, (str, list)) or not prompt:
            raise ValidationError(f'{where}: needs a "prompt" that is text, or "messages" that are a list')
        said = line.get("output_tokens", line.get("max_tokens"))
        output = (
            shape.output
            if shape.output_len is not None or said is None
            else _positive_integer(said, where, "output_tokens")
        )
        asks.append(BenchRequest(prompt, output, estimate_tokens(_text(prompt))))
    return _take_count(asks, shape)


def sharegpt(shape: DatasetOptions) -> list[BenchRequest]:
    """First questions of ShareGPT's conversations; outputs are about as long as the answers were."""
    path = _path(shape)
    try:
        conversations = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValidationError(f"{path} is not JSON: {error}") from error
    if not isinstance(conversations, list):
        raise ValidationError(f"{path} is not a list of conversations, as the files of ShareGPT are")
    asks = []
    for conversation in conversations:
        turns = conversation.get("conversations", []) if isinstance(conversation, dict) else []
        if len(turns) < 2:
            continue
        question, answer = (str(turn.get("value", "")) for turn in turns[:2])
        ask = BenchRequest(question, shape.output_len or estimate_tokens(answer), estimate_tokens(question))
        if SHAREGPT_MIN_TOKENS <= ask.input_len <= SHAREGPT_MAX_TOKENS and ask.output_len >= SHAREGPT_MIN_TOKENS:
            ask.output_len = min(ask.output_len, SHAREGPT_MAX_TOKENS)
            asks.append(ask)
    if not asks:
        raise ValidationError(
            f"{path} holds no conversation with a question of {SHAREGPT_MIN_TOKENS} to {SHAREGPT_MAX_TOKENS} tokens"
        )
    random.Random(shape.seed).shuffle(asks)
    return _take_count(asks, shape)


def read_trace(shape: DatasetOptions) -> list[BenchRequest]:
    """Traffic as it was: `timestamp`, `input_length` and `output_length` on each line.

    Lines with `hash_ids` share the beginnings they shared then: an id is one block of text. A line may also bring its
    own `prompt` or `messages`.
    """
    seconds = {"ms": 1e-3, "s": 1.0}[shape.time_unit] / shape.speed
    draw = random.Random(shape.seed)
    asks = []
    for where, line in _lines(shape):
        output = shape.output_len or _positive_integer(line.get("output_length"), where, "output_length")
        at = line.get("timestamp")
        if isinstance(at, bool) or not isinstance(at, (int, float)):
            raise ValidationError(f"{where}: timestamp must be a number, got {at!r}")
        prompt = line.get("messages", line.get("prompt"))
        if prompt is None:
            length = _positive_integer(line.get("input_length"), where, "input_length")
            prompt = _blocks(line.get("hash_ids") or [], length, draw, shape.seed)
        else:
            length = estimate_tokens(_text(prompt))
        asks.append(BenchRequest(prompt, output, length, at * seconds))
    asks.sort(key=lambda ask: ask.at or 0.0)
    start = asks[0].at or 0.0
    for ask in asks:
        ask.at = (ask.at or 0.0) - start
    return asks[: shape.count]


DATASETS: dict[str, Callable[[DatasetOptions], list[BenchRequest]]] = {
    "random": random_text,
    "prefix_repetition": prefix_repetition,
    "custom": prompts_file,
    "sharegpt": sharegpt,
    "trace": read_trace,
}


def _blocks(ids: list[Any], tokens: int, draw: random.Random, seed: int) -> str:
    """Text of `tokens` tokens; block after block is the text of its id, what is left is random."""
    words = [random_words(TRACE_BLOCK, random.Random(f"{seed}/{block}")) for block in ids[: tokens // TRACE_BLOCK]]
    if left := tokens - TRACE_BLOCK * len(words):
        words.append(random_words(left, draw))
    return " ".join(words)


def _draw_length(length: int, spread: float, draw: random.Random) -> int:
    return max(1, draw.randint(round(length * (1 - spread)), round(length * (1 + spread)))) if spread else length


def _text(prompt: str | list[Message]) -> str:
    return prompt if isinstance(prompt, str) else " ".join(str(message.get("content", "")) for message in prompt)


def _take_count(asks: list[BenchRequest], shape: DatasetOptions) -> list[BenchRequest]:
    """As many as were asked for; a short file is read again from its beginning."""
    return asks if shape.count is None else list(itertools.islice(itertools.cycle(asks), shape.count))


def _path(shape: DatasetOptions) -> Path:
    if shape.path is None:
        raise ValidationError("this dataset is a file: name it with --dataset-path")
    path = Path(shape.path)
    if not path.is_file():
        raise ValidationError(f"there is no file {shape.path!r}")
    return path


def _lines(shape: DatasetOptions) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a JSONL file, each with a name for error messages."""
    path = _path(shape)
    is_empty = True
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                line = json.loads(text)
            except ValueError as error:
                raise ValidationError(f"{path}, line {number}: not JSON: {error}") from error
            if not isinstance(line, dict):
                raise ValidationError(f"{path}, line {number}: not a JSON object")
            is_empty = False
            yield f"{path}, line {number}", line
    if is_empty:
        raise ValidationError(f"{path} is empty")


def _positive_integer(value: Any, where: str, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValidationError(f"{where}: {name} must be an integer of at least 1, got {value!r}")
    return value


def arrival_times(count: int, rate: float, burstiness: float, burst: int, seed: int) -> list[float]:
    """`count` times at `rate` requests a second.

    Gaps follow a gamma distribution of shape `burstiness`: 1 is a Poisson process, less comes in clumps, more is
    steadier. With `burst` above 1 so many leave together, and the gaps between bursts keep the rate. An infinite rate
    is everything at once.
    """
    if not rate > 0:
        raise ValidationError(f"--request-rate must be above 0 (inf is everything at once), got {rate:g}")
    if not (burstiness > 0 and math.isfinite(burstiness)):
        raise ValidationError(f"--burstiness must be above 0 (1 is a Poisson process), got {burstiness:g}")
    if math.isinf(rate):
        return [0.0] * count
    draw = random.Random(seed)
    times: list[float] = []
    now = 0.0
    while len(times) < count:  # the first burst leaves at once: nothing is learnt by waiting for it
        times += [now] * min(burst, count - len(times))
        now += draw.gammavariate(burstiness, burst / (rate * burstiness))
    return times


_NOUNS = """
action activity age air area arm art attention author baby back bank bed behavior blood board body book boy
brother building business call campaign car case center chance change child choice church city class college
community company computer condition control cost country couple course court culture data day death decision
development difference director doctor door drug economy education effect effort end energy event experience eye
face fact family father field fight figure film fire floor foot force form friend future game girl goal
government ground group guy hair hand head health heart history home hospital hour house husband idea image
industry information interest issue job kind land law leader letter level life light line look lot love man
market material matter member mind minute moment money month morning mother movie music name nation need news
"""
WORDS = _NOUNS.split()
"""English nouns so common that every vocabulary of the last years has each as one token, with the space before it."""

CHARACTERS_PER_TOKEN = 4
"""Of English prose, where there is no better way to tell a text's length in tokens."""


def random_words(tokens: int, draw: random.Random) -> str:
    """Text of about `tokens` tokens. No two begin alike, so that no prefix cache helps."""
    return " ".join(draw.choices(WORDS, k=tokens))


def random_characters(characters: int, draw: random.Random) -> str:
    """Text of exactly `characters` characters."""
    return random_words(characters // 3 + 1, draw)[:characters]


def estimate_tokens(text: str) -> int:
    """How many tokens a text has, roughly; at least 1."""
    return max(1, len(text) // CHARACTERS_PER_TOKEN)
