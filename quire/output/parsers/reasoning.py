"""Separates a model's reasoning from its answer."""

from __future__ import annotations

from typing import ClassVar

from quire.output.parsers.deltas import Content, Reasoning
from quire.output.parsers.incremental import SPACE_RUN, SPACES, IncrementalParser, Reads
from quire.registry import resolve

_TAGS = "quire.output.parsers.reasoning.ThinkSplit"
REASONING_PARSERS = {
    "cohere_command3": "quire.output.parsers.reasoning.CohereThinkSplit",
    "deepseek_r1": _TAGS,
    "deepseek_v3": _TAGS,
    "gemma4": "quire.output.parsers.reasoning.Gemma4ThinkSplit",
    "glm45": _TAGS,
    "glm47": _TAGS,
    "granite": "quire.output.parsers.reasoning.GraniteThinkSplit",
    "kimi_k2": _TAGS,
    "minimax_m2": _TAGS,
    "mistral": "quire.output.parsers.reasoning.MistralThinkSplit",
    "nemotron_v3": _TAGS,
    "olmo3": _TAGS,
    "openai_gptoss": "quire.output.parsers.harmony.HarmonySplit",
    "qwen3": _TAGS,
    "seed_oss": "quire.output.parsers.reasoning.SeedThinkSplit",
    "think": _TAGS,
}


class ThinkSplit(IncrementalParser):
    """`<think>…</think>` at the start of an answer is reasoning, the rest content.

    `opened`: the prompt already opened the tag (see `opens`), so that the answer starts inside it; a second opening tag
    is accepted. Text without a closing tag is all reasoning: it was cut off before the answer. White space around the
    tags is dropped.
    """

    opening: ClassVar[str] = "<think>"
    closing: ClassVar[str] = "</think>"
    needs_special_tokens: ClassVar[bool] = False

    def __init__(self, opened: bool = False) -> None:
        super().__init__()
        self._opened = opened

    @classmethod
    def opens(cls, prompt: str) -> bool:
        """Whether an answer to this prompt (rendered by the chat template) starts inside the reasoning."""
        return prompt.rstrip(SPACES).endswith(cls.opening)

    other_openings: ClassVar[tuple[str, ...]] = ()
    other_closings: ClassVar[tuple[str, ...]] = ()
    """Other words for the same; they begin with the same character."""

    def _take_any(self, *words: str) -> Reads[bool]:
        for word in words:
            if (yield from self._take_word(word)):
                return True
        return False

    def _run(self) -> Reads[None]:
        spaces = yield from self._take_run(SPACE_RUN)
        if (yield from self._take_any(self.opening, *self.other_openings)) or self._opened:
            yield from self._skip_spaces()
            yield from self._reason()
            yield from self._skip_spaces()
        elif spaces:
            self._out.append(Content(spaces))
        while (yield from self._peek()):
            self._out.append(Content(self._take(len(self._text) - self._at)))

    def _reason(self) -> Reads[None]:
        spaces: list[str] = []
        while (yield from self._peek()):
            if (yield from self._take_any(self.closing, *self.other_closings)):
                return
            # No closing tag here: continue at the next place that may begin one.
            end = self._text.find(self.closing[0], self._at + 1)
            text = self._take((end if end >= 0 else len(self._text)) - self._at)
            body = text.rstrip(SPACES)
            if body:
                self._out.append(Reasoning("".join([*spaces, body])))
                spaces.clear()
            if len(body) < len(text):
                spaces.append(text[len(body) :])


class MistralThinkSplit(ThinkSplit):
    """Magistral's marks, which are special tokens."""

    opening = "[THINK]"
    closing = "[/THINK]"
    needs_special_tokens = True


class SeedThinkSplit(ThinkSplit):
    """Seed-OSS."""

    opening = "<seed:think>"
    closing = "</seed:think>"


class Gemma4ThinkSplit(ThinkSplit):
    """Gemma 4: a channel named `thought`; its marks are special tokens."""

    opening = "<|channel>thought"
    closing = "<channel|>"
    needs_special_tokens = True


class CohereThinkSplit(ThinkSplit):
    """Command A Reasoning. The marks around the answer are left to the tool parser."""

    opening = "<|START_THINKING|>"
    closing = "<|END_THINKING|>"
    needs_special_tokens = True


class GraniteThinkSplit(ThinkSplit):
    """Granite 3.2 writes words instead of tags, with or without an apostrophe."""

    opening = "Here is my thought process:"
    closing = "Here is my response:"
    other_openings = ("Here's my thought process:",)
    other_closings = ("Here's my response:",)


def guess_reasoning_parser(template: str | None) -> str | None:
    """The parser without which answers to a chat template's prompts cannot be read; None: they can."""
    return "openai_gptoss" if template is not None and "<|channel|>" in template and "<|message|>" in template else None


def make_reasoning_split(name: str, prompt: str = "") -> ThinkSplit:
    """A fresh split for one answer to `prompt`; `name` is one of `REASONING_PARSERS` or a dotted path."""
    split: type[ThinkSplit] = resolve("reasoning parser", name, REASONING_PARSERS)
    return split(split.opens(prompt))
