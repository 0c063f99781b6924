"""Tokenizers built from GGUF metadata, against the original models' ids and transformers' own conversion."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from quire.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError
from quire.loading.gguf_tokenizer import _PRE_TOKENIZERS
from quire.loading.tokenizer import load_tokenizer

Write = Callable[..., Path]

# Ids that another project's independent SmolLM2 tokenizer checks itself against.
SMOLLM2 = {
    "Hello, we can use": [19556, 28, 392, 416, 722],
    "The capital of France is": [504, 3575, 282, 4649, 314],
    "Hello world! 123": [19556, 905, 17, 216, 33, 34, 35],
    "Café déjà vu.": [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30],
    "  multiple   spaces": [216, 2701, 256, 5600],
    "\n": [198],
}

TEXTS = [
    "2024-01-05 costs $3,499.99 and 1 000 000",
    "   leading\n\n\ttabs  \r\n  ",
    "日本語のテキスト 中文 Привет",
    "😀👩‍👩‍👧 emoji e\u0301 é \u200b",
    "def f(x):\n    return x**2  # code\n\n\n",
    "<|im_start|>user\nhi<|im_end|>\n<file_sep>x",
    "don't I'LL we've a" + "a" * 50,
    "",
]


def test_the_default_models_ids_are_the_originals(default_model: Path) -> None:
    tokenizer = load_tokenizer(default_model)
    for text, ids in SMOLLM2.items():
        assert tokenizer(text)["input_ids"] == ids, text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id) == (
        1,
        2,
        2,
        0,
    )
    assert len(tokenizer) == 49152 and tokenizer.model_max_length == 8192
    assert tokenizer("<|im_start|>a")["input_ids"][0] == 1
    assert tokenizer.decode([1, 19556, 2], skip_special_tokens=True) == "Hello"


def test_the_default_model_agrees_with_transformers_conversion(default_model: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(default_model.parent, gguf_file=default_model.name)
    ours = load_tokenizer(default_model)
    rng = random.Random(0)
    letters = [chr(c) for c in (*range(32, 127), 9, 10, 13, 0xE9, 0x301, 0x4E2D, 0x1F600)]
    for text in TEXTS + ["".join(rng.choices(letters, k=40)) for _ in range(300)]:
        ids = ours(text)["input_ids"]
        assert ids == theirs(text)["input_ids"], text
        assert ours.decode(ids) == text
    messages = [{"role": "user", "content": "hi 42"}]
    ask = {"add_generation_prompt": True, "tokenize": False}
    assert ours.apply_chat_template(messages, **ask) == theirs.apply_chat_template(messages, **ask)


def test_digits_of_every_script_are_split_as_in_the_original(default_model: Path) -> None:
    """transformers' conversion differs here: it drops SmolLM2's digit split, visible with digits beyond ASCII."""
    tokenizer = load_tokenizer(default_model)
    assert tokenizer.convert_ids_to_tokens(tokenizer(" ½")["input_ids"]) == ["Ġ", "Â½"]


ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def bpe(
    pre: str | None, merges: list[str], special: dict[str, int] | None = None, bos: bool | None = None
) -> Callable[..., None]:
    special = special or {}
    tokens = [*ALPHABET, *dict.fromkeys(merge.replace(" ", "") for merge in merges), *special]

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        if pre is not None:
            writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types([special.get(token, 1) for token in tokens])
        writer.add_token_merges(merges)
        if special:
            writer.add_bos_token_id(len(tokens) - 1)
        if bos is not None:
            writer.add_add_bos_token(bos)

    return add


DIGITS = ["1 2", "12 3", "123 4", "Ġ 1", "h i", "e Ì"]


@pytest.mark.parametrize(
    ("pre", "arch", "expected"),
    [
        ("gpt-2", "gpt2", ["Ġ1", "2", "3", "4"]),
        ("smollm", "llama", ["Ġ", "1", "2", "3", "4"]),
        ("qwen2", "qwen2", ["Ġ", "1", "2", "3", "4"]),
        ("qwen35", "qwen35", ["Ġ", "1", "2", "3", "4"]),
        ("llama-bpe", "llama", ["Ġ", "123", "4"]),
        ("lfm2", "lfm2", ["Ġ", "123", "4"]),
        ("gpt-4o", "gpt-oss", ["Ġ", "123", "4"]),
        (None, "qwen3", ["Ġ", "1", "2", "3", "4"]),
        ("default", "gpt2", ["Ġ1", "2", "3", "4"]),
    ],
)
def test_each_pre_tokenizer_splits_digits_its_own_way(
    write_gguf: Write, pre: str | None, arch: str, expected: list[str]
) -> None:
    merges = ["Ġ 1", *[merge for merge in DIGITS if merge != "Ġ 1"]] if pre in ("gpt-2", "default") else DIGITS
    tokenizer = load_tokenizer(write_gguf({}, arch=arch, extra=bpe(pre, merges)))
    assert tokenizer.convert_ids_to_tokens(tokenizer(" 1234")["input_ids"]) == expected
    assert tokenizer.decode(tokenizer("hi 1234\n\n  é")["input_ids"]) == "hi 1234\n\n  é"


def test_words_are_split_as_in_the_originals() -> None:
    from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX

    assert _PRE_TOKENIZERS["qwen35"].patterns == (PRETOKENIZE_REGEX,)

    def split(pre: str, text: str) -> list[str]:
        steps = [pre_tokenizers.Split(Regex(each), "isolated") for each in _PRE_TOKENIZERS[pre].patterns]
        return [piece for piece, _ in pre_tokenizers.Sequence(steps).pre_tokenize_str(text)]

    # o200k begins a word at a capital letter, and keeps contractions with their word; Tekken does not.
    assert split("gpt-4o", "HTTPServer isn't a/b") == ["HTTPServer", " isn't", " a", "/b"]
    assert split("gpt-4o", "camelCase 12345\n/") == ["camel", "Case", " ", "123", "45", "\n", "/"]
    assert split("tekken", "camelCase isn't 12\n/") == ["camel", "Case", " isn", "'t", " ", "1", "2", "\n", "/"]
    # DeepSeek V3 splits digits first, then Chinese and Japanese, and lets words begin with a sign.
    assert split("deepseek-v3", "_x a12345\u4e2d\u6587 (y) z\n") == [
        "_x", " a", "123", "45", "\u4e2d\u6587", " (", "y", ")", " z", "\n",
    ]  # fmt: skip
    assert split("kimi-k2", "Hello\u4e2d\u6587abc isn't 1234\u65e5\u672c\u30c6\u30ad\n") == [
        "Hello", "\u4e2d\u6587", "abc", " isn't", " ", "123", "4", "\u65e5\u672c", "\u30c6\u30ad", "\n",
    ]  # fmt: skip
    assert split("glm4", "We'LL 12345 x") == ["We", "'LL", " ", "123", "45", " x"]


def test_gemma_4_merges_whole_texts_and_falls_back_to_bytes(write_gguf: Write) -> None:
    """As transformers' tokenizer of the same vocabulary and merges."""
    transformers = pytest.importorskip("transformers")
    merges = ["\n \n", "h i", "\u2581 hi", "a \u2581", "a\u2581 \u2581hi", "\u2581 \u2581"]
    letters = ["\u2581", "\n", "h", "i", "a", "e"]
    made = [*letters, *(merge.replace(" ", "") for merge in merges)]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", *[f"<0x{byte:02X}>" for byte in range(256)], *made]

    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gemma4")
        writer.add_token_list(tokens)
        writer.add_token_types([3, 3, 3, 3, 4, *[6] * 256, *[1] * len(made)])
        writer.add_token_merges(merges)
        writer.add_bos_token_id(2)
        writer.add_unk_token_id(3)

    tokenizer = load_tokenizer(write_gguf({}, extra=extra))
    pairs = [tuple(merge.split(" ")) for merge in merges]
    theirs = transformers.GemmaTokenizer(vocab={token: n for n, token in enumerate(tokens)}, merges=pairs)
    theirs.add_tokens(["<|turn>"])
    for text in ("hi  hi", "a hi\n\n\nhi", "ha \u00e9\u4e2d i", "  a", "hi <|turn>hi", ""):
        ids = tokenizer(text)["input_ids"]
        assert ids == [2, *theirs(text, add_special_tokens=False)["input_ids"]], text
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_special_and_user_defined_tokens_and_bos(write_gguf: Write) -> None:
    special = {"<tool>": 4, "<|end|>": 3, "<s>": 3}
    path = write_gguf({}, extra=bpe("llama-bpe", DIGITS, special))
    tokenizer = load_tokenizer(path)
    ids = tokenizer("hi<tool><|end|>")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["<s>", "hi", "<tool>", "<|end|>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hi<tool>"
    assert tokenizer("hi", add_special_tokens=False)["input_ids"] == ids[1:2]
    tokenizer = load_tokenizer(write_gguf({}, extra=bpe("llama-bpe", DIGITS, special, bos=False), name="n.gguf"))
    assert tokenizer("hi")["input_ids"] == ids[1:2]


def sentencepiece(writer: gguf.GGUFWriter) -> None:
    pieces = ["▁", "h", "e", "l", "o", "▁h", "el", "lo", "▁hel", "▁hello"]
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], *pieces]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * len(pieces)])
    writer.add_token_scores([0.0] * 259 + [-1.0 * n for n in range(len(pieces))])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def test_sentencepiece_vocabularies_merge_by_score_and_fall_back_to_bytes(write_gguf: Write) -> None:
    tokenizer = load_tokenizer(write_gguf({}, extra=sentencepiece))
    ids = tokenizer("hello é")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["<s>", "▁hello", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello é"


def test_what_cannot_be_built_is_refused(write_gguf: Write, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no tokenizer; give"):
        load_tokenizer(write_gguf({}))
    with pytest.raises(UnsupportedModelError, match="pre-tokenizer 'martian' is not known"):
        load_tokenizer(write_gguf({}, extra=bpe("martian", DIGITS), name="a.gguf"))
    with pytest.raises(UnsupportedModelError, match="'bert' is not supported"):
        load_tokenizer(
            write_gguf({}, extra=lambda w: (w.add_tokenizer_model("bert"), w.add_token_list(["a"])), name="b.gguf")
        )
    with pytest.raises(CheckpointError, match="not pairs"):
        load_tokenizer(write_gguf({}, extra=bpe("gpt-2", ["a b c"]), name="c.gguf"))

    def unknown_merge(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(["a", "b"])
        writer.add_token_merges(["a zz"])
        writer.add_bos_token_id(77)

    with pytest.raises(CheckpointError, match="do not fit"):
        load_tokenizer(write_gguf({}, extra=unknown_merge, name="d.gguf"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    with pytest.raises(ModelNotFoundError, match="has no tokenizer"):
        load_tokenizer(tmp_path / "empty")


def test_a_folders_tokenizer_loads_without_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Tokenizer(models.BPE({token: n for n, token in enumerate(ALPHABET)}, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.save(str(tmp_path / "tokenizer.json"))

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the network was touched")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert load_tokenizer(tmp_path)("hi")["input_ids"] == [ALPHABET.index("h"), ALPHABET.index("i")]


def test_code_in_a_tokenizers_folder_runs_only_with_trust_remote_code(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "custom"}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["evil.T", None]}}))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass T: pass\n")
    with pytest.raises((UnsupportedModelError, CheckpointError)):
        load_tokenizer(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_tokenizer_that_cannot_be_read_runs_no_code_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The config is read to explain the error: transformers would ask at the terminal whether to run its code."""
    config = {"model_type": "of-its-own", "auto_map": {"AutoConfig": "own_code.OwnConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own_code.py").write_text("raise SystemExit('code of the model has run')")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (tmp_path / "tokenizer.json").write_text("{")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(CheckpointError, match="the tokenizer in .* cannot be loaded"):
        load_tokenizer(str(tmp_path))
