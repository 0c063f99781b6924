"""Logprobs in the formats of chat completions and completions."""

from __future__ import annotations

from collections.abc import Sequence

from quire.messages.outputs import Logprob
from quire.server.protocol.chat import ChoiceLogprobs, PromptLogprob, TokenLogprob, TopLogprob
from quire.server.protocol.completions import CompletionLogprobs

FLOOR = -9999.0
"""Replaces minus infinity, which JSON cannot represent."""

MANY_DETAILS = 4096
"""Logprobs: a response, or a part of one, with more is written in a thread…"""
MANY_TOKENS = 32768
"""…and so is one with more tokens."""

Position = dict[int, Logprob]


def takes_long(tokens: int, top: int | None) -> bool:
    """Whether so many tokens, each with `top` logprobs beside its own (-1: all), or without (None), take long to
    write."""
    if top is None:
        return tokens > MANY_TOKENS
    return top < 0 or tokens * (1 + top) > MANY_DETAILS


def chat_logprobs(
    tokens: Sequence[int], positions: Sequence[Position] | None, top: int, as_ids: bool
) -> ChoiceLogprobs | None:
    """Logprobs of new tokens, with the `top` likeliest at each position."""
    if positions is None:
        return None
    content = []
    for token, position in zip(tokens, positions, strict=True):
        name = _token_text(token, position[token], as_ids)
        best = [
            TopLogprob(_token_text(other, entry, as_ids), _finite(entry), _utf8(_token_text(other, entry, as_ids)))
            for other, entry in _top(position, top)
        ]
        content.append(TokenLogprob(name, _finite(position[token]), _utf8(name), best))
    return ChoiceLogprobs(content)


def completion_logprobs(
    tokens: Sequence[int], positions: Sequence[Position | None], top: int, as_ids: bool, offset: int
) -> CompletionLogprobs:
    """The same in columns; `offset`: characters before them. A position without logprobs gets None."""
    columns = CompletionLogprobs([], [], [], [])
    for token, position in zip(tokens, positions, strict=True):
        name = f"token_id:{token}" if position is None and as_ids else ""
        if position is not None:
            name = _token_text(token, position[token], as_ids)
        columns.text_offset.append(offset)
        columns.tokens.append(name)
        columns.token_logprobs.append(None if position is None else _finite(position[token]))
        top_logprobs = None
        if position is not None:
            top_logprobs = {_token_text(other, entry, as_ids): _finite(entry) for other, entry in _top(position, top)}
            top_logprobs.setdefault(name, _finite(position[token]))
        columns.top_logprobs.append(top_logprobs)  # type: ignore[union-attr]
        offset += len(name)
    return columns


def prompt_logprobs(positions: Sequence[Position | None]) -> list[dict[int, PromptLogprob] | None]:
    """Logprobs of the prompt's tokens; the first has none."""
    return [
        None
        if position is None
        else {t: PromptLogprob(_finite(e), e.rank, e.decoded_token) for t, e in position.items()}
        for position in positions
    ]


def _top(position: Position, count: int) -> list[tuple[int, Logprob]]:
    """The `count` likeliest tokens, likeliest first; all if negative."""
    ranked = sorted(position.items(), key=lambda item: item[1].rank or 0)
    return [item for item in ranked if count < 0 or (item[1].rank or 0) <= count]


def _token_text(token: int, entry: Logprob, as_ids: bool) -> str:
    return f"token_id:{token}" if as_ids else entry.decoded_token or ""


def _finite(entry: Logprob) -> float:
    return max(entry.logprob, FLOOR)


def _utf8(text: str) -> list[int]:
    return list(text.encode("utf-8", "replace"))
