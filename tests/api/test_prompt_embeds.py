"""Prompts as embeddings: the embedding rows of token ids give the tokens that the ids give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from quire import LLM, SamplingParams
from quire.errors import ValidationError

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SHAPE: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
SETTINGS: dict[str, Any] = {
    "skip_tokenizer_init": True, "max_num_seqs": 4, "max_num_batched_tokens": 48, "num_gpu_blocks_override": 64,
    "dtype": "float32",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE, initializer_range=0.4)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    llm = LLM(model=str(folder), enable_prompt_embeds=True, **SETTINGS)
    yield llm
    llm.llm_engine.core.scheduler.check_idle()


def tokens_of(llm: LLM, prompts: list[Any], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]


def table(folder: Path) -> torch.Tensor:
    return AutoModelForCausalLM.from_pretrained(folder).get_input_embeddings().weight.detach()


def test_rows_of_ids_give_the_tokens_of_the_ids(llm: LLM, folder: Path) -> None:
    prompts = [np.random.default_rng(seed).integers(0, 128, length).tolist() for seed, length in ((1, 7), (2, 90))]
    by_ids = tokens_of(llm, prompts)
    rows = table(folder)
    embeds = [{"prompt_embeds": rows[prompt]} for prompt in prompts]
    assert tokens_of(llm, embeds) == by_ids
    assert tokens_of(llm, [{"prompt_embeds": rows[prompt].double().numpy()} for prompt in prompts]) == by_ids
    assert tokens_of(llm, [embeds[0], prompts[1], embeds[1], prompts[0]]) == [*by_ids, *by_ids[::-1]]
    (again,) = llm.generate([embeds[1]], GREEDY)
    assert again.num_cached_tokens == 80  # its blocks are cached under its digest


def test_prompts_of_other_embeddings_share_no_block(llm: LLM, folder: Path) -> None:
    rows = table(folder)[np.random.default_rng(3).integers(0, 128, 40)].clone()
    tokens_of(llm, [{"prompt_embeds": rows}])
    rows[5, 3] += 1e-6
    (other,) = llm.generate([{"prompt_embeds": rows}], GREEDY)
    assert other.num_cached_tokens == 0


def test_scaled_embeddings_are_given_scaled(tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = SHAPE | {"head_dim": 8, "sliding_window": 16, "num_hidden_layers": 6}
    model = Gemma3ForCausalLM(Gemma3TextConfig(**shape, initializer_range=0.4))
    model.save_pretrained(tmp_path)
    llm = LLM(model=str(tmp_path), enable_prompt_embeds=True, **SETTINGS)
    ids = np.random.default_rng(4).integers(0, 128, 60).tolist()
    rows = model.get_input_embeddings()(torch.tensor(ids)).detach()  # transformers' table scales
    assert tokens_of(llm, [{"prompt_embeds": rows}]) == tokens_of(llm, [ids])


BAD = [
    (torch.zeros(3, 31), "shape \\(3, 31\\); one row of 32"),
    (torch.zeros(32), "shape \\(32,\\)"),
    (torch.zeros(0, 32), "shape \\(0, 32\\)"),
    (torch.zeros(2, 32, dtype=torch.int64), "floating-point numbers, not torch.int64"),
    (np.zeros((2, 32), np.int32), "floating-point numbers, not int32"),
    ([[0.0] * 32], "not list"),
    (torch.full((2, 32), torch.nan), "NaN or infinite, for token 0"),
    (torch.tensor([[0.0] * 32, [0.0] * 31 + [torch.inf]]), "NaN or infinite, for token 1"),
]


@pytest.mark.parametrize(("embeds", "message"), BAD)
def test_what_is_no_prompt_is_refused(llm: LLM, embeds: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        llm.generate([{"prompt_embeds": embeds}], GREEDY)


def test_other_fields_beside_embeds_are_refused(llm: LLM) -> None:
    with pytest.raises(ValidationError, match="has no prompt_token_ids"):
        llm.generate([{"prompt_embeds": torch.zeros(2, 32), "prompt_token_ids": [1, 2]}], GREEDY)


def test_embeds_are_off_by_default(folder: Path) -> None:
    llm = LLM(model=str(folder), **SETTINGS)
    with pytest.raises(ValidationError, match="enable_prompt_embeds"):
        llm.generate([{"prompt_embeds": torch.zeros(2, 32)}], GREEDY)


def test_parts_of_chats(make_llm: Callable[..., LLM], tiny_model: Path) -> None:
    llm = make_llm(enable_prompt_embeds=True)
    rows, tokenizer = table(tiny_model), llm.get_tokenizer()
    ids = tokenizer.encode("the world", add_special_tokens=False)
    conversation = [{"role": "user", "content": "<marker>"}]
    before, after = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True).split(
        "<marker>"
    )
    whole = [token for piece in (before, ids, after) for token in (
        tokenizer.encode(piece, add_special_tokens=False) if isinstance(piece, str) else piece)]  # fmt: skip
    wanted = tokens_of(llm, [whole])
    for data in (rows[ids], rows[ids].numpy()):
        chat = [{"role": "user", "content": [{"type": "prompt_embeds", "data": data}]}]
        (output,) = llm.chat(chat, GREEDY)
        assert [list(output.outputs[0].token_ids)] == wanted
        assert output.prompt == before + after
    with pytest.raises(ValidationError, match="once and in order"):
        llm.chat(chat, GREEDY, chat_template="{% for message in messages %}fixed{% endfor %}")
    with pytest.raises(ValidationError, match="start with enable_prompt_embeds"):
        make_llm().chat(chat, GREEDY)
