"""Tiny models compressed by the compressed-tensors library: their logits are those of transformers' model with the
weights that the library decompresses and activations quantized as the checkpoint says."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig

from quire.distributed.groups import Ranks
from quire.kernels.reference import TorchOps
from quire.kernels.weights.base import QuantizedWeight, SplitWeight
from quire.layers.attention.torch_paged import TorchPagedAttention
from quire.layers.build_context import BuildContext, collect_targets, create_weights, quantized_weights
from quire.loading.files import local_files
from quire.loading.load import load_weights, open_checkpoint
from quire.models.registry import model_class
from quire.quantization.schemes.registry import scheme_of
from tests.models.harness import in_chunks, model_config, random_reference, reference_logits
from tests.quantization import library

pytestmark = library.needed

TOKENS = [5, 17, 3, 90, 41, 2, 77, 8, 60]


def int_tokens(x):
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-9) / 127
    return (x / scale).round().clamp(-127, 127) * scale


def fp8(x, scale):
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def fp8_tokens(x):
    return fp8(x, x.abs().amax(-1, keepdim=True).clamp_min(1e-9) / 448)


def fp8_groups(x):
    groups = x.unflatten(-1, (-1, 128))
    return fp8(groups, groups.abs().amax(-1, keepdim=True).clamp_min(1e-9) / 448).flatten(-2)


STATIC = 0.03
TOKEN = {"num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
CASES = {
    "w8a8": (
        {"num_bits": 8, "type": "int", "strategy": "channel"}, "int-quantized", {**TOKEN, "type": "int"}, int_tokens,
    ),
    "fp8": (
        {"num_bits": 8, "type": "float", "strategy": "channel"}, "float-quantized", {**TOKEN, "type": "float"},
        fp8_tokens,
    ),
    "fp8 static": (
        {"num_bits": 8, "type": "float", "strategy": "tensor"}, "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
        lambda x: fp8(x, torch.tensor(STATIC)),
    ),
    "fp8 blocks": (
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}, "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "dynamic": True}, fp8_groups,
    ),
    "int4": ({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}, "pack-quantized", None, None),
    "int4 asymmetric": (
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": False}, "pack-quantized",
        None, None,
    ),
    "int3": ({"num_bits": 3, "type": "int", "strategy": "channel"}, "pack-quantized", None, None),
    "int8": ({"num_bits": 8, "type": "int", "strategy": "group", "group_size": 32}, "pack-quantized", None, None),
    "mxfp4": (
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}, "mxfp4-pack-quantized", None, None,
    ),
}  # fmt: skip


def write(folder, case, skip=lambda name: False):
    """A checkpoint of a tiny Llama; the model that it stands for."""
    weights, format, inputs, quantize = CASES[case]
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}
    reference = random_reference(
        LlamaConfig(vocab_size=96, num_hidden_layers=2, tie_word_embeddings=False, attn_implementation="eager", **sizes)
    )
    tensors, ignored = dict(reference.state_dict()), ["lm_head"]
    for name, module in reference.named_modules():
        if not isinstance(module, nn.Linear) or name == "lm_head":
            continue
        if skip(name):
            ignored.append(name)
            continue
        stored, meant = library.compress(module.weight.data, weights, format, inputs)
        del tensors[f"{name}.weight"]
        if inputs is not None and not inputs["dynamic"]:
            stored["input_scale"] = torch.tensor([STATIC])
        tensors |= {f"{name}.{key}": tensor for key, tensor in stored.items()}
        module.weight.data = meant
        if quantize is not None:
            module.register_forward_pre_hook(lambda _, given, quantize=quantize: (quantize(given[0]), *given[1:]))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    described = {
        "quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ignored,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps({"quantization_config": described}))
    return reference


def read(folder, reference, ranks=Ranks()):
    """Our model of the checkpoint."""
    with open_safetensors(folder) as tensors:
        dtypes = {name: tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118
    scheme = scheme_of(json.loads((folder / "config.json").read_text()), dtypes=dtypes)
    assert not scheme.disagreements
    config = model_config(reference)
    build = BuildContext(
        config=config, ranks=ranks, dtype=torch.float32, device=torch.device("cpu"), ops=TorchOps(),
        attention=TorchPagedAttention(), max_model_len=64, scheme=scheme,
    )  # fmt: skip
    model = model_class(config.architecture)(build)
    create_weights(model, build)
    load_weights(collect_targets(model), model.ignores, open_checkpoint(local_files("tiny", folder)), progress=False)
    return model


def open_safetensors(folder):
    from safetensors import safe_open

    return safe_open(folder / "model.safetensors", framework="pt")


@pytest.mark.parametrize("case", CASES)
def test_logits(tmp_path, case):
    reference = write(tmp_path, case)
    model = read(tmp_path, reference)
    assert len(quantized_weights(model)) == 8
    expected = reference_logits(reference, TOKENS)
    # A sum in another order moves a few activations to the neighbouring code: a step of 1/127 or 1/16 of one value.
    bound = 1e-4 if CASES[case][2] is None else 0.02
    for size in (len(TOKENS), 1):
        difference = (in_chunks(model, TOKENS, size) - expected).abs().max() / expected.abs().max()
        assert difference < bound, difference


@pytest.mark.parametrize("case", ["w8a8", "int4 asymmetric"])
def test_a_part_in_16_bits_is_kept_apart(tmp_path, case):
    reference = write(tmp_path, case, skip=lambda name: name.endswith("layers.1.self_attn.k_proj"))
    model = read(tmp_path, reference)
    assert sum(isinstance(weight, SplitWeight) for weight in quantized_weights(model)) == 1
    expected = reference_logits(reference, TOKENS)
    difference = (in_chunks(model, TOKENS, 4) - expected).abs().max() / expected.abs().max()
    assert difference < (1e-4 if case != "w8a8" else 0.02)


@pytest.mark.parametrize("case", ["fp8", "fp8 static", "int4 asymmetric", "mxfp4"])
def test_two_ranks_hold_the_halves_of_one(tmp_path, case):
    reference = write(tmp_path, case)
    one = read(tmp_path, reference)
    halves = [read(tmp_path, reference, Ranks(tp_rank=rank, tp_size=2)) for rank in range(2)]
    for layer in range(2):
        whole, *parts = (model.model.layers[str(layer)] for model in (one, *halves))
        down = [part.mlp.down_proj.weight for part in (whole, *parts)]
        assert all(isinstance(weight, QuantizedWeight) for weight in down)
        assert torch.equal(torch.cat([weight.dequantize() for weight in down[1:]], 1), down[0].dequantize())
        up = [part.mlp.gate_up_proj.weight.dequantize() for part in (whole, *parts)]
        both = torch.stack([part.unflatten(0, (2, -1)) for part in up[1:]], 1).flatten(0, 2)
        assert torch.equal(both, up[0])
