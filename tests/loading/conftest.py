"""Small checkpoints in every format, from the same random tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from quire.loading.hub import DEFAULT_MODEL, resolve
from quire.loading.weights import Checkpoint, Target

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, VOCAB = 4, 2, 64, 256, 512, 300
ALPHABET = [chr(c) for c in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model, downloaded into the real cache the first time."""
    path = resolve(DEFAULT_MODEL, progress=False).gguf
    if path is None:
        raise RuntimeError("the default model is not a GGUF file")
    return path


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    """Two layers of a LLaMA-like model, under Hugging Face's names."""
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    for layer in range(2):
        at = f"model.layers.{layer}."
        shapes |= {
            at + "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            at + "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            at + "mlp.down_proj.weight": (HIDDEN, INNER),
            at + "input_layernorm.weight": (HIDDEN,),
        }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def targets_for(tensors: dict[str, torch.Tensor]) -> dict[str, list[Target]]:
    """A target for every tensor, filled with a value that no tensor has."""
    return {n: [Target(torch.full(t.shape, -7.0), tuple(t.shape))] for n, t in tensors.items()}


def loaded(targets: dict[str, list[Target]]) -> dict[str, torch.Tensor]:
    """The contents of the targets."""
    return {name: each[0].into for name, each in targets.items()}


def by_name(checkpoint: Checkpoint) -> dict[str, object]:
    """The checkpoint's weights by name."""
    return {weight.name: weight for weight in checkpoint}


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Writes a GGUF file as llama.cpp's converter would: `tensors` under GGUF's names, optionally quantized."""

    def write(
        tensors: dict[str, np.ndarray],
        kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
        arch: str = "llama",
        extra: Callable[[gguf.GGUFWriter], None] | None = None,
        name: str = "model.gguf",
    ) -> Path:
        path = tmp_path / name
        writer = gguf.GGUFWriter(path, arch)
        writer.add_block_count(2)
        writer.add_context_length(512)
        writer.add_embedding_length(HIDDEN)
        writer.add_feed_forward_length(INNER)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_layer_norm_eps(1e-5)
        if extra is not None:
            extra(writer)
        for tensor_name, array in tensors.items():
            if array.ndim == 1 or kind == gguf.GGMLQuantizationType.F32:
                writer.add_tensor(tensor_name, array.astype(np.float32))
            else:
                writer.add_tensor(tensor_name, gguf.quantize(array.astype(np.float32), kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write
