"""Hidden states on their way from one pipeline stage to the next.

Both sides know from the plan how many tokens a step has, so nothing but the tensor travels: one message a step, in
the order of the steps, between ranks that have the same part of their stage.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import distributed

from quire.distributed.groups import Ranks


class Pipeline:
    """This stage's end of the way in and of the way out."""

    def __init__(
        self, ranks: Ranks, hidden_size: int, most_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`most_tokens`: the most a step has."""
        self.is_last = ranks.is_last_stage
        self._before, self._after = ranks.rank - ranks.tp_size, ranks.rank + ranks.tp_size
        self._empty = torch.empty(0, hidden_size, dtype=dtype, device=device)
        self.given = None if ranks.is_first_stage else self._empty.new_zeros(most_tokens, hidden_size)
        """What the stage before has made of the step's tokens. It stays where it is: graphs know its address."""
        self._is_staged = device.type != "cpu" and distributed.get_backend() == "gloo"
        """Messages go through host memory: between ranks that share a GPU."""
        self._owed = 0
        self._sent: deque[tuple[distributed.Work, torch.Tensor]] = deque()
        self._most_sent = ranks.pp_size
        """Of steps before that, all are collected, as a rule."""

    def begin(self, tokens: int) -> None:
        """A step of so many tokens: wait until the stage before has done its part. `send` must follow."""
        self._owed = 0 if self.is_last else tokens
        if self.given is None:
            return
        part = self.given[:tokens]
        if self._is_staged:
            host = torch.empty(part.shape, dtype=part.dtype)
            distributed.recv(host, self._before)
            part.copy_(host)
        else:
            distributed.recv(part, self._before)

    def send(self, hidden: torch.Tensor) -> None:
        """Hand on what this stage has made of the step. Does not wait for the next one, which may be busy."""
        self._owed = 0
        # A copy: the next step writes over the tensor while this one is still on its way.
        message = hidden.cpu() if self._is_staged else hidden.clone()
        work = distributed.isend(message, self._after)
        assert work is not None
        self._sent.append((work, message))
        while self._sent and (self._sent[0][0].is_completed() or len(self._sent) > self._most_sent):
            self._sent.popleft()[0].wait()  # gloo tells nobody else that a message has gone

    def make_up(self) -> None:
        """The step has failed: whoever waits for its hidden states gets some, and nobody reads what comes of them.

        So there is one message for every step, whatever happens, and the stages stay together.
        """
        if self._owed:
            self.send(self._empty.new_zeros(self._owed, self._empty.shape[1]))
