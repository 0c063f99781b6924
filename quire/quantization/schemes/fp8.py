"""`quant_method: fp8` (per tensor, or blocks as in DeepSeek V3 and Qwen3-FP8) and `fbgemm_fp8` (per output)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.quantization.formats.base import Format
from quire.quantization.formats.scaled import BlockFormat, ScaledFormat
from quire.quantization.schemes.base import DescribedScheme, block_in, names_in, unsupported


class Fp8Scheme(DescribedScheme):
    """All matrices but those listed, in e4m3."""

    name = "fp8"

    def __init__(self, config: Mapping[str, Any], dtypes: Mapping[str, str] | None = None) -> None:
        super().__init__(dtypes)
        self._skipped = frozenset(names_in(config, "ignored_layers", "modules_to_not_convert"))
        self._activations = str(config.get("activation_scheme") or "dynamic").lower()
        if self._activations not in ("static", "dynamic"):
            raise unsupported(f"fp8: activation_scheme {self._activations!r}", "static and dynamic are")
        if str(config.get("fmt") or "e4m3").lower() not in ("e4m3", "float8_e4m3fn"):
            raise unsupported(f"fp8: weights in {config.get('fmt')}", "use a checkpoint in e4m3")
        self._block = block_in(config, "weight_block_size")
        if self._block is not None and self._activations == "static":
            raise unsupported("fp8: blocks with static activations", "use a checkpoint with dynamic ones")

    def described(self, module: str) -> Format | None:
        # A whole module, such as a vision tower, may be listed by its own name. Lists have hundreds of names.
        path = module.split(".")
        if any(".".join(path[:length]) in self._skipped for length in range(1, len(path) + 1)):
            return None
        names = self.header.of(module)
        if self._block is not None:
            scale = "weight_scale" if "weight_scale" in names else "weight_scale_inv"
            return BlockFormat(self._block, scale)
        # transformers gives single scales the names that it gives scales of blocks.
        scale = "weight_scale_inv" if "weight_scale_inv" in names else "weight_scale"
        inputs = "activation_scale" if "activation_scale" in names else "input_scale"
        return ScaledFormat(
            per="tensor", inputs="tensor" if self._activations == "static" else "token", scale=scale, input_scale=inputs
        )


class FbgemmFp8Scheme(Fp8Scheme):
    """A scale per output, activations by token. The bound on their scales (`activation_scale_ub`) is not applied."""

    name = "fbgemm_fp8"

    def described(self, module: str) -> Format | None:
        return None if super().described(module) is None else ScaledFormat(per="channel", label="fbgemm")
