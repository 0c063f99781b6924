"""How a model hears of the tools it is offered: from its chat template, or from us where that says nothing."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from quire.errors import ValidationError
from quire.output.parsers.preamble import with_preamble
from quire.output.parsers.toolcalls import guess_parser

if TYPE_CHECKING:
    from quire.api.chat import ChatRenderer

PLAIN_PARSER = "hermes"
"""The notation that a model is taught which has none of its own: its marks are not mistaken for text."""
MOST_TEMPLATES = 32
_QUESTION = [{"role": "user", "content": "What is the weather like?"}]
_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


class ToolPrompts:
    """Knows of each chat template whether it tells of tools. Safe to use from many threads."""

    def __init__(self, renderer: ChatRenderer, parser: str | None = None) -> None:
        """`parser` is the notation that is set up; None: as the template teaches."""
        self._renderer = renderer
        self._parser = parser
        self._silent: OrderedDict[str, bool] = OrderedDict()

    def parser(self, chat_template: str | None = None) -> str:
        """The notation of calls under the server's own template, or the request's."""
        if self._parser is not None:
            return self._parser
        if self.ignores_tools(chat_template):
            return PLAIN_PARSER
        return guess_parser(self._source(chat_template))

    def ignores_tools(self, chat_template: str | None = None) -> bool:
        """Whether a prompt is the same with tools as without them: then the model never hears of any."""
        source = self._source(chat_template)
        silent = self._silent.get(source)
        if silent is None:
            silent = self._silent[source] = self._try(chat_template)
            while len(self._silent) > MOST_TEMPLATES:
                self._silent.popitem(last=False)
        return silent

    def render(self, messages: list[dict[str, Any]], preamble: str | None, **arguments: Any) -> str:
        """The prompt's text, the preamble in it: in the system's words, or in the user's where there are none."""
        render = self._renderer.render_text
        if preamble is None:
            return render(messages, **arguments)
        try:
            return render(with_preamble(messages, preamble, "system"), **arguments)
        except ValidationError:  # not every template knows system messages
            return render(with_preamble(messages, preamble, "user"), **arguments)

    def _source(self, chat_template: str | None) -> str:
        return chat_template if chat_template is not None else self._renderer.template([_TOOL])

    def _try(self, chat_template: str | None) -> bool:
        try:
            without = self._renderer.render_text(_QUESTION, chat_template=chat_template)
            return self._renderer.render_text(_QUESTION, tools=[_TOOL], chat_template=chat_template) == without
        except ValidationError:  # it has wishes of its own, and cannot be asked
            return False
