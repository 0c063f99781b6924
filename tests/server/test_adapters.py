"""LoRA adapters in the API: they are models by name, and are loaded and unloaded while streams run."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.adapters.beside import Beside
from tests.adapters.folders import write
from tests.server.conftest import MODEL, Host, Live
from tests.server.scrape import Scrape
from tests.server.served import served
from tests.server.test_replicas import FLAGS, Pair

ADMIN = {"authorization": "Bearer boss"}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "extra_body": {"ignore_eos": True}}
PROMPT = [5, 9, 20, 33, 40, 41, 7]


@pytest.fixture(scope="session")
def beside(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Beside:
    """Two adapters of the tiny model, written by PEFT, which also says what they generate."""
    made = Beside(tiny_model, tmp_path_factory.mktemp("adapters"))
    made.write("sql", target_modules=["q_proj", "v_proj"])
    made.write("poet", target_modules="all-linear", lora_alpha=16)
    return made


@pytest.fixture(scope="session")
def adapter_host(tiny_model: Path, beside: Beside) -> Iterator[Host]:
    host = Host(tiny_model, enable_lora=True, max_loras=2, max_lora_rank=8)
    yield host
    host.close()


@pytest.fixture
def start(adapter_host: Host, beside: Beside) -> Iterator[Callable[..., Live]]:
    """Starts servers that serve `sql`; `poet` and others can be loaded."""
    stops: list[tuple[Live, Callable[[], None]]] = []

    def begin(**settings: Any) -> Live:
        paths = {"admin_key": "boss", "allowed_lora_path": (str(beside.root),), **settings}
        made, stop = adapter_host.start(lora_modules=(f"sql={beside.root / 'sql'}",), **paths)
        for entry in list(made.server.adapters):
            made.server.adapters.remove(entry.name)  # of another test
        for request in made.server.config.adapters:
            made.server.adapters.add(request)
        stops.append((made, stop))
        return made

    yield begin
    for live, stop in stops:
        live.assert_idle()
        stop()


@pytest.fixture
def live(start: Callable[..., Live]) -> Live:
    return start()


def _load(live: Live, name: str, path: object, **more: Any) -> httpx.Response:
    body = {"lora_name": name, "lora_path": str(path), **more}
    return live.post("/v1/load_lora_adapter", body, headers=ADMIN)


def _unload(live: Live, name: str) -> httpx.Response:
    return live.post("/v1/unload_lora_adapter", {"lora_name": name}, headers=ADMIN)


def _tokens(live: Live, model: str | None, **more: Any) -> list[int]:
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True, **more}
    answer = live.post("/v1/completions", body | ({} if model is None else {"model": model}))
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


def test_an_adapter_is_a_model(live: Live, beside: Beside) -> None:
    client = live.openai()
    cards = {card.id: card for card in client.models.list()}
    assert set(cards) == {MODEL, "sql"}
    assert (cards[MODEL].parent, cards["sql"].parent) == (None, MODEL)  # type: ignore[attr-defined]
    assert client.models.retrieve("sql").id == "sql"
    for model, name in ((None, None), (MODEL, None), ("sql", "sql")):
        assert _tokens(live, model) == beside.tokens(PROMPT, 8, {name: 1.0} if name else {})
    answer = client.completions.create(model="sql", prompt=PROMPT, **GREEDY)
    assert answer.model == "sql"
    assert beside.tokens(PROMPT, 8, {}) != beside.tokens(PROMPT, 8, {"sql": 1.0})
    with pytest.raises(openai.NotFoundError, match="'poet' is not served here; available: tiny, sql"):
        client.completions.create(model="poet", prompt=PROMPT)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("poet")


def test_every_api_takes_its_name(live: Live) -> None:
    client, said = live.openai(), [{"role": "user", "content": "the world"}]
    base, adapted = (
        client.chat.completions.create(model=name, messages=said, **GREEDY)
        for name in (MODEL, "sql")  # type: ignore[call-overload]
    )
    text = adapted.choices[0].message.content
    assert text != base.choices[0].message.content and adapted.model == "sql"
    chunks = client.chat.completions.create(model="sql", messages=said, stream=True, **GREEDY)  # type: ignore[call-overload]
    pieces = list(chunks)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in pieces if chunk.choices) == text
    assert {chunk.model for chunk in pieces} == {"sql"}
    with anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0) as other:
        message = other.messages.create(
            model="sql",
            messages=said,  # type: ignore[arg-type]
            max_tokens=8,
            extra_body={"temperature": 0, "ignore_eos": True},
        )
    assert message.content[0].text == text and message.model == "sql"  # type: ignore[union-attr]
    vectors = [client.embeddings.create(model=name, input="the world").data[0].embedding for name in (MODEL, "sql")]
    assert vectors[0] != vectors[1]


def test_stored_responses_and_sessions_go_on_with_their_adapter(live: Live) -> None:
    def respond(**fields: Any) -> dict[str, Any]:
        answer = live.post("/v1/responses", {"temperature": 0, "max_output_tokens": 6, **fields})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    first = respond(model="sql", input="the world")
    named, unnamed = (respond(input="on", previous_response_id=first["id"], **more) for more in ({"model": "sql"}, {}))
    assert first["model"] == named["model"] == unnamed["model"] == "sql"
    assert _text(named) == _text(unnamed)
    turn = {"input": PROMPT, "temperature": 0, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
    made = live.post("/v1/sessions", {"id": "talk", "model": "sql"}).json()
    assert made["metadata"] == {"adapter": "sql"}
    answer = live.post("/v1/sessions/talk/generate", turn).json()
    assert answer["model"] == "sql" and answer["choices"][0]["token_ids"] == _tokens(live, "sql")
    assert _unload(live, "sql").status_code == 200
    assert live.post("/v1/sessions/talk/generate", turn).status_code == 404
    lost = live.post("/v1/responses", {"input": "on", "previous_response_id": first["id"]})
    assert lost.status_code == 404 and "sql" in lost.text
    live.client.delete("/v1/sessions/talk")


def _text(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item.get("content", ()))


def test_adapters_add_up_with_weights(live: Live, beside: Beside) -> None:
    assert _load(live, "poet", "poet").status_code == 200
    for weights in ({"sql": 0.5}, {"sql": 0.5, "poet": -0.75}):
        assert _tokens(live, None, adapters=weights) == beside.tokens(PROMPT, 8, weights)
    assert _tokens(live, "sql", adapters={"poet": 1.0}) == beside.tokens(PROMPT, 8, {"sql": 1.0, "poet": 1.0})
    for wrong, told in (({"nobody": 1.0}, "nobody"), ({"sql": 1.0}, "twice"), ({"sql": "much"}, "adapters")):
        answer = live.post("/v1/completions", {"model": "sql", "prompt": PROMPT, "adapters": wrong})
        assert answer.status_code in (400, 404) and told in answer.text


def test_adapters_come_and_go_while_streams_run(live: Live, beside: Beside) -> None:
    client = live.openai()
    long = {"temperature": 0, "max_tokens": 120, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
    expected = beside.tokens(PROMPT, 120, {"sql": 1.0})
    stream = iter(client.completions.create(model="sql", prompt=PROMPT, stream=True, **long))  # type: ignore[call-overload]
    seen = list(next(stream).choices[0].token_ids)
    assert _load(live, "poet", beside.root / "poet").status_code == 200
    assert _tokens(live, "poet") == beside.tokens(PROMPT, 8, {"poet": 1.0})
    assert _unload(live, "sql").status_code == 200
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="sql", prompt=PROMPT)
    for chunk in stream:
        seen += chunk.choices[0].token_ids or []
    assert seen == expected
    assert [card.id for card in client.models.list()] == [MODEL, "poet"]
    assert _unload(live, "sql").status_code == 404


def test_another_content_replaces_one_only_if_it_is_told_to(live: Live, beside: Beside) -> None:
    copy = beside.root / "copy"
    shutil.copytree(beside.root / "sql", copy, dirs_exist_ok=True)
    assert _load(live, "mine", "copy").status_code == 200
    first = _tokens(live, "mine")
    same = _load(live, "mine", "copy")
    assert same.status_code == 400 and "already been loaded" in same.text
    assert _load(live, "mine", "copy", load_inplace=True).status_code == 200
    changed = {name: -tensor for name, tensor in load_file(copy / "adapter_model.safetensors").items()}
    changed[next(iter(changed))] *= -1
    save_file(changed, copy / "adapter_model.safetensors")
    refused = _load(live, "mine", "copy")
    assert refused.status_code == 400 and "load_inplace" in refused.text
    assert _load(live, "mine", "copy", load_inplace=True).status_code == 200
    assert _tokens(live, "mine") != first
    assert _load(live, MODEL, "copy").status_code == 400


class TestVllmCases:
    """What tests/entrypoints/serve/lora: test_lora_adapters.py, test_serving_models.py of vLLM ask for."""

    def test_lineage(self, live: Live, beside: Beside) -> None:
        def load(name: str) -> str:
            return client.post(
                "load_lora_adapter", cast_to=str, body={"lora_name": name, "lora_path": "poet"},
                options={"headers": ADMIN},
            )  # fmt: skip

        with live.openai() as client:
            assert "success" in load("poet")
            base, *adapters = client.models.list().data
        assert (base.id, base.parent) == (MODEL, None)  # type: ignore[attr-defined]
        assert base.root == live.server.llm.config.model  # type: ignore[attr-defined]
        found = [(card.id, card.root, card.parent) for card in adapters]  # type: ignore[attr-defined]
        assert found == [(name, str((beside.root / name).resolve()), MODEL) for name in ("sql", "poet")]

    def test_names_that_are_missing(self, live: Live) -> None:
        for answer in (_load(live, "", ""), _load(live, "x", ""), _unload(live, ""), _load(live, "sql", "sql")):
            assert answer.status_code == 400 and answer.json()["error"]["type"] == "InvalidUserInput"
        for answer in (_unload(live, "nobody"), _load(live, "nobody", "nowhere")):
            assert answer.status_code == 404 and answer.json()["error"]["type"] == "NotFoundError"
        assert "success" in _unload(live, "sql").text and not list(live.server.adapters)
        assert live.post("/v1/embeddings", {"model": "sql", "input": "a"}).status_code == 404

    def test_beams_and_bad_adapters_beside_good_ones(self, live: Live, beside: Beside) -> None:
        broken = beside.root / "broken"
        shutil.copytree(beside.root / "sql", broken, dirs_exist_ok=True)
        (broken / "adapter_config.json").write_text("this is not json")
        for number in range(4):
            assert _load(live, f"more-{number}", "poet").status_code == 200
            assert _load(live, "broken", "broken").status_code == 400
            body = {"model": f"more-{number}", "prompt": ["abc", "the world"], "max_tokens": 5, "use_beam_search": True}
            answer = live.post("/v1/completions", {**body, "n": 2})
            assert answer.status_code == 200 and len(answer.json()["choices"]) == 4
        assert _tokens(live, "sql") == beside.tokens(PROMPT, 8, {"sql": 1.0})


def test_only_the_admin_key_loads(start: Callable[..., Live]) -> None:
    live = start(api_key=("user",))
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        body = {"lora_name": "sql", "lora_path": "sql"}
        for headers in ({}, {"authorization": "Bearer user"}):
            assert live.post(path, body, headers=headers).status_code == 401
    keyed = live.openai(api_key="user")
    assert keyed.completions.create(model="sql", prompt=PROMPT, **GREEDY).model == "sql"
    closed = start(allowed_lora_path=())
    assert _load(closed, "x", "sql").status_code == 404  # there is no such route


class _Code:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("ran",)


def test_what_must_not_be_loaded(live: Live, beside: Beside, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, outside = beside.root, write(tmp_path / "outside")
    shutil.rmtree(root / "bad", ignore_errors=True)
    link = root / "bad" / "link"
    link.parent.mkdir()
    link.symlink_to(outside)
    for path in (outside, "../outside", f"{root}/../{outside.name}", "sql/../..", link, "", "/etc", "bad/link", root):
        answer = _load(live, "x", path)
        assert answer.status_code == 400, path
        assert str(tmp_path) not in answer.text or (
            str(path) != str(outside) and "under --allowed-lora-path" in answer.text
        )
    pickled = write(root / "bad" / "pickle")
    (pickled / "adapter_model.safetensors").unlink()
    torch.save({"x": _Code()}, pickled / "adapter_model.bin")
    nan = {name: tensor.fill_(float("nan")) for name, tensor in _wide().items()}
    write(root / "bad" / "nan", nan)
    write(root / "bad" / "base", _wide(48))
    write(root / "bad" / "rank", _wide(rank=9), r=9)
    write(root / "bad" / "kind", _wide(), peft_type="IA3")
    for name, told in (
        ("pickle", "more than tensors"), ("nan", "NaN"), ("base", r"is \[48, 48\].* has 64 values"),
        ("rank", "the rank 9; at most 8"), ("kind", "'IA3'"),
    ):  # fmt: skip
        answer = _load(live, "x", f"bad/{name}")
        assert answer.status_code == 400 and str(root) not in answer.text
        assert re.search(told, answer.json()["error"]["message"])
    assert _load(live, "x", "bad/none").status_code == 404
    assert not Path("ran").exists()
    assert [card.id for card in live.openai().models.list()] == [MODEL, "sql"]


def _wide(width: int = 64, rank: int = 4) -> dict[str, torch.Tensor]:
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    return {f"{name}.lora_A.weight": torch.ones(rank, width), f"{name}.lora_B.weight": torch.ones(width, rank)}


def test_figures_and_lines_name_the_adapter(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "quire.access"):
        _tokens(live, "sql")
        deadline = time.monotonic() + 30
        while " adapter=sql " not in caplog.text:  # written after the response was sent
            assert time.monotonic() < deadline, caplog.text
            time.sleep(0.02)
    scrape = Scrape(live.client.get("/metrics").text)
    assert scrape.sum("quire:adapter_requests_total", adapter="sql") == 1
    assert scrape.sum("quire:adapter_generation_tokens_total", adapter="sql") >= 8
    (labels,) = [dict(has) for name, has in scrape.values if name == "vllm:lora_requests_info"]
    assert labels["max_lora"] == "2" and {"running_lora_adapters", "waiting_lora_adapters"} < labels.keys()


@pytest.mark.slow
def test_several_engines_serve_what_was_loaded(
    tiny_model: Path, beside: Beside, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each engine reads an adapter when a request of it comes there: also one that takes a dead engine's place."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    shutil.copytree(beside.root / "poet", tmp_path / "poet")
    flags = ("--enable-lora", "--max-lora-rank", "8", "--allowed-lora-path", str(tmp_path))
    with served(str(tiny_model), *FLAGS, *flags) as process:
        pair = Pair(process)

        def tokens(model: str, count: int) -> list[list[int]]:
            answer = pair.complete([PROMPT] * count, model=model, max_tokens=8, return_token_ids=True)
            return [choice["token_ids"] for choice in answer.raise_for_status().json()["choices"]]

        def admin(action: str, **body: Any) -> httpx.Response:
            return pair.client.post(f"/v1/{action}_lora_adapter", json={"lora_name": "poet", **body}, headers=ADMIN)

        expected = beside.tokens(PROMPT, 8, {"poet": 1.0})
        assert pair.complete(PROMPT, model="poet").status_code == 404
        assert admin("load", lora_path="poet").status_code == 200
        assert tokens("poet", 1) == [expected]
        scrape = pair.scrape()
        (owner,) = [n for n in (0, 1) if scrape.sum("quire:adapter_loads_total", engine=str(n))]
        os.kill(process.children[owner], signal.SIGKILL)
        assert tokens("poet", 4) == [expected] * 4
        assert pair.scrape().sum("quire:adapter_loads_total", engine=str(1 - owner)) == 1
        pair.until(lambda: pair.stats()["status"] == "serving" and pair.stats()["restarts"] == 1)
        assert tokens("poet", 24) == [expected] * 24
        assert tokens("tiny", 4) == [beside.tokens(PROMPT, 8, {})] * 4

        weights = tmp_path / "poet" / "adapter_model.safetensors"
        changed = {name: -tensor if "lora_A" in name else tensor for name, tensor in load_file(weights).items()}
        save_file(changed, weights)
        assert admin("load", lora_path="poet").status_code == 400
        assert admin("load", lora_path="poet", load_inplace=True).status_code == 200
        other = beside.tokens(PROMPT, 8, {"poet": -1.0})
        assert other != expected and tokens("poet", 24) == [other] * 24
        assert admin("unload").status_code == 200
        assert pair.complete(PROMPT, model="poet").status_code == 404
        assert [model["id"] for model in pair.client.get("/v1/models").json()["data"]] == ["tiny"]
