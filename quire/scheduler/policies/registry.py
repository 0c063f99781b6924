"""Policies by name."""

from __future__ import annotations

from quire.config import EngineConfig
from quire.registry import resolve
from quire.scheduler.policies.base import Policy
from quire.scheduler.policies.sharing import Shares, SharingPolicy

POLICIES = {
    "fair": "quire.scheduler.policies.fair.FairShare",
    "fcfs": "quire.scheduler.policies.fcfs.FirstComeFirstServed",
    "priority": "quire.scheduler.policies.priority.PriorityWithAgeing",
}


def make_policy(name: str, config: EngineConfig | None = None) -> Policy:
    """A policy by its name or its dotted path. One that shares between tenants gets the configured shares."""
    kind = resolve("scheduling policy", name, POLICIES)
    takes_shares = isinstance(kind, type) and issubclass(kind, SharingPolicy)
    policy: Policy = kind(Shares.of(config)) if takes_shares and config is not None else kind()
    return policy
