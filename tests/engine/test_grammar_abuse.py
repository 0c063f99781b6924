"""Hostile structured output: a grammar that explodes, crashes or never ends fails its own request and no other."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, AsyncLLM, RequestOutput, SamplingParams, StructuredOutputsParams
from quire.engine.grammar import grammars as module
from quire.errors import ValidationError
from tests.conftest import assert_idle
from tests.engine.fork_server import SharedForkServer, grammars_of

Constraint = StructuredOutputsParams
PROMPT = [20 + 3 * i for i in range(30)]
TIMEOUT = 1

TO_COMPILE: dict[str, Constraint] = {
    "alternatives": Constraint(
        json={"anyOf": [{"type": "object", "properties": {f"p{i}": {"type": "string"}}} for i in range(1500)]}
    ),
    "optional properties": Constraint(
        json={"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}}
    ),
    "a bomb of references": Constraint(
        json={
            "$defs": {"d0": {"type": "string"}}
            | {
                f"d{i}": {"anyOf": [{"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{i - 1}"}] * 8}] * 8}
                for i in range(1, 30)
            },
            "$ref": "#/$defs/d29",
        }
    ),
    "an enum": Constraint(json={"enum": [f"{i * 7919:x}" * 4 for i in range(8000)]}),
}  # fmt: skip
TO_FOLLOW: dict[str, Constraint] = {
    "empty words": Constraint(
        grammar="root ::= a0\n"
        + "".join(f"a{i} ::= a{i + 1} a{i + 1} | a{i + 1}\n" for i in range(40))
        + 'a40 ::= [a-z] | ""'
    ),
    "repetitions of repetitions": Constraint(regex="((a{1,100}){1,100}){1,100}"),
    "repetitions": Constraint(regex="(a{1,1000}){1,1000}"),
    "ambiguous": Constraint(grammar='root ::= s\ns ::= s s | [a-z] s [a-z] | [a-z] | " "'),
    "ambiguous and empty": Constraint(grammar='root ::= a\na ::= "a" | a a | a a a | ""'),
}


def params(constraint: Constraint | None = None, **fields: Any) -> SamplingParams:
    return SamplingParams(
        **({"temperature": 0.9, "seed": 5, "max_tokens": 60, "structured_outputs": constraint} | fields)
    )


@pytest.fixture(scope="module")
def fork_server(tiny_model: Path) -> Iterator[SharedForkServer]:
    shared = SharedForkServer(tiny_model)
    yield shared
    shared.close()


@pytest.fixture(scope="module")
def shared(fork_server: SharedForkServer) -> LLM:
    llm = fork_server.engine(grammar_timeout=TIMEOUT)
    assert generate(llm, Constraint(regex="a{3}")).outputs[0].text == "aaa"  # the vocabulary is loaded
    return llm


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    yield shared
    assert_idle(shared)
    grammars = grammars_of(shared)
    grammars._refused.clear()
    assert not grammars.is_active and not grammars._sequences
    assert not any(matcher.users for matcher in grammars._matchers.values())


def generate(llm: LLM, constraint: Constraint, **fields: Any) -> RequestOutput:
    return llm.generate([PROMPT], [params(constraint, **fields)], use_tqdm=False)[0]


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def matcher_pids(llm: LLM) -> list[int]:
    """Pids of the fork server's matchers."""
    fork_server = grammars_of(llm)._fork_server
    if fork_server is None:
        return []
    with open(f"/proc/{fork_server.pid}/task/{fork_server.pid}/children") as file:
        return [pid for pid in map(int, file.read().split()) if is_alive(pid)]


def run_beside(llm: LLM, expected: SamplingParams) -> tuple[RequestOutput, float, int]:
    """The request's last output, run beside a stream that never ends; the longest gap between two of the stream's
    tokens, and their number."""
    engine = llm.llm_engine
    engine.add_request("free", PROMPT[:3], params(max_tokens=None, ignore_eos=True))
    engine.step()
    engine.add_request("hostile", PROMPT, expected)
    last, gap, tokens = time.monotonic(), 0.0, 0
    while True:
        for output in engine.step():
            if output.request_id == "hostile" and output.finished:
                engine.abort_request("free")
                return output, gap, tokens
            if output.request_id == "free":
                if output.finished:
                    engine.add_request("free", PROMPT[:3], params(max_tokens=None, ignore_eos=True))
                now = time.monotonic()
                last, gap, tokens = now, max(gap, now - last), tokens + 1


@pytest.mark.parametrize("name", TO_COMPILE)
def test_a_grammar_too_slow_to_compile_fails_in_time_and_delays_no_other_request(llm: LLM, name: str) -> None:
    begin = time.monotonic()
    output, gap, tokens = run_beside(llm, params(TO_COMPILE[name]))
    took = time.monotonic() - begin
    print(f"{name}: {took:.2f} s, longest gap {gap * 1000:.0f} ms over {tokens} tokens, {output.error}")
    assert tokens > 5 and gap < 1.0
    if output.error is None:  # a fast machine may compile it
        return
    assert output.outputs[0].finish_reason == "error"
    assert "cannot be compiled" in output.error or "longer to compile" in output.error
    assert took < TIMEOUT + 2
    if len(grammars_of(llm)._refused):  # retried if the machine was too busy for the measurement
        again = time.monotonic()
        assert generate(llm, TO_COMPILE[name]).error == output.error
        assert time.monotonic() - again < 1.0


@pytest.mark.parametrize("name", TO_FOLLOW)
def test_a_grammar_too_slow_to_match_fails_and_hardly_delays_other_requests(llm: LLM, name: str) -> None:
    output, gap, tokens = run_beside(llm, params(TO_FOLLOW[name], max_tokens=100, temperature=1.5))
    print(f"{name}: longest gap {gap * 1000:.0f} ms over {tokens} tokens, {output.error}")
    assert tokens > 3 and gap < 1.0
    if output.error is not None:
        assert "too long to match" in output.error or "grammar_timeout" in output.error
    assert generate(llm, Constraint(regex="a{3}")).outputs[0].text == "aaa"


def test_compiled_grammars_are_limited_in_number(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_MATCHERS", 3)
    for i in range(8):
        assert generate(llm, Constraint(regex=f"b{{{i + 1}}}")).outputs[0].text == "b" * (i + 1)
        time.sleep(0.05)
        assert len(grammars_of(llm)._matchers) <= 3 and len(matcher_pids(llm)) <= 3
    kept = matcher_pids(llm)
    assert generate(llm, Constraint(regex="b{8}")).outputs[0].text == "b" * 8
    assert matcher_pids(llm) == kept  # the last one was still cached
    constraints = [params(Constraint(regex=f"c{{{i + 1}}}")) for i in range(7)]  # more at once than the limit
    outputs = llm.generate([PROMPT] * 7, constraints, use_tqdm=False)
    assert [output.outputs[0].text for output in outputs] == ["c" * (i + 1) for i in range(7)]


def test_idle_grammars_are_limited_in_memory(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_BYTES", 1)
    for i in range(3):
        generate(llm, Constraint(regex=f"d{{{i + 1}}}"))
    assert len(grammars_of(llm)._matchers) <= 2  # the last one, and the one before until the next comes


def test_random_aborts_leave_nothing_behind(fork_server: SharedForkServer) -> None:
    """A small cache, chunked prompts, valid and invalid grammars and none, aborts at any moment."""
    chaos = random.Random(7)
    constraints = [
        Constraint(regex="[a-z]{3,30}"), Constraint(choice=["yes", "no"]), Constraint(grammar="root ::= x"), None,
        Constraint(json_object=True),
    ]  # fmt: skip
    llm = fork_server.engine(num_gpu_blocks_override=24, block_size=4, max_num_batched_tokens=9, pipeline_depth=1)
    generate(llm, constraints[0] or Constraint(regex="a"))  # the vocabulary is loaded
    engine, ended, open_ids, number = llm.llm_engine, list[RequestOutput](), set[str](), 0
    while number < 120 or open_ids:
        while number < 120 and len(open_ids) < 12:
            expected = params(chaos.choice(constraints), n=chaos.choice([1, 1, 3]), seed=number, max_tokens=20)
            engine.add_request(str(number), PROMPT[: chaos.randint(2, 20)], expected)
            open_ids.add(str(number))
            number += 1
        if chaos.random() < 0.3:
            victim = chaos.choice(sorted(open_ids))
            engine.abort_request(victim)
            open_ids.discard(victim)
        for output in engine.step():
            if output.finished:
                ended.append(output)
                open_ids.discard(output.request_id)
    assert_idle(llm)
    assert not grammars_of(llm).is_active and not grammars_of(llm)._sequences
    assert {output.outputs[0].finish_reason for output in ended} == {"stop", "length", "error"}


@pytest.mark.slow
def test_a_killed_fork_server_is_replaced(llm: LLM) -> None:
    grammars = grammars_of(llm)
    assert grammars._fork_server is not None
    os.kill(grammars._fork_server.pid, signal.SIGKILL)
    time.sleep(0.1)
    assert (
        generate(llm, Constraint(regex="a{3}")).outputs[0].text == "aaa"
    )  # compiled before: its matcher was killed too
    assert generate(llm, Constraint(regex="a{4}")).outputs[0].text == "aaaa"


def test_a_fork_server_killed_while_it_compiles_is_replaced_and_the_request_served(llm: LLM) -> None:
    engine = llm.llm_engine
    slow = Constraint(
        regex="e{5}|" + "|".join("".join(chr(97 + i * j % 26) for j in range(1, 24)) for i in range(1500))
    )
    engine.add_request("slow", PROMPT, params(slow, max_tokens=40))
    engine.step()
    grammars = grammars_of(llm)
    assert grammars._fork_server is not None
    os.kill(grammars._fork_server.pid, signal.SIGKILL)
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert outputs[-1].error is None and outputs[-1].outputs[0].finish_reason == "stop"


def test_a_matcher_that_cannot_be_replaced_refuses_its_request_and_the_engine_stays(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process has exited, and there is no descriptor for another."""
    engine, grammars = llm.llm_engine, grammars_of(llm)
    engine.add_request("one", PROMPT, params(Constraint(regex="h{7}"), max_tokens=20))
    grammars._waiting["one"].is_dead = True

    def fail(form: bytes) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(grammars, "_make_matcher", fail)
        monkeypatch.setattr(type(grammars._waiting["one"]), "is_started", True)
        outputs = engine.step()
    monkeypatch.undo()
    assert [output.request_id for output in outputs] == ["one"] and "descriptor" in (outputs[0].error or "")
    assert generate(llm, Constraint(regex="h{7}")).outputs[0].text == "h" * 7


def test_a_killed_matcher_fails_its_requests_and_no_other(llm: LLM) -> None:
    engine = llm.llm_engine
    engine.add_request("a", PROMPT, params(Constraint(regex="[a-z]{200}"), max_tokens=100))
    engine.add_request("b", PROMPT, params(Constraint(regex="f{50}"), max_tokens=100))
    seen: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            seen[output.request_id] = output
            tokens = output.outputs[0].token_ids
            if output.request_id == "a" and not output.finished and len(tokens) == 5:
                os.kill(grammars_of(llm)._in_use["a"].pid, signal.SIGKILL)
    assert seen["a"].outputs[0].finish_reason == "error" and "has ended" in (seen["a"].error or "")
    assert seen["b"].outputs[0].text == "f" * 50
    assert generate(llm, Constraint(regex="[a-z]{200}"), max_tokens=20).outputs[0].finish_reason == "length"


def test_a_matcher_that_exited_when_idle_is_started_again(llm: LLM) -> None:
    constraint = Constraint(regex="g{6}")
    generate(llm, constraint)
    pid = next(matcher.pid for matcher in grammars_of(llm)._matchers.values() if b"g{6}" in matcher.form)
    os.kill(pid, signal.SIGKILL)
    time.sleep(0.1)
    assert generate(llm, constraint).outputs[0].text == "g" * 6


def test_shutdown_leaves_no_process(tiny_model: Path) -> None:
    settings = {"dtype": "float32", "num_gpu_blocks_override": 64, "device": "cpu"}
    with LLM(str(tiny_model), **settings) as llm:
        assert grammars_of(llm)._fork_server is None  # nothing is started before it is needed
        assert generate(llm, Constraint(regex="a{3}")).outputs[0].text == "aaa"
        llm.llm_engine.add_request("hangs", PROMPT, params(TO_COMPILE["optional properties"]))
        while len(matcher_pids(llm)) < 2:
            llm.llm_engine.step()
        fork_server = grammars_of(llm)._fork_server
        assert fork_server is not None
        pids = [fork_server.pid, *matcher_pids(llm)]
    time.sleep(0.2)
    assert not [pid for pid in pids if is_alive(pid)]


def test_a_refused_grammar_is_a_validation_error_in_asyncio_and_other_requests_continue(tiny_model: Path) -> None:
    async def read(llm: AsyncLLM, constraint: Constraint | None, **fields: Any) -> RequestOutput:
        async for output in llm.generate({"prompt_token_ids": PROMPT}, params(constraint, **fields)):
            last = output
        return last

    async def main() -> None:
        async with AsyncLLM(str(tiny_model), dtype="float32", num_gpu_blocks_override=64, device="cpu") as llm:
            bad, good, free = await asyncio.gather(
                read(llm, Constraint(grammar="root ::= x"), n=2),
                read(
                    llm,
                    Constraint(json={"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}),
                ),
                read(llm, None, max_tokens=5, ignore_eos=True),
                return_exceptions=True,
            )
            assert isinstance(bad, ValidationError) and "not defined" in str(bad)
            assert isinstance(good, RequestOutput) and isinstance(free, RequestOutput)
            assert json.loads(good.outputs[0].text)["a"] in (True, False)
            assert len(free.outputs[0].token_ids) == 5
            again = await read(llm, Constraint(regex="a{3}"))
            assert re.fullmatch("a{3}", again.outputs[0].text)

    asyncio.run(main())
