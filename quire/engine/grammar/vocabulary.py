"""The model's tokens as grammars see them: each one a run of bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import xgrammar

from quire.engine.grammar.wire import Setup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class GrammarVocabulary:
    """Bytes of every token, and the library's compiler over them."""

    def __init__(self, setup: Setup, tokenizer: PreTrainedTokenizerFast) -> None:
        found = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=setup.vocab_size, stop_token_ids=setup.end_ids
        )
        self.bytes = found.decoded_vocab
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special = {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}
        # A token of no bytes is never allowed. Special ones are no text, though their names would pass for some.
        plain = [b"" if token in special else text for token, text in enumerate(self.bytes)]
        info = xgrammar.TokenizerInfo(
            plain,
            xgrammar.VocabType.RAW,
            vocab_size=setup.vocab_size,
            stop_token_ids=setup.end_ids,
            add_prefix_space=found.add_prefix_space,
        )
        self.compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
