"""Which checkpoint tensors each rank and stage loads, and that the ranks together compute the whole."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from quire.distributed.groups import Ranks
from quire.errors import ConfigError
from quire.layers.attention.base import KVSpec
from quire.layers.build_context import collect_targets
from quire.loading.load import load_weights
from tests.models.harness import (
    PagedRun,
    assert_same,
    checkpoint_tensors,
    empty_model,
    in_chunks,
    load,
    loaded_model,
    model_config,
    random_reference,
    reference_logits,
)
from tests.models.zoo import ZOO

TOKENS = torch.randint(0, 97, (17,), generator=torch.Generator().manual_seed(3)).tolist()
# Heads, KV heads and MLP features divide by 2 in these; vocabulary 97 does not.
SPLITTABLE = [
    "llama",
    "llama-tied",
    "llama-mqa",
    "llama-biases",
    "qwen2",
    "qwen3-biases",
    "mixtral",
    "qwen2-moe",
    "gpt-oss",
    "gemma-2",
    "gemma-3",
    "gemma-4-shared",
    "gemma-4-mixture",
]
SPLITTABLE += ["deepseek-v2-lite", "deepseek-v3"]
FOUR_HEADS = {"gpt-neox": {"num_attention_heads": 4}, "gpt2": {"n_head": 4}}


def reference_for(name: str) -> Any:
    config = type(ZOO[name])(**(ZOO[name].to_dict() | FOUR_HEADS.get(name, {})))
    return random_reference(config)


def pieces(model: Any, name: str) -> torch.Tensor:
    """How often each element of the checkpoint tensor `name` is kept by `model`."""
    targets = collect_targets(model)[name]
    count = torch.zeros(targets[0].shape, dtype=torch.int)
    for target in targets:
        count[target.keep] += 1
    return count


@pytest.mark.parametrize("name", [*SPLITTABLE, *FOUR_HEADS])
def test_two_ranks_together_keep_every_tensor(name: str) -> None:
    config = model_config(reference_for(name))
    whole, *ranks = (empty_model(config, Ranks(tp_rank=r, tp_size=s)) for r, s in ((0, 1), (0, 2), (1, 2)))
    for tensor in collect_targets(whole):
        assert (pieces(whole, tensor) == 1).all(), tensor
        kept = pieces(ranks[0], tensor) + pieces(ranks[1], tensor)
        shared_by_design = config.num_kv_heads == 1 and ("k_proj" in tensor or "v_proj" in tensor)
        first = collect_targets(ranks[0])[tensor][0]
        replicated = first.keep in ((), (slice(0, first.shape[0]),))
        assert (kept == (2 if shared_by_design or replicated else 1)).all(), tensor


def test_ranks_beyond_the_kv_heads_hold_copies_of_their_groups_head() -> None:
    config = model_config(reference_for("llama"))
    models = [empty_model(config, Ranks(tp_rank=r, tp_size=4)) for r in range(4)]
    assert [m.kv_shape for m in models] == [KVSpec(num_layers=2, num_kv_heads=1, head_dim=8)] * 4
    keeps = [collect_targets(m)["model.layers.0.self_attn.k_proj.weight"][0].keep[0] for m in models]
    assert keeps == [slice(0, 8), slice(0, 8), slice(8, 16), slice(8, 16)]


def test_kv_heads_that_cannot_be_divided_are_refused() -> None:
    config = model_config(random_reference(ZOO["llama-9-heads-3-kv"]))
    with pytest.raises(ValueError, match=r"9.*2 tensor-parallel"):
        empty_model(config, Ranks(tp_size=2))
    raw = dict(config.raw) | {"num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 8}
    with pytest.raises(ConfigError, match="3 KV heads"):
        empty_model(type(config).from_dict(raw), Ranks(tp_size=4))


class ThreadGroup:
    """Collectives between threads: each rank leaves its tensor and takes those of all."""

    def __init__(self, size: int) -> None:
        self.left: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=20)

    def exchange(self, x: torch.Tensor, ranks: Ranks) -> list[torch.Tensor]:
        self.left[ranks.tp_rank] = x.clone()
        self.barrier.wait()
        gathered = list(self.left)
        self.barrier.wait()
        return gathered

    def all_reduce(self, x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        return sum(self.exchange(x, ranks))

    def all_gather_last(self, x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        return torch.cat(self.exchange(x, ranks), dim=-1)


def assert_two_ranks_compute_the_whole(reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gang = ThreadGroup(2)
    for module in ("linear", "moe", "norm", "embedding"):
        monkeypatch.setattr(f"quire.layers.{module}.all_reduce", gang.all_reduce)
    monkeypatch.setattr("quire.layers.embedding.all_gather_last", gang.all_gather_last)
    models = [loaded_model(reference, Ranks(tp_rank=r, tp_size=2)) for r in range(2)]
    results: list[Any] = [None, None]

    def work(rank: int) -> None:
        results[rank] = in_chunks(models[rank], TOKENS, 6)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = reference_logits(reference, TOKENS)
    for result in results:
        assert_same(result, expected)


@pytest.mark.parametrize("name", [*SPLITTABLE, *FOUR_HEADS, "gemma-4"])
def test_two_ranks_together_compute_the_whole_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_two_ranks_compute_the_whole(reference_for(name), monkeypatch)


@pytest.mark.parametrize(
    "name",
    ["llama", "llama-tied", "qwen3-moe", "deepseek-v3", "gpt-neox", "gpt-neox-tied-no-bias", "gpt2", "gpt2-untied"],
)
def test_consecutive_pipeline_stages_compute_the_whole_model(name: str) -> None:
    reference = reference_for(name)
    stages = [loaded_model(reference, Ranks(pp_rank=r, pp_size=2)) for r in range(2)]
    assert sum(stage.kv_shape.num_layers for stage in stages) == model_config(reference).num_layers
    run = PagedRun(stages)
    logits = torch.cat([run.step({"row": TOKENS[:9]})["row"], run.step({"row": TOKENS[9:]})["row"]])
    assert_same(logits, reference_logits(reference, TOKENS))


def test_stages_load_only_their_own_tensors() -> None:
    config = model_config(reference_for("llama"))
    first, last = (empty_model(config, Ranks(pp_rank=r, pp_size=2)) for r in range(2))
    asked = [set(collect_targets(stage)) for stage in (first, last)]
    assert not asked[0] & asked[1]
    assert asked[0] | asked[1] == set(collect_targets(empty_model(config)))
    assert all(first.ignores(name) for name in asked[1])
    assert all(last.ignores(name) for name in asked[0])


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 layers cannot fill 3 pipeline stages"):
        empty_model(model_config(reference_for("llama")), Ranks(pp_rank=2, pp_size=3))


@dataclass(frozen=True)
class Held:
    """A checkpoint's tensor, already in memory."""

    name: str
    tensor: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def read(self, keep: tuple[slice, ...] = ()) -> torch.Tensor:
        return self.tensor[keep]


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_gpt2_loads_with_and_without_its_prefix_and_with_stored_masks(prefix: str) -> None:
    reference = reference_for("gpt2")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in reference.state_dict().items()}
    del bare["lm_head.weight"]
    bare["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
    bare["h.2.attn.masked_bias"] = torch.tensor(-1e4)
    checkpoint = [Held(prefix + name, tensor) for name, tensor in bare.items()]
    stages = [empty_model(model_config(reference), Ranks(pp_rank=r, pp_size=2)) for r in range(2)]
    for stage in stages:
        load_weights(collect_targets(stage), stage.ignores, checkpoint, progress=False)
    assert_same(in_chunks(stages, TOKENS, 17), reference_logits(reference, TOKENS))


def test_neox_ignores_stored_masks_and_frequencies() -> None:
    reference = reference_for("gpt-neox")
    tensors = checkpoint_tensors(reference)
    tensors["gpt_neox.layers.0.attention.bias"] = torch.ones(1, 1, 64, 64)
    tensors["gpt_neox.layers.1.attention.masked_bias"] = torch.tensor(-1e4)
    tensors["gpt_neox.layers.1.attention.rotary_emb.inv_freq"] = torch.ones(2)
    load(empty_model(model_config(reference)), tensors)


@pytest.mark.parametrize("name", ["llama", "gpt-neox", "gpt2"])
def test_an_unknown_tensor_is_not_ignored(name: str) -> None:
    model = empty_model(model_config(reference_for(name)))
    assert not model.ignores("model.layers.0.self_attn.surprise.weight")
    assert not model.ignores("model.layers.7.self_attn.q_proj.weight")


def test_only_an_untied_head_is_loaded() -> None:
    tied, untied = (empty_model(model_config(reference_for(name))) for name in ("llama-tied", "llama"))
    assert "lm_head.weight" not in collect_targets(tied)
    assert tied.ignores("lm_head.weight")
    assert "lm_head.weight" in collect_targets(untied)
    assert not untied.ignores("lm_head.weight")
