"""Prompts for filling in the middle: each family's tokens and order, and nothing of the user's text in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quire import LLM, PoolingParams, SamplingParams
from quire.api.fill_in_middle import FORMS, FillInMiddle
from quire.errors import ValidationError
from tests.conftest import tiny_tokenizer

PREFIX, SUFFIX = "def f(a):\n  ", "\n  return the"
QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


def with_tokens(*names: str) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(names)})
    return tokenizer


def metaspace_tokenizer(*names: str) -> Any:
    """One that puts a space before every text, and <s> before that, as those of Llama and Mistral."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    characters = ["▁", "☺", "\n", *map(chr, range(0x21, 0x7F))]
    vocabulary = {text: i for i, text in enumerate(["<unk>", "<s>", "</s>", *characters, "▁r", "re"])}
    backend = Tokenizer(models.BPE(vocabulary, [("▁", "r"), ("r", "e")], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<unk>", "<s>", "</s>", *names)])
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def parts(tokenizer: Any, *names_or_ids: Any) -> list[int]:
    tokens: list[int] = []
    for part in names_or_ids:
        tokens += [tokenizer.convert_tokens_to_ids(part)] if isinstance(part, str) else part
    return tokens


def prompt_of(tokenizer: Any, prefix: str = PREFIX, suffix: str = SUFFIX, **more: Any) -> list[int]:
    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    return FillInMiddle(tokenizer, "m").prompt(encode(prefix), suffix, encode, **more)


@pytest.mark.parametrize("names", [
    QWEN,
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
])  # fmt: skip
def test_prefix_suffix_middle(names: tuple[str, str, str]) -> None:
    tokenizer = with_tokens(*names)
    before, behind = (tokenizer.encode(text, add_special_tokens=False) for text in (PREFIX, SUFFIX))
    assert prompt_of(tokenizer) == parts(tokenizer, names[0], before, names[1], behind, names[2])
    assert tokenizer.decode(prompt_of(tokenizer)) == names[0] + PREFIX + names[1] + SUFFIX + names[2]
    assert prompt_of(tokenizer, prefix="") == parts(tokenizer, names[0], names[1], behind, names[2])


def test_code_llama_has_no_space_before_the_suffix() -> None:
    tokenizer = metaspace_tokenizer("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>")
    before = tokenizer.convert_tokens_to_ids(["▁", "x", "="])
    assert prompt_of(tokenizer, "x=", "re") == parts(tokenizer, "<s>", "▁<PRE>", before, "▁<SUF>", "re", "▁<MID>")
    assert FillInMiddle(tokenizer, "m").ends == parts(tokenizer, "▁<EOT>")
    plain = prompt_of(tokenizer, "x=", "re", adds_special_tokens=False)
    assert plain == prompt_of(tokenizer, "x=", "re")[1:]


def test_codestral_has_the_suffix_first() -> None:
    tokenizer = metaspace_tokenizer("[PREFIX]", "[SUFFIX]")
    before = tokenizer.convert_tokens_to_ids(["▁", "x", "="])
    assert prompt_of(tokenizer, "x=", "re") == parts(tokenizer, "<s>", "[SUFFIX]", "re", "[PREFIX]", before)


def test_tokens_that_a_prefix_begins_with_stay_in_front() -> None:
    tokenizer = metaspace_tokenizer("[PREFIX]", "[SUFFIX]")
    given = tokenizer.encode("x=")
    made = FillInMiddle(tokenizer, "m").prompt(
        given, "re", lambda text: tokenizer.encode(text, add_special_tokens=False)
    )
    assert made == prompt_of(tokenizer, "x=", "re")


def test_parts_do_not_grow_together() -> None:
    """A mark that only the joined text would have is none: the parts are encoded apart."""
    tokenizer = with_tokens(*QWEN)
    made = prompt_of(tokenizer, prefix="<|fim_", suffix="middle|>")
    assert made.count(tokenizer.convert_tokens_to_ids("<|fim_middle|>")) == 1 == made.count(made[0])


def test_a_long_prefix_loses_its_beginning() -> None:
    tokenizer = with_tokens(*QWEN)
    whole = prompt_of(tokenizer)
    short = prompt_of(tokenizer, keep=len(whole) - 4)
    assert short == [whole[0], *whole[5:]]
    assert prompt_of(tokenizer, keep=len(whole)) == prompt_of(tokenizer, keep=None) == whole
    with pytest.raises(ValidationError, match="the suffix alone takes"):
        prompt_of(tokenizer, keep=5)


def test_every_form_is_told_from_the_others() -> None:
    for form in FORMS:
        assert FillInMiddle(with_tokens(*form.names), "m")._form is form
    with pytest.raises(ValidationError, match="the model m completes a text only at the end"):
        prompt_of(tiny_tokenizer())


def test_generate_with_a_suffix(make_llm: Callable[..., LLM], tmp_path: Any, tiny_model: Any) -> None:
    tokenizer = with_tokens(*QWEN, "<|fim_pad|>")
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=8)
    llm = make_llm()
    asked: Any = {"prompt": PREFIX, "suffix": SUFFIX}
    with pytest.raises(ValidationError, match=f"the model {tiny_model} completes a text only at the end"):
        llm.generate(asked, params, use_tqdm=False)
    llm.llm_engine.inputs.fill_in_middle = FillInMiddle(tokenizer, "m")
    (filled,) = llm.generate(asked, params, use_tqdm=False)
    assert filled.prompt_token_ids == prompt_of(tokenizer) and filled.prompt == PREFIX
    same: Any = {"prompt_token_ids": prompt_of(tokenizer)}
    (plain,) = llm.generate(same, params, use_tqdm=False)
    assert filled.outputs[0].token_ids == plain.outputs[0].token_ids
    pad = tokenizer.convert_tokens_to_ids("<|fim_pad|>")
    (ended,) = llm.generate(asked, SamplingParams(temperature=0, logit_bias={pad: 100.0}), use_tqdm=False)
    assert (ended.outputs[0].finish_reason, ended.outputs[0].stop_reason) == ("stop", pad)
    end = llm.llm_engine.inputs.eos_ids[0]
    llm.llm_engine.inputs.fill_in_middle.ends = [pad, end]
    (ended,) = llm.generate(asked, SamplingParams(temperature=0, logit_bias={end: 100.0}), use_tqdm=False)
    assert (ended.outputs[0].finish_reason, ended.outputs[0].stop_reason) == ("stop", None)
    with pytest.raises(ValidationError, match="a suffix is text"):
        llm.generate({"prompt": PREFIX, "suffix": 3}, params, use_tqdm=False)  # type: ignore[typeddict-item]
    with pytest.raises(ValidationError, match="suffix is for generation"):
        llm.encode(asked, PoolingParams())
