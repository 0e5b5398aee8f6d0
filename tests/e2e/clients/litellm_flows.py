"""Documented flows of `litellm`, by its OpenAI, vLLM and Anthropic providers."""

from __future__ import annotations

import json
import os
import sys
from typing import Any, Literal

from flows import KEY, MODEL, WEATHER, flow, main, raises, weather
from pydantic import BaseModel

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no network

import litellm

ASK: Any = {"role": "user", "content": "What is the weather in Bern?"}
CAPITAL: Any = {"role": "user", "content": "The capital?"}
TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather.", "parameters": WEATHER},
}


class Report(BaseModel):
    """A structured answer."""

    city: Literal["Bern", "Basel"]
    sunny: bool


def providers(url: str) -> list[dict[str, Any]]:
    return [
        {"model": f"openai/{MODEL}", "api_base": url, "api_key": KEY},
        {"model": f"hosted_vllm/{MODEL}", "api_base": url, "api_key": KEY},
        {"model": f"anthropic/{MODEL}", "api_base": url.removesuffix("/v1"), "api_key": KEY},
    ]


@flow("scripted")
def completion(url: str) -> None:
    for provider in providers(url):
        answer = litellm.completion(messages=[CAPITAL], **provider)
        message = answer.choices[0].message
        assert message.content == "The capital is Bern.", provider
        # The message is sent back as litellm's own object.
        again = litellm.completion(messages=[CAPITAL, message, CAPITAL], **provider)
        assert again.choices[0].message.content == "The capital is Bern."


@flow("scripted")
def stream(url: str) -> None:
    for provider in providers(url):
        chunks = [*litellm.completion(messages=[CAPITAL], stream=True, **provider)]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == "The capital is Bern.", provider
        whole = litellm.stream_chunk_builder(chunks, messages=[CAPITAL])
        assert whole.choices[0].message.content == text


@flow("scripted")
def tools_agent_loop(url: str) -> None:
    for provider in providers(url):
        messages: list[Any] = [ASK]
        for _ in range(5):
            answer = litellm.completion(messages=messages, tools=[TOOL], **provider)
            message = answer.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                result = weather(**json.loads(call.function.arguments))
                messages.append(
                    {
                        "role": "tool",
                        "tool_call_id": call.id,
                        "name": call.function.name,
                        "content": result,
                    }
                )
        assert messages[-1].content == "It is 12 degrees in Bern.", provider
        assert len(messages) == 4


@flow("scripted")
def dumped_messages(url: str) -> None:
    for provider in providers(url):
        answer = litellm.completion(messages=[ASK], tools=[TOOL], **provider)
        message = answer.choices[0].message.model_dump()
        call = message["tool_calls"][0]
        result = {"role": "tool", "tool_call_id": call["id"], "content": "12 degrees in Bern"}
        last = litellm.completion(messages=[ASK, message, result], tools=[TOOL], **provider)
        assert last.choices[0].message.content == "It is 12 degrees in Bern.", provider


@flow("scripted")
def responses(url: str) -> None:
    answer = litellm.responses(
        model=f"openai/{MODEL}", input="The capital?", api_base=url, api_key=KEY
    )
    assert answer.output[0].content[0].text == "The capital is Bern."


@flow("scripted")
def errors(url: str) -> None:
    provider = providers(url)[0]
    with raises(litellm.NotFoundError, lambda error: "does not exist" in str(error)):
        litellm.completion(messages=[ASK], **{**provider, "model": "openai/gpt"})
    with raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=[{"role": "user", "content": "a" * 20_000}], **provider)


@flow("tiny")
def response_format(url: str) -> None:
    for provider in providers(url)[:2]:
        answer = litellm.completion(messages=[ASK], response_format=Report, **provider)
        Report.model_validate_json(answer.choices[0].message.content)


@flow("tiny")
def text_completion(url: str) -> None:
    answer = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}",
        prompt="Bern",
        max_tokens=4,
        api_base=url,
        api_key=KEY,
    )
    assert answer.choices[0].finish_reason in ("length", "stop")


@flow("tiny")
def embedding(url: str) -> None:
    for provider in providers(url)[:2]:
        answer = litellm.embedding(input=["Bern", "Basel"], **provider)
        assert len(answer.data) == 2


@flow("tiny")
def rerank(url: str) -> None:
    provider = providers(url)[1]
    answer = litellm.rerank(query="Bern", documents=["Basel", "Bern"], top_n=1, **provider)
    assert answer.results[0]["index"] == 1


if __name__ == "__main__":
    sys.exit(main())
