"""Prompts over an 8-bit cache whose blocks are converted to 16 bits first: the same attention."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.test_kv_formats import Rows, limit, values_of
from tests.kernels.triton_target import DEVICE, HALF

from quire.kernels.triton import kv_widen  # isort: skip
from quire.layers.attention import triton as backend  # isort: skip
from quire.layers.attention.base import AttentionSpec  # isort: skip

LENS = [(40, 1), (7, 1), (70, 70), (50, 20), (16, 16)]


def unit_rows(dtype: torch.dtype) -> Rows:
    rows = Rows("fp8", dtype, LENS, 4, 2, 32)
    rows.kv = replace(rows.kv.scaled(torch.ones(2, 2, device=DEVICE), unit=True))
    rows.kv.codes.copy_((torch.randn(rows.kv.codes.shape, device=DEVICE)).to(torch.float8_e4m3fn).view(torch.uint8))
    return rows


def test_blocks_are_the_values_their_codes_stand_for() -> None:
    rows = unit_rows(HALF)
    inputs = rows.inputs()
    plan = kv_widen.plan_wide(rows.kv, rows.tables, inputs.rows, 2, len(LENS), 70)
    assert plan is not None
    wide = kv_widen.widen(rows.kv, rows.tables, inputs.rows, inputs.context_lens, len(LENS), plan)
    values = values_of(rows.kv)
    for line, (context, _) in list(zip(rows.lines, LENS, strict=True))[2:]:
        for place in range(-(-context // 16)):
            assert torch.equal(wide[plan.tables[line, place]].double(), values[rows.tables[line, place]])


@pytest.mark.parametrize("window", [None, 24])
def test_attention_is_exact(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    monkeypatch.setattr(backend, "MIN_QUERIES", 20)
    calls = []
    monkeypatch.setattr(backend, "widen", lambda *args: calls.append(1) or kv_widen.widen(*args))
    rows = unit_rows(HALF)
    inputs, attention = rows.inputs(), backend.TritonPagedAttention()
    attention.prepare(4, rows.kv, inputs, AttentionSpec(0.2, window))
    found = attention.attend(rows.q, rows.kv, inputs, AttentionSpec(0.2, window))
    # Rows with a window see few of their blocks.
    assert bool(calls) == (window is None)
    assert rows.error(found, 0.2, window) < limit(HALF)


def test_too_many_blocks_are_read_as_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = unit_rows(HALF)
    monkeypatch.setattr(kv_widen, "MAX_BYTES", 3 * 5 * 2 * 2 * 16 * 32 * 2 - 1)
    assert kv_widen.plan_wide(rows.kv, rows.tables, rows.inputs().rows, 2, len(LENS), 70) is None


def test_scales_and_batch_invariance_exclude_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "MIN_QUERIES", 20)
    scaled, rows = Rows("fp8", HALF, LENS, 4, 2, 32), unit_rows(HALF)
    for attention, each in ((backend.TritonPagedAttention(), scaled), (backend.TritonPagedAttention(True), rows)):
        inputs = each.inputs()
        attention.prepare(4, each.kv, inputs, AttentionSpec(0.2))
        assert not any(key[0] == "wide" and plan for key, plan in inputs.plans.items())
