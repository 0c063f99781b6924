"""`AsyncLLM.sessions`: sessions of an engine in another process."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from quire import LLM, AsyncLLM, SamplingParams
from quire.errors import EngineDeadError, SessionBusyError, SessionExistsError, SessionNotFoundError, ValidationError

T = TypeVar("T")
BEGIN, MORE = "hello the world one two three four five six", " and more"
SETTINGS: dict[str, Any] = {
    "dtype": "float32", "num_gpu_blocks_override": 128, "device": "cpu", "swap_space": 0.02,
    "session_idle_seconds": 0.2,
}  # fmt: skip


def greedy(**more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "ignore_eos": True, "max_tokens": 20, **more})


def run(work: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        return await asyncio.wait_for(work, 60)

    return asyncio.run(bounded())


@pytest.fixture(scope="module")
def shared(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(tiny_model, **SETTINGS, kv_disk=str(tmp_path_factory.mktemp("kv")))
    yield llm
    llm.shutdown()


@pytest.fixture
def allm(shared: AsyncLLM) -> Iterator[AsyncLLM]:
    """Shared by all tests; none of them leaves a session behind."""
    yield shared

    async def forget() -> None:
        for name in [info.name async for info in shared.sessions]:
            await shared.sessions.delete(name)
        used = {metric.name: metric.value for metric in await shared.get_metrics()}
        assert used["quire:num_blocks_used"] == 0

    run(forget())


@pytest.fixture(scope="module")
def expected(shared_tiny: LLM) -> list[int]:
    tokens = shared_tiny.get_tokenizer().encode(BEGIN)
    for text in ("", MORE):
        tokens = tokens + shared_tiny.get_tokenizer().encode(text, add_special_tokens=False)
        out = shared_tiny.generate({"prompt_token_ids": tokens}, greedy(), use_tqdm=False)[0]
        tokens = [*tokens, *out.outputs[0].token_ids]
    return tokens


def test_turns_suspend_and_resume(allm: AsyncLLM, expected: list[int]) -> None:
    async def work() -> None:
        s = await allm.sessions.create("s")
        await s.append(BEGIN)
        await s.generate(greedy())
        asleep = await s.suspend()
        assert (asleep.phase, asleep.kv_tokens) == ("asleep", asleep.num_tokens - 1)
        await allm.reset_prefix_cache()
        t = await (await allm.sessions.resume("s")).fork("t")
        await t.append(MORE)
        out = await t.generate(greedy())
        assert out.num_cached_tokens == asleep.kv_tokens
        assert await t.tokens() == expected
        assert await s.tokens() == expected[: asleep.num_tokens]

    run(work())


def test_an_idle_engine_suspends_idle_sessions_and_deletes_expired_ones(allm: AsyncLLM) -> None:
    async def work() -> None:
        s = await allm.sessions.create("s", BEGIN)
        await s.generate(greedy())
        await allm.sessions.create("t", ttl=1.0)
        assert (await s.info()).phase == "idle"
        await asyncio.sleep(2.5)  # no calls meanwhile
        assert (await s.info()).phase == "asleep"
        assert not await allm.sessions.exists("t")

    run(work())


def test_a_prompt_that_is_the_whole_conversation(allm: AsyncLLM, expected: list[int]) -> None:
    async def work() -> None:
        first = [out async for out in allm.generate(BEGIN, greedy(), session="s")][-1]
        s = await allm.sessions.get("s")
        tokens = await s.tokens()
        assert tokens == [*first.prompt_token_ids, *first.outputs[0].token_ids] == expected[: len(tokens)]
        tokenizer = await allm.get_tokenizer()
        prompt = {"prompt_token_ids": [*tokens, *tokenizer.encode(MORE, add_special_tokens=False)]}
        second = [out async for out in allm.generate(prompt, greedy(), session_id="s")][-1]  # type: ignore[arg-type]
        assert await s.tokens() == expected
        assert second.num_cached_tokens == len(tokens) - 1
        with pytest.raises(ValidationError, match="one sequence"):
            [out async for out in allm.generate("other", greedy(n=2, temperature=1), session="s")]
        assert await s.tokens() == expected, "what is refused changes nothing"

    run(work())


def test_a_stop_string_ends_what_the_session_keeps(allm: AsyncLLM, expected: list[int]) -> None:
    async def work() -> None:
        tokenizer = await allm.get_tokenizer()
        length = len(tokenizer.encode(BEGIN))
        text = tokenizer.decode(expected[length : length + 6], skip_special_tokens=True)
        for i, stop in enumerate(text):
            s = await allm.sessions.create(f"s{i}", BEGIN)
            out = await s.generate(greedy(stop=[stop]))
            assert out.outputs[0].finish_reason == "stop"
            assert await s.tokens() == expected[: length + len(out.outputs[0].token_ids)]

    run(work())


def test_a_turn_that_is_left_changes_nothing(allm: AsyncLLM) -> None:
    async def work() -> None:
        s = await allm.sessions.create("s", BEGIN)
        before = await s.tokens()
        stream = s.stream(greedy(max_tokens=150))
        await stream.__anext__()
        for refused in (s.append("x"), s.generate(greedy()), s.delete()):
            with pytest.raises(SessionBusyError):
                await refused
        await stream.aclose()
        assert await s.tokens() == before and (await s.info()).phase == "idle"

    run(work())


def test_errors_are_those_of_the_sync_api(allm: AsyncLLM) -> None:
    async def work() -> None:
        sessions = allm.sessions
        await sessions.create("s")
        for kind, wrong in (
            (SessionExistsError, sessions.create("s")),
            (SessionNotFoundError, sessions.resume("t")),
            (SessionNotFoundError, sessions.of("somebody").get("s")),
            (ValidationError, sessions.create("a/b")),
            (ValidationError, sessions.create("t", ttl=-1)),
            (ValidationError, sessions.create("t", meta={"a": 1})),  # type: ignore[dict-item]
            (ValidationError, sessions.create("t", [10**9])),
            (ValidationError, sessions.import_(b"no file")),
        ):
            with pytest.raises(kind):
                await wrong
        assert await sessions.count() == 1

    run(work())


def test_the_error_of_a_full_session_names_remedies(allm: AsyncLLM) -> None:
    async def work() -> None:
        full = await allm.sessions.create("full", prompt=[5] * 250)
        await full.generate(greedy(max_tokens=100))
        with pytest.raises(ValidationError, match="256 tokens.*may have 255.*Fork it") as caught:
            await full.generate(greedy())
        assert caught.value.parameter == "session" and "truncate" not in str(caught.value)

    run(work())


def test_a_new_engine_has_the_sessions_of_the_old_one(allm: AsyncLLM, expected: list[int]) -> None:
    async def work() -> None:
        s = await allm.sessions.create("s", BEGIN)
        await s.generate(greedy())
        allm.kill_engine("for a test")
        with pytest.raises(EngineDeadError):
            await s.info()
        await allm.restart()
        await s.append(MORE)
        await s.generate(greedy())
        assert await s.tokens() == expected

    run(work())


def test_a_turn_that_the_engine_dies_in_leaves_the_session_as_it_was(allm: AsyncLLM, expected: list[int]) -> None:
    async def work() -> None:
        s = await allm.sessions.create("s", BEGIN)
        await s.generate(greedy())
        before = await s.tokens()
        prompt, turn = await s.prepare(MORE)
        outputs = allm.run({"prompt_token_ids": prompt}, greedy(max_tokens=150), None, 0, "", turn)
        await outputs.__anext__()
        assert await s.tokens() == prompt
        allm.kill_engine("for a test")
        with pytest.raises(EngineDeadError):
            async for _ in outputs:
                pass
        await allm.restart()
        assert await s.tokens() == before  # a retry does not append twice
        prompt, turn = await s.prepare(MORE)
        async for _ in allm.run({"prompt_token_ids": prompt}, greedy(), None, 0, "", turn):
            pass
        assert await s.tokens() == expected

    run(work())
