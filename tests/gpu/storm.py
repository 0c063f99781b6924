"""Concurrent requests of every kind on a real engine, some of them aborted, against what each yields alone."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire import LLM, RequestOutput, SamplingParams
from quire.messages.sampling import RequestOutputKind
from tests.conftest import TINY_VOCAB
from tests.gpu.near_ties import NearTies

FLIPS = 0.01
"""Share of seeded sequences that may differ: a draw's number may fall between two orders of the same sum."""


@dataclass(frozen=True)
class StormRequest:
    """A request, and whether it is plain greedy: then its tokens are compared one by one."""

    id: str
    prompt: list[int]
    params: SamplingParams
    is_greedy: bool


def make_requests(
    count: int, rng: random.Random, longest_prompt: int = 70, longest_output: int = 40
) -> list[StormRequest]:
    """Prompts that often share a prefix; parameters of every kind, all seeded, so that each request has one answer."""
    stems = [[rng.randrange(2, TINY_VOCAB) for _ in range(longest_prompt)] for _ in range(5)]
    requests = []
    for i in range(count):
        prompt = [rng.randrange(2, TINY_VOCAB) for _ in range(rng.randint(1, longest_prompt // 2))]
        if rng.random() < 0.6:
            prompt = (rng.choice(stems)[: rng.randint(1, longest_prompt)] + prompt)[:longest_prompt]
        output = rng.randint(1, rng.choice([4, longest_output]))
        is_greedy = rng.random() < 0.5
        requests.append(StormRequest(f"r{i}", prompt, _params(rng, output, is_greedy), is_greedy))
    return requests


def _params(rng: random.Random, length: int, is_greedy: bool) -> SamplingParams:
    common: dict[str, Any] = {
        "max_tokens": length, "ignore_eos": rng.random() < 0.5, "output_kind": RequestOutputKind.FINAL_ONLY,
        "stop_token_ids": rng.choice([None, None, rng.sample(range(TINY_VOCAB), rng.choice([1, 3, 12]))]),
        "logprobs": rng.choice([None, None, None, 0, 2]), "prompt_logprobs": rng.choice([None] * 9 + [1]),
    }  # fmt: skip
    if is_greedy:
        return SamplingParams(temperature=0, **common)
    kind = rng.choice(
        [
            {},
            {"top_k": rng.randint(1, 20)},
            {"top_p": rng.uniform(0.5, 0.99), "min_p": rng.choice([0.0, 0.03])},
            {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": -0.2},
            {"logit_bias": {7: 1.5, 20: -2.0}, "min_tokens": min(2, length)},
            {"allowed_token_ids": list(range(2, 60))},
        ]
    )
    return SamplingParams(
        n=rng.choice([1, 1, 2, 3]), temperature=rng.uniform(0.4, 1.4), seed=rng.randrange(-(2**63), 2**64), **kind,
        **common,
    )  # fmt: skip


def uninterrupted(llm: LLM, requests: Sequence[StormRequest]) -> dict[str, RequestOutput]:
    """What each request yields where there is room for all."""
    outputs = llm.generate(
        [request.prompt for request in requests], [request.params for request in requests], use_tqdm=False
    )
    assert llm.llm_engine.core.scheduler.stats.preemptions == 0
    return {request.id: output for request, output in zip(requests, outputs, strict=True)}


def interrupted(
    llm: LLM, requests: Sequence[StormRequest], rng: random.Random, abort_rate: float
) -> dict[str, RequestOutput]:
    """The same in bursts, with random aborts: the finished results by request; the others were aborted."""
    engine = llm.llm_engine
    waiting, open_ids, aborted = list(requests), set[str](), set[str]()
    finished: dict[str, RequestOutput] = {}
    steps, most = 0, 200 + 100 * len(requests)
    while waiting or engine.has_unfinished_requests():
        for _ in range(rng.choice([0, 0, 1, 2, 8])):
            if waiting:
                request = waiting.pop(0)
                engine.add_request(request.id, request.prompt, request.params)
                open_ids.add(request.id)
        for output in engine.step():
            assert output.finished and output.request_id in open_ids, "reported after its end"
            finished[output.request_id] = output
            open_ids.discard(output.request_id)
        if open_ids and rng.random() < abort_rate:
            victim = rng.choice(sorted(open_ids))
            engine.abort_request(victim)
            open_ids.discard(victim)
            aborted.add(victim)
        steps += 1
        assert steps < most, f"{len(open_ids)} requests starve after {steps} steps"
    assert finished.keys() | aborted == {request.id for request in requests}
    assert not finished.keys() & aborted
    return finished


def check(
    requests: Sequence[StormRequest], ours: dict[str, RequestOutput], theirs: dict[str, RequestOutput], ties: NearTies
) -> int:
    """Greedy requests with the near-tie rule; returns how many seeded sequences differ, which must be very few."""
    flips = samples = 0
    for request in requests:
        if request.id not in ours:
            continue
        mine, other = ours[request.id], theirs[request.id]
        assert mine.error is None and len(mine.outputs) == request.params.n
        for sample, expected in zip(mine.outputs, other.outputs, strict=True):
            samples += 1
            _check_reports(request, mine, sample)
            if request.is_greedy:
                before = len(ties.found)
                ties.compare(request.prompt, sample.token_ids, expected.token_ids, request.id)
                same = len(ties.found) == before
            else:
                same = list(sample.token_ids) == list(expected.token_ids)
                flips += not same
            if same:
                assert (sample.finish_reason, sample.stop_reason) == (expected.finish_reason, expected.stop_reason)
    assert flips <= max(1, FLIPS * samples), f"{flips} of {samples} seeded samples differ"
    return flips


def _check_reports(request: StormRequest, output: RequestOutput, sample: Any) -> None:
    if request.params.logprobs is not None:
        assert len(sample.logprobs) == len(sample.token_ids)
        for token, report in zip(sample.token_ids, sample.logprobs, strict=True):
            assert math.isfinite(report[token].logprob) and report[token].logprob <= 0
    if request.params.prompt_logprobs is not None:
        assert len(output.prompt_logprobs or []) == len(request.prompt)
