"""Policies by name."""

from __future__ import annotations

from quire.registry import resolve
from quire.scheduler.policies.base import Policy

POLICIES = {
    "fcfs": "quire.scheduler.policies.fcfs.FirstComeFirstServed",
    "priority": "quire.scheduler.policies.priority.PriorityWithAgeing",
}


def make_policy(name: str) -> Policy:
    """A policy by its name or its dotted path."""
    policy: Policy = resolve("scheduling policy", name, POLICIES)()
    return policy
