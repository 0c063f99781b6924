"""Prompts for filling in the middle: a prefix and a suffix, each after the model's own token for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from quire.errors import ValidationError

_MARKER = "☺"
"""Never merged with what follows it: a text after it is encoded without the space that starts a text."""


@dataclass(frozen=True)
class MiddleForm:
    """The order in which a family of models expects the parts."""

    prefix: str
    suffix: str
    middle: str | None = None
    """What the model continues after; None: it continues the prefix, which comes last."""
    ends: tuple[str, ...] = ()
    """Tokens that end the middle, beside the model's own."""
    joins_suffix: bool = False
    """The suffix has no space before it, where the tokenizer puts one before every text."""

    @property
    def names(self) -> list[str]:
        return [name for name in (self.prefix, self.suffix, self.middle) if name is not None]


FORMS = (
    # Qwen Coder, CodeGemma
    MiddleForm("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", ("<|endoftext|>", "<|fim_pad|>", "<|file_sep|>")),
    # StarCoder, Granite Code, and SantaCoder
    MiddleForm("<fim_prefix>", "<fim_suffix>", "<fim_middle>", ("<|endoftext|>", "<fim_pad>", "<file_sep>")),
    MiddleForm("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ("<|endoftext|>", "<fim-pad>")),
    # DeepSeek Coder
    MiddleForm("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    # Code Llama
    MiddleForm("▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>",), joins_suffix=True),
    # Codestral: the suffix first
    MiddleForm("[PREFIX]", "[SUFFIX]", joins_suffix=True),
)


class FillInMiddle:
    """Makes such prompts for one model. Any thread may call it."""

    def __init__(self, tokenizer: Any | None, model: str) -> None:
        self._tokenizer = tokenizer
        self._model = model

    def prompt(
        self,
        prefix: Sequence[int],
        suffix: str,
        encode: Callable[[str], list[int]],
        keep: int | None = None,
        adds_special_tokens: bool = True,
    ) -> list[int]:
        """The model's prompt for what comes between `prefix` and `suffix`. `encode`: makes tokens of a text, without
        any that the tokenizer adds. `keep`: of a longer prompt the beginning of the prefix is left out."""
        form = self._form
        if form is None:
            raise ValidationError(self.refusal(self._model), "suffix")
        start = self._leading if adds_special_tokens else []
        if prefix[: len(self._leading)] == self._leading:
            start, prefix = self._leading, prefix[len(self._leading) :]
        after = self._encode_suffix(form, suffix, encode)
        if keep is not None:
            most = keep - len(start) - len(form.names) - len(after)
            if most < 0:
                raise ValidationError(
                    f"truncate_prompt_tokens is {keep}, and the suffix alone takes {keep - most} tokens",
                    "truncate_prompt_tokens",
                    keep,
                )
            prefix = prefix[max(0, len(prefix) - most) :]
        before, behind = self._id(form.prefix), self._id(form.suffix)
        if form.middle is None:
            return [*start, behind, *after, before, *prefix]
        return [*start, before, *prefix, behind, *after, self._id(form.middle)]

    @property
    def is_supported(self) -> bool:
        """Whether the model's tokenizer has the tokens."""
        return self._form is not None

    @staticmethod
    def refusal(model: str) -> str:
        """Why a model that is not supported takes no suffix."""
        return (
            f"suffix: the model {model} completes a text only at the end: its tokenizer has no tokens to fill in the "
            "middle. Leave suffix out, or use a code model that has them"
        )

    @cached_property
    def ends(self) -> list[int]:
        """Tokens that end the middle."""
        return [] if self._form is None else [self._id(name) for name in self._form.ends if self._has(name)]

    @cached_property
    def _form(self) -> MiddleForm | None:
        return next((form for form in FORMS if all(map(self._has, form.names))), None)

    @cached_property
    def _leading(self) -> list[int]:
        """Tokens that the tokenizer puts before a text."""
        assert self._tokenizer is not None
        whole, plain = (list(self._tokenizer.encode("a", add_special_tokens=adds)) for adds in (True, False))
        starts = range(len(whole) - len(plain) + 1)
        return whole[: next((start for start in starts if whole[start : start + len(plain)] == plain), 0)]

    def _encode_suffix(self, form: MiddleForm, suffix: str, encode: Callable[[str], list[int]]) -> list[int]:
        marker = encode(_MARKER) if form.joins_suffix else []
        tokens = encode(_MARKER + suffix) if marker else encode(suffix)
        return tokens[len(marker) :] if tokens[: len(marker)] == marker else encode(suffix)

    def _has(self, name: str) -> bool:
        if self._tokenizer is None:
            return False
        token = self._tokenizer.convert_tokens_to_ids(name)
        return token is not None and self._tokenizer.convert_ids_to_tokens(token) == name

    def _id(self, name: str) -> int:
        assert self._tokenizer is not None
        return int(self._tokenizer.convert_tokens_to_ids(name))
