"""BitNet b1.58 2B4T: Llama with squared ReLU gates, and a norm before each matrix that writes to the stream."""

from __future__ import annotations

import torch

from quire.errors import UnsupportedModelError
from quire.kernels.kv import LayerKV
from quire.layers.attention.base import AttentionInputs, LastTokens
from quire.layers.build_context import BuildContext
from quire.layers.norm import RMSNorm, WideRMSNorm
from quire.models.llama import LlamaAttention, LlamaForCausalLM, LlamaMLP, LlamaVariant


class BitNetAttention(LlamaAttention):
    """Attention whose heads' outputs are normed together."""

    def __init__(self, build: BuildContext, variant: LlamaVariant, layer: int, cos_sin: torch.Tensor | None) -> None:
        super().__init__(build, variant, layer, cos_sin)
        dim, heads = self.heads.dim, self.heads.query
        kept = slice(heads.start * dim, heads.stop * dim)
        self.attn_sub_norm = WideRMSNorm(build, "attn_sub_norm", build.config.num_heads * dim, kept)

    def forward(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        kv: LayerKV,
        inputs: AttentionInputs,
        last: LastTokens | None,
    ) -> torch.Tensor:
        """The heads' outputs, normed."""
        return self.attn_sub_norm(super().forward(qkv, positions, kv, inputs, last))


class BitNetMLP(LlamaMLP):
    """down(norm(relu(gate(x))² * up(x)))."""

    def __init__(self, build: BuildContext) -> None:
        super().__init__(build)
        width = build.config.intermediate_size
        self.gate_up_proj.activation = "relu2"
        self.ffn_sub_norm = WideRMSNorm(build, "ffn_sub_norm", width, build.ranks.slice(width, "intermediate_size"))

    def forward(
        self, norm: RMSNorm, x: torch.Tensor | None, residual: torch.Tensor | None, slots: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """(output to add to the residual stream, or None if already added; the stream)."""
        gated, residual = self.gate_up_proj.norm_linear(norm, x, residual)
        return self.down_proj.linear_add(residual, self.ffn_sub_norm(gated)), residual

    def forward_normed(self, normed: torch.Tensor) -> torch.Tensor:
        """The MLP's output for an input that is already normed."""
        return self.down_proj(self.ffn_sub_norm(self.gate_up_proj(normed)))


class BitNetForCausalLM(LlamaForCausalLM):
    """Checkpoints with weights packed by transformers (`quant_method: bitnet`), or in 16 bits."""

    is_gated = False  # checked here: the gate is not silu

    def __init__(self, build: BuildContext) -> None:
        act = build.config.raw.get("hidden_act", "relu2")
        if act != "relu2":
            raise UnsupportedModelError(f"BitNetForCausalLM with hidden_act {act!r} is not implemented; relu2 is")
        super().__init__(build, LlamaVariant(attention=BitNetAttention, mlp=lambda build, layer: BitNetMLP(build)))
