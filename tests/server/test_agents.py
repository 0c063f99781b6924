"""Agents on the terminal over three turns with tools: the bodies that they send, and the agents themselves where they
are installed. The model's text is given by the test; all else is the server as users run it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.server.agent_bodies import aider, claude_code, codex, opencode
from tests.server.conftest import Live
from tests.server.scripted import ANSWER, Script, call


def events(live: Live, path: str, body: dict[str, Any]) -> tuple[list[Any], str]:
    """The events of a stream, and the fields that were ignored."""
    answer = live.post(path, body)
    assert answer.status_code == 200, answer.text
    data = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(each) for each in data if each != "[DONE]"], answer.headers.get("x-quire-ignored", "")


def after(turns: int, wanted: str) -> Callable[[str], str]:
    """Calls, until so many results have come."""
    return lambda prompt: wanted if prompt.count("[tool]") < turns else ANSWER


class TestClaudeCode:
    PATH = "/v1/messages?beta=true"

    def test_three_turns(self, scripted: Live, script: Script) -> None:
        script.answer = after(2, "Let me see. " + call("Bash", command="echo", description="say"))
        for turn in range(3):
            seen, ignored = events(scripted, self.PATH, claude_code(turn))
            assert ignored == "context_management, tools[].web_search_20250305"
            blocks = [event["content_block"]["type"] for event in seen if event["type"] == "content_block_start"]
            reason = next(event["delta"]["stop_reason"] for event in seen if event["type"] == "message_delta")
            assert (blocks, reason) == ((["text", "tool_use"], "tool_use") if turn < 2 else (["text"], "end_turn"))
        first, _, last = script.prompts
        assert last.startswith(first.removesuffix("[assistant]")), "the next turn extends the prompt, so it is cached"
        assert "<tool>Bash</tool><tool>Read</tool>" in first and "web_search" not in first
        assert "[system]" in first and first.count("[system]") == 1 and "Tools that are found later" in first
        assert last.count("said 0") == last.count("said 1") == last.count('"command": "echo 1"') == 1 and " hm" in last

    def test_the_arguments_of_a_call_arrive_whole(self, scripted: Live, script: Script) -> None:
        script.answer = after(1, call("Bash", command='echo "<>&"', description="é"))
        seen, _ = events(scripted, self.PATH, claude_code(0))
        pieces = [event["delta"].get("partial_json", "") for event in seen if event["type"] == "content_block_delta"]
        assert json.loads("".join(pieces)) == {"command": 'echo "<>&"', "description": "é"}

    def test_tokens_are_counted(self, scripted: Live) -> None:
        body = {name: value for name, value in claude_code(1).items() if name not in ("max_tokens", "stream")}
        answer = scripted.post("/v1/messages/count_tokens?beta=true", body)
        assert answer.status_code == 200 and answer.json()["input_tokens"] > 100

    def test_an_answer_may_end_at_the_models_length(self, scripted: Live) -> None:
        """Asked for as much as the model can write at all, beside a prompt."""
        body = {**claude_code(0), "max_tokens": scripted.server.max_model_len}
        assert scripted.post(self.PATH, body).status_code == 200
        assert scripted.post(self.PATH, {**body, "max_tokens": scripted.server.max_model_len + 1}).status_code == 400


class TestCodex:
    PATH = "/v1/responses"

    def test_three_turns(self, scripted: Live, script: Script) -> None:
        script.answer = after(2, call("exec_command", cmd="echo"))
        for turn in range(3):
            seen, ignored = events(scripted, self.PATH, codex(turn))
            assert ignored == "tools[].web_search"
            assert seen[-1]["type"] == "response.completed"
            (item,) = seen[-1]["response"]["output"]
            wanted = ("function_call", "exec_command") if turn < 2 else ("message", None)
            assert (item["type"], item.get("name")) == wanted
        first, _, last = script.prompts
        assert last.startswith(first.removesuffix("[assistant]"))
        assert "<tool>exec_command</tool><tool>apply_patch</tool><tool>agents__close</tool>[system]" in first
        assert last.count("said 0") == last.count("said 1") == 1 and last.count("hm") == 2

    def test_a_call_in_a_namespace(self, scripted: Live, script: Script) -> None:
        script.answer = after(1, call("agents__close", target="a"))
        seen, _ = events(scripted, self.PATH, codex(0))
        (item,) = seen[-1]["response"]["output"]
        assert (item["namespace"], item["name"], json.loads(item["arguments"])) == ("agents", "close", {"target": "a"})
        result = {"type": "function_call_output", "call_id": item["call_id"], "output": "closed"}
        events(scripted, self.PATH, {**codex(0), "input": [*codex(0)["input"], item, result]})
        assert '"name": "agents__close"' in script.prompts[-1] and "closed" in script.prompts[-1]

    def test_a_custom_tool(self, scripted: Live, script: Script) -> None:
        patch = '*** Begin\n+ "é"\n*** End'
        script.answer = after(1, call("apply_patch", input=patch))
        seen, _ = events(scripted, self.PATH, codex(0))
        (item,) = seen[-1]["response"]["output"]
        assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", patch)
        kinds = [event["type"] for event in seen]
        assert "response.custom_tool_call_input.done" in kinds and "response.function_call_arguments.delta" not in kinds
        result = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "patched"}
        events(scripted, self.PATH, {**codex(0), "input": [*codex(0)["input"], item, result]})
        assert '"name": "apply_patch"' in script.prompts[-1] and "[tool]  patched" in script.prompts[-1]


@pytest.mark.parametrize("body", [opencode, aider])
def test_chats_of_three_turns(scripted: Live, script: Script, body: Callable[[int], dict[str, Any]]) -> None:
    script.answer = after(2, call("bash", command="echo", description="say")) if body is opencode else lambda _: ANSWER
    for turn in range(3):
        seen, ignored = events(scripted, "/v1/chat/completions", body(turn))
        assert ignored == ""
        reasons = [choice["finish_reason"] for event in seen for choice in event["choices"] if choice["finish_reason"]]
        assert reasons == (["tool_calls"] if body is opencode and turn < 2 else ["stop"])
    assert script.prompts[-1].startswith(script.prompts[0].removesuffix("[assistant]"))


@pytest.mark.slow
class TestInstalled:
    """The agents themselves, if they are on the PATH. Each runs two commands through its own tool."""

    def run(self, home: Path, *command: str, **environment: str) -> str:
        path = shutil.which(command[0])
        if path is None:
            pytest.skip(f"{command[0]} is not installed")
        done = subprocess.run(
            [path, *command[1:]], cwd=home, env={**os.environ, "HOME": str(home), "PWD": str(home), **environment},
            text=True, stdin=subprocess.DEVNULL, capture_output=True, timeout=120,
        )  # fmt: skip
        return done.stdout + done.stderr

    def test_claude_code(self, scripted: Live, script: Script, tmp_path: Path) -> None:
        script.answer = after(2, call("Bash", command="echo from-the-shell", description="say"))
        said = self.run(
            tmp_path, "claude", "-p", "run it", "--allowedTools", "Bash", ANTHROPIC_BASE_URL=scripted.url,
            ANTHROPIC_API_KEY="none", ANTHROPIC_MODEL="tiny", ANTHROPIC_SMALL_FAST_MODEL="tiny",
            CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        )  # fmt: skip
        assert ANSWER in said and script.prompts[-1].count("from-the-shell") >= 3

    def test_codex(self, scripted: Live, script: Script, tmp_path: Path) -> None:
        script.answer = after(2, call("exec_command", cmd="echo from-the-shell"))
        (tmp_path / ".codex").mkdir()
        (tmp_path / ".codex" / "config.toml").write_text(
            f'model = "tiny"\nmodel_provider = "quire"\n[model_providers.quire]\nname = "quire"\n'
            f'base_url = "{scripted.url}/v1"\nwire_api = "responses"\n'
        )
        flags = ("--skip-git-repo-check", "--sandbox", "danger-full-access")
        said = self.run(tmp_path, "codex", "exec", *flags, "run it")
        assert ANSWER in said and script.prompts[-1].count("from-the-shell") >= 3

    def test_opencode(self, scripted: Live, script: Script, tmp_path: Path) -> None:
        script.answer = after(2, call("bash", command="echo from-the-shell", description="say"))
        options = {"baseURL": f"{scripted.url}/v1", "apiKey": "none"}
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "name": "quire",
            "options": options,
            "models": {"tiny": {"name": "tiny"}},
        }
        (tmp_path / "opencode.json").write_text(json.dumps({"provider": {"quire": provider}}))
        said = self.run(tmp_path, "opencode", "run", "--model", "quire/tiny", "run it")
        assert ANSWER in said and script.prompts[-1].count("from-the-shell") >= 3

    def test_aider(self, scripted: Live, script: Script, tmp_path: Path) -> None:
        """It edits a file by the answer's text, and sends the edited file with the next message."""
        (tmp_path / "greet.py").write_text('print("hello")\n')
        edit = "Here it is.\n\ngreet.py\n```python\n<<<<<<< SEARCH\n{old}\n=======\n{new}\n>>>>>>> REPLACE\n```\n"
        lines = ['print("hello")', 'print("good day")', 'print("good night")']
        for turn in range(2):
            script.answer = lambda prompt, turn=turn: edit.format(old=lines[turn], new=lines[turn + 1])
            said = self.run(
                tmp_path, "aider", "--model", "openai/tiny", "--edit-format", "diff", "--no-git", "--yes-always",
                "--no-check-update", "--no-show-model-warnings", "--no-analytics", "--no-detect-urls",
                "--map-tokens", "0", "--message", f"change the greeting {turn}", "greet.py",
                OPENAI_API_BASE=f"{scripted.url}/v1", OPENAI_API_KEY="none",
            )  # fmt: skip
            assert "Applied edit to greet.py" in said, said[-3000:]
            assert (tmp_path / "greet.py").read_text() == lines[turn + 1] + "\n"
        assert lines[1] in script.prompts[-1] and "change the greeting 1" in script.prompts[-1]
