"""Products with weights in few bits and activations in 16: `GroupedWeight` and `Fp4Weight` on NVIDIA GPUs.

A weight is its code's number, rounded once to the activations' dtype, and products are summed in float32, whichever
kernel runs: `few` and `tile` make numbers of codes as they multiply, `dequantize` makes all of them first.
"""

from __future__ import annotations

import torch

from quire.kernels.triton.quantized.few_rows import few_launch
from quire.kernels.triton.quantized.gemm import WeightOnlyConfig, WeightOnlyGemm, WeightOnlyLaunch
from quire.kernels.triton.quantized.tile_rows import tile_launch

_LAUNCHES = {"few": few_launch, "tile": tile_launch}


def launch_of(gemm: WeightOnlyGemm, config: WeightOnlyConfig) -> WeightOnlyLaunch:
    """The launch of a GEMM by `few` or `tile`."""
    return _LAUNCHES[config.kernel](gemm, config)


def run(gemm: WeightOnlyGemm, config: WeightOnlyConfig) -> torch.Tensor:
    """The result of a GEMM by `few` or `tile`."""
    launch = launch_of(gemm, config)
    launch.kernel[(launch.programs,)](*launch.arguments, **launch.constants)
    return launch.out


def compile_gemm(gemm: WeightOnlyGemm, config: WeightOnlyConfig) -> None:
    """Compile the kernel that `gemm` needs, without running it; its tensors may be on the `meta` device."""
    launch = launch_of(gemm, config)
    launch.kernel.warmup(*launch.arguments, grid=(launch.programs,), **launch.constants)
