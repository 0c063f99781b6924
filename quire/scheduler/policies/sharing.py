"""What a policy may do beyond ordering requests: track what runs, and share it between tenants."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quire.config import EngineConfig
from quire.messages.request import NewRequest, Request
from quire.scheduler.policies.base import Policy

if TYPE_CHECKING:
    from quire.scheduler.request_table import RequestTable

OTHERS = "*"
"""In a table by tenant: every tenant that is not named."""
UNCAPPED = 1 << 62


@dataclass(frozen=True)
class Shares:
    """Weights and caps of tenants, by name; OTHERS stands for the rest."""

    weights: Mapping[str, float] = field(default_factory=dict)
    max_rows: Mapping[str, float] = field(default_factory=dict)
    """A number of rows, or if below 1 a share of all rows."""
    max_blocks: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, config: EngineConfig) -> Shares:
        """The weights and caps of the configuration."""
        return cls(config.tenant_weights or {}, config.tenant_max_rows or {}, config.tenant_max_blocks or {})

    def weight(self, tenant: str) -> float:
        """The tenant's share relative to a tenant of weight 1."""
        return float(self.weights.get(tenant, self.weights.get(OTHERS, 1.0)))

    def row_cap(self, tenant: str, rows: int) -> int:
        """Most rows the tenant may have, of `rows`."""
        return _cap(self.max_rows, tenant, rows)

    def block_cap(self, tenant: str, blocks: int) -> int:
        """Most blocks the tenant's rows may hold, of `blocks`."""
        return _cap(self.max_blocks, tenant, blocks)


def _cap(caps: Mapping[str, float], tenant: str, whole: int) -> int:
    cap = caps.get(tenant, caps.get(OTHERS))
    if cap is None:
        return UNCAPPED
    return max(1, int(cap * whole)) if cap < 1 else int(cap)


class SharingPolicy(ABC):
    """A policy that is notified of rows and computed tokens, and that decides which requests may grow.

    The scheduler calls these methods on any policy of this kind, and on `NoSharing` in place of the others.
    """

    interleaves = True
    """Waiting requests compete with partly computed prompts for a step's tokens, in `order`."""

    def __init__(self, shares: Shares | None = None) -> None:
        self.shares = shares or Shares()

    @abstractmethod
    def attach(self, requests: RequestTable) -> None:
        """The requests to share between; called once, before anything else."""

    # Notifications

    @abstractmethod
    def took_row(self, request: Request) -> None:
        """The request has a row: it was admitted, or forked from another."""

    @abstractmethod
    def left_row(self, request: Request) -> None:
        """The request is about to lose its row."""

    @abstractmethod
    def charge(self, request: Request, tokens: int) -> None:
        """The next step computes `tokens` known tokens of the request."""

    @abstractmethod
    def charge_decodes(self, rows: NDArray[np.int64]) -> None:
        """The next step computes one token of each row."""

    # Decisions

    @abstractmethod
    def accept(self, source: NewRequest) -> None:
        """Raise if the request could never run."""

    @abstractmethod
    def allows(self, request: Request) -> bool:
        """Whether the request may have a row in addition to those its tenant has."""

    @abstractmethod
    def order(self, request: Request) -> Any:
        """A sort key: of waiting requests and partly computed prompts, the lowest gets the step's tokens first."""

    @abstractmethod
    def is_owed(self, request: Request, decodes: NDArray[np.int64]) -> bool:
        """Whether the request's prompt need not be split into small chunks for the sake of these rows."""

    @abstractmethod
    def victim_for(self, request: Request, blocks: int = 0) -> Request | None:
        """The request to preempt for a waiting one that lacks a row or, if given, `blocks` blocks. None: the request
        waits."""

    @abstractmethod
    def exceeding(self, growing: Iterable[Request]) -> Iterator[Request]:
        """Requests that must be preempted before each of `growing` may have one more block."""

    @abstractmethod
    def check_idle(self) -> None:
        """Raise if a request still counts as waiting or running."""


class NoSharing(SharingPolicy):
    """The policy does not share: all requests are equal, and only its rank orders them."""

    interleaves = False

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self._policy = policy

    def attach(self, requests: RequestTable) -> None: ...

    def took_row(self, request: Request) -> None: ...

    def left_row(self, request: Request) -> None: ...

    def charge(self, request: Request, tokens: int) -> None: ...

    def charge_decodes(self, rows: NDArray[np.int64]) -> None: ...

    def accept(self, source: NewRequest) -> None: ...

    def allows(self, request: Request) -> bool:
        return True

    def order(self, request: Request) -> Any:
        return self._policy.rank(request)

    def is_owed(self, request: Request, decodes: NDArray[np.int64]) -> bool:
        return False

    def victim_for(self, request: Request, blocks: int = 0) -> Request | None:
        return None

    def exceeding(self, growing: Iterable[Request]) -> Iterator[Request]:
        return iter(())

    def check_idle(self) -> None: ...
