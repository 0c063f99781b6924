"""Multi-token prediction: layers of the target's own checkpoint that predict the token after the next (MTP).

At position p a predictor sees the target's hidden state of token p and the embedding of token p + 1. A second one sees
the first one's output at p and the embedding of token p + 2, and so on; past the last one, that one is used again and
goes on from its own output.

Two forms (arXiv 2412.19437): "nextn" of DeepSeek and GLM, layers numbered after the model's own, each with an
embedding and a head; and "mtp" of Qwen3-Next and 3.5, which share what joins the two inputs, and the model's head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from quire.errors import UnsupportedModelError
from quire.layers.attention.base import AttentionInputs, LastTokens
from quire.layers.build_context import BuildContext, MatrixLayer
from quire.layers.caches import AttentionCache, LatentCache, LayerCache
from quire.layers.embedding import LMHead, VocabEmbedding
from quire.layers.linear import Heads, ReplicatedLinear
from quire.layers.norm import RMSNorm, ZeroCenteredRMSNorm
from quire.layers.rope import rope_table
from quire.models.base import CausalLM
from quire.speculative.choice import choose, write
from quire.speculative.config import GREEDY, SpeculativeConfig
from quire.speculative.device import ProposalStep
from quire.speculative.draft_checkpoint import DraftCheckpoint
from quire.speculative.eagle3 import target_embedding

COUNTS = {"nextn": ("num_nextn_predict_layers",), "mtp": ("mtp_num_hidden_layers", "num_nextn_predict_layers")}
"""Names of the number of predictors in configs."""


class NextnPredictor(nn.Module):
    """A layer after the model's own (DeepSeek, GLM). Its parts are in the layer, where checkpoints have them."""

    feeds_normed = False

    def __init__(self, layer: nn.Module, build: BuildContext, checkpoint: DraftCheckpoint, name: str) -> None:
        super().__init__()
        size = build.config.hidden_size
        layer.enorm = RMSNorm(build, "enorm", size)
        layer.hnorm = RMSNorm(build, "hnorm", size)
        layer.eh_proj = ReplicatedLinear(build, "eh_proj", 2 * size, size)
        layer.shared_head = nn.Module()
        layer.shared_head.norm = RMSNorm(build, "norm", size)
        if checkpoint.has(f"{name}.shared_head.head.weight", False):
            layer.shared_head.head = LMHead(build, "head")
        if checkpoint.has(f"{name}.embed_tokens.weight", False):
            layer.embed_tokens = VocabEmbedding(build, "embed_tokens")
        self._layer: tuple[Any] = (layer,)  # in a tuple: it has its name already

    def embed(self, model: Any, tokens: torch.Tensor) -> torch.Tensor:
        """The tokens' embeddings: its own, or the target's."""
        own = getattr(self._layer[0], "embed_tokens", None)
        return (target_embedding(model) if own is None else own)(tokens)

    def join(self, embeddings: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """The input of the layer."""
        layer = self._layer[0]
        return layer.eh_proj(torch.cat((layer.enorm.normed(embeddings), layer.hnorm.normed(hidden)), dim=-1))

    def norm(self, x: torch.Tensor | None, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(the normed output, the output)."""
        return self._layer[0].shared_head.norm(x, residual)

    def logits(self, model: CausalLM, normed: torch.Tensor) -> torch.Tensor:
        """Of its own head, or the target's."""
        head = getattr(self._layer[0].shared_head, "head", None)
        return model.logits(normed) if head is None else head(normed)


class SharedPredictor(nn.Module):
    """What the predictors of a Qwen model share."""

    feeds_normed = True

    def __init__(self, build: BuildContext) -> None:
        super().__init__()
        size = build.config.hidden_size
        self.pre_fc_norm_embedding = ZeroCenteredRMSNorm(build, "pre_fc_norm_embedding", size)
        self.pre_fc_norm_hidden = ZeroCenteredRMSNorm(build, "pre_fc_norm_hidden", size)
        self.fc = ReplicatedLinear(build, "fc", 2 * size, size)
        self.final = ZeroCenteredRMSNorm(build, "norm", size)

    def embed(self, model: Any, tokens: torch.Tensor) -> torch.Tensor:
        """The target's embeddings."""
        return target_embedding(model)(tokens)

    def join(self, embeddings: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """The input of a layer."""
        parts = (self.pre_fc_norm_embedding.normed(embeddings), self.pre_fc_norm_hidden.normed(hidden))
        return self.fc(torch.cat(parts, dim=-1))

    def norm(self, x: torch.Tensor | None, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(the normed output, the output)."""
        return self.final(x, residual)

    def logits(self, model: CausalLM, normed: torch.Tensor) -> torch.Tensor:
        """Of the target's head."""
        return model.logits(normed)


class MtpProposer(nn.Module):
    """Drafts by the target's own layers for multi-token prediction."""

    feature_layers: tuple[int, ...] = ()
    needs_hidden = True
    needs_following = True

    def __init__(self, checkpoint: DraftCheckpoint, model: CausalLM, build: BuildContext, method: str = GREEDY) -> None:
        """`checkpoint`: the target's. `method`: how drafts are chosen, see `choice.py`."""
        super().__init__()
        config = build.config
        form = getattr(model, "prediction", "")
        if not form:
            raise UnsupportedModelError(
                f"{config.architecture} has no layers for multi-token prediction (mtp) here; DeepSeek V3, GLM-4.5 to "
                "4.7, Qwen3-Next and Qwen3.5 have; use ngram, suffix, an EAGLE-3 head or a draft model"
            )
        count = next((n for key in COUNTS[form] if (n := config.raw.get(key)) is not None), 1 if form == "mtp" else 0)
        first = config.num_layers if form == "nextn" else 0
        prefix = "mtp.layers" if form == "mtp" else "model.layers"
        self.names = [f"{prefix}.{first + i}" for i in range(count)]
        if not count or not checkpoint.has(f"{self.names[0]}.input_layernorm.weight", True):
            raise UnsupportedModelError(
                f"{checkpoint.files.name} has {count} layers for multi-token prediction ({COUNTS[form][0]}) and no "
                f"tensors of {self.names[0] if count else prefix + f'.{first}'}: use ngram, suffix, an EAGLE-3 head or "
                "a draft model"
            )
        self.checkpoint, self.method, self.form = checkpoint, method, form
        self._model = (model,)
        # Layers of a quantized checkpoint that predict are often not quantized.
        own = replace(
            build,
            config=replace(config, num_layers=first + count, windows=(None,) * (first + count)),
            experts=None,
            scheme=None if self._is_plain(prefix if form == "mtp" else self.names[0]) else build.scheme,
        )
        table = rope_table(own)
        layers = {str(first + i): model.prediction_layer(own, first + i, table) for i in range(count)}  # type: ignore[attr-defined]
        self.predictors: list[Any]
        if form == "nextn":
            self.model = nn.Module()
            self.model.layers = nn.ModuleDict(layers)
            pairs = zip(layers.values(), self.names, strict=True)
            self.predictors = [NextnPredictor(layer, own, checkpoint, name) for layer, name in pairs]
        else:
            self.mtp = SharedPredictor(own)
            self.mtp.layers = nn.ModuleDict(layers)
            self.predictors = [self.mtp] * count
        self._layers = tuple(layers.values())
        self.caches: list[LayerCache] = [self._cache(build, model)] * count
        self._create_weights(own)

    def _cache(self, build: BuildContext, model: Any) -> LayerCache:
        latent = next((cache for cache in model.caches if isinstance(cache, LatentCache)), None)
        heads = Heads.of_rank(build)
        return latent or AttentionCache(len(heads.kv), heads.dim, build.kv_format)

    def _is_plain(self, name: str) -> bool:
        """Whether no tensor under this name is of a matrix in few bits."""
        names = [each for each in self.checkpoint.names or () if each.startswith(f"{name}.")]
        return bool(names) and all(each.endswith((".weight", "bias", "_proj")) for each in names)

    def _create_weights(self, build: BuildContext) -> None:
        """Make the matrices, in few bits where the checkpoint has them so."""
        dense = replace(build, scheme=None)
        for path, module in self.named_modules():
            if isinstance(module, MatrixLayer):
                whole = isinstance(module, (ReplicatedLinear, LMHead, VocabEmbedding)) and self._is_plain(path)
                module.create_weights(dense if whole else build, path.rpartition(".")[0])

    def load(self, load_format: str = "auto", seed: int = 0, progress: bool = False) -> None:
        """Read the weights from the target's checkpoint."""
        prefixes = ("mtp.",) if self.form == "mtp" else tuple(f"{name}." for name in self.names)
        scheme = self._model[0].build.scheme

        def ignores(name: str) -> bool:
            return not name.startswith(prefixes) or (scheme is not None and scheme.ignores(name))

        self.checkpoint.load(self, ignores, load_format, seed, progress)

    def propose(self, step: ProposalStep) -> None:
        """Make the drafts of every row that draws: one by each predictor, then by the last one again."""
        assert step.hidden is not None
        (model,) = self._model
        draws, count = len(step.rows) > 0, len(self.predictors)
        last = LastTokens(step.ends, step.lay_out(-1)[1][0]) if draws else None
        tokens, hidden = step.following, step.hidden
        drafts: list[torch.Tensor] = []
        for number, predictor in enumerate(self.predictors):
            is_final = number == count - 1
            normed, stream = self._run(
                number, tokens, hidden, step.positions, step.kv, step.attention[0], last if is_final else None
            )
            hidden = normed if predictor.feeds_normed else stream
            if draws:
                normed = normed if is_final else normed[step.ends]
                drafts.append(choose(predictor.logits(model, normed), step, number, self.method))
            tokens = _later(tokens, step, drafts)
        if not draws or not step.count:
            return
        for number in range(count, step.count):
            positions, attention = step.lay_out(number - count)
            normed, stream = self._run(count - 1, drafts[-1], hidden, positions, step.kv, attention[0], None)
            hidden = normed if predictor.feeds_normed else stream
            drafts.append(choose(predictor.logits(model, normed), step, number, self.method))
        write(step, drafts[: step.count])

    def _run(
        self,
        number: int,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        kv: Sequence[Any],
        inputs: AttentionInputs,
        last: LastTokens | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(the normed output, the output) of a predictor at the tokens in `last`, or at all."""
        predictor = self.predictors[number]
        x = predictor.join(predictor.embed(self._model[0], tokens), hidden)
        return predictor.norm(*self._layers[number](x, None, positions, kv[number], replace(inputs, last=last)))


def _later(tokens: torch.Tensor, step: ProposalStep, drafts: list[torch.Tensor]) -> torch.Tensor:
    """The token after each: the next of its row, or the last draft. At the end of a chunk that draws nothing it is not
    known, and stays: one cached position of a later predictor is then less than it could be."""
    ends = step.attention[0].query_starts[1:].long() - 1
    found = tokens.roll(-1)
    found[ends] = tokens[ends]
    if drafts:
        found[step.ends] = drafts[-1]
    return found


def make(config: SpeculativeConfig, model: CausalLM, build: BuildContext) -> MtpProposer:
    """The predictors in the target's folder, which `config.model` is; their weights are not filled."""
    return MtpProposer(DraftCheckpoint.open(str(config.model)), model, build, config.draft_sample_method)
