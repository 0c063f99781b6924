"""Mamba 2 (arXiv 2405.21060): a stack of Mamba 2 mixers. Blocks as in Nemotron-H (`nemotron_h.py`)."""

from __future__ import annotations

from quire.errors import UnsupportedModelError
from quire.layers.build_context import BuildContext
from quire.layers.recurrent import Mamba2Settings, time_step_limit
from quire.loading.model_config import positive_integer
from quire.models.nemotron_h import BackboneForCausalLM


class Mamba2ForCausalLM(BackboneForCausalLM):
    """Mamba 2 and Codestral Mamba. The residual stream is kept in the activations' dtype."""

    def __init__(self, build: BuildContext) -> None:
        raw = build.config.raw
        if (act := raw.get("hidden_act", "silu")) != "silu":
            raise UnsupportedModelError(f"Mamba 2 with hidden_act {act!r} is not implemented; only 'silu' is")
        settings = Mamba2Settings(
            heads=positive_integer(raw, "num_heads"),
            groups=positive_integer(raw, "n_groups"),
            head_dim=positive_integer(raw, "head_dim"),
            state_dim=positive_integer(raw, "state_size"),
            taps=positive_integer(raw, "conv_kernel"),
            conv_bias=bool(raw.get("use_conv_bias", True)),
            bias=bool(raw.get("use_bias", False)),
            dt_limit=time_step_limit(raw),
            norm_groups=1,
        )
        super().__init__(build, ["linear_attention"] * build.config.num_layers, settings)
