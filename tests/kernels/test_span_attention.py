"""Attention in which the tokens of an image see each other both ways, against transformers' masks in float64."""

from __future__ import annotations

import pytest
import torch
from transformers.masking_utils import and_masks, blockwise_overlay, causal_mask_function, or_masks
from transformers.masking_utils import sliding_window_overlay as window_overlay

from tests.kernels.triton_target import DEVICE, ON_GPU

from quire.layers.attention.base import AttentionInputs, AttentionSpec  # isort: skip
from quire.layers.attention.cpu import CpuPagedAttention  # isort: skip
from quire.layers.attention.torch_paged import TorchPagedAttention  # isort: skip
from quire.layers.attention.triton import TritonPagedAttention  # isort: skip
from tests.kernels.test_cpu_attention import Step  # isort: skip

# (queries, context): a decode, a prompt, a chunk, a chunk without an image.
ROWS = [(1, 40), (70, 70), (61, 90), (20, 33)]
SPANS = [(1, 3, 50), (1, 55, 70), (2, 29, 88)]
"""(row, first position, position after the last); one begins a chunk, two end one."""


def expected(step: Step, window: int | None, cap: float | None) -> torch.Tensor:
    out = torch.empty(step.q.shape, dtype=torch.float64)
    heads = step.q.shape[1]
    for row, (keys, values) in enumerate(zip(step.keys, step.values, strict=True)):
        first, last = step.inputs.query_starts[row : row + 2].tolist()
        groups = torch.full((1, len(keys)), -1)
        for number, (_, start, stop) in enumerate(span for span in SPANS if span[0] == row):
            groups[0, start:stop] = number
        rule = or_masks(causal_mask_function, blockwise_overlay(groups))
        if window is not None:
            rule = and_masks(rule, window_overlay(window))
        q_index = torch.arange(len(keys) - (last - first), len(keys))[:, None]
        mask = rule(0, 0, q_index, torch.arange(len(keys))[None, :])
        group = heads // keys.shape[1]
        k, v = (x.double().repeat_interleave(group, dim=1).transpose(0, 1) for x in (keys, values))
        scores = step.q[first:last].double().transpose(0, 1) @ k.transpose(1, 2) * step.scale
        scores = scores if cap is None else cap * torch.tanh(scores / cap)
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        out[first:last] = (weights @ v).transpose(0, 1)
    return out.flatten(1)


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("backend", ["torch", "cpu", "triton"])
def test_tokens_of_a_span_see_each_other(backend: str, window: int | None) -> None:
    torch.manual_seed(0)
    dtype = torch.float16 if backend == "triton" and ON_GPU else torch.float32
    step = Step(ROWS, heads=4, kv_heads=2, dim=32, dtype=dtype)
    wanted = expected(step, window, 30.0)
    step.inputs.visible = SPANS
    spec = AttentionSpec(step.scale, window, 30.0)
    kind = {"torch": TorchPagedAttention, "cpu": CpuPagedAttention, "triton": TritonPagedAttention}[backend]
    attention, inputs, q, kv = kind(), step.inputs, step.q, step.kv
    if backend == "cpu" and not attention.is_native:
        pytest.skip("no C++ compiler on this machine")
    if backend == "torch":
        kv = kv.nan_to_num()
        inputs.block_tables = inputs.block_tables.masked_fill(inputs.block_tables == 1 << 30, 0)
    if backend == "triton":
        q, kv = q.to(DEVICE), kv.to(DEVICE)
        inputs = on_device(inputs)
    attention.prepare(4, kv, inputs, spec)
    tolerance = 2e-3 if dtype == torch.float16 else 2e-5
    torch.testing.assert_close(attention.attend(q, kv, inputs, spec).cpu().double(), wanted, atol=tolerance, rtol=1e-4)
    causal = AttentionSpec(step.scale, window, 30.0, sees_spans=False)
    plain = attention.attend(q, kv, inputs, causal).cpu().double()
    inputs.visible, inputs.ahead = (), None
    torch.testing.assert_close(plain, attention.attend(q, kv, inputs, spec).cpu().double(), atol=0, rtol=0)
    assert not torch.allclose(plain, wanted, atol=1e-2)


def on_device(inputs: AttentionInputs) -> AttentionInputs:
    for name in ("query_starts", "context_lens", "block_tables"):
        setattr(inputs, name, getattr(inputs, name).to(DEVICE))
    return inputs
