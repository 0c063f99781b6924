"""A model over several processes: the same tokens as in one, and clear words when a process is lost."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.errors import ConfigError, EngineDeadError, RankLostError
from quire.executor import pulse
from quire.messages.sampling import StructuredOutputsParams
from tests.conftest import assert_idle
from tests.models.harness import random_reference
from tests.models.zoo import ZOO, _gpt2, _neox

TIGHT = {
    "dtype": "float32", "device": "cpu", "block_size": 4, "num_gpu_blocks_override": 40, "max_num_batched_tokens": 16,
    "max_num_seqs": 6, "disable_log_stats": True,
}  # fmt: skip
"""Few blocks and a small budget: prompts come in chunks, and rows make room for each other."""
BEGIN = [7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47]


@pytest.fixture(autouse=True)
def _nothing_stays_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever a test does to its ranks, no file of theirs is left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert not list(tmp_path.glob("quire-ranks-*"))


def tokens(llm: LLM, prompts: Sequence[list[int]], **params: Any) -> list[list[list[int]]]:
    """Every sample's tokens."""
    params = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, **params}
    outputs = llm.generate(list(prompts), SamplingParams(**params), use_tqdm=False)
    return [[list(sample.token_ids) for sample in output.outputs] for output in outputs]


def metric(llm: LLM, name: str) -> float:
    return next(each.value for each in llm.get_metrics() if each.name.endswith(name))  # type: ignore[union-attr]


def everything(llm: LLM) -> dict[str, Any]:
    """One run of each thing that a plan can carry."""
    crowd = [[3 + i, *BEGIN, 5 + i] for i in range(6)]
    found: dict[str, Any] = {
        "long prompts in chunks": tokens(llm, [[(5 * i + j) % 90 + 4 for j in range(50)] for i in range(2)]),
        "more rows than blocks": tokens(llm, crowd, max_tokens=30),
        "a cached beginning": tokens(llm, [BEGIN + [60 + i] for i in range(3)] * 2),
        "several samples": tokens(llm, [BEGIN], n=3, temperature=0.9, seed=5),
        "penalties and filters": tokens(
            llm, crowd[:2], temperature=1.1, seed=2, top_k=9, top_p=0.8, repetition_penalty=1.3, presence_penalty=0.4
        ),
    }
    told = llm.generate([BEGIN], SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=1))[0]
    found["log-probabilities"] = [list(position) for position in told.outputs[0].logprobs]
    found["of the prompt"] = [position and list(position) for position in told.prompt_logprobs]
    form = SamplingParams(temperature=0, max_tokens=8, structured_outputs=StructuredOutputsParams(regex="[a-f]{4}x"))
    found["a form to keep"] = llm.generate("the ", form)[0].outputs[0].text
    return found


def test_two_ranks_say_what_one_says(make_llm: Callable[..., LLM]) -> None:
    alone = everything(make_llm(**TIGHT))
    llm = make_llm(**TIGHT, tensor_parallel_size=2)
    together = everything(llm)
    assert together == alone
    assert metric(llm, "num_preemptions") > 0
    assert metric(llm, "prefix_cache_hits") > 0
    facts = llm.llm_engine.facts
    assert facts.device.startswith("2 × ")
    assert facts.kv_bytes == 2 * facts.memory.cache


def test_a_killed_rank_is_told_within_seconds(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(**TIGHT, tensor_parallel_size=2, swap_space=0.001)
    pids = llm.llm_engine.core._executor.pids
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    for i in range(3):
        llm.llm_engine.add_request(str(i), [3 + i, *BEGIN], params)
    for _ in range(5):
        llm.llm_engine.step()
    os.kill(pids[1], signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(EngineDeadError, match=rf"rank 1 of 2 \(pid {pids[1]}\) was killed by SIGKILL"):
        while True:
            llm.llm_engine.step()
    assert time.monotonic() - begin < 8
    assert not any(is_running(pid) for pid in pids)
    with pytest.raises(EngineDeadError, match="rank 1 of 2"):
        llm.llm_engine.add_request("late", BEGIN, params)
    llm.llm_engine.abort_request(["0", "1", "2"])


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_rank_that_cannot_start_says_why(tiny_model: Path) -> None:
    with pytest.raises(Exception, match="no_such_module") as caught:
        LLM(str(tiny_model), **TIGHT, tensor_parallel_size=2, logits_processors=["no_such_module.Thing"])
    assert "rank" in str(caught.value) or isinstance(caught.value, ConfigError)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"tensor_parallel_size": 3}, "4 attention heads cannot be split over 3 tensor-parallel ranks.*1, 2, 4"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be an integer of at least 1"),
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "uni"}, "'uni' is one rank"),
        ({"distributed_executor_backend": "ray"}, "must be one of uni, mp; got 'ray'"),
        ({"tensor_parallel_size": 2, "kv_disk": "somewhere"}, "kv_disk is not implemented yet"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size must be 1"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(settings: dict[str, Any], message: str, tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        LLM(str(tiny_model), **TIGHT, **settings)
    assert "\n" not in str(caught.value)


def test_one_rank_needs_no_process_of_its_own_unless_asked() -> None:
    assert not EngineConfig("m").is_multiprocess
    assert EngineConfig("m", distributed_executor_backend="mp").is_multiprocess
    assert EngineConfig("m", tensor_parallel_size=4).is_multiprocess


MODELS = {
    **{name: ZOO[name] for name in ("qwen2", "qwen3", "llama-mqa", "llama-biases", "mistral-window", "mixtral")},
    **{name: ZOO[name] for name in ("qwen2-moe", "qwen3-moe")},
    "gpt2": _gpt2(n_head=4),
    "gpt-neox": _neox(num_attention_heads=4),
}
IN_CI = ("gpt2", "qwen3")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_CI else pytest.mark.slow) for name in MODELS]
)
def test_architectures_over_two_ranks(name: str, tmp_path: Path, make_llm: Callable[..., LLM]) -> None:
    folder = tmp_path / name
    random_reference(MODELS[name]).save_pretrained(folder)
    prompts = [[(7 * i + 3 * j) % 97 for j in range(20 + 5 * i)] for i in range(4)]
    settings = {**TIGHT, "skip_tokenizer_init": True, "swap_space": 0.001}
    alone = tokens(make_llm(folder, **settings), prompts)
    assert tokens(make_llm(folder, **settings, tensor_parallel_size=2), prompts) == alone
