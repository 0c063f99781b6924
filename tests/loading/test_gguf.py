"""GGUF files: values against the gguf package, layouts against llama.cpp's converters, errors of damaged files."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from quire.errors import CheckpointError, QuireError, UnsupportedModelError
from quire.loading.files import local_files
from quire.loading.gguf import GGUFCheckpoint
from quire.loading.gguf_header import read_header
from quire.loading.load import load_weights, open_checkpoint
from quire.loading.model_config import read_model_config
from quire.loading.weights import Target
from tests.loading.conftest import HEAD_DIM, HEADS, HIDDEN, INNER, KV_HEADS, VOCAB, by_name

Write = Callable[..., Path]
QUANTIZABLE = [Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0]
K_QUANTS = [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K]
RNG = np.random.default_rng(5)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("kind", QUANTIZABLE, ids=lambda kind: kind.name)
def test_values_and_slices_equal_the_packages_own(write_gguf: Write, kind: Kind) -> None:
    array = normal(INNER, HIDDEN)
    path = write_gguf({"blk.0.ffn_up.weight": array, "output_norm.weight": array[0]}, kind)
    expected = torch.from_numpy(gguf.dequantize(gguf.quantize(array, kind), kind).copy())
    weights = by_name(GGUFCheckpoint(path))
    weight = weights["model.layers.0.mlp.up_proj.weight"]
    assert weight.shape == (INNER, HIDDEN)
    check_slices(weight, expected)
    assert torch.equal(weights["model.norm.weight"].read(), torch.from_numpy(array[0]))


@pytest.mark.parametrize("kind", K_QUANTS, ids=lambda kind: kind.name)
def test_k_quants_equal_the_packages_own(tmp_path: Path, kind: Kind) -> None:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = RNG.integers(0, 60, (32, 2 * size), dtype=np.uint8)  # Small bytes keep the half-precision scales finite.
    writer = gguf.GGUFWriter(tmp_path / "k.gguf", "qwen2")
    writer.add_tensor("blk.0.ffn_up.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (weight,) = GGUFCheckpoint(tmp_path / "k.gguf")
    assert weight.shape == (32, 2 * block)
    check_slices(weight, torch.from_numpy(gguf.dequantize(raw, kind)))


def check_slices(weight: object, expected: torch.Tensor) -> None:
    rows, columns = expected.shape
    for keep in [
        (),
        (slice(3, 17),),
        (slice(None), slice(columns // 2, None)),
        (slice(1, 9), slice(5, 41)),
        (slice(0, rows, 3),),
        (slice(4, 4),),
    ]:
        part = weight.read(keep)
        assert torch.equal(part.float(), expected[keep]), keep


def test_stacks_of_matrices_can_be_sliced_in_every_dimension(write_gguf: Write) -> None:
    array = normal(6, 8, HIDDEN)
    (weight,) = GGUFCheckpoint(write_gguf({"blk.0.stack.weight": array}, Kind.Q8_0))
    expected = torch.from_numpy(gguf.dequantize(gguf.quantize(array, Kind.Q8_0), Kind.Q8_0))
    for keep in [(), (slice(1, 3),), (slice(None), slice(2, 5)), (slice(0, 6, 2), slice(3, 4), slice(30, 99))]:
        assert torch.equal(weight.read(keep), expected[keep])


def test_only_kept_rows_are_dequantized(write_gguf: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf({"blk.0.ffn_up.weight": normal(INNER, HIDDEN)}, Kind.Q8_0)
    (weight,) = GGUFCheckpoint(path)
    seen: list[tuple[int, ...]] = []
    real = gguf.quants.dequantize
    monkeypatch.setattr(gguf.quants, "dequantize", lambda data, kind: seen.append(data.shape) or real(data, kind))
    weight.read((slice(10, 14), slice(64, 128)))
    assert seen == [(4, 2 * 34)]  # Four rows of two blocks of 34 bytes.


def as_llama_cpp_permutes(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to Q and K: rotary halves (0..d/2, d/2..d) become neighbours."""
    out = np.empty_like(weight)
    dim = len(weight) // heads
    for head in range(heads):
        for i in range(dim // 2):
            out[head * dim + 2 * i] = weight[head * dim + i]
            out[head * dim + 2 * i + 1] = weight[head * dim + dim // 2 + i]
    return out


def test_llama_rows_are_reordered_and_qwen_rows_are_not(write_gguf: Write) -> None:
    q, k, bias = normal(HEADS * HEAD_DIM, HIDDEN), normal(KV_HEADS * HEAD_DIM, HIDDEN), normal(HEADS * HEAD_DIM)
    path = write_gguf(
        {
            "blk.0.attn_q.weight": as_llama_cpp_permutes(q, HEADS),
            "blk.0.attn_q.bias": as_llama_cpp_permutes(bias, HEADS),
            "blk.0.attn_k.weight": as_llama_cpp_permutes(k, KV_HEADS),
        }
    )
    weights = by_name(GGUFCheckpoint(path))
    check_slices(weights["model.layers.0.self_attn.q_proj.weight"], torch.from_numpy(q))
    check_slices(weights["model.layers.0.self_attn.k_proj.weight"], torch.from_numpy(k))
    assert torch.equal(
        weights["model.layers.0.self_attn.q_proj.bias"].read((slice(9, 70),)), torch.from_numpy(bias[9:70])
    )
    path = write_gguf({"blk.0.attn_q.weight": q}, arch="qwen2", name="qwen.gguf")
    (weight,) = GGUFCheckpoint(path)
    assert torch.equal(weight.read(), torch.from_numpy(q))


def test_gpt2_and_neox_layouts_are_converted(write_gguf: Write) -> None:
    conv = normal(HIDDEN, 3 * HIDDEN)  # Hugging Face's Conv1D: [in, out]; the file has [out, in].
    path = write_gguf({"blk.1.attn_qkv.weight": conv.T.copy()}, arch="gpt2")
    (weight,) = GGUFCheckpoint(path)
    assert weight.name == "transformer.h.1.attn.c_attn.weight" and weight.shape == conv.shape
    check_slices(weight, torch.from_numpy(conv))

    fused = normal(HEADS, 3, HEAD_DIM, HIDDEN)  # Hugging Face's GPT-NeoX: per head Q, K, V.
    split = np.concatenate([fused[:, part].reshape(-1, HIDDEN) for part in range(3)])
    path = write_gguf({"blk.1.attn_qkv.weight": split}, arch="gptneox", name="neox.gguf")
    (weight,) = GGUFCheckpoint(path)
    assert weight.name == "gpt_neox.layers.1.attention.query_key_value.weight"
    check_slices(weight, torch.from_numpy(fused.reshape(-1, HIDDEN)))


def test_the_config_is_read_from_the_header(write_gguf: Write) -> None:
    def tokens(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_freq_base(5e5)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_eot_token_id(3)
        writer.add_file_type(1)

    path = write_gguf({"token_embd.weight": normal(VOCAB, HIDDEN)}, Kind.F16, extra=tokens)
    config = read_model_config(local_files("m", path), {"max_position_embeddings": 64})
    assert (config.architecture, config.vocab_size, config.hidden_size, config.num_layers) == (
        "LlamaForCausalLM",
        VOCAB,
        HIDDEN,
        2,
    )
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (HEADS, KV_HEADS, HEAD_DIM)
    assert config.rope["rope_theta"] == 5e5 and config.tie_embeddings and config.dtype == "float16"
    assert config.bos_token_id == 1 and config.eos_token_ids == (2, 3) and config.max_position == 64
    for arch, name in {"qwen3": "Qwen3ForCausalLM", "gpt2": "GPT2LMHeadModel", "gptneox": "GPTNeoXForCausalLM"}.items():
        path = write_gguf({"token_embd.weight": normal(VOCAB, HIDDEN)}, arch=arch, name=f"{arch}.gguf")
        assert read_model_config(local_files("m", path)).architecture == name


def test_llama3_rope_is_recovered_from_its_table(write_gguf: Write) -> None:
    transformers = pytest.importorskip("transformers")
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    llama = transformers.LlamaConfig(
        hidden_size=HIDDEN, num_attention_heads=HEADS, rope_parameters=rope, num_hidden_layers=1
    )
    scaled = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(llama).inv_freq.numpy()
    table = 1.0 / 5e5 ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM) / scaled
    tensors = {"token_embd.weight": normal(VOCAB, HIDDEN), "rope_freqs.weight": table}
    path = write_gguf(tensors, extra=lambda writer: writer.add_rope_freq_base(5e5))
    found = dict(read_model_config(local_files("m", path)).rope)
    assert found.pop("rope_type") == rope.pop("rope_type")
    assert {key: found[key] for key in rope} == pytest.approx(rope)
    path = write_gguf({**tensors, "rope_freqs.weight": table[::-1].copy()}, name="odd.gguf")
    with pytest.raises(UnsupportedModelError, match="other than Llama 3's"):
        read_model_config(local_files("m", path))


def test_errors_name_what_is_not_supported(write_gguf: Write) -> None:
    path = write_gguf({}, arch="mamba")
    for read in (lambda: read_model_config(local_files("m", path)), lambda: GGUFCheckpoint(path)):
        with pytest.raises(UnsupportedModelError, match="'mamba' is not supported; supported: .*gpt2"):
            read()
    path = write_gguf({}, arch="qwen2", extra=lambda writer: writer.add_expert_count(8), name="moe.gguf")
    with pytest.raises(UnsupportedModelError, match="'qwen2' with experts"):
        read_model_config(local_files("m", path))
    embedding = {"token_embd.weight": normal(VOCAB, HIDDEN)}
    path = write_gguf(embedding, extra=lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), name="l.gguf")
    with pytest.raises(UnsupportedModelError, match="longrope"):
        read_model_config(local_files("m", path))


def test_an_unknown_tensor_is_reported_as_unexpected(write_gguf: Write) -> None:
    path = write_gguf({"blk.0.strange.weight": normal(4, 4)})
    with pytest.raises(CheckpointError, match=r"blk.0.strange.weight \(4, 4\)"):
        load_weights({}, lambda name: False, open_checkpoint(local_files("m", path)))


# --- damaged and lying files ---


def header(tensors: int = 1, values: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, values)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def tensor(name: bytes = b"t", dims: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    return (
        text(name)
        + struct.pack("<I", len(dims))
        + struct.pack(f"<{len(dims)}Q", *dims)
        + struct.pack("<IQ", kind, offset)
    )


BAD_HEADERS = {
    "too short": b"GGUF",
    "bad magic": b"GGML" + bytes(100),
    "version 1": header(version=1) + bytes(100),
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(100),
    "tensors and": header(tensors=1 << 62) + bytes(100),
    "values": header(0, values=1 << 62) + bytes(100),
    "a name of": header(0, 1) + struct.pack("<Q", 1 << 63) + bytes(100),
    "a string": header(0, 1) + text(b"k") + struct.pack("<IQ", 8, 1 << 40) + bytes(100),
    "unknown type 99": header(0, 1) + text(b"k") + struct.pack("<I", 99) + bytes(100),
    "array 'k' of": header(0, 1) + text(b"k") + struct.pack("<IIQ", 9, 4, 1 << 61) + bytes(100),
    "strings": header(0, 1) + text(b"k") + struct.pack("<IIQ", 9, 8, 1 << 61) + bytes(100),
    "runs past": header(0, 1) + text(b"k") + struct.pack("<IIQQ", 9, 8, 2, 1 << 63) + bytes(100),
    "unsupported type 9": header(0, 1) + text(b"k") + struct.pack("<IIQ", 9, 9, 1) + bytes(100),
    "appears twice": header(0, 2) + (text(b"k") + struct.pack("<IB", 0, 1)) * 2 + bytes(100),
    "dimensions": header() + tensor(dims=(1,) * 9) + bytes(200),
    "the shape": header() + tensor(dims=(0,)) + bytes(200),
    "unknown encoding": header() + tensor(kind=1234) + bytes(200),
    "do not divide": header() + tensor(dims=(33,), kind=2) + bytes(200),
    "beyond the end": header() + tensor(dims=(1 << 40, 1 << 20)) + bytes(200),
    "would end at": header() + tensor(offset=1 << 40) + bytes(200),
    "not a multiple": header() + tensor(offset=3) + bytes(200),
    "tensor 't' appears twice": header(2) + tensor() * 2 + bytes(300),
    "'t' and 'u' overlap": header(2) + tensor() + tensor(b"u", offset=96) + bytes(500),
    "'u' and 't' overlap": header(2) + tensor(offset=64) + tensor(b"u") + bytes(500),
    "'a' and 'b' overlap": header(2) + tensor(b"a", kind=2) + tensor(b"b", kind=2) + bytes(500),
    "96 bytes between the tensors 't' and 'u'": header(2) + tensor(dims=(16,)) + tensor(b"u", offset=160) + bytes(500),
    "general.alignment": header(0, 1) + text(b"general.alignment") + struct.pack("<II", 4, 0) + bytes(100),
}


@pytest.mark.parametrize("what", BAD_HEADERS)
def test_an_inconsistent_header_is_refused_with_the_reason(tmp_path: Path, what: str) -> None:
    path = tmp_path / "liar.gguf"
    path.write_bytes(BAD_HEADERS[what])
    with pytest.raises(CheckpointError, match=r"liar\.gguf") as caught:
        read_header(path)
    assert what in str(caught.value)


def test_a_file_cut_short_or_scrambled_anywhere_only_raises_our_errors(write_gguf: Write, tmp_path: Path) -> None:
    good = write_gguf(
        {"token_embd.weight": normal(8, HIDDEN), "blk.0.attn_q.weight": normal(HIDDEN, HIDDEN)}
    ).read_bytes()
    path = tmp_path / "bad.gguf"

    def attempt(content: bytes) -> None:
        path.write_bytes(content)
        try:
            files = local_files("m", path)
            read_model_config(files)
            for weight in open_checkpoint(files):
                weight.read((slice(0, 1),))
        except QuireError:
            pass

    for length in [*range(0, 700, 7), len(good) - 1]:
        attempt(good[:length])
    path.write_bytes(good[:-1])
    with pytest.raises(CheckpointError, match="cut short"):
        read_header(path)
    rng = np.random.default_rng(0)
    for _ in range(300):
        content = bytearray(good)
        for at in rng.integers(4, 700, 3):
            content[at] = rng.integers(256)
        attempt(bytes(content))


def test_a_config_of_a_billion_layers_is_refused_at_once(write_gguf: Write) -> None:
    embedding = {"token_embd.weight": normal(VOCAB, HIDDEN)}
    content = write_gguf(embedding).read_bytes()
    key = b"llama.block_count" + struct.pack("<I", 4)
    path = write_gguf(embedding, name="deep.gguf")
    path.write_bytes(content.replace(key + struct.pack("<I", 2), key + struct.pack("<I", 1 << 31)))
    with pytest.raises(CheckpointError, match="num_hidden_layers = 2,147,483,648"):
        read_model_config(local_files("m", path))


def test_heads_that_do_not_divide_the_rows_are_refused(write_gguf: Write) -> None:
    path = write_gguf({"blk.0.attn_q.weight": normal(30, HIDDEN)})
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_q\.weight"):
        GGUFCheckpoint(path)


# --- the real thing ---


def test_the_default_model_equals_the_packages_reading(default_model: Path) -> None:
    files = local_files("m", default_model)
    config = read_model_config(files)
    assert config.architecture == "LlamaForCausalLM" and config.num_layers == 30 and config.rope["rope_theta"] == 1e5
    weights = by_name(open_checkpoint(files))
    assert len(weights) == 272
    ours = read_header(default_model)
    embedding = ours.tensors["token_embd.weight"]
    raw = np.memmap(default_model, np.uint8, "r", embedding.start, (embedding.nbytes,)).reshape(49152, -1)
    expected = gguf.dequantize(raw[1000:1010], Kind.Q8_0)
    assert np.array_equal(weights["model.embed_tokens.weight"].read((slice(1000, 1010),)).numpy(), expected)
    target = Target(torch.empty(192, 576), (192, 576))
    name = "model.layers.3.self_attn.k_proj.weight"
    load_weights({name: [target]}, lambda other: other != name, open_checkpoint(files))
    assert 0.01 < target.into.std() < 1
