"""Adapters that PEFT wrote are read with PEFT's own meaning."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from peft.tuners.lora.layer import Embedding, LoraLayer, ParamWrapper
from peft.utils.other import TrainableTokensWrapper
from safetensors.torch import load_file
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from quire.adapters.adapter import Adapter, LowRank
from quire.adapters.folder import describe_adapter, digest_adapter
from quire.adapters.peft_folder import read_adapter
from tests.adapters.written_by_peft import KINDS, build, load, save


def _close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs.detach().contiguous(), rtol=1e-5, atol=1e-6)


def _adapted(low: LowRank, weight: Tensor) -> Tensor:
    """The matrix [out, in] that the adapter makes of `weight`, as DESIGN's formula of DoRA has it."""
    changed = weight + low.scale * low.b @ low.a
    if low.magnitude is None:
        return changed
    return changed * (low.magnitude / changed.norm(dim=1)).unsqueeze(1)


def _names(model: PeftModel) -> dict[str, torch.nn.Module]:
    """Modules by their name in the base model."""
    return {name.removeprefix("base_model.model."): module for name, module in model.named_modules()}


@pytest.mark.parametrize("kind", KINDS)
def test_every_change_is_the_one_that_peft_makes(kind: str, tmp_path: Path) -> None:
    save(build(kind), tmp_path)
    model = load(kind, tmp_path)
    adapter = read_adapter(tmp_path, max_rank=8)
    seen: set[str] = set()
    for name, module in _names(model).items():
        if isinstance(module, LoraLayer):
            seen.add(_check_layer(adapter, name, module))
        elif isinstance(module, TrainableTokensWrapper):
            tokens, rows = adapter.token_rows[name]
            weight = module.token_adapter.get_base_layer().weight.detach().clone()
            weight[torch.tensor(tokens)] = rows
            _close(weight, module.token_adapter.get_merged_weights(["default"]))
            seen.add(name)
    ours = [*adapter.matrices, *adapter.experts, *adapter.embeddings, *adapter.token_rows]
    assert seen == set(ours) and (ours or kind == "nothing")
    assert adapter.invocation == model.peft_config["default"].alora_invocation_tokens
    ranks = [rank for module in model.modules() if isinstance(module, LoraLayer) for rank in module.r.values()]
    assert adapter.rank == max(ranks)


def _check_layer(adapter: Adapter, name: str, layer: LoraLayer) -> str:
    if isinstance(layer, ParamWrapper):
        name = name.replace(".base_layer", "")
        parameter = f"{name}.{layer.parameter_name}"
        if layer.num_experts == 1:  # a matrix without a module of its own
            low = adapter.matrices[name]
            _close(low.scale * low.b @ low.a, layer.get_delta_weight("default"))
            return name
        stack = adapter.experts[parameter]
        _close(stack.scale * stack.b @ stack.a, layer.get_delta_weight("default"))
        return parameter
    if ".experts." in name:
        return _check_one_expert(adapter, name, layer)
    is_turned = isinstance(layer, Embedding) or isinstance(layer.get_base_layer(), Conv1D)
    low = (adapter.embeddings if isinstance(layer, Embedding) else adapter.matrices)[name]
    base = layer.get_base_layer()
    before = base.weight.detach().clone()
    if not layer.use_dora["default"]:
        delta = layer.get_delta_weight("default")
        _close(low.scale * low.b @ low.a, delta.T if is_turned else delta)
    if adapter.invocation is not None:  # PEFT cannot merge these
        return name
    bias = None if getattr(base, "bias", None) is None else base.bias.detach().clone()
    layer.merge()
    ours = _adapted(low, before.T if is_turned else before)
    _close(ours, base.weight.T if is_turned else base.weight)
    if low.bias is not None:
        _close(low.bias if bias is None else bias + low.bias, base.bias)
    layer.unmerge()
    return name


def _check_one_expert(adapter: Adapter, name: str, layer: LoraLayer) -> str:
    experts, _, rest = name.partition(".experts.")
    number, _, matrix = rest.partition(".")
    parameter = f"{experts}.experts.{'down_proj' if matrix == 'down_proj' else 'gate_up_proj'}"
    stack = adapter.experts[parameter]
    delta = stack.scale * stack.b[int(number)] @ stack.a[int(number)]
    gate, up = delta.chunk(2)
    _close({"gate_proj": gate, "up_proj": up, "down_proj": delta}[matrix], layer.get_delta_weight("default"))
    return parameter


def test_experts_without_an_adapter_are_left_alone(tmp_path: Path) -> None:
    adapter = read_adapter(save(build("some experts"), tmp_path), max_rank=8)
    up, down = (adapter.experts[f"mlp.experts.{name}_proj"] for name in ("gate_up", "down"))
    changed = up.b @ up.a
    assert changed.shape == (1, 96, 32) or changed.shape == (3, 96, 32)
    assert changed[0, :48].any() and not changed[0, 48:].any() and not changed[1:].any()
    changed = down.b @ down.a
    assert changed.shape == (3, 32, 48) and changed[2].any() and not changed[:2].any()


@pytest.mark.parametrize("kind", ["saved", "conv1d saved", "biases", "biases of lora", "embeddings", "tied"])
def test_whole_tensors_are_under_the_names_that_the_base_has(kind: str, tmp_path: Path) -> None:
    model = build(kind)
    folder = save(model, tmp_path)
    adapter = read_adapter(folder, max_rank=8)
    written = {name for name in load_file(folder / "adapter_model.safetensors") if "lora_" not in name}
    assert len(adapter.replaced) == len(written) > 0
    base = build(kind).unload()
    names = dict(base.named_parameters(remove_duplicate=False))
    trained = {name: value for name, value in model.state_dict().items() if ".base_layer." in name or "save" in name}
    for name, tensor in adapter.replaced.items():
        assert tensor.shape == names[name].shape
        module, _, last = name.rpartition(".")
        places = (f"{module}.base_layer.{last}", f"{module}.modules_to_save.default.{last}", name)
        state = trained | model.state_dict()
        found = next(state[f"base_model.model.{place}"] for place in places if f"base_model.model.{place}" in state)
        assert torch.equal(tensor, found)


def test_a_pickled_file_of_tensors_is_the_same_adapter(tmp_path: Path) -> None:
    model = build("patterns")
    first = read_adapter(save(model, tmp_path / "a"), max_rank=8)
    second = read_adapter(save(model, tmp_path / "b", safetensors=False), max_rank=8)
    assert first.digest == second.digest == digest_adapter(tmp_path / "a") == digest_adapter(tmp_path / "b")
    assert all(torch.equal(low.a, second.matrices[name].a) for name, low in first.matrices.items())


def test_the_digest_covers_values_and_settings(tmp_path: Path) -> None:
    digests = {read_adapter(save(build("linear", seed), tmp_path / str(seed)), 8).digest for seed in (0, 1)}
    other = tmp_path / "0" / "adapter_config.json"
    other.write_text(other.read_text().replace('"lora_alpha": 12', '"lora_alpha": 13'))
    digests.add(read_adapter(tmp_path / "0", 8).digest)
    other.write_text(other.read_text().replace('"lora_dropout": 0.0', '"lora_dropout": 0.1'))
    digests.add(read_adapter(tmp_path / "0", 8).digest)
    assert len(digests) == 3


@pytest.mark.parametrize("kind", ["linear", "experts", "embeddings"])
def test_the_header_says_what_the_tensors_are(kind: str, tmp_path: Path) -> None:
    model = build(kind)
    folder = save(model, tmp_path)
    facts = describe_adapter(folder, max_rank=8)
    adapter = read_adapter(folder, max_rank=8)
    base = dict(build(kind).unload().named_parameters())
    for name, shape in facts.shapes.items():
        weight = base[name] if name in base else base[f"{name}.weight"]
        assert shape == tuple(weight.T.shape if name in adapter.embeddings else weight.shape[-2:])
    assert set(facts.shapes) == {*adapter.matrices, *adapter.experts, *adapter.embeddings}
    assert facts.rank == adapter.rank == 4
    assert facts.nbytes == adapter.nbytes
