"""`in_process`: the engine in a thread of the caller's process. What readers get, how it ends, what is refused."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, AsyncLLM, EngineConfig, RequestOutput, SamplingParams, StructuredOutputsParams
from quire.errors import ConfigError, EngineDeadError, ModelNotFoundError, ValidationError
from quire.server.config import ServerConfig
from quire.server.serve import check_modules
from tests.conftest import write_tiny_model
from tests.server.served import Served

SETTINGS: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 128, "device": "cpu", "in_process": True}
ROOT = Path(__file__).parents[2]


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 20, "ignore_eos": True, **fields})


async def final(llm: AsyncLLM, prompt: Any, asked: SamplingParams | None = None, **more: Any) -> RequestOutput:
    outputs: AsyncIterator[RequestOutput] = llm.generate(prompt, asked or params(), **more)
    return [output async for output in outputs][-1]


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


@pytest.fixture
def allm(tiny_model: Path) -> Iterator[AsyncLLM]:
    made = AsyncLLM(tiny_model, **SETTINGS, scheduling_policy="tests.api.failing_policy.FailingPolicy")
    yield made
    made.shutdown()
    assert "quire-engine" not in threads()


def test_the_tokens_are_those_of_the_engine(allm: AsyncLLM, llm: LLM) -> None:
    assert "quire-engine" in threads()
    prompts: list[Any] = ["abc", "the world", [5, 6, 7], "x " * 60]
    asked = params(logprobs=2, prompt_logprobs=1)
    expected = llm.generate(prompts, asked, use_tqdm=False)

    async def all_of_them() -> list[RequestOutput]:
        return await asyncio.gather(*(final(allm, prompt, asked) for prompt in prompts))

    for _ in range(2):  # it survives event loops
        for ours, theirs in zip(asyncio.run(all_of_them()), expected, strict=True):
            assert ours.outputs == theirs.outputs
            assert ours.prompt_logprobs == theirs.prompt_logprobs


def test_grammars_sessions_and_refusals_work_as_in_a_process(allm: AsyncLLM) -> None:
    async def work() -> None:
        grammar = StructuredOutputsParams(regex="[ab]{4}")
        answer = await final(allm, "abc", params(structured_outputs=grammar, ignore_eos=False))
        assert re.fullmatch("[ab]{4}", answer.outputs[0].text)
        session = await allm.sessions.create("s")
        await session.append("the world")
        assert len((await session.generate(params(max_tokens=4))).outputs[0].token_ids) == 4
        await allm.sessions.delete("s")
        with pytest.raises(ValidationError):
            await final(allm, [10**9])

    asyncio.run(work())


def test_a_loop_that_fails_is_replaced_and_other_requests_go_on(allm: AsyncLLM) -> None:
    async def work() -> None:
        before = (await final(allm, "abc")).outputs
        other = asyncio.ensure_future(final(allm, "abc"))
        died = await final(allm, "abc", priority=13)  # whatever engine takes it, so it is given up in the end
        assert died.outputs[0].finish_reason == "error"
        assert (await other).outputs == before
        assert (await final(allm, "abc")).outputs == before
        assert threads().count("quire-engine") == 1

    asyncio.run(work())


def test_without_restarts_it_fails_and_can_be_restarted(tiny_model: Path) -> None:
    settings = {**SETTINGS, "max_engine_restarts": 0, "scheduling_policy": "tests.api.failing_policy.FailingPolicy"}

    async def work() -> None:
        async with AsyncLLM(tiny_model, **settings) as allm:
            with pytest.raises(EngineDeadError, match="its loop failed: ZeroDivisionError: a mistake"):
                await final(allm, "abc", priority=13)
                await final(allm, "abc")
            await allm.restart(only_if_dead=True)
            assert len((await final(allm, "abc")).outputs[0].token_ids) == 20

    asyncio.run(work())


def test_an_engine_that_cannot_start_says_why(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    with pytest.raises(ConfigError, match="max_model_len"):
        AsyncLLM(folder, **SETTINGS, max_model_len=100_000)
    with pytest.raises(ModelNotFoundError):
        AsyncLLM(tmp_path / "none", **SETTINGS)
    deadline = time.monotonic() + 30
    while "quire-engine" in threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "quire-engine" not in threads()


def test_a_step_that_hangs_ends_the_process(tiny_model: Path) -> None:
    code = f"""
import asyncio
from quire import AsyncLLM, SamplingParams
from quire.engine import remote
remote.STOP_SECONDS = 0.5
llm = AsyncLLM({str(tiny_model)!r}, **{SETTINGS!r}, scheduling_policy="tests.api.hanging_policy.HangingPolicy")
async def work():
    task = asyncio.ensure_future(anext(llm.generate("abc", SamplingParams())))
    await asyncio.sleep(0.3)
asyncio.run(work())
llm.shutdown()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=90)
    assert done.returncode == 1
    assert "the engine's thread has not ended" in done.stderr


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"data_parallel_size": 2}, "data_parallel_size is 2"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2"),
        ({"distributed_executor_backend": "mp"}, "distributed_executor_backend is 'mp'"),
        ({"model_impl": "transformers"}, "model_impl is 'transformers'"),
    ],
)
def test_what_needs_more_processes_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=f"in_process.*{words}"):
        EngineConfig(in_process=True, **settings)


def test_several_fronts_are_refused() -> None:
    with pytest.raises(ConfigError, match="api_server_count is 2"):
        check_modules(EngineConfig(in_process=True), ServerConfig(api_server_count=2))


def test_the_server_is_one_process(tiny_model: Path) -> None:
    server = Served([str(tiny_model), "--in-process", "--port", "0", "--device", "cpu"])
    try:
        url = server.wait_for(r"(http://\S+)/v1")[1]
        with urllib.request.urlopen(f"{url}/health", timeout=30) as answer:
            assert answer.status == 200
        assert server.children == []
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0
    finally:
        server.process.kill()
        server.process.wait()
