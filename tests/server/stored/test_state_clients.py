"""Frameworks that leave the conversation to the server."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from tests.server.conftest import MODEL, Live

HELLO = "hello the world, hello the world"
LETTERS = {"structured_outputs": {"regex": "[a-z]{12}"}}


def test_langchain_follows_up_by_id(live: Live) -> None:
    from langchain_core.messages import AIMessage, HumanMessage
    from langchain_openai import ChatOpenAI

    settings: Any = {"base_url": f"{live.url}/v1", "api_key": "none", "model": MODEL, "temperature": 0}
    chat = ChatOpenAI(**settings, use_responses_api=True, use_previous_response_id=True, extra_body=LETTERS)
    first = chat.invoke([HumanMessage(HELLO)])
    second = chat.invoke([HumanMessage(HELLO), first, HumanMessage("go on")])
    assert isinstance(first, AIMessage) and isinstance(second, AIMessage) and second.usage_metadata
    stored = live.client.get(f"/v1/responses/{second.response_metadata['id']}").json()
    assert stored["previous_response_id"] == first.response_metadata["id"]
    listed = live.client.get(f"/v1/responses/{stored['id']}/input_items?order=asc").json()["data"]
    assert [item["content"][0]["text"] for item in listed] == [HELLO, first.text, "go on"]


@pytest.mark.slow
def test_agents_keep_their_conversation_here(live: Live) -> None:
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)

    async def work() -> None:
        client = openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none")
        settings = agents.ModelSettings(temperature=0, max_tokens=30, extra_body=LETTERS)
        agent = agents.Agent(name="a", model=agents.OpenAIResponsesModel(MODEL, client), model_settings=settings)
        run = agents.Runner.run
        first = await run(agent, HELLO)
        second = await run(agent, "go on", previous_response_id=first.last_response_id)
        assert second.context_wrapper.usage.input_tokens_details.cached_tokens > 0
        streamed = agents.Runner.run_streamed(agent, "or", previous_response_id=first.last_response_id)
        assert [event async for event in streamed.stream_events()]
        session = agents.OpenAIConversationsSession(openai_client=client)
        for text in ("one", "two"):
            await run(agent, text, session=session)
        assert len(await session.get_items()) == 4
        await session.pop_item()
        assert len(await session.get_items()) == 3
        await session.clear_session()
        made = await client.conversations.create()
        for text in ("one", "two"):
            await run(agent, text, conversation_id=made.id)
        assert len((await client.conversations.items.list(made.id)).data) == 4
        await client.close()

    asyncio.run(work())
