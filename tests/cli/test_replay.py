"""`--record FILE` and `quire replay FILE`: rerun recorded plans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire import LLM, SamplingParams
from quire.cli.main import main
from quire.errors import ConfigError
from quire.executor.recording import Comparison, Recording
from quire.messages.plan import StepPlan, StepResult

PROMPTS = [{"prompt_token_ids": [1 + (7 * i + j) % 90 for j in range(3 + 5 * i)]} for i in range(6)]


def generate(model: Path, **settings: Any) -> list[list[int]]:
    """Greedy and sampled requests, several sequences of one prompt, chunked prompts, and a prefix hit."""
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=12, n=1 + i % 2, ignore_eos=True) for i in range(6)]
    with LLM(str(model), kv_cache_memory_bytes=1 << 20, **settings) as llm:
        outputs = llm.generate([*PROMPTS, PROMPTS[-1]], [*params, params[0]], use_tqdm=False)
    return [list(sequence.token_ids) for output in outputs for sequence in output.outputs]


@pytest.fixture(scope="module")
def recorded(byte_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("recorded") / "run.quire"
    generate(byte_llama, record=str(file), hf_token="secret-token", max_num_batched_tokens=16, max_num_seqs=4)
    return file


@pytest.mark.parametrize("flags", [[], ["--enforce-eager"], ["--attention-backend", "torch"]])
def test_a_replay_samples_the_recorded_tokens(recorded: Path, capsys: Any, flags: list[str]) -> None:
    assert main(["replay", str(recorded), *flags]) == 0
    error = capsys.readouterr().err
    assert f"{12 * 10} tokens compared, 0 requests diverge" in error
    assert "decode steps" in error


def test_recording_changes_no_token(byte_llama: Path, tmp_path: Path) -> None:
    assert generate(byte_llama, record=str(tmp_path / "run")) == generate(byte_llama)


def test_other_weights_diverge(recorded: Path, capsys: Any) -> None:
    assert main(["replay", str(recorded), "--load-format", "dummy"]) == 1
    error = capsys.readouterr().err
    assert "requests diverge" in error
    assert "recorded token" in error


def test_steps_are_listed_and_one_is_shown_in_full(recorded: Path, capsys: Any) -> None:
    plans = list(Recording(recorded).plans())
    assert main(["replay", str(recorded), "--show"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [int(line.split()[0]) for line in lines[1:]] == [plan.step for plan in plans]
    assert main(["replay", str(recorded), "--step", str(plans[1].step)]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["rows"] == plans[1].rows.tolist()
    assert shown["step"] == plans[1].step
    assert main(["replay", str(recorded), "--step", "99999"]) == 2


def test_masks_of_grammars_are_recorded(byte_llama: Path, tmp_path: Path, capsys: Any) -> None:
    from quire.messages.structured import StructuredOutputsParams

    file = tmp_path / "masked"
    params = SamplingParams(temperature=0, max_tokens=8, structured_outputs=StructuredOutputsParams(regex="[ab]{6}"))
    with LLM(str(byte_llama), record=str(file), kv_cache_memory_bytes=1 << 20) as llm:
        text = llm.generate("x", params, use_tqdm=False)[0].outputs[0].text
    assert set(text) <= {"a", "b"}
    assert main(["replay", str(file)]) == 0
    assert "0 requests diverge" in capsys.readouterr().err


def test_no_secret_is_written(recorded: Path) -> None:
    assert b"secret-token" not in recorded.read_bytes()


def test_a_truncated_recording_is_replayed_up_to_its_end(recorded: Path, tmp_path: Path) -> None:
    whole = recorded.read_bytes()
    (tmp_path / "cut").write_bytes(whole[: len(whole) - 7])
    assert len(list(Recording(tmp_path / "cut").messages())) == len(list(Recording(recorded).messages())) - 1


def test_a_file_that_is_not_a_recording_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        Recording(tmp_path / "missing")
    for content in (b"", b"\0\0\0\0", b"hello, world, this is a text"):
        (tmp_path / "other").write_bytes(content)
        with pytest.raises(ConfigError, match="not a recording"):
            Recording(tmp_path / "other")


def test_a_restarted_engine_keeps_the_recording_of_the_last_one(byte_llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "run"
    runs = []
    for prompt in ("a", "a longer prompt"):
        with LLM(str(byte_llama), record=str(file), kv_cache_memory_bytes=1 << 20) as llm:
            llm.generate(prompt, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True), use_tqdm=False)
        runs.append([plan.tokens.tolist() for plan in Recording(file).plans()])
    assert runs[0] != runs[1]
    assert [plan.tokens.tolist() for plan in Recording(tmp_path / "run.old").plans()] == runs[0]


def test_an_unwritable_recording_is_an_error(byte_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write the recording"):
        LLM(str(byte_llama), record=str(tmp_path / "no" / "folder"), kv_cache_memory_bytes=1 << 20)


def test_several_replicas_are_refused(byte_llama: Path) -> None:
    with pytest.raises(ConfigError, match="data_parallel_size"):
        LLM(str(byte_llama), record="x", data_parallel_size=2)


def test_a_request_that_diverged_is_not_counted_again(recorded: Path) -> None:
    comparison = Comparison()
    sequences = 0
    for message in Recording(recorded).messages():
        if isinstance(message, StepPlan):
            comparison.note(message)
            sequences += len(message.add) + len(message.forks)
        elif isinstance(message, StepResult):
            comparison.compare(message, msgspec.structs.replace(message, tokens=message.tokens + 1))
    assert len(comparison.divergences) == comparison.compared == sequences == 10
