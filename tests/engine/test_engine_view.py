"""The view that the page draws: it agrees with the memory map at every step, on the device and in host memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.engine.engine_view import describe_block
from quire.errors import ValidationError
from quire.kvcache.offload.costs import Costs
from quire.messages.engine_view import BlockHolder, EngineView
from quire.server.page.frames import (
    CACHED,
    COLOURS,
    EMPTY,
    HELD,
    MOVING,
    OTHER,
    SHARED,
    FrameWriter,
    Scope,
    draw_cells,
    draw_host_cells,
)

MakeLLM = Callable[..., LLM]
LONG = SamplingParams(temperature=0, ignore_eos=True, max_tokens=60)
ALL, THEIRS = Scope(None), Scope("acme")


def look(llm: LLM) -> EngineView:
    """A view, checked against the memory map."""
    view, known = llm.llm_engine.core.view(), llm.memory_map()
    cells, shared = draw_cells(view, ALL)
    assert "".join(".c1s>"[cell & 7] for cell in cells) == known.blocks
    owners = {(one.kind, one.name): one for one in known.owners.largest}
    for holder, count in zip(view.holders, shared, strict=True):
        kind = {"decode": "running", "prompt": "running"}.get(holder.kind, holder.kind)
        assert (holder.blocks, count) == (owners[kind, holder.name].blocks, owners[kind, holder.name].shared)
    if known.host is None:
        assert not view.host_content and not view.host_holders
        return view
    content = np.frombuffer(view.host_content, np.uint8)
    assert len(content) == known.host.slots and np.count_nonzero(content) == known.host.used
    assert np.count_nonzero(content == 2) == known.host.owned
    host, _ = draw_host_cells(view, ALL)
    assert set(np.unique(host & 7)) <= {EMPTY, CACHED, HELD, SHARED, MOVING}
    assert not np.any((host & 7)[content == 0]) and np.all((host & 7)[content == 2] >= HELD)
    swapped = {one.name for one in view.host_holders if one.kind == "swapped"}
    assert swapped == {one.name for one in known.owners.largest if one.kind == "swapped"}
    return view


def hosted(view: EngineView) -> dict[str, tuple[BlockHolder, list[int]]]:
    """What is in host memory, with its slots."""
    slots, at, found = np.frombuffer(view.host_table, np.int32).tolist(), 0, {}
    for holder in view.host_holders:
        found[holder.name] = holder, slots[at : at + holder.blocks]
        at += holder.blocks
    assert at == len(slots)
    return found


def test_swapped_requests_are_drawn_in_host_memory(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    for choice in ("swapping_pays", "loading_pays"):
        monkeypatch.setattr(Costs, choice, lambda *_: True)
    llm = make_llm(num_gpu_blocks_override=24, swap_space=0.01, max_num_seqs=6)
    scheduler = llm.llm_engine.core.scheduler
    tokens = {}
    for i in range(8):
        prompt = tokens[str(i)] = [5 + (i * 7 + j) % 90 for j in range(40 + 5 * i)]
        llm.llm_engine.add_request(str(i), {"prompt_token_ids": prompt}, LONG, tenant=("acme", "other")[i % 2])
    seen: set[str] = set()
    writer, numbers = FrameWriter(ALL, 0), []
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
        view = look(llm)
        frame = writer.write(view, None)
        numbers.append(frame.frame)
        swapped = {name: one for name, one in hosted(view).items() if one[0].kind == "swapped" and one[1]}
        rows = {row.name: row for row in frame.rows if row.kind == "swapped"}
        assert {name for name, row in rows.items() if row.blocks} == set(swapped)
        theirs, _ = draw_host_cells(view, THEIRS)
        for name, (holder, slots) in swapped.items():
            if name in seen:
                continue
            seen.add(name)
            assert holder.known >= len(tokens[name]) and 1 <= rows[name].colour <= COLOURS
            states = {int(theirs[slot]) & 7 for slot in slots}
            assert states <= ({HELD, SHARED, MOVING} if holder.tenant == "acme" else {OTHER, MOVING})
            detail = describe_block(scheduler, slots[0] + 1, "host")
            (user,) = detail.users
            assert (user.name, user.kind, user.first_token) == (name, "swapped", 0) and detail.is_cached
            assert user.tokens == tokens[name][:16]
    assert len(seen) > 1 and numbers == list(range(1, len(numbers) + 1))
    with pytest.raises(ValidationError, match="no block 0"):
        describe_block(scheduler, 0, "host")


def test_sleeping_sessions_are_drawn_in_host_memory(make_llm: MakeLLM, tmp_path: Path) -> None:
    llm = make_llm(swap_space=0.01, kv_disk=str(tmp_path))
    prompts = {name: list(range(first, first + 50)) for name, first in (("mine", 5), ("theirs", 20))}
    for name, prompt in prompts.items():
        session = llm.sessions.create(name)
        session.append(prompt)
        session.generate(SamplingParams(max_tokens=4, ignore_eos=True))
        assert look(llm).holders[-1].name == name
        session.suspend()
    view = look(llm)
    found = hosted(view)
    assert set(found) == {"mine", "theirs"} and not view.holders
    for name, (holder, slots) in found.items():
        assert (holder.kind, holder.place, holder.known) == ("asleep", "host", 54) and len(slots) == 4
        detail = describe_block(llm.llm_engine.core.scheduler, slots[1] + 1, "host")
        users = [(user.name, user.first_token, user.tokens) for user in detail.users]
        assert users == [(name, 16, prompts[name][16:32])]


def test_without_lower_tiers_there_is_no_host_map(make_llm: MakeLLM) -> None:
    llm = make_llm()
    frame = FrameWriter(ALL, 0).write(look(llm), None)
    assert frame.host_cells is None and frame.host_counts == {} and frame.adapters is None
    with pytest.raises(ValidationError, match="no such tier"):
        describe_block(llm.llm_engine.core.scheduler, 1, "host")
