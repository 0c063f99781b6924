"""`Ops`: the kernels a layer calls. Every device implements them; `reference.py` defines what they compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from quire.kernels.adapters import SlotLowRank
from quire.kernels.gates import PLAIN_EXPERTS, ExpertVariant
from quire.kernels.kv import LayerKV
from quire.kernels.routing import RouteRule
from quire.kernels.segments import Segments
from quire.kernels.states import DeltaNet, Mamba, Mamba2, ShortConv, States, StepRows
from quire.kernels.weights.base import Weight


class CompilableKernel(Protocol):
    """A kernel that can be compiled ahead of its first launch."""

    def compile(self) -> None: ...


class Ops(Protocol):
    """Row-wise kernels over token matrices [tokens, features]. Inputs are contiguous in their last dimension.

    The *stream* is the residual stream: residual + x, or whichever of the two is given.
    """

    whole_steps: bool
    """Whether batch and sampling have kernels too (`CudaBatch`), so that a step is captured from inputs to tokens."""

    def linear(
        self,
        x: torch.Tensor,
        weight: Weight,
        bias: torch.Tensor | None = None,
        addend: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x @ weight.T (+ bias) (+ addend [tokens, out]); weight is [out, in], a tensor or in few bits
        (`kernels/weights`)."""
        ...

    def embedding(self, tokens: torch.Tensor, weight: Weight) -> torch.Tensor:
        """Rows `tokens` [n] int64 of weight [vocab, width]."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / rms(x) * weight, computed in float32."""
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """residual += x (in place); returns (rms_norm(residual), residual)."""
        ...

    def norm_stream(
        self, x: torch.Tensor | None, residual: torch.Tensor | None, gain: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rms_norm(stream), stream)."""
        ...

    def copy_stream(self, x: torch.Tensor | None, residual: torch.Tensor | None, out: torch.Tensor) -> None:
        """Write the stream, residual + x, either of which may be None, to `out` [tokens, width]; neither is changed."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up, where gate_up is [tokens, 2 * width]: gate first, then up."""
        ...

    def gate_mul(self, gate_up: torch.Tensor, activation: str = "silu") -> torch.Tensor:
        """The activation, one of `gates.GATES`, of gate_up [tokens, 2 * width]: gate first, then up."""
        ...

    def gated_linear(
        self,
        x: torch.Tensor,
        weight: Weight,
        bias: torch.Tensor | None = None,
        activation: str = "silu",
        addend: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """gate_mul(linear(x)): the addend is added before the activation."""
        ...

    def linear_add(
        self, stream: torch.Tensor, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """linear(x), for the caller to add to the stream; None if it has been added in place."""
        ...

    def add_low_rank(self, out: torch.Tensor, x: torch.Tensor, low: SlotLowRank) -> None:
        """Add what adapters change in products of x to out [tokens, outputs], in place."""
        ...

    def adapted_linear(
        self,
        x: torch.Tensor | None,
        weight: Weight,
        bias: torch.Tensor | None,
        low: SlotLowRank,
        norm: tuple[torch.Tensor, float] | None = None,
        residual: torch.Tensor | None = None,
        activation: str = "",
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(`linear` with adapters, the stream). `norm`: (gain, eps) of the norm before it, as in `norm_linear`.
        `activation`: of the gate after it, as in `gated_linear`."""
        ...

    def norm_linear(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor | None,
        gain: torch.Tensor,
        eps: float,
        weight: Weight,
        bias: torch.Tensor | None = None,
        gated: bool = False,
        activation: str = "silu",
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(linear(rms_norm(stream)), stream).

        `gated`: weight is gate rows, then as many up rows, and the result goes through `gate_mul`. The stream may
        overwrite residual. A caller that also needs the normed input takes `norm_stream`, then `linear`.
        """
        ...

    def route(
        self,
        logits: torch.Tensor,
        top_k: int,
        renormalise: bool,
        counts: torch.Tensor | None = None,
        slots: torch.Tensor | None = None,
        rule: RouteRule | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(weights [tokens, top_k] float32, experts [tokens, top_k] int32): the experts each token is routed to.

        logits  [tokens, experts]; their softmax over all experts, in float32, gives the weights. The `top_k` largest
                logits are chosen, largest first, among equals the lower index first. Indices are in range for any
                logits, including NaN.
        renormalise: the chosen weights are divided by their sum
        counts  [experts] int64, in place: incremented by how often each expert was chosen; None: not counted
        slots   [tokens] int64: cache slots; a token with slot 0 is padding. Devices that pad steps route it to no
                expert (-1) and do not count it
        rule    another way to choose and weight; with shared experts the results have that many more columns, and
                with gated ones the logits too
        """
        ...

    def experts(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        gate_up: Weight,
        down: Weight,
        variant: ExpertVariant = PLAIN_EXPERTS,
    ) -> torch.Tensor:
        """The weighted sum over each token's experts: sum of weight * down_e(silu(gate_e(x)) * up_e(x)).

        x       [tokens, hidden]
        weights [tokens, top_k] float32, experts [tokens, top_k] int32: what `route` returned
        gate_up [experts, 2 * width, hidden]: an expert's gate rows, then its up rows
        down    [experts, hidden, width]
        variant another activation than silu, biases

        The result is [tokens, hidden], of x's dtype; the sum over experts is in float32. An index outside
        0 .. experts - 1 adds nothing (an expert on another rank).
        """
        ...

    def sparse_mlp(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor | None,
        gain: torch.Tensor,
        eps: float,
        router: torch.Tensor,
        gate_up: Weight,
        down: Weight,
        top_k: int,
        renormalise: bool,
        counts: torch.Tensor | None = None,
        slots: torch.Tensor | None = None,
        rule: RouteRule | None = None,
        variant: ExpertVariant = PLAIN_EXPERTS,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(`experts` of rms_norm(stream), routed by `route`, stream).

        router [experts, hidden]: linear(rms_norm(stream), router) are the logits. The stream may overwrite residual.
        Shared experts of the rule come after the routed ones in gate_up and down.
        """
        ...

    def prepare_qkv(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor | None,
        norms: tuple[torch.Tensor, torch.Tensor, float] | None,
        kv: LayerKV,
        slots: torch.Tensor,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
    ) -> torch.Tensor:
        """Norm and rotate Q and K, write K and V into the cache; returns Q as [tokens, heads, head_dim].

        qkv      [tokens, (heads + 2 * kv_heads) * head_dim]; may be overwritten
        positions[tokens] int64
        cos_sin  [max_position, rotary_dim] float32: cosines of the first half, then sines; None: no rotation.
                 Dimension i < rotary_dim / 2 is paired with i + rotary_dim / 2; those past rotary_dim are not rotated.
        norms    (q weight, k weight, eps): RMS norm over head_dim before the rotation; None: no norm
        kv       one layer's cache [blocks, 2, kv_heads, block_size, head_dim] (any stride between blocks); K and V
                 are rounded to qkv's dtype before they are quantized
        slots    [tokens] int64: block * block_size + offset
        """
        ...

    def prepare_latent(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        gain: torch.Tensor,
        eps: float,
        cache: torch.Tensor,
        slots: torch.Tensor,
        interleaved: bool,
    ) -> None:
        """Latent attention's cache entries: norm the latent part, rotate the rest, write both; rotate the queries.

        q        [tokens, heads, head_dim], any strides but the last: the last rotary_dim of each head are rotated in
                 place
        latent   [tokens, rank + rotary_dim], any stride between tokens: overwritten with what is stored
        cos_sin  [max_position, rotary_dim] float32, as in `prepare_qkv`
        gain     [rank]: RMS norm of the first `rank` values
        cache    one layer's cache [blocks, block_size, rank + rotary_dim], any stride between blocks
        interleaved: dimensions 2i and 2i + 1 are a pair, not i and i + rotary_dim / 2
        """
        ...

    def sigmoid_mul(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """x * sigmoid(gate), both [tokens, width]; may overwrite x."""
        ...

    def delta_net(self, projected: torch.Tensor, layer: DeltaNet, states: States, step: StepRows) -> torch.Tensor:
        """A gated delta net from its input products to its gated norm; reads and writes the rows' states.

        projected [tokens, q | k | v | z | b | a]; the result is [tokens, value_heads * value_dim]
        """
        ...

    def mamba2(self, projected: torch.Tensor, layer: Mamba2, states: States, step: StepRows) -> torch.Tensor:
        """A Mamba 2 mixer from its input products to before its gate and norm; reads and writes the rows' states.

        projected [tokens, z | x | B | C | dt]; the result is [tokens, heads * head_dim]
        """
        ...

    def short_conv(self, projected: torch.Tensor, layer: ShortConv, states: States, step: StepRows) -> torch.Tensor:
        """A convolution by itself, from its input products; reads and writes the rows' rings.

        projected [tokens, B | C | x], or [tokens, x | ...]; the result is [tokens, channels]
        """
        ...

    def mamba(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        projected: torch.Tensor,
        layer: Mamba,
        states: States,
        step: StepRows,
    ) -> torch.Tensor:
        """The selective scan of a Mamba 1 mixer, with its gate; reads and writes the rows' states.

        x, dt [tokens, channels]: the convolution's outputs, and time steps before their bias; b, c [tokens, state_dim];
        projected [tokens, x | z]: the input products; the result is [tokens, channels]
        """
        ...

    def gated_norm(
        self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, groups: int, eps: float
    ) -> torch.Tensor:
        """rms_norm(x * silu(gate)) * weight, the norm over each of `groups` equal parts of a row."""
        ...

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None] | None]:
        """Run a forward pass and record it: the returned function replays it over the same memory.

        None in its place if the pass cannot be recorded. Tensors that `run` reads and returns must keep their memory;
        each replay overwrites the result.
        """
        ...

    def layer_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """residual += x (in place); returns (layer_norm(residual), residual). Without one: (layer_norm(x), x)."""
        ...

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Rotate heads x [tokens, heads, dim] in place, pairs half a head apart; cos and sin [tokens, dim / 2]
        float32."""
        ...

    def attend_segments(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, scale: float
    ) -> torch.Tensor:
        """Attention of [tokens, heads, dim] in both directions within each run of a packed sequence;
        [tokens, heads * dim]."""
        ...

    def kernels_of(
        self, weight: Weight, normed: bool, gated: bool, bias: bool, max_rows: int
    ) -> Sequence[CompilableKernel]:
        """The kernels that `linear` (`normed`: `norm_linear`) launches for up to `max_rows` rows, each once."""
        ...

    def expert_kernels_of(
        self, gate_up: Weight, down: Weight, top_k: int, renormalise: bool, routed: int, max_tokens: int,
        variant: ExpertVariant = PLAIN_EXPERTS,
    ) -> dict[object, Callable[[], object]]:  # fmt: skip
        """Tasks that launch the kernels of these experts for up to `max_tokens` tokens, each once, by name.

        routed: number of experts the router chooses among, on all ranks
        """
        ...
