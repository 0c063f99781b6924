"""Images, the disk tier, and replicas that share experts over a virtual clock; against arithmetic."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.cli.main import main
from quire.errors import QuireError, ValidationError
from quire.simulation.costs import CostModel, StepWork
from quire.simulation.device import HostLink, SimulatedStep
from quire.simulation.fleet import Fleet, FleetOptions
from quire.simulation.load import Conversation, LoadOptions, OpenConversation, Turn, draw_load, read_trace
from quire.simulation.measurements import SimulationResult
from quire.simulation.ranks import RankConnection, share_experts

FLAT = CostModel(
    "flat", "by hand", [(1, 0.01), (64, 0.01)], 0.0, 0.0, num_blocks=400, max_num_seqs=8, max_num_batched_tokens=128
)


def simulate(load: list[Conversation], costs: CostModel = FLAT, **options: Any) -> SimulationResult:
    return Fleet(costs, FleetOptions(**{"max_step_stretch": math.inf, **options})).run(load)


def seen(*images: tuple[str, int], at: float = 0.0, text: int = 16, output: int = 4) -> Conversation:
    return Conversation(at, (Turn(text, output, images=images),))


def test_an_image_is_encoded_once_and_takes_its_time() -> None:
    result = simulate([seen(("cat", 32)), seen(("cat", 32), at=5.0), seen(("dog", 32), at=10.0)], image_seconds=0.5)
    # A step of 10 ms has room for 48 tokens, and to encode 32. Later the prefix cache has the image.
    assert result.values("ttft") == [pytest.approx(0.51), pytest.approx(0.01), pytest.approx(0.51)]
    assert result.images_encoded == 2 and result.input_tokens == 3 * 48
    assert result.cached_tokens == 32, "the blocks of the cat, and not of the dog"


def test_without_a_prefix_cache_the_encoders_cache_serves() -> None:
    load = [seen(("cat", 32)), seen(("cat", 32), at=5.0)]
    result = simulate(load, prefix_caching=False, image_seconds=0.5)
    assert (result.images_encoded, result.images_cached, result.cached_tokens) == (1, 1, 0)
    assert result.values("ttft") == [pytest.approx(0.51), pytest.approx(0.01)]


def test_images_stay_in_a_conversation_and_survive_a_death() -> None:
    turns = (Turn(16, 8, images=(("cat", 32),)), Turn(16, 8, pause=1.0, images=(("dog", 32),)))
    conversation = OpenConversation(Conversation(0.0, turns), 0, 0)
    conversation.prompt()
    conversation.end_turn([7] * 8)
    prompt = conversation.prompt()
    assert len(prompt) == 32 + 16 + 8 + 32 + 16 == conversation.source.length - 8
    assert [(span.start, span.length, span.item) for span in conversation.spans] == [(0, 32, 0), (56, 32, 1)]
    load = [Conversation(0.0, turns), seen(("cow", 48), output=60)]
    result = simulate(load, kills=((0, 0.1),), restart_seconds=0.5, image_seconds=0.2)
    assert (result.completed, result.failed, result.output_tokens) == (3, 0, 76) and result.retried > 0


def test_an_image_that_the_encoder_cannot_keep_is_refused() -> None:
    with pytest.raises(QuireError, match="does not fit the encoder's cache of 16"):
        simulate([seen(("cat", 32))], encoder_rows=16)


def test_images_are_drawn_and_read_from_traces(tmp_path: Path) -> None:
    drawn = draw_load(LoadOptions(images=2, image_tokens=8, num_images=3), [0.0] * 50)
    names = {name for each in drawn for name, _ in each.turns[0].images}
    assert names == {"image 0", "image 1", "image 2"}
    assert len({image for each in draw_load(LoadOptions(images=2), [0.0] * 5) for image in each.turns[0].images}) == 10
    trace = tmp_path / "trace.jsonl"
    line = '{"timestamp": 0, "input_length": 9, "output_length": 2, "images": '
    trace.write_text(f'{line}[32, ["logo", 16]]}}\n{line}[["logo", 16]]}}\n')
    first, second = read_trace(str(trace))
    assert [tokens for _, tokens in first.turns[0].images] == [32, 16]
    assert first.turns[0].images[1] == second.turns[0].images[0] == ("logo", 16)
    trace.write_text(f'{line}["large"]}}')
    with pytest.raises(ValidationError, match="line 1: images must be"):
        read_trace(str(trace))


# Disk

LINK = HostLink(block_bytes=1 << 20, out_rate=1e9, back_rate=1e9)


def turns_apart() -> list[Conversation]:
    """Conversations that come back when host memory has forgotten them."""
    return [Conversation(0.5 * i, (Turn(80, 20), Turn(20, 10, pause=60.0))) for i in range(12)]


def test_the_disk_has_what_host_memory_forgets() -> None:
    options = {"num_blocks": 20, "host_blocks": 24, "link": LINK}
    forgetful = simulate(turns_apart(), **options)
    result = simulate(turns_apart(), **options, disk_blocks=500, disk_rate=1e9)
    assert forgetful.disk_writes == 0 and forgetful.cached_tokens <= 4 * 96, "host memory has room for four"
    assert result.completed == 24 and result.disk_reads > 0
    assert result.cached_tokens > 3 * forgetful.cached_tokens
    assert simulate(turns_apart(), **options, disk_blocks=500, disk_rate=1e9).to_json() == result.to_json()
    small = simulate(turns_apart(), **options, disk_blocks=6, disk_rate=1e9)
    assert small.completed == 24 and small.cached_tokens < result.cached_tokens


def test_reading_from_disk_takes_its_time() -> None:
    options = {"num_blocks": 20, "host_blocks": 24, "link": LINK, "disk_blocks": 500}
    fast, slow = (simulate(turns_apart(), **options, disk_rate=rate) for rate in (4e9, 2e8))
    # A block is 1 MiB: 5 ms at 200 MB/s. The second turns' first tokens wait for up to six of them.
    assert slow.percentile("ttft", 99) > fast.percentile("ttft", 99) + 3 * 0.005


# Experts

MOE = msgspec.structs.replace(
    FLAT, tokens=[(1, 0.01), (64, 0.01), (128, 0.02)], layers=4, hidden_size=256, weight_bytes=64_000,
    expert_bytes=48_000, moe_layers=4, experts_per_token=2, kv_bytes_per_token=100,
)  # fmt: skip


def test_shared_experts_are_read_once_and_exchanged() -> None:
    link = RankConnection(latency=1e-4, rate=1e9)
    two = share_experts(MOE, 2, link)
    exchanged = 2 * 4 * (1e-4 + 0.5 * 32 * 2 * 256 * 2 / 1e9)
    # Three quarters of a step are experts: each rank computes half of them, for twice the tokens.
    assert two.seconds(StepWork(32, 0, 0, 0)) == pytest.approx(0.25 * 0.01 + 0.75 * 0.01 / 2 + exchanged, rel=0.05)
    assert two.num_blocks == 400 + 24_000 // 1600
    assert "modelled" in two.name and "modelled" in two.source
    with pytest.raises(ValidationError, match="does not say `moe_layers`"):
        share_experts(FLAT, 2)


def test_replicas_that_share_experts_step_together() -> None:
    """One has a long prompt to compute: the other's steps last as long."""
    costs = CostModel(
        "steep", "by hand", [(1, 0.001), (100, 0.1)], 0.0, 0.0, max_num_seqs=8, max_num_batched_tokens=100
    )
    steps: list[tuple[int, SimulatedStep]] = []
    options = FleetOptions(2, lockstep=2, routing_policy="least_loaded", max_step_stretch=math.inf)
    fleet = Fleet(costs, options, lambda replica, step: steps.append((replica, step)))
    result = fleet.run([Conversation(0.0, (Turn(1, 20),)), Conversation(0.0, (Turn(900, 11),))])
    alone = Fleet(costs, FleetOptions(2, routing_policy="least_loaded", max_step_stretch=math.inf)).run(
        [Conversation(0.0, (Turn(1, 20),)), Conversation(0.0, (Turn(900, 11),))]
    )
    assert min(alone.values("e2el")) == pytest.approx(0.02), "twenty steps of a token"
    # Nine steps of 100 ms beside the long prompt, eleven of 1 ms.
    assert sorted(result.values("e2el")) == [pytest.approx(0.91), pytest.approx(0.911)]
    starts = {replica: [step.start for number, step in steps if number == replica] for replica in (0, 1)}
    assert starts[0][:19] == pytest.approx(starts[1][:19])


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--disk-blocks", "5"], "through host memory"),
        (["--disk-gbps", "0"], "above 0"),
        (["--expert-parallel-size", "2"], "does not say `moe_layers`"),
        (["--images", "1", "--trace", "any"], "leave out --images"),
        (["--image-seconds", "-1"], "seconds of an image"),
        (["--watts", "0"], "--watts"),
        (["--host-gbps", "nan"], "above 0"),
        (["--tensor-parallel-size", "3"], "cannot divide a hidden size of 4096"),
        (["--kill", "0@-5"], "2@100"),
        (["--kill", "0@nan"], "2@100"),
        (["--restart-seconds", "nan"], "at least 0"),
        (["--pause", "-1"], "--pause"),
        (["--seed", "-1"], "--seed"),
        (["--dollars-per-hour", "-1"], "--dollars-per-hour"),
        (["--max-num-seqs", "100000"], "65536 rows"),
        (["--max-num-batched-tokens", "10", "--max-num-seqs", "99"], "no room for 99 rows"),
        (["--sweep", "max_step_stretch=0.5,2"], "at least 1"),
    ],
)
def test_bad_settings_are_refused(capsys: pytest.CaptureFixture[str], flags: list[str], said: str) -> None:
    assert main(["simulate", "--num-prompts", "2", *flags]) == 2
    assert said in capsys.readouterr().err
    with pytest.raises(ValidationError, match="groups of 2"):
        Fleet(FLAT, FleetOptions(replicas=3, lockstep=2))
