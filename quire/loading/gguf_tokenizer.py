"""Builds a tokenizer from the vocabulary in a GGUF file.

GGUF only names the pre-tokenizer (`tokenizer.ggml.pre`); a table here says what each name means. A file with an
unknown name is refused: with a wrong split there is no error, only worse text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from quire.errors import CheckpointError, UnsupportedModelError
from quire.loading.gguf_header import GGUFHeader

# tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_DIGITS_BY_THREE = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_DIGITS_BY_ONE = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"


@dataclass(frozen=True)
class _PreTokenizer:
    """How text is split before BPE merges, for a byte-level vocabulary."""

    patterns: tuple[str, ...] = ()
    """Regular expressions of pieces, each applied to what the one before has split; none: GPT-2's, which is built into
    the byte-level step."""
    lone_digits: bool = False
    nfc: bool = False
    whole_words: bool = False
    """Whether a piece that is in the vocabulary becomes one token without looking at merges."""
    bos: bool = False
    """Whether BOS is added when the file does not say."""


_GPT2 = _PreTokenizer()
_SMOLLM = _PreTokenizer(lone_digits=True)
_LLAMA3 = _PreTokenizer((_DIGITS_BY_THREE,), whole_words=True, bos=True)
_QWEN2 = _PreTokenizer((_DIGITS_BY_ONE,), nfc=True)
_NEOX = _PreTokenizer(nfc=True)
_QWEN35 = _PreTokenizer(
    (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|"
        r"\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    nfc=True,
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_GPT4O = _PreTokenizer(  # the vocabulary o200k
    (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|"
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|"
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)
_TEKKEN = _PreTokenizer(
    (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|"
        r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    whole_words=True,
    bos=True,
)
_DEEPSEEK3 = _PreTokenizer(
    (
        r"\p{N}{1,3}",
        "[一-龥\u3040-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
        r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)
_UPPER_NOT_HAN, _LOWER_NOT_HAN = (f"[{letters[1:-1]}&&[^\\p{{Han}}]]" for letters in (_UPPER, _LOWER))
_KIMI = _PreTokenizer(
    (
        rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER_NOT_HAN}*{_LOWER_NOT_HAN}+{_CONTRACTIONS}?|"
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER_NOT_HAN}+{_LOWER_NOT_HAN}*{_CONTRACTIONS}?|"
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)
_GLM4 = _PreTokenizer((_DIGITS_BY_THREE,), whole_words=True)

_PRE_TOKENIZERS: Mapping[str, _PreTokenizer] = {
    "gpt-2": _GPT2,
    "gpt2": _GPT2,
    "phi-2": _GPT2,
    "jina-en": _GPT2,
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "refact": _SMOLLM,
    "command-r": _SMOLLM,
    "codeshell": _SMOLLM,
    "exaone": _SMOLLM,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "lfm2": _LLAMA3,
    "gpt-4o": _GPT4O,
    "qwen35": _QWEN35,
    "dbrx": _PreTokenizer((_DIGITS_BY_THREE,)),
    "smaug-bpe": _PreTokenizer((_DIGITS_BY_THREE,)),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "stablelm2": _PreTokenizer((_DIGITS_BY_ONE,)),
    "deepseek-v3": _DEEPSEEK3,
    "chatglm-bpe": _PreTokenizer((_DIGITS_BY_THREE,)),
    "glm4": _GLM4,
    "glm5": _GLM4,
    "tekken": _TEKKEN,
    "minimax-m2": _GPT4O,
    "kimi-k2": _KIMI,
    "pixtral": _LLAMA3,
    "olmo": _NEOX,
    "mpt": _NEOX,
}
# Files of old converters name none, or "default": the model family decides.
_PRE_TOKENIZER_OF_FAMILY: Mapping[str, _PreTokenizer] = {
    "gpt2": _GPT2,
    "gptneox": _NEOX,
    "llama": _LLAMA3,
    "qwen2": _QWEN2,
    "qwen3": _QWEN2,
}


def tokens_of(header: GGUFHeader) -> list[str]:
    """The file's vocabulary, in the order of its ids."""
    tokens = header.strings("tokenizer.ggml.tokens")
    if not tokens:
        raise CheckpointError(
            f"{header.path}: the GGUF file has no tokenizer; give the original model's folder as tokenizer"
        )
    return tokens


def tokenizer_from_gguf(header: GGUFHeader, tokens: list[str]) -> Tokenizer:
    """The tokenizer that a GGUF file describes."""
    kind = header.text("tokenizer.ggml.model")
    types = _types(header, len(tokens))
    if kind == "gpt2":
        tokenizer = _byte_level(header, tokens)
    elif kind == "llama":
        tokenizer = _sentencepiece(header, tokens, types)
    elif kind == "gemma4":
        tokenizer = _gemma4(header, tokens)
    else:
        raise UnsupportedModelError(
            f"{header.path}: tokenizer model {kind!r} is not supported ('gpt2', 'llama' and 'gemma4' are); "
            "give the original model's tokenizer folder instead"
        )
    _add_special(tokenizer, tokens, types)
    return tokenizer


def _types(header: GGUFHeader, count: int) -> list[int]:
    types = header.numbers("tokenizer.ggml.token_type")
    if types is None:
        return [1] * count
    if len(types) != count:
        raise CheckpointError(f"{header.path}: {len(types)} token types for {count} tokens")
    return types.tolist()


def _pre_tokenizer(header: GGUFHeader) -> _PreTokenizer:
    name = header.text("tokenizer.ggml.pre", "default")
    if name in _PRE_TOKENIZERS:
        return _PRE_TOKENIZERS[name]
    if name in ("default", "") and header.architecture in _PRE_TOKENIZER_OF_FAMILY:
        return _PRE_TOKENIZER_OF_FAMILY[header.architecture]
    raise UnsupportedModelError(
        f"{header.path}: the pre-tokenizer {name!r} is not known ({', '.join(sorted(_PRE_TOKENIZERS))} are); "
        "give the original model's tokenizer folder instead"
    )


def _byte_level(header: GGUFHeader, tokens: list[str]) -> Tokenizer:
    split = _pre_tokenizer(header)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(_bpe(header, vocabulary, _merges(header), ignore_merges=split.whole_words))
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in split.patterns
    ]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split.patterns))
    if split.lone_digits:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _merges(header: GGUFHeader) -> list[tuple[str, str]]:
    pieces = [merge.split(" ") for merge in header.strings("tokenizer.ggml.merges") or []]
    if any(len(piece) != 2 for piece in pieces):
        raise CheckpointError(f"{header.path}: tokenizer.ggml.merges has entries that are not pairs")
    return [(left, right) for left, right in pieces]


def _gemma4(header: GGUFHeader, tokens: list[str]) -> Tokenizer:
    """Merges over whole texts, as in SentencePiece: spaces are a character of their own, and characters without a
    token are bytes."""
    vocabulary = {token: number for number, token in enumerate(tokens)}
    unknown = special_token(header, tokens, "unknown")
    model = _bpe(header, vocabulary, _merges(header), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def _bpe(
    header: GGUFHeader, vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: object
) -> models.BPE:
    try:
        return models.BPE(vocabulary, merges, **options)
    except Exception as error:  # The tokenizers library raises plain Exception.
        raise CheckpointError(f"{header.path}: the tokenizer's merges do not fit its vocabulary: {error}") from error


def _sentencepiece(header: GGUFHeader, tokens: list[str], types: list[int]) -> Tokenizer:
    scores = header.numbers("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise CheckpointError(f"{header.path}: tokenizer.ggml.scores is missing or not one per token")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    unknown = header.integer("tokenizer.ggml.unknown_token_id", types.index(_UNKNOWN) if _UNKNOWN in types else 0)
    model = _bpe(
        header,
        vocabulary,
        _merges_from_scores(tokens, types, scores.tolist(), vocabulary),
        unk_token=tokens[unknown] if 0 <= unknown < len(tokens) else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    prefix = header.flag("tokenizer.ggml.add_space_prefix", True)
    spaces = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    return tokenizer


def _merges_from_scores(
    tokens: list[str], types: list[int], scores: list[float], vocabulary: Mapping[str, int]
) -> list[tuple[str, str]]:
    """SentencePiece merges the neighbours that form the piece of the highest score. As a list of merges: every split
    of each piece into two known ones, best piece first."""
    mergeable = [n for n, kind in enumerate(types) if kind not in (_UNKNOWN, _CONTROL, _BYTE) and len(tokens[n]) > 1]
    merges: list[tuple[str, str]] = []
    for number in sorted(mergeable, key=lambda n: (-scores[n], n)):
        piece = tokens[number]
        halves = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
        known = [pair for pair in halves if pair[0] in vocabulary and pair[1] in vocabulary]
        merges.extend(sorted(known, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]])))
    return merges


def _add_special(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    typed = list(zip(tokens, types, strict=True))
    special = [token for token, kind in typed if kind == _CONTROL and token]
    plain = [token for token, kind in typed if kind == _USER_DEFINED and token]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in plain])


def adds_bos_eos(header: GGUFHeader) -> tuple[bool, bool]:
    """Whether BOS is added before each text, and EOS after it."""
    bos = header.text("tokenizer.ggml.model") in ("llama", "gemma4") or _pre_tokenizer(header).bos
    return header.flag("tokenizer.ggml.add_bos_token", bos), header.flag("tokenizer.ggml.add_eos_token", False)


def special_token(header: GGUFHeader, tokens: list[str], role: str) -> str | None:
    """The token with a role (bos, eos, unknown, padding), or None when the file names none."""
    number = header.integer(f"tokenizer.ggml.{role}_token_id")
    if number is None:
        return None
    if not 0 <= number < len(tokens):
        raise CheckpointError(f"{header.path}: {role}_token_id is {number}, but there are {len(tokens)} tokens")
    return tokens[number]
