"""Maps llama.cpp's tensor names and layouts to those of Hugging Face's modelling code.

GGUF files rename tensors, and for some families reorder their rows: LLaMA's Q and K are stored with the two halves of
each rotary pair side by side; GPT-NeoX's and Falcon's fused QKV is stored as all Q, all K, all V; GPT-2's Conv1D
weights are stored transposed. Only whole rows are reordered, so reading a slice of rows stays cheap; but Qwen3.5's
value heads lie in another order in the outputs of some matrices and the inputs of one. Gemma 2's and 3's and Qwen3.5's
norms are stored with 1 added, and the decay of delta nets as -exp(A_log). DeepSeek's `kv_b_proj` is stored as its keys'
rows, transposed for each head, and its values' rows; the gate and up rows of Granite 4's MLPs are stored apart.
Qwen3-Next is read as Qwen3.5, whose matrices hold the same rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from quire.errors import CheckpointError

if TYPE_CHECKING:
    import torch

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

_LFM2 = {
    "token_embd": "model.embed_tokens",
    "token_embd_norm": "model.embedding_norm",  # of the output, for all its name
    "output_norm": "model.embedding_norm",
    "output": "lm_head",
    "blk.{}.attn_norm": "model.layers.{}.operator_norm",
    "blk.{}.ffn_norm": "model.layers.{}.ffn_norm",
    "blk.{}.attn_q": "model.layers.{}.self_attn.q_proj",
    "blk.{}.attn_k": "model.layers.{}.self_attn.k_proj",
    "blk.{}.attn_v": "model.layers.{}.self_attn.v_proj",
    "blk.{}.attn_q_norm": "model.layers.{}.self_attn.q_layernorm",
    "blk.{}.attn_k_norm": "model.layers.{}.self_attn.k_layernorm",
    "blk.{}.attn_output": "model.layers.{}.self_attn.out_proj",
    "blk.{}.shortconv.conv": "model.layers.{}.conv.conv",
    "blk.{}.shortconv.in_proj": "model.layers.{}.conv.in_proj",
    "blk.{}.shortconv.out_proj": "model.layers.{}.conv.out_proj",
    "blk.{}.ffn_gate": "model.layers.{}.feed_forward.w1",
    "blk.{}.ffn_up": "model.layers.{}.feed_forward.w3",
    "blk.{}.ffn_down": "model.layers.{}.feed_forward.w2",
}

_LFM2_MIXTURE = (
    _LFM2
    | {place: name for place, name in _MIXTURE.items() if "_exps" in place or place.endswith("ffn_gate_inp")}
    | {"blk.{}.exp_probs_b.bias": "model.layers.{}.feed_forward.expert_bias"}
)

_GEMMA4 = (
    _GEMMA
    | {place: name for place, name in _MIXTURE.items() if place.endswith("_exps")}
    | {
        "per_layer_token_embd": "model.embed_tokens_per_layer",
        "per_layer_model_proj": "model.per_layer_model_projection",
        "per_layer_proj_norm": "model.per_layer_projection_norm",
        "blk.{}.layer_output_scale.weight": "model.layers.{}.layer_scalar",
        "blk.{}.inp_gate": "model.layers.{}.per_layer_input_gate",
        "blk.{}.proj": "model.layers.{}.per_layer_projection",
        "blk.{}.post_norm": "model.layers.{}.post_per_layer_input_norm",
        "blk.{}.ffn_gate_inp": "model.layers.{}.router.proj",
        "blk.{}.ffn_gate_inp.scale": "model.layers.{}.router.scale",
        "blk.{}.ffn_down_exps.scale": "model.layers.{}.router.per_expert_scale",
        "blk.{}.pre_ffw_norm_2": "model.layers.{}.pre_feedforward_layernorm_2",
        "blk.{}.post_ffw_norm_1": "model.layers.{}.post_feedforward_layernorm_1",
        "blk.{}.post_ffw_norm_2": "model.layers.{}.post_feedforward_layernorm_2",
    }
)

_GPT_OSS = _LLAMA | {
    "blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.attn_sinks.weight": "model.layers.{}.self_attn.sinks",
    "blk.{}.ffn_gate_inp": "model.layers.{}.mlp.router",
    "blk.{}.ffn_gate_exps": "model.layers.{}.mlp.experts.gate_proj",
    "blk.{}.ffn_up_exps": "model.layers.{}.mlp.experts.up_proj",
    "blk.{}.ffn_down_exps": "model.layers.{}.mlp.experts.down_proj",
}

_QWEN35 = _MIXTURE | {
    "blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.attn_qkv": "model.layers.{}.linear_attn.in_proj_qkv",
    "blk.{}.attn_gate": "model.layers.{}.linear_attn.in_proj_z",
    "blk.{}.ssm_beta": "model.layers.{}.linear_attn.in_proj_b",
    "blk.{}.ssm_alpha": "model.layers.{}.linear_attn.in_proj_a",
    "blk.{}.ssm_a": "model.layers.{}.linear_attn.A_log",
    "blk.{}.ssm_dt.bias": "model.layers.{}.linear_attn.dt_bias",
    "blk.{}.ssm_conv1d": "model.layers.{}.linear_attn.conv1d",
    "blk.{}.ssm_norm": "model.layers.{}.linear_attn.norm",
    "blk.{}.ssm_out": "model.layers.{}.linear_attn.out_proj",
}

_SHARED = {
    "blk.{}.ffn_gate_shexp": "model.layers.{}.mlp.shared_experts.gate_proj",
    "blk.{}.ffn_up_shexp": "model.layers.{}.mlp.shared_experts.up_proj",
    "blk.{}.ffn_down_shexp": "model.layers.{}.mlp.shared_experts.down_proj",
    "blk.{}.exp_probs_b.bias": "model.layers.{}.mlp.gate.e_score_correction_bias",
}

_DEEPSEEK2 = (
    _MIXTURE
    | _SHARED
    | {
        "blk.{}.attn_q_a": "model.layers.{}.self_attn.q_a_proj",
        "blk.{}.attn_q_a_norm": "model.layers.{}.self_attn.q_a_layernorm",
        "blk.{}.attn_q_b": "model.layers.{}.self_attn.q_b_proj",
        "blk.{}.attn_kv_a_mqa": "model.layers.{}.self_attn.kv_a_proj_with_mqa",
        "blk.{}.attn_kv_a_norm": "model.layers.{}.self_attn.kv_a_layernorm",
        "blk.{}.attn_kv_b": "model.layers.{}.self_attn.kv_b_proj",
    }
)

_GLM4 = _LLAMA | {
    "blk.{}.post_attention_norm": "model.layers.{}.post_self_attn_layernorm",
    "blk.{}.ffn_up": "model.layers.{}.mlp.gate_up_proj",
    "blk.{}.post_ffw_norm": "model.layers.{}.post_mlp_layernorm",
}

_GLM4_MIXTURE = _MIXTURE | _SHARED | {"blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm"}

_GRANITE_HYBRID = _MIXTURE | {
    "blk.{}.ffn_down": "model.layers.{}.shared_mlp.output_linear",
    "blk.{}.ffn_down_shexp": "model.layers.{}.shared_mlp.output_linear",
    "blk.{}.ssm_in": "model.layers.{}.mamba.in_proj",
    "blk.{}.ssm_conv1d": "model.layers.{}.mamba.conv1d",
    "blk.{}.ssm_dt.bias": "model.layers.{}.mamba.dt_bias",
    "blk.{}.ssm_a": "model.layers.{}.mamba.A_log",
    "blk.{}.ssm_d": "model.layers.{}.mamba.D",
    "blk.{}.ssm_norm": "model.layers.{}.mamba.norm",
    "blk.{}.ssm_out": "model.layers.{}.mamba.out_proj",
}

_NEMOTRON_H = {
    "token_embd": "backbone.embeddings",
    "output_norm": "backbone.norm_f",
    "output": "lm_head",
    "blk.{}.attn_norm": "backbone.layers.{}.norm",
    **{
        f"blk.{{}}.{own}": f"backbone.layers.{{}}.mixer.{name}"
        for own, name in {
            "attn_q": "q_proj",
            "attn_k": "k_proj",
            "attn_v": "v_proj",
            "attn_output": "o_proj",
            "ffn_up": "up_proj",
            "ffn_down": "down_proj",
            "ffn_gate_inp": "gate",
            "exp_probs_b.bias": "gate.e_score_correction_bias",
            "ffn_up_exps": "experts.up_proj",
            "ffn_down_exps": "experts.down_proj",
            "ffn_up_shexp": "shared_experts.up_proj",
            "ffn_down_shexp": "shared_experts.down_proj",
            "ffn_latent_down": "fc1_latent_proj",
            "ffn_latent_up": "fc2_latent_proj",
            "ssm_in": "in_proj",
            "ssm_conv1d": "conv1d",
            "ssm_dt.bias": "dt_bias",
            "ssm_a": "A_log",
            "ssm_d": "D",
            "ssm_norm": "norm",
            "ssm_out": "out_proj",
        }.items()
    },
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
    "granitemoe": _MIXTURE | {"blk.{}.ffn_down_shexp": "model.layers.{}.shared_mlp.output_linear"},
    "olmo2": _OLMO2,
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "gemma4": _GEMMA4,
    "command-r": _LLAMA,
    "cohere2": _LLAMA,
    "smollm3": _LLAMA,
    "starcoder2": _STARCODER2,
    "stablelm": _LLAMA,
    "falcon": _FALCON,
    "lfm2": _LFM2,
    "lfm2moe": _LFM2_MIXTURE,
    "gpt-oss": _GPT_OSS,
    "qwen35": _QWEN35,
    "qwen35moe": _QWEN35,
    "deepseek2": _DEEPSEEK2,
    "glm4": _GLM4,
    "glm4moe": _GLM4_MIXTURE,
    "granitehybrid": _GRANITE_HYBRID,
    "qwen3next": _QWEN35,
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
    "mistral3": _LLAMA,
    "minimax-m2": _MIXTURE | {"blk.{}.exp_probs_b.bias": "model.layers.{}.block_sparse_moe.e_score_correction_bias"},
}

_INPUT = "model.layers.{}.shared_mlp.input_linear.weight"
JOINED: Mapping[str, Sequence[tuple[str, tuple[str, str]]]] = {
    "deepseek2": [
        ("model.layers.{}.self_attn.kv_b_proj.weight", ("blk.{}.attn_k_b.weight", "blk.{}.attn_v_b.weight")),
    ],
    "granitemoe": [(_INPUT, ("blk.{}.ffn_gate_shexp.weight", "blk.{}.ffn_up_shexp.weight"))],
    "granitehybrid": [
        (_INPUT, ("blk.{}.ffn_gate.weight", "blk.{}.ffn_up.weight")),
        (_INPUT, ("blk.{}.ffn_gate_shexp.weight", "blk.{}.ffn_up_shexp.weight")),
    ],
}
"""Hugging Face's tensors that a file has in two, and those, in the order of their rows."""

# Families whose Q and K are stored with the two halves of each rotary pair side by side.
_PAIRED = frozenset({"llama", "granite", "granitemoe", "granitehybrid", "smollm3", "mistral3"})

_CENTERED = frozenset({"gemma2", "gemma3", "qwen35", "qwen35moe", "qwen3next"})
"""Families whose norms are stored with 1 added."""

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
    layer, names = _BLOCK.match(name), NAMES[architecture]
    number = layer[1] if layer else ""
    if whole := names.get(_BLOCK.sub("blk.{}.", name)):  # a tensor that has no suffix there
        return whole.format(number)
    found = names.get(_BLOCK.sub("blk.{}.", stem))
    return name if found is None else f"{found.format(number)}.{suffix}"


def part_of(architecture: str, name: str) -> tuple[str, int] | None:
    """(Hugging Face's tensor, which part of it the file's is), if a file has that tensor in two."""
    place = _BLOCK.sub("blk.{}.", name)
    for whole, parts in JOINED.get(architecture, ()):
        if place in parts:
            return whole.format(layer_of(name)), parts.index(place)
    return None


def halves_of(name: str) -> tuple[str, str] | None:
    """The tensors that make up one with gate and up of all experts, in the order of each expert's rows."""
    if name.endswith(".ffn_gate_up_exps.weight"):
        return name.replace("gate_up", "gate"), name.replace("gate_up", "up")
    return None


def layer_of(name: str) -> int:
    """The layer that a tensor belongs to; -1: to none."""
    layer = _BLOCK.match(name)
    return int(layer[1]) if layer else -1


def is_transposed(architecture: str, name: str) -> bool:
    """Whether the file has the transpose of Hugging Face's tensor."""
    return architecture == "gpt2" and _CONV1D.fullmatch(name) is not None


def restored(architecture: str, name: str) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What makes Hugging Face's values of a vector of those in the file; None: they are the same."""
    if name.endswith(".ssm_a"):
        return lambda values: values.neg().log()
    if architecture in _CENTERED and name.endswith("norm.weight") and not name.endswith("ssm_norm.weight"):
        return lambda values: values - 1
    return None


def full_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Hugging Face's shape of a tensor that the file has with a dimension less or more."""
    if re.fullmatch(r"blk\.\d+\.(ssm_a|ssm_d|ssm_norm\.weight)", name):
        return (math.prod(shape),)
    if name.endswith(".ffn_gate_inp_shexp.weight") and len(shape) == 1:
        return (1, *shape)
    if name.endswith((".shortconv.conv.weight", ".ssm_conv1d.weight")) and len(shape) == 2:
        return (shape[0], 1, shape[1])
    return shape


class ValueHeads(NamedTuple):
    """The heads of a Qwen3.5 or Qwen3-Next model's delta nets. A file of Qwen3.5 has the value heads of all key heads
    side by side: the first of each, then the second of each; Hugging Face those of one key head after the other."""

    keys: int
    values: int
    key_dim: int
    value_dim: int

    def output_order(self, name: str, rows: int) -> np.ndarray | None:
        """For each row of Hugging Face's tensor, its row in the file; None if the order is the same."""
        kind = re.fullmatch(r"blk\.\d+\.(attn_qkv|attn_gate|ssm_beta|ssm_alpha|ssm_a|ssm_dt|ssm_conv1d)(\.\w+)?", name)
        if kind is None:
            return None
        dim = 1 if kind[1] in ("ssm_beta", "ssm_alpha", "ssm_a", "ssm_dt") else self.value_dim
        before = 2 * self.keys * self.key_dim if kind[1] in ("attn_qkv", "ssm_conv1d") else 0
        if rows != before + self.values * dim:
            raise CheckpointError(f"tensor {name!r} has {rows} rows; its heads need {before + self.values * dim}")
        order = self._order(dim)
        return None if order is None else np.concatenate((np.arange(before), before + order))

    def input_order(self, name: str) -> np.ndarray | None:
        """The same for the columns of a matrix."""
        return self._order(self.value_dim) if re.fullmatch(r"blk\.\d+\.ssm_out\.weight", name) else None

    def split(self, name: str) -> dict[str, np.ndarray]:
        """Qwen3-Next's matrices that hold two of Qwen3.5's, by key head: for each of those its rows in the file."""
        repeat = self.values // self.keys
        if re.fullmatch(r"blk\.\d+\.ssm_ba\.weight", name):
            b, a = np.split(np.arange(2 * self.values).reshape(self.keys, -1), 2, axis=1)
            found = {"ssm_beta": b.reshape(-1), "ssm_alpha": a.reshape(-1)}
        elif re.fullmatch(r"blk\.\d+\.ssm_in\.weight", name):
            widths = [self.key_dim, self.key_dim, repeat * self.value_dim, repeat * self.value_dim]
            rows = np.arange(self.keys * sum(widths)).reshape(self.keys, -1)
            *qkv, z = (each.reshape(-1) for each in np.split(rows, np.cumsum(widths)[:-1], axis=1))
            found = {"attn_qkv": np.concatenate(qkv), "attn_gate": z}
        else:
            return {}
        return {f"blk.{layer_of(name)}.{own}.weight": order for own, order in found.items()}

    def _order(self, dim: int) -> np.ndarray | None:
        _divides("ssm", self.values, self.keys)
        repeat = self.values // self.keys
        if repeat == 1:
            return None
        return np.arange(self.values * dim).reshape(repeat, self.keys, dim).swapaxes(0, 1).reshape(-1)


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
