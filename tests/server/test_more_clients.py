"""Libraries on top of OpenAI's client, as their documentation shows them. One that is not installed is skipped."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import Live
from tests.server.scripted import ANSWER, Script, call
from tests.server.test_clients import ASK, weather

pytestmark = pytest.mark.slow


def test_instructor(scripted: Live, script: Script) -> None:
    """Objects from a named tool, from JSON text, and again after an answer that does not fit."""
    instructor = pytest.importorskip("instructor")
    from pydantic import BaseModel

    class Person(BaseModel):
        name: str
        age: int

    script.answer = lambda prompt: json.dumps({"name": "Ada", "age": 36})
    with scripted.openai() as plain:
        for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA):
            client = instructor.from_openai(plain, mode=mode)
            messages = [{"role": "user", "content": "Ada is 36"}]
            made = client.chat.completions.create(model="tiny", response_model=Person, messages=messages)
            assert (made.name, made.age) == ("Ada", 36)
        answers = iter(['{"name": "Ada"}', '{"name": "Ada", "age": 36}'])
        script.answer = lambda prompt: next(answers)
        client = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
        made = client.chat.completions.create(model="tiny", response_model=Person, messages=messages, max_retries=2)
        assert made.age == 36


def test_pydantic_ai(scripted: Live, script: Script) -> None:
    """A tool loop, an object as output, a stream."""
    pytest.importorskip("pydantic_ai")
    from pydantic import BaseModel
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class Place(BaseModel):
        city: str

    model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=f"{scripted.url}/v1", api_key="none"))
    agent = Agent(model, system_prompt="Be brief.")

    @agent.tool_plain(name="weather")
    def look(city: str) -> str:
        """The weather of a city."""
        return f"sunny in {city}"

    async def all_of_it() -> None:
        script.answer = weather
        done = await agent.run(ASK)
        assert done.output == ANSWER and "sunny in Paris" in script.prompts[-1]
        again = await agent.run("and now?", message_history=done.all_messages())
        assert again.output == ANSWER and "sunny in Paris" in script.prompts[-1]
        script.answer = lambda prompt: call("final_result", city="Paris")
        assert (await Agent(model, output_type=Place).run(ASK)).output == Place(city="Paris")
        script.answer = lambda prompt: ANSWER
        async with Agent(model).run_stream(ASK) as result:
            assert [text async for text in result.stream_text()][-1] == ANSWER

    asyncio.run(all_of_it())


def test_llm(scripted: Live, script: Script, tmp_path: Path) -> None:
    """The command line tool, streaming and continuing a conversation."""
    program = shutil.which("llm")
    if program is None:
        pytest.skip("llm is not installed")
    models = f"- model_id: quire\n  model_name: tiny\n  api_base: {scripted.url}/v1\n  supports_tools: true\n"
    (tmp_path / "extra-openai-models.yaml").write_text(models)
    environment: dict[str, Any] = {**os.environ, "LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "none"}

    def said(*arguments: str) -> str:
        done = subprocess.run([program, *arguments], env=environment, text=True, capture_output=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    script.answer = lambda prompt: ANSWER
    assert said("-m", "quire", ASK).strip() == ANSWER
    assert said("-m", "quire", "--no-stream", ASK).strip() == ANSWER
    assert said("-m", "quire", "-c", "and then?").strip() == ANSWER and ASK in script.prompts[-1]
