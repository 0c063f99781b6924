"""Every proposer with every kind of cache, and with what moves, shares, drops or shrinks it: the tokens are those
without drafts, greedy and seeded.

`test_pairs.py` does the same with a proposer that reads what will be drawn. Here drafts are what the proposers make of
the text; heads and layers that are random, and draft models that are the target with noise, are shown some of the right
tokens, so that steps accept none, some and all drafts, and the proposers' own caches follow. Nearly all of it carries
the marker `slow`: `make spec-pairs`.
"""

from __future__ import annotations

import json
import multiprocessing
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from quire import LLM, RequestOutput, SamplingParams
from quire.errors import ConfigError, UnsupportedModelError
from quire.speculative import choice, draft_model, eagle3, mtp
from quire.speculative.device import ProposalStep
from tests.conftest import assert_idle
from tests.engine.beam_reference import params_of
from tests.engine.test_cache_kinds import KINDS, LONGEST, PROMPTS, SETTINGS, VOCABULARY
from tests.models.harness import random_reference
from tests.models.test_hybrids import hybrid_reference
from tests.models.zoo import ZOO
from tests.speculative import test_draft_model, test_eagle3, test_mtp
from tests.speculative.scripted import Tally
from tests.speculative.test_pairs import LENGTH, check, workload

PREDICTING = {"plain": "glm", "latent": "deepseek", "hybrid": "qwen3.5"}
"""By kind of cache: a model with layers that predict."""
ON_HOST = ("ngram", "suffix")
"""What pipeline stages take."""
SHAPE = {"max_position_embeddings": LONGEST, "vocab_size": VOCABULARY}
KNOWS = 0.6
"""The probability that a draft is the right token."""


def generate(llm: LLM) -> list[RequestOutput]:
    """The workload, and two requests whose outputs repeat themselves."""
    prompts, params = workload()
    for seed in (None, 6):
        prompts.append({"prompt_token_ids": PROMPTS[0]})
        params.append(turn(LENGTH, seed, allowed_token_ids=[11, 12]))
    return llm.generate(prompts, params, use_tqdm=False)


def turn(tokens: int, seed: int | None, **more: Any) -> SamplingParams:
    """Greedy without a seed."""
    temperature = 0 if seed is None else 0.9
    return SamplingParams(
        temperature=temperature, seed=seed, max_tokens=tokens, ignore_eos=True, detokenize=False, **more
    )


class Pair:
    """A checkpoint, a proposer for it, and what engines without drafts yield."""

    def __init__(self, kind: str, method: str, folder: Path) -> None:
        self.kind, self.method = kind, method
        self.path = str(folder / "model")
        self.block_size = 16 if kind == "hybrid" else 4  # rows of hybrids verify no drafts close to a snapshot
        model = KINDS[kind][0]
        if method == "mtp":
            test_mtp.Target(PREDICTING[kind], **SHAPE).save(folder / "model")
        elif model in ZOO:
            random_reference(type(ZOO[model])(**{**ZOO[model].to_dict(), **SHAPE})).save_pretrained(self.path)
        else:
            hybrid_reference(model, **SHAPE).save_pretrained(self.path)
        self.drafts: dict[str, Any] = {"method": method, "num_speculative_tokens": 4, "tune": False}
        if method == "draft_model":
            self.drafts["model"] = self._draft_model(folder / "draft")
        if method == "eagle3":
            self.drafts["model"] = self._head(folder / "head")
        if method == "ngram":
            self.drafts["prompt_lookup_min"] = 1
        self._plain: dict[str, list[RequestOutput]] = {}

    def _draft_model(self, folder: Path) -> str:
        """The target with noise; for a hybrid, which no draft may be, another model."""
        if self.kind == "hybrid":
            config = LlamaConfig(**{**test_mtp.SHAPE, **SHAPE})
            return test_draft_model.save(folder, random_reference(config))
        folder.mkdir()
        tensors = load_file(f"{self.path}/model.safetensors")
        generator = torch.Generator().manual_seed(1)
        noisy = {name: t * (1 + 0.05 * torch.randn(t.shape, generator=generator)) for name, t in tensors.items()}
        save_file(noisy, folder / "model.safetensors")
        (folder / "config.json").write_text((Path(self.path) / "config.json").read_text())
        return str(folder)

    def _head(self, folder: Path) -> str:
        """A random head."""
        target = json.loads((Path(self.path) / "config.json").read_text())
        size = target["hidden_size"]
        config = {
            **test_eagle3.PLAIN, **SHAPE, "draft_vocab_size": VOCABULARY, "hidden_size": size,
            "eagle_aux_hidden_state_layer_ids": [0, 1, target["num_hidden_layers"]],
        }  # fmt: skip
        return test_eagle3.save(folder, config, test_eagle3.head_weights(config, vocab=VOCABULARY, target=size))

    def open(self, **more: Any) -> LLM:
        return LLM(self.path, **{**SETTINGS, "block_size": self.block_size, **more})

    def without_drafts(self, **settings: Any) -> list[RequestOutput]:
        name = repr(settings)
        if name not in self._plain:
            with self.open(**settings) as llm:
                self._plain[name] = generate(llm)
        return self._plain[name]

    def tight(self) -> dict[str, Any]:
        """Settings of a cache that holds little more than one of the workload's requests."""
        with self.open(speculative_config=self.drafts) as llm:
            tables = llm.llm_engine.core.scheduler.tables
            states = sum(group.pages for group in tables.groups)
            grown = len(tables.groups) - sum(group.kind == "state" for group in tables.groups)
        blocks = -(-(max(map(len, PROMPTS)) + LENGTH) // self.block_size) + 2
        # Windows give back what others keep.
        pages = int((states + grown * blocks) * (1.0 if self.kind == "window" else 1.2))
        return {"num_gpu_blocks_override": pages, "max_num_batched_tokens": 24}


class Hints:
    """Stands in for `choice.choose`: some drafts of some rows are what will be drawn."""

    def __init__(self) -> None:
        self.book: list[list[int]] = []
        self._chance = random.Random(3)

    def learn(self, outputs: Sequence[RequestOutput]) -> None:
        self.book = [[*(each.prompt_token_ids or []), *one.token_ids] for each in outputs for one in each.outputs]

    def __call__(self, logits: Any, step: ProposalStep, number: int, *more: Any) -> torch.Tensor:
        chosen = choice.choose(logits, step, number, *more)
        lengths = step.batch.num_tokens[step.rows].tolist()
        texts = step.batch.row_tokens(step.rows, max(lengths)).tolist()
        for i, (row, length) in enumerate(zip(step.rows.tolist(), lengths, strict=True)):
            known = [*texts[i][: length - 1], int(step.batch.last_token[row])]
            run = next((text[length:] for text in self.book if text[:length] == known), [])
            if number < len(run) and self._chance.random() < KNOWS:
                chosen[i] = run[number]
        return chosen


@pytest.fixture
def hints(monkeypatch: pytest.MonkeyPatch) -> Hints:
    made = Hints()
    for module in (draft_model, eagle3, mtp):
        monkeypatch.setattr(module, "choose", made)
    return made


@pytest.fixture(autouse=True)
def moves_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model computes faster than any link copies."""
    monkeypatch.setattr("quire.scheduler.swapping.LEAST_SWAP", 1)
    for name in ("swapping_pays", "loading_pays"):
        monkeypatch.setattr(f"quire.kvcache.offload.costs.Costs.{name}", lambda *_: True)


METHODS = (*ON_HOST, "draft_model", "eagle3", "mtp")
PAIRS = [(kind, method) for kind in KINDS for method in METHODS if method != "mtp" or kind in PREDICTING]
FAST = {("hybrid", "ngram"), ("window", "suffix")}


@pytest.fixture(
    scope="module",
    params=[pytest.param(pair, marks=() if pair in FAST else pytest.mark.slow, id="-".join(pair)) for pair in PAIRS],
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(*request.param, tmp_path_factory.mktemp("pair"))


def compare(pair: Pair, hints: Hints, expected: list[RequestOutput], rounds: int = 2, **settings: Any) -> None:
    hints.learn(expected)
    with pair.open(speculative_config=pair.drafts, **settings) as llm:
        tally = Tally(llm)
        for _ in range(rounds):
            check(generate(llm), expected)
        assert tally.verified > 20 * rounds
        assert tally.accepted > (5 if pair.method in ON_HOST else 30)
        assert_idle(llm)


def test_preempted_rows(pair: Pair, hints: Hints) -> None:
    """Prompts in chunks, several samples, prefix hits, and a cache for little more than one of the requests."""
    expected = pair.without_drafts()
    hints.learn(expected)
    with pair.open(speculative_config=pair.drafts, pipeline_depth=1, **pair.tight()) as llm:
        tally = Tally(llm)
        for _ in range(2):
            check(generate(llm), expected)
        assert llm.llm_engine.core.scheduler.stats.preemptions
        assert tally.verified > 40 and tally.accepted > (5 if pair.method in ON_HOST else 30)
        assert_idle(llm)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 1])
def test_swapped_rows(pair: Pair, hints: Hints, depth: int) -> None:
    expected = pair.without_drafts()
    hints.learn(expected)
    with pair.open(speculative_config=pair.drafts, pipeline_depth=depth, swap_space=0.05, **pair.tight()) as llm:
        for _ in range(2):
            check(generate(llm), expected)
        stats = llm.llm_engine.core.scheduler.stats
        assert stats.preemptions and stats.swaps
        assert_idle(llm)


@pytest.mark.slow
def test_beams_do_without_drafts(pair: Pair, hints: Hints) -> None:
    params, prompts = params_of(3, 8), [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    with pair.open() as llm:
        expected = llm.beam_search(prompts, params)
    with pair.open(speculative_config=pair.drafts, pipeline_depth=1) as llm:
        tally = Tally(llm)
        found = llm.beam_search(prompts, params)
        assert tally.verified == 0
        assert_idle(llm)
    for one, other in zip(found, expected, strict=True):
        assert [beam.tokens for beam in one.sequences] == [beam.tokens for beam in other.sequences]
        right = [beam.score for beam in other.sequences]
        assert [beam.score for beam in one.sequences] == pytest.approx(right, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int8", "fp8"])
def test_few_bits(pair: Pair, hints: Hints, weights: str) -> None:
    """Weights and keys and values in 8 bits, where the model takes them: `test_pairs.py` has the refusals."""
    settings: dict[str, Any] = {}
    if pair.kind != "window":
        settings["quantization"] = weights
    if pair.kind != "latent":
        settings["kv_cache_dtype"] = "int8_per_token_head" if weights == "int8" else "fp8"
    compare(pair, hints, pair.without_drafts(**settings), pipeline_depth=1, max_num_batched_tokens=24, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=["tp", "pp"])
def test_ranks(pair: Pair, sizes: dict[str, int]) -> None:
    if "pipeline_parallel_size" in sizes and (pair.method not in ON_HOST or pair.kind == "hybrid"):
        words = "recurrent layers on several" if pair.method in ON_HOST else "use ngram or suffix"
        with pytest.raises((ConfigError, UnsupportedModelError), match=words):
            pair.open(speculative_config=pair.drafts, **sizes)
        return
    expected = pair.without_drafts(**sizes)
    with pair.open(speculative_config=pair.drafts, **sizes) as llm:
        tally = Tally(llm)
        for _ in range(2):
            check(generate(llm), expected)
        assert tally.verified > 40


def _speak(path: str, settings: dict[str, Any], name: str, seed: int | None, answers: Any) -> None:
    """In a process of its own: one turn of a session, which is then suspended."""
    with LLM(path, **settings) as llm:
        session = llm.sessions.resume(name)
        output = session.generate(turn(9, seed))
        answers.put((list(output.outputs[0].token_ids), output.num_cached_tokens))
        session.suspend()


@pytest.mark.slow
def test_sessions_wake_in_another_process(pair: Pair, hints: Hints, tmp_path: Path) -> None:
    """From disk; one of them a fork from within the first one's answer."""
    prompt = PROMPTS[1]
    with pair.open() as llm:

        def continued(tokens: list[int], count: int, seed: int | None) -> list[int]:
            (output,) = llm.generate([{"prompt_token_ids": tokens}], turn(count, seed), use_tqdm=False)
            return list(output.outputs[0].token_ids)

        said = continued(prompt, 12, None)
        forked = prompt + said[:7]
        expected = {"one": continued([*prompt, *said], 9, None), "two": continued(forked, 9, 5)}
    hints.book = [prompt + said]
    settings = {
        **SETTINGS, "block_size": pair.block_size, "kv_disk": str(tmp_path), "kv_disk_size": 0.2, "swap_space": 0.05,
        "speculative_config": pair.drafts,
    }  # fmt: skip
    with LLM(pair.path, **settings) as llm:
        tally = Tally(llm)
        session = llm.sessions.create("one", prompt)
        assert list(session.generate(turn(12, None)).outputs[0].token_ids) == said
        assert tally.verified or pair.method in ON_HOST  # which have seen little yet
        session.fork("two", len(forked)).suspend()
        session.suspend()
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    for name, seed in (("one", None), ("two", 5)):
        process = context.Process(target=_speak, args=(pair.path, settings, name, seed, answers))
        process.start()
        answer, cached = answers.get(timeout=240)
        process.join()
        assert answer == expected[name]
        assert cached >= len(prompt) - pair.block_size, "the session's cache was read from disk"


@pytest.mark.slow
@pytest.mark.parametrize("tiers", ["host", "disk"])
def test_blocks_come_back_from_tiers(pair: Pair, hints: Hints, tmp_path: Path, tiers: str) -> None:
    """A cache for little more than one request: what the first round computed is on lower tiers when the second asks
    for it."""
    expected = pair.without_drafts()
    hints.learn(expected)
    settings = {**pair.tight(), "swap_space": 0.05}
    if tiers == "disk":
        settings |= {"swap_space": 0.002, "kv_disk": str(tmp_path), "kv_disk_size": 0.2}
    with pair.open(speculative_config=pair.drafts, pipeline_depth=1, **settings) as llm:
        for _ in range(3):
            outputs = generate(llm)
            check(outputs, expected)
        assert sum(output.num_cached_tokens or 0 for output in outputs) > 0
        assert_idle(llm)
    if tiers == "disk":
        with pair.open(speculative_config=pair.drafts, **settings) as llm:
            check(generate(llm), expected)
