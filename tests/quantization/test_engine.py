"""Whole engines with weights in few bits: the tokens of the model that the numbers mean, whatever else a step holds;
and checkpoints that lie, which loading and `quire inspect` refuse in the same words."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.engine.tiers import kv_fingerprint
from quire.errors import CheckpointError, ConfigError, UnsupportedModelError
from quire.loading.files import local_files
from quire.loading.model_config import read_model_config
from tests.quantization.checkpoints import SCHEMES, WEIGHT_ONLY, Tensors, change_config, change_tensors, write

ON_LOAD = ("fp8", "int8", "int4", "mxfp4")
PROMPTS = [[7, 30, 51, 9, 64, 80, 3, 21] * 5, [11, 90, 4], [60, 61, 62, 63, 64, 65, 66] * 3]
GREEDY = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Tensors]]:
    """The folder of a checkpoint, and the tensors it means; written once."""
    made: dict[str, tuple[Path, Tensors]] = {}

    def find(name: str) -> tuple[Path, Tensors]:
        if name not in made:
            folder = tmp_path_factory.mktemp("quantized") / "model"
            made[name] = (folder, write(folder, name))
        return made[name]

    return find


def engine(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), **{"dtype": "float32", "num_gpu_blocks_override": 64, "device": "cpu", **settings})


def tokens(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [list(result.outputs[0].token_ids) for result in llm.generate(asked, GREEDY)]


@pytest.mark.parametrize("name", WEIGHT_ONLY)
def test_greedy_tokens_are_those_of_the_dequantized_model(name: str, checkpoint: Any, tmp_path: Path) -> None:
    folder, means = checkpoint(name)
    shutil.copytree(folder, tmp_path / "plain")
    save_file(means, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "plain" / "config.json").write_text(json.dumps(config))
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    with engine(folder, cpu_weights="dense") as llm:
        found = tokens(llm, PROMPTS)
    for prompt, made in zip(PROMPTS, found, strict=True):
        assert made == _greedy(reference, prompt, len(made))


@torch.no_grad()
def _greedy(reference: Any, prompt: list[int], count: int) -> list[int]:
    row = list(prompt)
    for _ in range(count):
        row.append(int(reference(torch.tensor([row])).logits[0, -1].argmax()))
    return row[len(prompt) :]


@pytest.mark.parametrize("name", [*SCHEMES, *(f"{kind} on load" for kind in ON_LOAD)])
def test_chunks_prefix_hits_and_batches_change_no_token(name: str, checkpoint: Any, tiny_model: Path) -> None:
    quantization = name.split()[0] if name.endswith("on load") else None
    folder = tiny_model if quantization else checkpoint(name)[0]
    with engine(folder, quantization=quantization) as llm:
        alone = [tokens(llm, [prompt])[0] for prompt in PROMPTS]
        assert tokens(llm, PROMPTS) == alone  # together, and from cached prefixes
    with engine(folder, quantization=quantization, max_num_batched_tokens=7, max_num_seqs=3) as llm:
        assert tokens(llm, PROMPTS) == alone  # prompts in chunks that share steps with decodes


@pytest.mark.parametrize("kind", [None, "gguf", *ON_LOAD])
def test_a_gguf_file_runs_packed_or_rounded(kind: str | None, tmp_path: Path, tiny_model: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model)
    with engine(path, quantization=kind, skip_tokenizer_init=True) as llm:
        assert all(len(made) == 10 for made in tokens(llm, PROMPTS))


def write_gguf(path: Path, folder: Path) -> Path:
    """The tiny model with matrices in Q8_0, by the gguf package."""
    import gguf
    from safetensors.torch import load_file

    writer = gguf.GGUFWriter(path, "llama")
    for add, value in [
        (writer.add_context_length, 256), (writer.add_embedding_length, 64), (writer.add_block_count, 2),
        (writer.add_feed_forward_length, 96), (writer.add_head_count, 4), (writer.add_head_count_kv, 2),
        (writer.add_layer_norm_rms_eps, 1e-6), (writer.add_vocab_size, 128),
    ]:  # fmt: skip
        add(value)
    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    for name, tensor in load_file(folder / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.startswith("model.layers."):
            _, _, layer, inner = module.split(".", 3)
            short = f"blk.{layer}.{names[inner]}.weight"
        else:
            short = f"{names[module]}.weight"
        if name.endswith("_proj.weight"):
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(short, gguf.quantize(tensor.numpy(), kind), raw_dtype=kind)
        else:
            writer.add_tensor(short, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# Lies


def _drop(name: str) -> Callable[[Tensors], None]:
    def drop(tensors: Tensors) -> None:
        del tensors[name]

    return drop


def _replace(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: change(tensors[name])})


UP = "model.layers.1.mlp.up_proj"
LIES: dict[str, tuple[str, Callable[[Tensors], None], str]] = {
    "a missing scale": ("fp8", _drop(f"{UP}.weight_scale"), rf"missing from the checkpoint:\n  - {UP}\.weight_scale"),
    "missing zeros": ("awq", _drop(f"{UP}.qzeros"), rf"missing from the checkpoint:\n  - {UP}\.qzeros"),
    "an extra scale": (
        "packed", lambda tensors: tensors.update({f"{UP}.weight_zero": torch.ones(1)}),
        rf"unknown to the model:\n  - {UP}\.weight_zero \(1,\)",
    ),
    "scales of another shape": (
        "gptq", _replace(f"{UP}.scales", lambda scales: scales[:1]),
        rf"different shape than in the model:\n  - {UP}\.scales: \(1, 96\) in the checkpoint, \(2, 96\)",
    ),
    "codes of another shape": (
        "packed", _replace(f"{UP}.weight_packed", lambda codes: codes[:, :4]),
        rf"different shape than in the model:\n  - {UP}\.weight_packed: \(96, 4\)",
    ),
    "codes of another type": (
        "awq", _replace(f"{UP}.qweight", torch.Tensor.float),
        rf"another type than config\.json says:\n  - {UP}\.qweight: float32 in the checkpoint, int32 expected",
    ),
    "codes that no list names": (
        "fp8", lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"].to(torch.float8_e4m3fn)}),
        r"lm_head",
    ),
    "an embedding in codes": (
        "fp8", _replace("model.embed_tokens.weight", lambda table: table.to(torch.float8_e4m3fn)),
        r"another type than config\.json says:\n  - model\.embed_tokens\.weight: float8_e4m3fn in the checkpoint",
    ),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_lies_are_refused_by_loading_and_by_inspect_in_the_same_words(
    lie: str, checkpoint: Any, tmp_path: Path, quire: Any
) -> None:
    name, change, said = LIES[lie]
    folder = shutil.copytree(checkpoint(name)[0], tmp_path / "model")
    change_tensors(folder, change)
    with pytest.raises(CheckpointError, match=said) as refused:
        engine(folder)
    ran = quire("inspect", folder, "--dtype", "float32")
    assert ran.code == 2
    assert str(refused.value) in ran.err


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (None, r"stored in few bits .*F8_E4M3.*no quantization_config"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes', which is not read"),
        ({"quant_method": "new-and-shiny"}, "'new-and-shiny', which is not known"),
        ({"bits": 4}, "no quant_method"),
    ],
)
def test_a_description_that_is_missing_or_unknown_is_refused(
    config: Any, said: str, checkpoint: Any, tmp_path: Path, quire: Any
) -> None:
    folder = shutil.copytree(checkpoint("fp8")[0], tmp_path / "model")
    change_config(folder, quantization_config=config)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=said) as refused:
        engine(folder)
    ran = quire("inspect", folder)
    assert ran.code == 2 and str(refused.value) in ran.err


def test_a_file_cut_short_is_refused(checkpoint: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint("awq")[0], tmp_path / "model")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: damaged or unreadable"):
        engine(folder)


@pytest.mark.parametrize(
    ("name", "quantization", "said"),
    [
        ("awq", "gptq", "quantization is 'gptq', but .* is quantized as 'awq'"),
        ("awq", "int4", r"quantization is 'int4', but .* is already quantized \(awq\)"),
        ("fp8", "fp8", r"quantization is 'fp8', but .* is already quantized \(compressed-tensors\)"),
    ],
)
def test_a_setting_that_contradicts_the_checkpoint_names_both(
    name: str, quantization: str, said: str, checkpoint: Any
) -> None:
    with pytest.raises(ConfigError, match=said):
        engine(checkpoint(name)[0], quantization=quantization)


@pytest.mark.parametrize(("name", "quantization"), [("awq", "awq_marlin"), ("fp8 blocks", "fp8")])
def test_a_setting_that_agrees_changes_nothing(name: str, quantization: str, checkpoint: Any) -> None:
    with engine(checkpoint(name)[0]) as llm:
        expected = tokens(llm, PROMPTS)
    with engine(checkpoint(name)[0], quantization=quantization) as llm:
        assert tokens(llm, PROMPTS) == expected


def test_blocks_of_weights_rounded_otherwise_have_other_keys(tmp_path: Path, tiny_model: Path) -> None:
    files = local_files("m", tiny_model)
    model = read_model_config(files)
    table = tmp_path / "table.json"
    prints = []
    for wish in (None, "int4", "fp8", str(table), str(table)):
        table.write_text(json.dumps({".*down_proj": "int4" if len(prints) == 3 else "int8"}))
        prints.append(kv_fingerprint(EngineConfig(str(tiny_model), quantization=wish), files, model, "float32"))
    assert len(set(prints)) == 5


# quire inspect


@pytest.mark.parametrize("name", SCHEMES)
def test_inspect_says_how_each_layer_is_stored(name: str, checkpoint: Any, quire: Any) -> None:
    folder = checkpoint(name)[0]
    ran = quire("inspect", folder, "--json", "--device", "cpu", "--dtype", "bfloat16", "--cpu-weights", "dense")
    assert (ran.code, ran.err) == (0, "")
    found = json.loads(ran.out)
    assert found["problems"] == found["disagreements"] == []
    (layers,) = [each for each in found["layers"] if each["layers"]]
    assert layers["layers"] == [0, 1]
    assert layers["modules"] == [f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down")]
    assert [each["format"] for each in found["layers"] if not each["layers"]] == ["bfloat16", "bfloat16"]
    plain, few = sorted(found["formats"], key=lambda use: use["format"] != "bfloat16")
    assert plain["nbytes"] == 2 * (2 * 128 * 64 + 5 * 64)
    numbers = 2 * (64 * (64 + 2 * 32 + 64) + 3 * 64 * 96)
    bits = 8 if "8" in name else 4
    assert numbers * bits / 8 < few["nbytes"] < numbers * (bits + 1) / 8
    assert few["matrices"] == 14 and few["format"] == layers["format"]
    assert found["bytes"] == plain["nbytes"] + few["nbytes"] == found["memory"]["weights"]
    assert found["kv_bytes_per_token"] >= 2 * 2 * 2 * 16 * 2


def test_inspect_tells_a_skip_list_that_lies(checkpoint: Any, tmp_path: Path, quire: Any) -> None:
    """A layer in 16 bits that the description does not list: the tensors are right."""
    folder, means = checkpoint("packed")
    folder = shutil.copytree(folder, tmp_path / "model")

    def change(tensors: Tensors) -> None:
        for key in ("weight_packed", "weight_scale", "weight_shape"):
            del tensors[f"{UP}.{key}"]
        tensors[f"{UP}.weight"] = means[f"{UP}.weight"]

    change_tensors(folder, change)
    ran = quire("inspect", folder)
    assert ran.code == 0
    assert f"{UP} is int4" in ran.out and "but stored in 16 bits" in ran.out
    assert "layer 0: q, k, v, o, gate, up, down_proj: int4" in ran.out
    assert "layer 1: q, k, v, o, gate, down_proj: int4" in ran.out
    with engine(folder) as llm, engine(checkpoint("packed")[0]) as plain:
        assert tokens(llm, PROMPTS) == tokens(plain, PROMPTS)


def test_inspect_shows_what_quantizing_on_load_takes(tiny_model: Path, quire: Any) -> None:
    ran = quire("inspect", tiny_model, "-q", "int8")
    assert ran.code == 0
    assert "layers 0-1: q, k, v, o, gate, up, down_proj: int8, per output" in ran.out
    assert "14 matrices as ScaledWeight; plain torch on a CPU" in ran.out
