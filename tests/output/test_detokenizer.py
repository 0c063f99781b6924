"""Incremental detokenization equals decoding all tokens at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.loading.hub import DEFAULT_MODEL, resolve
from quire.loading.tokenizer import load_tokenizer
from quire.output.detokenizer import ByteDetokenizer, Vocabulary, WindowDetokenizer
from tests.conftest import tiny_tokenizer

TEXTS = [
    "Hello, world!", "  two  spaces ", "naïve café — “quotes”", "日本語のテキスト、漢字とかな", "🙂🚀👩‍👩‍👧 emojis 🏳️‍🌈",
    "Привет мир", "नमस्ते", "مرحبا بالعالم", "def f(x):\n\treturn x\n\n", "a\u0301 combining",
    "\U0001f9ff\u4f60", "���", "\x00\x01",
]  # fmt: skip


@pytest.fixture(scope="module")
def real() -> Vocabulary:
    return Vocabulary(load_tokenizer(resolve(DEFAULT_MODEL, progress=False)))


def pieces(vocabulary: Vocabulary, tokens: list[int], prompt: list[int] = [], skip: bool = True) -> list[str]:  # noqa: B006
    detokenizer = vocabulary.detokenizer(prompt, skip)
    return [*(detokenizer.push([token]) for token in tokens), detokenizer.flush()]


class TestByteLevel:
    """The default model's tokenizer: every token is a sequence of bytes."""

    def test_it_is_recognised(self, real: Vocabulary) -> None:
        assert isinstance(real.detokenizer([], True), ByteDetokenizer)

    @pytest.mark.parametrize("text", TEXTS)
    def test_texts_round_trip(self, real: Vocabulary, text: str) -> None:
        tokens = real.tokenizer.encode(text)
        assert "".join(pieces(real, tokens)) == text

    @settings(max_examples=300, deadline=None)
    @given(data=st.data())
    def test_random_tokens_decode_as_at_once(self, real: Vocabulary, data: st.DataObject) -> None:
        """Including bytes that are not UTF-8, parts of characters and special tokens."""
        odd = data.draw(st.lists(st.integers(0, len(real.tokenizer) - 1), max_size=12))
        text = data.draw(st.text(max_size=8))
        tokens = odd + real.tokenizer.encode(text) + data.draw(st.lists(st.integers(0, 400), max_size=12))
        for skip in (True, False):
            whole = real.tokenizer.decode(tokens, skip_special_tokens=skip)
            assert "".join(pieces(real, tokens, skip=skip)) == whole

    def test_a_character_split_over_tokens_appears_whole(self, real: Vocabulary) -> None:
        tokens = real.tokenizer.encode("🧿")
        assert len(tokens) > 1
        assert pieces(real, tokens) == [""] * (len(tokens) - 1) + ["🧿", ""]

    def test_an_incomplete_character_becomes_a_replacement_character(self, real: Vocabulary) -> None:
        tokens = real.tokenizer.encode("🧿")[:-1]
        assert "".join(pieces(real, tokens)) == real.tokenizer.decode(tokens) == "�"

    def test_special_tokens_are_shown_only_on_request(self, real: Vocabulary) -> None:
        start, end = real.tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
        tokens = [start, *real.tokenizer.encode("hi"), end]
        assert "".join(pieces(real, tokens, skip=True)) == "hi"
        assert "".join(pieces(real, tokens, skip=False)) == "<|im_start|>hi<|im_end|>"

    def test_every_special_token_of_the_vocabulary_is_skipped_as_transformers_skips_it(self, real: Vocabulary) -> None:
        for token in sorted(real.tokenizer.added_tokens_decoder):
            expected = real.tokenizer.decode([token], skip_special_tokens=True)
            assert "".join(pieces(real, [token])) == expected, token

    def test_ids_beyond_the_vocabulary_have_no_text(self, real: Vocabulary) -> None:
        assert "".join(pieces(real, [len(real.tokenizer) + 5])) == ""

    def test_many_tokens_at_once_or_one_by_one(self, real: Vocabulary) -> None:
        tokens = real.tokenizer.encode("".join(TEXTS))
        at_once = real.detokenizer([], True)
        assert at_once.push(tokens) + at_once.flush() == "".join(pieces(real, tokens))

    @pytest.mark.parametrize("token", [0, 1, 33, 200, 4000, 49151])
    def test_single_tokens_decode_as_in_transformers(self, real: Vocabulary, token: int) -> None:
        assert real.text_of(token) == real.tokenizer.decode([token])

    def test_the_tiny_tokenizer_too(self) -> None:
        vocabulary = Vocabulary(tiny_tokenizer())
        tokens = vocabulary.tokenizer.encode("hello the world\nin <|user|>")
        for skip in (True, False):
            assert "".join(pieces(vocabulary, tokens, skip=skip)) == vocabulary.tokenizer.decode(
                tokens, skip_special_tokens=skip
            )


def sentencepiece_like() -> Any:
    """Like Llama 2's: ▁ for spaces, single bytes for characters without a token, the first space dropped."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocabulary |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz.,é"]
    words = ["▁h", "▁he", "▁hel", "▁hell", "▁hello", "▁w", "▁wo", "▁wor", "▁worl", "▁world", "▁▁", "in", "▁a"]
    for text in [*letters, *words]:
        vocabulary[text] = len(vocabulary)
    merges = [(word[:-1], word[-1]) for word in words]
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<unk>", "<s>", "</s>")])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(sentencepiece_like())


class TestWindow:
    """Any other tokenizer: decoding depends on the preceding tokens."""

    def test_it_is_recognised(self, vocabulary: Vocabulary) -> None:
        assert isinstance(vocabulary.detokenizer([], True), WindowDetokenizer)

    @pytest.mark.parametrize(
        "text",
        [
            "hello world",
            "hello  world in a",
            "你好 world",
            "你好世界你好世界你好",
            "🙂🚀🙂🚀 a",
            "hello 🧿.",
            "é",
            "a" * 30,
            " x",
        ],
    )
    def test_output_after_a_prompt_is_the_rest_of_the_whole_text(self, vocabulary: Vocabulary, text: str) -> None:
        tokens = vocabulary.tokenizer.encode(text, add_special_tokens=False)
        whole = vocabulary.tokenizer.decode(tokens)
        for split in range(len(tokens) + 1):
            prompt, output = tokens[:split], tokens[split:]
            before = vocabulary.tokenizer.decode(prompt)
            if "�" not in before:  # a prompt that ends inside a character has no text of its own
                assert before + "".join(pieces(vocabulary, output, prompt)) == whole

    @settings(max_examples=200, deadline=None)
    @given(data=st.data())
    def test_random_words_and_characters(self, vocabulary: Vocabulary, data: st.DataObject) -> None:
        words = st.sampled_from(["hello", "world", " ", "  ", "in", "é", "你", "🙂", "zq.", "a"])
        text = "".join(data.draw(st.lists(words, min_size=1, max_size=30)))
        tokens = vocabulary.tokenizer.encode(text, add_special_tokens=False)
        assert "".join(pieces(vocabulary, tokens)) == vocabulary.tokenizer.decode(tokens)

    @settings(max_examples=200, deadline=None)
    @given(tokens=st.lists(st.integers(0, 300), max_size=40))
    def test_any_tokens_give_text_and_no_error(self, vocabulary: Vocabulary, tokens: list[int]) -> None:
        got = pieces(vocabulary, tokens)
        assert all("�" not in piece or len(piece) <= 40 for piece in got)

    def test_special_tokens_are_skipped_and_do_not_join_words(self, vocabulary: Vocabulary) -> None:
        encode = vocabulary.tokenizer.encode
        tokens = [*encode("hello", add_special_tokens=False), 2, *encode("world", add_special_tokens=False)]
        assert "".join(pieces(vocabulary, tokens)) == "hello world"

    def test_a_lone_byte_is_held_and_then_becomes_a_replacement_character(self, vocabulary: Vocabulary) -> None:
        byte = vocabulary.tokenizer.convert_tokens_to_ids("<0xF0>")
        assert pieces(vocabulary, [byte]) == ["", "�"]

    def test_it_decodes_a_short_window_however_long_the_text(self, vocabulary: Vocabulary) -> None:
        lengths: list[int] = []

        class Watching:
            def decode(self, tokens: list[int], **options: Any) -> str:
                lengths.append(len(tokens))
                return vocabulary.tokenizer.decode(tokens, **options)

        detokenizer = WindowDetokenizer(Watching(), [], frozenset(), True, {})
        tokens = vocabulary.tokenizer.encode("hello world " * 100, add_special_tokens=False)
        text = "".join(detokenizer.push([token]) for token in tokens) + detokenizer.flush()
        assert text == vocabulary.tokenizer.decode(tokens)
        assert max(lengths) < 20
        assert len(lengths) < 1.1 * len(tokens), "once a token: what stood before it is known"


def test_tokenizers_of_gguf_files_and_folders(tiny_model: Path) -> None:
    vocabulary = Vocabulary(load_tokenizer(str(tiny_model)))
    assert "".join(pieces(vocabulary, vocabulary.tokenizer.encode("the world"))) == "the world"
