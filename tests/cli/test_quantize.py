"""`quire quantize`: what it writes, as transformers and the format's own rules read it; what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from quire.quantization.writer import find_scheme

TEXT = "It was a bright cold day, and the clocks were striking thirteen. A tall man walked by the sea.\n" * 8
PARTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
         "mlp.up_proj", "mlp.down_proj")  # fmt: skip
MATRICES = [f"model.layers.{layer}.{part}" for layer in (0, 1) for part in PARTS]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def restored(folder: Path, scheme: str, group: int | None = None) -> dict[str, torch.Tensor]:
    """All tensors of a written checkpoint, matrices dequantized."""
    tensors = load_file(folder / "model.safetensors")
    found = find_scheme(scheme, group)
    for name in MATRICES:
        stored = {key: tensors.pop(key) for key in list(tensors) if key.startswith(f"{name}.") and "bias" not in key}
        keys = {key.removeprefix(f"{name}."): value for key, value in stored.items()}
        tensors[f"{name}.weight"] = (
            found.restore(keys) if set(keys) != {"weight"} or "scale" in keys else keys["weight"]
        )
    return tensors


def logit_error(folder: Path, tensors: dict[str, torch.Tensor]) -> float:
    """Mean squared difference of logits over the text, relative to the original's."""
    model = LlamaForCausalLM.from_pretrained(folder)
    tokens = torch.tensor([AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"][:128]])
    with torch.no_grad():
        before = model(tokens).logits
        model.load_state_dict(tensors)
        return float((model(tokens).logits - before).square().mean() / before.square().mean())


@pytest.mark.parametrize(
    ("scheme", "group", "bound"),
    [("FP8", None, 0.03), ("FP8_BLOCK", None, 0.03), ("W8A8", None, 0.01), ("W4A16", 32, 0.13),
     ("W4A16_ASYM", 32, 0.13), ("MXFP4", None, 0.2), ("NVFP4", None, 0.15)],
)  # fmt: skip
def test_a_written_checkpoint(quire, byte_llama, tmp_path, scheme, group, bound):
    out = tmp_path / "out"
    flags = () if group is None else ("--group-size", group)
    ran = quire("quantize", byte_llama, "-o", out, "--scheme", scheme, *flags, "--device", "cpu")
    assert ran.code == 0, ran.err
    assert "14 in few bits" in ran.out
    original = LlamaForCausalLM.from_pretrained(byte_llama).state_dict()
    written = restored(out, scheme, group)
    assert written.keys() == original.keys()
    for name, value in original.items():
        if name.removesuffix(".weight") in MATRICES:
            error = (written[name] - value).square().mean().sqrt() / value.square().mean().sqrt()
            assert 0 < error < bound, name
        else:
            assert torch.equal(written[name], value), name
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == ["lm_head"]
    assert config["hidden_size"] == 64 and config["dtype"] == "float32"
    copied = {path.name for path in byte_llama.iterdir()}
    assert {path.name for path in out.iterdir()} == copied
    assert (out / "tokenizer.json").read_bytes() == (byte_llama / "tokenizer.json").read_bytes()


def test_parts_of_a_fused_layer_share_nvfp4_divisors(quire, byte_llama, tmp_path):
    assert quire("quantize", byte_llama, "-o", tmp_path / "out", "--scheme", "NVFP4").code == 0
    written, original = load_file(tmp_path / "out" / "model.safetensors"), load_file(byte_llama / "model.safetensors")
    for parts in (PARTS[:3], PARTS[3:4], PARTS[4:6], PARTS[6:]):
        names = [f"model.layers.1.{part}" for part in parts]
        peak = max(float(original[f"{name}.weight"].abs().max()) for name in names)
        for name in names:
            assert float(written[f"{name}.weight_global_scale"]) == pytest.approx(448 * 6 / peak)


def test_transformers_loads_it(quire, byte_llama, tmp_path):
    pytest.importorskip("compressed_tensors")
    pytest.importorskip("accelerate")
    out = tmp_path / "out"
    assert quire("quantize", byte_llama, "-o", out, "--scheme", "W4A16", "--group-size", 32).code == 0
    loaded = AutoModelForCausalLM.from_pretrained(out)
    plain = LlamaForCausalLM.from_pretrained(byte_llama)
    plain.load_state_dict(restored(out, "W4A16", 32))
    tokens = torch.tensor([[5, 6, 7, 8, 9, 10]])
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, plain(tokens).logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("scheme", "algorithm"),
    [("W4A16", "gptq"), ("W4A16", "awq"), ("W4A16", "awq-gptq"), ("W4A16_ASYM", "gptq"), ("FP8", "gptq"),
     ("FP8_BLOCK", "gptq"), ("W8A8", "smoothquant-gptq"), ("MXFP4", "gptq"), ("NVFP4", "gptq")],
)  # fmt: skip
def test_calibrated_codes_err_less(quire, byte_llama, tmp_path, text, scheme, algorithm):
    errors = []
    group = 32 if scheme.startswith("W4") else None
    for name in ("rtn", algorithm):
        out = tmp_path / name
        flags = ("--samples", 8, "--sample-length", 64) if name != "rtn" else ()
        flags += () if group is None else ("--group-size", group)
        flags += ("--correct",) if (scheme, name) == ("W4A16_ASYM", "gptq") else ()
        ran = quire(
            "quantize", byte_llama, "-o", out, "--scheme", scheme, "--algorithm", name, "--calibration", text, *flags
        )
        assert ran.code == 0, ran.err
        assert (" tokens" in ran.out) == (name != "rtn")
        errors.append(logit_error(byte_llama, restored(out, scheme, group)))
    assert errors[1] < 0.9 * errors[0]


def test_ignored_matrices_stay_as_they_are(quire, byte_llama, tmp_path):
    out = tmp_path / "out"
    ran = quire(
        "quantize", byte_llama, "-o", out, "--scheme", "W8A8", "--ignore", "re:.*down_proj",
        "model.layers.0.self_attn.q_proj",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    written, original = load_file(out / "model.safetensors"), load_file(byte_llama / "model.safetensors")
    kept = ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"]
    for name in kept:
        assert torch.equal(written[f"{name}.weight"], original[f"{name}.weight"])
        assert f"{name}.weight_scale" not in written
    listed = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    assert sorted(listed) == sorted(["lm_head", *kept])


def test_what_stays_has_the_dtype_asked_for(quire, byte_llama, tmp_path):
    out = tmp_path / "out"
    flags = ("--scheme", "W4A16", "--group-size", 64, "--dtype", "bfloat16", "--shard-size", "50k")
    assert quire("quantize", byte_llama, "-o", out, *flags).code == 0
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 1
    norm, scale = "model.norm.weight", "model.layers.1.mlp.up_proj.weight_scale"
    for name in (norm, scale):
        assert load_file(out / index[name])[name].dtype == torch.bfloat16
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--scheme", "W9"), "'W9' is not one of"),
        (("--scheme", "W4A16"), "groups of 128 do not divide; group sizes that do: 16, 32, 64"),
        (("--scheme", "W4A16", "--group-size", 32, "--algorithm", "gptq"), "gptq needs calibration text"),
        (("--scheme", "FP8", "--algorithm", "awq", "--calibration", "TEXT"), "awq is for integers in groups"),
        (("--scheme", "MXFP4", "--algorithm", "smoothquant", "--calibration", "TEXT"), "that round activations"),
        (("--scheme", "W8A8", "--algorithm", "magic"), "'magic' is not one of rtn"),
        (("--scheme", "W8A8", "--ignore", "q_proj"), "no matrix is called q_proj"),
        (("--scheme", "W8A8", "--dtype", "int4"), "--dtype"),
    ],
)
def test_refusals(quire, byte_llama, tmp_path, text, flags, said):
    given = [text if flag == "TEXT" else flag for flag in flags]
    ran = quire("quantize", byte_llama, "-o", tmp_path / "out", *given)
    assert ran.code == 2 and said in ran.err
    assert not (tmp_path / "out" / "config.json").exists()


def test_quantized_checkpoints_and_full_folders_are_refused(quire, byte_llama, tmp_path):
    out = tmp_path / "out"
    assert quire("quantize", byte_llama, "-o", out, "--scheme", "W8A8").code == 0
    again = quire("quantize", out, "-o", tmp_path / "again", "--scheme", "FP8")
    assert again.code == 2 and "is quantized already (quant_method 'compressed-tensors')" in again.err
    full = quire("quantize", byte_llama, "-o", out, "--scheme", "W8A8")
    assert full.code == 2 and "not an empty folder" in full.err


@pytest.mark.parametrize("algorithm", ["rtn", "gptq", "awq"])
def test_experts_are_written_one_by_one(quire, byte_llama, tmp_path, text, algorithm):
    """transformers may hold experts in stacks; compressed-tensors has a module for each."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    source, out = tmp_path / "source", tmp_path / "out"
    tokenizer = AutoTokenizer.from_pretrained(byte_llama)
    torch.manual_seed(3)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2,
        max_position_embeddings=128, bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(source)
    tokenizer.save_pretrained(source)
    ran = quire(
        "quantize", source, "-o", out, "--scheme", "W4A16", "--group-size", 32, "--algorithm", algorithm,
        "--calibration", text, "--samples", 4, "--sample-length", 64, "--text", text,
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert "perplexity" in ran.out and "before" in ran.out
    written = load_file(out / "model.safetensors")
    experts = {f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight_packed" for layer in (0, 1)
               for expert in range(4) for part in ("gate", "up", "down")}  # fmt: skip
    assert experts == {name for name in written if ".experts." in name and name.endswith("packed")}
    routers = [f"model.layers.{layer}.mlp.gate" for layer in (0, 1)]
    assert all(f"{name}.weight" in written for name in routers)
    assert set(routers) <= set(json.loads((out / "config.json").read_text())["quantization_config"]["ignore"])
    found = json.loads(quire("eval", out, "--text", text, "--against", source, "--json").out)["against"]
    assert 0 < found["mean_kl"] < 0.05
