"""Separates a model's reasoning from its answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from quire.messages.structured import StructuredOutputsParams
from quire.output.parsers.deltas import Content, Reasoning
from quire.output.parsers.incremental import SPACE_RUN, SPACES, IncrementalParser, Reads
from quire.registry import resolve

_HERE = "quire.output.parsers.reasoning."
_TAGS = _HERE + "ThinkSplit"
REASONING_PARSERS = {
    "cohere_command3": _HERE + "CohereThinkSplit",
    "cohere_command4": _HERE + "CohereThinkSplit",
    "deepseek_r1": _TAGS,
    "deepseek_v3": _TAGS,
    "deepseek_v4": _TAGS,
    "ernie45": _HERE + "ErnieThinkSplit",
    "gemma4": _HERE + "Gemma4ThinkSplit",
    "glm45": _HERE + "GlmThinkSplit",
    "glm47": _HERE + "GlmThinkSplit",
    "granite": _HERE + "GraniteThinkSplit",
    "holo2": _TAGS,
    "hunyuan_a13b": _HERE + "HunyuanThinkSplit",
    "kimi_k2": _HERE + "KimiThinkSplit",
    "mimo": _HERE + "Qwen3ThinkSplit",
    "minimax_m2": _TAGS,
    "minimax_m2_append_think": _HERE + "KeptThinkSplit",
    "mistral": _HERE + "MistralThinkSplit",
    "nemotron_v3": _TAGS,
    "olmo3": _TAGS,
    "openai_gptoss": "quire.output.parsers.harmony.HarmonySplit",
    "poolside_v1": _TAGS,
    "qwen3": _HERE + "Qwen3ThinkSplit",
    "seed_oss": _HERE + "SeedThinkSplit",
    "step3": _TAGS,
    "step3p5": _TAGS,
    "think": _TAGS,
}
SWITCHES = ("enable_thinking", "thinking")
"""Variables of chat templates that switch thinking on or off."""


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
        self._spaces: list[str] = []
        """White space at the end of the reasoning so far."""

    other_openings: ClassVar[tuple[str, ...]] = ()
    other_closings: ClassVar[tuple[str, ...]] = ()
    """Other words for the same; they begin with the same character."""
    lead: ClassVar[str] = ""
    """White space that the model writes before its opening tag."""
    thinks_unasked: ClassVar[bool] = True
    """Whether the model may think where the template's switches are not set."""
    call: ClassVar[str] = ""
    """What opens a tool call in the model's notation, and ends its reasoning without a closing tag."""

    @classmethod
    def opens(cls, prompt: str) -> bool:
        """Whether an answer to this prompt (rendered by the chat template) starts inside the reasoning."""
        return prompt.rstrip(SPACES).endswith(cls.opening)

    @classmethod
    def after_thinking(
        cls, form: StructuredOutputsParams, prompt: str, switches: Mapping[str, Any]
    ) -> StructuredOutputsParams:
        """The form of an answer to this prompt: `form`, after any reasoning. `switches`: the chat template's
        variables."""
        after = [cls.closing, *cls.other_closings]
        if cls.opens(prompt):
            return msgspec.structs.replace(form, after=after)
        given = [switches[name] for name in SWITCHES if switches.get(name) is not None]
        if prompt.rstrip(SPACES).endswith(tuple(after)) or not all(given) or not (given or cls.thinks_unasked):
            return form
        openings = dict.fromkeys(lead + each for each in (cls.opening, *cls.other_openings) for lead in ("", cls.lead))
        return msgspec.structs.replace(form, after=after, opening=list(openings))

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
        yield from self._answer()

    def _answer(self) -> Reads[None]:
        """What follows the reasoning."""
        while (yield from self._peek()):
            self._out.append(Content(self._take(len(self._text) - self._at)))

    def _reason(self) -> Reads[None]:
        while (yield from self._peek()):
            if (yield from self._take_any(self.closing, *self.other_closings)):
                return
            if self.call and (yield from self._is_next(self.call)):
                if (yield from self._ends_with_call()):
                    return
                continue
            # No closing tag here: continue at the next place that may begin one, or a call.
            self._think(self._take_until(self.closing[0]))

    def _think(self, text: str) -> None:
        """Emit reasoning, but the white space at its end only before more of it."""
        body = text.rstrip(SPACES)
        if body:
            self._out.append(Reasoning("".join([*self._spaces, body])))
            self._spaces.clear()
        if len(body) < len(text):
            self._spaces.append(text[len(body) :])

    def _take_until(self, character: str) -> str:
        """One character at least, and those after it up to `character`, as far as they have arrived."""
        end = self._text.find(character, self._at + 1)
        return self._take((end if end >= 0 else len(self._text)) - self._at)

    def _ends_with_call(self) -> Reads[bool]:
        """A call comes next, which begins with the same character as a closing tag: whether it ends the reasoning. If
        not, it is taken."""
        return True
        yield


class KeptThinkSplit(ThinkSplit):
    """The reasoning stays in the content, with its tags, also the one that the prompt opened."""

    def _run(self) -> Reads[None]:
        if self._opened and (yield from self._peek()):
            self._out.append(Content(self.opening))
        yield from self._answer()


class KimiThinkSplit(ThinkSplit):
    """Kimi K2: the mark before its calls is a special token, which can only mean calls."""

    call = "<|tool_calls_section_begin|>"


class GlmThinkSplit(ThinkSplit):
    """GLM-4.5 begins a new line first."""

    lead = "\n"


class Qwen3ThinkSplit(ThinkSplit):
    """Qwen 3 and later: some forget to close the tag before a call.

    A thought may also quote a call. So where one begins in a thought it is held back: if the answer ends with it, or
    with several, and there was no closing tag, it is a call; anything else was part of the thought.
    """

    call = "<tool_call>"
    _call_end = "</tool_call>"
    _bodies = ("{", "[", "<function")

    def _ends_with_call(self) -> Reads[bool]:
        held: list[str] = []
        is_call = yield from self._hold_calls(held)
        if is_call:
            self._out.append(Content("".join(held)))
        else:
            self._think("".join(held))
        return is_call

    def _hold_calls(self, held: list[str]) -> Reads[bool]:
        """Read calls; whether there is nothing else up to the end of the answer."""
        while (yield from self._is_next(self.call)):
            held += [self._take(len(self.call)), (yield from self._take_run(SPACE_RUN))]
            if not (yield from self._is_any_next(*self._bodies)):
                return False
            while not (yield from self._is_next(self._call_end)):
                if (yield from self._is_next(self.closing)):
                    return False
                if not (yield from self._peek()):
                    return True  # cut off within a call
                held.append(self._take_until("<"))
            held += [self._take(len(self._call_end)), (yield from self._take_run(SPACE_RUN))]
        return not (yield from self._peek())

    def _is_any_next(self, *words: str) -> Reads[bool]:
        for word in words:
            if (yield from self._is_next(word)):
                return True
        return False


class HunyuanThinkSplit(ThinkSplit):
    """Hunyuan-A13B writes its answer between tags, too, which are dropped."""

    answer_tags: ClassVar[tuple[str, str]] = ("<answer>", "</answer>")

    def _answer(self) -> Reads[None]:
        if not (yield from self._take_word(self.answer_tags[0])):
            yield from super()._answer()
            return
        yield from self._skip_spaces()
        spaces: list[str] = []
        while (yield from self._peek()):
            if (yield from self._take_word(self.answer_tags[1])):
                yield from self._skip_spaces()
                yield from super()._answer()
                return
            text = self._take_until("<")
            body = text.rstrip(SPACES)
            if body:
                self._out.append(Content("".join([*spaces, body])))
                spaces.clear()
            if len(body) < len(text):
                spaces.append(text[len(body) :])


class ErnieThinkSplit(HunyuanThinkSplit):
    """ERNIE 4.5: the same with another word."""

    answer_tags = ("<response>", "</response>")


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
    thinks_unasked = False  # many an answer begins with "Here is"
    other_openings = ("Here's my thought process:",)
    other_closings = ("Here's my response:",)


def guess_reasoning_parser(template: str | None) -> str | None:
    """The parser without which answers to a chat template's prompts cannot be read; None: they can."""
    return "openai_gptoss" if template is not None and "<|channel|>" in template and "<|message|>" in template else None


def make_reasoning_split(name: str, prompt: str = "") -> ThinkSplit:
    """A fresh split for one answer to `prompt`; `name` is one of `REASONING_PARSERS` or a dotted path."""
    split: type[ThinkSplit] = resolve("reasoning parser", name, REASONING_PARSERS)
    return split(split.opens(prompt))
