"""`quire bench serve` against a server with known delays and faults."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from tests.cli.stub_server import running
from tests.cli.virtual_time import virtual

KEYS = {
    "duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput",
    "request_goodput", "output_throughput", "total_token_throughput", "max_output_tokens_per_s",
    "max_concurrent_requests", "input_lens", "output_lens", "ttfts", "itls", "errors",
}  # fmt: skip


@pytest.fixture
def bench(quire, tmp_path):
    """Run it against `stub`; returns exit code, output and result file."""

    def run(stub, *arguments):
        path = tmp_path / "result.json"
        path.unlink(missing_ok=True)
        ran = quire("bench", "serve", "--base-url", stub.url, "--save-result", path, "--save-detailed", *arguments)
        return ran, json.loads(path.read_text()) if path.exists() else None

    return run


@pytest.fixture
def stubs(monkeypatch):
    """Stub servers in virtual time: their delays are exact, whatever else the machine does."""
    return functools.partial(virtual, monkeypatch)


def flags(text: str) -> list[str]:
    return text.split()


def test_metrics_are_the_servers_delays(bench, stubs):
    with stubs(first=0.1, gap=0.01, tokens=20) as stub:
        ran, found = bench(stub, *flags("--num-prompts 30 --request-rate 30 --goodput ttft:150 tpot:15"))
    assert ran.code == 0, ran.err
    assert set(found) >= KEYS
    for name, value in {"ttft": 100, "tpot": 10, "itl": 10, "e2el": 290}.items():
        assert [found[f"{each}_{name}_ms"] for each in ("mean", "median", "p99")] == pytest.approx([value] * 3)
    assert (found["completed"], found["failed"], found["good_requests"]) == (30, 0, 30)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (30 * 7, 30 * 20)
    assert found["model_id"] == "stub"
    assert [len(gaps) for gaps in found["itls"]] == [19] * 30
    for word in ("30 completed, 0 failed", "time to first token (ttft)", "p99", "100.0% with ttft ≤ 150 ms"):
        assert word in ran.out


def test_requests_are_sent_at_the_rate_whatever_the_server_does(bench, stubs):
    with stubs(first=0.3) as stub:
        _, found = bench(stub, *flags("--num-prompts 60 --request-rate 60 --burstiness 1000 --warmup 0"))
        times = [seen.at for seen in stub.seen]
    assert times[-1] - times[0] == pytest.approx(59 / 60, abs=0.1)  # gaps are drawn: 1000 is almost even
    assert 17 <= found["max_concurrent_requests"] <= 20  # 0.3 s at 60 requests/s
    assert found["client_late_p99_ms"] == pytest.approx(0, abs=1e-6)


def test_a_closed_loop_keeps_its_concurrency_and_reuses_connections(bench, stubs):
    with stubs(first=0.05) as stub:
        _, found = bench(stub, *flags("--num-prompts 32 --max-concurrency 4 --warmup 0"))
        assert stub.connections <= 5  # four, and the one for /v1/models
    assert found["max_concurrent_requests"] == 4
    assert found["duration"] == pytest.approx(32 / 4 * 0.05)
    assert found["client_late_p99_ms"] == pytest.approx(0, abs=1e-6)


def test_without_a_rate_all_requests_are_sent_at_once(bench, stubs):
    with stubs(first=0.3) as stub:
        _, found = bench(stub, *flags("--num-prompts 40 --warmup 0"))
        times = [seen.at for seen in stub.seen]
    assert found["max_concurrent_requests"] == 40
    assert times[-1] == pytest.approx(times[0])


def test_a_trace_is_replayed(bench, stubs, tmp_path):
    moments = [0, 100, 100, 500, 900]
    lines = [{"timestamp": at, "input_length": 10 + i, "output_length": i + 1} for i, at in enumerate(moments)]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with stubs() as stub:
        ran, found = bench(stub, "--trace", tmp_path / "trace.jsonl", *flags("--trace-speed 2 --warmup 0"))
        seen = stub.seen
    assert (ran.code, found["num_prompts"]) == (0, 5)
    assert [each.at - seen[0].at for each in seen] == pytest.approx([0, 0.05, 0.05, 0.25, 0.45])
    assert [each.body["max_tokens"] for each in seen] == [1, 2, 3, 4, 5]
    assert [len(each.body["prompt"].split()) for each in seen] == [10, 11, 12, 13, 14]


def test_what_is_sent(bench, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "")
    with running() as stub:
        stub.url += "/v1"
        bench(stub, *flags("--num-prompts 1 --warmup 0 --output-len 9 --model other --header X-Tenant=a"))
        more = flags("--backend openai-chat --api-key sk-x --ignore-eos --temperature 0 --num-prompts 1 --warmup 0")
        bench(stub, *more, "--extra-body", '{"max_tokens": 3, "priority": 1}')
        first, second = stub.seen
    assert first.path == "/v1/completions"
    assert set(first.body) == {"model", "prompt", "max_tokens", "stream", "stream_options"}
    assert (first.body["model"], first.body["max_tokens"], first.headers["x-tenant"]) == ("other", 9, "a")
    assert "authorization" not in first.headers
    assert second.path == "/v1/chat/completions"
    assert second.headers["authorization"] == "Bearer sk-x"
    assert (second.body["model"], second.body["max_tokens"], second.body["priority"]) == ("stub", 3, 1)
    assert second.body["ignore_eos"] is True
    assert second.body["stream_options"] == {"include_usage": True}
    assert len(second.body["messages"][0]["content"].split()) == 128


def test_adapters_are_drawn_at_random(bench):
    drawn = []
    for seed in (1, 1, 2):
        with running() as stub:
            bench(stub, *flags(f"--num-prompts 30 --warmup 0 --output-len 1 --lora-modules a b c --seed {seed}"))
            drawn.append(sorted(each.body["model"] for each in stub.seen))
    assert set(drawn[0]) == {"a", "b", "c"}
    assert drawn[0] == drawn[1] != drawn[2]


def test_the_role_of_a_chat_response_is_not_its_first_token(bench, stubs):
    with stubs(first=0.1) as stub:
        _, found = bench(stub, *flags("--backend openai-chat --num-prompts 3 --warmup 0"))
    assert found["median_ttft_ms"] == pytest.approx(100)


def test_events_are_counted_if_the_server_sends_no_usage(bench):
    with running(usage=False, tokens=6) as stub:
        ran, found = bench(stub, *flags("--num-prompts 2"))
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (0, 12)
    assert "sent no usage" in ran.out


@pytest.mark.parametrize(
    ("fault", "kind", "why"),
    [
        ("429", "HTTP 429", "the queue is full"),
        ("hang up", "connection lost", "without a response"),
        ("cut", "cut off", "within the response"),
        ("no end", "cut off", "without [DONE]"),
        ("malformed", "malformed event", "truncated"),
        ("error event", "error event", "the engine died"),
        ("no stream", "no stream", "no events"),
        ("stall", "timeout", "no end after 0.5 s"),
    ],
)
def test_failures_are_counted_by_kind_and_do_not_change_the_metrics(bench, stubs, fault, kind, why):
    with stubs(fault=fault, every=3, gap=0.005) as stub:
        ran, found = bench(stub, *flags("--num-prompts 12 --max-concurrency 4 --warmup 0 --timeout 0.5"))
    assert ran.code == 0
    assert (found["completed"], found["failed"], found["failures"]) == (8, 4, {kind: 4})
    assert f"4 × {kind}" in ran.out
    assert why in ran.out
    assert sum(why in error for error in found["errors"]) == 4
    assert found["total_output_tokens"] == 8 * 4


def test_a_complete_response_is_not_a_failure_if_its_connection_is_lost(bench):
    with running(fault="done, then cut") as stub:
        _, found = bench(stub, *flags("--num-prompts 5"))
    assert (found["completed"], found["failed"]) == (5, 0)


def test_a_server_that_refuses_is_reported_once(bench):
    with running(fault="429") as stub:
        ran, found = bench(stub, *flags("--num-prompts 50"))
        assert len(stub.seen) == 1
    assert (ran.code, found, ran.out) == (2, None, "")
    assert ran.err.count("\n") == 1
    assert "HTTP 429: the queue is full" in ran.err


def test_the_exit_code_is_1_if_all_requests_fail(bench):
    with running(fault="cut") as stub:
        ran, found = bench(stub, *flags("--num-prompts 3 --warmup 0"))
    assert (ran.code, found["failed"]) == (1, 3)


def test_it_waits_for_a_server_that_is_starting(quire):
    with running() as stub:
        url = stub.url
    started = threading.Event()
    answers = []

    def serve_late():
        time.sleep(0.6)
        with running(port=int(url.rpartition(":")[2])) as stub:
            started.wait(20)
            answers.append(len(stub.seen))

    thread = threading.Thread(target=serve_late)
    thread.start()
    arguments = flags(f"bench serve --base-url {url} --num-prompts 2 --ready-check-timeout-sec 10")
    assert quire(*arguments).code == 0
    started.set()
    thread.join()
    assert answers == [3]


def test_ctrl_c_reports_the_results_so_far(bench, stubs):
    def interrupt(count):
        if count == 15:
            os.kill(os.getpid(), signal.SIGINT)

    with stubs(gap=0.02, tokens=20, on_request=interrupt) as stub:
        ran, found = bench(stub, *flags("--num-prompts 1000 --request-rate 20 --warmup 0"))
    assert ran.code == 130
    assert found["completed"] >= 3
    assert found["failures"] == {"interrupted": found["failed"]}
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_plot_is_written(bench, tmp_path):
    with running() as stub:
        bench(stub, "--num-prompts", 5, "--plot", tmp_path / "run.svg")
    assert (tmp_path / "run.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--base-url http://127.0.0.1:9", "is the server running?"),
        ("--base-url ftp://x", "'ftp://x' is not the URL of a server"),
        ("--request-rate 0", "--request-rate must be above 0"),
        ("--goodput fast", "--goodput takes milliseconds"),
        ("--percentile-metrics ttft,speed", "'speed'"),
        ("--metric-percentiles 101", "numbers up to 100"),
        ("--range-ratio 2", "--range-ratio must be from 0 to 1"),
        ("--dataset-name custom", "--dataset-path"),
        ("--header X", "NAME=VALUE"),
        ("--api-key a\x07", "not allowed in headers"),
        ("--trace /nowhere", "there is no file"),
    ],
)
def test_bad_input_is_one_line(quire, arguments, said):
    ran = quire("bench", "serve", *flags(arguments))
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert said in ran.err


def test_it_starts_without_torch():
    with running() as stub:
        arguments = ["bench", "serve", "--base-url", stub.url, "--num-prompts", "2"]
        code = (
            "import sys; from quire.cli.main import main\n"
            f"assert main({arguments!r}) == 0\n"
            "sys.exit(bool({'torch', 'transformers', 'numpy', 'httpx'} & set(sys.modules)))"
        )
        assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


def test_many_streams_are_timed_as_accurately_as_one(bench, stubs):
    with stubs(gap=0.02, tokens=50) as stub:
        _, found = bench(stub, *flags("--num-prompts 64 --max-concurrency 64 --warmup 0"))
    assert found["completed"] == 64
    assert [found[f"{each}_tpot_ms"] for each in ("mean", "median", "p99")] == pytest.approx([20] * 3)
