"""Adapters beside beams, grammars, vectors, draft models, and every kind of cache: against PEFT on transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma2Config, PretrainedConfig

from quire import LLM, PoolingParams, SamplingParams, StructuredOutputsParams
from quire.messages.lora import LoRARequest
from tests.adapters.beside import Beside
from tests.adapters.beside_peft import Base, assert_as_peft, check, greedy
from tests.adapters.zoo import INVOCATION, PROMPTS, SHAPE, Zoo
from tests.conftest import TINY_VOCAB, assert_idle, tiny_tokenizer
from tests.engine.beam_reference import ENDS, Model, params_of

LONG = [(11 * i * i + 5 * i + 3) % 97 for i in range(37)]


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("features"))


@pytest.fixture(scope="module")
def base(zoo: Zoo) -> Base:
    return zoo.base("llama")


def test_beams(base: Base) -> None:
    """PEFT's generate gives the same beams with the same scores, in one batch with others and with none."""
    names = ["all", None, "dora", "embeddings"]
    params = params_of(3, 6)
    with base.llm(max_loras=2) as llm:
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS for _ in names]
        loras = [None if name is None else base.loras[name] for _ in PROMPTS for name in names]
        outputs = llm.beam_search(prompts, params, lora_request=loras)
        for place, output in enumerate(outputs):
            name, prompt = names[place % len(names)], PROMPTS[place // len(names)]
            model = base.reference if name is None else base._tuned[name]
            Model(Path(base.path), model).assert_found(output, prompt, params, ENDS)
        assert_idle(llm)


@torch.no_grad()
def _hidden(base: Base, name: str | None, tokens: list[int]) -> torch.Tensor:
    model = base.reference if name is None else base._tuned[name]
    found = model(input_ids=torch.tensor([tokens]), use_cache=False, output_hidden_states=True)
    return found.hidden_states[-1][0]


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_vectors(base: Base, pooling: str) -> None:
    """They are those of PEFT's last hidden states, in chunks, again with prefix hits, beside other adapters."""
    names = ["all", None, "tokens", "activated"]
    prompts = [*PROMPTS, [*LONG[:9], *INVOCATION, *LONG[9:12]]]
    pairs = [(name, prompt) for prompt in prompts for name in names]
    params = PoolingParams(pooling=pooling, use_activation=False)
    with base.llm(max_loras=2, max_num_batched_tokens=8, max_num_seqs=4) as llm:
        for _ in range(2):
            outputs = llm.encode(
                [{"prompt_token_ids": prompt} for _, prompt in pairs],
                params,
                use_tqdm=False,
                lora_request=[None if name is None else base.loras[name] for name, _ in pairs],
            )
            for (name, prompt), output in zip(pairs, outputs, strict=True):
                hidden = _hidden(base, name, prompt)
                expected = hidden[-1] if pooling == "last" else hidden.mean(0)
                np.testing.assert_allclose(output.outputs.data, expected.numpy(), atol=2e-3, err_msg=str(name))
        assert_idle(llm)


def _check_caches(base: Base, **settings: Any) -> None:
    """Adapters and none, in chunks, then with prefix hits."""
    with base.llm(max_loras=2, max_num_batched_tokens=16, num_gpu_blocks_override=256, **settings) as llm:
        names = [*base.loras, None]
        for _ in range(2):
            check(base, llm, names, [LONG, PROMPTS[0]], 5)
        (output,) = llm.generate([{"prompt_token_ids": LONG}], greedy(5), lora_request=next(iter(base.loras.values())))
        assert output.num_cached_tokens >= 32
        assert_as_peft(base, next(iter(base.loras)), output)
        assert_idle(llm)


def _made(folder: Path, config: PretrainedConfig, targets: list[list[str]]) -> Base:
    base = Base(folder, config)
    for number, modules in enumerate(targets):
        base.adapter(f"adapter{number}", target_modules=modules)
    return base


def test_windows(tmp_path: Path) -> None:
    config = Gemma2Config(
        **SHAPE, head_dim=8, sliding_window=8, query_pre_attn_scalar=8, hidden_activation="gelu_pytorch_tanh"
    )
    base = _made(tmp_path, config, [["q_proj", "v_proj"], ["k_proj", "o_proj", "gate_proj", "down_proj"]])
    _check_caches(base)


def test_grammars(tiny_model: Path, tmp_path: Path) -> None:
    """Structured output with adapters and drafts: PEFT's best token among those that the grammar allows."""
    beside = Beside(tiny_model, tmp_path)
    loras = [
        LoRARequest(name, number + 1, str(beside.write(name, seed=number, target_modules="all-linear")))
        for number, name in enumerate(("first", "second"))
    ]
    digits = {i: text for i in range(TINY_VOCAB) if (text := tiny_tokenizer().decode([i])).isdigit()}
    allowed = torch.full((TINY_VOCAB,), -torch.inf).index_fill(0, torch.tensor(list(digits)), 0.0)
    prompt = [20 + 3 * i for i in range(20)] + [17, 18, 19] * 3
    params = SamplingParams(temperature=0, max_tokens=12, structured_outputs=StructuredOutputsParams(regex="[0-9]{9}"))
    drafts = {"method": "ngram", "prompt_lookup_min": 1, "tune": False}
    with LLM(
        str(tiny_model), dtype="float32", device="cpu", num_gpu_blocks_override=128, enable_lora=True, max_lora_rank=4,
        speculative_config=drafts,
    ) as llm:  # fmt: skip
        names = [loras[0], None, loras[1], loras[0]]
        outputs = llm.generate([{"prompt_token_ids": prompt}] * 4, params, lora_request=names)
        found = [list(output.outputs[0].token_ids) for output in outputs]
        assert_idle(llm)
    for lora, tokens in zip(names, found, strict=True):
        model = beside.model_with({} if lora is None else {lora.name: 1.0})
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 :]
        assert tokens[:9] == (logits[:9] + allowed).argmax(-1).tolist(), lora
        assert len("".join(digits[token] for token in tokens[:9])) == 9
    assert found[0] == found[3] and len({tuple(tokens) for tokens in found}) == 3
