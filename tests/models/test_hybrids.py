"""Hybrid models against transformers: the same logits alone, in chunks, batched, and on several ranks."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import (
    BambaConfig,
    GraniteMoeHybridConfig,
    JambaConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    Mamba2Config,
    NemotronHConfig,
    PretrainedConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from quire.distributed.groups import Ranks
from quire.errors import UnsupportedModelError
from quire.loading.model_config import ModelConfig
from quire.quantization.schemes.on_load import OnLoadScheme
from tests.models.harness import (
    assert_same,
    checkpoint_tensors,
    empty_model,
    load,
    loaded_model,
    model_config,
    random_reference,
    reference_logits,
)
from tests.models.hybrid import HybridRun, in_chunks
from tests.models.test_names_and_ranks import ThreadGroup

TOKENS = torch.randint(0, 97, (75,), generator=torch.Generator().manual_seed(3)).tolist()


def _qwen(kind: type[PretrainedConfig], **changes: Any) -> PretrainedConfig:
    shape: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 28,
        "max_position_embeddings": 128,
    }
    return kind(**(shape | changes))


def _mamba(kind: type[PretrainedConfig], **changes: Any) -> PretrainedConfig:
    shape: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_chunk_size": 16,
    }
    return kind(**(shape | changes))


def _lfm2(kind: type[PretrainedConfig], **changes: Any) -> PretrainedConfig:
    shape: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    return kind(**(shape | changes))


def _nemotron(**changes: Any) -> PretrainedConfig:
    shape: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "moe_shared_expert_intermediate_size": 28,
        "routed_scaling_factor": 1.5,
    }
    return NemotronHConfig(**(shape | changes))


HYBRIDS: dict[str, PretrainedConfig] = {
    "qwen3-next": _qwen(Qwen3NextConfig, mlp_only_layers=[1]),
    "qwen3.5": _qwen(Qwen3_5TextConfig, tie_word_embeddings=True, attention_bias=True),
    "qwen3.5-moe": _qwen(
        Qwen3_5MoeTextConfig,
        shared_expert_intermediate_size=20,  # as wide as the others
        num_hidden_layers=3,
        layer_types=["full_attention", "linear_attention", "linear_attention"],
        linear_num_value_heads=2,
    ),
    "granite-4": _mamba(
        GraniteMoeHybridConfig,
        layer_types=["mamba", "attention", "mamba"],
        shared_intermediate_size=28,
        num_local_experts=5,
        embedding_multiplier=3.0,
        residual_multiplier=0.6,
        attention_multiplier=0.3,
        logits_scaling=2.0,
        tie_word_embeddings=True,
    ),
    "granite-4-dense": _mamba(
        GraniteMoeHybridConfig,
        layer_types=["attention", "mamba", "mamba"],
        shared_intermediate_size=28,
        num_local_experts=0,
        position_embedding_type="rope",
        mamba_n_groups=2,
        mamba_proj_bias=True,
    ),
    "bamba": _mamba(BambaConfig, attn_layer_indices=[1]),
    "nemotron-h": _nemotron(hybrid_override_pattern="M-M*-"),
    "nemotron-3": _nemotron(hybrid_override_pattern="ME*E", n_group=2, topk_group=1),
    "nemotron-3-latent": _nemotron(hybrid_override_pattern="EM*EM", moe_latent_size=16),
    "jamba": JambaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        num_experts=5,
        attn_layer_period=3,
        attn_layer_offset=1,
        mamba_d_state=8,
        mamba_dt_rank=6,
        mamba_proj_bias=True,
    ),
    "lfm2": _lfm2(Lfm2Config, layer_types=["conv", "full_attention", "conv"], conv_bias=True, block_multiple_of=8),
    "lfm2-moe": _lfm2(
        Lfm2MoeConfig,
        layer_types=["conv", "conv", "full_attention"],
        conv_L_cache=4,
        num_dense_layers=1,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        routed_scaling_factor=1.5,
    ),
    "mamba-2": Mamba2Config(
        vocab_size=97,
        hidden_size=32,
        num_hidden_layers=3,
        num_heads=4,
        head_dim=16,
        state_size=8,
        n_groups=2,
        chunk_size=16,
        tie_word_embeddings=True,
    ),
}


def hybrid_reference(name: str, **changes: Any) -> Any:
    """A random model; norms that add 1 to their weights have weights around 0, and states forget slowly."""
    config = HYBRIDS[name]
    reference = random_reference(type(config)(**{**config.to_dict(), **changes}) if changes else config)
    for parameter, values in reference.named_parameters():
        if parameter.endswith(("dt_bias", "dt_proj.bias")):
            values.data -= 3
    for module in reference.modules():
        if type(module).__name__ in CENTERED:
            module.weight.data -= 1
    return reference


CENTERED = ("Qwen3NextRMSNorm", "Qwen3_5RMSNorm", "Qwen3_5MoeRMSNorm")


@pytest.fixture(scope="module", params=list(HYBRIDS))
def pair(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    reference = hybrid_reference(request.param)
    return reference, loaded_model(reference, max_model_len=128)


def test_logits_alone_and_in_chunks(pair: tuple[Any, Any]) -> None:
    reference, model = pair
    theirs = reference_logits(reference, TOKENS)
    # Whole; in chunks that end within the convolution's reach, and long ones.
    for sizes in (lambda i: 75, lambda i: (2, 3, 1, 1, 1, 1, 40, 1, 2, 70)[i % 10]):
        assert_same(in_chunks(model, TOKENS, sizes), theirs)


def test_logits_of_rows_that_share_steps(pair: tuple[Any, Any]) -> None:
    reference, model = pair
    prompts = {name: TOKENS[start:] for name, start in (("a", 0), ("b", 13), ("c", 40))}
    run = HybridRun(model)
    found: dict[str, list[torch.Tensor]] = {name: [] for name in prompts}
    step = 0
    while any(run.computed.get(name, 0) < len(tokens) for name, tokens in prompts.items()):
        sizes = {"a": (7, 1)[step % 2], "b": (0, 9, 2)[step % 3], "c": (1, 1, 17)[step % 3]}
        step += 1
        scheduled = {n: prompts[n][(d := run.computed.get(n, 0)) : d + sizes[n]] for n in prompts}
        for name, part in run.step({n: t for n, t in scheduled.items() if t} or {"spare": [1]}).items():
            if name in found:
                found[name].append(part)
    for name, tokens in prompts.items():
        assert_same(torch.cat(found[name]), reference_logits(reference, tokens))


def test_a_row_begins_from_zeros_in_used_pages_and_a_fork_goes_its_own_way(pair: tuple[Any, Any]) -> None:
    reference, model = pair
    run = HybridRun(model)
    run.step({"old": TOKENS[:20]})
    run.release("old")
    first = run.step({"row": TOKENS[:30]})["row"]
    run.fork("row", "branch")
    rest = run.step({"row": TOKENS[30:33], "branch": TOKENS[60:64]})
    assert_same(torch.cat((first, rest["row"])), reference_logits(reference, TOKENS[:33]))
    assert_same(rest["branch"], reference_logits(reference, TOKENS[:30] + TOKENS[60:64])[30:])


def test_two_stages(pair: tuple[Any, Any]) -> None:
    reference, _ = pair
    stages = [loaded_model(reference, Ranks(pp_rank=r, pp_size=2), 128) for r in range(2)]
    assert_same(in_chunks(stages, TOKENS, lambda i: 31), reference_logits(reference, TOKENS))


def test_two_ranks(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    gang = ThreadGroup(2)
    for module in ("linear", "moe", "embedding", "recurrent"):
        monkeypatch.setattr(f"quire.layers.{module}.all_reduce", gang.all_reduce)
    monkeypatch.setattr("quire.layers.embedding.all_gather_last", gang.all_gather_last)
    reference, _ = pair
    models = [loaded_model(reference, Ranks(tp_rank=r, tp_size=2), 128) for r in range(2)]
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda model: in_chunks(model, TOKENS, lambda i: (30, 1)[i % 2]), models))
    for result in results:
        assert_same(result, reference_logits(reference, TOKENS))


def test_every_state_update_and_tap_matters(pair: tuple[Any, Any]) -> None:
    """Otherwise the tests above prove little: one token less, or another token within a tap, must show at the end."""
    reference, model = pair
    theirs = reference_logits(reference, TOKENS)[-1]
    for position in (5, 72, 73):
        other = [*TOKENS[:position], (TOKENS[position] + 1) % 97, *TOKENS[position + 1 :]]
        ours = in_chunks(model, other, lambda i: 75)[-1]
        assert (ours - theirs).abs().max() > 1e-3 * theirs.abs().max()


def test_empty_models_declare_the_caches_of_all_layers() -> None:
    config = model_config(random_reference(HYBRIDS["qwen3-next"]))
    whole, half = (empty_model(config, Ranks(tp_size=size), 128) for size in (1, 2))
    state, ring = whole.caches[0].parts
    assert (state.count, state.shape, ring.count, ring.shape) == (4, (8, 16), 12, (4, 8))
    assert [part.count for part in half.caches[0].parts] == [2, 6]
    assert (whole.caches[3].kv_heads, half.caches[3].kv_heads) == (2, 1)


@pytest.mark.parametrize("kind", ["", "Moe"])
def test_the_published_form_with_a_vision_tower(kind: str) -> None:
    """The text config is nested, the names are `model.language_model…`, and the tower and draft layers are left out."""
    reference = hybrid_reference(f"qwen3.5{'-moe' if kind else ''}")
    text = json.loads(json.dumps(reference.config.to_dict()))
    raw = {
        "architectures": [f"Qwen3_5{kind}ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text,
        "tie_word_embeddings": text["tie_word_embeddings"],
    }
    model = empty_model(ModelConfig.from_dict(raw), max_model_len=128)
    tensors = checkpoint_tensors(reference)
    tensors = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    more = {name: torch.zeros(1) for name in ("model.visual.blocks.0.norm1.weight", "mtp.fc.weight")}
    load(model, tensors | more)
    assert_same(in_chunks(model, TOKENS, lambda i: 75), reference_logits(reference, TOKENS))


def test_lfm2_by_the_names_of_its_first_files() -> None:
    reference = hybrid_reference("lfm2")
    raw = dict(model_config(reference).raw)
    for name in ("layer_types", "intermediate_size", "tie_word_embeddings", "rope_parameters"):
        raw.pop(name)
    old = {"full_attn_idxs": [1], "block_ff_dim": 48, "tie_embedding": True, "rope_theta": 1000000.0}
    model = empty_model(ModelConfig.from_dict(raw | old), max_model_len=128)
    load(model, checkpoint_tensors(reference))
    assert_same(in_chunks(model, TOKENS, lambda i: 75), reference_logits(reference, TOKENS))


@pytest.mark.parametrize("name", ["lfm2-moe", "jamba"])
def test_experts_by_their_published_names(name: str) -> None:
    """One matrix for each; transformers holds them in stacks."""
    reference = hybrid_reference(name)
    gate, up, down = ("w1", "w3", "w2") if name == "lfm2-moe" else ("gate_proj", "up_proj", "down_proj")
    tensors = {}
    for key, tensor in checkpoint_tensors(reference).items():
        stem, _, end = key.partition("experts.")
        for expert, matrix in enumerate(tensor if end else ()):
            parts = zip((gate, up), matrix.chunk(2), strict=True) if end == "gate_up_proj" else [(down, matrix)]
            tensors |= {f"{stem}experts.{expert}.{part}.weight": rows for part, rows in parts}
        if not end:
            tensors[key] = tensor
    model = empty_model(model_config(reference), max_model_len=128)
    load(model, tensors)
    assert_same(in_chunks(model, TOKENS, lambda i: 75), reference_logits(reference, TOKENS))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("qwen3-next", {"layer_types": ["sliding_attention"] * 4}, "sliding_attention"),
        ("nemotron-h", {"layers_block_type": ["hyena"] * 5}, "hyena"),
        ("nemotron-3", {"mlp_hidden_act": "silu"}, "silu"),
        ("nemotron-h", {"mamba_hidden_act": "gelu"}, "gelu"),
        ("granite-4", {"position_embedding_type": "alibi"}, "alibi"),
        ("granite-4", {"hidden_act": "gelu"}, "gelu"),
        ("lfm2", {"layer_types": ["conv", "sliding_attention", "conv"]}, "sliding_attention"),
        ("jamba", {"sliding_window": 16}, "sliding_window"),
        ("jamba", {"mamba_inner_layernorms": False}, "mamba_inner_layernorms"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(name: str, change: dict[str, Any], message: str) -> None:
    config = model_config(random_reference(HYBRIDS[name]))
    with pytest.raises(UnsupportedModelError, match=message):
        empty_model(ModelConfig.from_dict(dict(config.raw) | change))


def test_experts_without_gates_are_refused_in_few_bits() -> None:
    config = model_config(random_reference(HYBRIDS["nemotron-3"]))
    with pytest.raises(UnsupportedModelError, match=r"backbone\.layers\.1\.mixer\.experts\.0\.up_proj"):
        empty_model(config, scheme=OnLoadScheme("int8"))
