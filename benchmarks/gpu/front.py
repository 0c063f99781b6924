"""Whether the front limits the card: the same work offline and over HTTP, with 1, 2 and 4 front processes.

    python benchmarks/gpu/front.py                               # all parts, under 4 minutes on an H200 with 16 cores
    python benchmarks/gpu/front.py --parts offline burst --fronts 2     # some parts
    python benchmarks/gpu/front.py --quick                       # a tiny model and load: only shows that it runs

The model is a folder with a config.json (Qwen3-0.6B by default) with random weights, and a byte-level BPE tokenizer
that the script makes: every id of the vocabulary is a text, so that texts are tokenized and detokenized as with a real
one. The clients are four processes that read raw sockets. Parts:

    offline    512 requests of 512 tokens in, 256 out, in `LLM.generate`: ids in, no text out ("offline"), and text in
               and out ("offline, text")
    burst      the same 512 requests as HTTP streams, all sent at once: output tokens a second, share of "offline"
               (bar: 92 %), time to first token, and how busy front and engine processes are
    closed     256 clients, 512 in and 128 to 384 out, each sends its next request when one has ended: time to first
               token of the requests between the ramps, median and p99 (bar: p99 at most 1.5 times the median)
    idle       closed loop of twice as many clients as rows (256), next to 0, 2,000, 10,000 and again 0 open streams of
               lower priority that wait: output tokens a second (bar: at 10,000 no less than 95 % of the rate with 0)

A part that fails, or for which no time is left (--limit), is named in the table, and the others run. The table is
printed last; the results are also written as JSON to $OUT/front.json, if OUT is set, or to --json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raw_streams import IdleStreams, Load, Sent, percentile, raise_descriptor_limit

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PARTS = ("offline", "burst", "closed", "idle")
SHARE_BAR, TAIL_BAR, IDLE_BAR = 0.92, 1.5, 0.95
SPECIALS = {151643: "<|endoftext|>", 151644: "<|im_start|>", 151645: "<|im_end|>"}
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LOAD_PROCESSES = 4
TEMPERATURE = 0.6
READY_SECONDS = 120.0


@dataclass(frozen=True)
class Sizes:
    """How much work each part is."""

    requests: int = 512
    inputs: int = 512
    outputs: int = 256
    repeats: int = 2
    clients: int = 256
    rounds: int = 4
    """Requests of each client of the closed loop; its first is not counted."""
    idle: tuple[int, ...] = (2_000, 10_000)
    rows: int = 256
    window: float = 5.0
    """Seconds in which the rate next to idle streams is measured."""


QUICK = Sizes(12, 24, 8, 2, 6, 4, (20, 50), 4, 1.0)


# The model's folder


def make_model(source: Path, folder: Path, tiny: bool) -> None:
    """A folder with the configuration of `source` and a tokenizer."""
    config = json.loads((source / "config.json").read_text())
    if tiny:
        config |= {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        config |= {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(config))
    make_tokenizer(config["vocab_size"]).save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "clean_up_tokenization_spaces": False}))


def make_tokenizer(size: int) -> Any:
    """A byte-level BPE tokenizer with `size` tokens: the bytes, pairs of letters, and random merges of those."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    rng = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    names = [text for i in range(size) if (text := SPECIALS.get(i)) is not None]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(a, b) for a in letters for b in letters] + [("Ġ", a) for a in letters]
    made = [a + b for a, b in merges]
    known = {*alphabet, *made}
    while len(alphabet) + len(made) < size - len(names):
        left, right = rng.choice(made), rng.choice(made[: 26 * 26])
        if len(left) <= 10 and left + right not in known:
            merges.append((left, right))
            made.append(left + right)
            known.add(left + right)
    texts = iter([*alphabet, *made])
    vocabulary = {(SPECIALS[i] if i in SPECIALS else next(texts)): i for i in range(size)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    return tokenizer


class Prompts:
    """Random prompts of a number of tokens, as text and as ids; words are such that each is one token."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        words = [" " + text[1:] for text in tokenizer.get_vocab() if text.startswith("Ġ") and len(text) >= 4]
        words = sorted(words)[:20_000]
        encoded = tokenizer.encode_batch(words)
        self._words = [(word, one.ids[0]) for word, one in zip(words, encoded, strict=True) if len(one.ids) == 1]
        self._rng = random.Random(1)

    def draw(self, length: int) -> tuple[str, list[int]]:
        chosen = self._rng.choices(self._words, k=length)
        return "".join(word for word, _ in chosen), [number for _, number in chosen]


# Offline, in a process of its own


def offline(folder: Path, settings: dict[str, Any], sizes: Sizes) -> dict[str, list[float]]:
    """Output tokens a second of `LLM.generate`."""
    command = [sys.executable, __file__, "--offline", json.dumps([str(folder), settings, vars(sizes)])]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment())
    if ran.returncode:
        raise RuntimeError(f"the offline process exited with {ran.returncode}")
    found: dict[str, list[float]] = json.loads(ran.stdout.splitlines()[-1])
    return found


def run_offline(folder: str, settings: dict[str, Any], values: dict[str, Any]) -> None:
    """Print the rates as JSON."""
    from quire import LLM, SamplingParams

    sizes, prompts = Sizes(**values), Prompts(Path(folder))
    rates: dict[str, list[float]] = {"offline": [], "offline, text": []}
    with LLM(folder, **settings) as llm:
        for count in [min(64, sizes.requests), *[sizes.requests] * sizes.repeats]:
            for name, measured in rates.items():
                is_text = name == "offline, text"
                params = SamplingParams(
                    temperature=TEMPERATURE, ignore_eos=True, max_tokens=sizes.outputs, detokenize=is_text
                )
                drawn = [prompts.draw(sizes.inputs) for _ in range(count)]
                given: list[Any] = [text if is_text else {"prompt_token_ids": ids} for text, ids in drawn]
                begin = time.perf_counter()
                results = llm.generate(given, params, use_tqdm=False)
                seconds = time.perf_counter() - begin
                tokens = sum(len(result.outputs[0].token_ids) for result in results)
                if tokens != count * sizes.outputs or len(results[0].prompt_token_ids or ()) != sizes.inputs:
                    raise RuntimeError(f"{tokens} tokens, prompts of {len(results[0].prompt_token_ids or ())}")
                if count == sizes.requests:
                    measured.append(tokens / seconds)
    print(json.dumps({name: measured[-sizes.repeats :] for name, measured in rates.items()}))


# Served


class Server:
    """`quire serve` in its own processes."""

    def __init__(self, folder: Path, settings: dict[str, Any], fronts: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = ("127.0.0.1", probe.getsockname()[1])
        self._url = f"http://127.0.0.1:{self.address[1]}"
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
        flags += [f"--port={self.address[1]}", f"--api-server-count={fronts}", "--max-queued-requests=50000"]
        flags += ["--disable-log-stats", "--log-level=warning"]
        command = [sys.executable, "-m", "quire.cli.main", "serve", str(folder), *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment())
        deadline = time.monotonic() + READY_SECONDS
        while True:
            with contextlib.suppress(OSError):
                self.get("/ready")
                return
            if time.monotonic() > deadline or self.process.poll() is not None:
                self.stop()
                raise RuntimeError("the server did not become ready")
            time.sleep(0.1)

    def get(self, path: str) -> bytes:
        data: bytes = urllib.request.urlopen(f"{self._url}{path}", timeout=60).read()
        return data

    def generated(self) -> float:
        """Output tokens so far."""
        lines = self.get("/metrics").decode().splitlines()
        found = [line for line in lines if line.startswith(("vllm:generation_tokens_total", "quire:generation_tokens"))]
        return float(found[0].rpartition(" ")[2])

    def cpu_seconds(self) -> dict[str, float]:
        """CPU time of the processes that matter: the first front, the others, the engine."""
        times = {"front 0": _cpu_seconds(self.process.pid)}
        for pid in _children(self.process.pid):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if b"quire.server.fronts" in command:
                times[f"front {len([name for name in times if name.startswith('front')])}"] = _cpu_seconds(pid)
            elif b"quire.engine.process" in command:
                times["engine"] = _cpu_seconds(pid)
        return times

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _cpu_seconds(pid: int) -> float:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


class Requests:
    """Bodies of streaming requests with fresh prompts."""

    def __init__(self, prompts: Prompts, route: str, given: str) -> None:
        self.path = "/v1/chat/completions" if route == "chat" else "/v1/completions"
        self._prompts, self._is_chat, self._given = prompts, route == "chat", given

    def make(self, inputs: int, outputs: int, **more: Any) -> bytes:
        text, ids = self._prompts.draw(inputs)
        content: dict[str, Any] = {"prompt": text if self._given == "text" else ids}
        if self._is_chat:
            content = {"messages": [{"role": "user", "content": text}]}
        fields = {"max_tokens": outputs, "ignore_eos": True, "temperature": TEMPERATURE, "stream": True}
        return json.dumps({**content, **fields, "stream_options": {"include_usage": True}, **more}).encode()


def first_tokens(sent: list[Sent]) -> dict[str, float]:
    """Median and tail of the time to first token, in seconds."""
    times = [one.first - one.begin for one in sent]
    return {"ttft median": statistics.median(times), "ttft p99": percentile(times, 99), "ttft worst": max(times)}


def rate(sent: list[Sent]) -> float:
    """Output tokens a second, from the first request to the end of the last."""
    return sum(one.tokens for one in sent) / (max(one.end for one in sent) - min(one.begin for one in sent))


def burst(server: Server, requests: Requests, sizes: Sizes) -> list[dict[str, Any]]:
    """All requests at once, repeatedly."""
    found = []
    for turn in range(sizes.repeats + 1):
        count = sizes.requests if turn else min(64, sizes.requests)  # the first warms up
        bodies = [[requests.make(sizes.inputs, sizes.outputs)] for _ in range(count)]
        before = server.cpu_seconds()
        sent = Load(server.address, requests.path, bodies, LOAD_PROCESSES).wait()
        after = server.cpu_seconds()
        if (tokens := sum(one.tokens for one in sent)) != count * sizes.outputs:
            raise RuntimeError(f"{tokens} tokens instead of {count * sizes.outputs}")
        seconds = max(one.end for one in sent) - min(one.begin for one in sent)
        busy = {name: (after[name] - before[name]) / seconds for name in after}
        reads = sum(one.reads for one in sent) / tokens
        found.append({"rate": rate(sent), **first_tokens(sent), "busy": busy, "reads a token": reads})
    return found[1:]


def closed(server: Server, requests: Requests, sizes: Sizes) -> dict[str, Any]:
    """A closed loop."""
    rng = random.Random(2)
    lengths = range(sizes.outputs // 2, sizes.outputs * 3 // 2 + 1)
    bodies = [
        [requests.make(sizes.inputs, rng.choice(lengths)) for _ in range(sizes.rounds)] for _ in range(sizes.clients)
    ]
    sent = Load(server.address, requests.path, bodies, LOAD_PROCESSES, stagger=1.0 / sizes.clients).wait()
    firsts: set[int] = set()
    later, ends = [], {one.client: one.end for one in sent}
    for one in sorted(sent, key=lambda one: one.begin):
        ends[one.client] = max(ends[one.client], one.end)
        if one.client in firsts:
            later.append(one)
        firsts.add(one.client)
    counted = [one for one in later if one.begin < min(ends.values())]
    return {"rate": rate(sent), "requests": len(counted), **first_tokens(counted)}


def idle(server: Server, requests: Requests, sizes: Sizes) -> dict[str, Any]:
    """The rate of busy streams next to streams that wait."""
    room = raise_descriptor_limit() - 1000
    steps = [0, *(count for count in sizes.idle if count + 2 * sizes.rows < room), 0]
    rng = random.Random(3)
    lengths = range(sizes.outputs // 2, sizes.outputs * 3 // 2 + 1)
    rows = 2 * sizes.rows
    bodies = [
        [requests.make(sizes.inputs // 4, rng.choice(lengths)) for _ in range(30)] for _ in range(rows)
    ]  # more than are needed
    waiting = IdleStreams(server.address, requests.path, requests.make(4, 1, priority=1))
    load = Load(server.address, requests.path, bodies, LOAD_PROCESSES, stagger=1.0 / rows)
    found: dict[str, Any] = {"descriptors": room + 1000}
    try:
        time.sleep(3 + sizes.window / 2)
        for number, count in enumerate(steps):
            if count:
                begin = time.perf_counter()
                waiting.open(count)
                while json.loads(server.get("/load"))["server_load"] < count + rows // 2:
                    if time.perf_counter() > begin + READY_SECONDS / 2:
                        raise TimeoutError(f"the server has not taken {count:,} waiting streams")
                    time.sleep(0.05)
                found[f"opening {count:,}"] = time.perf_counter() - begin
            elif number:
                found["answered"] = waiting.answered()
                waiting.close()
            time.sleep(1.0)
            at, cpu, tokens = time.perf_counter(), server.cpu_seconds(), server.generated()
            time.sleep(sizes.window)
            after, now = server.generated(), time.perf_counter()
            spent = {name: (end - cpu[name]) / (now - at) for name, end in server.cpu_seconds().items()}
            name = f"{count:,} idle" + (" again" if number and not count else "")
            found[name] = {"rate": (after - tokens) / (now - at), "busy": spent}
    finally:
        waiting.close()
        load.stop()
    return found


# All parts


class Report:
    """What was found, as a table and as JSON."""

    def __init__(self, path: Path | None, limit: float) -> None:
        self.data: dict[str, Any] = {"failed": {}}
        self._path = path
        self._ends = time.monotonic() + limit

    def run(self, name: str, work: Any, *arguments: Any) -> Any:
        """What a part finds; None if it fails, or if there is no time."""
        if time.monotonic() > self._ends:
            self.data["failed"][name] = "no time was left"
            return None
        begin = time.monotonic()
        try:
            self.data[name] = found = work(*arguments)
        except Exception as error:
            traceback.print_exc()
            self.data["failed"][name] = f"{type(error).__name__}: {error}"
            found = None
        print(f"[{name}: {time.monotonic() - begin:.1f} s] {'' if found is None else json.dumps(found)}", flush=True)
        if self._path is not None:
            self._path.write_text(json.dumps(self.data, indent=1) + "\n")
        return found

    def table(self) -> str:
        """Rows: what, value, and whether the bar is reached."""
        lines, data = [], self.data
        alone = 0.0
        for name, values in data.get("offline", {}).items():
            alone = alone or statistics.median(values)
            lines.append((name, f"{statistics.median(values):,.0f} tok/s", ""))
        for name, found in data.items():
            part, _, fronts = name.partition(" ")
            if part == "burst":
                speed = statistics.median(one["rate"] for one in found)
                share = f", {speed / alone:.1%} of offline" if alone else ""
                verdict = "" if not alone else "ok" if speed >= SHARE_BAR * alone else "MISS"
                lines.append((f"HTTP, {fronts}", f"{speed:,.0f} tok/s{share}", verdict))
                last = found[-1]
                lines.append(("  first token", _show_times(last), ""))
                lines.append(("  busy", _show_busy(last["busy"]) + f"; {last['reads a token']:.2f} reads a token", ""))
            elif part == "closed":
                tail = found["ttft p99"] / found["ttft median"]
                verdict = "ok" if tail <= TAIL_BAR else "MISS"
                shown = f"{_show_times(found)}; p99/median {tail:.2f}; {found['rate']:,.0f} tok/s"
                lines.append((f"closed loop, {fronts}", shown, verdict))
            elif part == "idle":
                windows = {what: one for what, one in found.items() if what.endswith(("idle", "again"))}
                for what, one in windows.items():
                    share = one["rate"] / windows["0 idle"]["rate"]
                    verdict = "" if what.startswith("0") else "ok" if share >= IDLE_BAR else "MISS"
                    shown = f"{one['rate']:,.0f} tok/s, {share:.1%}; {_show_busy(one['busy'])}"
                    lines.append((f"beside {what}, {fronts}", shown, verdict))
        for name, why in data["failed"].items():
            lines.append((name, why, "FAILED"))
        wide = max((len(line[0]) for line in lines), default=0)
        return "\n".join(f"{name:<{wide}}  {value}  {verdict}".rstrip() for name, value, verdict in lines)


def _show_times(found: dict[str, Any]) -> str:
    return ", ".join(f"{name[5:]} {1000 * found[name]:,.0f} ms" for name in ("ttft median", "ttft p99", "ttft worst"))


def _show_busy(busy: dict[str, float]) -> str:
    return ", ".join(f"{name} {share:.0%}" for name, share in busy.items())


def measure(args: argparse.Namespace, report: Report, folder: Path) -> None:
    sizes = QUICK if args.quick else Sizes()
    report.data["command"] = " ".join(sys.argv)
    make_model(args.model, folder, tiny=args.quick)
    requests = Requests(Prompts(folder), args.route, args.prompts)
    settings = {"load_format": "dummy", "max_model_len": 4096, "seed": 0, **args.settings}
    if "offline" in args.parts:
        report.run("offline", offline, folder, settings, sizes)
    for fronts in args.fronts if {"burst", "closed"} & {*args.parts} else ():
        named = "1 front" if fronts == 1 else f"{fronts} fronts"
        with started(report, named, folder, settings, fronts) as server:
            if server is not None and "burst" in args.parts:
                report.run(f"burst {named}", burst, server, requests, sizes)
            if server is not None and "closed" in args.parts:
                report.run(f"closed {named}", closed, server, requests, sizes)
    if "idle" in args.parts:
        fronts = args.idle_fronts or max(args.fronts)
        fewer = {**settings, "scheduling_policy": "priority", "max_num_seqs": sizes.rows}
        named = "1 front" if fronts == 1 else f"{fronts} fronts"
        with started(report, f"idle {named}", folder, fewer, fronts) as server:
            if server is not None:
                report.run(f"idle {named}", idle, server, requests, sizes)


@contextlib.contextmanager
def started(report: Report, named: str, folder: Path, settings: dict[str, Any], fronts: int) -> Iterator[Server | None]:
    """A server; None if it did not start."""
    seconds: list[float] = []
    servers: list[Server] = []

    def start() -> float:
        begin = time.monotonic()
        servers.append(Server(folder, settings, fronts))
        seconds.append(time.monotonic() - begin)
        return seconds[0]

    report.run(f"start {named}", start)
    try:
        yield servers[0] if servers else None
    finally:
        for server in servers:
            server.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--fronts", nargs="+", type=int, default=[1, 2, 4], help="numbers of front processes")
    parser.add_argument("--idle-fronts", type=int, help="of the part idle; default: the most of --fronts")
    parser.add_argument("--model", type=Path, default=HERE / "models" / "qwen3-0.6b")
    parser.add_argument("--route", choices=("completions", "chat"), default="completions")
    parser.add_argument("--prompts", choices=("text", "ids"), default="text", help="of completions")
    parser.add_argument("--settings", type=json.loads, default={}, metavar="JSON", help="further engine settings")
    parser.add_argument("--limit", type=float, default=215.0, help="seconds after which no further part begins")
    parser.add_argument("--json", type=Path, help="default: $OUT/front.json, if OUT is set")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: only shows that it runs")
    parser.add_argument("--offline", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.offline:
        run_offline(*json.loads(args.offline))
        return 0
    if args.json is None and os.environ.get("OUT"):
        args.json = Path(os.environ["OUT"]) / "front.json"
    raise_descriptor_limit()
    report = Report(args.json, args.limit)
    with tempfile.TemporaryDirectory(prefix="quire-front-") as folder:
        report.run("whole", measure, args, report, Path(folder))
    print(f"\n{report.table()}")
    if args.quick:
        print("\n--quick: sizes are tiny and these results mean nothing")
    return 1 if report.data["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
