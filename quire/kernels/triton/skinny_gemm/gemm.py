"""Matrix products of few rows, y = x @ weight.T, with what stands before and after them folded in.

A decode step reads every weight once, and with few rows nothing else takes time: such a product is as good as the
bandwidth it reaches and the gaps around it. Three kernels share the work (`Config` names one and its shape; `tuning`
chooses): `vector` for up to four rows, `dot` on small tensor core tiles for up to 64, `tile` on large ones for any
number. All of them read their weights, or bring them into the cache, before the kernel ahead of them has ended.

Folded in, if asked for:
- the norm before: x becomes rms_norm(residual + x). The gain is applied to x, the rms to the result, so that one pass
  over the input does; the sum is rounded to the dtype first, as it is when it is stored.
- the gate after: the weight's rows are gate features, then as many it gates; the result is silu(gate) * up.
- the bias.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.kernels.triton.skinny_gemm.common import Config, Launch, Product
from quire.kernels.triton.skinny_gemm.dot import dot_launch
from quire.kernels.triton.skinny_gemm.tile import tile_launch
from quire.kernels.triton.skinny_gemm.vector import vector_launch

_LAUNCHES = {"vector": vector_launch, "dot": dot_launch, "tile": tile_launch}


def thin_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, config: Config
) -> torch.Tensor:
    """x @ weight.T (+ bias) for x [rows, in], weight [out, in], both contiguous, rows a multiple of 16 bytes."""
    return _run(Product(x, weight, bias), config)


def thin_silu_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, config: Config
) -> torch.Tensor:
    """silu(gate) * up [rows, out / 2], where x @ weight.T (+ bias) is gate, then up."""
    return _run(Product(x, weight, bias, silu=True), config)


def thin_norm_linear(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    gain: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    silu: bool = False,
    config: Config,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the product of rms_norm(stream), stream), where stream = residual + x, a new tensor, or x itself.

    The residual is left as it was.
    """
    stream = x if residual is None else torch.empty_like(x)
    product = Product(x, weight, bias, gain, residual, eps, silu, None if residual is None else stream)
    return _run(product, config), stream


def compile_product(product: Product, config: Config) -> None:
    """Compile what `product` needs, without running it; its tensors may be on the `meta` device."""
    launch = _launch(product, config)
    launch.kernel.warmup(*launch.arguments, grid=(launch.programs,), **launch.meta)


def compile_key(product: Product, config: Config) -> Hashable:
    """Equal for products that one compiled kernel serves."""
    launch = _launch(product, config)
    # No kernel is compiled for a number of rows.
    forms = [
        name == "rows" or _form(value) for name, value in zip(launch.kernel.arg_names, launch.arguments, strict=False)
    ]
    return launch.kernel, tuple(forms), tuple(sorted(launch.meta.items()))


def _form(argument: Any) -> Hashable:
    """What Triton looks at in an argument."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype
    if isinstance(argument, TensorDescriptor):
        return argument.base.dtype, tuple(argument.block_shape)
    if isinstance(argument, int):
        return argument % 16 == 0
    return str(type(argument))


def _run(product: Product, config: Config) -> torch.Tensor:
    launch = _launch(product, config)
    launch.kernel[(launch.programs,)](*launch.arguments, **launch.meta)
    return launch.out


def _launch(product: Product, config: Config) -> Launch:
    return _LAUNCHES[config.kernel](product, config)


__all__ = ["Config", "Product", "compile_key", "compile_product", "thin_linear", "thin_norm_linear", "thin_silu_linear"]
