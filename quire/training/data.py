"""Training data: texts, prompts with answers, chats, batch files and stored sessions, as sequences of tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from quire.api.chat import ChatRenderer
from quire.errors import QuireError, ValidationError
from quire.training.store import TokenSequence

MIN_TOKENS = 8
"""Shorter sequences are dropped."""
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")


@dataclass
class Data:
    """What the files hold."""

    sequences: list[TokenSequence] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    """Prompts without an answer, to be answered by the target."""


class DataReader:
    """Reads files with one tokenizer."""

    def __init__(self, tokenizer: Any, max_len: int) -> None:
        """`max_len`: tokens of a sequence; longer texts become several, longer chats are cut at their end."""
        self._tokenizer, self._max_len = tokenizer, max_len
        self._renderer = ChatRenderer(tokenizer)

    def read_file(self, path: Path, answers: bool) -> Data:
        """A text file or one of JSON lines. `answers`: prompts will be answered by the target, so that only they are
        needed: each line of a text is one, and answers in the file are left out."""
        data = Data()
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ValidationError(f"{path} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise ValidationError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
        if path.suffix not in JSON_SUFFIXES:
            if answers:
                data.prompts += [self._chat_prompt(line.strip()) for line in text.splitlines() if line.strip()]
            else:
                data.sequences += self._of_text(text)
            return data
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                self._add_line(line, f"{path}, line {number}", answers, data)
        return data

    def read_traffic(self, folder: Path, answers: bool) -> Data:
        """What a server and `quire run-batch` leave: batch files, whose results are matched with their requests by
        custom_id; a disk tier's sessions; and, if the target is to answer them, the prompts of a request log in JSON,
        which has no answers. Other files are not read."""
        if not folder.is_dir():
            raise ValidationError(f"{folder} is not a folder", "from_traffic", str(folder))
        data, requests, results = Data(), {}, {}
        for path in sorted(folder.rglob("*")):
            if path.suffix not in (*JSON_SUFFIXES, ".log") or not path.is_file():
                continue
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                row = _object(line)
                if row is None:
                    continue
                if "custom_id" in row and isinstance(row.get("body"), dict):
                    requests[str(row["custom_id"])] = row["body"]
                elif "custom_id" in row and isinstance(row.get("response"), dict):
                    results[str(row["custom_id"])] = row["response"].get("body") or {}
                elif answers and row.get("logger") == "quire.requests" and row.get("prompt"):
                    data.prompts.append(self._encode(row["prompt"]))
        for key, body in requests.items():
            answer = None if answers else _answer(results.get(key, {}))
            if not answers and answer is None:
                continue
            row = dict(body)
            if "messages" in row and answer is not None:
                row["messages"] = [*row["messages"], {"role": "assistant", "content": answer}]
            elif "prompt" in row and answer is not None:
                row["response"] = answer
            if "messages" in row or isinstance(row.get("prompt"), (str, list)):
                self._add_row(row, f"request {key}", answers, data)
        for sessions in sorted({path.parent for path in folder.rglob("sessions/*")} | {folder / "sessions"}):
            if sessions.is_dir():
                data.sequences += self._of_sessions(sessions)
        return data

    def _of_sessions(self, folder: Path) -> Iterator[TokenSequence]:
        from quire.sessions.log import SessionStore

        with SessionStore.open(folder) as store:
            after: int | None = 0
            while after is not None:
                page = store.page(after, 1000)
                for session in page.sessions:
                    if not session.lost:
                        yield from self._pieces(store.tokens(session.name))
                after = page.after

    def _add_line(self, line: str, where: str, answers: bool, data: Data) -> None:
        row = _object(line)
        if row is None:
            raise ValidationError(f"{where} is not a JSON object", "data")
        self._add_row(row, where, answers, data)

    def _add_row(self, row: Mapping[str, Any], where: str, answers: bool, data: Data) -> None:
        if isinstance(row.get("body"), dict):  # a request of a batch file
            row = row["body"]
        response = next((row[key] for key in ("response", "completion", "answer") if key in row), None)
        try:
            if "messages" in row:
                self._add_chat(list(row["messages"]), row.get("tools"), where, answers, data)
            elif "prompt" in row:
                prompt = self._encode(row["prompt"])
                if answers or response is None:
                    _require(answers, where)
                    data.prompts.append(prompt)
                else:
                    answer = self._tokenizer(str(response), add_special_tokens=False, verbose=False)["input_ids"]
                    eos = self._tokenizer.eos_token_id
                    answer = [*answer, *([] if eos is None else [eos])]
                    data.sequences.append(self.sequence([*prompt, *answer], [(len(prompt), len(prompt) + len(answer))]))
            elif isinstance(row.get("text"), str):
                if not answers:
                    data.sequences += self._of_text(row["text"])
                else:
                    data.prompts.append(self._chat_prompt(row["text"]))
            else:
                raise ValidationError("it has none of messages, prompt and text")
        except (QuireError, TypeError) as error:
            raise ValidationError(f"{where}: {error}", "data") from None

    def _add_chat(self, messages: list[Any], tools: Any, where: str, answers: bool, data: Data) -> None:
        if answers:
            while messages and messages[-1].get("role") == "assistant":
                messages.pop()
        if not messages:
            raise ValidationError("the chat has no messages")
        if messages[-1].get("role") != "assistant":
            _require(answers, where)
            data.prompts.append(self._renderer.render(messages, tools=tools)[1])
            return
        whole = self._renderer.render(messages, tools=tools, add_generation_prompt=False)[1]
        spans = []
        for place, message in enumerate(messages):
            if message.get("role") == "assistant" and place:
                before = self._renderer.render(messages[:place], tools=tools)[1]
                after = self._renderer.render(messages[: place + 1], tools=tools, add_generation_prompt=False)[1]
                # Some templates write earlier turns differently: those are not learned.
                if whole[: len(after)] == after and after[: len(before)] == before:
                    spans.append((len(before), len(after)))
        data.sequences.append(self.sequence(whole, spans))

    def sequence(self, tokens: Sequence[int], spans: Sequence[tuple[int, int]]) -> TokenSequence:
        """A sequence in which the tokens of these spans are learned."""
        learned = np.zeros(len(tokens), bool)
        for start, stop in spans:
            learned[start:stop] = True
        return TokenSequence(np.array(tokens, np.int32), learned).cut(self._max_len)

    def _of_text(self, text: str) -> Iterator[TokenSequence]:
        return self._pieces(np.array(self._encode(text), np.int32))

    def _pieces(self, tokens: np.ndarray) -> Iterator[TokenSequence]:
        for start in range(0, len(tokens), self._max_len):
            piece = np.asarray(tokens[start : start + self._max_len], np.int32)
            yield TokenSequence(piece, np.ones(len(piece), bool))

    def _encode(self, prompt: str | list[Any]) -> list[int]:
        if isinstance(prompt, str):
            return list(self._tokenizer(prompt, verbose=False)["input_ids"])
        if all(isinstance(token, int) for token in prompt):
            return list(prompt)
        raise ValidationError("a prompt is a text or a list of token ids")

    def _chat_prompt(self, text: str) -> list[int]:
        if getattr(self._tokenizer, "chat_template", None) is None:
            return self._encode(text)
        return self._renderer.render([{"role": "user", "content": text}])[1]


def usable(sequences: Sequence[TokenSequence]) -> list[TokenSequence]:
    """Those that have something to learn."""
    return [each for each in sequences if len(each) >= MIN_TOKENS and each.learned[2:].any()]


def _object(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _answer(body: Mapping[str, Any]) -> str | None:
    """The text of a response to a completion or a chat."""
    for choice in body.get("choices") or []:
        text = choice.get("text") or (choice.get("message") or {}).get("content")
        if isinstance(text, str) and text:
            return text
    return None


def _require(answers: bool, where: str) -> None:
    if not answers:
        raise ValidationError("it has no answer; --regenerate N lets the model answer the prompts first", "regenerate")
