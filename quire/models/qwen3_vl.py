"""Qwen3-VL (arXiv 2511.21631), dense and with mixtures, the text part: Qwen3 with positions of three rows."""

from __future__ import annotations

from dataclasses import replace

from quire.layers.expert_weights import DOWN, GATE_UP
from quire.layers.moe import SparseMLP
from quire.loading.weights import AnyTarget, Target
from quire.models.qwen3 import Qwen3ForCausalLM
from quire.models.qwen3_moe import Qwen3MoeForCausalLM

_VISION = ("model.visual.", "visual.")


class Qwen3VLForConditionalGeneration(Qwen3ForCausalLM):
    """The dense models; the encoder is in `vision/`."""

    def ignores(self, name: str) -> bool:
        """As in Llama; and the vision tower, which is read apart."""
        return name.startswith(_VISION) or super().ignores(name)


class TransposedExperts(SparseMLP):
    """Experts that published files have as [experts, inputs, outputs]; transformers writes them the other way round."""

    def targets(self) -> dict[str, list[AnyTarget]]:
        """Either way, told apart by their shape."""
        found = super().targets()
        return found | {
            name: [_or_transposed(each) for each in found[name]] for name in (GATE_UP, DOWN) if name in found
        }


def _or_transposed(target: AnyTarget) -> AnyTarget:
    if not isinstance(target, Target):
        return target
    (experts, rows, columns), keep = target.shape, target.keep
    turned = (keep[0], keep[2], keep[1]) if keep else ()
    other = Target(target.into, (experts, columns, rows), turned, lambda part: part.transpose(1, 2))
    return replace(target, also=(other,))


class Qwen3VLMoeForConditionalGeneration(Qwen3MoeForCausalLM):
    """The models with mixtures."""

    renormalises = True
    sparse_mlp = TransposedExperts

    def ignores(self, name: str) -> bool:
        """As in Llama; and the vision tower, which is read apart."""
        return name.startswith(_VISION) or super().ignores(name)
