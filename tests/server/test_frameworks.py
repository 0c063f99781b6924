"""Frameworks for agents and pipelines, as their documentation shows them. One that is not installed is skipped."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.server.conftest import Live
from tests.server.scripted import ANSWER, Script, call
from tests.server.test_clients import ASK, weather

pytestmark = pytest.mark.slow


class Place(BaseModel):
    city: str


def look(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


class TestLlamaIndex:
    def model(self, live: Live, **settings: Any) -> Any:
        module = pytest.importorskip("llama_index.llms.openai_like")
        fixed = {"model": "tiny", "api_base": f"{live.url}/v1", "api_key": "none", "max_tokens": 100, "max_retries": 0}
        chats = {"is_chat_model": True, "is_function_calling_model": True, "context_window": 4096}
        return module.OpenAILike(**{**fixed, **chats, **settings})

    def test_chats_and_completions(self, scripted: Live) -> None:
        model = self.model(scripted)
        from llama_index.core.llms import ChatMessage

        messages = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content=ASK)]
        assert model.chat(messages).message.content == ANSWER
        assert "".join(piece.delta or "" for piece in model.stream_chat(messages)) == ANSWER
        plain = self.model(scripted, is_chat_model=False)
        assert plain.complete(ASK).text == ANSWER
        assert "".join(piece.delta or "" for piece in plain.stream_complete(ASK)) == ANSWER

    def test_objects(self, scripted: Live, script: Script) -> None:
        prompts = pytest.importorskip("llama_index.core.prompts")
        script.answer = lambda prompt: call("Place", city="Paris")
        prompt = prompts.PromptTemplate("Where is {what}?")
        assert self.model(scripted).structured_predict(Place, prompt, what="the tower") == Place(city="Paris")
        script.answer = lambda prompt: '{"city": "Paris"}'
        by_schema = self.model(scripted, should_use_structured_outputs=True)
        assert by_schema.structured_predict(Place, prompt, what="the tower") == Place(city="Paris")
        assert list(by_schema.stream_structured_predict(Place, prompt, what="it"))[-1] == Place(city="Paris")

    def test_an_agent_over_two_questions(self, scripted: Live, script: Script) -> None:
        model = self.model(scripted)
        from llama_index.core.agent.workflow import FunctionAgent
        from llama_index.core.workflow import Context

        script.answer = weather
        agent = FunctionAgent(tools=[look], llm=model, system_prompt="Be brief.")
        agent.tools[0].metadata.name = "weather"  # type: ignore[union-attr]

        async def work() -> None:
            context = Context(agent)
            assert str(await agent.run(ASK, ctx=context)) == ANSWER
            assert "sunny in Paris" in script.prompts[-1]
            assert str(await agent.run("and now?", ctx=context)) == ANSWER
            assert "sunny in Paris" in script.prompts[-1] and "and now?" in script.prompts[-1]

        asyncio.run(work())

    def test_embeddings(self, live: Live) -> None:
        module = pytest.importorskip("llama_index.embeddings.openai_like")
        model = module.OpenAILikeEmbedding(model_name="tiny", api_base=f"{live.url}/v1", api_key="none")
        whole = model.get_text_embedding_batch(["abc", "abd", "abc"])
        assert whole[0] == whole[2] != whole[1] and len(model.get_text_embedding("abc")) == len(whole[0])


class TestDSPy:
    @pytest.fixture(autouse=True)
    def dspy(self) -> Any:
        return pytest.importorskip("dspy")

    def model(self, live: Live, name: str = "openai/tiny", **settings: Any) -> Any:
        import dspy

        fixed: dict[str, Any] = {"api_base": f"{live.url}/v1", "api_key": "none", "max_tokens": 200, "cache": False}
        return dspy.LM(name, **{**fixed, "num_retries": 0, **settings})

    def test_every_kind_of_model(self, scripted: Live) -> None:
        assert self.model(scripted)(ASK) == [ANSWER]
        assert self.model(scripted, "hosted_vllm/tiny")(ASK) == [ANSWER]
        assert self.model(scripted, "text-completion-openai/tiny", model_type="text")(ASK) == [ANSWER]
        (made,) = self.model(scripted, model_type="responses")(ASK)
        assert made["text"] == ANSWER
        assert self.model(scripted)(ASK, n=2) == [ANSWER, ANSWER]

    def test_modules(self, scripted: Live, script: Script) -> None:
        import dspy

        def fields(**given: str) -> str:
            parts = [f"[[ ## {name} ## ]]\n{value}\n\n" for name, value in given.items()]
            return "".join([*parts, "[[ ## completed ## ]]"])

        with dspy.context(lm=self.model(scripted)):
            script.answer = lambda prompt: fields(reasoning="It is known.", answer="Paris")
            assert dspy.ChainOfThought("question -> answer")(question="Where is the tower?").answer == "Paris"
            steps = iter([
                fields(next_thought="look", next_tool_name="look", next_tool_args='{"city": "Paris"}'),
                fields(next_thought="done", next_tool_name="finish", next_tool_args="{}"),
                fields(reasoning="so", answer="sunny"),
            ])  # fmt: skip
            script.answer = lambda prompt: next(steps)
            assert dspy.ReAct("question -> answer", tools=[look])(question=ASK).answer == "sunny"
            assert "sunny in Paris" in script.prompts[-1]
            script.answer = lambda prompt: json.dumps({"answer": "Paris", "sure": True})
            with dspy.context(adapter=dspy.JSONAdapter()):
                made = dspy.Predict("question -> answer: str, sure: bool")(question=ASK)
            assert (made.answer, made.sure) == ("Paris", True)

    def test_a_stream(self, scripted: Live, script: Script) -> None:
        import dspy

        async def stream() -> list[Any]:
            listener = dspy.streaming.StreamListener(signature_field_name="answer")
            program = dspy.streamify(dspy.Predict("question -> answer"), stream_listeners=[listener])
            return [piece async for piece in program(question=ASK)]

        script.answer = lambda prompt: "[[ ## answer ## ]]\nIn Paris.\n\n[[ ## completed ## ]]"
        with dspy.context(lm=self.model(scripted)):
            assert asyncio.run(stream())[-1].answer == "In Paris."

    def test_embeddings(self, live: Live) -> None:
        import dspy

        embed = dspy.Embedder("openai/tiny", api_base=f"{live.url}/v1", api_key="none", caching=False)
        assert embed(["abc", "abd"]).shape[0] == 2


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_openai_agents(scripted: Live, script: Script, api: str) -> None:
    """Tool loops, objects as output, handoffs and streams; the items of one run are the input of the next."""
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)

    async def work() -> None:
        client = openai.AsyncOpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0)
        kind = agents.OpenAIChatCompletionsModel if api == "chat" else agents.OpenAIResponsesModel
        model = kind("tiny", client)
        tool = agents.function_tool(look, name_override="weather")
        agent = agents.Agent(name="a", instructions="Be brief.", model=model, tools=[tool])
        script.answer = weather
        first = await agents.Runner.run(agent, ASK)
        assert first.final_output == ANSWER and "sunny in Paris" in script.prompts[-1]
        again = await agents.Runner.run(agent, [*first.to_input_list(), {"role": "user", "content": "and now?"}])
        assert again.final_output == ANSWER
        assert "sunny in Paris" in script.prompts[-1] and "and now?" in script.prompts[-1]
        streamed = agents.Runner.run_streamed(agent, ASK)
        kinds = [event.type async for event in streamed.stream_events()]
        assert streamed.final_output == ANSWER and "run_item_stream_event" in kinds
        script.answer = lambda prompt: '{"city": "Paris"}'
        placing = agents.Agent(name="b", model=model, output_type=Place)
        assert (await agents.Runner.run(placing, ASK)).final_output == Place(city="Paris")
        script.answer = lambda prompt: ANSWER if "[tool]" in prompt else call("transfer_to_b")
        other = agents.Agent(name="b", model=model)
        asked = agents.Agent(name="a", model=model, handoffs=[other])
        handed = await agents.Runner.run(asked, ASK)
        assert handed.final_output == ANSWER and handed.last_agent is other
        await client.close()

    asyncio.run(work())


@pytest.mark.parametrize("settings", [{}, {"use_responses_api": True}], ids=["chat", "responses"])
def test_langchain_agents(
    scripted: Live, script: Script, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent with memory, objects by each method, batches, streams."""
    agents = pytest.importorskip("langchain.agents")
    from langchain_openai import ChatOpenAI
    from langgraph.checkpoint.memory import InMemorySaver

    def model(**more: Any) -> Any:
        fixed = {"base_url": f"{scripted.url}/v1", "api_key": "none", "model": "tiny", "max_retries": 0}
        return ChatOpenAI(**{**fixed, **settings, **more})

    def text_of(message: Any) -> str:
        return str(message.text)

    script.answer = weather
    monkeypatch.setattr(look, "__name__", "weather")
    agent = agents.create_agent(model(), [look], checkpointer=InMemorySaver(), system_prompt="Be brief.")
    thread: Any = {"configurable": {"thread_id": "1"}}
    for question in (ASK, "and now?"):
        done = agent.invoke({"messages": [{"role": "user", "content": question}]}, thread)
        assert text_of(done["messages"][-1]) == ANSWER and question in script.prompts[-1]
    assert "sunny in Paris" in script.prompts[-1]
    pieces = agent.stream(
        {"messages": [{"role": "user", "content": ASK}]}, {"configurable": {"thread_id": "2"}}, stream_mode="messages"
    )
    assert "".join(text_of(piece) for piece, _ in pieces if piece.type == "AIMessageChunk") == ANSWER
    script.answer = lambda prompt: '{"city": "Paris"}'  # of a tool that is named: its arguments alone
    for method in ("json_schema", "json_mode", "function_calling"):
        assert model().with_structured_output(Place, method=method).invoke("JSON, please") == Place(city="Paris")
    script.answer = lambda prompt: ANSWER
    assert [text_of(made) for made in model().batch([ASK, ASK, ASK])] == [ANSWER] * 3
    if not settings:
        assert model(logprobs=True, top_logprobs=1).invoke(ASK).response_metadata["logprobs"]["content"]
