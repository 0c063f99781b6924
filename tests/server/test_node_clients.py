"""Clients of JavaScript; the model's text is given by the test. They run where `node` is installed and
QUIRE_NODE_CLIENTS names a folder that has them: `npm install openai ai zod @ai-sdk/openai @ai-sdk/openai-compatible
@ai-sdk/anthropic @anthropic-ai/sdk`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import MODEL, Live
from tests.server.scripted import ANSWER, Script
from tests.server.test_clients import ASK, weather

pytestmark = pytest.mark.slow
PARIS = {"city": "Paris"}


@pytest.fixture
def run(scripted: Live, script: Script) -> Any:
    node, folder = shutil.which("node"), os.environ.get("QUIRE_NODE_CLIENTS")
    if node is None or not folder:
        pytest.skip("QUIRE_NODE_CLIENTS names no folder")

    def answer(prompt: str) -> str:
        if "as an object" in prompt:
            return json.dumps(PARIS)
        return weather(prompt) if ASK in prompt else ANSWER

    script.answer = answer

    def run(client: str) -> dict[str, Any]:
        command = [node, str(Path(__file__).with_name("node_clients.mjs")), scripted.url, folder, client]
        done = subprocess.run(command, text=True, capture_output=True, timeout=120)
        assert done.returncode == 0, done.stderr[-3000:]
        got: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return got

    return run


def test_openai(run: Any) -> None:
    assert run("openai") == {
        "chat": ANSWER, "stream": ANSWER, "loop": ANSWER, "roles": ["user", "assistant", "tool", "assistant"],
        "object": PARIS, "responses": [ANSWER, ANSWER], "responseStream": ["completed", ANSWER],
        "responseObject": PARIS, "completion": ANSWER, "error": ["NotFoundError", 404, "model"], "models": [MODEL],
    }  # fmt: skip


def test_anthropic(run: Any) -> None:
    assert run("anthropic") == {
        "chat": ANSWER, "stream": ANSWER, "loop": ANSWER, "error": ["NotFoundError", 404]
    }  # fmt: skip


@pytest.mark.parametrize("api", ["compatible", "chat", "responses", "messages"])
def test_ai_sdk(run: Any, script: Script, api: str) -> None:
    """The AI SDK with each provider: text, streams, tool loops, returned messages, objects."""
    got = run(api)
    assert got.pop("object", PARIS) == PARIS
    assert got == {
        "chat": ANSWER, "reason": "stop", "counted": True, "stream": ANSWER, "loop": ANSWER, "again": ANSWER,
        "results": ["sunny in Paris"], "streamedLoop": ANSWER,
    }  # fmt: skip
    followed = next(prompt for prompt in script.prompts if "And now?" in prompt)
    assert "sunny in Paris" in followed and followed.count("[assistant]") == 3
