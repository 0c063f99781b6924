"""Skinny GEMMs, y = x @ weight.T, with the preceding norm and the following activation fused.

A decode step reads every weight once, and with few rows nothing else takes time: what counts is the memory bandwidth
reached and the gaps between kernels. Four kernels cover the range (`GemmConfig` names one and its tile shape;
`tuning.py` chooses): `vector` for up to 4 rows on FMA units; on tensor cores `direct` for up to 16 rows, without shared
memory, `dot` on small tiles for up to 64 rows, `tile` on large ones for any number. All of them read their weights, or
prefetch them into L2, before the preceding kernel has ended (programmatic dependent launch).

Fused on request:
- the preceding norm: x becomes rms_norm(residual + x). The gain is applied to x and the rms to the result, so one pass
  over the input is enough; the sum is rounded to the dtype first, as it is when it is stored.
- the following gate: the weight's rows are gate features, then as many up features; the result is silu(gate) * up.
- the bias.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.kernels.adapters import SlotLowRank
from quire.kernels.triton.skinny_gemm.common import Gemm, GemmConfig, GemmLaunch
from quire.kernels.triton.skinny_gemm.direct import direct_launch
from quire.kernels.triton.skinny_gemm.dot import dot_launch
from quire.kernels.triton.skinny_gemm.tile import tile_launch
from quire.kernels.triton.skinny_gemm.vector import vector_launch

_LAUNCHES = {"vector": vector_launch, "direct": direct_launch, "dot": dot_launch, "tile": tile_launch}


def skinny_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, config: GemmConfig
) -> torch.Tensor:
    """x @ weight.T (+ bias) for x [rows, in], weight [out, in], both contiguous, rows a multiple of 16 bytes."""
    return _run(Gemm(x, weight, bias), config)


def skinny_silu_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, config: GemmConfig
) -> torch.Tensor:
    """silu(gate) * up [rows, out / 2], where x @ weight.T (+ bias) is gate, then up."""
    return _run(Gemm(x, weight, bias, silu=True), config)


def skinny_norm_linear(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    gain: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    silu: bool = False,
    config: GemmConfig,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(linear(rms_norm(stream)), stream), where stream = residual + x, a new tensor, or x itself.

    The residual is not modified.
    """
    stream = x if residual is None else torch.empty_like(x)
    gemm = Gemm(x, weight, bias, gain, residual, eps, silu, None if residual is None else stream)
    return _run(gemm, config), stream


def skinny_adapted_linear(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm: tuple[torch.Tensor, float] | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    low: SlotLowRank,
    inner: torch.Tensor,
    silu: bool,
    config: GemmConfig,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One of the products above with what adapters change, by the `vector` kernel; and the stream, if there is a norm.
    inner: the inner products of the rows, float32 [1, rows, parts * rank]."""
    if norm is None:
        return _run(Gemm(x, weight, bias, silu=silu, low=low, inner=inner), config), None
    stream = x if residual is None else torch.empty_like(x)
    written = None if residual is None else stream
    gemm = Gemm(x, weight, bias, norm[0], residual, norm[1], silu, written, low, inner)
    return _run(gemm, config), stream


def compile_gemm(gemm: Gemm, config: GemmConfig) -> None:
    """Compile the kernel that `gemm` needs, without running it; its tensors may be on the `meta` device."""
    launch = _launch(gemm, config)
    launch.kernel.warmup(*launch.arguments, grid=(launch.programs,), **launch.constants)


def compile_key(gemm: Gemm, config: GemmConfig) -> Hashable:
    """Equal for GEMMs that one compiled kernel serves."""
    launch = _launch(gemm, config)
    # No kernel is specialized on the number of rows.
    signature = [
        name == "rows" or _specialization(value)
        for name, value in zip(launch.kernel.arg_names, launch.arguments, strict=False)
    ]
    return launch.kernel, tuple(signature), tuple(sorted(launch.constants.items()))


def _specialization(argument: Any) -> Hashable:
    """What Triton specializes a kernel on in an argument."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype
    if isinstance(argument, TensorDescriptor):
        return argument.base.dtype, tuple(argument.block_shape)
    if isinstance(argument, int):
        return argument % 16 == 0
    return str(type(argument))


def _run(gemm: Gemm, config: GemmConfig) -> torch.Tensor:
    launch = _launch(gemm, config)
    launch.kernel[(launch.programs,)](*launch.arguments, **launch.constants)
    return launch.out


def _launch(gemm: Gemm, config: GemmConfig) -> GemmLaunch:
    return _LAUNCHES[config.kernel](gemm, config)


__all__ = [
    "Gemm", "GemmConfig", "compile_gemm", "compile_key", "skinny_adapted_linear", "skinny_linear", "skinny_norm_linear",
    "skinny_silu_linear",
]  # fmt: skip
