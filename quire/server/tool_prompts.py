"""Puts tools into the prompt: through the chat template, or as a preamble if the template ignores them."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from quire.errors import ValidationError
from quire.output.parsers.toolcalls import guess_parser, with_preamble

if TYPE_CHECKING:
    from quire.api.chat import ChatRenderer

DEFAULT_PARSER = "hermes"
"""The tool call format for models without one of their own: its delimiters are not mistaken for text."""
MAX_CACHED_TEMPLATES = 32
_TEST_MESSAGES = [{"role": "user", "content": "What is the weather like?"}]
_TEST_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


class ToolPrompts:
    """Detects which chat templates render tools, and renders prompts. Thread-safe."""

    def __init__(self, renderer: ChatRenderer, parser: str | None = None) -> None:
        """`parser`: the configured tool call parser; None: chosen by the template."""
        self._renderer = renderer
        self._parser = parser
        self._ignoring: OrderedDict[str, bool] = OrderedDict()

    def parser(self, chat_template: str | None = None) -> str:
        """The tool call parser for the server's template, or the request's."""
        if self._parser is not None:
            return self._parser
        if self.ignores_tools(chat_template):
            return DEFAULT_PARSER
        return guess_parser(self._source(chat_template))

    def ignores_tools(self, chat_template: str | None = None) -> bool:
        """Whether the template renders the same prompt with tools as without them."""
        source = self._source(chat_template)
        ignores = self._ignoring.get(source)
        if ignores is None:
            ignores = self._ignoring[source] = self._renders_same(chat_template)
            while len(self._ignoring) > MAX_CACHED_TEMPLATES:
                self._ignoring.popitem(last=False)
        return ignores

    def render(self, messages: list[dict[str, Any]], preamble: str | None, **arguments: Any) -> str:
        """The prompt's text, with the preamble in the system message, or in the user's if the template has none."""
        render = self._renderer.render_text
        if preamble is None:
            return render(messages, **arguments)
        try:
            return render(with_preamble(messages, preamble, "system"), **arguments)
        except ValidationError:  # the template does not support system messages
            return render(with_preamble(messages, preamble, "user"), **arguments)

    def _source(self, chat_template: str | None) -> str:
        return chat_template if chat_template is not None else self._renderer.template([_TEST_TOOL])

    def _renders_same(self, chat_template: str | None) -> bool:
        try:
            without = self._renderer.render_text(_TEST_MESSAGES, chat_template=chat_template)
            return (
                self._renderer.render_text(_TEST_MESSAGES, tools=[_TEST_TOOL], chat_template=chat_template) == without
            )
        except ValidationError:  # it does not accept the test conversation
            return False
