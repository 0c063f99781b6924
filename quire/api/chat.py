"""Renders conversations to prompts: messages through a chat template, in a sandbox, then to token ids."""

from __future__ import annotations

import errno
import inspect
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jinja2

from quire.api.chat_messages import Message, normalized, plain
from quire.api.templates.budget import Budget, TemplateLimits, on_budget
from quire.api.templates.compiling import Expectations
from quire.api.templates.environment import TemplateEnvironment, compile_template, render_template
from quire.api.text_encoding import encode_text
from quire.errors import QuireError, ValidationError

MAX_CACHED = 32
COMPILE_SECONDS = 10.0
"""CPU time to compile the model's own chat template."""
_CONTINUE = "CONTINUE_FINAL_MESSAGE_TAG "
_RESERVED = frozenset(
    {
        "messages", "conversation", "tools", "documents", "add_generation_prompt", "continue_final_message",
        "chat_template", "tokenize", "tokenizer", "tokenizer_kwargs", "return_tensors", "return_dict",
        "return_assistant_tokens_mask", "sanitize_control_tokens", "padding", "truncation", "max_length",
        "raise_exception", "strftime_now", "range", "dict", "namespace", "cycler", "joiner", "lipsum", "loop", "self",
        "super", "caller", "varargs", "kwargs", "context", "environment", "bos_token", "eos_token", "unk_token",
        "sep_token", "pad_token", "cls_token", "mask_token", "additional_special_tokens", "extra_special_tokens",
    }
)  # fmt: skip
"""Variables that the renderer sets; `chat_template_kwargs` must not override them."""


@dataclass(frozen=True)
class _Compiled:
    """A compiled chat template, and how it treats messages."""

    template: jinja2.Template
    expects: Expectations
    mentions_content: bool


class ChatRenderer:
    """Renders conversations for one tokenizer. Thread-safe.

    `template` (inline or a file) replaces the tokenizer's own. A template given with a call is less trusted than the
    model's, and is run with `request_limits`, which may be tighter.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: str | None = None,
        *,
        limits: TemplateLimits | None = None,
        request_limits: TemplateLimits | None = None,
        placeholders: Mapping[str, str] | None = None,
    ) -> None:
        """`placeholders`: by kind, the text that stands for an image or a video in a template that takes text only."""
        self.tokenizer = tokenizer
        self._placeholders = placeholders or {}
        self.limits = limits or TemplateLimits()
        self.request_limits = request_limits or replace(
            self.limits, source=min(self.limits.source, 1 << 16), code=min(self.limits.code, 1 << 18)
        )
        self._template = template_text(template)
        if self._template is not None:
            _check_is_template(self._template)
        self._environment = TemplateEnvironment()
        self._compiled: OrderedDict[str, _Compiled] = OrderedDict()
        self._lock = threading.Lock()

    def render(
        self,
        messages: Sequence[Any],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        documents: Sequence[Any] | None = None,
    ) -> tuple[str, list[int]]:
        """The prompt's text and its token ids. Any error in the input raises a `ValidationError`."""
        text = self.render_text(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
            documents=documents,
        )
        # The template writes the special tokens itself; the tokenizer must not add its own.
        return text, encode_text(self.tokenizer, text, "messages", add_special_tokens=False)

    def render_text(
        self,
        messages: Sequence[Any],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        documents: Sequence[Any] | None = None,
    ) -> str:
        """The prompt's text only."""
        if self.tokenizer is None:
            raise ValidationError("chat needs a tokenizer, and skip_tokenizer_init is set", "messages")
        if continue_final_message and add_generation_prompt:
            raise ValidationError(
                "add_generation_prompt starts a new message and continue_final_message continues the last one: set one "
                "of them",
                "continue_final_message",
            )
        source = self._source(chat_template, tools)
        limits = self.limits if chat_template is None else self.request_limits
        account = Budget(limits)
        # The model's own is compiled once, before any request: it may take longer.
        own = Budget(replace(limits, seconds=COMPILE_SECONDS)) if chat_template is None else account
        compiled = self._compile(source, own)
        expects = compiled.expects
        conversation = normalized(
            messages,
            parts=expects.parts,
            wrap_text=not expects.text,
            keep_none=expects.none,
            placeholders=self._placeholders,
        )
        final = _mark_end(conversation, compiled) if continue_final_message else None
        variables = {
            **self._special_tokens(),
            **_checked_kwargs(chat_template_kwargs),
            "messages": conversation,
            "tools": None if tools is None else [_tool_schema(tool) for tool in tools],
            "documents": None if documents is None else plain(list(documents), "documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        text = _run(compiled.template, variables, account)
        return text if final is None else _cut_after(text, final)

    def template(self, tools: Sequence[Any] | None = None) -> str:
        """The source of the default template; a model may have a separate one for tools."""
        return self._source(None, tools)

    def _source(self, given: str | None, tools: Sequence[Any] | None) -> str:
        """The source of the template to use: the given one, the configured one, or the tokenizer's."""
        own = getattr(self.tokenizer, "chat_template", None)
        named = own if isinstance(own, dict) else {}
        if given is not None:
            source = named.get(given, given)
        elif self._template is not None:
            source = self._template
        elif named:
            source = named.get("tool_use") if tools is not None and "tool_use" in named else named.get("default")
        else:
            source = own
        if source is None:
            raise ValidationError(
                "the model has no chat template: set chat_template, or send a plain prompt", "chat_template"
            )
        if not isinstance(source, str):
            raise ValidationError(f"chat_template is text, not a {type(source).__name__}", "chat_template")
        if given is not None and given not in named:
            _check_is_template(source)
        return source

    def _compile(self, source: str, account: Budget) -> _Compiled:
        """The compiled template, from the cache if it was used before; compiling is charged to `account`."""
        longest = account.limits.source
        if len(source) > longest:
            raise ValidationError(f"the chat template has {len(source)} characters; at most {longest}", "chat_template")
        with self._lock:
            compiled = self._compiled.get(source)
            if compiled is not None:
                self._compiled.move_to_end(source)
                return compiled
        try:
            with on_budget(account):
                compiled = _Compiled(*compile_template(self._environment, source), "content" in source)
        except QuireError:
            raise
        except Exception as error:
            raise ValidationError(f"the chat template cannot be read: {_reason(error)}", "chat_template") from error
        with self._lock:
            self._compiled[source] = compiled
            while len(self._compiled) > MAX_CACHED:
                self._compiled.popitem(last=False)
        return compiled

    def _special_tokens(self) -> dict[str, str]:
        return dict(getattr(self.tokenizer, "special_tokens_map", None) or {})


def template_text(template: str | None) -> str | None:
    """A template given inline, or the text of the file it names."""
    if template is None or "{" in template:
        return template
    path = Path(template)
    try:
        return path.read_text() if path.is_file() else template
    except (OSError, ValueError) as error:  # also a NUL in the name, or text that is not UTF-8
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:  # not the name of a file
            return template
        reason = error.strerror if isinstance(error, OSError) else error
        message = f"the chat template {_shown(template)} cannot be read: {reason}"
        raise ValidationError(message, "chat_template") from error


def _check_is_template(text: str) -> None:
    if "{" not in text:
        raise ValidationError(
            f"chat_template is {_shown(text)}: it is not the name of a file, and no template, which would have a '{{'",
            "chat_template",
        )


def _shown(text: str) -> str:
    return repr(text) if len(text) <= 80 else f"{text[:60]!r}… ({len(text)} characters)"


def _run(template: jinja2.Template, variables: dict[str, Any], account: Budget) -> str:
    try:
        with on_budget(account):
            return render_template(template, variables)
    except QuireError:
        raise
    except Exception as error:  # an unknown role, a limit, a bug in it: all count as bad input
        raise ValidationError(f"the chat template failed: {_reason(error)}", "messages") from error


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it recurses too deeply"
    if isinstance(error, MemoryError):
        return "it is nested too deeply"  # what Python's parser raises
    text = str(error) or type(error).__name__
    return text if len(text) <= 500 else text[:497] + "..."


def _checked_kwargs(given: Mapping[str, Any] | None) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ValidationError(
            f"chat_template_kwargs is an object, not a {type(given).__name__}", "chat_template_kwargs"
        )
    for name in given:
        if not isinstance(name, str) or not (name.isascii() and name.isidentifier()) or name.startswith("_"):
            raise ValidationError(
                f"chat_template_kwargs holds {str(name)[:60]!r}, which is not a variable name", "chat_template_kwargs"
            )
        if name in _RESERVED:
            raise ValidationError(
                f"chat_template_kwargs may not set {name!r}: it is set by the request or the server",
                "chat_template_kwargs",
                name,
            )
    checked: dict[str, Any] = plain(dict(given), "chat_template_kwargs")
    return checked


def _tool_schema(tool: dict[str, Any] | Callable[..., Any]) -> Any:
    """A tool's schema; for a Python function, made from its annotations."""
    if inspect.isfunction(tool) or inspect.ismethod(tool):
        from transformers.utils import get_json_schema

        return plain(get_json_schema(tool), "tools")
    made = plain(tool, "tools")
    if not isinstance(made, dict):
        raise ValidationError(f"a tool is an object, not a {type(tool).__name__}", "tools")
    return made


def _mark_end(conversation: list[Message], compiled: _Compiled) -> str:
    """Append a marker to the last message's text; returns that text."""
    last = conversation[-1]
    content = last["content"]
    if isinstance(content, list) and content and "text" in content[-1]:
        final: str = content[-1]["text"]
        content[-1]["text"] = final + _CONTINUE
    elif isinstance(content, str):
        final = content
        last["content"] = final + _CONTINUE
    else:
        raise ValidationError(
            "continue_final_message is set, but the last message has no content to continue", "messages"
        )
    if not compiled.mentions_content:
        raise ValidationError(
            "continue_final_message is set, but the chat template does not render the content of messages", "messages"
        )
    return final


def _cut_after(text: str, final: str) -> str:
    """The rendered text up to the marker. A template that trims messages also removed the spaces before it."""
    at = text.rfind(_CONTINUE.strip())
    if at < 0 or final.strip() not in text:
        raise ValidationError(
            "continue_final_message is set, but the chat template does not render the last message unchanged",
            "messages",
        )
    return text[:at] if text[at : at + len(_CONTINUE)] == _CONTINUE else text[:at].rstrip()
