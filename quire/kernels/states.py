"""Recurrent layers as kernels see them: the weights of a layer's recurrence, its states, and the rows of a step.

A recurrent layer keeps two things for each row. The *state* of its recurrence: a matrix [key_dim, value_dim] float32
for each head, one piece each (sums over keys are then mostly within a thread). The last inputs of its causal
convolution, in a *ring*: the input of position p is in slot p % slots, in pieces of some channels [slots, channels of a
piece]. It has as many slots as the convolution has taps, so what a decode writes never overlaps what it reads: programs
that share channels need not wait for each other.

Rows that verify drafts leave states and rings as they are: which of their tokens count is known only after the step.
`StateReplay` then brings the states up to date from small values that the step has kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

STATE, RING = 0, 1
"""Indices of a layer's parts. A layer that keeps only a ring has it as part 0."""


class PartLike(Protocol):
    """A `StatePart`."""

    @property
    def count(self) -> int: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...


class States(Protocol):
    """A `StateView`: the states of a layer, in pages."""

    @property
    def memory(self) -> torch.Tensor: ...

    @property
    def parts(self) -> tuple[Any, ...]: ...

    @property
    def pages(self) -> tuple[torch.Tensor, ...]: ...

    @property
    def offsets(self) -> tuple[torch.Tensor, ...]: ...

    def read(self, part: int, tables: torch.Tensor) -> torch.Tensor: ...

    def write(self, part: int, tables: torch.Tensor, values: torch.Tensor) -> None: ...


class StateReplay:
    """Brings states up to date after a step that verifies drafts.

    A recurrent layer updates the states of such rows token by token, as plain decodes do, to get its outputs, and does
    not store them. It keeps what the update of each token needs, a few vectors, and adds here how to repeat it. The
    runner makes one for each such step and commits it once after the draws, in the same graph; the step's tables,
    query_starts and context_lens must still be the same.
    """

    def __init__(self) -> None:
        self._commits: list[Callable[[torch.Tensor], None]] = []

    def add(self, commit: Callable[[torch.Tensor], None]) -> None:
        """`commit` updates the states of a layer by the first accepted [num_verifying] tokens of each row."""
        self._commits.append(commit)

    def copy(self) -> StateReplay:
        """The same once more, for a forward pass that is captured once and run again."""
        made = StateReplay()
        made._commits = list(self._commits)
        return made

    def commit(self, accepted: torch.Tensor) -> None:
        """Store the states after the first `accepted` tokens of each row that verifies drafts, and free what was kept.

        accepted [num_verifying] int32, on the device, at most the row's tokens; 0: the row's state stays as it is.
        """
        commits, self._commits = self._commits, []
        for commit in commits:
            commit(accepted)


class StepRows(Protocol):
    """`AttentionInputs` of the group that the layer's states belong to.

    A row with tokens in the step but a context of 0 is padding: it has no state, and its outputs are zeros.
    """

    query_starts: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    rows: torch.Tensor | None
    num_rows: int
    num_tokens: int
    num_decodes: int
    num_verifying: int
    width: int
    num_verified: int
    max_query_len: int
    replay: StateReplay | None
    plans: dict[Any, Any]

    def own_tables(self, width: int) -> torch.Tensor: ...


@dataclass(frozen=True)
class DeltaNet:
    """A gated delta net (arXiv 2412.06464). For each value head, over a row's tokens:

    q, k, v = silu(convolution); q and k l2-normalized, q / sqrt(key_dim); g = decay * softplus(a + dt_bias);
    S <- e^g S; S <- S + sigmoid(b) (v - S k) k^T; out = rms_norm(S q) * silu(z).

    The layer's input is one matrix [tokens, q | k | v | z | b | a]. Value head h has key head h // repeat.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: torch.Tensor
    """[taps, channels of q, k and v]: the last tap is of the token itself."""
    decay: torch.Tensor
    """[value_heads] float32: -exp(A_log)."""
    dt_bias: torch.Tensor
    """[value_heads] float32."""
    norm: torch.Tensor
    """[value_dim]"""
    eps: float

    @property
    def channels(self) -> int:
        """Of the convolution."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def first_channel(self) -> int:
        """Where the convolution's inputs begin in the layer's input."""
        return 0

    bias = None

    @property
    def width(self) -> int:
        """Of the outputs."""
        return self.value_heads * self.value_dim

    @property
    def in_width(self) -> int:
        """Of the inputs."""
        return self.channels + self.width + 2 * self.value_heads

    @property
    def sizes(self) -> tuple[int, ...]:
        """Heads and dimensions."""
        return self.key_heads, self.value_heads, self.key_dim, self.value_dim


@dataclass(frozen=True)
class Mamba2:
    """A Mamba 2 mixer (arXiv 2405.21060). For each head, over a row's tokens:

    x, B, C = silu(convolution); dt = clamp(softplus(dt + dt_bias)); S <- e^(decay dt) S + dt x B^T; out = S C + skip x.

    The layer's input is one matrix [tokens, z | x | B | C | dt]; z is the gate of the norm that follows. Head h has
    the B and C of group h // (heads / groups).
    """

    heads: int
    groups: int
    head_dim: int
    state_dim: int
    conv: torch.Tensor
    """[taps, channels of x, B and C]"""
    bias: torch.Tensor | None
    """[channels]"""
    decay: torch.Tensor
    """[heads] float32: -exp(A_log)."""
    dt_bias: torch.Tensor
    """[heads] float32."""
    skip: torch.Tensor
    """[heads] float32: D."""
    dt_limit: tuple[float, float]

    @property
    def channels(self) -> int:
        """Of the convolution."""
        return self.width + 2 * self.groups * self.state_dim

    @property
    def first_channel(self) -> int:
        """Where the convolution's inputs begin in the layer's input."""
        return self.width

    @property
    def width(self) -> int:
        """Of the outputs."""
        return self.heads * self.head_dim

    @property
    def in_width(self) -> int:
        """Of the inputs."""
        return self.channels + self.width + self.heads

    @property
    def sizes(self) -> tuple[int, ...]:
        """Heads and dimensions."""
        return self.heads, self.groups, self.head_dim, self.state_dim


@dataclass(frozen=True)
class ShortConv:
    """A convolution by itself, over a row's tokens.

    Gated (LFM2): out = C * convolution(B * x) of one matrix [tokens, B | C | x]; the ring is of B * x. If not (Mamba):
    out = silu(convolution(x)) of the first channels of a matrix; the ring is of x.
    """

    conv: torch.Tensor
    """[taps, channels]"""
    bias: torch.Tensor | None
    """[channels]"""
    gated: bool = True
    part: int = 0
    """Index of the ring among the layer's parts."""

    @property
    def channels(self) -> int:
        """Of the convolution."""
        return self.conv.shape[1]

    @property
    def in_width(self) -> int:
        """Of the inputs."""
        return 3 * self.channels

    @property
    def sizes(self) -> tuple[int, ...]:
        """Channels."""
        return (self.channels,)


@dataclass(frozen=True)
class Mamba:
    """The selective scan of a Mamba 1 mixer (arXiv 2312.00752). For each channel, over a row's tokens:

    t = softplus(dt + dt_bias); S <- e^(decay t) S + t x B; out = (S · C + skip x) silu(z).

    S, B, C and the channel's decay are vectors of state_dim; B and C are those of all channels. A piece of the state is
    [state_dim, channels of a piece].
    """

    decay: torch.Tensor
    """[state_dim, channels] float32: -exp(A_log)."""
    dt_bias: torch.Tensor
    """[channels] float32"""
    skip: torch.Tensor
    """[channels] float32: D."""

    @property
    def channels(self) -> int:
        """Of the convolution and of the outputs."""
        return self.decay.shape[1]

    @property
    def in_width(self) -> int:
        """Of the inputs: x | z."""
        return 2 * self.channels

    @property
    def sizes(self) -> tuple[int, ...]:
        """State dimensions and channels."""
        return tuple(self.decay.shape)
