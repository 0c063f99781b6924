"""Penalties, biases, lists and custom processors, against loops over tokens."""

from __future__ import annotations

import math
import random
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quire import LLM, SamplingParams
from quire.errors import ValidationError
from quire.worker import sampler
from quire.worker.logits import apply_penalties
from tests.worker.device import Device, Operations

VOCAB = 20


def penalised(logits: list[float], prompt: list[int], output: list[int], params: SamplingParams) -> list[float]:
    """vLLM's definition: repetition counts prompt and output, presence and frequency only the output."""
    result = list(logits)
    for token in range(len(logits)):
        if token in prompt or token in output:
            positive = result[token] > 0
            result[token] = (
                result[token] / params.repetition_penalty if positive else result[token] * params.repetition_penalty
            )
        result[token] -= params.frequency_penalty * output.count(token)
        result[token] -= params.presence_penalty * (token in output)
    return result


@pytest.mark.parametrize("seed", range(10))
def test_penalties_equal_a_loop_over_tokens(seed: int) -> None:
    draw = random.Random(seed)
    device = Device(VOCAB)
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    expected = []
    for row in range(4):
        prompt = [draw.randrange(VOCAB) for _ in range(draw.randint(1, 12))]
        output = [draw.randrange(VOCAB) for _ in range(draw.randint(0, 12))]
        params = SamplingParams(
            repetition_penalty=draw.choice([1.0, 0.7, 1.3, 2.0]),
            presence_penalty=draw.uniform(-2, 2),
            frequency_penalty=draw.uniform(-2, 2),
        )
        device.add(row, params, prompt, output)
        expected.append(penalised(logits[row].tolist(), prompt, output, params))
    ours = apply_penalties(
        device.batch, logits.clone(), torch.arange(4), device.batch.num_tokens[:4], int(device.batch.num_tokens.max())
    )
    torch.testing.assert_close(ours, torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_penalties_do_not_change_rows_without_them() -> None:
    device = Device(3)
    device.add(0, SamplingParams(temperature=0), prompt=[1], output=[2, 2])
    device.add(1, SamplingParams(temperature=0, frequency_penalty=2.0), prompt=[1], output=[2, 2])
    logits = torch.tensor([[0.0, 1.0, 3.0], [0.0, 1.0, 3.0]])
    assert device.draw(logits, [0, 1])[0] == [2, 1]


def test_a_bias_is_added_before_penalties() -> None:
    """As in vLLM: (2 + 4) / 2 = 3 loses against 4; 2 / 2 + 4 = 5 would have won."""
    device = Device(3)
    device.add(0, SamplingParams(temperature=0, repetition_penalty=2.0, logit_bias={1: 4.0}), prompt=[1])
    assert device.draw(torch.tensor([[4.0, 2.0, 0.0]]), [0])[0] == [0]


def test_logit_bias_affects_only_its_row() -> None:
    device = Device(4)
    device.add(0, SamplingParams(temperature=0, logit_bias={3: 10.0, 0: -100.0}))
    device.add(1, SamplingParams(temperature=0))
    logits = torch.tensor([[5.0, 1.0, 1.0, 0.0]] * 2)
    assert device.draw(logits, [0, 1])[0] == [3, 0]
    assert device.draw(logits, [1, 0])[0] == [0, 3]


def test_only_allowed_tokens_are_drawn() -> None:
    device = Device(30, max_rows=64)
    for row in range(64):
        device.add(row, SamplingParams(allowed_token_ids=[3, 7, 11]), seed=row)
    tokens, _ = device.draw(torch.randn(64, 30), range(64))
    assert set(tokens) == {3, 7, 11}


@pytest.mark.parametrize(
    "output, banned",
    [
        ([], {9}),
        ([4], {9, 5}),
        ([4, 5], {9, 6}),
        ([5], {9}),
        ([4, 5, 4], {9, 5}),
        ([1, 1, 1, 4, 5], {9, 6}),
    ],
    ids=str,
)
def test_the_last_token_of_a_bad_word_is_banned_after_the_rest_of_it(output: list[int], banned: set[int]) -> None:
    """Bad words 9, (4 5) and (4 5 6). The end of the prompt does not count."""
    device = Device(10)
    words = [[9], [4, 5], [4, 5, 6]]
    for token in range(10):
        device.add(0, SamplingParams(temperature=0, bad_words=["x"]), prompt=[7, 4], output=output, bad_words=words)
        logits = torch.zeros(1, 10)
        logits[0, token] = 1.0
        chosen = device.draw(logits, [0])[0][0]
        assert (chosen != token) == (token in banned), (output, token)


def test_bad_words_of_many_rows_equal_a_loop_over_them() -> None:
    """Words of all lengths, some with the same last token, across block boundaries; outputs that contain their
    beginnings."""
    rng = random.Random(3)
    vocab, rows = 6, range(8)
    for _ in range(60):
        device = Device(vocab, max_rows=len(rows))
        banned: list[set[int]] = []
        for row in rows:
            words = [rng.choices(range(1, vocab), k=rng.randint(1, 5)) for _ in range(rng.randint(0, 6))]
            prompt, output = ([rng.randrange(1, 3) for _ in range(rng.randint(least, 9))] for least in (1, 0))
            params = SamplingParams(temperature=0, bad_words=["x"] if words else None)
            device.add(row, params, prompt=prompt, output=output, bad_words=words)
            banned.append({word[-1] for word in words if output[len(output) - len(word) + 1 :] == word[:-1]})
        logits = torch.randn(len(rows), vocab)
        expected = [
            max((token for token in range(vocab) if token not in not_these), key=logits[row].tolist().__getitem__)
            for row, not_these in enumerate(banned)
        ]
        assert device.draw(logits, rows)[0] == expected


def test_lists_of_many_rows_take_as_many_operations_as_those_of_two() -> None:
    device = Device(VOCAB, max_rows=8)
    for row in range(8):
        params = SamplingParams(temperature=0, bad_words=["x"], min_tokens=3, logit_bias={4: 1.0})
        device.add(row, params, output=[4, 5], stop_ids=[3], bad_words=[[9], [5, row], [4, 5, 6]])

    def operations(rows: int) -> int:
        with Operations() as seen:
            device.draw(torch.zeros(rows, VOCAB), range(rows))
        return seen.count

    assert operations(8) == operations(2)


def test_long_lists_are_copied_to_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(VOCAB, max_rows=8)
    sizes: list[int] = []
    upload = device.batch.upload

    def noted(*arrays: Any) -> list[torch.Tensor]:
        sizes.append(sum(map(len, arrays)))
        return upload(*arrays)

    monkeypatch.setattr(device.batch, "upload", noted)
    for row in range(8):
        listed = {"allowed_token_ids": [*range(row, VOCAB)], "logit_bias": dict.fromkeys(range(VOCAB), row / 2)}
        device.add(row, SamplingParams(temperature=0, **listed))
    assert max(sizes) >= 2 * VOCAB
    sizes.clear()
    assert device.draw(-torch.arange(VOCAB).expand(8, -1).float(), range(8))[0] == [*range(8)]
    assert sizes and max(sizes) <= 2 * 8, "of each list its row and its length"


def test_stop_tokens_are_masked_until_min_tokens() -> None:
    device = Device(4)
    logits = torch.tensor([[0.0, 1.0, 5.0, 4.0]])
    for drawn, wanted in ((0, 1), (1, 1), (2, 2), (3, 2)):
        device.add(0, SamplingParams(temperature=0, min_tokens=2), prompt=[0], output=[1] * drawn, stop_ids=[2, 3])
        assert device.draw(logits, [0])[0] == [wanted], drawn


@pytest.mark.parametrize("rows", [1, 2, 128])
def test_rows_with_different_lists_share_a_step(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Each draws the same tokens as alone, however many rows have their tokens counted at a time."""
    monkeypatch.setattr(sampler, "PENALTY_ROWS", rows)
    vocab = 40
    device = Device(vocab, max_rows=8)
    lists: list[dict[str, Any]] = [
        {"allowed_token_ids": [1, 5, 9]},
        {"logit_bias": {3: 8.0, 4: -9.0}},
        {},
        {"min_tokens": 3},
        {"allowed_token_ids": [0, 7], "logit_bias": {7: -2.5, 8: 50.0}, "min_tokens": 5},
        {"logit_bias": {39: 6.0}, "presence_penalty": 1.0},
        {"min_tokens": 1},
        {"repetition_penalty": 1.8, "frequency_penalty": 0.7},
    ]
    for row, fields in enumerate(lists):
        device.add(row, SamplingParams(seed=row, **fields), prompt=[2, 3], output=[5, 7], stop_ids=[row, 7, 11])
    logits = 3 * torch.randn(len(lists), vocab, generator=torch.Generator().manual_seed(0))
    for shift in range(20):
        logits = logits.roll(shift, 1)
        alone = [device.draw(logits[row : row + 1], [row])[0][0] for row in range(len(lists))]
        for some in (range(len(lists)), [5, 7]):
            assert device.draw(logits[list(some)], some)[0] == [alone[row] for row in some]


class Waits(TorchDispatchMode):
    """Records where the host reads a value from the device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def test_nothing_waits_for_the_device() -> None:
    device = Device(40)
    everything = SamplingParams(
        seed=1, presence_penalty=1.0, logit_bias={3: 1.0}, allowed_token_ids=[1, 5, 9], min_tokens=3, bad_words=["x"]
    )
    device.add(0, everything, prompt=[2, 3], output=[5, 7], stop_ids=[5], bad_words=[[5, 7, 9], [4]])
    device.add(1, SamplingParams(temperature=0))
    for rows in ([0], [0, 1]):
        logits = torch.zeros(len(rows), 40)
        with Waits() as waits:
            device.sampler.adjust(
                logits, torch.tensor(rows), device.batch.num_tokens[rows], np.array(rows, np.int32), 4
            )
        assert waits.found == []
        assert logits[0].isfinite().nonzero().flatten().tolist() == [1]


class Only:
    """Allows one token, the one in `extra_args["only"]`; records what it was given."""

    seen: ClassVar[list[tuple[list[int], list[int]]]] = []

    def applies(self, params: SamplingParams) -> bool:
        return "only" in (params.extra_args or {})

    def apply(
        self, logits: torch.Tensor, prompt: torch.Tensor, output: torch.Tensor, params: SamplingParams
    ) -> torch.Tensor:
        self.seen.append((prompt.tolist(), output.tolist()))
        return torch.full_like(logits, -math.inf).index_fill(0, torch.tensor([params.extra_args["only"]]), 0.0)


class Breaks(Only):
    """Makes invalid logits after two good tokens."""

    def applies(self, params: SamplingParams) -> bool:
        return "break" in (params.extra_args or {})

    def apply(
        self, logits: torch.Tensor, prompt: torch.Tensor, output: torch.Tensor, params: SamplingParams
    ) -> torch.Tensor:
        return logits if len(output) < 2 else logits * math.nan


@pytest.mark.parametrize("name", ["tests.worker.test_logits.Only", Only], ids=["dotted path", "class"])
def test_a_custom_processor_changes_only_requests_that_ask_for_it(make_llm: Any, name: Any) -> None:
    Only.seen.clear()
    llm = make_llm(logits_processors=[name])
    plain, forced = llm.generate(
        ["abc", "abc"],
        [
            SamplingParams(temperature=0, max_tokens=4),
            SamplingParams(temperature=0, max_tokens=4, extra_args={"only": 70}),
        ],
        use_tqdm=False,
    )
    assert forced.outputs[0].token_ids == [70] * 4
    assert plain.outputs[0].token_ids != [70] * 4
    assert Only.seen == [(forced.prompt_token_ids, [70] * count) for count in range(4)]


def test_a_missing_custom_processor_is_refused(make_llm: Any) -> None:
    with pytest.raises(ValidationError, match="no_such_module"):
        make_llm(logits_processors=["no_such_module.Thing"])


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_invalid_logits_end_one_request_only(make_llm: Any, depth: int, temperature: float) -> None:
    llm = make_llm(logits_processors=["tests.worker.test_logits.Breaks"], pipeline_depth=depth)
    good = SamplingParams(temperature=temperature, seed=5, max_tokens=12, ignore_eos=True)
    bad = SamplingParams(temperature=temperature, seed=5, max_tokens=12, ignore_eos=True, extra_args={"break": True})
    expected = llm.generate(["abc", "hello"], good, use_tqdm=False)
    first, broken, last = llm.generate(["abc", "the world", "hello"], [good, bad, good], use_tqdm=False)
    assert broken.outputs[0].finish_reason == "error"
    assert "not numbers" in (broken.error or "")
    assert len(broken.outputs[0].token_ids) == 2
    assert [first.outputs[0].token_ids, last.outputs[0].token_ids] == [o.outputs[0].token_ids for o in expected]


@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
def test_blocks_that_held_nan_do_not_affect_later_requests(make_llm: Any, caching: bool) -> None:
    """A token whose embedding is NaN fills its request's KV with NaN; the blocks are then reused."""
    llm: LLM = make_llm(num_gpu_blocks_override=8, enable_prefix_caching=caching)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    expected = [o.outputs[0].token_ids for o in llm.generate(["abc", "hello there", "x"], params, use_tqdm=False)]
    poison = next(token for token in range(4, 100) if all(token not in tokens for tokens in expected))
    worker = llm.llm_engine.core._executor._worker  # type: ignore[attr-defined]
    embedding = worker.model.model.embed_tokens.weight
    kept_row = embedding.data[poison].clone()
    embedding.data[poison] = math.nan
    try:
        for _ in range(3):  # every block is used
            outputs = llm.generate([[poison] * 40, "abc", [5, poison, 6] * 8], params, use_tqdm=False)
            assert [o.outputs[0].finish_reason for o in outputs] == ["error", "length", "error"]
            assert outputs[1].outputs[0].token_ids == expected[0]
        outputs = llm.generate(["abc", "hello there", "x"], params, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == expected
    finally:
        embedding.data[poison] = kept_row
