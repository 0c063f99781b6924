"""The model's tokens as grammars see them: each one a run of bytes."""

from __future__ import annotations

import xgrammar

from quire.engine.grammar.wire import Setup
from quire.loading.files import ModelFiles
from quire.loading.tokenizer import load_tokenizer


class GrammarVocabulary:
    """Bytes of every token, and the library's compiler over them."""

    def __init__(self, setup: Setup) -> None:
        tokenizer = load_tokenizer(
            ModelFiles.from_plain(setup.files) if setup.tokenizer is None else setup.tokenizer,
            trust_remote_code=setup.trust_remote_code,
            revision=setup.revision,
        )
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
