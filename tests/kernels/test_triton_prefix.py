"""Attention over shared prefixes, read once per group, against the plain-torch backend without groups."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_target import DEVICE, HALF, ON_GPU

from quire.kernels.triton.decode_attention import DecodeAttention  # isort: skip
from quire.kernels.triton.prefix_attention import PrefixAttention, PrefixTile  # isort: skip
from tests.kernels.test_triton_decode import SMALL, error, expected, make_case  # isort: skip

BLOCK = 16
Group = tuple[list[int], int]
"""Which of a case's rows, and how many tokens they share: full blocks."""


def make_groups(case: dict, groups: list[Group], max_rows: int = 32) -> dict:
    """Let rows of the case begin with the blocks of their group's first row; returns the groups as the device has
    them."""
    lines = case["rows"].tolist()
    shared = torch.zeros(max(max_rows, len(case["tables"])), dtype=torch.int32)
    members: list[int] = []
    starts = [0]
    for rows, tokens in groups:
        assert tokens % BLOCK == 0 and all(tokens < case["lens"][row] for row in rows)
        for row in rows:
            case["tables"][lines[row], : tokens // BLOCK] = case["tables"][lines[rows[0]], : tokens // BLOCK]
            shared[lines[row]] = tokens
        members += [lines[row] for row in rows]
        starts.append(len(members))
    starts += [starts[-1]] * (max_rows // 2 + 1 - len(starts))
    members += [-7] * (max_rows - len(members))
    ints = {"members": members, "starts": starts}
    return {"shared": shared.to(DEVICE)} | {
        name: torch.tensor(values, dtype=torch.int32, device=DEVICE) for name, values in ints.items()
    }


class Kernels:
    """Both passes, for a case's shapes."""

    def __init__(self, case: dict, max_rows: int = 32, tile: PrefixTile | None = None) -> None:
        _, heads, dim = case["q"].shape
        shapes = (heads, case["kv"].shape[2], dim, max_rows, case["q"].dtype, torch.device(DEVICE))
        self.decode = DecodeAttention(*shapes, tile=SMALL)
        self.prefix = PrefixAttention(*shapes, tile=tile)
        self.prefix._sums.fill_(float("nan"))
        self.prefix._stats.fill_(float("nan"))

    def attend(
        self, case: dict, groups: dict, scale: float = 0.125, cap: float | None = None,
        sinks: torch.Tensor | None = None, slopes: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        rows, heads, dim = case["q"].shape
        shared = groups["shared"]
        out = torch.full((rows, heads * dim), float("nan"), dtype=case["q"].dtype, device=DEVICE)
        tiles = self.prefix.plan(
            groups["members"], groups["starts"], shared, case["rows"], rows, self.decode.tile_tokens
        )
        plan = self.decode.plan(case["lens"], case["rows"], rows, None, shared)
        state = self.prefix.attend(case["q"], case["kv"], case["tables"], shared, tiles, scale, cap, slopes)
        self.decode.attend(
            case["q"], case["kv"], out, case["tables"], case["rows"], case["lens"], plan, rows, scale, None, state,
            cap, sinks, slopes,
        )  # fmt: skip
        return out


CASES = {
    "two rows": ([70, 40], [([0, 1], 32)], 4, 2, 64),
    "more than one query tile": ([50 + 3 * i for i in range(11)], [(list(range(11)), 48)], 4, 2, 64),
    "twenty rows, heads in threes": ([36 + i for i in range(20)], [(list(range(20)), 32)], 3, 1, 64),
    "two groups and rows outside": ([90, 20, 100, 33, 49, 97, 120], [([0, 5, 2], 80), ([4, 3], 32)], 4, 2, 64),
    "one head a KV head": ([100, 130, 97], [([2, 0, 1], 96)], 2, 2, 64),
    "a head of 80": ([40, 60, 50], [([0, 1, 2], 32)], 4, 2, 80),
    "shared by less than a tile": ([40, 60, 7], [([0, 1], 16)], 4, 2, 64),
    "nothing shared": ([40, 60, 7], [], 4, 2, 64),
}
if ON_GPU:
    CASES |= {
        "many rows": ([2100 + i for i in range(256)], [(list(range(200)), 2048), ([210, 220, 230], 512)], 32, 8, 128),
        "long": ([8300] * 20, [(list(range(20)), 8192)], 32, 8, 128),
        "a head of 256": ([700 + i for i in range(40)], [(list(range(40)), 640)], 16, 16, 256),
        "a head of 192": ([700 + i for i in range(40)], [(list(range(40)), 640)], 12, 4, 192),
        "many groups": ([600 + i for i in range(120)], [([i, i + 40, i + 80], 400) for i in range(40)], 9, 3, 64),
        "many heads a KV head": ([600 + i for i in range(12)], [(list(range(12)), 512)], 48, 1, 128),
    }


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("name", CASES)
def test_equals_attention_without_groups(name: str, dtype: torch.dtype) -> None:
    lens, groups, heads, kv_heads, dim = CASES[name]
    max_rows = max(32, len(lens))
    case = make_case(lens, heads, kv_heads, dim, BLOCK, dtype)
    on_device = make_groups(case, groups, max_rows)
    kernels = Kernels(case, max_rows)
    reference = expected(case, 0.125, None)
    for _ in range(2):  # the second run uses the counters as the first left them
        out = kernels.attend(case, on_device)
        assert error(out, reference) < (1e-5 if dtype == torch.float32 else 5e-3)


def test_shared_tokens_need_not_fill_a_tile_of_either_kernel() -> None:
    """16 tokens more than a tile of 32: the group's kernel masks, the rows' kernel starts where the other ended."""
    case = make_case([150, 120, 130], 4, 2, 64, BLOCK, torch.float32)
    groups = make_groups(case, [([0, 1, 2], 112)])
    tile = PrefixTile(64, 64, 4, 1, 2) if ON_GPU else PrefixTile(32, 32, 4, 1, 1)
    out = Kernels(case, tile=tile).attend(case, groups)
    assert error(out, expected(case, 0.125, None)) < 1e-5


def test_an_ended_member_is_skipped_and_affects_no_other() -> None:
    case = make_case([70, 60, 50], 4, 2, 64, BLOCK, torch.float32)
    groups = make_groups(case, [([0, 1, 2], 48)])
    reference = expected(case, 0.125, None)
    case["lens"][0] = 0  # the row whose table the group reads
    out = Kernels(case).attend(case, groups)
    assert out[0].isnan().all()
    assert error(out[1:], reference[1:]) < 1e-5


def test_members_that_are_not_in_the_step_are_skipped() -> None:
    case = make_case([70, 60, 50, 64], 4, 2, 64, BLOCK, torch.float32)
    groups = make_groups(case, [([3, 0, 1, 2], 48)])
    reference = expected(case, 0.125, None)
    kernels = Kernels(case)
    some = case | {key: case[key][:3] for key in ("q", "rows", "lens")}
    assert error(kernels.attend(some, groups), reference[:3]) < 1e-5


@pytest.mark.parametrize("cap", [None, 2.0])
def test_soft_caps_and_sinks(cap: float | None) -> None:
    case = make_case([70, 60, 50, 64], 4, 2, 64, BLOCK, torch.float32)
    groups = make_groups(case, [([3, 0, 1], 48)])
    sinks = torch.tensor([-3.0, 0.5, 40.0, 2.0], device=DEVICE)
    reference = expected(case, 0.125, None, cap, sinks)
    assert error(Kernels(case).attend(case, groups, cap=cap, sinks=sinks), reference) < 1e-5


def test_slopes() -> None:
    """The members' queries are at different distances from the shared tokens."""
    case = make_case([70, 60, 50, 64], 4, 2, 64, BLOCK, torch.float32)
    groups = make_groups(case, [([3, 0, 1], 48)])
    slopes = 2.0 ** -torch.arange(3, 7, device=DEVICE)
    reference = expected(case, 0.125, None, None, None, slopes)
    assert error(Kernels(case).attend(case, groups, slopes=slopes), reference) < 1e-5


def test_the_same_groups_give_the_same_bits() -> None:
    case = make_case([200 + 5 * i for i in range(9)], 4, 2, 64, BLOCK, HALF)
    groups = make_groups(case, [(list(range(9)), 192)])
    kernels = Kernels(case)
    assert torch.equal(kernels.attend(case, groups), kernels.attend(case, groups))


def test_shared_blocks_are_read_from_one_table() -> None:
    """Members' own entries for shared blocks are never read."""
    case = make_case([70, 60, 50], 4, 2, 64, BLOCK, torch.float32)
    groups = make_groups(case, [([1, 0, 2], 48)])
    reference = expected(case, 0.125, None)
    for row in (0, 2):
        tokens = 48 // Kernels(case).decode.tile_tokens * Kernels(case).decode.tile_tokens
        case["tables"][case["rows"][row], : tokens // BLOCK] = 0  # the null block, which is NaN
    assert error(Kernels(case).attend(case, groups), reference) < 1e-5


@pytest.mark.parametrize("window", [None, 24])
def test_the_backend_uses_groups_where_there_is_no_window(window: int | None) -> None:
    from quire.layers.attention.base import AttentionInputs, AttentionSpec, GroupInputs
    from quire.layers.attention.triton import TritonPagedAttention

    case = make_case([70, 60, 50, 30], 4, 2, 64, BLOCK, torch.float32)
    groups = make_groups(case, [([0, 1, 2], 48)])
    rows = len(case["lens"])
    inputs = AttentionInputs(
        slots=torch.empty(0), query_starts=torch.arange(rows + 1, dtype=torch.int32, device=DEVICE),
        context_lens=case["lens"], block_tables=case["tables"], num_rows=rows, num_tokens=rows, num_decodes=rows,
        max_query_len=1, max_context_len=70, rows=case["rows"], groups=GroupInputs(**groups),
    )  # fmt: skip
    backend = TritonPagedAttention()
    backend.prepare(4, case["kv"], inputs, AttentionSpec(0.125, window))
    assert (("prefix", window, (4, 2, 64, False)) in inputs.common) == (window is None)
    out = backend.attend(case["q"], case["kv"], inputs, AttentionSpec(0.125, window))
    assert error(out, expected(case, 0.125, window)) < 1e-5
