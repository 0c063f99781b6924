"""The protocol of tool-call parsers, and what they share: content around calls, and text that only looks like one."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Collection
from typing import Any, ClassVar, Protocol

from quire.output.parsers.deltas import CallArguments, CallEnd, CallStart, Content, Delta, ParsedAnswer
from quire.output.parsers.incremental import SPACES, IncrementalParser, Reads
from quire.output.parsers.tools.json_scanner import JsonScanner
from quire.registry import resolve

_ALPHANUMERIC = string.ascii_letters + string.digits
_SURROGATES = re.compile("[\ud800-\udfff]")
_ARGUMENT_KEYS = ("arguments", "parameters")
_CALL_KEYS = ("name", *_ARGUMENT_KEYS, "type", "id")


class ToolParser(Protocol):
    """Finds tool calls in one answer."""

    needs_special_tokens: ClassVar[bool]
    """Its marks are special tokens: detokenization must not skip them."""

    def push(self, text: str) -> list[Delta]:
        """Add text of the answer; returns the deltas that are now certain."""
        ...

    def finish(self) -> list[Delta]:
        """The answer has ended; returns the deltas held back."""
        ...

    def parse(self, text: str) -> ParsedAnswer:
        """A whole answer, exactly as if pushed in pieces."""
        ...


def openai_id() -> str:
    """A call id as OpenAI writes them."""
    return "call_" + "".join(secrets.choice(_ALPHANUMERIC) for _ in range(24))


def mistral_id() -> str:
    """A call id that Mistral's templates accept: exactly nine letters and digits."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


class _Fields:
    """The fields of a call object so far."""

    name: str | None = None
    arguments: str | None = None


class CallParser(IncrementalParser):
    """Emits content until a call opens; then `_calls`, which a subclass implements, reads one call or several.

    Text read by `_calls` is held back. `_start` emits the start of a call and drops the held text; text still held when
    `_calls` returns was not a call and becomes content. So a subclass returns at the first invalid character, and
    nothing is lost or emitted twice. White space next to a call is dropped with its markup.
    """

    tags: ClassVar[tuple[str, ...]] = ()
    """Words that open a call anywhere; a word precedes its own prefixes."""
    bare: ClassVar[str] = ""
    """Characters that open a call with no tag: at the margin (an indented one is inside something), or after a call."""
    needs_special_tokens: ClassVar[bool] = False
    notation: ClassVar[str] = ""
    """Instructions for writing calls, for models whose chat template has none."""
    name_keys: ClassVar[tuple[str, ...]] = ("name",)
    """What a call object calls the tool's name."""
    streams_objects: ClassVar[bool] = True
    """False: a call object is emitted once its arguments are complete, and those of a broken one never are."""

    def __init__(self, offered: Collection[str] | None = None, new_id: Callable[[], str] = openai_id) -> None:
        super().__init__()
        self._offered = offered
        self._new_id = new_id
        self._count = 0
        self._held: list[str] = []
        self._spaces: list[str] = []
        """White space at the end of the content so far."""
        self._is_fresh = self._is_line_start = True
        """Only white space since the answer's start or the last call; that, or at the margin of a line."""
        self._is_whole = True
        """The last call was complete."""
        self._openers = re.compile(
            "[" + re.escape("".join(sorted({word[0] for word in (*self.tags, *self.bare)}))) + "]"
        )

    def _calls(self, opener: str) -> Reads[None]:
        """Read what follows `opener`, one of `tags` or `bare`, which has been read and is held."""
        raise NotImplementedError

    def _run(self) -> Reads[None]:
        while (yield from self._peek()):
            match = self._openers.search(self._text, self._at)
            end = match.start() if match else len(self._text)
            self._add_content(super()._take(end - self._at))
            if match:
                opener = yield from self._opener()
                if opener:
                    self._take(len(opener))
                    yield from self._calls(opener)
                    self._release()
                else:
                    self._add_content(super()._take(1))
        if self._count == 0 and self._spaces:
            self._out.append(Content("".join(self._spaces)))

    def _opener(self) -> Reads[str]:
        for tag in self.tags:
            if (yield from self._is_next(tag)):
                return tag
        character = self._text[self._at]
        return character if self._is_line_start and character in self.bare else ""

    def _take(self, count: int) -> str:
        taken = super()._take(count)
        self._held.append(taken)
        return taken

    def _release(self) -> None:
        """Emit held text as content: it was not a call."""
        for text in self._held:
            self._add_content(text)
        self._held.clear()

    def _add_content(self, text: str) -> None:
        body = text.rstrip(SPACES)
        if body:
            self._out.append(Content("".join([*self._spaces, body])))
            self._spaces.clear()
        if len(body) < len(text):
            self._spaces.append(text[len(body) :])
        if text:
            self._is_fresh = self._is_fresh and not body
            self._is_line_start = self._is_fresh or text.endswith("\n")

    def _accepts(self, name: str, is_marked: bool) -> bool:
        """Whether this names a call. After markup any name does: the client can report an unknown one to the
        model. Without markup only the name of an offered tool does, because the text may not be meant as a call."""
        if not name.isprintable() or not name.strip():
            return False
        return is_marked or self._offered is None or name in self._offered

    def _start(self, name: str) -> None:
        self._held.clear()
        self._spaces.clear()
        self._out.append(CallStart(self._count, self._new_id(), name))
        self._count += 1

    def _add_arguments(self, text: str) -> None:
        if text:
            self._out.append(CallArguments(self._count - 1, text))

    def _end(self, complete: bool) -> None:
        self._out.append(CallEnd(self._count - 1, complete))
        self._is_whole = self._is_fresh = self._is_line_start = complete

    def _emit(self, name: str, arguments: str) -> None:
        """Emit a complete call."""
        self._start(name)
        self._add_arguments(arguments)
        self._end(True)

    # JSON, which most formats use.

    def _objects(self, opener: str, is_marked: bool) -> Reads[bool]:
        """Read one call object or a list; `opener`, the first character, has been read. False if one is malformed."""
        if opener == "{":
            return (yield from self._object(is_marked))
        while True:
            if not (yield from self._take_next("{")) or not (yield from self._object(is_marked)):
                return False
            separator = yield from self._take_next(",]")
            if separator == "]":
                self._held.clear()
                return True
            if not separator:
                return False

    def _object(self, is_marked: bool) -> Reads[bool]:
        """`{"name": …, "arguments": {…}}` in any order, after its brace. False if it is not a call, or a broken one."""
        first = self._count
        found = _Fields()
        separator = ","
        while separator == ",":
            yield from self._skip_spaces()
            if not (yield from self._field(found, is_marked)):
                break
            separator = yield from self._take_next(",}")
        if self._count == first:
            if separator != "}" or found.name is None or not (is_marked or self._offered is not None):
                return False
            self._emit(found.name, "{}")
        elif separator == "}":
            self._held.clear()
        # A call with complete arguments is complete, even without its closing brace.
        return self._is_whole

    def _field(self, found: _Fields, is_marked: bool) -> Reads[bool]:
        """Read one field of a call object; emits the call once it has name and arguments. False if it is invalid."""
        key = yield from self._read_string()
        if key is None or not (yield from self._take_next(":")):
            return False
        start = yield from self._skip_spaces()
        if key in self.name_keys and found.name is None:
            name = yield from self._read_string()
            if name is None or not self._accepts(name, is_marked):
                return False
            found.name = name
        elif key in _ARGUMENT_KEYS and found.arguments is None:
            if start == "{" and found.name is not None and self.streams_objects:
                found.arguments = ""
                return (yield from self._stream_arguments(found.name))
            found.arguments = as_arguments((yield from self._read_value()))
            if found.arguments is None:
                return False
        else:
            is_known = is_marked or key in _CALL_KEYS
            return is_known and (yield from self._read_value()) is not None
        if found.name is not None and found.arguments is not None:
            self._emit(found.name, found.arguments)
        return True

    def _stream_arguments(self, name: str) -> Reads[bool]:
        """Emit a call whose arguments come next, streamed as they are read. False if they were cut off."""
        self._start(name)
        scanner = JsonScanner()
        while not scanner.done and (yield from self._peek()):
            self._at = scanner.feed(self._text, self._at)
            self._add_arguments(scanner.take())
            if scanner.failed:
                self._held.append(scanner.take_pending())
                break
        self._add_arguments(scanner.take_pending() if not scanner.failed else "")
        self._end(scanner.done)
        return scanner.done

    def _read_value(self) -> Reads[str | None]:
        """A JSON value, as JSON; None if it is not valid."""
        scanner = JsonScanner()
        while not scanner.done and not scanner.failed and (yield from self._peek()):
            self._take(scanner.feed(self._text, self._at) - self._at)
        return scanner.take() if scanner.done else None

    def _read_string(self) -> Reads[str | None]:
        """A JSON string, decoded; None if something else comes."""
        written = (yield from self._read_value()) if (yield from self._is_next('"')) else None
        return None if written is None else json.loads(written)

    def _take_next(self, characters: str) -> Reads[str]:
        """Skip white space and read one of `characters`; "" if another character is next, which stays unread."""
        character = yield from self._skip_spaces()
        return self._take(1) if character and character in characters else ""


def as_arguments(value: str | None) -> str | None:
    """A JSON value as a call's arguments: an object, one written into a string, or null for none; None otherwise."""
    if value is None or value.startswith("{"):
        return value
    if value == "null":
        return "{}"
    if not value.startswith('"'):
        return None
    scanner, inner = JsonScanner(), json.loads(value).strip(SPACES)
    is_whole = scanner.feed(inner, 0) == len(inner) and scanner.done
    # A lone surrogate, once decoded, cannot be encoded as UTF-8.
    is_object = is_whole and inner.startswith("{") and not _SURROGATES.search(inner)
    return scanner.take() if is_object else None


def to_json(value: Any) -> str:
    """A value as JSON that can be sent as UTF-8. Raises ValueError for one that JSON cannot represent."""
    written = json.dumps(value, ensure_ascii=False, allow_nan=False)
    # Of a lone surrogate only the escape can be sent.
    return _SURROGATES.sub(lambda found: f"\\u{ord(found[0]):04x}", written)


_TOOLS = "quire.output.parsers.tools."
TOOL_PARSERS = {
    "apertus": _TOOLS + "marked_json.ApertusParser",
    "cohere_command3": _TOOLS + "marked_json.CohereCommandParser",
    "cohere_command4": _TOOLS + "marked_json.CohereCommandParser",
    "deepseek_v3": _TOOLS + "deepseek.DeepSeekV3Parser",
    "deepseek_v31": _TOOLS + "deepseek.DeepSeekV31Parser",
    "deepseek_v32": _TOOLS + "invoke.DeepSeekV32Parser",
    "deepseek_v4": _TOOLS + "invoke.DeepSeekV4Parser",
    "dots": _TOOLS + "invoke.DotsParser",
    "ernie45": _TOOLS + "hermes.HermesParser",
    "functiongemma": _TOOLS + "gemma.FunctionGemmaParser",
    "gemma4": _TOOLS + "gemma.Gemma4Parser",
    "gigachat3": _TOOLS + "marked_json.GigaChat3Parser",
    "glm45": _TOOLS + "xml.Glm45Parser",
    "glm47": _TOOLS + "xml.Glm45Parser",
    "granite": _TOOLS + "marked_json.GraniteParser",
    "granite-20b-fc": _TOOLS + "marked_json.Granite20bParser",
    "granite4": _TOOLS + "hermes.HermesParser",
    "hermes": _TOOLS + "hermes.HermesParser",
    "hunyuan_a13b": _TOOLS + "marked_json.JambaParser",
    "hy_v3": _TOOLS + "xml.HunyuanV3Parser",
    "internlm": _TOOLS + "marked_json.InternLmParser",
    "jamba": _TOOLS + "marked_json.JambaParser",
    "json": _TOOLS + "json.JsonParser",
    "kimi_k2": _TOOLS + "deepseek.KimiK2Parser",
    "lfm2": _TOOLS + "lfm2.Lfm2Parser",
    "llama3_json": _TOOLS + "llama3_json.Llama3JsonParser",
    "llama4_json": _TOOLS + "llama3_json.Llama3JsonParser",
    "llama4_pythonic": _TOOLS + "pythonic.PythonicParser",
    "longcat": _TOOLS + "hermes.LongcatParser",
    "mimo": _TOOLS + "xml.Qwen3CoderParser",
    "minicpm5": _TOOLS + "xml.MiniCpm5Parser",
    "minimax_m2": _TOOLS + "invoke.MiniMaxM2Parser",
    "mistral": _TOOLS + "mistral.MistralParser",
    "olmo3": _TOOLS + "pythonic.Olmo3Parser",
    "openai": "quire.output.parsers.harmony.HarmonyParser",
    "phi4_mini_json": _TOOLS + "marked_json.Phi4MiniParser",
    "poolside_v1": _TOOLS + "xml.Glm45Parser",
    "pythonic": _TOOLS + "pythonic.PythonicParser",
    "qwen3_coder": _TOOLS + "xml.Qwen3CoderParser",
    "qwen3_xml": _TOOLS + "xml.Qwen3CoderParser",
    "seed_oss": _TOOLS + "xml.SeedOssParser",
    "step3": _TOOLS + "invoke.Step3Parser",
    "step3p5": _TOOLS + "xml.Qwen3CoderParser",
    "xlam": _TOOLS + "json.XlamParser",
}


def notation_of(name: str) -> str:
    """Instructions for writing calls that this parser reads; "" if it has none."""
    return str(getattr(resolve("tool-call parser", name, TOOL_PARSERS), "notation", ""))


def make_tool_parser(
    name: str, offered: Collection[str] | None = None, new_id: Callable[[], str] | None = None
) -> ToolParser:
    """A fresh parser for one answer; `name` is one of `TOOL_PARSERS` or a dotted path to a class.

    `offered` names the tools of the request; if it is a mapping, its values are their JSON schemas, which some formats
    need to tell numbers from strings. `new_id` makes the ids of calls (default: the format's own).
    """
    parser = resolve("tool-call parser", name, TOOL_PARSERS)
    made: ToolParser = parser(offered) if new_id is None else parser(offered, new_id)
    return made
