"""Proposers that fail or answer nonsense cost their drafts, never a request, and change no token; drafts that do not
fit are refused by what does not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from transformers import LlamaConfig

from quire import LLM, SamplingParams
from quire.errors import QuireError
from quire.speculative.device import ProposalStep
from tests.conftest import TINY_VOCAB
from tests.models.harness import loaded_model, random_reference
from tests.speculative import test_draft_model, test_eagle3, test_mtp
from tests.speculative.scripted import Tally

MakeLLM = Callable[..., LLM]
PROMPTS = [{"prompt_token_ids": tokens} for tokens in (list(range(5, 25)), [11, 12, 13], [9, 8] * 6)]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=16, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=4, repetition_penalty=1.2, max_tokens=14, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=5, max_tokens=12, ignore_eos=True, n=2),
]


def generate(llm: LLM) -> list[list[list[int]]]:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)  # type: ignore[arg-type]
    assert all(output.error is None for output in outputs)
    return [[list(sample.token_ids) for sample in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def expected(shared_tiny: LLM) -> list[list[list[int]]]:
    return generate(shared_tiny)


class OnHost:
    """A `HostProposer` that fails at `place`, or answers `answer`; otherwise proposes the same token forever."""

    place: ClassVar[str] = ""
    answer: ClassVar[Any] = None
    calls: ClassVar[int] = 0

    def __init__(self, config: Any) -> None: ...

    def _fail(self, place: str) -> None:
        if place == self.place:
            type(self).calls += 1
            if type(self).calls > 3:  # some calls succeed
                raise KeyError("a test's own failure")

    def start(self, key: Any, tokens: Sequence[int], tenant: str) -> None:
        self._fail("start")

    def extend(self, key: Any, tokens: Sequence[int]) -> None:
        self._fail("extend")

    def propose(self, key: Any, most: int) -> Any:
        self._fail("propose")
        return [8] * most if self.answer is None else self.answer

    def leave(self, key: Any, has_ended: bool) -> None:
        self._fail("leave")


class OnDevice:
    """A `DeviceProposer` that writes numbers, and fails in its `fails`-th call."""

    feature_layers: ClassVar[tuple[int, ...]] = ()
    needs_hidden = needs_following = False
    caches: ClassVar[list[Any]] = []
    fails: ClassVar[int] = -1
    draft: ClassVar[int] = 8
    count: ClassVar[int] = 3
    calls: ClassVar[int] = 0

    def __init__(self, config: Any, model: Any, build: Any) -> None: ...

    def propose(self, step: ProposalStep) -> None:
        step.batch.drafts[step.rows] = self.draft
        step.batch.num_drafts[step.rows] = self.count
        type(self).calls += 1
        if type(self).calls == self.fails:
            raise IndexError("a test's own failure")


@pytest.fixture(autouse=True)
def usual(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, fields in ((OnHost, {"place": "", "answer": None, "calls": 0}),
                         (OnDevice, {"fails": -1, "draft": 8, "count": 3, "calls": 0})):  # fmt: skip
        for name, value in fields.items():
            monkeypatch.setattr(kind, name, value)


def config_of(kind: type) -> dict[str, Any]:
    return {"method": f"{__name__}.{kind.__name__}", "num_speculative_tokens": 4, "tune": False}


@pytest.mark.parametrize("place", ["start", "extend", "propose", "leave"])
def test_a_proposer_on_the_host_that_raises(
    place: str, make_llm: MakeLLM, expected: Any, caplog: pytest.LogCaptureFixture
) -> None:
    OnHost.place = place
    llm = make_llm(speculative_config=config_of(OnHost), pipeline_depth=1)
    with caplog.at_level(logging.ERROR):
        for _ in range(2):
            assert generate(llm) == expected
    assert "the proposer failed for request" in caplog.text and "a test's own failure" in caplog.text


NONSENSE = [
    7, "words", [None], ["x"], [float("nan")], [TINY_VOCAB], [8, -1], [10**30], [8.9] * 3, (8, 8), [8] * 1000,
    [True] * 3,
]  # fmt: skip


def test_nonsense_from_a_proposer_on_the_host(make_llm: MakeLLM, expected: Any) -> None:
    """What is no list of token ids costs the request's drafts; a run that is too long is cut."""
    llm = make_llm(speculative_config=config_of(OnHost), pipeline_depth=1)
    for OnHost.answer in NONSENSE:
        tally = Tally(llm)
        assert generate(llm) == expected, OnHost.answer
        assert (tally.verified > 0) == (OnHost.answer in ([8.9] * 3, (8, 8), [8] * 1000, [True] * 3)), OnHost.answer


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("fails", [1, 7])
def test_a_proposer_on_the_device_that_raises(
    fails: int, depth: int, make_llm: MakeLLM, expected: Any, caplog: pytest.LogCaptureFixture
) -> None:
    OnDevice.fails = fails
    llm = make_llm(speculative_config=config_of(OnDevice), pipeline_depth=depth)
    with caplog.at_level(logging.ERROR):
        for _ in range(2):
            assert generate(llm) == expected
    assert OnDevice.calls == fails, "it is not called again"
    assert caplog.text.count("OnDevice failed, and makes no more drafts") == 1


@pytest.mark.parametrize(("draft", "count"), [(TINY_VOCAB, 3), (-1, 3), (2**31 - 1, 7), (8, 100), (8, -5)])
def test_nonsense_from_a_proposer_on_the_device(draft: int, count: int, make_llm: MakeLLM, expected: Any) -> None:
    OnDevice.draft, OnDevice.count = draft, count
    llm = make_llm(speculative_config=config_of(OnDevice))
    assert generate(llm) == expected
    assert OnDevice.calls > 10


# Checkpoints of drafts with a tensor missing, or of another shape


def _eagle3(folder: Path, target: Any, change: Callable[[dict[str, torch.Tensor]], None]) -> Any:
    weights = test_eagle3.head_weights(test_eagle3.PLAIN)
    change(weights)
    return test_eagle3.proposer(folder, test_eagle3.PLAIN, target, weights)


def _damaged(weights: dict[str, torch.Tensor], name: str, damage: str) -> None:
    if damage == "missing":
        del weights[name]
    else:
        weights[name] = torch.cat((weights[name], weights[name][:1]))


OPTIONAL = {"t2d"}
"""Tensors that are not read."""


@pytest.mark.parametrize("damage", ["missing", "longer"])
def test_every_tensor_of_an_eagle3_head_is_needed(damage: str, tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=test_eagle3.VOCAB, hidden_size=test_eagle3.HIDDEN, intermediate_size=48, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    target = loaded_model(random_reference(config))
    names = list(test_eagle3.head_weights(test_eagle3.PLAIN))
    for number, name in enumerate(names):
        if name in OPTIONAL:
            continue
        with pytest.raises(QuireError, match=name.replace(".", r"\.")) as raised:
            _eagle3(tmp_path / str(number), target, lambda weights, name=name: _damaged(weights, name, damage))  # type: ignore[misc]
        if damage == "longer":
            size = len(test_eagle3.head_weights(test_eagle3.PLAIN)[name])
            assert str(size) in str(raised.value) and str(size + 1) in str(raised.value)


@pytest.mark.parametrize("form", ["glm", "qwen3.5"])
def test_every_tensor_of_layers_that_predict_is_needed(form: str, tmp_path: Path) -> None:
    whole = test_mtp.Target(form)
    model = loaded_model(whole.model)
    shared = ("embed_tokens", "shared_head.head")  # the model's own stand in for these
    for name in [each for each in whole.own if not any(part in each for part in shared)]:
        with pytest.raises(QuireError, match=name.replace(".", r"\.")):
            test_mtp.proposer(tmp_path / "part", whole, model, drop=name)


def test_every_tensor_of_a_draft_model_is_needed(tmp_path: Path) -> None:
    reference = random_reference(test_draft_model.DRAFTS["llama"])
    target = loaded_model(random_reference(test_draft_model.DRAFTS["llama"], seed=9))
    for number, name in enumerate(dict(reference.named_parameters())):
        if name == "lm_head.weight":
            continue  # a model without one has that of its embeddings
        folder = test_draft_model.save(tmp_path / str(number), reference, drop=name)
        with pytest.raises(QuireError, match=name.replace(".", r"\.")):
            test_draft_model.proposer(folder, target)
