"""Everything that uses xgrammar: the vocabulary, compiling a form, matching a sequence. Runs in the fork server and the
matchers only."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import xgrammar
from numpy.typing import NDArray

from quire.engine.grammar.wire import DEAD_END, ForkServerSpec
from quire.messages.grammar_support import plain_regex
from quire.messages.structured import StructuredOutputsParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MAX_WHITESPACE = 24
"""Consecutive white-space characters allowed in JSON: seven levels of indentation by three. Without a bound a weak
model emits nothing else until its tokens are spent. Each position of the run costs a mask of the vocabulary in every
grammar."""


class GrammarVocabulary:
    """The bytes of every token, and xgrammar's compiler over them."""

    def __init__(self, spec: ForkServerSpec, tokenizer: PreTrainedTokenizerFast) -> None:
        found = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=spec.vocab_size, stop_token_ids=spec.end_ids
        )
        self.bytes = found.decoded_vocab
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special = {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}
        # A token of no bytes is never allowed. Special tokens are not text, although their names would match as text.
        plain = [b"" if token in special else text for token, text in enumerate(self.bytes)]
        info = xgrammar.TokenizerInfo(
            plain,
            xgrammar.VocabType.RAW,
            vocab_size=spec.vocab_size,
            stop_token_ids=spec.end_ids,
            add_prefix_space=found.add_prefix_space,
        )
        self.compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


# Compiling


def compile_form(compiler: xgrammar.GrammarCompiler, form: StructuredOutputsParams) -> xgrammar.CompiledGrammar:
    """The grammar of a form; raises ValueError or RuntimeError if it is invalid."""
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
    return compiler.compile_json_schema(schema, max_whitespace_cnt=MAX_WHITESPACE)


def choice_grammar(choices: list[str]) -> str:
    """EBNF for one of these texts."""
    return "root ::= " + " | ".join(_quoted(choice) for choice in choices)


def _quoted(text: str) -> str:
    """Escapes every character but ASCII letters, digits and spaces: nothing in the text can be read as grammar."""
    return '"' + "".join(c if c.isascii() and (c.isalnum() or c == " ") else f"\\U{ord(c):08x}" for c in text) + '"'


def structural_tag(tag: dict[str, Any]) -> dict[str, Any]:
    """A tag in the current format; the legacy one has a list of structures and their triggers."""
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


# Matching


class GrammarSequence:
    """The state of one sequence in its grammar: accepts tokens, and fills the mask of the next."""

    def __init__(
        self,
        grammar: xgrammar.CompiledGrammar,
        end_ids: list[int],
        stop_ids: list[int],
        min_tokens: int,
        after: bytes,
        texts: list[bytes],
    ) -> None:
        """`after`: the grammar starts once this text has appeared; empty: at once."""
        self._matcher = xgrammar.GrammarMatcher(grammar, override_stop_tokens=end_ids)
        self._end_ids = np.array(end_ids, np.int64)
        self._stop_ids = np.array(stop_ids, np.int64)
        self._min_tokens = min_tokens
        self._after = after
        self._texts = texts
        self._tail = b""
        self._count = 0

    def accept(self, token: int) -> None:
        """The token was sampled; raises ValueError if the grammar does not allow it."""
        self._count += 1
        if self._after:
            self._find_start(token)
        elif not self._matcher.accept_token(token):
            raise ValueError(f"token {token} was sampled, which the grammar does not allow here")

    def fill(self, mask: NDArray[np.int32]) -> None:
        """Set the bits of the allowed next tokens; raises ValueError if there are none."""
        mask.fill(-1)
        if self._after:
            _clear(mask, self._end_ids)  # the grammar has not started
        else:
            self._matcher.fill_next_token_bitmask(mask[None])
        if not mask.any():
            raise ValueError(DEAD_END)
        if self._count < self._min_tokens:
            allowed = mask.copy()
            _clear(mask, self._stop_ids)
            if not mask.any():  # the form is complete: only stop tokens can follow, even before min_tokens
                mask[:] = allowed

    def _find_start(self, token: int) -> None:
        text = self._texts[token] if token < len(self._texts) else b""
        self._tail += text
        if self._after in self._tail:
            self._after = b""
        else:
            self._tail = self._tail[-len(self._after) :]


def _clear(mask: NDArray[np.int32], tokens: NDArray[np.int64]) -> None:
    words = mask.view(np.uint32)
    for token in tokens.tolist():
        if token >> 5 < len(words):
            words[token >> 5] &= np.uint32(~(1 << (token & 31)) & 0xFFFFFFFF)
