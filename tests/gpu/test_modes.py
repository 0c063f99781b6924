"""Captured or eager, overlapped or not: the same kernels in the same order, so the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quire import LLM, RequestOutput, SamplingParams
from tests.conftest import TINY_VOCAB
from tests.gpu.near_ties import NearTies, greedy
from tests.gpu.target import ON_A_GPU

pytestmark = ON_A_GPU

PROMPTS = [[(7 * i + 3 * j) % TINY_VOCAB for j in range(1 + 5 * i)] for i in range(14)]
LENGTHS = [3 + 4 * (11 * i % 14) for i in range(len(PROMPTS))]
"""Requests end one by one, so that every capture size is run."""


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    assert all(output.error is None for output in outputs)
    return [list(output.outputs[0].token_ids) for output in outputs]


def greedy_params(length: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, **more)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """Rows of every captured decode step and decode forward pass that ran."""
    from quire.worker.cuda_graphs import CapturedDecodePath

    calls: dict[str, list[int]] = {"step": [], "forward": []}

    def counted(name: str) -> Callable[..., Any]:
        run = getattr(CapturedDecodePath, f"_run_{name}")

        def call(self: Any, shape: Any) -> Any:
            calls[name].append(shape.rows)
            return run(self, shape)

        return call

    for name in calls:
        monkeypatch.setattr(CapturedDecodePath, f"_run_{name}", counted(name))
    return calls


@pytest.fixture(scope="module")
def expected(reference: Any) -> list[list[int]]:
    outputs = greedy(reference, PROMPTS, max(LENGTHS))
    return [tokens[:length] for tokens, length in zip(outputs, LENGTHS, strict=True)]


@pytest.mark.parametrize("depth", [0, 1], ids=["synchronous", "overlapped"])
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_greedy_tokens_equal_transformers_in_every_mode(
    engine: Callable[..., LLM], ties: NearTies, replays: dict[str, list[int]], expected: list[list[int]], eager: bool,
    depth: int,
) -> None:  # fmt: skip
    llm = engine(enforce_eager=eager, pipeline_depth=depth)
    outputs = tokens_of(llm.generate(PROMPTS, [greedy_params(n) for n in LENGTHS], use_tqdm=False))
    for i, prompt in enumerate(PROMPTS):
        ties.compare(prompt, outputs[i], expected[i], f"prompt {i}")
    ties.report("eager" if eager else "graphs")
    sizes = set(replays["step"])
    assert not sizes if eager else {1, 2, 4, 8} <= sizes, "requests end one by one: every size is run"
    assert not replays["forward"]


def test_rows_with_logprobs_replay_the_forward_pass_and_draw_the_same(
    engine: Callable[..., LLM], ties: NearTies, replays: dict[str, list[int]], expected: list[list[int]]
) -> None:
    params = [greedy_params(n, logprobs=2 if i % 3 == 0 else None) for i, n in enumerate(LENGTHS)]
    outputs = engine().generate(PROMPTS, params, use_tqdm=False)
    for i, tokens in enumerate(tokens_of(outputs)):
        ties.compare(PROMPTS[i], tokens, expected[i], f"prompt {i}")
        reports = outputs[i].outputs[0].logprobs
        assert (reports is None) == (i % 3 != 0)
        for token, report in zip(tokens, reports or [], strict=reports is not None):
            assert report[token].rank == 1
    ties.report("logprobs")
    assert replays["forward"] and replays["step"]


def test_a_long_list_of_stop_ids_moves_the_column_and_graphs_follow(
    engine: Callable[..., LLM], ties: NearTies, expected: list[list[int]]
) -> None:
    llm = engine()
    many = [token for token in range(TINY_VOCAB) if token not in expected[3]][:40]
    for more in ({}, {"stop_token_ids": many}, {"stop_token_ids": [*many, expected[3][4]]}, {}):
        (tokens,) = tokens_of(llm.generate([PROMPTS[3]], greedy_params(LENGTHS[3], **more), use_tqdm=False))
        ends = len(more.get("stop_token_ids", [])) > len(many)
        at = expected[3].index(expected[3][4]) + 1 if ends else LENGTHS[3]
        ties.compare(PROMPTS[3], tokens, expected[3][:at])
    ties.report("stop ids", most=0)


def test_more_requests_than_rows_and_more_tokens_than_a_step(
    engine: Callable[..., LLM], ties: NearTies, expected: list[list[int]]
) -> None:
    llm = engine(max_num_seqs=5, max_num_batched_tokens=24, block_size=8)
    outputs = tokens_of(llm.generate(PROMPTS, [greedy_params(n) for n in LENGTHS], use_tqdm=False))
    for i, prompt in enumerate(PROMPTS):
        ties.compare(prompt, outputs[i], expected[i], f"prompt {i}")
    ties.report("chunks")


@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize("depth", [0, 1], ids=["synchronous", "overlapped"])
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_rows_with_a_common_prefix_are_read_together_and_draw_the_same(
    engine: Callable[..., LLM], ties: NearTies, reference: Any, eager: bool, depth: int
) -> None:
    """Two groups that share their prefixes, one row that shares nothing, and a group that grows and shrinks."""
    stems = [[(5 * i + 11 * j) % TINY_VOCAB for j in range(128)] for i in range(2)]
    prompts = [stems[i % 2] + [(3 + i + j) % TINY_VOCAB for j in range(3 + i)] for i in range(9)] + [PROMPTS[4]]
    lengths = [6 + 5 * i for i in range(len(prompts))]
    expected = greedy(reference, prompts, max(lengths))
    llm = engine(enforce_eager=eager, pipeline_depth=depth)
    worker = llm.llm_engine.core._executor._worker  # type: ignore[attr-defined]
    launch, grouped = worker.launch, []

    def watched(plan: Any) -> Any:
        grouped.append(plan.groups is not None)
        return launch(plan)

    worker.launch = watched
    for _ in range(2):  # the second time from cached blocks
        outputs = tokens_of(llm.generate(prompts, [greedy_params(n) for n in lengths], use_tqdm=False))
        for i, prompt in enumerate(prompts):
            ties.compare(prompt, outputs[i], expected[i][: lengths[i]], f"prompt {i}")
    ties.report("groups", most=2)
    assert any(grouped) == worker.reads_groups


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_bfloat16_graphs_draw_the_same_as_eager_steps(
    engine: Callable[..., LLM], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`rows` is a capture size: nothing is padded, so a captured step equals the eager one, bit for bit. Steps with
    prompts are padded, and not tested here."""
    monkeypatch.setattr("quire.worker.cuda_graphs.CapturedMixedPath.fit", lambda self, plan: None)
    prompts = [[(5 * i + 3 * j) % TINY_VOCAB for j in range(20)] for i in range(rows)]
    outputs = []
    for eager in (True, False):
        llm = engine(dtype="bfloat16", enforce_eager=eager, pipeline_depth=0)
        outputs.append(tokens_of(llm.generate(prompts, greedy_params(48), use_tqdm=False)))
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("depth", [0, 1])
def test_seeded_draws_are_the_same_captured_and_eager(engine: Callable[..., LLM], depth: int) -> None:
    params = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=30, ignore_eos=True, top_p=0.9 if i % 4 == 3 else 1.0)
        for i in range(8)
    ]
    outputs = []
    for eager in (True, False):
        llm = engine(enforce_eager=eager, pipeline_depth=depth)
        outputs.append(tokens_of(llm.generate(PROMPTS[:8], params, use_tqdm=False)))
    assert outputs[0] == outputs[1]


def test_steps_with_prompts_are_captured_too(
    engine: Callable[..., LLM], ties: NearTies, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that arrive while others run share steps with them, padded to captured shapes."""
    from quire.worker.cuda_graphs import CapturedMixedPath

    shapes: list[Any] = []
    for name in ("_run_step", "_run_forward"):
        run = getattr(CapturedMixedPath, name)
        monkeypatch.setattr(
            CapturedMixedPath,
            name,
            lambda self, shape, run=run, name=name: (shapes.append((name, shape)), run(self, shape))[1],
        )
    llm = engine(max_num_batched_tokens=96, max_num_seqs=32)
    for more in ({}, {"logprobs": 1}):
        llm.reset_prefix_cache()
        outputs = llm.generate(PROMPTS, [greedy_params(length, **more) for length in LENGTHS], use_tqdm=False)
        for prompt, ours, theirs in zip(PROMPTS, tokens_of(outputs), expected, strict=True):
            ties.compare(prompt, ours, theirs)
    ties.report("captured steps with prompts")
    assert {name for name, _ in shapes} == {"_run_step", "_run_forward"}
    assert len({shape for _, shape in shapes}) > 1
