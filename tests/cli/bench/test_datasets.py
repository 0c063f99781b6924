"""Datasets and arrival times of `quire bench serve`."""

from __future__ import annotations

import itertools
import json
import math
import statistics

import pytest

from quire.cli.bench.load.datasets import DATASETS, DatasetOptions, arrival_times
from quire.config import EngineConfig
from quire.errors import ValidationError
from quire.loading.hub import resolve
from quire.loading.tokenizer import load_tokenizer


def make(name: str, **changes):
    return DATASETS[name](DatasetOptions(**{"count": 20, "input_len": 32, "output_len": None, "seed": 0, **changes}))


def lines(path, *objects):
    path.write_text("\n".join(json.dumps(each) for each in objects))
    return str(path)


def test_random_prompts_have_the_given_tokens_and_no_common_prefix():
    tokenizer = load_tokenizer(resolve(EngineConfig.model))
    requests = make("random", input_len=100, output_len=9)
    lengths = [len(tokenizer.encode(request.prompt)) for request in requests]
    assert all(99 <= length <= 102 for length in lengths), lengths
    assert len({request.prompt[:40] for request in requests}) == 20
    assert {request.output_len for request in requests} == {9}


def test_random_characters_are_counted_exactly():
    assert {len(request.prompt) for request in make("random", input_len=77, unit="chars")} == {77}


def test_lengths_spread_around_those_given():
    requests = make("random", count=500, input_len=100, output_len=10, spread=0.5)
    inputs, outputs = [request.input_len for request in requests], [request.output_len for request in requests]
    assert (min(inputs), max(inputs)) == (50, 150)
    assert (min(outputs), max(outputs)) == (5, 15)
    assert inputs == [len(request.prompt.split()) for request in requests]


def test_prefixes_repeat():
    requests = make("prefix_repetition", prefix_len=16, num_prefixes=4)
    beginnings = [" ".join(request.prompt.split()[:16]) for request in requests]
    assert len(set(beginnings)) == 4
    assert {beginnings.count(beginning) for beginning in beginnings} == {5}
    assert len({request.prompt for request in requests}) == 20


def test_prompts_of_a_file_are_in_order_and_repeat(tmp_path):
    talk = [{"role": "user", "content": "hi"}]
    path = lines(tmp_path / "p.jsonl", {"prompt": "one", "output_tokens": 5}, {"messages": talk})
    requests = make("custom", count=3, path=path)
    assert [(request.prompt, request.output_len) for request in requests] == [("one", 5), (talk, 128), ("one", 5)]
    assert len(make("custom", count=None, path=path)) == 2
    assert {request.output_len for request in make("custom", output_len=7, path=path)} == {7}


def test_sharegpt_has_first_questions_with_output_lengths_of_the_answers(tmp_path):
    talk = {"conversations": [{"from": "human", "value": "q" * 40}, {"from": "gpt", "value": "a" * 400}]}
    short = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}
    path = tmp_path / "s.json"
    path.write_text(json.dumps([short, talk, {"conversations": []}]))
    requests = make("sharegpt", count=2, path=str(path))
    assert [(request.prompt, request.output_len) for request in requests] == [("q" * 40, 100)] * 2


def test_a_trace_keeps_times_lengths_and_shared_blocks(tmp_path):
    path = lines(
        tmp_path / "t.jsonl",
        {"timestamp": 3000, "input_length": 1100, "output_length": 3, "hash_ids": [7, 8, 9]},
        {"timestamp": 1000, "input_length": 600, "output_length": 5, "hash_ids": [7, 11]},
        {"timestamp": 2000, "input_length": 20, "output_length": 1},
    )
    requests = make("trace", count=None, path=path, speed=2.0)
    assert [(request.at, request.input_len, request.output_len) for request in requests] == [
        (0.0, 600, 5),
        (0.5, 20, 1),
        (1.0, 1100, 3),
    ]
    words = [request.prompt.split() for request in requests]
    assert [len(each) for each in words] == [600, 20, 1100]
    assert words[0][:512] == words[2][:512]
    assert words[0][512:600] != words[2][512:600]
    assert [request.at for request in make("trace", count=2, path=path, time_unit="s")] == [0.0, 1000.0]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("custom", "", "is empty"),
        ("custom", '{"prompt": "x"}\n{"pro', "line 2: not JSON"),
        ("custom", "[]", "line 1: not a JSON object"),
        ("custom", '{"text": "x"}', 'needs "prompt", a string'),
        ("custom", '{"prompt": "x", "output_tokens": 0}', "output_tokens must be an integer of at least 1, got 0"),
        ("trace", '{"timestamp": "x", "input_length": 1, "output_length": 1}', "timestamp must be a number"),
        ("trace", '{"timestamp": 1, "output_length": 1}', "input_length must be"),
        ("sharegpt", "{}", "not a list of conversations"),
        ("sharegpt", "[]", "has no conversation"),
    ],
)
def test_errors_of_a_file_name_the_line(tmp_path, name, text, said):
    (tmp_path / "f").write_text(text)
    with pytest.raises(ValidationError, match=said):
        make(name, path=str(tmp_path / "f"))


def test_a_missing_file_is_an_error():
    with pytest.raises(ValidationError, match="there is no file '/nowhere'"):
        make("custom", path="/nowhere")
    with pytest.raises(ValidationError, match="--dataset-path"):
        make("custom")


def gaps(times):
    return [after - before for before, after in itertools.pairwise(times)]


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_gaps_have_the_rate_and_the_variation_of_their_gamma_distribution(burstiness, variation):
    found = gaps(arrival_times(20_000, 50.0, burstiness, 1, seed=1))
    mean = statistics.fmean(found)
    assert mean == pytest.approx(1 / 50, rel=0.05)
    assert statistics.pstdev(found) / mean == pytest.approx(variation, rel=0.05)  # 1/√shape


def test_poisson_arrivals_per_second_have_variance_equal_to_their_mean():
    times = arrival_times(40_000, 20.0, 1.0, 1, seed=2)
    counts = [0] * math.ceil(times[-1])
    for time in times:
        counts[int(time)] += 1
    assert statistics.pvariance(counts[:-1]) == pytest.approx(20, rel=0.15)


def test_bursts_are_sent_together_at_the_same_rate():
    times = arrival_times(8_000, 100.0, 1.0, 8, seed=3)
    assert all(len(set(times[i : i + 8])) == 1 for i in range(0, 8_000, 8))
    assert len(times) / times[-1] == pytest.approx(100, rel=0.1)


def test_an_infinite_rate_is_all_at_once():
    assert arrival_times(5, math.inf, 1.0, 1, seed=0) == [0.0] * 5


def test_a_seed_gives_the_same_times():
    assert arrival_times(50, 3.0, 1.0, 1, seed=4) == arrival_times(50, 3.0, 1.0, 1, seed=4)
    assert arrival_times(50, 3.0, 1.0, 1, seed=4) != arrival_times(50, 3.0, 1.0, 1, seed=5)


@pytest.mark.parametrize(("rate", "burstiness"), [(0, 1), (-1, 1), (math.nan, 1), (1, 0), (1, math.inf)])
def test_impossible_arrivals_are_refused(rate, burstiness):
    with pytest.raises(ValidationError, match="must be above 0"):
        arrival_times(1, rate, burstiness, 1, seed=0)
