"""`quire inspect --snapshot` and `--url`: a map as people read it, and one clear line where there is none."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from quire.messages.memory_map import (
    DeviceBlocks,
    DiskBlocks,
    ExpertLoad,
    GroupBlocks,
    HostBlocks,
    MemoryMap,
    Owner,
    Owners,
    Pressure,
    Sharing,
    Sleeping,
    SleepingSession,
    TransferCounts,
)
from tests.cli.stub_server import running

OWNERS = [
    Owner(kind="running", name=f"cmpl-{i}", tenant="acme", tokens=900 - i, blocks=60 - i, shared=3) for i in range(24)
]
FOUND = MemoryMap(
    object="memory_map",
    taken=time.time(),
    device=DeviceBlocks(
        capacity=100, block_size=16, block_bytes=1 << 20, empty=40, cached=20, held=25, shared=10, moving=5
    ),
    blocks="." * 40 + "c" * 20 + "1" * 25 + "s" * 10 + ">" * 5,
    stride=1,
    sharing=Sharing(by_one=25, by_two=4, by_more=6, most=8, saved=37, unaccounted=0),
    owners=Owners(running=28, loading=1, swapped=1, sessions=2, waiting=9, largest=OWNERS),
    transfers=TransferCounts(out=3, back=2, writes=1),
    pressure=Pressure(device=1),
    host=HostBlocks(slots=64, used=32, owned=16, block_bytes=1 << 20),
    disk=DiskBlocks(blocks=7, owned=7, block_bytes=1 << 20, disk_bytes=9 << 20, capacity=1 << 30, is_paused=True),
    sleeping=Sleeping(
        count=10_000, in_host=400, on_disk=9_500, nowhere=100, unknown=0,
        latest=[SleepingSession(name="agent-7", tokens=544, kv_tokens=543, place="disk")],
    ),
    experts=[ExpertLoad(layer=0, chosen=[10, 10, 10, 10]), ExpertLoad(layer=1, chosen=[0, 30, 10, 0])],
)  # fmt: skip


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    monkeypatch.delenv("QUIRE_ADMIN_KEY", raising=False)


def saved(folder: Path, found: MemoryMap = FOUND) -> Path:
    path = folder / "map.json"
    path.write_bytes(found.to_json())
    return path


def test_a_snapshot_is_drawn(quire, tmp_path):
    ran = quire("inspect", "--snapshot", saved(tmp_path))
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert "map.json" in lines[0]
    assert "40 of 100 blocks" in lines[1] and "40.0 MiB of 100.0 MiB" in lines[1] and "past watermark 1" in lines[1]
    assert "32 of 64 blocks" in lines[2] and "16 owned" in lines[2]
    assert "7 blocks" in lines[3] and "writes paused" in lines[3]
    assert lines[4] == "  " + "·" * 40 + "░" * 20 + "▒" * 25 + "█" * 10 + "»" * 5
    assert "(a cell is a block)" in lines[5]
    assert "saves 37 blocks (37.0 MiB)" in ran.out
    assert "3 blocks to host, 2 to device, 1 to disk" in ran.out
    assert "28 running, 1 loading, 9 waiting (1 swapped out), 2 sessions between turns" in ran.out
    owners = [line.split() for line in lines if line.strip().startswith("cmpl-")]
    assert owners[0] == ["cmpl-0", "running", "acme", "900", "60", "3"]
    assert len(owners) == 20 and "and 12 more" in ran.out
    assert "10000 sessions: 400 in host memory, 9500 on disk, 100 without saved KV" in ran.out
    assert ["agent-7", "disk", "544", "543"] in [line.split() for line in lines]
    assert "4 in each of 2 layers; max / mean 2.00 on average, 3.00 at worst" in ran.out
    assert ["1", "40", "3.00", "1:", "75.0%", "2:", "25.0%"] in [line.split() for line in lines]


def test_cache_groups_are_listed_with_the_blocks_that_each_owner_has_in_them(quire, tmp_path):
    long = Owner(kind="running", name="long", tokens=100_000, blocks=6262, shared=0, by_group=[6250, 9, 3])
    groups = [
        GroupBlocks(kind="full", layers=12, held=6250, cached=10),
        GroupBlocks(kind="window", layers=12, window=128, held=9, cached=4),
        GroupBlocks(kind="state", layers=24, state_blocks=3, held=3, cached=6),
    ]
    owners = Owners(running=1, loading=0, swapped=0, sessions=0, waiting=0, largest=[long])
    ran = quire("inspect", "--snapshot", saved(tmp_path, replace(FOUND, groups=groups, owners=owners)))
    assert (ran.code, ran.err) == (0, "")
    lines = [line.split() for line in ran.out.splitlines()]
    assert ["every", "token", "12", "6250", "10", "6.1", "GiB"] in lines
    assert ["window", "of", "128", "tokens", "12", "9", "4", "13.0", "MiB"] in lines
    assert ["recurrent", "states", "of", "3", "blocks", "24", "3", "6", "9.0", "MiB"] in lines
    assert ["long", "running", "100000", "6262", "0", "6250", "+", "9", "+", "3"] in lines


EARLIER = """
{"object": "memory_map", "taken": 1760000000.5, "blocks": ".c1>", "stride": 1,
 "device": {"capacity": 4, "block_size": 16, "block_bytes": 1024,
            "empty": 1, "cached": 1, "held": 1, "shared": 0, "moving": 1},
 "sharing": {"by_one": 1, "by_two": 0, "by_more": 0, "most": 1, "saved": 0, "unaccounted": 0},
 "owners": {"running": 1, "loading": 0, "put_by": 1, "sessions": 0, "waiting": 1, "largest": [
   {"kind": "running", "name": "a", "tenant": "", "session": "", "tokens": 9, "blocks": 1, "shared": 0},
   {"kind": "put by", "name": "b", "tenant": "", "session": "", "tokens": 40, "blocks": 3, "shared": 0}]},
 "journeys": {"out": 1, "back": 0, "writes": 0}, "pressure": {"device": 0, "host": 0, "disk": 0},
 "host": {"slots": 8, "used": 3, "owned": 3, "block_bytes": 1024},
 "disk": {"blocks": 2, "owned": 2, "block_bytes": 1024, "disk_bytes": 4096, "capacity": 1048576, "is_resting": true},
 "sleeping": {"count": 1, "in_host": 0, "on_disk": 1, "nowhere": 0, "unknown": 0,
              "latest": [{"name": "s", "tenant": "", "tokens": 20, "kv_tokens": 19, "place": "disk"}]},
 "experts": []}
"""
"""What `to_json` wrote before some fields were renamed."""


def test_a_snapshot_of_an_earlier_version_is_read(quire, tmp_path):
    read = MemoryMap.from_json(EARLIER, "old.json")
    assert read.transfers == TransferCounts(out=1, back=0, writes=0)
    assert read.owners.swapped == 1 and [owner.kind for owner in read.owners.largest] == ["running", "swapped"]
    assert read.disk is not None and read.disk.is_paused
    assert MemoryMap.from_json(read.to_json(), "new.json") == read
    path = tmp_path / "old.json"
    path.write_text(EARLIER)
    ran = quire("inspect", "--snapshot", path)
    assert ran.code == 0 and "(1 swapped out)" in ran.out and "writes paused" in ran.out


def test_a_large_cache_is_drawn_in_few_lines(quire, tmp_path):
    large = msgspec.structs.replace(FOUND, blocks="s" * 40_000 + "." * 25_536, stride=2)
    ran = quire("inspect", "--snapshot", saved(tmp_path, large))
    cells = [line for line in ran.out.splitlines() if set(line.strip()) <= {"█", "·"} and line.strip()]
    assert len(cells) <= 16
    drawn = "".join(line.strip() for line in cells)
    assert drawn.count("█") / len(drawn) == pytest.approx(40_000 / 65_536, abs=0.01)
    assert "every second sampled" in ran.out


def test_names_cannot_speak_to_the_terminal(quire, tmp_path):
    rude = Owner(kind="running", name="\x1b[2J\x07[red]x\n" + "y" * 99, tokens=1, blocks=1, shared=0)
    owners = msgspec.structs.replace(FOUND.owners, largest=[rude])
    ran = quire("inspect", "--snapshot", saved(tmp_path, msgspec.structs.replace(FOUND, owners=owners)))
    assert ran.code == 0
    assert "\x1b" not in ran.out and "\x07" not in ran.out
    assert "?[2J?[red]x?yyy" in ran.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--snapshot", "MISSING"], "MISSING cannot be read: No such file"),
        (["--snapshot", __file__], "is no memory map"),
        (["--snapshot", Path(__file__).parent], "cannot be read: Is a directory"),
        (["--url", "http://127.0.0.1:1"], "nothing answers at http://127.0.0.1:1"),
        (["--url", "127.0.0.1:8000"], "'http://'"),
        (["--url", "http://[::1"], "http://[::1"),
        (["--watch", "2"], "--watch needs --url"),
        (["--url", "http://x", "--watch", "0"], "from 0.1 to 86400 seconds, got 0"),
        (["--url", "http://x", "--watch", "soon"], "from 0.1 to 86400 seconds, got soon"),
        (["--url", "http://x", "--snapshot", "y"], "cannot be used together"),
        (["some-model", "--snapshot", "y"], "is for a model"),
        (["--snapshot", "y", "--dtype", "float32"], "--dtype is for a model"),
    ],
)  # fmt: skip
def test_what_cannot_be_shown_is_told_in_one_line(quire, arguments, said):
    ran = quire("inspect", *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err
    assert ran.err.count("\n") == 1


def test_a_server_of_another_kind_is_told_apart(quire):
    with running() as stub:
        ran = quire("inspect", "--url", stub.url)
    assert ran.code == 2
    assert f"what {stub.url}/admin/memory sent is no memory map" in ran.err
    assert ran.err.count("\n") == 1
