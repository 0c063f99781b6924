"""Long texts: the same tokens as a tokenizer gives, and bounded work for those that cannot fit."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

from quire.api import text_encoding
from quire.api.text_encoding import TextEncoder
from quire.config import EngineConfig
from quire.errors import ValidationError
from quire.loading.hub import find_model
from quire.loading.tokenizer import tokenizer_of
from tests.conftest import tiny_tokenizer

WORDS = ["the", "world", "naïve", "日本語", "😀", "x", "  ", "\n\n", "def f(a, b):", "1234567", "…", "é" * 9]


def text_of(size: int, seed: int = 0) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(size))


class Counting:
    """A tokenizer that counts the characters it was given."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.characters = 0

    def encode(self, text: str, **options: Any) -> list[int]:
        self.characters += len(text)
        ids: list[int] = self._tokenizer.encode(text, **options)
        return ids

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


@pytest.fixture(scope="module")
def real() -> Any:
    config = EngineConfig()
    return tokenizer_of(config, find_model(config))


def metaspace() -> Any:
    """A tokenizer whose decoder drops the space before the first word."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "▁", "▁the", "▁world", "the", *map(chr, range(0x21, 0x7F))]
    backend = Tokenizer(models.Unigram([(piece, -float(len(pieces) - i)) for i, piece in enumerate(pieces)], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", clean_up_tokenization_spaces=False)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits small enough to be reached by short texts."""
    for name, value in (
        ("SHORT_CHARACTERS", 64), ("PIECE_CHARACTERS", 256), ("WHOLE_BYTES", (512, 1024)), ("PIECE_TOKENS", 80),
    ):  # fmt: skip
        monkeypatch.setattr(text_encoding, name, value)


@pytest.mark.usefixtures("small_pieces")
class TestExactness:
    def test_a_text_in_pieces_has_the_tokens_of_the_whole(self, real: Any) -> None:
        text = text_of(800)
        assert TextEncoder(real, 100_000).encode(text) == real.encode(text)

    def test_the_end_of_a_text(self, real: Any) -> None:
        for seed in range(20):
            text = text_of(1500, seed)
            encoder = Counting(real)
            for keep in (1, 10, 200):
                assert TextEncoder(encoder, 4096).encode_end(text, keep)[-keep:] == real.encode(text)[-keep:]
            assert encoder.characters < 3 * len(text)
        assert TextEncoder(real, 4096).encode_end("the world", 10) == real.encode("the world")

    def test_the_start_of_a_text(self, real: Any) -> None:
        for seed in range(20):
            text = text_of(1500, seed)
            assert TextEncoder(real, 4096).encode_start(text, 100, "input")[:100] == real.encode(text)[:100]

    @pytest.mark.parametrize("name", ["real", "tiny", "metaspace"])
    def test_decoding_in_pieces(self, name: str, real: Any) -> None:
        tokenizer = {"real": lambda: real, "tiny": tiny_tokenizer, "metaspace": metaspace}[name]()
        rng = random.Random(3)
        tokens = tokenizer.encode(text_of(600) if name == "real" else "the world " * 300)
        shuffled = [rng.choice(tokens) for _ in range(2000)]  # characters cut apart
        for ids in (tokens, shuffled, [7] * 1000):
            assert TextEncoder(tokenizer, 4096).decode(ids) == tokenizer.decode(ids)


class TestBounds:
    def test_a_text_that_is_far_too_long_is_not_tokenized(self, real: Any) -> None:
        encoder = Counting(real)
        with pytest.raises(ValidationError, match=r"maximum context length is 256 tokens.*3000000 characters"):
            TextEncoder(encoder, 256).encode("a" * 3_000_000)
        assert encoder.characters == 0

    def test_a_text_that_may_fit_is_counted_until_it_does_not(self, real: Any) -> None:
        """The longest token has 81 characters, so 600,000 may be 8,192 tokens; they are 150,000."""
        encoder = Counting(real)
        with pytest.raises(ValidationError, match="more than [0-9]+ tokens"):
            TextEncoder(encoder, 8192).encode("abcd" * 150_000)
        assert encoder.characters <= text_encoding.PIECE_CHARACTERS

    def test_a_text_with_few_tokens_fits(self, real: Any) -> None:
        text = " " * 300_000
        assert TextEncoder(real, 8192).encode(text) == real.encode(text)

    def test_only_the_end_of_a_long_text_is_tokenized(self, real: Any) -> None:
        encoder = Counting(real)
        assert len(TextEncoder(encoder, 8192).encode_end("the world " * 800_000, 8191)) >= 8191
        assert encoder.characters <= 1 << 17

    def test_counting_stops_when_the_caller_has_left(self, real: Any) -> None:
        from quire.api import work_pool

        encoder = Counting(real)
        job = type("Job", (), {"is_abandoned": True})()

        def work() -> None:
            work_pool._current.job = job
            with pytest.raises(work_pool.AbandonedError):
                TextEncoder(encoder, 8192).encode(" " * 600_000)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert encoder.characters == text_encoding.PIECE_CHARACTERS
