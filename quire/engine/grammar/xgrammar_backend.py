"""Everything that uses xgrammar: the vocabulary, compiling a form, matching a sequence. Runs in the fork server and the
matchers only."""

from __future__ import annotations

import enum
import itertools
import json
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import xgrammar
from numpy.typing import NDArray

from quire.engine.grammar.free_part import FreePart
from quire.engine.grammar.wire import DEAD_END, ForkServerSpec, allows
from quire.messages.grammar_syntax import plain_regex
from quire.messages.plan import MAX_WIDTH
from quire.messages.structured import StructuredOutputsParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MAX_WHITESPACE = 24
"""Consecutive white-space characters allowed in JSON: seven levels of indentation by three. Without a bound a weak
model emits nothing else until its tokens are spent. Each position of the run costs a mask of the vocabulary in every
grammar."""
MOST_CERTAIN = 2 * MAX_WIDTH - 1
"""Tokens of a certain run: what the step in flight draws, and drafts of the next."""
MOST_CHOICES = 32
"""A position with more allowed tokens is not examined for a certain text."""
CERTAIN_SECONDS = 0.001
"""CPU time for finding a certain run: it only helps, and must not make slow grammars slower."""


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


class Phase(enum.Enum):
    """Where a sequence is in its output."""

    OPENING = enum.auto()
    """Its text so far may begin a free part, or have the form."""
    FREE = enum.auto()
    FORM = enum.auto()


class GrammarSequence:
    """The state of one sequence in its grammar: accepts tokens, and fills the masks of the next ones."""

    def __init__(
        self,
        grammar: xgrammar.CompiledGrammar,
        end_ids: list[int],
        stop_ids: list[int],
        min_tokens: int,
        free: FreePart,
        texts: list[bytes],
    ) -> None:
        """`free`: what may come before the form. `texts`: the bytes of every token."""
        self._matcher = xgrammar.GrammarMatcher(grammar, override_stop_tokens=end_ids)
        self._early = xgrammar.GrammarMatcher(grammar, override_stop_tokens=end_ids) if free.openings else None
        """In the phase OPENING: reads the output as if it had the form from its first token; None: it cannot."""
        self._end_ids = np.array(end_ids, np.int64)
        self._stop_ids = np.array(stop_ids, np.int64)
        self._last_ids = {*end_ids, *stop_ids}
        self._min_tokens = min_tokens
        self._free = free
        self._texts = texts
        self._phase = Phase.FORM if not free.ends else Phase.OPENING if free.openings else Phase.FREE
        self._seen = b""
        """The text of the phase so far; of the free part only its end."""
        self._count = 0
        self._taken: list[xgrammar.GrammarMatcher] = []
        """While going along tokens that may be drawn: the matcher that accepted each."""

    def accept(self, token: int) -> None:
        """The token was sampled; raises ValueError if the grammar does not allow it."""
        is_accepted = self._accept(token)
        self._taken.clear()
        if not is_accepted:
            raise ValueError(f"token {token} was sampled, which the grammar does not allow here")

    def _accept(self, token: int) -> bool:
        text = self._texts[token] if token < len(self._texts) else b""
        if self._phase is Phase.FREE:
            self._find_end(self._seen + text)
        elif not (self._take(self._matcher, token) if self._phase is Phase.FORM else self._open(token, text)):
            return False
        self._count += 1
        return True

    def _take(self, matcher: xgrammar.GrammarMatcher, token: int) -> bool:
        is_accepted: bool = matcher.accept_token(token)
        if is_accepted:
            self._taken.append(matcher)
        return is_accepted

    def _open(self, token: int, text: bytes) -> bool:
        """Take a token of which it is not known whether it begins the free part or the form."""
        seen = self._seen + text
        early = self._early if self._early is not None and self._take(self._early, token) else None
        rest = self._free.after_opening(seen)
        if rest is None and text and self._free.may_open(seen):
            self._seen, self._early = seen, early
        elif early is not None:  # also a form that has the opening in it: that is the form of the whole output
            self._phase, self._matcher, self._early = Phase.FORM, early, None
        elif rest is not None:
            self._phase, self._early = Phase.FREE, None
            self._find_end(rest)
        else:
            return False
        return True

    def _find_end(self, text: bytes) -> None:
        """The free part has this text; look for its end."""
        if self._free.end_in(text):
            self._phase = Phase.FORM
        self._seen = self._free.tail(text)

    def fill(self, mask: NDArray[np.int32]) -> None:
        """Set the bits of the allowed next tokens; raises ValueError if there are none."""
        mask.fill(-1)
        if self._phase is Phase.FREE:
            _clear(mask, self._end_ids)
        elif self._phase is Phase.FORM:
            self._matcher.fill_next_token_bitmask(mask[None])
        else:
            if self._early is None:
                mask.fill(0)
            else:
                self._early.fill_next_token_bitmask(mask[None])
            _set(mask, self._free.continuing(self._seen))
        if not mask.any():
            raise ValueError(DEAD_END)
        if self._count < self._min_tokens:
            allowed = mask.copy()
            _clear(mask, self._stop_ids)
            if not mask.any():  # the form is complete: only stop tokens can follow, even before min_tokens
                mask[:] = allowed

    # Along tokens that may be drawn next

    def follow(self, drafts: Sequence[int], masks: Iterable[NDArray[np.int32]]) -> list[int]:
        """Fill the mask after each draft, up to the first that is not allowed or ends the output; the first mask is
        that of the next token, and filled. Returns the drafts that have a mask after them."""

        def choose(place: int, mask: NDArray[np.int32]) -> int | None:
            return drafts[place] if place < len(drafts) and allows(mask, drafts[place]) else None

        return self._walk(choose, masks)

    def follow_certain(self, masks: NDArray[np.int32], seconds: float = CERTAIN_SECONDS) -> list[int]:
        """`follow` along the tokens that the grammar leaves no choice about, for at most `seconds` of CPU time; there
        may be more of them than masks."""
        deadline = time.process_time() + seconds
        spare = np.empty((max(0, MOST_CERTAIN + 1 - len(masks)), masks.shape[1]), np.int32)

        def choose(place: int, mask: NDArray[np.int32]) -> int | None:
            return self._certain_token(mask) if time.process_time() < deadline else None

        return self._walk(choose, [*masks, *spare])

    def _walk(
        self, choose: Callable[[int, NDArray[np.int32]], int | None], masks: Iterable[NDArray[np.int32]]
    ) -> list[int]:
        """Fill masks along the tokens that `choose` takes from each, then go back."""
        before = self._phase, self._seen, self._count, self._matcher, self._early
        run: list[int] = []
        try:
            for mask, following in itertools.pairwise(masks):
                token = choose(len(run), mask)
                if token is None or token in self._last_ids or not self._accept(token):
                    break
                self.fill(following)
                run.append(token)
        except (ValueError, RuntimeError):
            pass  # a dead end: an error only if the sequence gets there
        finally:
            for matcher in {id(matcher): matcher for matcher in self._taken}.values():
                matcher.rollback(sum(each is matcher for each in self._taken))
            self._taken.clear()
            self._phase, self._seen, self._count, self._matcher, self._early = before
        return run

    def _certain_token(self, mask: NDArray[np.int32]) -> int | None:
        """The only allowed token, or the longest if all others are beginnings of it: then the text is certain, and a
        model that was trained on the tokenizer's own splits most likely draws the longest."""
        words = np.flatnonzero(mask)
        if len(words) > MOST_CHOICES:
            return None
        bits = np.flatnonzero(np.unpackbits(mask[words].view(np.uint8), bitorder="little"))
        tokens: list[int] = (words[bits >> 5] * 32 + (bits & 31)).tolist()
        if len(tokens) > MOST_CHOICES or not self._last_ids.isdisjoint(tokens) or tokens[-1] >= len(self._texts):
            return None
        longest = max(tokens, key=lambda token: len(self._texts[token]))
        text = self._texts[longest]
        return longest if all(text.startswith(self._texts[token]) for token in tokens) else None


def _set(mask: NDArray[np.int32], tokens: NDArray[np.int64]) -> None:
    tokens = tokens[tokens >> 5 < len(mask)]
    np.bitwise_or.at(mask.view(np.uint32), tokens >> 5, np.uint32(1) << (tokens & 31).astype(np.uint32))


def _clear(mask: NDArray[np.int32], tokens: NDArray[np.int64]) -> None:
    words = mask.view(np.uint32)
    for token in tokens.tolist():
        if token >> 5 < len(words):
            words[token >> 5] &= np.uint32(~(1 << (token & 31)) & 0xFFFFFFFF)
