"""AWQ: the search for scales, and that moving them between layers changes no result."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quire.quantization.awq import awq_candidates, output_error, search_scales, smooth_candidates
from quire.quantization.rounding import restore_groups, round_groups
from quire.quantization.writer import find_scheme
from quire.worker.calibration import Scaling


def restore(weight: torch.Tensor) -> torch.Tensor:
    return restore_groups(round_groups(weight, 4, 32), 4, 32)


def large_inputs(columns: int = 64) -> torch.Tensor:
    """Inputs of which a few are much larger than the others."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.ones(columns)
    sizes[::16] = 30.0
    return torch.randn(256, columns, generator=generator) * sizes


def test_large_inputs_get_finer_weights():
    x = large_inputs()
    hessian = x.T @ x / len(x)
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(1))

    def error_of(scales: torch.Tensor | None) -> torch.Tensor:
        scales = torch.ones(64) if scales is None else scales
        return restore(weight * scales) / scales - weight

    rms = hessian.diagonal().sqrt()
    scales = search_scales(awq_candidates(rms), lambda scales: output_error(error_of(scales), hessian))
    assert scales is not None
    assert scales[::16].min() > scales[1::16].max()
    plain, scaled = error_of(None), error_of(scales)
    assert output_error(scaled, hessian) < 0.7 * output_error(plain, hessian)
    # The same by the outputs themselves.
    assert (x @ scaled.T).square().mean() < 0.7 * (x @ plain.T).square().mean()


def test_large_inputs_are_made_even():
    x = large_inputs()
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(2))
    scheme = find_scheme("W8A8")

    def error(scales: torch.Tensor | None) -> float:
        scales = torch.ones(64) if scales is None else scales
        held = scheme.restore(scheme.round(weight * scales, torch.float32))
        return float((scheme.restore_input(x / scales) @ held.T - x @ weight.T).square().mean())

    scales = search_scales(smooth_candidates(x.abs().amax(0), weight.abs().amax(0)), error)
    assert scales is not None and error(scales) < 0.2 * error(None)


def test_no_scales_if_none_are_better():
    assert search_scales(awq_candidates(torch.rand(8)), lambda scales: 1.0) is None
    assert all(scales.isfinite().all() for scales in awq_candidates(torch.zeros(8)))


def test_scales_moved_into_a_norm_change_nothing():
    generator = torch.Generator().manual_seed(3)
    x, gain, weight = (torch.randn(*shape, generator=generator) for shape in ((5, 16), (16,), (8, 16)))
    gain[3] = 0.0
    before = F.linear(F.rms_norm(x, (16,)) * gain, weight)
    scales = torch.rand(16, generator=generator) + 0.2
    applied = Scaling(weight, gain=gain).apply(scales, torch.bfloat16)
    torch.testing.assert_close(F.linear(F.rms_norm(x, (16,)) * gain, weight), before)
    # Scales are those of gains that are stored exactly.
    assert torch.equal(gain, gain.bfloat16().float())
    torch.testing.assert_close(applied[gain != 0], scales[gain != 0], rtol=0.01, atol=0)


def test_scales_moved_into_an_mlp_change_nothing():
    generator = torch.Generator().manual_seed(4)
    x, gate, up, down = (torch.randn(*s, generator=generator) for s in ((5, 8), (16, 8), (16, 8), (8, 16)))
    bias = torch.randn(16, generator=generator)

    def mlp() -> torch.Tensor:
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up, bias), down)

    before = mlp()
    Scaling(down, rows=up, bias=bias).apply(torch.rand(16, generator=generator) + 0.2, torch.bfloat16)
    torch.testing.assert_close(mlp(), before)


def test_query_heads_that_share_a_value_head_share_scales():
    generator = torch.Generator().manual_seed(5)
    kv_heads, repeats, dim = 2, 3, 4
    values, out = torch.randn(kv_heads * dim, 8, generator=generator), torch.randn(8, 24, generator=generator)
    x = torch.randn(5, 8, generator=generator)

    def attended() -> torch.Tensor:
        """As if every query attended to its own position."""
        heads = F.linear(x, values).unflatten(-1, (kv_heads, 1, dim)).expand(-1, -1, repeats, -1)
        return F.linear(heads.flatten(1), out)

    before = attended()
    scaling = Scaling(out, rows=values, head_dim=dim, repeats=repeats)
    scales = scaling.tie(torch.rand(24, generator=generator) + 0.2)
    assert len(scales.unique()) == kv_heads * dim
    scaling.apply(scales, torch.bfloat16)
    torch.testing.assert_close(attended(), before)
