"""Latent attention in Triton against plain torch."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_target import DEVICE, HALF, ON_GPU

from quire.kernels.reference import TorchOps  # isort: skip
from quire.kernels.triton.latent import decode as latent_decode  # isort: skip
from quire.kernels.triton.latent.decode import LatentDecode, LatentTile  # isort: skip
from quire.kernels.triton.latent.prepare import prepare_latent  # isort: skip
from quire.kernels.triton.latent.products import absorb, values_of_rows  # isort: skip
from quire.layers.attention.base import AttentionInputs, LatentShape  # isort: skip
from quire.layers.attention.torch_latent import TorchLatentAttention  # isort: skip
from quire.layers.attention import triton_latent  # isort: skip
from quire.layers.attention.triton_latent import TritonLatentAttention  # isort: skip

SMALL = LatentShape(rank=48, rope=16, nope=24, value=20)
DEEPSEEK = LatentShape(rank=512, rope=64, nope=128, value=128)


def random(*size: int) -> torch.Tensor:
    return torch.randn(size, device=DEVICE)


class Case:
    """Rows over a shuffled cache whose unused slots are NaN; queries[i] of row i's lens[i] tokens are in this step."""

    def __init__(
        self, lens: list[int], queries: list[int], heads: int, shape: LatentShape, block: int, dtype: torch.dtype
    ) -> None:
        blocks_of = [-(-max(n, 1) // block) for n in lens]
        total = sum(blocks_of) + 3
        cache = torch.full((total, 2, block, shape.width), float("nan"), device=DEVICE)
        self.kv = cache[:, 1]
        order = (torch.randperm(total - 1) + 1).tolist()
        tables = torch.zeros(len(lens) + 5, max(blocks_of) + 2, dtype=torch.int32)
        rows = torch.randperm(len(lens) + 4)[: len(lens)]
        latents = []
        for row, n, own in zip(rows.tolist(), lens, queries, strict=True):
            mine = [order.pop() for _ in range(-(-n // block))]
            tables[row, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
            vectors = random(n, shape.width).to(dtype).float()
            for i, number in enumerate(mine):
                part = vectors[i * block : (i + 1) * block]
                self.kv[number, : len(part)] = part
            latents.append(vectors[n - own :] if n else random(own, shape.width))
        self.kv = cache.to(dtype)[:, 1]
        self.latent = torch.cat(latents).to(dtype)
        tokens = sum(queries)
        self.q = random(tokens, heads, shape.query + 3).to(dtype)[..., : shape.query]
        self.up = (random(heads, shape.nope + shape.value, shape.rank) * shape.rank**-0.5).to(dtype)
        self.shape, self.heads, self.lens, self.scale = shape, heads, lens, shape.query**-0.5
        starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)
        self.inputs = AttentionInputs(
            slots=torch.empty(0), query_starts=starts,
            context_lens=torch.tensor(lens, dtype=torch.int32, device=DEVICE), block_tables=tables.to(DEVICE),
            num_rows=len(lens), num_tokens=tokens, num_decodes=sum(n == 1 for n in queries),
            max_query_len=max(queries), max_context_len=max(lens), rows=rows.to(DEVICE, torch.int32),
        )  # fmt: skip

    def expected(self) -> torch.Tensor:
        return TorchLatentAttention().attend(
            self.q.float(), self.latent.float(), self.kv.float(), self.up.float(), self.inputs, self.scale
        )

    def check(self, out: torch.Tensor) -> None:
        expected = self.expected()
        queries = self.inputs.query_starts.diff().tolist()
        live = torch.cat([torch.full((n,), bool(length)) for n, length in zip(queries, self.lens, strict=True)])
        error = (out.float() - expected)[live].norm() / expected[live].norm()
        assert error < (2e-2 if out.dtype != torch.float32 else 1e-5)


CASES: list[tuple[list[int], list[int], int, LatentShape, int]] = [
    ([5], [1], 4, SMALL, 16),
    ([70, 1, 0, 33], [1, 1, 1, 1], 4, SMALL, 16),
    ([50, 3], [1, 1], 20, SMALL, 8),
    ([17, 40], [17, 40], 4, SMALL, 16),  # prompts
    ([40, 64, 35, 50], [1, 1, 35, 17], 6, SMALL, 16),  # decodes, a whole prompt, a chunk
]
if ON_GPU:
    CASES += [
        ([4000, 1, 700, 33, 90, 2048], [1] * 6, 16, DEEPSEEK, 16),
        ([4000, 1, 700, 33, 90, 2048], [1] * 6, 128, DEEPSEEK, 16),
        (list(range(1, 257)), [1] * 256, 16, DEEPSEEK, 16),
        ([100_000], [1], 16, DEEPSEEK, 64),
        ([300, 700, 500, 900], [1, 1, 500, 333], 16, DEEPSEEK, 16),
        ([300, 700, 500, 900], [1, 1, 500, 333], 128, DEEPSEEK, 16),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("lens, queries, heads, shape, block", CASES)
def test_equals_the_torch_backend(
    lens: list[int], queries: list[int], heads: int, shape: LatentShape, block: int, dtype: torch.dtype
) -> None:
    if dtype == torch.float32 and shape is DEEPSEEK:
        pytest.skip("tiles of this size do not fit in float32")
    case = Case(lens, queries, heads, shape, block, dtype)
    backend = TritonLatentAttention(heads, shape)
    for _ in range(2 if queries == [1] else 1):  # the second run reuses the workspace
        case.inputs.plans.clear()
        backend.prepare(case.kv, case.inputs)
        case.check(backend.attend(case.q, case.latent, case.kv, case.up, case.inputs, case.scale))


@pytest.mark.parametrize("earlier", [[0, 0], [0, 33], [50, 19]])
def test_prompts_with_known_contexts(earlier: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    own = [17, 40]
    lens = [length + before for length, before in zip(own, earlier, strict=True)]
    case = Case([9, *lens], [1, *own], 4, SMALL, 16, torch.float32)
    case.inputs.contexts, case.inputs.query_lens = earlier, own
    monkeypatch.setattr(triton_latent, "EXPANDED_QUERIES", 0)
    monkeypatch.setattr(triton_latent, "PIECE_BYTES", 0)
    monkeypatch.setattr(triton_latent, "MIN_PIECE", 29)
    backend = TritonLatentAttention(4, SMALL)
    backend.prepare(case.kv, case.inputs)
    assert len(case.inputs.plans.get("latent pieces", ())) == -(-sum(earlier) // 29)
    assert "latent context" not in case.inputs.plans
    case.check(backend.attend(case.q, case.latent, case.kv, case.up, case.inputs, case.scale))


def decoded(case: Case, kernel: LatentDecode) -> torch.Tensor:
    """The case through the decode kernel."""
    case.inputs.num_decodes = 0
    inputs, rows, count, nope = case.inputs, case.inputs.rows, len(case.lens), case.shape.nope
    assert rows is not None
    plan = kernel.plan(inputs.context_lens, rows, count)
    absorbed = absorb(case.q, case.up, nope)
    starts = inputs.query_starts if kernel.queries > 1 else None
    kernel.attend(case.q, absorbed, case.kv, inputs.block_tables, rows, inputs.context_lens, plan, case.scale, starts)
    out = torch.full((len(case.q), case.heads * case.shape.value), float("nan"), dtype=HALF, device=DEVICE)
    values_of_rows(absorbed, case.up, out, inputs.context_lens, plan, kernel, nope, count, starts)
    return out


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("queries, heads", [(1, 16), (3, 5), (8, 10)])
def test_several_queries_a_row(queries: int, heads: int, transposed: bool) -> None:
    lens = [40, queries, 0, 17, 33]
    case = Case(lens, [queries, queries, 9 if queries > 1 else 1, 1, max(1, queries - 1)], heads, SMALL, 16, HALF)
    tile = LatentTile(64 if ON_GPU else 16, 4, 1, 2, transposed)
    kernel = LatentDecode(heads, SMALL.nope, SMALL.rank, SMALL.rope, 8, HALF, torch.device(DEVICE), queries, tile)
    case.check(decoded(case, kernel))


def test_rows_that_verify_drafts_and_a_prompt() -> None:
    case = Case([40, 5, 17, 33, 30], [3, 1, 5, 2, 12], 4, SMALL, 16, torch.float32)
    inputs, backend = case.inputs, TritonLatentAttention(4, SMALL)
    inputs.num_decodes, inputs.num_verifying, inputs.num_verified, inputs.width = 0, 4, 11, 5
    backend.prepare(case.kv, inputs)
    assert "latent" in inputs.plans
    case.check(backend.attend(case.q, case.latent, case.kv, case.up, inputs, case.scale))


@pytest.mark.skipif(not ON_GPU or torch.cuda.get_device_capability()[0] != 9, reason="Gluon has no interpreter")
@pytest.mark.parametrize("queries, heads", [(1, 128), (1, 40), (1, 16), (2, 16), (3, 8), (8, 128)])
def test_the_kernels_for_hopper(queries: int, heads: int) -> None:
    lens = [4000, queries, 700, 1024]
    case = Case(lens, [queries, queries, 1, queries], heads, DEEPSEEK, 16, HALF)
    tile = LatentTile(64, 8, 2, gluon=True)
    if heads * queries <= 32:
        tile = LatentTile(64, 4, 2, transposed=True, gluon=True)
    kernel = LatentDecode(heads, 128, 512, 64, 8, HALF, torch.device(DEVICE), queries, tile)
    for _ in range(2):
        case.check(decoded(case, kernel))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_cache_entries_and_rotated_queries(dtype: torch.dtype, interleaved: bool) -> None:
    tokens, heads, shape = 5, 20, SMALL
    wide = random(tokens, heads * shape.query + shape.width).to(dtype)
    cos_sin = random(40, shape.rope)
    gain = (1 + 0.3 * random(shape.rank)).to(dtype)
    positions = torch.randint(0, 40, (tokens,), device=DEVICE)
    slots = torch.randperm(24, device=DEVICE)[:tokens]
    results = []
    for kernel in (prepare_latent, TorchOps().prepare_latent):
        both, cache = wide.clone(), torch.zeros(3, 2, 8, shape.width, dtype=dtype, device=DEVICE)[:, 1]
        q, latent = both.split([heads * shape.query, shape.width], dim=1)
        kernel(q.unflatten(1, (heads, -1)), latent, positions, cos_sin, gain, 1e-5, cache, slots, interleaved)
        results.append((both, cache))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-3 if dtype == HALF else 1e-5)


def test_one_long_row_is_dealt_evenly_to_all_programs() -> None:
    kernel = LatentDecode(16, 24, 48, 16, 8, HALF, torch.device(DEVICE))
    lens, rows = (torch.tensor([n], dtype=torch.int32, device=DEVICE) for n in (64 * 1024, 0))
    plan = kernel.plan(lens, rows, 1)
    entries = plan.ranges[latent_decode.HEADER :].view(-1, latent_decode.ENTRY)[: kernel.programs]
    tiles = 64 * 1024 // kernel.tile.tokens
    assert int(entries[:, 3].sum()) == tiles and int(entries[:, 3].max()) == -(-tiles // kernel.programs)
