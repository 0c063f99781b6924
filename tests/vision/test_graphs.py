"""Encoders in graphs: calls of any images in fixed memory give what they give without. There is no GPU here: what would
be captured runs at every replay, from the same buffers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.kernels.segments import WINDOWS, SegmentBuffers, Segments, tile_list
from quire.vision import qwen_vit
from quire.vision.qwen_vit import EncoderGraphs
from tests.vision import test_qwen
from tests.vision.harness import Pair, pair, picture

CALLS = [[(64, 64)], [(16, 16), (40, 30)], [(8, 56), (56, 8), (16, 24)]]


class Eagerly:
    """A pool whose graphs run what would be captured, in memory full of NaN."""

    def __init__(self) -> None:
        self.replays = 0

    def capture(self, run: Callable[[], torch.Tensor], warm_up: bool = False) -> Any:
        def replay() -> torch.Tensor:
            self.replays += 1
            return run()

        assert run().isfinite().any()
        return type("Graph", (), {"replay": staticmethod(replay)})


def check(made: Pair, monkeypatch: pytest.MonkeyPatch, calls: list[list[tuple[int, int]]], sizes: list[int]) -> int:
    """Compare all calls; returns how many ran in graphs."""
    monkeypatch.setattr(qwen_vit, "GRAPH_PATCHES", tuple(sizes))
    given = [
        made.processor.prepare([test_qwen.IMAGE] * len(call), [picture(*size, seed=i) for i, size in enumerate(call)])
        for call in calls
    ]
    made.encoder.graphs = None
    alone = [made.encoder.encode(prepared.items) for prepared in given]
    pool = Eagerly()
    monkeypatch.setattr(made.encoder, "graphs", EncoderGraphs(made.encoder, pool))
    for expected, prepared in zip([*alone, alone[0]], [*given, given[0]], strict=True):
        for found, own in zip(made.encoder.encode(prepared.items), expected, strict=True):
            torch.testing.assert_close(found, own, atol=2e-5, rtol=2e-5)
    return pool.replays


@pytest.mark.parametrize("name", ["qwen2.5-vl", "qwen3-vl"])
def test_graphs_change_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = pair(test_qwen.FAMILIES[name], tmp_path)
    assert check(made, monkeypatch, CALLS, [128, 256]) == len(CALLS) + 1
    # The largest call is launched kernel by kernel.
    assert 0 < check(made, monkeypatch, CALLS, [16, 60, 200]) < len(CALLS) + 1


def test_buffers_become_other_segments() -> None:
    cpu = torch.device("cpu")
    buffers = SegmentBuffers(WINDOWS, 6, 100, 32, cpu)
    starts, tiles = buffers.starts, buffers.tiles(16)
    addresses = starts.data_ptr(), tiles.data_ptr()
    for lengths in ([32, 7, 1], [4, 4, 4, 4, 4, 4], [20], [32, 32, 32, 4]):
        own = Segments(lengths, cpu, windows=True)
        assert buffers.fits(own)
        buffers.fill(own)
        assert (buffers.starts.data_ptr(), buffers.tiles(16).data_ptr()) == addresses
        assert starts.tolist() == [*np.cumsum([0, *lengths]), *[sum(lengths)] * (6 - len(lengths))]
        expected = tile_list(np.array(lengths), 16)
        assert (tiles[: len(expected)].numpy() == expected).all() and not tiles[len(expected) :].any()
        covered = torch.cat([index for index, _, _ in buffers.groups if index is not None])
        assert sorted(covered.tolist()) == list(range(sum(lengths)))
    assert not buffers.fits(Segments([33], cpu)) and not buffers.fits(Segments([1] * 7, cpu))
    assert not buffers.fits(Segments([32, 32, 32, 5], cpu))
