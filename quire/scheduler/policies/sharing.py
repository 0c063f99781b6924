"""What a policy may do beyond naming who is next: watch what runs, and share it out between tenants."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quire.config import EngineConfig
from quire.messages.request import NewRequest, Request

if TYPE_CHECKING:
    from quire.scheduler.request_table import RequestTable

OTHERS = "*"
"""In a table by tenant: whoever is not named."""
UNCAPPED = 1 << 62


@dataclass(frozen=True)
class Shares:
    """What tenants are worth and what they may hold, by name; OTHERS stands for the rest."""

    weights: Mapping[str, float] = field(default_factory=dict)
    max_rows: Mapping[str, float] = field(default_factory=dict)
    """A count, or if below 1 a share of all rows."""
    max_blocks: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, config: EngineConfig) -> Shares:
        """What the configuration says."""
        return cls(config.tenant_weights or {}, config.tenant_max_rows or {}, config.tenant_max_blocks or {})

    def weight(self, tenant: str) -> float:
        """How many times as much as a tenant of weight 1 it gets."""
        return float(self.weights.get(tenant, self.weights.get(OTHERS, 1.0)))

    def row_cap(self, tenant: str, rows: int) -> int:
        """Rows it may have, of so many."""
        return _cap(self.max_rows, tenant, rows)

    def block_cap(self, tenant: str, blocks: int) -> int:
        """Blocks its rows may hold, of so many."""
        return _cap(self.max_blocks, tenant, blocks)


def _cap(caps: Mapping[str, float], tenant: str, whole: int) -> int:
    cap = caps.get(tenant, caps.get(OTHERS))
    if cap is None:
        return UNCAPPED
    return max(1, int(cap * whole)) if cap < 1 else int(cap)


class SharingPolicy(ABC):
    """A policy that is told who has a row and what is computed for whom, and that is asked who may grow.

    The scheduler calls these only if the policy is one of this kind; others cost nothing.
    """

    def __init__(self, shares: Shares | None = None) -> None:
        self.shares = shares or Shares()

    @abstractmethod
    def attach(self, ledger: RequestTable) -> None:
        """This is the ledger whose requests it is for; called once, before anything else."""

    # What it is told

    @abstractmethod
    def took_row(self, request: Request) -> None:
        """The request has a row: admitted, forked, or branched off."""

    @abstractmethod
    def left_row(self, request: Request) -> None:
        """The request is about to lose its row."""

    @abstractmethod
    def charge(self, request: Request, tokens: int) -> None:
        """So many of the request's known tokens are computed in the next step."""

    @abstractmethod
    def charge_decodes(self, rows: NDArray[np.int64]) -> None:
        """One token of each row is computed in the next step."""

    # What it is asked

    @abstractmethod
    def accept(self, source: NewRequest) -> None:
        """Raise if the request could never run."""

    @abstractmethod
    def allows(self, request: Request) -> bool:
        """Whether the request may have a row beside those its tenant has."""

    @abstractmethod
    def turn(self, request: Request) -> Any:
        """A sort key: of those that wait and those whose prompt is under way, lower gets the step's tokens first."""

    @abstractmethod
    def is_owed(self, request: Request, decodes: NDArray[np.int64]) -> bool:
        """Whether these rows have no claim that the request's prompt be cut small for them."""

    @abstractmethod
    def makes_way(self, request: Request, blocks: int = 0) -> Request | None:
        """Who is to be preempted for a waiting request that lacks a row, or where given blocks: it needs so many in
        all. None: the request waits."""

    @abstractmethod
    def exceeding(self, growing: Sequence[Request]) -> Iterator[Request]:
        """Rows that must be preempted before each of `growing` may have one more block."""

    @abstractmethod
    def check_idle(self) -> None:
        """Raise if it believes that anyone waits or has a row."""
