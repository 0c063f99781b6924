"""Datasets of requests: random text, shared prefixes, files of prompts, traces; and arrival times."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.cli.bench.images import with_files
from quire.errors import ValidationError
from quire.simulation.trace_files import TRACE_BLOCK, json_lines

Message = dict[str, Any]


@dataclass
class BenchRequest:
    """A prompt and an output length, before it becomes an HTTP request."""

    prompt: str | list[Message]
    output_len: int
    input_len: int = 0
    """Approximate tokens of the prompt; the report has the server's count."""
    at: float | None = None
    """Arrival time in a trace, seconds after its start."""


@dataclass(frozen=True)
class DatasetOptions:
    """What a dataset is made from: number of requests, lengths, seed, file."""

    count: int | None
    """Number of requests; None: as many as the dataset has."""
    input_len: int
    output_len: int | None
    """None: the dataset's own lengths, if it has any."""
    seed: int
    spread: float = 0.0
    """Lengths are uniform within ±spread of the given ones."""
    unit: str = "tokens"
    path: str | None = None
    prefix_len: int = 0
    num_prefixes: int = 1
    time_unit: str = "ms"
    speed: float = 1.0

    @property
    def total(self) -> int:
        """The number of requests, with a default."""
        return DEFAULT_COUNT if self.count is None else self.count

    @property
    def output(self) -> int:
        """The output length, with a default."""
        return DEFAULT_OUTPUT if self.output_len is None else self.output_len


DEFAULT_COUNT = 100
DEFAULT_OUTPUT = 128
SHAREGPT_MIN_TOKENS, SHAREGPT_MAX_TOKENS = 4, 1024
"""Conversations outside this range are skipped: too short to time, or too long for a small context."""


def random_text(options: DatasetOptions) -> list[BenchRequest]:
    """Random words, or random characters with `unit` chars; all share the first `prefix_len`."""
    rng = random.Random(options.seed)
    write = random_words if options.unit == "tokens" else random_characters
    opening = write(options.prefix_len, rng) + " " if options.prefix_len else ""
    requests = []
    for _ in range(options.total):
        length, output = (
            _draw_length(options.input_len, options.spread, rng),
            _draw_length(options.output, options.spread, rng),
        )
        text = opening + write(length, rng)
        tokens = options.prefix_len + length if options.unit == "tokens" else estimate_tokens(text)
        requests.append(BenchRequest(text, output, tokens))
    return requests


def prefix_repetition(options: DatasetOptions) -> list[BenchRequest]:
    """`num_prefixes` prefixes of `prefix_len` tokens, each with many suffixes of `input_len`, in random order."""
    rng = random.Random(options.seed)
    openings = [random_words(options.prefix_len, rng) for _ in range(options.num_prefixes)]
    requests = [
        BenchRequest(
            f"{opening} {random_words(options.input_len, rng)}", options.output, options.prefix_len + options.input_len
        )
        for opening in itertools.islice(itertools.cycle(openings), options.total)
    ]
    rng.shuffle(requests)
    return requests


def prompts_file(options: DatasetOptions) -> list[BenchRequest]:
    """A JSONL file: each line has `prompt` (text) or `messages` (a conversation), and optionally `output_tokens`, and
    beside a prompt `images` (files, relative to this one)."""
    requests = []
    for where, line in json_lines(str(_path(options))):
        prompt = line.get("messages", line.get("prompt"))
        if not isinstance(prompt, (str, list)) or not prompt:
            raise ValidationError(f'{where}: needs "prompt", a string, or "messages", a list')
        said = line.get("output_tokens", line.get("max_tokens"))
        output = (
            options.output
            if options.output_len is not None or said is None
            else _positive_integer(said, where, "output_tokens")
        )
        if (files := line.get("images")) is not None:
            prompt = with_files(prompt, files, Path(str(options.path)).parent, where)
        requests.append(BenchRequest(prompt, output, estimate_tokens(_text(prompt))))
    return _take_count(requests, options)


def sharegpt(options: DatasetOptions) -> list[BenchRequest]:
    """First questions of ShareGPT conversations; output lengths are about those of the answers."""
    path = _path(options)
    try:
        conversations = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValidationError(f"{path} is not JSON: {error}") from error
    if not isinstance(conversations, list):
        raise ValidationError(f"{path} is not a list of conversations, as ShareGPT files are")
    requests = []
    for conversation in conversations:
        turns = conversation.get("conversations", []) if isinstance(conversation, dict) else []
        if len(turns) < 2:
            continue
        question, answer = (str(turn.get("value", "")) for turn in turns[:2])
        request = BenchRequest(question, options.output_len or estimate_tokens(answer), estimate_tokens(question))
        is_usable = SHAREGPT_MIN_TOKENS <= request.input_len <= SHAREGPT_MAX_TOKENS
        if is_usable and request.output_len >= SHAREGPT_MIN_TOKENS:
            request.output_len = min(request.output_len, SHAREGPT_MAX_TOKENS)
            requests.append(request)
    if not requests:
        raise ValidationError(
            f"{path} has no conversation with a question of {SHAREGPT_MIN_TOKENS} to {SHAREGPT_MAX_TOKENS} tokens"
        )
    random.Random(options.seed).shuffle(requests)
    return _take_count(requests, options)


def read_trace(options: DatasetOptions) -> list[BenchRequest]:
    """A trace of real traffic: `timestamp`, `input_length` and `output_length` on each line.

    Lines with the same leading `hash_ids` share a prefix: each id is one block of text. A line may also have its own
    `prompt` or `messages`.
    """
    seconds = {"ms": 1e-3, "s": 1.0}[options.time_unit] / options.speed
    rng = random.Random(options.seed)
    requests = []
    for where, line in json_lines(str(_path(options))):
        output = options.output_len or _positive_integer(line.get("output_length"), where, "output_length")
        at = line.get("timestamp")
        if isinstance(at, bool) or not isinstance(at, (int, float)):
            raise ValidationError(f"{where}: timestamp must be a number, got {at!r}")
        prompt = line.get("messages", line.get("prompt"))
        if prompt is None:
            length = _positive_integer(line.get("input_length"), where, "input_length")
            prompt = _blocks(line.get("hash_ids") or [], length, rng, options.seed)
        else:
            length = estimate_tokens(_text(prompt))
        requests.append(BenchRequest(prompt, output, length, at * seconds))
    requests.sort(key=lambda request: request.at or 0.0)
    start = requests[0].at or 0.0
    for request in requests:
        request.at = (request.at or 0.0) - start
    return requests[: options.count]


DATASETS: dict[str, Callable[[DatasetOptions], list[BenchRequest]]] = {
    "random": random_text,
    "prefix_repetition": prefix_repetition,
    "custom": prompts_file,
    "sharegpt": sharegpt,
    "trace": read_trace,
}


def _blocks(ids: list[Any], tokens: int, rng: random.Random, seed: int) -> str:
    """Text of `tokens` tokens: one block per id, the rest random."""
    words = [random_words(TRACE_BLOCK, random.Random(f"{seed}/{block}")) for block in ids[: tokens // TRACE_BLOCK]]
    if left := tokens - TRACE_BLOCK * len(words):
        words.append(random_words(left, rng))
    return " ".join(words)


def _draw_length(length: int, spread: float, rng: random.Random) -> int:
    return max(1, rng.randint(round(length * (1 - spread)), round(length * (1 + spread)))) if spread else length


def _text(prompt: str | list[Message]) -> str:
    if isinstance(prompt, str):
        return prompt
    texts: list[str] = []
    for message in prompt:
        content = message.get("content", "")
        parts = content if isinstance(content, list) else [{"text": content}]
        texts += [str(part["text"]) for part in parts if isinstance(part, dict) and "text" in part]
    return " ".join(texts)


def _take_count(requests: list[BenchRequest], options: DatasetOptions) -> list[BenchRequest]:
    """`count` requests; a short file is repeated."""
    return requests if options.count is None else list(itertools.islice(itertools.cycle(requests), options.count))


def _path(options: DatasetOptions) -> Path:
    if options.path is None:
        raise ValidationError("this dataset needs a file: give it with --dataset-path")
    path = Path(options.path)
    if not path.is_file():
        raise ValidationError(f"there is no file {options.path!r}")
    return path


def _positive_integer(value: Any, where: str, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValidationError(f"{where}: {name} must be an integer of at least 1, got {value!r}")
    return value


def arrival_times(count: int, rate: float, burstiness: float, burst: int, seed: int) -> list[float]:
    """`count` arrival times at `rate` requests per second.

    Gaps follow a gamma distribution of shape `burstiness`: 1 is a Poisson process, less is burstier, more is
    steadier. With `burst` above 1, that many are sent together, at the same mean rate. With an infinite rate all
    are sent at once.
    """
    if not rate > 0:
        raise ValidationError(f"--request-rate must be above 0 (inf: all at once), got {rate:g}")
    if not (burstiness > 0 and math.isfinite(burstiness)):
        raise ValidationError(f"--burstiness must be above 0 (1 is a Poisson process), got {burstiness:g}")
    if math.isinf(rate):
        return [0.0] * count
    rng = random.Random(seed)
    times: list[float] = []
    now = 0.0
    while len(times) < count:  # the first burst is sent at once
        times += [now] * min(burst, count - len(times))
        now += rng.gammavariate(burstiness, burst / (rate * burstiness))
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
"""Common English nouns: in every recent vocabulary each is one token, with its leading space."""

CHARACTERS_PER_TOKEN = 4
"""Of English prose, to estimate a text's tokens without a tokenizer."""


def random_words(tokens: int, rng: random.Random) -> str:
    """Text of about `tokens` tokens. No two texts share a prefix, so a prefix cache does not help."""
    return " ".join(rng.choices(WORDS, k=tokens))


def random_characters(characters: int, rng: random.Random) -> str:
    """Text of exactly `characters` characters."""
    return random_words(characters // 3 + 1, rng)[:characters]


def estimate_tokens(text: str) -> int:
    """Approximate tokens of a text; at least 1."""
    return max(1, len(text) // CHARACTERS_PER_TOKEN)
