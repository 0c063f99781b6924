"""Sends hidden states from one pipeline stage to the next.

Both sides know the number of tokens from the plan, so a message is just the tensor: one per step, in step order,
between the ranks with the same tensor-parallel rank.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import distributed

from quire.distributed.groups import Ranks


class Pipeline:
    """Receives from the previous stage and sends to the next."""

    def __init__(
        self, ranks: Ranks, hidden_size: int, max_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`max_tokens`: the most tokens of a step."""
        self.is_last = ranks.is_last_stage
        self._previous, self._next = ranks.rank - ranks.tp_size, ranks.rank + ranks.tp_size
        self._empty = torch.empty(0, hidden_size, dtype=dtype, device=device)
        self.received = None if ranks.is_first_stage else self._empty.new_zeros(max_tokens, hidden_size)
        """Hidden states from the previous stage; None in the first. Never reallocated: CUDA graphs hold its address."""
        self._is_staged = device.type != "cpu" and distributed.get_backend() == "gloo"
        """Messages go through host memory: gloo between ranks that share a GPU."""
        self._unsent_tokens = 0
        self._sent: deque[tuple[distributed.Work, torch.Tensor]] = deque()
        self._max_unsent = ranks.pp_size
        """Older steps have normally been collected."""

    def begin(self, tokens: int) -> None:
        """Begin a step of `tokens` tokens: waits for the previous stage. `send` must follow."""
        self._unsent_tokens = 0 if self.is_last else tokens
        if self.received is None:
            return
        part = self.received[:tokens]
        if self._is_staged:
            host = torch.empty(part.shape, dtype=part.dtype)
            distributed.recv(host, self._previous)
            part.copy_(host)
        else:
            distributed.recv(part, self._previous)

    def send(self, hidden: torch.Tensor) -> None:
        """Send this stage's output. Does not wait for the next stage, which may be busy."""
        self._unsent_tokens = 0
        # A copy: the next step overwrites the tensor while this message is still being sent.
        message = hidden.cpu() if self._is_staged else hidden.clone()
        work = distributed.isend(message, self._next)
        assert work is not None
        self._sent.append((work, message))
        while self._sent and (self._sent[0][0].is_completed() or len(self._sent) > self._max_unsent):
            self._sent.popleft()[0].wait()  # with gloo, only a wait completes a send

    def send_placeholder(self) -> None:
        """After a failed step: send zeros to the next stage, whose result for this step is discarded.

        One message per step, whatever happens, keeps the stages in sync.
        """
        if self._unsent_tokens:
            self.send(self._empty.new_zeros(self._unsent_tokens, self._empty.shape[1]))
