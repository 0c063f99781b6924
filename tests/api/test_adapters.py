"""LoRA adapters from Python: vLLM's `LoRARequest`, one for all prompts, one each, or several that add up."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, AsyncLLM, LoRARequest, SamplingParams
from quire.errors import AdapterError, QuireError, ValidationError
from quire.exceptions import LoRAAdapterNotFoundError
from tests.adapters.beside import Beside
from tests.adapters.folders import write
from tests.conftest import assert_idle

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT = [5, 9, 20, 33, 40, 41, 7]
SETTINGS: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 64, "device": "cpu", "enable_lora": True}


@pytest.fixture(scope="module")
def beside(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Beside:
    made = Beside(tiny_model, tmp_path_factory.mktemp("adapters"))
    made.write("sql", target_modules=["q_proj", "v_proj"])
    made.write("poet", target_modules="all-linear", lora_alpha=16)
    return made


@pytest.fixture(scope="module")
def shared(tiny_model: Path) -> Iterator[LLM]:
    with LLM(str(tiny_model), max_loras=2, **SETTINGS) as llm:
        yield llm


@pytest.fixture
def adapted(shared: LLM) -> Iterator[LLM]:
    yield shared
    assert_idle(shared)
    for number in shared.list_loras():
        shared.remove_lora(number)


def _lora(beside: Beside, name: str, number: int = 1, **more: Any) -> LoRARequest:
    return LoRARequest(name, number, beside.root / name, **more)


def _tokens(llm: LLM, lora_request: Any, count: int = 1) -> list[list[int]]:
    outputs = llm.generate([PROMPT] * count, GREEDY, lora_request=lora_request, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_one_for_all_or_one_each_or_several(adapted: LLM, beside: Beside) -> None:
    sql, poet = _lora(beside, "sql"), _lora(beside, "poet", 2, weight=-0.5)
    expected = [
        beside.tokens(PROMPT, 8, weights) for weights in ({}, {"sql": 1.0}, {"poet": -0.5}, {"sql": 1.0, "poet": -0.5})
    ]
    assert len(set(map(tuple, expected))) == 4
    assert _tokens(adapted, [None, sql, poet, [sql, poet]], 4) == expected
    assert _tokens(adapted, sql, 2) == [expected[1]] * 2
    assert _tokens(adapted, None, 2) == [expected[0]] * 2
    assert adapted.list_loras() == {1, 2}
    output = adapted.generate([PROMPT], GREEDY, lora_request=sql, use_tqdm=False)[0]
    assert (output.lora_request.name, output.lora_request.adapter_id) == ("sql", 1)


def test_every_call_takes_one(adapted: LLM, beside: Beside) -> None:
    sql, messages = _lora(beside, "sql"), [{"role": "user", "content": "the world"}]

    def chat(lora: LoRARequest | None) -> str:
        return adapted.chat(messages, GREEDY, use_tqdm=False, lora_request=lora)[0].outputs[0].text

    assert chat(sql) != chat(None)
    last = [list(output.outputs[0].token_ids) for output in adapted.stream([PROMPT], GREEDY, lora_request=sql)][-1]
    assert last == beside.tokens(PROMPT, 8, {"sql": 1.0})
    vectors = [adapted.embed([PROMPT], use_tqdm=False, lora_request=lora)[0].outputs.embedding for lora in (sql, None)]
    assert not np.allclose(vectors[0], vectors[1])
    adapted.enqueue([PROMPT], GREEDY, lora_request=sql)
    assert list(adapted.wait_for_completion(use_tqdm=False)[0].outputs[0].token_ids) == last


def test_turns_of_a_session_have_their_own(adapted: LLM, beside: Beside) -> None:
    session, tokens = adapted.sessions.create("talk", PROMPT), list(PROMPT)
    for lora, weights in ((_lora(beside, "sql"), {"sql": 1.0}), (None, {}), (_lora(beside, "poet", 2), {"poet": 1.0})):
        output = session.generate(GREEDY, lora_request=lora)
        assert list(output.outputs[0].token_ids) == beside.tokens(tokens, 8, weights)
        tokens += output.outputs[0].token_ids
    adapted.sessions.delete("talk")


def test_the_content_is_that_of_the_first_use(adapted: LLM, beside: Beside, tmp_path: Path) -> None:
    folder = tmp_path / "changing"
    shutil.copytree(beside.root / "sql", folder)
    (first,) = _tokens(adapted, LoRARequest("changing", 5, folder))
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file({name: tensor * 2 for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    assert _tokens(adapted, LoRARequest("changing", 5, folder)) == [first]  # it is loaded
    (second,) = _tokens(adapted, LoRARequest("changing", 5, folder, load_inplace=True))
    assert second == beside.tokens(PROMPT, 8, {"sql": 4.0}) != first
    with pytest.raises(ValidationError, match="another content"):
        adapted.add_lora(LoRARequest("changing", 5, beside.root / "poet"))


def test_what_is_wrong_is_refused_before_the_engine(adapted: LLM, beside: Beside, tmp_path: Path) -> None:
    sql = _lora(beside, "sql")
    for wrong in ("sql", 3, [sql, sql], [sql, "x"], [[sql, sql]]):
        with pytest.raises(ValidationError):
            adapted.generate([PROMPT], GREEDY, lora_request=wrong, use_tqdm=False)  # type: ignore[arg-type]
    for fields in (
        ("", 1, "x"),
        ("a\nb", 1, "x"),
        ("a", 0, "x"),
        ("a", True, "x"),
        ("a", 1, ""),
        ("a", 1, "x", None, {"b": 1}),
    ):
        with pytest.raises(ValidationError):
            LoRARequest(*fields)  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match="finite"):
        LoRARequest("a", 1, "x", weight=float("nan"))
    with pytest.raises(LoRAAdapterNotFoundError, match="there is no adapter folder"):
        adapted.generate([PROMPT], GREEDY, lora_request=LoRARequest("none", 1, tmp_path / "none"), use_tqdm=False)
    with pytest.raises(LoRAAdapterNotFoundError):
        adapted.remove_lora("nobody")
    # Another base: one by the model's sizes, one that only the engine's matrices tell apart.
    with pytest.raises(AdapterError, match=r"for another base model: its .*q_proj is \[32, 32\], and .* 64 values"):
        _tokens(adapted, LoRARequest("small", 7, write(tmp_path / "small")))
    q = "base_model.model.model.layers.0.self_attn.q_proj"
    tall = {f"{q}.lora_A.weight": torch.ones(4, 64), f"{q}.lora_B.weight": torch.ones(96, 4)}
    try:
        (output,) = adapted.generate(
            [PROMPT], GREEDY, lora_request=LoRARequest("tall", 8, write(tmp_path / "tall", tall)), use_tqdm=False
        )
        told = output.error or ""
    except QuireError as error:
        told = str(error)
    assert "q_proj" in told and "96" in told and "64" in told


def test_without_enable_lora_it_is_refused(llm: LLM, beside: Beside) -> None:
    with pytest.raises(ValidationError, match="enable_lora"):
        llm.generate([PROMPT], GREEDY, lora_request=_lora(beside, "sql"), use_tqdm=False)


def test_async(tiny_model: Path, beside: Beside) -> None:
    async def run() -> None:
        async with AsyncLLM(str(tiny_model), **SETTINGS) as llm:
            sql = _lora(beside, "sql")
            assert await llm.add_lora(sql) and await llm.list_loras() == {1}
            for lora, weights in ((sql, {"sql": 1.0}), ([sql, _lora(beside, "poet", 2)], {"sql": 1.0, "poet": 1.0})):
                prompt: Any = {"prompt_token_ids": PROMPT}
                outputs = [one async for one in llm.generate(prompt, GREEDY, lora_request=lora)]  # type: ignore[arg-type]
                assert list(outputs[-1].outputs[0].token_ids) == beside.tokens(PROMPT, 8, weights)
            assert await llm.remove_lora(1) and await llm.list_loras() == {2}

    asyncio.run(run())
