"""EAGLE-3 (arXiv 2503.01840): a layer that reads the target's hidden states, and drafts token after token.

At position p the layer sees the target's features of token p and the embedding of token p + 1. Features are the
residual streams that enter a few of the target's layers, joined and projected (`fc`). They are there for the tokens
that the target computed; to go on from a draft, the layer is given its own output instead.

Checkpoints come in two forms: plain (a Llama-like config.json with a few more keys), and that of `speculators`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from quire.errors import CheckpointError, UnsupportedModelError
from quire.kernels.kv import LayerKV
from quire.layers.attention.base import AttentionInputs, LastTokens
from quire.layers.build_context import BuildContext, create_weights
from quire.layers.caches import AttentionCache, LayerCache
from quire.layers.embedding import LMHead, VocabEmbedding
from quire.layers.linear import Heads, QKVLinear, ReplicatedLinear
from quire.layers.norm import RMSNorm
from quire.layers.rope import rope_tables
from quire.loading.model_config import ModelConfig
from quire.models.base import CausalLM
from quire.models.llama import LlamaLayer, LlamaVariant
from quire.speculative.choice import choose, write
from quire.speculative.config import GREEDY, SpeculativeConfig
from quire.speculative.device import ProposalStep
from quire.speculative.draft_checkpoint import DraftCheckpoint, refuse_misfit
from quire.speculative.recording import PassRecorder, is_recordable, joined

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Values of `model_type` whose layers these are."""
IMPLEMENTED: Mapping[str, Any] = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "parallel_draft_heads_num_layers": 0,
    "parallel_drafting": False,
    "hidden_act": "silu",
    "logit_scale": 1.0,
}
"""Switches of configs with the only value that is implemented."""
_IN_EAGLE_CONFIG = {"eagle_aux_hidden_state_layer_ids", "draft_vocab_size", "fc_norm", "norm_output"}


@dataclass(frozen=True)
class Eagle3Config:
    """What an EAGLE-3 checkpoint says about itself."""

    layer: ModelConfig
    """The shape of its layers; the vocabulary is the target's."""
    draft_vocab: int
    target_hidden: int
    feature_layers: tuple[int, ...]
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool

    @classmethod
    def read(cls, raw: Mapping[str, Any], target: ModelConfig, name: str) -> Eagle3Config:
        """The config.json `raw` of the draft `name`, in either form, for this target."""
        kind = raw.get("speculators_model_type")
        if kind not in (None, "eagle3"):
            raise UnsupportedModelError(
                f"{name} is a draft of the kind {kind!r}; of speculators' kinds 'eagle3' is known"
            )
        eagle = raw.get("eagle_config") or {}
        if unknown := eagle.keys() - IMPLEMENTED.keys() - _IN_EAGLE_CONFIG:
            raise UnsupportedModelError(f"{name}: {', '.join(sorted(unknown))} in eagle_config is not implemented")
        own = raw.get("transformer_layer_config") if kind is not None else None
        shape = {**(raw if own is None else own), "architectures": ["LlamaForCausalLM"]}
        switches = {**shape, **raw, **eagle}
        for key, value in IMPLEMENTED.items():
            if (given := switches.get(key)) is not None and given != value:
                raise UnsupportedModelError(f"{name} with {key} = {given!r} is not implemented; only {value!r} is")
        if (family := shape.get("model_type", "llama")) not in FAMILIES:
            raise UnsupportedModelError(
                f"{name} has a layer of the model type {family!r}; known are {', '.join(FAMILIES)}"
            )
        layer = replace(ModelConfig.from_dict(shape), tie_embeddings=False)
        layers = switches.get("eagle_aux_hidden_state_layer_ids") or ()
        count = switches.get("num_aux_hidden_states") or len(layers) or 3
        if not layers and count == 3:
            layers = (2, target.num_layers // 2, target.num_layers - 3)
        if len(layers) != count or not all(isinstance(i, int) and 0 <= i <= target.num_layers for i in layers):
            raise UnsupportedModelError(
                f"{name} reads {count} hidden states of the model, entering the layers {tuple(layers)}; the model has "
                f"{target.num_layers} layers"
            )
        refuse_misfit("vocabulary", layer.vocab_size, target.vocab_size, name)
        wanted = switches.get("target_hidden_size") or layer.hidden_size
        refuse_misfit("hidden size of the model it was made for", wanted, target.hidden_size, name)
        return cls(
            layer=layer,
            draft_vocab=switches.get("draft_vocab_size") or layer.vocab_size,
            target_hidden=wanted,
            feature_layers=tuple(layers),
            norm_before_residual=bool(switches.get("norm_before_residual", False)),
            norm_before_fc=bool(switches.get("norm_before_fc", False)),
            fc_norm=bool(switches.get("fc_norm", False)),
            norm_output=bool(switches.get("norm_output", False)),
        )


class Eagle3Layer(LlamaLayer):
    """Attention over the joined norms of embedding and feature, then an MLP; both are added to the feature."""

    def __init__(
        self, build: BuildContext, variant: LlamaVariant, cos_sin: torch.Tensor | None, norm_before_residual: bool
    ) -> None:
        super().__init__(build, variant, 0, cos_sin)
        size = build.config.hidden_size
        self.hidden_norm = RMSNorm(build, "hidden_norm", size)
        wide = replace(build, config=replace(build.config, hidden_size=2 * size))
        self.self_attn.qkv_proj = QKVLinear(wide, Heads.of_rank(build), variant.qkv_bias)
        self.norm_before_residual = norm_before_residual

    def draft(
        self,
        embeddings: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        kv: LayerKV,
        inputs: AttentionInputs,
        last: LastTokens | None,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """(output to add to the residual stream, or None if already added; the stream), of the tokens in `last`.
        `hidden` may be overwritten."""
        normed = self.hidden_norm.normed(hidden)
        both = joined(self.hidden_norm.ops, self.input_layernorm.normed(embeddings), normed)
        residual, slots = normed if self.norm_before_residual else hidden, inputs.slots
        attended = self.self_attn(self.self_attn.qkv_proj(both), positions, kv, inputs, last)
        if last is not None:
            residual, slots = residual[last.tokens], slots[last.tokens]
        return self.mlp(
            self.post_attention_layernorm, self.self_attn.o_proj.linear_add(residual, attended), residual, slots
        )


class Eagle3Proposer(nn.Module):
    """Drafts by an EAGLE-3 head."""

    needs_following = True

    def __init__(
        self,
        checkpoint: DraftCheckpoint,
        model: CausalLM,
        build: BuildContext,
        method: str = GREEDY,
        quantization: str | None = None,
    ) -> None:
        """`model`: the target. `method`: how drafts are chosen, see `choice.py`. `quantization`: of this head."""
        super().__init__()
        name = checkpoint.files.name
        if not getattr(model, "supports_features", False):
            raise UnsupportedModelError(
                f"{build.config.architecture} runs through transformers, where the hidden states that EAGLE-3 reads "
                "are not to be had; use ngram, suffix or a draft model"
            )
        if checkpoint.has("mask_hidden", False):
            raise UnsupportedModelError(
                f"{name} has mask_hidden (P-EAGLE, parallel positions), which is not implemented"
            )
        self.checkpoint, self.method = checkpoint, method
        config = self.config = Eagle3Config.read(checkpoint.raw, build.config, name)
        shape, size = config.layer, config.layer.hidden_size
        own = checkpoint.build_for(build, shape, quantization)
        self.own_build = own
        self.ops = build.ops
        self.feature_layers = config.feature_layers
        # The output of all layers is there for every token only if the last one computes every token.
        self.needs_hidden = build.config.num_layers in config.feature_layers
        bias = bool(shape.raw.get("attention_bias", shape.raw.get("model_type") == "qwen2"))
        variant = LlamaVariant(
            qkv_bias=checkpoint.has("self_attn.q_proj.bias", bias),
            output_bias=checkpoint.has("self_attn.o_proj.bias", bias and shape.raw.get("model_type") != "qwen2"),
            mlp_bias=bool(shape.raw.get("mlp_bias", False)),
            qk_norm=checkpoint.has("self_attn.q_norm.weight", shape.raw.get("model_type") == "qwen3"),
        )
        tables = rope_tables(own)
        first = Eagle3Layer(own, variant, tables[0], config.norm_before_residual)
        others = {str(i): LlamaLayer(own, variant, i, tables[i]) for i in range(1, shape.num_layers)}
        if is_old := any(".midlayer." in f".{each}" for each in checkpoint.names or ()):
            self.midlayer = first
        self.layers = nn.ModuleDict(others if is_old else {"0": first, **others})
        self._first = (first,)  # in a tuple: it has its name already
        features = len(config.feature_layers)
        self.input_norm = RMSNorm(own, "input_norm", features * config.target_hidden) if config.norm_before_fc else None
        self.fc_norm = nn.ModuleList(
            RMSNorm(own, str(i), config.target_hidden) for i in range(features if config.fc_norm else 0)
        )
        self.fc = ReplicatedLinear(own, "fc", features * config.target_hidden, size)
        self.norm = RMSNorm(own, "norm", size)
        fits = size == build.config.hidden_size
        self.embed_tokens: VocabEmbedding | None = None
        if checkpoint.has("embed_tokens.weight", not fits):
            self.embed_tokens = VocabEmbedding(own, "embed_tokens")
        elif not fits:
            raise UnsupportedModelError(
                f"{name} has no embed_tokens.weight, and the model's embeddings do not fit: its hidden size is {size}, "
                f"the model's is {build.config.hidden_size}"
            )
        self.lm_head: LMHead | None = None
        is_whole = config.draft_vocab == build.config.vocab_size
        if checkpoint.has("lm_head.weight", True) or not (is_whole and fits):
            vocabulary = replace(own, config=replace(shape, vocab_size=config.draft_vocab))
            self.lm_head = LMHead(vocabulary, "lm_head")
        self._target = (model,)
        self.target_ids: torch.Tensor | None = None
        if not is_whole and not checkpoint.has("d2t", True):
            raise CheckpointError(
                f"{name} has no tensor d2t, which says what its tokens mean: it has {config.draft_vocab}, the model "
                f"has {build.config.vocab_size}"
            )
        if not is_whole or checkpoint.has("d2t", False):
            self.target_ids = torch.arange(config.draft_vocab, device=build.device)
        heads = Heads.of_rank(own)
        cache = AttentionCache(len(heads.kv), heads.dim, build.kv_format)
        self.caches: list[LayerCache] = [cache] * shape.num_layers
        create_weights(self, own)
        self._first_pass = PassRecorder(build.ops, self._compute_first)
        self._next = PassRecorder(build.ops, self._compute_next)

    def load(self, load_format: str = "auto", seed: int = 0, progress: bool = False) -> None:
        """Read the weights, and which of the target's tokens the head knows."""
        stored = self.checkpoint.load(self, _is_mapping, load_format, seed, progress)
        offsets = next((weight for weight in stored if weight.name.rpartition(".")[2] == "d2t"), None)
        if self.target_ids is None or offsets is None:
            return
        vocab, own = self.config.layer.vocab_size, self.config.draft_vocab
        if tuple(offsets.shape) != (own,):
            raise CheckpointError(
                f"{self.checkpoint.files.name}: d2t has the shape {tuple(offsets.shape)}, not ({own},)"
            )
        targets = torch.arange(own) + offsets.read().cpu().long()
        if not bool(((targets >= 0) & (targets < vocab)).all()):
            raise CheckpointError(
                f"{self.checkpoint.files.name}: d2t leads to tokens {int(targets.min())} to {int(targets.max())}; the "
                f"model has {vocab}"
            )
        self.target_ids.copy_(targets)

    def propose(self, step: ProposalStep) -> None:
        """Make the drafts of every row that draws, one after another."""
        normed, stream = self._start(step)
        if not len(step.rows) or not step.count:
            return
        drafts = [self._choose(self._logits(normed), step, 0)]
        for number in range(1, step.count):
            positions, attention = step.lay_out(number - 1)
            hidden = normed if self.config.norm_output else stream
            logits, normed, stream = self._next(step, attention, drafts[-1], hidden, positions)
            drafts.append(self._choose(logits, step, number))
        write(step, drafts)

    def _start(self, step: ProposalStep) -> tuple[torch.Tensor, torch.Tensor]:
        """(the normed output, the output) where the rows drew, from the target's features."""
        assert step.features is not None
        given = (step.features, step.following, step.positions)
        if is_recordable(step):
            normed, stream = self._first_pass(step, step.attention, *given)
            return normed[step.ends], stream[step.ends]
        last = LastTokens(step.ends, step.lay_out(-1)[1][0]) if len(step.rows) else None
        return self._compute_first(step.attention[0], step.kv, *given, last)

    def _compute_first(
        self,
        inputs: AttentionInputs,
        kv: Sequence[LayerKV],
        features: torch.Tensor,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        last: LastTokens | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._run(tokens, self._project(features), positions, kv, inputs, last)

    def _compute_next(
        self,
        inputs: AttentionInputs,
        kv: Sequence[LayerKV],
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        normed, stream = self._run(tokens, hidden, positions, kv, inputs, None)
        return self._logits(normed), normed, stream

    def _project(self, features: torch.Tensor) -> torch.Tensor:
        if self.input_norm is not None:
            features = self.input_norm.normed(features)
        if len(self.fc_norm):
            parts = features.chunk(len(self.fc_norm), dim=-1)
            features = torch.cat([norm.normed(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)  # type: ignore[operator]
        return self.fc(features)

    def _run(
        self,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        kv: Sequence[LayerKV],
        inputs: AttentionInputs,
        last: LastTokens | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(the normed output, the output) at the tokens in `last`, or at all."""
        inputs = replace(inputs, last=last)
        (first,) = self._first
        others = [layer for number, layer in self.layers.items() if number != "0"]
        x, residual = first.draft(self._embed(tokens), hidden, positions, kv[0], inputs, None if others else last)
        for layer, cache in zip(others, kv[1:], strict=True):
            x, residual = layer(x, residual, positions, cache, inputs)
        return self.norm(x, residual)

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return (target_embedding(self._target[0]) if self.embed_tokens is None else self.embed_tokens)(tokens)

    def _logits(self, normed: torch.Tensor) -> torch.Tensor:
        return (target_head(self._target[0]) if self.lm_head is None else self.lm_head)(normed)

    def _choose(self, logits: torch.Tensor, step: ProposalStep, number: int) -> torch.Tensor:
        return choose(logits, step, number, self.method, self.target_ids)


def target_embedding(model: Any) -> VocabEmbedding:
    """The embedding of a model."""
    return _only(model, VocabEmbedding)


def target_head(model: Any) -> LMHead:
    """The head of a model."""
    return _only(model, LMHead)


def _only(model: nn.Module, kind: type[Any]) -> Any:
    found = next((module for module in model.modules() if type(module) is kind), None)
    if found is None:
        raise UnsupportedModelError(f"{type(model).__name__} has no {kind.__name__} that a draft could share")
    return found


def _is_mapping(name: str) -> bool:
    """Tensors that say which tokens the head knows, and what trainers leave behind."""
    return name.rpartition(".")[2] in ("d2t", "t2d", "inv_freq") or name.startswith(
        ("verifier_norm.", "verifier_lm_head.")
    )


def make(config: SpeculativeConfig, model: CausalLM, build: BuildContext) -> Eagle3Proposer:
    """The head in the folder `config.model`, its weights not filled."""
    checkpoint = DraftCheckpoint.open(str(config.model))
    return Eagle3Proposer(checkpoint, model, build, config.draft_sample_method, config.quantization)
