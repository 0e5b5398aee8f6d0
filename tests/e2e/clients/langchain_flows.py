"""Documented flows of `langchain`, with `langchain-openai` and `langchain-anthropic`."""

from __future__ import annotations

import sys
from typing import Any, Literal

from flows import KEY, MODEL, flow, main, weather
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel

ASK, CAPITAL = "What is the weather in Bern?", "The capital?"


class Report(BaseModel):
    """A structured answer."""

    city: Literal["Bern", "Basel"]
    sunny: bool


@tool
def get_weather(city: str) -> str:
    """Return the weather in a city."""
    return weather(city)


def chat(url: str, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(model=MODEL, base_url=url, api_key=KEY, max_retries=0, **options)


def claude(url: str) -> ChatAnthropic:
    return ChatAnthropic(
        model=MODEL, base_url=url.removesuffix("/v1"), api_key=KEY, max_tokens=500, max_retries=0
    )


@flow("scripted")
def invoke_stream_batch(url: str) -> None:
    for model in (chat(url), chat(url, use_responses_api=True), claude(url)):
        answer = model.invoke(CAPITAL)
        assert answer.text == "The capital is Bern."
        history = [HumanMessage(CAPITAL), answer, HumanMessage("Again?")]
        assert model.invoke(history).text == "The capital is Bern."
        assert "".join(chunk.text for chunk in model.stream(CAPITAL)) == "The capital is Bern."
        assert len(model.batch([CAPITAL] * 3)) == 3
        assert answer.usage_metadata["output_tokens"] > 0


@flow("scripted")
def tool_loop(url: str) -> None:
    for model in (chat(url), chat(url, use_responses_api=True), claude(url)):
        bound = model.bind_tools([get_weather])
        messages: list[Any] = [HumanMessage(ASK)]
        for _ in range(5):
            answer = bound.invoke(messages)
            messages.append(answer)
            if not answer.tool_calls:
                break
            messages += [get_weather.invoke(call) for call in answer.tool_calls]
        assert messages[-1].text == "It is 12 degrees in Bern.", messages
        assert isinstance(messages[2], ToolMessage) and len(messages) == 4


@flow("scripted")
def agent(url: str) -> None:
    for model in (chat(url), chat(url, use_responses_api=True), claude(url)):
        worker = create_agent(model, [get_weather], system_prompt="Be kind.")
        state = worker.invoke({"messages": [{"role": "user", "content": ASK}]})
        assert state["messages"][-1].text == "It is 12 degrees in Bern."
        # The next turn contains the whole history of the agent.
        more = [*state["messages"], HumanMessage(CAPITAL)]
        state = worker.invoke({"messages": more})
        assert state["messages"][-1].text == "The capital is Bern."


@flow("scripted")
def agent_stream(url: str) -> None:
    worker = create_agent(chat(url), [get_weather])
    steps = [*worker.stream({"messages": [("user", ASK)]}, stream_mode="updates")]
    assert [next(iter(step)) for step in steps] == ["model", "tools", "model"]
    texts = [
        piece.text
        for piece, _ in worker.stream({"messages": [("user", ASK)]}, stream_mode="messages")
    ]
    assert "It is 12 degrees in Bern." in "".join(texts)


@flow("tiny")
def structured_output(url: str) -> None:
    for method in ("json_schema", "function_calling"):
        bound = chat(url).with_structured_output(Report, method=method)
        assert isinstance(bound.invoke(ASK), Report)
    assert isinstance(claude(url).with_structured_output(Report).invoke(ASK), Report)


@flow("tiny")
def extra_body(url: str) -> None:
    model = chat(url, extra_body={"structured_outputs": {"choice": ["yes", "no"]}})
    assert model.invoke(ASK).text in ("yes", "no")


@flow("tiny")
def completions(url: str) -> None:
    model = OpenAI(model=MODEL, base_url=url, api_key=KEY, max_tokens=4, max_retries=0)
    assert isinstance(model.invoke("Bern"), str)


@flow("tiny")
def embeddings(url: str) -> None:
    # Texts are sent, because token ids of another tokenizer would have another meaning.
    model = OpenAIEmbeddings(
        model=MODEL, base_url=url, api_key=KEY, check_embedding_ctx_length=False
    )
    assert len(model.embed_documents(["Bern", "Basel"])) == 2
    assert len(model.embed_query("Bern")) == len(model.embed_query("Basel"))


if __name__ == "__main__":
    sys.exit(main())
