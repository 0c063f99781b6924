"""Products with `ScaledWeight` and `BlockScaledWeight`: 8-bit codes (FP8 e4m3, INT8), activations in the same codes.

Up to `vector.MAX_ROWS` rows and with a small weight one kernel does everything: residual addition, norm, quantization,
product. Otherwise the activations are quantized by a kernel of their own (with the addition and the norm before it),
then multiplied on tensor cores, with more rows by `tile` or `large` (`w8/`). Activations that stay as they are are
multiplied with values, by `vector` and `tile`; past a few hundred rows the weight is dequantized into a temporary,
which costs little there.
"""

# ruff: noqa: N803

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
import triton
import triton.language as tl

from quire.kernels.triton.launch import INTERPRETED, gdc_launch_dependents, gdc_wait, pdl
from quire.kernels.triton.quantized import tuning
from quire.kernels.triton.quantized.base import QuantizedProducts
from quire.kernels.triton.quantized.tuning import ProductCase
from quire.kernels.triton.quantized.w8.activations import MAX_WIDTH, Codes, quantize, quantize_launch
from quire.kernels.triton.quantized.w8.choice import INVARIANT, candidates, choose
from quire.kernels.triton.quantized.w8.large import large_launch
from quire.kernels.triton.quantized.w8.specialized import specialized_launch
from quire.kernels.triton.quantized.w8.tile import CodedGemm, tile_launch
from quire.kernels.triton.quantized.w8.vector import VectorGemm, vector_launch
from quire.kernels.triton.skinny_gemm.common import GemmConfig, GemmLaunch
from quire.kernels.triton.tuning_table import bucket_of, current_tables
from quire.kernels.weights.scaled import BlockScaledWeight, ScaledWeight

log = logging.getLogger(__name__)

_LAUNCHES = {"tile": tile_launch, "large": large_launch, "specialized": specialized_launch}

Weight: TypeAlias = ScaledWeight | BlockScaledWeight

USE_OWN_GEMMS = not INTERPRETED
"""Whether products run our kernels. Off in the interpreter, which takes seconds for each; tests enable it."""
FUSED_ADD_MIN_ROWS = 128
"""From this many rows on a product is added to the residual stream in its epilogue. With fewer rows the addition costs
nothing where the norm is computed."""
DEQUANTIZED_MIN_ROWS = 257
"""From this many rows on a weight whose activations are not quantized is dequantized as a whole."""
QUANTIZED_APART_SIZE = 1 << 25
"""With more values than this, times rows, a weight has so many programs that each should not quantize the input, with
the norm, again: a kernel of its own does, while the product's first loads are under way."""
LIBRARY_MIN_ROWS = 192
"""From this many rows on a weight in blocks is multiplied by cuBLASLt, where it can."""
LIBRARY_MULTIPLE = 16
"""Rows of a product by cuBLASLt are padded to a multiple of this."""
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384)
"""Rows: a configuration serves those up to a bucket."""


@dataclass(frozen=True)
class Product:
    """What is around one product."""

    silu: bool = False
    bias: torch.Tensor | None = None
    stream: torch.Tensor | None = None
    """The result is added to it, in place."""
    gain: torch.Tensor | None = None
    """Of an RMS norm of the input (plus `residual`, if there is one)."""
    eps: float = 0.0
    residual: torch.Tensor | None = None


@dataclass(frozen=True)
class PendingKernel:
    """A kernel to compile ahead; equal to those that the same compiled kernel serves."""

    key: str
    launch: GemmLaunch = field(compare=False, repr=False)

    def compile(self) -> None:
        launch = self.launch
        launch.kernel.warmup(*launch.arguments, grid=(launch.programs,), **launch.constants)


class ScaledProducts(QuantizedProducts):
    """Products with 8-bit codes on a GPU."""

    buckets = BUCKETS

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self._product(x, weight, Product(bias=bias))

    def gated_linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        if not self._is_supported(x, weight):
            return super().gated_linear(x, weight, bias)
        return self._product(x, weight, Product(silu=True, bias=bias))

    def linear_add(
        self,
        stream: torch.Tensor,
        x: torch.Tensor,
        weight: Weight,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        if (
            self.invariant
            or len(x) < FUSED_ADD_MIN_ROWS
            or not stream.is_contiguous()
            or not self._is_supported(x, weight)
            or not _quantizes(weight)
        ):
            return self.linear(x, weight, bias)
        self._product(x, weight, Product(bias=bias, stream=stream))
        return None

    def norm_linear(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor | None,
        gain: torch.Tensor,
        eps: float,
        weight: Weight,
        bias: torch.Tensor | None = None,
        gated: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        read, carried = (x, residual) if x is not None else (residual, None)
        assert read is not None
        vector = _quantizes(weight) or self._config(read, weight, gated).kernel == "vector"
        if not (vector and self._is_supported(read, weight) and (carried is None or carried.stride(-1) == 1)):
            return super().norm_linear(x, residual, gain, eps, weight, bias, gated)
        product = Product(silu=gated, bias=bias, gain=gain, eps=eps, residual=carried)
        if self._uses_library(read, weight):
            return self._library_product(read, weight, product), read if carried is None else carried
        launches, stream = self._norm_launches(read, weight, product)
        return run(launches), stream

    def kernels_of(
        self, weight: Weight, normed: bool, gated: bool, bias: bool, max_rows: int
    ) -> Sequence[PendingKernel]:
        found: dict[str, PendingKernel] = {}
        if isinstance(weight, BlockScaledWeight):
            has_block_library()  # tried before a graph is captured
        held = weight.with_tensors({name: _meta(tensor) for name, tensor in weight.tensors.items()}, weight.shape)
        for rows in (rows for rows in BUCKETS if rows < 2 * max_rows):
            for launch in self._all_launches(rows, held, normed, gated, bias):
                key = _key(launch)
                found.setdefault(key, PendingKernel(key, launch))
        return list(found.values())

    def _all_launches(self, rows: int, weight: Weight, normed: bool, gated: bool, bias: bool) -> Iterator[GemmLaunch]:
        """The launches of every product of `rows` rows with a weight on the `meta` device."""
        outputs, depth = weight.shape
        x = torch.empty(rows, depth, dtype=weight.dtype, device="meta")
        offset = x.new_empty(outputs) if bias else None
        if not self._is_supported(x, weight):
            return
        if normed and (_quantizes(weight) or self._config(x, weight, gated).kernel == "vector"):
            # The first layer has no residual stream yet; from some rows on, products have been added to it.
            for residual in (None, torch.empty_like(x)):
                product = Product(gated, offset, gain=x.new_empty(depth), eps=1e-5, residual=residual)
                yield from self._norm_launches(x, weight, product)[0]
            return
        if not _quantizes(weight) and rows >= DEQUANTIZED_MIN_ROWS and not self.invariant:
            yield dequantize_launch(weight)
            return
        yield from self._launches(x, weight, Product(gated, offset))
        if rows >= FUSED_ADD_MIN_ROWS and not gated and not self.invariant:
            yield from self._launches(x, weight, Product(bias=offset, stream=x.new_empty(rows, outputs)))

    def _is_supported(self, x: torch.Tensor, weight: Weight) -> bool:
        """Whether the kernels take x and the weight: on the device, aligned, not empty, not too wide."""
        return (
            USE_OWN_GEMMS
            and (x.is_cuda or x.is_meta or INTERPRETED)
            and x.dim() == 2
            and x.stride(1) == 1
            and x.numel() > 0
            and weight.codes.is_contiguous()
            and x.shape[1] % 16 == 0
            and x.shape[1] <= MAX_WIDTH
            and (weight.codes.dtype is torch.int8 or has_float8())
            and (isinstance(weight, ScaledWeight) or weight.block[1] == INVARIANT.block_k)
        )

    def _product(self, x: torch.Tensor, weight: Weight, product: Product) -> torch.Tensor:
        if not self._is_supported(x, weight):
            assert not product.silu and product.stream is None
            return weight.linear(x, product.bias)
        if self._uses_library(x, weight):
            return self._library_product(x, weight, product)
        if not _quantizes(weight) and len(x) >= DEQUANTIZED_MIN_ROWS and not self.invariant:
            values = run([dequantize_launch(weight)])
            return (self.ops.gated_linear if product.silu else self.ops.linear)(x, values, product.bias)
        return run(self._launches(x, weight, product))

    def _uses_library(self, x: torch.Tensor, weight: Weight) -> bool:
        return (
            isinstance(weight, BlockScaledWeight)
            and len(x) >= LIBRARY_MIN_ROWS
            and not self.invariant
            and not x.is_meta
            and weight.block == (128, 128)
            and all(size % 128 == 0 for size in weight.shape)
            and weight.scale.shape[1] % 4 == 0  # the library's alignment of scales
            and weight.scale.is_contiguous()
            and has_block_library()
        )

    def _library_product(self, x: torch.Tensor, weight: Weight, product: Product) -> torch.Tensor:
        launch, codes = quantize_launch(
            x, weight.codes.dtype, None, 128,
            gain=product.gain, eps=product.eps, residual=product.residual, multiple=LIBRARY_MULTIPLE,
        )  # fmt: skip
        run([launch])
        out = _library_linear(codes, weight.codes, weight.scale, x.dtype)[: len(x)]
        if product.bias is not None:
            out += product.bias
        if product.silu:
            return self.ops.silu_mul(out)
        return out if product.stream is None else product.stream.add_(out)

    def _norm_launches(
        self, x: torch.Tensor, weight: Weight, product: Product
    ) -> tuple[list[GemmLaunch], torch.Tensor]:
        """(the launches, the stream they will have written)."""
        if self._config(x, weight, product.silu).kernel == "vector" and not _is_quantized_apart(weight, len(x)):
            stream = x if product.residual is None else x.new_empty(x.shape)
            residual = None if product.residual is None else product.residual.contiguous()
            gemm = _vector_gemm(x.contiguous(), weight, product)
            gemm.gain, gemm.residual, gemm.eps = product.gain, residual, product.eps
            gemm.stream = None if residual is None else stream
            return [vector_launch(gemm, self._config(x, weight, product.silu))], stream
        return self._launches(x, weight, product), x if product.residual is None else product.residual

    def _launches(self, x: torch.Tensor, weight: Weight, product: Product) -> list[GemmLaunch]:
        config = self._config(x, weight, product.silu)
        if config.kernel == "vector" and not _is_quantized_apart(weight, len(x)):
            return [vector_launch(_vector_gemm(x.contiguous(), weight, product), config)]
        block = weight.block if isinstance(weight, BlockScaledWeight) else None
        static = weight.input_scale if isinstance(weight, ScaledWeight) else None
        before: list[GemmLaunch] = []
        if not _quantizes(weight):
            codes = Codes(x.contiguous(), None)
        else:
            launch, codes = quantize_launch(
                x, weight.codes.dtype, static, block[1] if block else 0,
                gain=product.gain, eps=product.eps, residual=product.residual,
            )  # fmt: skip
            before.append(launch)
        if config.kernel == "vector":
            coded = replace(_vector_gemm(codes.codes, weight, product), x_scale=codes.scale, dtype=x.dtype)
            return [*before, vector_launch(coded, config)]
        gemm = CodedGemm(codes, weight.codes, weight.scale, x.dtype, product.bias, product.silu, product.stream, block)
        return [*before, _LAUNCHES[config.kernel](gemm, config)]

    def _config(self, x: torch.Tensor, weight: Weight, silu: bool) -> GemmConfig:
        if self.invariant:
            return INVARIANT
        outputs = weight.shape[0]
        bucket = bucket_of(x.shape[0], BUCKETS) or BUCKETS[-1]
        config: GemmConfig = self.config or _chosen(*_case_fields(weight, bucket, silu))
        if config.kernel in ("large", "specialized") and outputs // (2 if silu else 1) * x.element_size() % 16:
            return INVARIANT  # TMA stores rows of a multiple of 16 bytes
        return config

    def case_of(self, weight: Weight, rows: int, gated: bool) -> ProductCase | None:
        most = DEQUANTIZED_MIN_ROWS if not _quantizes(weight) else LIBRARY_MIN_ROWS if _is_blocked(weight) else 1 << 30
        return _case(*_case_fields(weight, rows, gated)) if rows in BUCKETS and rows < most else None


def _is_blocked(weight: Weight) -> bool:
    return isinstance(weight, BlockScaledWeight)


def _case_fields(weight: Weight, bucket: int, gated: bool) -> tuple[Any, ...]:
    """The arguments of `_case`."""
    codes = "int8" if weight.codes.dtype is torch.int8 else "fp8"
    how = "x".join(map(str, weight.block)) if isinstance(weight, BlockScaledWeight) else weight.inputs
    sizes = (*weight.shape, weight.codes.dtype, _is_blocked(weight), _quantizes(weight))
    return f"{codes}-{how}", bucket, *sizes, weight.dtype, gated


@functools.cache
def _case(
    kind: str, bucket: int, outputs: int, depth: int, code: torch.dtype, blocked: bool, quantized: bool,
    dtype: torch.dtype, gated: bool,
) -> ProductCase:  # fmt: skip
    product = (bucket, outputs, depth, gated, code, blocked, quantized)
    return ProductCase(
        tuning.key_of(kind, bucket, outputs, depth, dtype, gated), choose(*product), candidates(*product)
    )


@functools.cache
def _chosen(*case: Any) -> GemmConfig:
    found: GemmConfig = tuning.config_of(_case(*case), current_tables())
    return found


@functools.cache
def has_float8() -> bool:
    """Whether the current device converts and multiplies float8."""
    return INTERPRETED or not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 9)


def _library_linear(codes: Codes, weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A product in blocks of 128 by cuBLASLt."""
    assert codes.scale is not None
    return torch._scaled_mm(codes.codes, weight.t(), codes.scale.t(), scale.t(), out_dtype=dtype)


@functools.cache
def has_block_library() -> bool:
    """Whether this torch and this device multiply codes with scales per block (CUDA 12.9, Hopper), tried once."""
    if INTERPRETED or not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
        return False
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(64, 512, device="cuda", generator=generator).bfloat16()
    codes = torch.randn(256, 512, device="cuda", generator=generator).to(torch.float8_e4m3fn)
    weight = BlockScaledWeight(codes, torch.rand(2, 4, device="cuda", generator=generator), x.dtype, (128, 128))
    try:
        found = _library_linear(quantize(x, group=128), weight.codes, weight.scale, x.dtype)
    except RuntimeError as error:
        log.info("cuBLASLt does not multiply with scales per block here: %s", error)
        return False
    expected = weight.linear(x).float()
    return bool((found.float() - expected).norm() < 1e-2 * expected.norm())


def run(launches: Sequence[GemmLaunch]) -> torch.Tensor:
    """Run kernels one after the other; returns what the last one fills."""
    for launch in launches:
        launch.kernel[(launch.programs,)](*launch.arguments, **launch.constants)
    return launches[-1].out


def _quantizes(weight: Weight) -> bool:
    """Whether activations are quantized."""
    return isinstance(weight, BlockScaledWeight) or weight.inputs != "none"


def _is_quantized_apart(weight: Weight, rows: int) -> bool:
    """Whether a kernel of its own quantizes the few rows of a product."""
    return _quantizes(weight) and rows * weight.numel() > QUANTIZED_APART_SIZE


def _vector_gemm(x: torch.Tensor, weight: Weight, product: Product) -> VectorGemm:
    block = weight.block if isinstance(weight, BlockScaledWeight) else None
    static = weight.input_scale if isinstance(weight, ScaledWeight) else None
    return VectorGemm(
        x, weight.codes, weight.scale, _quantizes(weight), static, product.bias, silu=product.silu, block=block
    )


@triton.jit
def _dequantize(codes, scale, out, K, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(scale + row)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for start in range(0, K, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        value = tl.load(codes + row * K + columns, mask=columns < K, other=0.0).to(tl.float32) * factor
        tl.store(out + row * K + columns, value.to(out.dtype.element_ty), mask=columns < K)


def dequantize_launch(weight: Weight) -> GemmLaunch:
    """The launch of `weight.dequantize()`. Bytes: 1 in and 2 out per weight."""
    out = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    rows, depth = weight.shape
    constants = {"BLOCK": min(4096, triton.next_power_of_2(depth)), "num_warps": 4, **pdl()}
    return GemmLaunch(_dequantize, rows, (weight.codes, weight.scale, out, depth), constants, out)


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _key(launch: GemmLaunch) -> str:
    """Equal for launches that one compiled kernel serves."""
    # No kernel is specialized on the number of rows.
    signature = [
        name == "rows" or _specialization(value)
        for name, value in zip(launch.kernel.arg_names, launch.arguments, strict=False)
    ]
    return f"{launch.kernel.__name__} {signature} {sorted(launch.constants.items())}"


def _specialization(argument: Any) -> object:
    """What Triton specializes a kernel on in an argument."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype
    if hasattr(argument, "block_shape"):  # a TMA descriptor, of Triton or of Gluon
        return argument.base.dtype, tuple(argument.block_shape)
    return argument % 16 == 0 if isinstance(argument, int) else str(type(argument))
