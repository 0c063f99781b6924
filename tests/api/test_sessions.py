"""`llm.sessions`: with any suspends, resumes and forks, the tokens are those of one uninterrupted run."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.errors import (
    EngineDeadError,
    SessionBusyError,
    SessionExistsError,
    SessionNotFoundError,
    StoreInUseError,
    ValidationError,
)
from quire.messages.sampling import StructuredOutputsParams
from tests.conftest import ENDS

BEGIN, MORE = "hello the world one two three four five six", " and more"
GREEDY = SamplingParams(temperature=0, ignore_eos=True, max_tokens=20)
MakeLLM = Callable[..., LLM]


@pytest.fixture(scope="module")
def expected(shared_tiny: LLM) -> list[int]:
    """The tokens of two turns, made without any session."""
    tokens = shared_tiny.get_tokenizer().encode(BEGIN)
    for text in ("", MORE):
        tokens = tokens + shared_tiny.get_tokenizer().encode(text, add_special_tokens=False)
        shared_tiny.reset_prefix_cache()
        out = shared_tiny.generate({"prompt_token_ids": tokens}, GREEDY, use_tqdm=False)[0]
        tokens = [*tokens, *out.outputs[0].token_ids]
    return tokens


def used(llm: LLM) -> int:
    """Device blocks in use."""
    return llm.llm_engine.core.scheduler.tables.pool.used


@pytest.fixture(params=["none", "host", "disk"])
def tiers(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Tiers for suspended sessions."""
    return {"none": {}, "host": {"swap_space": 0.02}, "disk": {"swap_space": 0.02, "kv_disk": str(tmp_path)}}[
        request.param
    ]


def test_turns_with_a_suspend_between_them(make_llm: MakeLLM, tiers: dict[str, Any], expected: list[int]) -> None:
    llm = make_llm(**tiers)
    s = llm.sessions.create("agent-7")
    s.append(BEGIN)
    s.generate(GREEDY)
    assert used(llm) > 0 and s.info.phase == "idle"
    llm.llm_engine.check_idle()
    s.suspend()
    assert used(llm) == 0 and s.info.phase == "asleep"
    llm.llm_engine.check_idle()
    llm.reset_prefix_cache()
    s = llm.sessions.resume("agent-7")
    t = s.fork("agent-7b")
    before = llm.llm_engine.core.scheduler.stats.prompt_tokens
    t.generate(SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    computed = llm.llm_engine.core.scheduler.stats.prompt_tokens - before
    assert computed == (1 if tiers else t.info.num_tokens - 1), "what was saved is not computed again"
    saved = s.info.num_tokens - 1  # the last token of an answer is never computed
    s.append(MORE)
    out = s.generate(GREEDY)
    assert s.tokens == expected
    assert out.num_cached_tokens == (saved if tiers else saved - saved % 16), "without tiers, what the fork computed"
    u = t.fork("agent-7c", at=t.info.num_tokens - 1)
    u.append(MORE)
    u.generate(GREEDY)
    assert u.tokens == expected
    assert s.text == llm.get_tokenizer().decode(expected)


def test_forks_of_a_session_on_the_device_do_not_write_over_each_other(make_llm: MakeLLM) -> None:
    llm = make_llm(enable_prefix_caching=False)
    s = llm.sessions.create("s", BEGIN)
    s.generate(GREEDY)
    before, texts = s.tokens, [" one", " x", " world"]
    forks = [s.fork(f"f{i}") for i in range(2)]
    assert used(llm) == len(before) // 16 + 1, "all of them hold the same blocks"
    all_sessions = [s, *forks]
    for session, text in zip(all_sessions, texts, strict=True):
        session.append(text)
    for streams in zip(*[session.stream(GREEDY) for session in all_sessions], strict=False):
        assert len(streams) == 3
    for session, text in zip(all_sessions, texts, strict=True):
        prompt = before + llm.get_tokenizer().encode(text, add_special_tokens=False)
        alone = llm.generate({"prompt_token_ids": prompt}, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        for _ in session.stream(SamplingParams(max_tokens=1)):
            pass
        assert session.tokens[: len(prompt) + 20] == [*prompt, *alone]


def test_another_process_continues_a_session(
    make_llm: MakeLLM, tiny_model: Path, tmp_path: Path, expected: list[int]
) -> None:
    llm = make_llm(swap_space=0.02, kv_disk=str(tmp_path))
    s = llm.sessions.create("agent-7")
    s.append(BEGIN)
    s.generate(GREEDY)
    saved = s.suspend().kv_tokens
    assert saved % 16 and saved == len(s.tokens) - 1
    with pytest.raises(StoreInUseError):
        LLM(str(tiny_model), kv_disk=str(tmp_path), device="cpu", num_gpu_blocks_override=64).sessions.create("x")
    llm.shutdown()
    program = f"""
import json
from quire import LLM, SamplingParams
llm = LLM({str(tiny_model)!r}, swap_space=0.02, kv_disk={str(tmp_path)!r}, dtype="float32", device="cpu",
          num_gpu_blocks_override=128)
s = llm.sessions.resume("agent-7"); t = s.fork("agent-7b")
t.append({MORE!r})
out = t.generate(SamplingParams(temperature=0, ignore_eos=True, max_tokens=20))
print(json.dumps([t.tokens, out.num_cached_tokens]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    tokens, cached = json.loads(done.stdout)
    assert tokens == expected
    assert cached == saved, "the partial block too came from disk"


def test_streams_are_turns(make_llm: MakeLLM, expected: list[int]) -> None:
    llm = make_llm()
    s = llm.sessions.create("s", BEGIN)
    before = s.tokens
    stream = s.stream(GREEDY)
    next(stream)
    for refused in (lambda: s.append("x"), lambda: s.generate(GREEDY), s.delete):
        with pytest.raises(SessionBusyError):
            refused()
    assert s.info.phase == "live"
    stream.close()  # type: ignore[attr-defined]
    assert s.tokens == before, "a turn that is broken off adds nothing"
    *_, last = s.stream(GREEDY)
    assert last.finished and s.tokens == [*before, *last.outputs[0].token_ids] == expected[: len(s.tokens)]
    s.stream(GREEDY)  # dropped unread
    s.append(MORE)
    s.generate(GREEDY)
    assert s.tokens == expected


def test_turns_beside_others(make_llm: MakeLLM, expected: list[int]) -> None:
    llm = make_llm(swap_space=0.02, max_num_seqs=2)
    sessions = [llm.sessions.create(f"s{i}", BEGIN) for i in range(4)]
    streams = [session.stream(GREEDY) for session in sessions]
    for _ in zip(*streams, strict=False):
        pass
    sessions[0].suspend()
    for session in sessions:
        session.append(MORE)
    llm.generate(["hello", "the world"], GREEDY, use_tqdm=False)
    for session in sessions:
        for _ in session.stream(GREEDY):
            pass
        assert session.tokens == expected


def test_a_stop_string_ends_what_the_session_keeps(make_llm: MakeLLM, expected: list[int]) -> None:
    llm = make_llm()
    s = llm.sessions.create("s", BEGIN)
    length = s.info.num_tokens
    text = llm.get_tokenizer().decode(expected[length : length + 4], skip_special_tokens=True)
    out = s.generate(SamplingParams(temperature=0, ignore_eos=True, max_tokens=20, stop=[text[-1]]))
    assert out.outputs[0].finish_reason == "stop"
    assert s.tokens == [*expected[:length], *out.outputs[0].token_ids]
    assert length < len(s.tokens) <= length + 4


def test_messages_make_one_conversation(make_llm: MakeLLM) -> None:
    llm = make_llm()
    params = SamplingParams(temperature=0, max_tokens=6)
    s = llm.sessions.create("s")
    first = [{"role": "user", "content": "hello"}]
    s.append(first)
    assert s.text == f"<|user|>hello{ENDS}<|assistant|>"
    answer = s.generate(params).outputs[0]
    assert answer.text == llm.chat(first, params, use_tqdm=False)[0].outputs[0].text
    held = s.text
    s.append([{"role": "user", "content": "on"}])
    closed = "" if held.endswith(ENDS) else ENDS
    assert s.text == f"{held}{closed}<|user|>on{ENDS}<|assistant|>"
    t = llm.sessions.create("t", messages=first)
    assert t.text == f"<|user|>hello{ENDS}<|assistant|>"


def test_an_end_token_that_is_not_the_templates_is_replaced(make_llm: MakeLLM) -> None:
    llm = make_llm()
    end = llm.get_tokenizer().convert_tokens_to_ids("<|assistant|>")  # the generation config names it as an end
    s = llm.sessions.create("s", messages=[{"role": "user", "content": "hello"}])
    s.append([*llm.get_tokenizer().encode("hm", add_special_tokens=False), end])
    s.append([{"role": "user", "content": "on"}])
    assert s.text == f"<|user|>hello{ENDS}<|assistant|>hm{ENDS}<|user|>on{ENDS}<|assistant|>"


def test_a_tool_call_suspends_the_session(make_llm: MakeLLM) -> None:
    llm = make_llm(swap_space=0.02)
    call = '[{"name": "f", "parameters": {}}]'
    params = SamplingParams(temperature=0, max_tokens=100, structured_outputs=StructuredOutputsParams(choice=[call]))
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    s = llm.sessions.create("s", messages=[{"role": "user", "content": "go"}], tools=tools)
    s.generate(params)
    assert s.info.phase == "asleep" and used(llm) == 0
    t = llm.sessions.create("t", "go")
    t.generate(SamplingParams(temperature=0, max_tokens=5), tools=tools)
    assert t.info.phase == "idle"


def test_listing_sessions(make_llm: MakeLLM) -> None:
    sessions = make_llm().sessions
    names = [f"n{i}" for i in (3, 1, 2)]
    for name in names:
        sessions.create(name, meta={"for": name})
    assert [info.name for info in sessions] == names and len(sessions) == 3
    assert [info.name for info in sessions.list(after="n3", limit=1)] == ["n1"]
    assert "n1" in sessions and "n9" not in sessions and "../n1" not in sessions
    assert sessions.get("n1").info.meta == {"for": "n1"}
    with pytest.raises(SessionExistsError):
        sessions.create("n1")
    sessions.delete("n1")
    for act in (sessions.get, sessions.resume, sessions.delete):
        with pytest.raises(SessionNotFoundError, match="'n1'"):
            act("n1")
    for bad in ("", "a/b", "..", "a b", "a|b", "x" * 129):
        with pytest.raises(ValidationError, match="cannot name a session"):
            sessions.create(bad)


def test_tenants_have_separate_names(make_llm: MakeLLM) -> None:
    sessions = make_llm().sessions
    sessions.create("s", "hello", tenant="one")
    assert "s" not in sessions and "s" in sessions.of("one") and len(sessions.of("two")) == 0
    sessions.of("two").create("s", "world")
    sessions.of("one").get("s").generate(SamplingParams(max_tokens=2, temperature=0))
    assert [info.name for info in sessions.of("one")] == ["s"]
    with pytest.raises(SessionNotFoundError, match="no session 's'"):
        sessions.get("s")


def test_an_unused_session_expires(make_llm: MakeLLM) -> None:
    llm = make_llm()
    s, t = llm.sessions.create("s", "hello", ttl=0.2), llm.sessions.create("t", ttl=0.2)
    s.generate(SamplingParams(max_tokens=2, temperature=0))
    assert t.update(ttl=None).expires is None and used(llm) > 0
    time.sleep(0.3)
    assert "s" not in llm.sessions and "t" in llm.sessions
    assert used(llm) == 0


def test_export_and_import(make_llm: MakeLLM, tmp_path: Path, expected: list[int]) -> None:
    s = make_llm().sessions.create("s", BEGIN, meta={"a": "b"})
    s.generate(GREEDY)
    s.export(tmp_path / "file")
    other = make_llm()
    t = other.sessions.import_(tmp_path / "file")
    assert (t.name, t.info.meta, t.tokens) == ("s", {"a": "b"}, s.tokens)
    t.append(MORE)
    t.generate(GREEDY)
    assert t.tokens == expected
    with pytest.raises(SessionExistsError):
        other.sessions.import_(tmp_path / "file")
    assert other.sessions.import_(tmp_path / "file", "u").tokens == s.tokens
    (tmp_path / "file").write_bytes(b"something else")
    with pytest.raises(ValidationError, match="not an exported session"):
        other.sessions.import_(tmp_path / "file", "v")


def test_after_the_engine_has_ended_there_are_none(make_llm: MakeLLM, tmp_path: Path) -> None:
    llm = make_llm(kv_disk=str(tmp_path))
    s = llm.sessions.create("s", BEGIN)
    tokens = s.tokens
    llm.shutdown()
    acts: list[Callable[[], object]] = [
        lambda: llm.sessions.create("t"), lambda: s.append(MORE), lambda: s.generate(GREEDY), lambda: s.tokens,
        lambda: "s" in llm.sessions, s.suspend,
    ]  # fmt: skip
    other = make_llm(kv_disk=str(tmp_path)).sessions
    for act in acts:
        with pytest.raises(EngineDeadError, match="shut down"):
            act()
    assert other.resume("s").tokens == tokens and len(other) == 1


def test_what_a_turn_refuses(make_llm: MakeLLM) -> None:
    llm = make_llm()
    s = llm.sessions.create("s")
    with pytest.raises(ValidationError, match="empty"):
        s.generate()
    s.append("hello")
    for params in (SamplingParams(n=2), SamplingParams(truncate_prompt_tokens=2)):
        with pytest.raises(ValidationError):
            s.generate(params)
    for given in ([1, "x"], [10**6], [-1], 3, "x" * 300, b"abc"):
        with pytest.raises(ValidationError):
            s.append(given)  # type: ignore[arg-type]
    assert s.text == "hello" and s.info.phase == "asleep"
    logprobs = s.generate(SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=0))
    s.append(" x")
    again = s.generate(SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=0))
    assert again.prompt_logprobs is not None and logprobs.prompt_logprobs is not None
    assert len(again.prompt_logprobs) == len(again.prompt_token_ids), "every position is computed for them"
    assert again.prompt_logprobs[1 : len(logprobs.prompt_logprobs)][-1].keys() == logprobs.prompt_logprobs[-1].keys()  # type: ignore[union-attr]


def test_the_error_of_a_full_session_names_remedies(make_llm: MakeLLM) -> None:
    llm = make_llm()
    full = llm.sessions.create("full", prompt=[5] * 250)
    full.generate(SamplingParams(temperature=0, ignore_eos=True, max_tokens=100))
    assert full.info.num_tokens == 256
    with pytest.raises(ValidationError, match="256 tokens.*may have 255.*Fork it") as caught:
        full.generate(GREEDY)
    assert caught.value.parameter == "session" and "truncate" not in str(caught.value)
    full.fork("shorter", at=200).generate(GREEDY)


def test_a_session_larger_than_the_staging_slots_is_kept_whole(make_llm: MakeLLM, tmp_path: Path) -> None:
    """With a disk and no host tier, blocks pass through a few staging slots."""
    llm = make_llm(kv_disk=str(tmp_path), block_size=2, num_gpu_blocks_override=256)
    scheduler = llm.llm_engine.core.scheduler
    s = llm.sessions.create("long", [5 + i % 50 for i in range(220)])
    s.generate(GREEDY)
    s.suspend()
    tiers = scheduler.tiers
    assert tiers is not None and tiers.store is not None
    assert tiers.host.num_slots < len(tiers.store)
    llm.reset_prefix_cache()
    tiers.host.discard(list(tiers.host.oldest()))
    computed = scheduler.stats.prompt_tokens
    s.generate(GREEDY)
    assert scheduler.stats.prompt_tokens == computed + 1


def test_suspended_kv_is_not_used_for_tokens_that_changed_since(
    make_llm: MakeLLM, shared_tiny: LLM, tiers: dict[str, Any]
) -> None:
    """Suspended, cut, rewritten, evicted: each turn continues the tokens that the session has."""
    llm = make_llm(**tiers)
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    session, keeper = llm.sessions.create("a"), llm.sessions.keeper
    begin, first, second = list(range(20, 36)), list(range(40, 100)), list(range(100, 40, -1))
    session.append([*begin, *first])
    session.generate(greedy)
    session.suspend()
    key = llm.sessions.key_of("a")
    keeper.append(key, second, at=len(begin))
    session.generate(greedy)
    assert keeper.kv.reclaim(10**6) > 0
    llm.reset_prefix_cache()
    before = session.tokens
    (said,) = session.generate(greedy).outputs
    (expected,) = shared_tiny.generate([{"prompt_token_ids": before}], greedy, use_tqdm=False)[0].outputs
    assert list(said.token_ids) == list(expected.token_ids)
