"""A proposer for tests: it has a book of the sequences that will be drawn, and changes some of what it reads there."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from quire import LLM, RequestOutput

VOCABULARY = 112


class Scripted:
    """A `HostProposer`, named in `speculative_config` by its dotted path; what it does is set on the class."""

    book: ClassVar[list[list[int]]] = []
    """Prompts with their outputs."""
    wrong: ClassVar[float] = 0.2
    """The probability that a draft is changed."""
    fails: ClassVar[float] = 0.0
    """The probability that it raises."""

    def __init__(self, config: Any = None) -> None:
        self._known: dict[Any, list[int]] = {}
        self._chance = random.Random(7)

    @classmethod
    def learn(cls, outputs: Iterable[RequestOutput]) -> None:
        """Write finished outputs into the book, instead of what is there."""
        cls.book = [
            [*(output.prompt_token_ids or []), *sample.token_ids] for output in outputs for sample in output.outputs
        ]

    def start(self, key: Any, tokens: Sequence[int], tenant: str) -> None:
        self._known[key] = list(tokens)

    def extend(self, key: Any, tokens: Sequence[int]) -> None:
        self._known[key] += tokens

    def propose(self, key: Any, most: int) -> list[int]:
        if self._chance.random() < self.fails:
            raise RuntimeError("a test's own failure")
        known = self._known[key]
        run = next((text[len(known) :] for text in self.book if text[: len(known)] == known), [])
        run = run[: self._chance.randrange(most + 1)]
        return [token if self._chance.random() >= self.wrong else self._chance.randrange(VOCABULARY) for token in run]

    def leave(self, key: Any, has_ended: bool) -> None:
        del self._known[key]


SCRIPTED = {"method": f"{__name__}.{Scripted.__name__}", "tune": False}
"""`speculative_config` of an engine that it proposes for."""


class Tally:
    """Counts what an engine verifies and accepts from now on."""

    def __init__(self, llm: LLM) -> None:
        self.verified = self.accepted = self.steps = 0
        executor = llm.llm_engine.core._executor
        submit, collect = executor.submit, executor.collect

        def count_plan(plan: Any) -> Any:
            self.steps += 1
            self.verified += plan.num_drafts
            return submit(plan)

        def count_result(handle: Any) -> Any:
            result = collect(handle)
            self.accepted += int(result.counts.sum()) - len(result.counts)
            return result

        executor.submit, executor.collect = count_plan, count_result  # type: ignore[method-assign]
