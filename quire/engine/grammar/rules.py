"""From the form a request asks for to a compiled grammar."""

from __future__ import annotations

import json
from typing import Any

import xgrammar

from quire.messages.grammar_support import plain_regex
from quire.messages.structured import StructuredOutputsParams

MOST_SPACES = 24
"""White space in a row that JSON may have: seven levels of indentation by three. Without a bound a weak model goes on
with it until its tokens are spent. Each place of the run costs a mask of the vocabulary in every grammar."""


def compile_form(compiler: xgrammar.GrammarCompiler, form: StructuredOutputsParams) -> xgrammar.CompiledGrammar:
    """The grammar of a form; raises ValueError or RuntimeError where there is none."""
    match form.kind:
        case "json":
            return _compile_schema(compiler, str(form.json), form)
        case "json_object":
            return _compile_schema(compiler, '{"type": "object", "additionalProperties": true}', form)
        case "regex":
            return compiler.compile_regex(plain_regex(form.regex or ""))
        case "choice":
            return compiler.compile_grammar(choice_grammar(form.choice or []))
        case "grammar":
            return compiler.compile_grammar(form.grammar or "")
        case _:
            return compiler.compile_structural_tag(structural_tag(json.loads(str(form.structural_tag))))


def _compile_schema(
    compiler: xgrammar.GrammarCompiler, schema: str, form: StructuredOutputsParams
) -> xgrammar.CompiledGrammar:
    if form.disable_any_whitespace:
        return compiler.compile_json_schema(schema, any_whitespace=False)
    return compiler.compile_json_schema(schema, max_whitespace_cnt=MOST_SPACES)


def choice_grammar(choices: list[str]) -> str:
    """EBNF for one of these texts."""
    return "root ::= " + " | ".join(_quoted(choice) for choice in choices)


def _quoted(text: str) -> str:
    """Every character but plain letters and digits by its number: nothing in it can be grammar."""
    return '"' + "".join(c if c.isascii() and (c.isalnum() or c == " ") else f"\\U{ord(c):08x}" for c in text) + '"'


def structural_tag(tag: dict[str, Any]) -> dict[str, Any]:
    """A tag in today's writing; yesterday's had a list of structures and their triggers."""
    if "structures" not in tag:
        return {"type": "structural_tag", **tag}
    tags = [
        {
            "type": "tag",
            "begin": structure["begin"],
            "content": {"type": "json_schema", "json_schema": structure.get("schema", {})},
            "end": structure["end"],
        }
        for structure in tag["structures"]
    ]
    return {
        "type": "structural_tag",
        "format": {"type": "triggered_tags", "triggers": tag.get("triggers", []), "tags": tags},
    }
