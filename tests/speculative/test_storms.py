"""Everything at once with drafts, over tiny caches: turns of sessions, requests with grammars, several sequences and
stop strings, on shared prefixes; they are aborted, preempted and swapped. Every token is that of an engine without
drafts, and every block is given back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from quire.messages.plan import MAX_WIDTH
from quire.scheduler.swapping import Swapper
from tests.engine.fork_server import ROWS, SharedForkServer
from tests.engine.test_tiers_engine import LONGEST, Storm, greedy, settings_of
from tests.speculative.scripted import SCRIPTED, Scripted, Tally

NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3, "tune": False}
FORMS = (
    StructuredOutputsParams(regex=r"\(\d{3}\) [a-c]{4,20}!"),
    StructuredOutputsParams(json={"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}),
    StructuredOutputsParams(choice=["yes", "not at all", "no"]),
    StructuredOutputsParams(regex="b[bc]{2,9}aé"),  # the vocabulary has no é: an error, always at the same token
)


class MixedStorm(Storm):
    """Adds requests of all kinds that run at the same time."""

    def run(self, operations: int) -> None:
        acts = [self._create, self._append, *[self._mix] * 6, self._turns, self._plain_requests, self._suspend]
        acts += [self._fork, self._truncate, self._abort, self._evict, self._delete]
        for i in range(operations):
            act = acts[i % len(acts)] if len(self.truth) > 2 else self._create
            act()
            self.llm.llm_engine.check_idle()
        self.check()

    def _mix(self) -> None:
        names = [name for name in self.rng.sample(list(self.truth), 2) if len(self.truth[name]) + 16 <= LONGEST]
        others = [self._some(60) for _ in range(self.rng.randint(3, 6))]
        turns = [greedy(16), SamplingParams(temperature=0.9, seed=3, max_tokens=16, structured_outputs=FORMS[0])]
        wanted = [self.rng.choice(turns) for _ in names] + [self._params() for _ in others]
        prompts = [self.truth[name] for name in names] + others
        tokens = [{"prompt_token_ids": prompt} for prompt in prompts]
        expected = self.reference.generate(tokens, wanted, use_tqdm=False)
        Scripted.learn(expected)
        waiting = list(range(len(prompts)))
        self.rng.shuffle(waiting)
        running: dict[str, int] = {}
        engine, sessions = self.llm.llm_engine, self.llm.sessions
        while waiting or running:
            if waiting and self.rng.random() < 0.5:
                number = waiting.pop()
                session = sessions.key_of(names[number]) if number < len(names) else ""
                name = f"mixed-{self.seen['mixed']}"
                self.seen["mixed"] += 1
                engine.add_request(name, prompts[number], wanted[number], session=session)
                running[name] = number
            if running and self.rng.random() < 0.02:
                aborted = self.rng.choice(list(running))
                engine.abort_request(aborted)
                if (number := running.pop(aborted)) < len(names):
                    self._note_abort(names[number], expected[number])
            for output in engine.step():
                assert isinstance(output, RequestOutput)
                if output.request_id not in running:
                    continue
                number = running[output.request_id]
                check(output, expected[number])
                if output.finished:
                    del running[output.request_id]
                    if number < len(names) and output.outputs[0].finish_reason != "error":
                        self.truth[names[number]] = prompts[number] + list(output.outputs[0].token_ids)

    def _note_abort(self, name: str, expected: RequestOutput) -> None:
        """A turn was aborted, but its end may have been on its way."""
        tokens = self.llm.sessions.get(name).tokens
        assert tokens in (self.truth[name], self.truth[name] + list(expected.outputs[0].token_ids))
        self.truth[name] = tokens

    def _params(self) -> SamplingParams:
        free: dict[str, Any] = {"seed": self.rng.randrange(9), "max_tokens": 40, "ignore_eos": True}
        form = {"seed": self.rng.randrange(9), "max_tokens": 40, "structured_outputs": self.rng.choice(FORMS)}
        return self.rng.choice(
            [
                SamplingParams(temperature=0, **free),
                SamplingParams(temperature=0.9, n=3, **free),
                SamplingParams(temperature=0.8, top_p=0.9, frequency_penalty=0.5, stop=["er", "Q"], **free),
                SamplingParams(temperature=0, **form),
                SamplingParams(temperature=0.9, n=2, **form),
            ]
        )


def check(output: RequestOutput, right: RequestOutput) -> None:
    """What there is of an output is right, and all of it if it has finished."""
    for sample, true in zip(output.outputs, right.outputs, strict=True):
        tokens = list(sample.token_ids)
        assert tokens == list(true.token_ids)[: len(tokens)]
        if output.finished:
            assert len(tokens) == len(true.token_ids)
            assert (sample.finish_reason, sample.stop_reason) == (true.finish_reason, true.stop_reason)
    if output.finished:
        assert output.error == right.error


@pytest.fixture(scope="module")
def engines(tiny_model: Path) -> Iterator[SharedForkServer]:
    made = SharedForkServer(tiny_model, places=MAX_WIDTH)
    yield made
    made.close()


@pytest.fixture(scope="module")
def reference(engines: SharedForkServer) -> LLM:
    return engines.engine(enable_prefix_caching=False)


@pytest.fixture(autouse=True)
def usual_script(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("book", []), ("wrong", 0.2), ("fails", 0.002)):
        monkeypatch.setattr(Scripted, name, value)


def settings_for(tiers: str, seed: int, folder: Path) -> dict[str, Any]:
    """Settings of an engine whose blocks hold little more than its longest request."""
    rng = random.Random(seed)
    size = rng.choice([8, 16])
    settings = settings_of(tiers, seed % 2, size, folder, rng)
    return settings | {"max_num_seqs": ROWS, "num_gpu_blocks_override": rng.choice([18, 24]) * 16 // size}


def run_storm(llm: LLM, reference: LLM, seed: int, operations: int) -> None:
    tally, scheduler = Tally(llm), llm.llm_engine.core.scheduler
    if isinstance(swapper := scheduler.requests.swapper, Swapper):
        swapper.least_swap = 1
        swapper.tiers.costs.swapping_pays = lambda *costs: True  # type: ignore[method-assign]
    MixedStorm(llm, reference, seed).run(operations)
    assert tally.verified > tally.accepted > 2 * operations, "few drafts were accepted"
    assert scheduler.stats.preemptions > 0, "the cache is not small"
    assert scheduler.stats.swaps > 0 or scheduler.tiers is None


def test_a_mixed_storm(engines: SharedForkServer, reference: LLM, tmp_path: Path) -> None:
    llm = engines.engine(speculative_config=SCRIPTED, **settings_for("host", 1, tmp_path))
    run_storm(llm, reference, seed=1, operations=12)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "speculation", [SCRIPTED, NGRAM, {"method": "suffix", "tune": False}], ids=["scripted", "ngram", "suffix"]
)
@pytest.mark.parametrize("tiers", ["none", "host", "disk"])
@pytest.mark.parametrize("seed", range(10, 13))
def test_long_mixed_storms(
    engines: SharedForkServer, reference: LLM, tmp_path: Path, speculation: dict[str, Any], tiers: str, seed: int
) -> None:
    llm = engines.engine(speculative_config=speculation, **settings_for(tiers, seed, tmp_path))
    run_storm(llm, reference, seed, 120)
