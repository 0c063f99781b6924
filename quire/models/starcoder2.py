"""StarCoder 2 (arXiv 2402.19173): Llama with layer norms, biases, and an MLP without a gate."""

from __future__ import annotations

from torch import nn

from quire.layers.build_context import BuildContext
from quire.layers.norm import LayerNorm
from quire.models.base import refuse_other_values
from quire.models.llama import LlamaForCausalLM, LlamaVariant
from quire.models.plain_layers import PlainMLP, PreNormLayer


class Starcoder2ForCausalLM(LlamaForCausalLM):
    """StarCoder 2; all layers may have a sliding window."""

    is_gated = False

    def __init__(self, build: BuildContext) -> None:
        raw = build.config.raw
        refuse_other_values(build.config, {"norm_type": "layer_norm", "mlp_type": "default"})
        bias = bool(raw.get("use_bias", True))

        def mlp(build: BuildContext, layer: int) -> nn.Module:
            return PlainMLP(build, ("c_fc", "c_proj"), raw.get("hidden_act", "gelu_pytorch_tanh"), bias)

        super().__init__(build, LlamaVariant(bias, bias, mlp=mlp, layer=PreNormLayer, norm=LayerNorm))
