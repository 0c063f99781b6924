"""An EAGLE-3 head (arXiv 2503.01840) in plain torch, for training: a Llama-like layer that reads the target's features.

Position p sees the target's features of token p (or, where there are none yet, the head's own output before its final
norm) and the embedding of token p + 1, and predicts token p + 2. Parameters have the names that are published.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from quire.errors import UnsupportedModelError
from quire.loading.model_config import ModelConfig

NUM_FEATURES = 3
WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class HeadShape:
    """Sizes of a head, and the target it belongs to."""

    hidden_size: int
    """Of the head and of the target."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    """Of the target."""
    draft_vocab_size: int
    """Tokens that the head can propose."""
    feature_layers: tuple[int, ...]
    """Layers of the target whose input the head reads."""
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    max_position: int = 2048

    @classmethod
    def of_target(
        cls,
        target: ModelConfig,
        draft_vocab_size: int,
        feature_layers: Sequence[int] | None = None,
        intermediate_size: int | None = None,
    ) -> HeadShape:
        """A layer like the target's own."""
        layers = tuple(default_layers(target) if feature_layers is None else feature_layers)
        if len(layers) != NUM_FEATURES or any(not 0 <= layer < target.num_layers for layer in layers):
            raise UnsupportedModelError(
                f"the head reads the inputs of {NUM_FEATURES} layers, numbered 0 to {target.num_layers - 1}; "
                f"got {', '.join(map(str, layers))}"
            )
        heads, kv_heads, head_dim = target.num_heads, target.num_kv_heads, target.head_dim
        if head_dim % 2 or not target.hidden_size <= 2 * heads * head_dim <= 4 * target.hidden_size:
            # Recurrent layers and latent attention have heads that say little about an attention layer.
            head_dim, heads = 64, max(1, target.hidden_size // 64)
            kv_heads = heads
        return cls(
            target.hidden_size, heads, kv_heads, head_dim,
            intermediate_size or _usual_width(target), target.vocab_size, draft_vocab_size, layers, target.norm_eps,
            float((target.rope or {}).get("rope_theta", 10000.0)), target.max_position,
        )  # fmt: skip

    def config(self, target: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
        """config.json, with the fields that vLLM reads."""
        layers = list(self.feature_layers)
        eos = list(target.eos_token_ids)
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "target_hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "max_position_embeddings": self.max_position,
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "tie_word_embeddings": False,
            "bos_token_id": target.bos_token_id,
            "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
            "torch_dtype": str(dtype).removeprefix("torch."),
            "eagle_aux_hidden_state_layer_ids": layers,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": layers, "use_aux_hidden_state": True},
        }


def default_layers(target: ModelConfig) -> tuple[int, int, int]:
    """Layers 2, n/2 and n - 3, as published heads read; others in a model of few layers."""
    count = target.num_layers
    if count < NUM_FEATURES:
        raise UnsupportedModelError(
            f"{target.architecture} with {count} layers: an EAGLE-3 head reads the inputs of {NUM_FEATURES} layers"
        )
    if count < 8:
        return (count - 3, count - 2, count - 1)
    return (2, count // 2, count - 3)


def _usual_width(target: ModelConfig) -> int:
    """The target's MLP, unless it is one of experts, whose width is another thing."""
    width = target.intermediate_size
    return width if 2 * target.hidden_size <= width <= 8 * target.hidden_size else 3 * target.hidden_size


class TrainedNorm(nn.Module):
    """x / rms(x) * weight, in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight).to(x.dtype)


@dataclass
class SeenKeys:
    """Keys and values of the steps so far, [batch, KV heads, length, head_dim] each."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]


class HeadAttention(nn.Module):
    """Attention of a draft step over the features' positions, and over the earlier draft steps of the same position."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        inner, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(2 * shape.hidden_size, inner, bias=False)
        self.k_proj = nn.Linear(2 * shape.hidden_size, kv, bias=False)
        self.v_proj = nn.Linear(2 * shape.hidden_size, kv, bias=False)
        self.o_proj = nn.Linear(inner, shape.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, seen: SeenKeys, mask: torch.Tensor) -> torch.Tensor:
        """x [batch, length, 2 * hidden]; adds this step's keys to `seen`. Step k of position p is at p + k - 1."""
        shape, (batch, length, _) = self.shape, x.shape
        step = len(seen.keys)
        cos, sin = _rotation(length, step, shape, x.device)
        q, k, v = (
            project(x).view(batch, length, -1, shape.head_dim).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        seen.keys.append(k)
        seen.values.append(v)
        groups = shape.num_heads // shape.num_kv_heads
        q = q.reshape(batch, shape.num_kv_heads, groups, length, shape.head_dim) * shape.head_dim**-0.5
        scores = q.flatten(2, 3) @ seen.keys[0].transpose(-1, -2)
        scores = scores.view(batch, shape.num_kv_heads, groups, length, length) + mask
        # A later step sees, beside the features up to its position, the steps between: one key each.
        own = [(q * keys.unsqueeze(2)).sum(-1, keepdim=True) for keys in seen.keys[1:]]
        shares = torch.cat([scores, *own], -1).float().softmax(-1).to(v.dtype)
        mixed = shares[..., :length].flatten(2, 3) @ seen.values[0]
        mixed = mixed.view(batch, shape.num_kv_heads, groups, length, shape.head_dim)
        for place, values in enumerate(seen.values[1:]):
            mixed = mixed + shares[..., length + place, None] * values.unsqueeze(2)
        return self.o_proj(mixed.flatten(1, 2).transpose(1, 2).flatten(2))


def _rotation(length: int, start: int, shape: HeadShape, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    half = torch.arange(0, shape.head_dim, 2, device=device, dtype=torch.float32) / shape.head_dim
    angles = torch.arange(start, start + length, device=device)[:, None] * shape.rope_theta**-half
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


class HeadMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class HeadLayer(nn.Module):
    """Reads the embedding and the feature side by side, each normed; the feature is the residual stream."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.input_layernorm = TrainedNorm(shape.hidden_size, shape.norm_eps)
        self.hidden_norm = TrainedNorm(shape.hidden_size, shape.norm_eps)
        self.self_attn = HeadAttention(shape)
        self.post_attention_layernorm = TrainedNorm(shape.hidden_size, shape.norm_eps)
        self.mlp = HeadMLP(shape)

    def forward(
        self, embedded: torch.Tensor, feature: torch.Tensor, seen: SeenKeys, mask: torch.Tensor
    ) -> torch.Tensor:
        both = torch.cat([self.input_layernorm(embedded), self.hidden_norm(feature)], -1)
        stream = feature + self.self_attn(both, seen, mask)
        return stream + self.mlp(self.post_attention_layernorm(stream))


class DraftHead(nn.Module):
    """The head. Features are divided by `scale` before `fc`, so that it trains well whatever the target's residual
    stream looks like; when the head is written, the scale is part of `fc`."""

    scale: torch.Tensor
    d2t: torch.Tensor

    def __init__(self, shape: HeadShape, draft_tokens: torch.Tensor | None = None) -> None:
        """`draft_tokens` [draft vocabulary]: the target's tokens that can be proposed, in ascending order."""
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(len(shape.feature_layers) * shape.hidden_size, shape.hidden_size, bias=False)
        self.midlayer = HeadLayer(shape)
        self.norm = TrainedNorm(shape.hidden_size, shape.norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.draft_vocab_size, bias=False)
        tokens = torch.arange(shape.draft_vocab_size) if draft_tokens is None else draft_tokens.cpu()
        self.register_buffer("scale", torch.ones(self.fc.in_features), persistent=False)
        self.register_buffer("d2t", tokens - torch.arange(shape.draft_vocab_size), persistent=False)

    @property
    def draft_tokens(self) -> torch.Tensor:
        """[draft vocabulary]: the target's token of each of the head's."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @torch.no_grad()
    def begin(self, scale: torch.Tensor, lm_head: torch.Tensor | None, generator: torch.Generator) -> None:
        """Initial values. `scale`: root mean square of each feature; `lm_head`: the target's rows of the draft
        vocabulary, where its head is a matrix."""
        self.scale.copy_(scale.clamp(min=1e-6))
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                spread = parameter.shape[1] ** -0.5
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    spread *= 0.5  # these add to the residual stream
                elif name == "fc.weight":
                    spread *= 0.3
                parameter.normal_(0, spread, generator=generator)
        # The residual stream begins as the target's in the last of the layers, made as large as the rest of the head
        # expects: measured to learn faster than from a random projection.
        last = self.scale[-self.shape.hidden_size :]
        self.fc.weight[:, -self.shape.hidden_size :] += torch.diag(last / last.square().mean().sqrt())
        if lm_head is not None:  # at a scale at which no token is far ahead of the others
            self.lm_head.weight.copy_(lm_head / lm_head.norm(dim=-1).mean())

    def unroll(
        self, features: torch.Tensor, tokens: torch.Tensor, embed: Callable[[torch.Tensor], torch.Tensor], steps: int
    ) -> list[torch.Tensor]:
        """Outputs [batch, length, hidden] before the final norm, of `steps` draft steps from every position at once.

        features  [batch, length, features * hidden], of tokens 0 to length - 1
        tokens    [batch, length + steps]
        """
        length = features.shape[1]
        mask = torch.full((length, length), -torch.inf, device=features.device).triu(1)
        state = self.fc((features / self.scale).to(self.fc.weight.dtype))
        seen, outputs = SeenKeys([], []), []
        for step in range(1, steps + 1):
            embedded = embed(tokens[:, step : step + length]).to(state.dtype)
            state = self.midlayer(embedded, state, seen, mask.to(state.dtype))
            outputs.append(state)
        return outputs

    def logits(self, state: torch.Tensor) -> torch.Tensor:
        """[..., hidden] -> [..., draft vocabulary]."""
        return self.lm_head(self.norm(state))


def write_head(head: DraftHead, target: ModelConfig, folder: Path, dtype: torch.dtype) -> int:
    """Write config.json and the weights; returns the weights' bytes."""
    shape = head.shape
    tensors = {name: value.detach() for name, value in head.state_dict().items()}
    tensors["fc.weight"] = tensors["fc.weight"].float() / head.scale
    stored = {name: value.to("cpu", dtype).contiguous() for name, value in tensors.items()}
    known = torch.zeros(shape.vocab_size, dtype=torch.bool)
    known[head.draft_tokens.cpu()] = True
    stored |= {"d2t": head.d2t.cpu().long(), "t2d": known}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(stored, folder / WEIGHTS, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(shape.config(target, dtype), indent=2) + "\n")
    return (folder / WEIGHTS).stat().st_size


def read_head(folder: Path, target: ModelConfig) -> DraftHead:
    """A head that `write_head` wrote."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / WEIGHTS)
    shape = replace(
        HeadShape.of_target(target, config["draft_vocab_size"], config["eagle_aux_hidden_state_layer_ids"]),
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        intermediate_size=config["intermediate_size"],
        rope_theta=config["rope_theta"],
        norm_eps=config["rms_norm_eps"],
    )
    offsets = tensors.pop("d2t")
    tensors.pop("t2d")
    head = DraftHead(shape, offsets + torch.arange(len(offsets)))
    head.load_state_dict({name: value.float() for name, value in tensors.items()})
    return head
