"""Architectures that run through transformers compute what it computes alone: in chunks, in batches, with few blocks,
with cached prefixes, in few bits and on two ranks. What the engine cannot compute is refused by name."""

from __future__ import annotations

import copy
import threading
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    ApertusConfig,
    ArceeConfig,
    BertConfig,
    BloomConfig,
    Cohere2Config,
    DogeConfig,
    Dots1Config,
    Exaone4Config,
    FalconH1Config,
    GlmConfig,
    HunYuanDenseV1Config,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    MiMoV2FlashConfig,
    MiniMaxM2Config,
    NemotronConfig,
    Olmo2Config,
    PhiConfig,
    PretrainedConfig,
    StableLmConfig,
    T5Config,
    VaultGemmaConfig,
)

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.distributed.groups import Ranks
from quire.errors import ConfigError, UnsupportedModelError
from quire.layers.build_context import collect_targets
from quire.loading.model_config import ModelConfig
from quire.models.registry import implementation, model_class
from quire.models.transformers_backend.attention import AttentionArguments
from quire.models.transformers_backend.layers import JoinedLinear, Norm
from quire.quantization.schemes.on_load import OnLoadScheme
from tests.models.harness import (
    assert_same,
    empty_model,
    in_chunks,
    load,
    loaded_model,
    mixed,
    model_config,
    random_reference,
    reference_logits,
)
from tests.models.test_names_and_ranks import ThreadGroup
from tests.quantization.test_on_load import fake, fake_input

SHAPE: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MIXTURE: dict[str, Any] = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1, "moe_intermediate_size": 20,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5, "head_dim": 8,
}  # fmt: skip


def _config(kind: type[PretrainedConfig], **changes: Any) -> PretrainedConfig:
    return kind(**(SHAPE | changes))


ZOO = {
    # Windows in some layers, no rotation in the others; norms of queries and keys.
    "exaone4": _config(Exaone4Config, num_hidden_layers=4, sliding_window=5, sliding_window_pattern=2),
    # An activation with weights and buffers of its own.
    "apertus": _config(ApertusConfig, rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
    # Norms with 1 + weight, partial rotation, an MLP without a gate.
    "nemotron": _config(NemotronConfig, head_dim=8),
    # A scale of logits, which only the library's head knows; a tied head.
    "cohere2": _config(Cohere2Config, sliding_window=5, logit_scale=1.5),
    # Experts, a router with a bias for the choice, a shared expert.
    "dots1": _config(Dots1Config, **MIXTURE),
    # Biases everywhere, also in the head.
    "phi": _config(PhiConfig),
    # Values smaller than keys, of other sizes in layers with a window; sinks; experts.
    "mimo-v2-flash": _config(
        MiMoV2FlashConfig, head_dim=16, v_head_dim=8, swa_head_dim=12, swa_v_head_dim=8, swa_num_attention_heads=4,
        swa_num_key_value_heads=2, sliding_window=5, n_routed_experts=8, num_experts_per_tok=2, n_group=1, topk_group=1,
        moe_intermediate_size=20,
    ),
    # Soft caps of scores; an embedding with a scale, tied.
    "vaultgemma": _config(VaultGemmaConfig, head_dim=8, sliding_window=5, attn_logit_softcapping=2.0),
    # Does not say that its attention can be replaced, but it can.
    "stablelm": _config(StableLmConfig),
}  # fmt: skip
PROMPTS = {
    name: torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for name, length in {"long": 29, "middle": 14, "short": 6, "one": 1}.items()
}


@cache
def pair(name: str) -> tuple[Any, Any]:
    reference = random_reference(ZOO[name])
    return reference, loaded_model(reference, impl="transformers")


@pytest.mark.parametrize("name", ZOO)
def test_a_prompt_in_chunks_and_rows_that_share_steps(name: str) -> None:
    reference, ours = pair(name)
    expected = reference_logits(reference, PROMPTS["long"])
    for size in (29, 7, 1):
        assert_same(in_chunks(ours, PROMPTS["long"], size), expected)

    def budget(step: int, row: str) -> int:
        return {"long": 9 if step < 2 else 1, "middle": 4 * (step >= 1)}.get(row, 1 + step % 2)

    for row, logits in mixed(ours, PROMPTS, budget).items():
        assert_same(logits, reference_logits(reference, PROMPTS[row]))


DEFERRED = {"exaone4": True, "dots1": True, "phi": True, "cohere2": False, "hunyuan": False}
"""Whether attention rotates: not if neighbours are paired (Cohere), or a norm follows the rotation (HunYuan)."""


@pytest.mark.parametrize("name", DEFERRED)
def test_attention_rotates_only_where_that_is_the_same(name: str) -> None:
    reference = random_reference({**ZOO, "hunyuan": _config(HunYuanDenseV1Config, head_dim=8)}[name])
    ours = loaded_model(reference, impl="transformers")
    assert_same(in_chunks(ours, PROMPTS["short"], 6), reference_logits(reference, PROMPTS["short"]))
    assert ("forward" in vars(ours.calls[0].module)) == DEFERRED[name]


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True, "attention_bias": True}])
def test_llama_is_the_same_as_our_own(changes: dict[str, Any]) -> None:
    reference = random_reference(_config(LlamaConfig, **changes))
    own, through = (loaded_model(reference, impl=impl) for impl in ("quire", "transformers"))
    assert type(own) is not type(through)
    assert set(collect_targets(own)) == set(collect_targets(through))
    assert own.kv_shape == through.kv_shape
    assert_same(in_chunks(through, PROMPTS["long"], 7), in_chunks(own, PROMPTS["long"], 7))
    # The matrices that read one input are one product, and its norms are the engine's.
    assert sum(isinstance(module, JoinedLinear) for module in through.modules()) == 2 * 4
    assert sum(isinstance(module, Norm) for module in through.modules()) == 2 * 2 + 1


RANKED = {
    "exaone4": ZOO["exaone4"],
    "dots1": ZOO["dots1"],
    "glm": _config(GlmConfig, head_dim=8),  # gate and up in one matrix
    "olmo2": _config(Olmo2Config),  # its norms need all heads: attention is not shared
}


@pytest.mark.parametrize("name", RANKED)
def test_two_ranks_together_compute_the_whole_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gang = ThreadGroup(2)
    for module in ("layers.linear", "layers.embedding", "models.transformers_backend.layers"):
        monkeypatch.setattr(f"quire.{module}.all_reduce", gang.all_reduce)
    monkeypatch.setattr("quire.layers.embedding.all_gather_last", gang.all_gather_last)
    reference = random_reference(RANKED[name])
    models = [loaded_model(reference, Ranks(tp_rank=rank, tp_size=2), impl="transformers") for rank in range(2)]
    assert models[0].kv_shape.num_kv_heads == (2 if name == "olmo2" else 1)
    results: list[Any] = [None, None]

    def work(rank: int) -> None:
        results[rank] = in_chunks(models[rank], PROMPTS["middle"], 6)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        assert_same(result, reference_logits(reference, PROMPTS["middle"]))


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_matrices_are_rounded_while_loading(kind: str, tmp_path: Path) -> None:
    from quire.loading.files import local_files
    from quire.loading.load import load_weights, open_checkpoint

    reference = random_reference(_config(ArceeConfig, hidden_size=64))
    reference.save_pretrained(tmp_path)
    model = empty_model(model_config(reference), scheme=OnLoadScheme(kind))
    targets = collect_targets(model)
    load_weights(targets, model.ignores, open_checkpoint(local_files("m", tmp_path), targets=targets), progress=False)
    rounded = copy.deepcopy(reference)
    for path, module in rounded.named_modules():
        if isinstance(module, nn.Linear) and path != "lm_head":
            module.weight.data = fake(module.weight.data, kind)
            module.register_forward_pre_hook(lambda _, inputs: (fake_input(inputs[0], kind),))
    expected = reference_logits(rounded, PROMPTS["middle"])
    error = (in_chunks(model, PROMPTS["middle"], 14) - expected).norm() / expected.norm()
    coarse = (reference_logits(reference, PROMPTS["middle"]) - expected).norm() / expected.norm()
    assert error < 0.003 < coarse  # a code on the border may round to the other side


def greedy(reference: Any, prompt: list[int], count: int) -> list[int]:
    tokens = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(count):
            tokens = torch.cat([tokens, reference(tokens, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return tokens[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kind", ["exaone4", "minimax_m2"])
def test_an_engine_with_few_blocks_and_cached_prefixes(kind: str, tmp_path: Path) -> None:
    """From files, whose tensors have other names than the model's (MiniMax-M2: experts one by one)."""
    mixture = _config(MiniMaxM2Config, head_dim=8, num_local_experts=4, num_experts_per_tok=2)
    reference = random_reference(mixture if kind == "minimax_m2" else ZOO[kind])
    reference.save_pretrained(tmp_path)
    prompts = [[*PROMPTS["long"][:20], number, 5] for number in (3, 4, 6, 8)]
    expected = [greedy(reference, prompt, 16) for prompt in prompts]
    settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "skip_tokenizer_init": True, "block_size": 4}
    greedily = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    settings |= {"model_impl": "transformers", "num_gpu_blocks_override": 24 if kind == "exaone4" else 20}
    with LLM(tmp_path, max_num_batched_tokens=9, max_num_seqs=4, **settings) as llm:
        outputs = llm.generate(prompts, greedily, use_tqdm=False)
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected
        assert llm.llm_engine.core.scheduler.stats.preemptions > 0
        for _ in range(2):  # the first may find blocks that were evicted meanwhile
            (again,) = llm.generate(prompts[-1:], greedily, use_tqdm=False)
            assert list(again.outputs[0].token_ids) == expected[-1]
        assert again.num_cached_tokens == 20


def test_random_weights_and_the_setting_that_chooses(tmp_path: Path) -> None:
    config = _config(LlamaConfig)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    tokens = []
    for impl in ("quire", "transformers"):
        with LLM(
            tmp_path, load_format="dummy", model_impl=impl, dtype="float32", device="cpu", skip_tokenizer_init=True
        ) as llm:
            params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
            tokens.append(list(llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].token_ids))
    assert tokens[0] == tokens[1]
    assert implementation("LlamaForCausalLM") == "quire"
    assert implementation("ArceeForCausalLM") == "transformers"
    with pytest.raises(UnsupportedModelError, match=r"'ArceeForCausalLM'.*model_impl 'transformers'"):
        model_class("ArceeForCausalLM", "quire")


# Refusals


def empty(config: PretrainedConfig, architecture: str, ranks: Ranks | None = None) -> Any:
    raw = SHAPE | config.to_dict() | {"architectures": [architecture]}
    return empty_model(ModelConfig.from_dict(raw), ranks, impl="transformers")


@pytest.mark.parametrize(
    ("config", "architecture", "named"),
    [
        (_config(LlamaConfig), "NoSuchForCausalLM", "'NoSuchForCausalLM' is not implemented.*no causal language model"),
        (T5Config(**SHAPE), "T5ForConditionalGeneration", "'T5ForConditionalGeneration' is not implemented"),
        (BertConfig(**SHAPE), "BertLMHeadModel", "mask other than causal"),
        (BloomConfig(**SHAPE), "BloomForCausalLM", "0 of its 2 layers call attention"),
        (MambaConfig(**SHAPE), "MambaForCausalLM", "of models without attention only Mamba 2 is"),
        (FalconH1Config(**SHAPE), "FalconH1ForCausalLM", "FalconH1.*recurrent states"),
        (Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"]), "Lfm2ForCausalLM", "layers of the types conv"),
        (DogeConfig(**SHAPE), "DogeForCausalLM", "mask of its own"),
        (Llama4TextConfig(**SHAPE), "Llama4ForCausalLM", "chunked_attention"),
        (_config(LlamaConfig, rope_parameters={"rope_type": "dynamic", "factor": 2.0}), "LlamaForCausalLM", "dynamic"),
    ],
)
def test_models_that_are_refused_by_name(config: PretrainedConfig, architecture: str, named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        empty(config, architecture)


@pytest.mark.parametrize(
    ("name", "value"), [("head_mask", torch.ones(1)), ("alibi_slopes", torch.ones(4)), ("chunk", 4), ("dropout", 0.1)]
)
def test_an_argument_of_attention_that_is_not_understood_is_refused(name: str, value: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=name):
        AttentionArguments.read(nn.Module(), 8, {"scaling": 0.5, name: value})


def test_arguments_that_change_nothing_are_accepted() -> None:
    neutral = {"dropout": 0.0, "output_attentions": False, "position_ids": torch.ones(1), "head_mask": None}
    found = AttentionArguments.read(nn.Module(), 16, {**neutral, "sliding_window": 7})
    assert (found.scale, found.window, found.softcap, found.sinks) == (0.25, 7, None, None)


def test_parallelism_that_is_refused() -> None:
    with pytest.raises(ConfigError, match="no plan"):
        empty(ZOO["stablelm"], "StableLmForCausalLM", Ranks(tp_size=2))
    with pytest.raises(ConfigError, match="pipeline"):
        empty(ZOO["stablelm"], "StableLmForCausalLM", Ranks(pp_size=2))


def test_settings_that_are_refused() -> None:
    from quire.worker.building import check_through_transformers

    model, folder, file = (SimpleNamespace(**each) for each in ({"architecture": "A"}, {"gguf": None}, {"gguf": "a"}))
    with pytest.raises(ConfigError, match="batch-invariant"):
        check_through_transformers(EngineConfig(batch_invariant=True), folder, model)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="GGUF"):
        check_through_transformers(EngineConfig(), file, model)  # type: ignore[arg-type]


@pytest.mark.parametrize("way", ["neighbour", "place"])
def test_tokens_that_meet_outside_of_attention_are_noticed_in_the_first_step(way: str) -> None:
    reference = random_reference(_config(LlamaConfig))
    model = loaded_model(reference, impl="transformers")

    def change(_: nn.Module, __: Any, out: torch.Tensor) -> torch.Tensor:
        if way == "neighbour":
            return out + 0.3 * out.roll(1, dims=1)
        return out * (1 + torch.arange(out.shape[1])[:, None])

    model.model.layers[0].register_forward_hook(change)
    with pytest.raises(UnsupportedModelError, match="outside of attention"):
        in_chunks(model, PROMPTS["short"], 6)


def test_a_checkpoint_with_other_tensors_is_refused() -> None:
    reference = random_reference(_config(ArceeConfig))
    model = empty_model(model_config(reference))
    tensors = dict(reference.state_dict())
    tensors["model.layers.0.mlp.gate_proj.weight"] = torch.ones(48, 32)
    with pytest.raises(AssertionError, match=r"unexpected model\.layers\.0\.mlp\.gate_proj"):
        load(model, tensors)
