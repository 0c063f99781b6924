"""`AsyncLLM`: the engine in its own process, what readers get, and what happens when either process ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

import pytest

from quire import LLM, AsyncLLM, EngineConfig, RequestOutput, RequestOutputKind, SamplingParams, StructuredOutputsParams
from quire.engine.remote import RemoteEngine
from quire.errors import (
    CacheTooSmallError,
    ConfigError,
    EngineDeadError,
    ModelNotFoundError,
    QuireError,
    ValidationError,
)
from tests.processes import is_gone

T = TypeVar("T")
SETTINGS: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 128, "device": "cpu"}
ROOT = Path(__file__).parents[2]


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 20, "ignore_eos": True, **fields})


def run(work: Awaitable[T]) -> T:
    """Run in a new event loop: an `AsyncLLM` survives loops."""

    async def bounded() -> T:
        return await asyncio.wait_for(work, 60)

    return asyncio.run(bounded())


async def collect(llm: AsyncLLM, prompt: Any, asked: SamplingParams | None = None, **more: Any) -> list[RequestOutput]:
    return [output async for output in llm.generate(prompt, asked or params(), **more)]


async def final(llm: AsyncLLM, prompt: Any, asked: SamplingParams | None = None, **more: Any) -> RequestOutput:
    return (await collect(llm, prompt, asked, **more))[-1]


async def metric(llm: AsyncLLM, name: str) -> float:
    return next(metric.value for metric in await llm.get_metrics() if metric.name == f"quire:{name}")


async def assert_idle(llm: AsyncLLM) -> None:
    assert llm.num_open_requests == 0
    for name in ("num_requests_running", "num_requests_waiting", "num_blocks_used"):
        assert await metric(llm, name) == 0, name
    assert (await llm.report_health()).unfinished == 0


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def pid_of(llm: AsyncLLM) -> int:
    return llm.replicas[0].pid


@pytest.fixture(scope="module")
def shared(tiny_model: Path) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(tiny_model, **SETTINGS)
    yield llm
    pid = pid_of(llm)
    llm.shutdown()
    assert is_gone(pid)


@pytest.fixture
def allm(shared: AsyncLLM) -> Iterator[AsyncLLM]:
    """Shared by tests that do not change it; checked to be idle after each."""
    run(shared.reset_prefix_cache())
    yield shared
    run(assert_idle(shared))


class TestGenerating:
    def test_the_tokens_are_those_of_the_engine_in_process(self, allm: AsyncLLM, llm: LLM) -> None:
        prompts: list[Any] = ["abc", "the world", [5, 6, 7], {"prompt_token_ids": [9, 8], "cache_salt": "s"}, "x " * 60]
        asked = params(logprobs=2, prompt_logprobs=1)
        expected = llm.generate(prompts, asked, use_tqdm=False)

        async def all_of_them() -> list[RequestOutput]:
            return await asyncio.gather(*(final(allm, prompt, asked) for prompt in prompts))

        for ours, theirs in zip(run(all_of_them()), expected, strict=True):
            assert ours.outputs == theirs.outputs
            assert ours.prompt == theirs.prompt
            assert ours.prompt_token_ids == theirs.prompt_token_ids
            assert ours.prompt_logprobs == theirs.prompt_logprobs

    def test_seeded_sequences_are_the_same_too(self, allm: AsyncLLM, llm: LLM) -> None:
        asked = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=20, logit_bias={40: 2})
        (expected,) = llm.generate("hello", asked, use_tqdm=False)
        assert run(final(allm, "hello", asked)).outputs == expected.outputs

    def test_none_means_the_models_own_parameters(self, allm: AsyncLLM) -> None:
        assert allm.get_default_sampling_params().top_k == 40

        async def one() -> RequestOutput:
            return [output async for output in allm.generate("abc")][-1]

        assert 1 <= len(run(one()).outputs[0].token_ids) <= 7

    def test_fifty_at_once(self, allm: AsyncLLM, llm: LLM) -> None:
        prompts = [f"{i} the world"[: 3 + i % 9] for i in range(50)]
        expected = [output.outputs[0].text for output in llm.generate(prompts, params(), use_tqdm=False)]

        async def all_of_them() -> list[RequestOutput]:
            return await asyncio.gather(*(final(allm, p, request_id=f"r{i}") for i, p in enumerate(prompts)))

        outputs = run(all_of_them())
        assert [output.outputs[0].text for output in outputs] == expected
        assert [output.request_id for output in outputs] == [f"r{i}" for i in range(50)]

    def test_a_long_prompt_is_prepared_in_a_thread(self, tiny_model: Path) -> None:
        async def work() -> None:
            async with AsyncLLM(tiny_model, **SETTINGS) as llm:
                asked = params(truncate_prompt_tokens=100, max_tokens=3)
                endless = params(truncate_prompt_tokens=100, max_tokens=150)
                task = asyncio.ensure_future(collect(llm, "x the " * 20000, endless, request_id="long"))
                await asyncio.sleep(0)
                await llm.abort("long")  # before it has even been sent
                assert (await task)[-1].outputs[0].finish_reason == "abort"
                assert len((await final(llm, "x the " * 2000, asked)).outputs[0].token_ids) == 3
                await assert_idle(llm)

        run(work())

    def test_a_prefix_is_cached(self, allm: AsyncLLM) -> None:
        async def twice() -> tuple[int | None, int | None]:
            first = await final(allm, list(range(4, 60)))
            return first.num_cached_tokens, (await final(allm, list(range(4, 60)))).num_cached_tokens

        assert run(twice()) == (0, 48)

    def test_the_tokenizer(self, allm: AsyncLLM) -> None:
        assert run(allm.get_tokenizer()).decode(run(final(allm, "abc")).prompt_token_ids) == "abc"


class TestStreaming:
    def test_cumulative_outputs_grow_to_the_final_one(self, allm: AsyncLLM, llm: LLM) -> None:
        (expected,) = llm.generate("abc", params(), use_tqdm=False)
        outputs = run(collect(allm, "abc"))
        counts = [len(output.outputs[0].token_ids) for output in outputs]
        assert counts == sorted(set(counts)) and counts[-1] == 20
        assert all(expected.outputs[0].text.startswith(output.outputs[0].text) for output in outputs)
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]

    @pytest.mark.parametrize("pause", [0, 0.02], ids=["quick reader", "slow reader"])
    def test_deltas_add_up_to_the_whole(self, allm: AsyncLLM, llm: LLM, pause: float) -> None:
        fields: dict[str, Any] = {"logprobs": 1, "prompt_logprobs": 1, "n": 2, "temperature": 1.0, "seed": 3}
        (expected,) = llm.generate("abc", params(max_tokens=60, **fields), use_tqdm=False)

        async def read() -> list[RequestOutput]:
            parts = []
            asked = params(output_kind=RequestOutputKind.DELTA, max_tokens=60, **fields)
            async for output in allm.generate("abc", asked):
                parts.append(output)
                await asyncio.sleep(pause)
            return parts

        parts = run(read())
        if pause:
            assert len(parts) < 60  # unread outputs were merged
        for whole in expected.outputs:
            mine = [part.outputs[whole.index] for part in parts]
            assert "".join(part.text for part in mine) == whole.text
            assert [token for part in mine for token in part.token_ids] == whole.token_ids
            assert [entry for part in mine for entry in part.logprobs or []] == whole.logprobs
        assert [part.prompt_logprobs for part in parts if part.prompt_logprobs] == [expected.prompt_logprobs]

    def test_final_only_gives_one(self, allm: AsyncLLM) -> None:
        (only,) = run(collect(allm, "abc", params(output_kind=RequestOutputKind.FINAL_ONLY)))
        assert only.finished and len(only.outputs[0].token_ids) == 20

    def test_a_stop_string_ends_it_in_both_processes(self, allm: AsyncLLM, llm: LLM) -> None:
        text = llm.generate("abc", params(max_tokens=30), use_tqdm=False)[0].outputs[0].text
        stop = text[6:9]
        output = run(final(allm, "abc", params(max_tokens=200, stop=[stop]))).outputs[0]
        assert output.text == text[: text.index(stop)]
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)


class TestLeaving:
    @pytest.mark.parametrize("how", ["cancel", "close", "break"])
    def test_leaving_frees_the_blocks_within_a_step(self, allm: AsyncLLM, how: str) -> None:
        async def work() -> None:
            stream = allm.generate("abc", params(max_tokens=200))
            if how == "cancel":
                started = asyncio.Event()

                async def read() -> None:
                    async for _ in stream:
                        started.set()

                task = asyncio.ensure_future(read())
                await started.wait()
                assert await metric(allm, "num_blocks_used") > 0
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            elif how == "close":
                await anext(stream)
                assert await metric(allm, "num_blocks_used") > 0
                await stream.aclose()
            else:
                async with aclosing(stream):
                    async for _ in stream:
                        break
            # The call is read after the abort and before the next step.
            assert await metric(allm, "num_blocks_used") == 0

        run(work())

    def test_an_id_can_be_used_again_at_once(self, allm: AsyncLLM, llm: LLM) -> None:
        (expected,) = llm.generate("the world", params(), use_tqdm=False)

        async def work() -> RequestOutput:
            for _ in range(20):
                stream = allm.generate("abc", params(max_tokens=200), request_id="same")
                await anext(stream)
                await stream.aclose()
            return await final(allm, "the world", request_id="same")

        output = run(work())
        assert output.request_id == "same"
        assert output.outputs == expected.outputs

    def test_abort_ends_the_stream(self, allm: AsyncLLM) -> None:
        async def work() -> list[RequestOutput]:
            outputs = []
            async for output in allm.generate("abc", params(max_tokens=250), request_id="mine"):
                outputs.append(output)
                await allm.abort(["mine", "unknown"])
            return outputs

        outputs = run(work())
        assert outputs[-1].finished and outputs[-1].outputs[0].finish_reason == "abort"
        assert len(outputs[-1].outputs[0].token_ids) < 250


class TestRefusals:
    @pytest.mark.parametrize("prompt", ["", [], [5, 500], 7, {"text": "abc"}, [1] * 256], ids=repr)
    def test_a_bad_prompt_never_reaches_the_engine(self, allm: AsyncLLM, prompt: Any) -> None:
        async def work() -> None:
            with pytest.raises(ValidationError):
                await collect(allm, prompt)

        run(work())

    def test_an_id_in_use(self, allm: AsyncLLM) -> None:
        async def work() -> None:
            stream = allm.generate("abc", params(max_tokens=100), request_id="a")
            await anext(stream)
            with pytest.raises(ValidationError, match="in use"):
                await collect(allm, "abc", request_id="a")
            assert len([output async for output in stream]) > 0

        run(work())

    def test_a_request_that_cannot_be_encoded_fails_alone(self, allm: AsyncLLM) -> None:
        async def work() -> None:
            with pytest.raises(ValidationError, match="cannot be sent"):
                await collect(allm, "abc", params(extra_args={"x": object()}))
            with pytest.raises(ValidationError, match="bool"):
                await collect(allm, "abc", params(detokenize=1))  # found by the engine's process, which continues
            assert (await final(allm, "abc")).finished

        run(work())

    def test_a_request_the_engine_refuses_fails_alone(self, tiny_model: Path) -> None:
        settings = {**SETTINGS, "num_gpu_blocks_override": 8, "max_model_len": 256}

        async def work() -> None:
            async with AsyncLLM(tiny_model, **settings) as llm:
                good = asyncio.ensure_future(final(llm, "abc", params(max_tokens=60)))
                with pytest.raises(CacheTooSmallError, match="KV cache has"):
                    await collect(llm, "abc", params(max_tokens=240))
                assert len((await good).outputs[0].token_ids) == 60
                await assert_idle(llm)

        run(work())

    def test_a_refusal_after_the_request_was_sent_names_its_field(self, allm: AsyncLLM) -> None:
        form = StructuredOutputsParams(grammar="root ::= missing")
        with pytest.raises(ValidationError, match="structured_outputs: ") as caught:
            run(collect(allm, "abc", params(structured_outputs=form)))
        assert caught.value.parameter == "structured_outputs"

    def test_errors_of_the_start_are_those_of_llm(self, tiny_model: Path, tmp_path: Path) -> None:
        with pytest.raises(ModelNotFoundError):
            AsyncLLM(tmp_path)
        with pytest.raises(ConfigError, match="did you mean"):
            AsyncLLM(tiny_model, blocksize=3)
        with pytest.raises(ConfigError, match="max_model_len"):  # known only when the engine is ready
            AsyncLLM(tiny_model, **SETTINGS, max_model_len=100000)
        with pytest.raises(ConfigError, match="dotted path"):
            AsyncLLM(tiny_model, **SETTINGS, logits_processors=[type("Local", (), {"__qualname__": "f.Local"})])


class TestProcesses:
    def test_a_healthy_engine_reports_it(self, allm: AsyncLLM) -> None:
        async def work() -> None:
            await allm.check_health()
            assert allm.is_running and not allm.errored

        run(work())

    def test_an_idle_engine_uses_no_processor(self, allm: AsyncLLM) -> None:
        def used() -> int:
            fields = Path(f"/proc/{pid_of(allm)}/stat").read_text().rpartition(")")[2].split()
            return int(fields[11]) + int(fields[12])

        run(final(allm, "abc"))
        time.sleep(0.2)
        before = used()
        time.sleep(1.0)
        assert used() - before <= 1  # in hundredths of a second
        begin = time.monotonic()
        run(final(allm, "abc", params(max_tokens=1)))
        assert time.monotonic() - begin < 1.0

    def test_a_killed_engine_fails_its_requests_and_can_be_restarted(self, tiny_model: Path) -> None:
        async def work() -> None:
            config = EngineConfig(model=str(tiny_model), **SETTINGS, max_engine_restarts=0)
            async with AsyncLLM.from_config(config) as llm:
                expected = await final(llm, "abc")
                streams = [llm.generate("abc", params(max_tokens=250)) for _ in range(5)]
                for stream in streams:
                    await anext(stream)
                first = pid_of(llm)
                os.kill(first, signal.SIGKILL)
                begin = time.monotonic()
                for stream in streams:
                    with pytest.raises(EngineDeadError, match=f"{first}.*SIGKILL"):
                        async for _ in stream:
                            pass
                assert time.monotonic() - begin < 2
                for refused in (final(llm, "abc"), llm.check_health(), llm.get_metrics()):
                    with pytest.raises(EngineDeadError, match="SIGKILL"):
                        await refused
                assert llm.errored and "SIGKILL" in str(llm.dead_error)
                await llm.restart()
                assert pid_of(llm) != first and llm.is_running
                assert (await final(llm, "abc")).outputs == expected.outputs
                await assert_idle(llm)
                last = pid_of(llm)
            assert is_gone(first) and is_gone(last)
            with pytest.raises(EngineDeadError, match="shut down"):
                await final(llm, "abc")

        run(work())

    def test_a_loop_that_fails_reports_why(self, tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
        async def work() -> None:
            with caplog.at_level("INFO", "quire"):
                policy = "tests.api.failing_policy.FailingPolicy"
                llm = AsyncLLM(tiny_model, **SETTINGS, scheduling_policy=policy, max_engine_restarts=0)
            assert "ready in" in caplog.text  # its log lines are relayed
            async with llm:
                assert (await final(llm, "abc", priority=5)).finished
                with pytest.raises(QuireError, match="failed to accept the request: KeyError") as caught:
                    await final(llm, "abc", priority=14)
                assert not isinstance(caught.value, EngineDeadError)
                await assert_idle(llm)
                good = llm.generate("abc", params(max_tokens=250))
                await anext(good)
                for stream in (llm.generate("abc", priority=13), good):
                    with pytest.raises(EngineDeadError, match="ZeroDivisionError: a mistake"):
                        async for _ in stream:
                            pass
                assert "failing_policy.py" in caplog.text  # with the traceback
                await llm.restart()
                assert (await final(llm, "abc")).finished
            assert is_gone(pid_of(llm))

        run(work())

    def test_an_engine_that_dies_while_starting(self, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        wait = RemoteEngine.wait_until_ready
        pids = []

        def kill_first(engine: RemoteEngine) -> None:
            pids.append(engine.pid)
            os.kill(engine.pid, signal.SIGKILL)
            wait(engine)

        monkeypatch.setattr(RemoteEngine, "wait_until_ready", kill_first)
        with pytest.raises(EngineDeadError, match="SIGKILL.*before it was ready"):
            AsyncLLM(tiny_model, **SETTINGS)
        assert is_gone(pids[0])

    @pytest.mark.parametrize("restarts", [0, 1])
    def test_an_engine_that_died_between_event_loops_is_noticed(self, tiny_model: Path, restarts: int) -> None:
        llm = AsyncLLM(tiny_model, **SETTINGS, max_engine_restarts=restarts)
        before = run(final(llm, "abc"))
        os.kill(pid_of(llm), signal.SIGKILL)
        if restarts:
            assert run(final(llm, "abc")).outputs == before.outputs
        else:
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                run(final(llm, "abc"))
        llm.shutdown()
        llm.shutdown()

    def test_shutdown_fails_what_is_open(self, tiny_model: Path) -> None:
        async def work() -> int:
            llm = AsyncLLM(tiny_model, **SETTINGS)
            stream = llm.generate("abc", params(max_tokens=250))
            await anext(stream)
            llm.shutdown()
            with pytest.raises(EngineDeadError, match="shut down"):
                async for _ in stream:
                    pass
            with pytest.raises(EngineDeadError, match="shut down"):
                await llm.restart()
            return pid_of(llm)

        assert is_gone(run(work()))

    SCRIPT = """
import asyncio, sys, time
from quire import AsyncLLM, SamplingParams

llm = AsyncLLM(sys.argv[1], dtype="float32", num_gpu_blocks_override=128, device="cpu")

async def work():
    async for output in llm.generate("abc", SamplingParams(temperature=0, max_tokens=5)):
        pass
    print(llm.replicas[0].pid, output.outputs[0].token_ids, flush=True)

asyncio.run(work())
"""

    def start_script(self, tmp_path: Path, tiny_model: Path, more: str = "") -> subprocess.Popen[str]:
        script = tmp_path / "script.py"
        script.write_text(self.SCRIPT + more)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, str(script), str(tiny_model)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=tmp_path)

    def test_a_script_without_a_main_guard(self, tmp_path: Path, tiny_model: Path, llm: LLM) -> None:
        (expected,) = llm.generate("abc", params(max_tokens=5), use_tqdm=False)
        process = self.start_script(tmp_path, tiny_model)
        said, _ = process.communicate(timeout=60)
        pid, _, tokens = said.strip().partition(" ")
        assert process.returncode == 0
        assert tokens == str(expected.outputs[0].token_ids)
        assert wait_until(lambda: is_gone(int(pid)))  # without a call of shutdown

    def test_a_killed_front_leaves_no_engine_behind(self, tmp_path: Path, tiny_model: Path) -> None:
        process = self.start_script(tmp_path, tiny_model, "time.sleep(60)\n")
        assert process.stdout is not None
        pid = int(process.stdout.readline().split()[0])
        assert not is_gone(pid)
        process.kill()
        process.communicate()
        assert wait_until(lambda: is_gone(pid))

    def test_a_front_killed_while_the_engine_starts_leaves_none_behind(self, tmp_path: Path, tiny_model: Path) -> None:
        report = "from quire.engine.remote import RemoteEngine\nwait = RemoteEngine.wait_until_ready\n"
        report += "RemoteEngine.wait_until_ready = lambda self: (print(self.pid, flush=True), wait(self))\n"
        script = tmp_path / "script.py"
        script.write_text(report + self.SCRIPT)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, str(script), str(tiny_model)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.kill()
        process.communicate()
        assert wait_until(lambda: is_gone(pid))

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_the_engine_ignores_signals_that_the_front_handles(self, allm: AsyncLLM, number: signal.Signals) -> None:
        os.kill(pid_of(allm), number)
        assert run(final(allm, "abc")).finished
