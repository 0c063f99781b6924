"""Shared fixtures: a tiny model, engines of it and of the default model, and a check that nothing leaks."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

# Before anything imports triton: it decides at import whether its kernels run in the interpreter.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from quire import LLM
from tests.units import pytest_collection_modifyitems, pytest_xdist_make_scheduler  # noqa: F401 - pytest calls them

# A parent that started us in the background may have set Ctrl-C to be ignored, also for our child processes.
signal.signal(signal.SIGINT, signal.default_int_handler)

ENDS = "</s>"
LOGGERS = ("quire", "uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi")
SPECIALS = ("<s>", ENDS, "<|user|>", "<|assistant|>")
# Words of the tiny vocabulary; Ġ is how byte-level vocabularies write a space, Ċ a line break.
MERGES = ("h e", "t he", "Ġ the", "i n", "a n", "Ġ a", "e r", "o n", "Ġ s", "r e", "Ġ w", "o r", "Ġw or", "l d", "Ġ x")
TINY_VOCAB = 128
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ('user', 'assistant') %}{{ raise_exception('unknown role') }}{% endif %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_tokenizer() -> Any:
    """A byte-level tokenizer of printable ASCII, a few words and four special tokens: 116 tokens in all."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = ["Ġ", "Ċ", *map(chr, range(0x21, 0x7F))]
    words = ["".join(merge.split()) for merge in MERGES]
    vocabulary = {text: i for i, text in enumerate([*SPECIALS, *characters, *words])}
    backend = Tokenizer(models.BPE(vocabulary, [tuple(merge.split()) for merge in MERGES]))  # type: ignore[misc]
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token=ENDS,
        additional_special_tokens=["<|user|>", "<|assistant|>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def write_tiny_model(folder: Path, **changes: Any) -> Path:
    """A random two-layer Llama of 256 positions with its tokenizer, as in a Hub repository."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(20)
    config = LlamaConfig(
        vocab_size=TINY_VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False, bos_token_id=0, eos_token_id=1,
        initializer_range=0.35, **changes,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    (folder / "generation_config.json").write_text(
        json.dumps({"temperature": 0.6, "top_k": 40, "top_p": 0.9, "max_new_tokens": 7, "eos_token_id": [1, 3]})
    )
    return folder


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    """Commands set up logging for the whole process; restore it after each test."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(list(logger.handlers), logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's folder."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def assert_idle(llm: LLM) -> None:
    """Nothing is queued or running, and all blocks and rows are free."""
    assert llm.llm_engine.get_num_unfinished_requests() == 0
    llm.llm_engine.check_idle()


@pytest.fixture
def make_llm(tiny_model: Path) -> Iterator[Callable[..., LLM]]:
    """Makes engines with the given settings (default: the tiny model); checked and shut down after the test."""
    made: list[LLM] = []

    def make(model: str | Path = tiny_model, **settings: Any) -> LLM:
        settings = {"dtype": "float32", "num_gpu_blocks_override": 128, "device": "cpu", **settings}
        made.append(LLM(str(model), **settings))
        return made[-1]

    yield make
    for llm in made:
        assert_idle(llm)
        llm.shutdown()


@pytest.fixture(scope="session")
def shared_tiny(tiny_model: Path) -> Iterator[LLM]:
    with LLM(str(tiny_model), dtype="float32", num_gpu_blocks_override=128, device="cpu") as llm:
        yield llm


@pytest.fixture
def llm(shared_tiny: LLM) -> Iterator[LLM]:
    """The tiny model's engine, with an empty prefix cache; checked to be idle after the test."""
    shared_tiny.reset_prefix_cache()
    yield shared_tiny
    assert_idle(shared_tiny)


@pytest.fixture(scope="session")
def shared_smollm() -> Iterator[LLM]:
    settings = {"dtype": "float32", "num_gpu_blocks_override": 384, "device": "cpu", "max_model_len": 2048}
    with LLM(cpu_weights="dense", **settings) as llm:  # whose tokens are those of the dequantized model
        yield llm


@pytest.fixture
def smollm(shared_smollm: LLM) -> Iterator[LLM]:
    """The default model's engine, for tests where the text matters; checked to be idle after the test."""
    shared_smollm.reset_prefix_cache()
    yield shared_smollm
    assert_idle(shared_smollm)
