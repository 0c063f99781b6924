"""MiniMax-M2, dots, DeepSeek V3.2 and V4, Step 3: `<invoke>` with a `<parameter>` for each value, in a wrapper."""

from __future__ import annotations

import re
from typing import ClassVar

from quire.output.parsers.incremental import Reads
from quire.output.parsers.tools.xml import XmlParser


class MiniMaxM2Parser(XmlParser):
    """`<minimax:tool_call>\\n<invoke name="f">\\n<parameter name="a">value</parameter>\\n</invoke>\\n…`."""

    tags = ("<minimax:tool_call>",)
    mark: ClassVar[str] = ""
    """What precedes the name in every tag."""
    wrapper_end: ClassVar[str] = "</minimax:tool_call>"
    value_end = "</parameter>"
    _name = re.compile(r"[^<>\"\n]+")
    notation = (
        "To call tools, answer with their names and parameters in these tags:\n<minimax:tool_call>\n"
        '<invoke name="tool_name">\n<parameter name="a_parameter">its value</parameter>\n</invoke>\n'
        "</minimax:tool_call>\nWhere no tool helps, answer in plain words."
    )

    def _calls(self, opener: str) -> Reads[None]:
        first = self._count
        yield from self._skip_spaces()
        while (yield from self._take_word(f'<{self.mark}invoke name="')):
            name = yield from self._take_until(self._name, '">')
            if not self._accepts(name, is_marked=True) or not (yield from self._invoke(name)):
                return
            yield from self._skip_spaces()
        if (yield from self._take_word(self.wrapper_end)) and self._count > first:  # an empty wrapper is text
            self._held.clear()

    def _invoke(self, name: str) -> Reads[bool]:
        self._start(name)
        count = 0
        yield from self._skip_spaces()
        while (yield from self._take_word(f'<{self.mark}parameter name="')):
            key = yield from self._take_until(self._name, '"')
            is_string = yield from self._kind()
            is_open = yield from self._take_word(">")
            if not key or not is_open or not (yield from self._stream_value(name, key, count == 0, is_string)):
                self._finish_call(count == 0, complete=False)
                return False
            count += 1
            yield from self._skip_spaces()
        is_closed = yield from self._take_word(f"</{self.mark}invoke>")
        self._finish_call(count == 0, complete=is_closed)
        return is_closed

    def _kind(self) -> Reads[bool | None]:
        """Whether the tag says that the value is a string."""
        return None
        yield


class DotsParser(MiniMaxM2Parser):
    """dots: the same in another wrapper, or a call object in JSON there."""

    tags = ("<dots_function_call>",)
    wrapper_end = "</dots_function_call>"
    notation = MiniMaxM2Parser.notation.replace("minimax:tool_call", "dots_function_call")

    def _calls(self, opener: str) -> Reads[None]:
        start = yield from self._take_next("{[")
        if not start:
            yield from super()._calls(opener)
        elif (yield from self._objects(start, is_marked=True)):
            yield from self._skip_spaces()
            if (yield from self._take_word(self.wrapper_end)):
                self._held.clear()


class DeepSeekV32Parser(MiniMaxM2Parser):
    """DeepSeek V3.2: the same with `｜DSML｜` in every tag, and `string="true"` where the value is a string."""

    tags = ("<｜DSML｜function_calls>",)
    mark = "｜DSML｜"
    wrapper_end = "</｜DSML｜function_calls>"
    value_end = "</｜DSML｜parameter>"
    needs_special_tokens = True
    notation = (
        "To call tools, answer with their names and parameters in these tags:\n<｜DSML｜function_calls>\n"
        '<｜DSML｜invoke name="tool_name">\n<｜DSML｜parameter name="a_parameter" string="true">its value'
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>\n"
        "Where no tool helps, answer in plain words."
    )

    def _kind(self) -> Reads[bool | None]:
        if (yield from self._take_word(' string="true"')):
            return True
        return False if (yield from self._take_word(' string="false"')) else None


class DeepSeekV4Parser(DeepSeekV32Parser):
    """DeepSeek V4: the same in another wrapper."""

    tags = ("<｜DSML｜tool_calls>",)
    wrapper_end = "</｜DSML｜tool_calls>"
    notation = DeepSeekV32Parser.notation.replace("function_calls", "tool_calls")


class Step3Parser(MiniMaxM2Parser):
    """Step 3: invocations as in MiniMax-M2, each between marks of its own that may name the tool first."""

    tags = ("<｜tool_calls_begin｜>",)
    mark = "steptml:"
    wrapper_end = "<｜tool_calls_end｜>"
    value_end = "</steptml:parameter>"
    needs_special_tokens = True
    notation = (
        "To call tools, answer with their names and parameters in these tags:\n"
        '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="tool_name">'
        '<steptml:parameter name="a_parameter">its value</steptml:parameter></steptml:invoke><｜tool_call_end｜>'
        "<｜tool_calls_end｜>\nWhere no tool helps, answer in plain words."
    )

    def _calls(self, opener: str) -> Reads[None]:
        first = self._count
        yield from self._skip_spaces()
        while (yield from self._take_word("<｜tool_call_begin｜>")):
            yield from self._take_run(self._name)
            if (yield from self._take_word("<｜tool_sep｜>")):
                yield from self._take_run(self._name)
            yield from self._skip_spaces()
            if not (yield from self._take_word(f'<{self.mark}invoke name="')):
                return
            name = yield from self._take_until(self._name, '">')
            if not self._accepts(name, is_marked=True) or not (yield from self._invoke(name)):
                return
            yield from self._skip_spaces()
            for between in ("<｜tool_call_end｜>", "<｜tool_sep｜>"):
                if (yield from self._take_word(between)):
                    self._held.clear()
                yield from self._skip_spaces()
        if (yield from self._take_word(self.wrapper_end)) and self._count > first:
            self._held.clear()
