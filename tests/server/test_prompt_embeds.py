"""Prompts as embeddings over HTTP: equal to the same ids; hostile bodies get a 400 and take no memory."""

from __future__ import annotations

import base64
import io
import pickle
import resource
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import tiny_tokenizer
from tests.server.conftest import Host, Live

PATH = "/v1/completions"
IDS = list(range(5, 31))
FIXED: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


def saved(value: Any, **options: Any) -> str:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return base64.b64encode(file.getvalue()).decode()


def rewritten(value: Any, change: Any, compression: int = zipfile.ZIP_STORED) -> str:
    """A saved tensor whose files `change` (name, bytes) replaces."""
    file, made = io.BytesIO(base64.b64decode(saved(value))), io.BytesIO()
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(made, "w", compression) as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))
    return base64.b64encode(made.getvalue()).decode()


@pytest.fixture(scope="module")
def embeds_host(tiny_model: Path) -> Iterator[Host]:
    made = Host(tiny_model, enable_prompt_embeds=True)
    yield made
    made.close()


@pytest.fixture(scope="module")
def embeds_server(embeds_host: Host) -> Iterator[Live]:
    started, stop = embeds_host.start()
    yield started
    stop()


@pytest.fixture
def server(embeds_server: Live) -> Iterator[Live]:
    yield embeds_server
    embeds_server.assert_idle()


@pytest.fixture(scope="module")
def rows(tiny_model: Path) -> torch.Tensor:
    """The embedding table, as transformers reads it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    return model.get_input_embeddings().weight.detach().clone()


def answers(server: Live, **fields: Any) -> list[list[int]]:
    answer = server.post(PATH, {**FIXED, **fields})
    assert answer.status_code == 200, answer.text
    return [choice["token_ids"] for choice in answer.json()["choices"]]


def test_rows_of_ids_are_the_ids(server: Live, rows: torch.Tensor) -> None:
    (wanted,) = answers(server, prompt=IDS)
    (other,) = answers(server, prompt=IDS[::-1])
    assert wanted != other
    embeds = saved(rows[IDS])
    assert answers(server, prompt_embeds=embeds) == [wanted]
    assert answers(server, prompt="", prompt_embeds=embeds) == [wanted]
    assert answers(server, prompt=None, prompt_embeds=[embeds, saved(rows[IDS[::-1]])]) == [wanted, other]
    assert answers(server, prompt=IDS[::-1], prompt_embeds=embeds) == [wanted, other]
    # A view of a transposed storage, a batch of one, a tensor that wants a gradient: all as torch.save writes them.
    assert answers(server, prompt_embeds=saved(rows[IDS].T.contiguous().T)) == [wanted]
    assert answers(server, prompt_embeds=saved(rows[IDS][None])) == [wanted]
    assert answers(server, prompt_embeds=saved(rows[IDS].requires_grad_())) == [wanted]
    usage = server.post(PATH, {**FIXED, "prompt_embeds": embeds}).json()["usage"]
    assert usage["prompt_tokens"] == len(IDS) and "image_tokens" not in usage["prompt_tokens_details"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_their_numbers(server: Live, rows: torch.Tensor, dtype: torch.dtype) -> None:
    given = rows[IDS].to(dtype)
    assert answers(server, prompt_embeds=saved(given)) == answers(server, prompt_embeds=saved(given.float()))


class Calls:
    """Asks an unpickler to make a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return open, (str(self._path), "w")


class TestRefusals:
    def refused(self, server: Live, embeds: Any, says: str, param: str = "prompt_embeds", **fields: Any) -> None:
        answer = server.post(PATH, {**FIXED, "prompt_embeds": embeds, **fields})
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert says in error["message"] and error["param"] == param, error

    def test_off_by_default(self, live: Live, rows: torch.Tensor) -> None:
        self.refused(live, saved(rows[IDS]), "--enable-prompt-embeds")
        assert live.post(PATH, {**FIXED, "prompt": "a", "prompt_embeds": ""}).status_code == 200
        missing = live.post(PATH, {"max_tokens": 2})
        assert missing.status_code == 400 and missing.json()["error"]["param"] == "prompt"

    def test_pickles_run_nothing(self, server: Live, tmp_path: Path, rows: torch.Tensor) -> None:
        path = tmp_path / "made"
        self.refused(server, saved(Calls(path)), "nothing is unpickled")
        self.refused(server, base64.b64encode(pickle.dumps(Calls(path))).decode(), "no archive of torch.save")
        self.refused(server, saved(rows[IDS], _use_new_zipfile_serialization=False), "no archive of torch.save")
        self.refused(server, saved({"a": rows[IDS]}), "one dense tensor alone")
        assert not path.exists()

    def test_tensors_of_another_kind(self, server: Live, rows: torch.Tensor) -> None:
        width = rows.shape[1]
        self.refused(server, saved(rows[IDS].to_sparse()), "a sparse tensor")
        self.refused(server, saved(torch.zeros(2, width, dtype=torch.int64)), "send float32, float16 or bfloat16")
        self.refused(server, saved(rows[IDS].double()), "send float32, float16 or bfloat16")
        self.refused(server, saved(torch.zeros(2, width + 1)), f"[tokens, {width}] is needed")
        self.refused(server, saved(torch.zeros(width)), "have the shape")
        self.refused(server, saved(torch.zeros(0, width)), "have the shape")
        self.refused(server, saved(torch.full((2, width), torch.nan)), "NaN or infinite, for token 0")
        self.refused(server, saved(torch.full((2, width), torch.inf)), "NaN or infinite")
        self.refused(server, "no base64!", "not valid base64")
        self.refused(server, saved(torch.zeros(260, width)), "at most 256 tokens")
        self.refused(server, saved(torch.zeros(600, width)), "characters of base64")

    def test_claims_beyond_the_archive_take_no_memory(self, server: Live, rows: torch.Tensor) -> None:
        width = rows.shape[1]
        self.refused(server, saved(torch.zeros(1, 1).expand(10**9, width)), "at most")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

        def more_rows(name: str, data: bytes) -> bytes:  # the shape's first number, before the width
            return data.replace(b"K\x03K" + bytes([width]), b"K\xc8K" + bytes([width])) if "pkl" in name else data

        self.refused(server, rewritten(torch.zeros(3, width), more_rows), "of a storage that has")
        self.refused(
            server,
            rewritten(torch.zeros(3, width), lambda name, data: data[:8] if name.endswith("data/0") else data),
            "claim a storage of",
        )
        for _ in range(20):
            self.refused(server, saved(torch.zeros(1, width).expand(10**9, width)), "at most")
        self.refused(
            server, rewritten(torch.zeros(3, width), lambda name, data: data, zipfile.ZIP_DEFLATED), "a compressed"
        )
        self.refused(
            server,
            rewritten(torch.zeros(3, width), lambda name, data: b"\x80\x02" + data[3:9] if "pkl" in name else data),
            "damaged",
        )
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB

    def test_what_needs_tokens(self, server: Live, rows: torch.Tensor) -> None:
        embeds = saved(rows[IDS])
        for name, value in (("echo", True), ("prompt_logprobs", 1), ("suffix", "b"), ("session_id", "s")):
            self.refused(server, embeds, "cannot be combined with", name, **{name: value})


CHAT = "/v1/chat/completions"


def part(rows: Any) -> dict[str, Any]:
    return {"type": "prompt_embeds", "data": rows if isinstance(rows, str) else saved(rows)}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


class TestPartsOfChats:
    """The template is rendered around embeddings as it is around text."""

    def reference(self, server: Live, messages: list[dict[str, Any]], marks: dict[str, list[int]]) -> list[int]:
        """The answer to the conversation as token ids, each mark replaced by these."""
        whole = server.post("/tokenize", {"messages": messages, "return_token_strs": False})
        assert whole.status_code == 200
        tokenizer, ids = tiny_tokenizer(), []
        rendered = tokenizer.apply_chat_template(
            [
                {**message, "content": message["content"] if isinstance(message["content"], str) else "\n".join(
                    part["text"] for part in message["content"])}
                for message in messages
            ],
            tokenize=False, add_generation_prompt=True,
        )  # fmt: skip
        for mark, own in marks.items():
            before, _, rendered = rendered.partition(mark)
            ids += [*tokenizer.encode(before, add_special_tokens=False), *own]
        ids += tokenizer.encode(rendered, add_special_tokens=False)
        return answers(server, prompt=ids)[0]

    def test_in_any_message(self, server: Live, rows: torch.Tensor) -> None:
        one, other = IDS, IDS[::-1][:9]
        marked = [
            {"role": "user", "content": [text("the"), text("#1#"), text("in")]},
            {"role": "assistant", "content": "an answer"},
            {"role": "user", "content": [text("#2#")]},
        ]
        sent = [
            {"role": "user", "content": [text("the"), part(rows[one]), text("in")]},
            marked[1],
            {"role": "user", "content": [part(rows[other])]},
        ]
        wanted = self.reference(server, marked, {"#1#": one, "#2#": other})
        answer = server.post(CHAT, {**FIXED, "messages": sent})
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["token_ids"] == wanted
        ids = answer.json()["prompt_token_ids"]
        assert len(ids) == answer.json()["usage"]["prompt_tokens"] and ids.count(0) >= len(one) + len(other)
        swapped = [{**sent[0], "content": [text("the"), part(rows[other]), text("in")]}, *sent[1:]]
        assert server.post(CHAT, {**FIXED, "messages": swapped}).json()["choices"][0]["token_ids"] != wanted

    def test_refusals(self, server: Live, live: Live, rows: torch.Tensor) -> None:
        def refused(to: Live, content: list[Any], says: str, path: str = CHAT, **fields: Any) -> None:
            body = {**FIXED, "messages": [{"role": "user", "content": content}], **fields}
            answer = to.post(path, body)
            assert answer.status_code == 400, answer.text
            assert says in answer.json()["error"]["message"], answer.text

        given = part(rows[IDS])
        refused(live, [given], "--enable-prompt-embeds")
        refused(server, [{"type": "prompt_embeds"}], "has no data")
        refused(server, [part("AAAA")], "torch.save")
        refused(server, [part(rows[IDS][:, :5])], "shape")
        refused(server, [part(rows[IDS] * torch.inf)], "NaN or infinite")
        refused(server, [given], "prompt_logprobs", prompt_logprobs=1)
        refused(server, [given], "truncate_prompt_tokens", truncate_prompt_tokens=5)
        refused(server, [given] * 12, "maximum context length")
        refused(server, [given], "combined with session_id", session_id="one")
