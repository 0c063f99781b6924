"""Maps llama.cpp's tensor names and layouts to those of Hugging Face's modelling code.

GGUF files rename tensors, and for some families reorder their rows: LLaMA's Q and K are stored with the two halves of
each rotary pair side by side; GPT-NeoX's and Falcon's fused QKV is stored as all Q, all K, all V; GPT-2's Conv1D
weights are stored transposed. Only whole rows are reordered, so reading a slice of rows stays cheap. Gemma 2's and 3's
norms are stored with 1 added.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from quire.errors import CheckpointError

_LLAMA = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.{}.attn_norm": "model.layers.{}.input_layernorm",
    "blk.{}.attn_q": "model.layers.{}.self_attn.q_proj",
    "blk.{}.attn_k": "model.layers.{}.self_attn.k_proj",
    "blk.{}.attn_v": "model.layers.{}.self_attn.v_proj",
    "blk.{}.attn_q_norm": "model.layers.{}.self_attn.q_norm",
    "blk.{}.attn_k_norm": "model.layers.{}.self_attn.k_norm",
    "blk.{}.attn_output": "model.layers.{}.self_attn.o_proj",
    "blk.{}.ffn_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.ffn_gate": "model.layers.{}.mlp.gate_proj",
    "blk.{}.ffn_up": "model.layers.{}.mlp.up_proj",
    "blk.{}.ffn_down": "model.layers.{}.mlp.down_proj",
}

_MIXTURE = _LLAMA | {
    "blk.{}.ffn_gate_inp": "model.layers.{}.mlp.gate",
    "blk.{}.ffn_gate_exps": "model.layers.{}.mlp.experts.gate_proj",
    "blk.{}.ffn_up_exps": "model.layers.{}.mlp.experts.up_proj",
    "blk.{}.ffn_down_exps": "model.layers.{}.mlp.experts.down_proj",
    "blk.{}.ffn_gate_inp_shexp": "model.layers.{}.mlp.shared_expert_gate",
    "blk.{}.ffn_gate_shexp": "model.layers.{}.mlp.shared_expert.gate_proj",
    "blk.{}.ffn_up_shexp": "model.layers.{}.mlp.shared_expert.up_proj",
    "blk.{}.ffn_down_shexp": "model.layers.{}.mlp.shared_expert.down_proj",
}

_GPT2 = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "blk.{}.attn_norm": "transformer.h.{}.ln_1",
    "blk.{}.attn_qkv": "transformer.h.{}.attn.c_attn",
    "blk.{}.attn_output": "transformer.h.{}.attn.c_proj",
    "blk.{}.ffn_norm": "transformer.h.{}.ln_2",
    "blk.{}.ffn_up": "transformer.h.{}.mlp.c_fc",
    "blk.{}.ffn_down": "transformer.h.{}.mlp.c_proj",
}

_NEOX = {
    "token_embd": "gpt_neox.embed_in",
    "output_norm": "gpt_neox.final_layer_norm",
    "output": "embed_out",
    "blk.{}.attn_norm": "gpt_neox.layers.{}.input_layernorm",
    "blk.{}.attn_qkv": "gpt_neox.layers.{}.attention.query_key_value",
    "blk.{}.attn_output": "gpt_neox.layers.{}.attention.dense",
    "blk.{}.ffn_norm": "gpt_neox.layers.{}.post_attention_layernorm",
    "blk.{}.ffn_up": "gpt_neox.layers.{}.mlp.dense_h_to_4h",
    "blk.{}.ffn_down": "gpt_neox.layers.{}.mlp.dense_4h_to_h",
}

_PHI3 = _LLAMA | {
    "blk.{}.attn_qkv": "model.layers.{}.self_attn.qkv_proj",
    "blk.{}.ffn_up": "model.layers.{}.mlp.gate_up_proj",
}

_OLMO2 = _LLAMA | {
    "blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.post_ffw_norm": "model.layers.{}.post_feedforward_layernorm",
}

_GEMMA = _LLAMA | {
    "blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.ffn_norm": "model.layers.{}.pre_feedforward_layernorm",
    "blk.{}.post_ffw_norm": "model.layers.{}.post_feedforward_layernorm",
}

_STARCODER2 = _LLAMA | {
    "blk.{}.ffn_up": "model.layers.{}.mlp.c_fc",
    "blk.{}.ffn_down": "model.layers.{}.mlp.c_proj",
}

_FALCON = {
    "token_embd": "transformer.word_embeddings",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "blk.{}.attn_norm": "transformer.h.{}.input_layernorm",
    "blk.{}.attn_qkv": "transformer.h.{}.self_attention.query_key_value",
    "blk.{}.attn_output": "transformer.h.{}.self_attention.dense",
    "blk.{}.ffn_up": "transformer.h.{}.mlp.dense_h_to_4h",
    "blk.{}.ffn_down": "transformer.h.{}.mlp.dense_4h_to_h",
}

NAMES: Mapping[str, Mapping[str, str]] = {
    "llama": _MIXTURE,
    "qwen2": _LLAMA,
    "qwen2moe": _MIXTURE,
    "qwen3": _LLAMA,
    "qwen3moe": _MIXTURE,
    "gpt2": _GPT2,
    "gptneox": _NEOX,
    "phi3": _PHI3,
    "granite": _LLAMA,
    "granitemoe": _MIXTURE,
    "olmo2": _OLMO2,
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "command-r": _LLAMA,
    "cohere2": _LLAMA,
    "smollm3": _LLAMA,
    "starcoder2": _STARCODER2,
    "stablelm": _LLAMA,
    "falcon": _FALCON,
}

# Families whose Q and K are stored with the two halves of each rotary pair side by side.
_PAIRED = frozenset({"llama", "granite", "granitemoe", "smollm3"})

# Tables for llama.cpp's rotary embedding; the model's config has the same information.
_NOT_WEIGHTS = re.compile(r"rope_freqs\.weight|rope_factors_(long|short)\.weight")
_BLOCK = re.compile(r"blk\.(\d+)\.")
# Early mixture files have one tensor per expert.
_EXPERT = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)\.(\d+)\.weight")
_CONV1D = re.compile(r"blk\.\d+\.(attn_qkv|attn_output|ffn_up|ffn_down)\.weight")


def hf_name(architecture: str, name: str) -> str | None:
    """The tensor's name in Hugging Face's code; unchanged if unknown, None if it is not a weight."""
    if _NOT_WEIGHTS.fullmatch(name):
        return None
    if one := _EXPERT.fullmatch(name):
        return f"model.layers.{one[1]}.mlp.experts.{one[3]}.{one[2]}_proj.weight"
    stem, _, suffix = name.rpartition(".")
    layer = _BLOCK.match(name)
    found = NAMES[architecture].get(_BLOCK.sub("blk.{}.", stem))
    return name if found is None else f"{found.format(layer[1] if layer else '')}.{suffix}"


def is_transposed(architecture: str, name: str) -> bool:
    """Whether the file has the transpose of Hugging Face's tensor."""
    return architecture == "gpt2" and _CONV1D.fullmatch(name) is not None


def addend(architecture: str, name: str) -> float:
    """What the file has added to Hugging Face's values."""
    return 1.0 if architecture in ("gemma2", "gemma3") and name.endswith("norm.weight") else 0.0


def is_flat(name: str) -> bool:
    """Whether the file has a one-row matrix as a vector."""
    return name.endswith(".ffn_gate_inp_shexp.weight")


def row_order(architecture: str, name: str, rows: int, heads: int, kv_heads: int) -> np.ndarray | None:
    """For each row of Hugging Face's tensor, its row in the file; None if the order is the same."""
    if architecture in _PAIRED and (match := re.fullmatch(r"blk\.\d+\.attn_([qk])\.(weight|bias)", name)):
        count = heads if match[1] == "q" else kv_heads
        _divides(name, rows, 2 * count)
        # The file pairs (i, i + half) as neighbours (2i, 2i + 1) within each head.
        return np.arange(rows).reshape(count, rows // count // 2, 2).swapaxes(1, 2).reshape(-1)
    if architecture == "gptneox" and re.fullmatch(r"blk\.\d+\.attn_qkv\.(weight|bias)", name):
        _divides(name, rows, 3 * heads)
        return np.arange(rows).reshape(3, heads, rows // heads // 3).swapaxes(0, 1).reshape(-1)
    if architecture == "falcon" and re.fullmatch(r"blk\.\d+\.attn_qkv\.(weight|bias)", name):
        # The file has all Q, all K, all V; Hugging Face the Q of a group, its K, its V, then the next group.
        _divides(name, rows, heads + 2 * kv_heads)
        numbers = np.arange(rows).reshape(heads + 2 * kv_heads, -1)
        q, k, v = np.split(numbers, (heads, heads + kv_heads))
        grouped = q.reshape(kv_heads, -1, q.shape[1])
        return np.concatenate((grouped, k[:, None], v[:, None]), axis=1).reshape(-1)
    return None


def _divides(name: str, rows: int, parts: int) -> None:
    if parts < 1 or rows % parts:
        raise CheckpointError(f"tensor {name!r} has {rows} rows, not a multiple of {parts}, as the model's heads need")
