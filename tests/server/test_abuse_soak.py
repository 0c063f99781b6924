"""Mixed traffic for ten minutes: memory and descriptors of all processes stay flat, and no token is wrong: once with
room, once with so few blocks that requests are preempted and swapped, and sessions sleep on disk.
`QUIRE_SOAK_SECONDS` sets another length. Each sample is logged as one line to the file `QUIRE_SOAK_LOG`, if set."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from tests.processes import descendants, descriptors, own_memory
from tests.server.attacked_server import AttackedServer, attacked_server
from tests.server.traffic import TEXT, Ask, Users, draw, users_of

SECONDS = float(os.environ.get("QUIRE_SOAK_SECONDS", "600"))
SAMPLE_SECONDS = 2.0
WARM_UP = 0.3
"""The share of the time in which caches, pools and the allocator's arenas may still grow."""
MAY_GROW = 0.02
"""Share of memory, from the end of the warm-up on: less than the noise from one minute to the next."""
LEAST_ROOM = 4 << 20
PRESSURE = (
    "--num-gpu-blocks-override", "28", "--max-num-seqs", "16", "--max-num-batched-tokens", "256", "--swap-space",
    "0.002", "--kv-disk-size", "0.01", "--session-idle-seconds", "0.2", "--stall-timeout", "3", "--grammar-timeout",
    "5", "--max-stored-responses", "20",
)  # fmt: skip
"""Blocks for a few requests, host memory for a few more, a disk tier that is full after a minute, and stored responses,
each a session of the engine, of which there are no more after a minute either."""
FLAT_BYTES = 1 << 20
"""How much the engine may grow under pressure, from the end of the warm-up on."""
PRESSURE_WARM_UP = 600.0
"""Seconds; half of a run that is shorter than twice that."""
EXACT = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
PROMPTS = ["the world " * repeats + str(number) for repeats in (1, 6, 12, 17) for number in range(10)]
LENGTH, FIRST, SECOND, MORE = 60, 14, 10, " more"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS + 900)]


@dataclass(frozen=True)
class Sample:
    """Resources of the processes at one moment."""

    at: float
    front: int
    engine: int
    grammars: int
    """Memory in bytes: the matcher processes together."""
    descriptors: int
    """Memory of the front and the engine, in bytes."""
    processes: int
    ended: int
    """Requests so far."""


@pytest.fixture
def soaked(tiny_model: Path, tmp_path: Path) -> Iterator[AttackedServer]:
    """A short queue, so that bursts are rejected; stalled connections are closed soon."""
    flags = ("--max-queued-requests", "8", "--max-num-seqs", "16", "--stall-timeout", "3", "--grammar-timeout", "5")
    with attacked_server(tiny_model, tmp_path, *flags) as made:
        yield made
        made.assert_unharmed()


def test_mixed_traffic_leaves_memory_flat(soaked: AttackedServer) -> None:
    users, samples = asyncio.run(soak(soaked))
    later = samples[int(len(samples) * WARM_UP) :]
    print(f"\n{SECONDS:.0f} s: {dict(users.ends)}")
    for name in ("front", "engine", "grammars"):
        values = [getattr(sample, name) for sample in later]
        grown = growth([sample.at for sample in later], values)
        middle = statistics.median(values)
        span = f"from {later[0].at:.0f} s to {later[-1].at:.0f} s"
        print(f"{name}: {middle / 2**20:.1f} MiB, {grown / 2**20:+.2f} MiB {span}")
        if name != "grammars":
            assert grown < max(MAY_GROW * middle, LEAST_ROOM), name
    half = len(later) // 2
    for name in ("descriptors", "processes"):
        early, late = ([getattr(sample, name) for sample in part] for part in (later[:half], later[half:]))
        print(f"{name}: {min(early)} to {max(early)} in the first half, {min(late)} to {max(late)} in the second")
        assert statistics.median(late) <= statistics.median(early) + 4, name
    assert users.ends["answered"] > SECONDS and users.ends["busy"] and users.ends["hung up"] and users.ends["refused"]
    assert soaked.stats()["restarts"] == 0


@dataclass(frozen=True)
class Reference:
    """Tokens of an engine that does one thing at a time and has room for it."""

    answers: dict[str, list[int]]
    turns: dict[str, list[int]]
    """Of the second turn of a session, after FIRST tokens and MORE."""


@pytest.fixture
def reference(tiny_model: Path) -> Reference:
    answers, turns = {}, {}
    with LLM(str(tiny_model), dtype="float32", num_gpu_blocks_override=64, device="cpu") as llm:
        more = llm.get_tokenizer().encode(MORE, add_special_tokens=False)
        for prompt in PROMPTS:
            params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=LENGTH)
            whole = llm.generate(prompt, params, use_tqdm=False)[0]
            answers[prompt] = list(whole.outputs[0].token_ids)
            tokens = [*whole.prompt_token_ids, *answers[prompt][:FIRST], *more]
            params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=SECOND)
            then = llm.generate({"prompt_token_ids": tokens}, params, use_tqdm=False)[0]
            turns[prompt] = list(then.outputs[0].token_ids)
    return Reference(answers, turns)


def test_pressure_leaves_memory_flat_and_tokens_right(tiny_model: Path, tmp_path: Path, reference: Reference) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    with attacked_server(tiny_model, temporary, "--kv-disk", str(tmp_path / "kv"), *PRESSURE) as attacked:
        users, samples = asyncio.run(soak(attacked, reference))
        stats = attacked.stats()
        attacked.assert_unharmed()
    print(f"\n{SECONDS:.0f} s: {dict(users.ends)}")
    done = {name: stats["engine"][f"quire:{name}"] for name in WORKED}
    print(done)
    assert all(done.values()), "everything that was to be tried has happened"
    later = [sample for sample in samples if sample.at >= min(PRESSURE_WARM_UP, SECONDS / 2)]
    for name in ("front", "engine"):
        values = [getattr(sample, name) for sample in later]
        grown = growth([sample.at for sample in later], values)
        span = f"from {later[0].at:.0f} s to {later[-1].at:.0f} s"
        print(f"{name}: {statistics.median(values) / 2**20:.1f} MiB, {grown / 2**20:+.2f} MiB {span}")
        if name == "engine":
            assert grown < FLAT_BYTES
    assert stats["restarts"] == 0


WORKED = ("num_preemptions", "swaps", "blocks_saved", "blocks_loaded", "disk_blocks", "sessions_slept")
"""Metrics that show what happened under pressure."""


class Exact:
    """Greedy requests and sessions whose every token is known."""

    def __init__(self, users: Users, reference: Reference) -> None:
        self._users = users
        self._reference = reference
        self._numbers = itertools.count()

    async def ask(self) -> None:
        rng, users = self._users.rng, self._users
        prompt, length = rng.choice(PROMPTS), rng.randint(1, LENGTH)
        answer = await users.read(TEXT, {"prompt": prompt, "max_tokens": length, **EXACT})
        if answer is not None:
            self._compare(answer, self._reference.answers[prompt][:length], prompt)

    async def converse(self) -> None:
        """Two turns, with a suspend or a fork between them."""
        rng, users = self._users.rng, self._users
        prompt, name = rng.choice(PROMPTS), f"s{next(self._numbers)}"
        names = [name]
        if await users.read("/v1/sessions", {"id": name, "input": prompt, "ttl": 600}) is None:
            return
        try:
            first = await users.read(f"/v1/sessions/{name}/generate", {"max_tokens": FIRST, "answer": "text", **EXACT})
            if first is None:
                return
            self._compare(first, self._reference.answers[prompt][:FIRST], prompt)
            if (luck := rng.random()) < 0.4:
                await users.read(f"/v1/sessions/{name}/suspend", {})
                await asyncio.sleep(rng.random())
            elif luck < 0.7 and await users.read(f"/v1/sessions/{name}/fork", {"id": f"{name}b"}) is not None:
                names.append(f"{name}b")
            body = {"input": MORE, "max_tokens": SECOND, "answer": "text", **EXACT}
            second = await users.read(f"/v1/sessions/{names[-1]}/generate", body)
            if second is not None:
                self._compare(second, self._reference.turns[prompt], f"{prompt} and more")
        finally:
            for each in names:
                await users.delete(f"/v1/sessions/{each}")

    def _compare(self, answer: dict[str, Any], expected: list[int], what: str) -> None:
        self._users.ends["compared"] += 1
        if answer["choices"][0]["token_ids"] != expected:
            self._users.wrong.append(
                f"other tokens after {what!r}: {answer['choices'][0]['token_ids']}, not {expected}"
            )


async def soak(attacked: AttackedServer, reference: Reference | None = None) -> tuple[Users, list[Sample]]:
    with users_of(attacked, 20) as users:
        return users, await traffic(users, None if reference is None else Exact(users, reference))


async def traffic(users: Users, exact: Exact | None = None) -> list[Sample]:
    samples: list[Sample] = []
    begin = time.monotonic()
    ends = begin + SECONDS

    async def user() -> None:
        while time.monotonic() < ends:
            if exact is not None and users.rng.random() < 0.6:
                await (exact.ask() if users.rng.random() < 0.6 else exact.converse())
                continue
            match users.rng.random():
                case luck if luck < 0.70:
                    await users.ask(draw(users.rng))
                case luck if luck < 0.85:
                    await users.disconnect(draw(users.rng))
                case luck if luck < 0.95:
                    await users.send_garbage()
                case _:
                    await users.talk_nonsense()
            await asyncio.sleep(users.rng.random() * 0.1)

    async def burst() -> None:
        """More requests than the queue takes."""
        while time.monotonic() < ends:
            body = {"prompt": "the world", "max_tokens": 50, "ignore_eos": True, "stream": True, "temperature": 1}
            many = Ask(TEXT, {**body, "n": 4, "stream_options": {"include_usage": True}}, 200)
            await asyncio.gather(*(users.ask(many) for _ in range(12)))
            await asyncio.sleep(5)

    async def watch() -> None:
        with open(os.environ.get("QUIRE_SOAK_LOG", os.devnull), "w") as log:
            while time.monotonic() < ends:
                samples.append(sample(users, time.monotonic() - begin))
                log.write(json.dumps(asdict(samples[-1])) + "\n")
                log.flush()
                await asyncio.sleep(SAMPLE_SECONDS)

    await asyncio.gather(watch(), burst(), *(user() for _ in range(8 if exact is None else 16)))
    return samples


def sample(users: Users, at: float) -> Sample:
    attacked = users.attacked
    engine = attacked.engine
    family = descendants(engine)
    memory = 0
    for pid in family:
        try:
            memory += own_memory(pid)
        except OSError:  # a process that has just ended
            continue
    return Sample(
        at=round(at, 1),
        front=own_memory(attacked.pid),
        engine=own_memory(engine),
        grammars=memory,
        descriptors=sum(descriptors(attacked.pid).values()) + sum(descriptors(engine).values()),
        processes=2 + len(family),
        ended=users.ends.total(),
    )


def growth(times: Sequence[float], values: Sequence[float]) -> float:
    """The rise of a line fitted through these points, from first to last: the median of all pairwise slopes, which
    single spikes do not move (Theil–Sen)."""
    points = list(zip(times, values, strict=True))[:: max(1, len(times) // 300)]
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.combinations(points, 2)]
    return statistics.median(slopes) * (times[-1] - times[0])


def test_the_fitted_line_detects_a_leak_and_ignores_a_spike() -> None:
    times = [2.0 * i for i in range(200)]
    assert growth(times, [100.0 + (500 if i % 17 == 0 else 0) for i in range(200)]) == 0
    assert growth(times, [100.0 + 0.1 * i + (500 if i % 17 == 0 else 0) for i in range(200)]) == pytest.approx(
        19.9, 0.1
    )
