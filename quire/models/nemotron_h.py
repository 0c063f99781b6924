"""Nemotron-H (arXiv 2504.03624) and Nemotron 3: blocks of one kind each: Mamba 2, attention without positions, MLP or
mixture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from quire.errors import UnsupportedModelError
from quire.kernels.gates import ExpertVariant
from quire.layers.attention.base import AttentionInputs, LastTokens
from quire.layers.build_context import BuildContext
from quire.layers.caches import AttentionCache, LayerCache
from quire.layers.embedding import LMHead, VocabEmbedding
from quire.layers.expert_weights import ungated_targets
from quire.layers.linear import Heads, ReplicatedLinear
from quire.layers.moe import SparseMLP
from quire.layers.norm import RMSNorm
from quire.layers.recurrent import Mamba2Mixer, Mamba2Settings
from quire.loading.model_config import ModelConfig, positive_integer
from quire.loading.weights import AnyTarget, Target
from quire.models.base import in_other_stage, stage_layers
from quire.models.deepseek import sigmoid_routing
from quire.models.llama import LlamaAttention, LlamaVariant
from quire.models.plain_layers import PlainMLP


class Mixture(SparseMLP):
    """Experts without gates, beside an MLP for all tokens. They may work in a smaller space than the stream's."""

    def __init__(self, build: BuildContext, layer: int) -> None:
        config, raw = build.config, build.config.raw
        act, bias = raw.get("mlp_hidden_act", "relu2"), bool(raw.get("mlp_bias", False))
        latent = raw.get("moe_latent_size")
        if act != "relu2" or bias:
            raise UnsupportedModelError(
                f"{config.architecture} mixtures with mlp_hidden_act {act!r} and mlp_bias {bias} are not implemented; "
                "only 'relu2' without biases is"
            )
        super().__init__(build, replace(sigmoid_routing(config), bias="mixer.gate.e_score_correction_bias"), layer)
        self.variant = ExpertVariant("relu2_alone")
        self.inputs = config.hidden_size if latent is None else positive_integer(raw, "moe_latent_size")
        self.has_latent = latent is not None
        if self.has_latent:
            self.fc1_latent_proj = ReplicatedLinear(build, "fc1_latent_proj", config.hidden_size, self.inputs)
            self.fc2_latent_proj = ReplicatedLinear(build, "fc2_latent_proj", self.inputs, config.hidden_size)
        width = positive_integer(raw, "moe_shared_expert_intermediate_size")
        self.shared_experts = PlainMLP(build, ("up_proj", "down_proj"), act, bias, width)

    def mixed(self, x: torch.Tensor, slots: torch.Tensor | None = None) -> torch.Tensor:
        """What the experts and the MLP for all tokens add to the stream."""
        routing = self.routing
        weights, experts = self.ops.route(
            self.ops.linear(x, self.router),
            routing.top_k,
            routing.renormalise,
            self.counts,
            self.padding(slots),
            self.rule,
        )
        if self.has_latent:
            out = self.fc2_latent_proj(self.summed(self.fc1_latent_proj(x), weights, experts))
        else:
            out = self.summed(x, weights, experts)
        return out.add_(self.shared_experts.forward_normed(x))

    def serve(self) -> None:
        """Compute the tokens that other ranks send, without own tokens."""
        assert self.dispatch is not None
        none = self.router.new_empty(0, self.inputs)
        pairs = torch.empty(0, self.routing.top_k, device=none.device)
        self.dispatch.exchange(none, pairs, pairs.int(), self._run)

    def create_weights(self, build: BuildContext, owner: str) -> None:
        """Make the experts' stacks, in 16 bits."""
        for name in ("up_proj", "down_proj"):
            module = f"{owner}.mixer.experts.0.{name}"
            if build.scheme is not None and build.scheme.format_of(module) is not None:
                raise UnsupportedModelError(
                    f"{build.config.architecture} with experts in few bits ({module}) is not implemented: experts "
                    "without gates are computed in 16 bits"
                )
        held, width = len(self.share.experts), self.share.width
        self.gate_up = build.parameter(held, width, self.inputs)
        self.down = build.parameter(held, self.inputs, width)

    def targets(self) -> dict[str, list[AnyTarget]]:
        """The router, its bias, and the rank's part of the experts."""
        assert isinstance(self.gate_up, torch.Tensor) and isinstance(self.down, torch.Tensor)
        bias: AnyTarget = Target(self.choice_bias, tuple(self.choice_bias.shape))
        found = ungated_targets(self.router, self.gate_up, self.down, self.share, "mixer")
        return found | {self.routing.bias: [bias]}


class Block(nn.Module):
    """One mixer, on the norm of the residual stream, and added back to it."""

    def __init__(
        self,
        build: BuildContext,
        layer: int,
        kind: str,
        settings: Mamba2Settings,
        is_last: bool,
        is_after: bool = False,
    ) -> None:
        """`is_last`: no later block reads the tokens before the last; `is_after`: it comes after that block."""
        super().__init__()
        self.is_after = is_after
        self.norm = RMSNorm(build, "norm", build.config.hidden_size)
        self.is_last = is_last
        self.mixer: Mamba2Mixer | LlamaAttention | PlainMLP | Mixture
        if kind == "linear_attention":
            self.mixer = Mamba2Mixer(build, layer, settings)
        elif kind == "full_attention":
            self.mixer = LlamaAttention(build, LlamaVariant(), layer, None)
        elif kind == "moe":
            self.mixer = Mixture(build, layer)
        else:
            raw = build.config.raw
            act, bias = raw.get("mlp_hidden_act", "relu2"), bool(raw.get("mlp_bias", False))
            self.mixer = PlainMLP(build, ("up_proj", "down_proj"), act, bias)

    def forward(
        self,
        hidden: torch.Tensor | None,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        kv: Any,
        inputs: AttentionInputs,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """(output to add to the residual stream, or None if already added; the stream)."""
        mixer, last = self.mixer, inputs.last if self.is_last else None
        if isinstance(mixer, PlainMLP):
            up, residual = mixer.up.norm_linear(self.norm, hidden, residual)
            return mixer.down.linear_add(residual, mixer.act(up)), residual
        if isinstance(mixer, Mixture):
            normed, residual = self.norm(hidden, residual)
            slots = inputs.slots
            if self.is_after and inputs.last is not None:
                slots = slots[inputs.last.tokens]
            return mixer.mixed(normed, slots), residual
        if isinstance(mixer, LlamaAttention):
            projected, residual = mixer.qkv_proj.norm_linear(self.norm, hidden, residual)
            mixed, out_proj = mixer(projected, positions, kv, inputs, last), mixer.o_proj
        else:
            projected, residual = mixer.in_proj.norm_linear(self.norm, hidden, residual)
            mixed, out_proj = mixer(projected, kv, inputs), mixer.out_proj
            mixed = mixed if last is None else mixed[last.tokens]
        residual = residual if last is None else residual[last.tokens]
        return out_proj.linear_add(residual, mixed), residual


class Backbone(nn.Module):
    """Embedding, blocks and final norm: those on this stage."""

    def __init__(self, build: BuildContext, kinds: Sequence[str], settings: Mamba2Settings) -> None:
        super().__init__()
        self.ops = build.ops
        self.embeddings = VocabEmbedding(build, "embeddings") if build.ranks.is_first_stage else None
        self.kinds = kinds
        own = stage_layers(build)
        last = max(i for i, kind in enumerate(kinds) if kind in CACHED)
        # Every stage passes all tokens on.
        self.cuts = build.ranks.is_last_stage and last in own
        self.layers = nn.ModuleDict(
            {str(i): Block(build, i, kinds[i], settings, self.cuts and i == last, self.cuts and i > last) for i in own}
        )
        self.norm_f = RMSNorm(build, "norm_f", build.config.hidden_size) if build.ranks.is_last_stage else None

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        kv: Sequence[Any],
        inputs: AttentionInputs,
        hidden: torch.Tensor | None,
    ) -> torch.Tensor:
        if hidden is None:
            hidden = self.embeddings(tokens)  # type: ignore[misc]  # there on the first stage
        residual = None
        caches = iter(kv)
        features = inputs.features
        for number, block in self.layers.items():
            if features is not None:
                features.take(self.ops, int(number), hidden, residual)
            cache = next(caches) if self.kinds[int(number)] in CACHED else None
            hidden, residual = block(hidden, residual, positions, cache, inputs)
        if features is not None:
            features.take(self.ops, int(number) + 1, hidden, residual)
        if self.norm_f is None:
            return block.norm(hidden, residual)[1]  # type: ignore[operator]
        normed = self.norm_f(hidden, residual)[0]
        last: LastTokens | None = None if self.cuts else inputs.last
        return normed if last is None else normed[last.tokens]


CACHED = ("linear_attention", "full_attention")
"""Kinds of blocks that keep something."""


class BackboneForCausalLM(nn.Module):
    """Blocks of one kind each, with a head."""

    supports_last_tokens = True
    supports_features = True

    def __init__(self, build: BuildContext, kinds: Sequence[str], settings: Mamba2Settings) -> None:
        super().__init__()
        config, ranks = build.config, build.ranks
        self.build = build
        self.backbone = Backbone(build, kinds, settings)
        states = settings.cache(build)
        self.caches: list[LayerCache] = []
        self.cache_stages: list[range] = []
        for stage in range(ranks.pp_size):
            own = [kinds[i] for i in replace(ranks, pp_rank=stage).layers(config.num_layers) if kinds[i] in CACHED]
            begin = len(self.caches)
            for kind in own:
                self.caches.append(states if kind == "linear_attention" else _attention_cache(build))
            self.cache_stages.append(range(begin, len(self.caches)))
        self.lm_head: LMHead | None = None
        if ranks.is_last_stage:
            name = "backbone.embeddings" if config.tie_embeddings else "lm_head"
            self.lm_head = LMHead(build, name, self.backbone.embeddings if config.tie_embeddings else None)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        kv: Sequence[Any],
        inputs: AttentionInputs,
        hidden: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self.backbone(tokens, positions, kv, inputs, hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, hidden_size] -> [S, vocab_size]."""
        return self.lm_head(hidden)  # type: ignore[misc]  # there on the last stage

    def ignores(self, name: str) -> bool:
        """Tensors of other stages, a tied head's copy, and draft layers for speculative decoding."""
        ranks = self.build.ranks
        return (
            name.startswith("mtp.")
            or (name.startswith("lm_head.") and (self.build.config.tie_embeddings or not ranks.is_last_stage))
            or (name == "backbone.embeddings.weight" and not ranks.is_first_stage)
            or (name == "backbone.norm_f.weight" and not ranks.is_last_stage)
            or in_other_stage(name, "backbone.layers", self.build)
        )


def _attention_cache(build: BuildContext) -> AttentionCache:
    heads = Heads.of_rank(build)
    return AttentionCache(len(heads.kv), heads.dim, build.kv_format)


class NemotronHForCausalLM(BackboneForCausalLM):
    """Nemotron-H, Nemotron Nano 2 and Nemotron 3."""

    def __init__(self, build: BuildContext) -> None:
        raw = build.config.raw
        if (act := raw.get("mamba_hidden_act", "silu")) != "silu":
            raise UnsupportedModelError(f"Nemotron-H with mamba_hidden_act {act!r} is not implemented; only 'silu' is")
        groups = positive_integer(raw, "n_groups", "mamba_n_groups")
        settings = Mamba2Settings(
            heads=positive_integer(raw, "mamba_num_heads"),
            groups=groups,
            head_dim=positive_integer(raw, "mamba_head_dim"),
            state_dim=positive_integer(raw, "ssm_state_size"),
            taps=positive_integer(raw, "conv_kernel", "mamba_d_conv"),
            conv_bias=bool(raw.get("use_conv_bias", raw.get("mamba_conv_bias", True))),
            bias=bool(raw.get("use_bias", False)),
            dt_limit=(float(raw.get("time_step_min", raw.get("mamba_dt_min", 0.001))), float("inf")),
            norm_groups=groups,
        )
        super().__init__(build, block_kinds(build.config), settings)


_KINDS = {
    **dict.fromkeys(("M", "mamba", "linear_attention"), "linear_attention"),
    **dict.fromkeys(("*", "attention", "full_attention"), "full_attention"),
    **dict.fromkeys(("-", "mlp"), "mlp"),
    **dict.fromkeys(("E", "moe"), "moe"),
}


def block_kinds(config: ModelConfig) -> list[str]:
    """The kind of each block: listed, or as a pattern of one letter each."""
    listed = config.raw.get("layers_block_type") or config.raw.get("hybrid_override_pattern") or ()
    unknown = sorted({str(kind) for kind in listed} - set(_KINDS))
    if unknown or len(listed) != config.num_layers:
        raise UnsupportedModelError(
            f"{config.architecture} with blocks {unknown or len(listed)} is not implemented: known are Mamba 2 ('M'), "
            f"attention ('*'), MLP ('-') and mixture ('E') blocks, one for each of {config.num_layers} layers"
        )
    return [_KINDS[kind] for kind in listed]
