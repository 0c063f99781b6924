"""Which kernel a product with a weight in few bits runs: the one that `quire tune` measured fastest, or else a rule's.

A product is identified by the kind of its weight, its rows rounded up to a bucket, the weight's shape and the dtype.
An entry of the tables (`tuning_table.py`) is {"int4-g128-zero 8 6144x4096 bfloat16": {"kernel": "few", ..., "us": 9.0,
"rule_us": 9.4}}; "rule_us" is the time of the rule's configuration. An entry counts only while it is among the
candidates of its product: those of other versions are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import torch

from quire.kernels.triton.tuning_table import Entry, TuningTables, dtype_name

TIMES = ("us", "rule_us")
MARGIN = 0.98
"""A candidate must take at most this share of the time of the rule's: a smaller gain is noise."""


class ProductCase(NamedTuple):
    """A product to choose a kernel for."""

    key: str
    """In a table."""
    rule: Any
    """The configuration without an entry."""
    candidates: Sequence[Any]
    """All that may be measured and used."""


def key_of(kind: str, bucket: int, outputs: int, inputs: int, dtype: torch.dtype, gated: bool) -> str:
    """A product's key in a table."""
    return f"{'gated-' if gated else ''}{kind} {bucket} {outputs}x{inputs} {dtype_name(dtype)}"


def entry_of(config: Any) -> Entry:
    """A configuration as a table stores it: the fields that differ from the defaults."""
    values = {field.name: (getattr(config, field.name), field.default) for field in fields(config)}
    return {name: value for name, (value, default) in values.items() if value != default or name == "kernel"}


def config_of(case: ProductCase, tables: TuningTables) -> Any:
    """The configuration of a product."""
    entry = tables.get(case.key)
    if entry is None:
        return case.rule
    stored = {name: value for name, value in entry.items() if name not in TIMES}
    return next((config for config in case.candidates if entry_of(config) == stored), case.rule)


def tune(case: ProductCase, tables: TuningTables, time: Callable[[Any], float]) -> Entry | None:
    """Measure the candidates and record the fastest; None if not even the rule's can run. `time`: microseconds of a
    configuration, infinity if it cannot run."""
    rule_us = time(case.rule)
    best, us = case.rule, rule_us
    for config in case.candidates:
        if config != case.rule and (found := time(config)) < min(us, MARGIN * rule_us):
            best, us = config, found
    if us == float("inf"):
        return None
    entry = entry_of(best) | {"us": round(us, 2)}
    if rule_us != float("inf"):
        entry["rule_us"] = round(rule_us, 2)
    tables.record({case.key: entry})
    return entry


def describe(entry: Entry) -> str:
    """An entry's kernel in a few characters."""
    names = {"block_n": "n", "block_m": "m", "block_k": "k", "warps": "w", "stages": "s", "depth": "d"}
    words = [str(entry["kernel"])]
    for name, value in entry.items():
        if name in names:
            words.append(f"{names[name]}{value}")
        elif name not in (*TIMES, "kernel"):
            words.append(name if value is True else f"{name} {value}")
    return " ".join(words)
