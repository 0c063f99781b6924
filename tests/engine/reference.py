"""The default model in transformers, its weights unpacked without quire: the gguf package reads and dequantizes them,
and the two conventions that differ (names, the order of rotary rows) are written out here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf.quants import dequantize
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM


@dataclass(frozen=True)
class Greedy:
    """Greedy tokens for one prompt, and the margin of each best logit over the second."""

    tokens: list[int]
    gaps: list[float]


def transformers_model(path: Path) -> LlamaForCausalLM:
    """A GGUF file of the Llama family as a float32 transformers model."""
    reader = gguf.GGUFReader(str(path))
    fact = _Facts(reader)
    heads, kv_heads = fact("attention.head_count"), fact("attention.head_count_kv")
    layers = fact("block_count")
    config = LlamaConfig(
        vocab_size=next(int(tensor.shape[1]) for tensor in reader.tensors if tensor.name == "token_embd.weight"),
        hidden_size=fact("embedding_length"),
        intermediate_size=fact("feed_forward_length"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=fact("context_length"),
        rms_norm_eps=fact("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": fact("rope.freq_base")},
        tie_word_embeddings=not any(tensor.name == "output.weight" for tensor in reader.tensors),
    )
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    ours = {names.get_name(name, try_suffixes=(".weight",)): name for name in model.state_dict()}
    tensors = {}
    for tensor in reader.tensors:
        value = torch.tensor(dequantize(tensor.data, tensor.tensor_type), dtype=torch.float32)
        if tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
            value = _halves(value, heads if "attn_q" in tensor.name else kv_heads)
        tensors[ours[tensor.name]] = value
    if config.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model.load_state_dict(tensors, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its frequencies are not in checkpoints
    return model.eval()


class _Facts:
    def __init__(self, reader: Any) -> None:
        self._reader = reader

    def __call__(self, name: str) -> Any:
        return self._reader.fields[f"llama.{name}"].contents()


def _halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp rotates neighbours (0, 1), (2, 3), …; transformers the two halves of a head: undo the reordering."""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


LONG_PROMPT = 100


def greedy(model: LlamaForCausalLM, prompts: Sequence[Sequence[int]], count: int) -> list[Greedy]:
    """`count` greedy tokens for each prompt. Long prompts are decoded separately, so that the others are padded
    less."""
    found: dict[int, Greedy] = {}
    for is_long in (False, True):
        chosen = [index for index, prompt in enumerate(prompts) if (len(prompt) > LONG_PROMPT) == is_long]
        if chosen:
            found |= zip(chosen, _greedy(model, [prompts[index] for index in chosen], count), strict=True)
    return [found[index] for index in range(len(prompts))]


@torch.inference_mode()
def _greedy(model: LlamaForCausalLM, prompts: Sequence[Sequence[int]], count: int) -> list[Greedy]:
    """Prefills prompts one by one, then decodes all together, padded on the left."""
    caches, logits = [], []
    for prompt in prompts:
        out = model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
        caches.append(out.past_key_values)
        logits.append(out.logits[:, -1])
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    longest = int(lengths.max())
    cache, mask = _joined(caches, longest), torch.arange(longest) >= longest - lengths[:, None]
    tokens, gaps = [], []
    last = torch.cat(logits)
    for step in range(count):
        best = last.topk(2)
        tokens.append(best.indices[:, 0])
        gaps.append(best.values[:, 0] - best.values[:, 1])
        if step + 1 < count:
            mask = torch.nn.functional.pad(mask, (0, 1), value=True)
            out = model(
                tokens[-1][:, None],
                attention_mask=mask.long(),
                position_ids=(lengths + step)[:, None],
                past_key_values=cache,
                use_cache=True,
            )
            last = out.logits[:, -1]
    rows = zip(torch.stack(tokens, 1).tolist(), torch.stack(gaps, 1).tolist(), strict=True)
    return [Greedy(*row) for row in rows]


def _joined(caches: list[DynamicCache], longest: int) -> DynamicCache:
    """Caches of single prompts as one cache, shorter ones padded on the left."""
    joined = DynamicCache()
    for layer in range(len(caches[0].layers)):
        padded = [
            [
                torch.nn.functional.pad(part, (0, 0, longest - part.shape[2], 0))
                for part in (c.layers[layer].keys, c.layers[layer].values)
            ]
            for c in caches
        ]
        keys, values = (torch.cat(parts) for parts in zip(*padded, strict=True))
        joined.update(keys, values, layer)
    return joined
