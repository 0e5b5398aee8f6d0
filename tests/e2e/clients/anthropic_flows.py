"""Documented flows of the `anthropic` client."""

from __future__ import annotations

import asyncio
import sys
from typing import Any, Literal

import anthropic
from flows import KEY, MODEL, WEATHER, flow, main, raises, weather
from pydantic import BaseModel

TOOL: Any = {"name": "weather", "description": "The weather.", "input_schema": WEATHER}
ASK: Any = {"role": "user", "content": "What is the weather in Bern?"}
CAPITAL: Any = {"role": "user", "content": "The capital?"}


class Report(BaseModel):
    """A structured answer."""

    city: Literal["Bern", "Basel"]
    sunny: bool


def client(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key=KEY, max_retries=0)


@flow("scripted")
def messages(url: str) -> None:
    message = client(url).messages.create(
        model=MODEL, max_tokens=100, messages=[CAPITAL], system="Be kind."
    )
    assert message.content[0].text == "The capital is Bern."
    assert message.stop_reason == "end_turn"
    history: list[Any] = [CAPITAL, {"role": message.role, "content": message.content}, CAPITAL]
    client(url).messages.create(model=MODEL, max_tokens=100, messages=history)


@flow("scripted")
def stream(url: str) -> None:
    options: Any = {"model": MODEL, "max_tokens": 100, "messages": [CAPITAL]}
    with client(url).messages.stream(**options) as events:
        text = "".join(events.text_stream)
        final = events.get_final_message()
    assert text == "The capital is Bern." and final.usage.output_tokens > 0
    kinds = [event.type for event in client(url).messages.create(**options, stream=True)]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")


@flow("scripted")
def tools_agent_loop(url: str) -> None:
    history: list[Any] = [ASK]
    for _ in range(5):
        message = client(url).messages.create(
            model=MODEL, max_tokens=500, messages=history, tools=[TOOL]
        )
        history.append({"role": "assistant", "content": message.content})
        if message.stop_reason != "tool_use":
            break
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": weather(**block.input)}
            for block in message.content
            if block.type == "tool_use"
        ]
        history.append({"role": "user", "content": results})
    assert message.content[-1].text == "It is 12 degrees in Bern."
    assert len(history) == 4


@flow("scripted")
def tool_runner(url: str) -> None:
    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """Return the weather in a city.

        Args:
            city: Name of the city.
        """
        return weather(city)

    runner = client(url).beta.messages.tool_runner(
        model=MODEL, max_tokens=500, messages=[ASK], tools=[get_weather]
    )
    assert runner.until_done().content[-1].text == "It is 12 degrees in Bern."


@flow("scripted")
def count_tokens(url: str) -> None:
    count = client(url).messages.count_tokens(model=MODEL, messages=[ASK], tools=[TOOL])
    message = client(url).messages.create(model=MODEL, messages=[ASK], tools=[TOOL], max_tokens=100)
    assert count.input_tokens == message.usage.input_tokens


@flow("scripted")
def prefill(url: str) -> None:
    with_prefill: Any = [CAPITAL, {"role": "assistant", "content": "The capital is"}]
    before = client(url).messages.count_tokens(model=MODEL, messages=with_prefill).input_tokens
    message = client(url).messages.create(model=MODEL, max_tokens=100, messages=with_prefill)
    assert message.usage.input_tokens == before
    plain = client(url).messages.count_tokens(model=MODEL, messages=[CAPITAL]).input_tokens
    assert before - plain == len("The capital is")


@flow("scripted")
def betas(url: str) -> None:
    message = client(url).beta.messages.create(
        model=MODEL, max_tokens=100, messages=[CAPITAL], betas=["context-1m-2030-01-01"]
    )
    assert message.content[0].text == "The capital is Bern."


@flow("scripted")
def errors(url: str) -> None:
    claude = client(url)
    with raises(
        anthropic.NotFoundError, lambda error: error.body["error"]["type"] == "not_found_error"
    ):
        claude.messages.create(model="claude", max_tokens=1, messages=[ASK])
    with raises(anthropic.BadRequestError, lambda error: error.request_id):
        claude.messages.create(model=MODEL, max_tokens=0, messages=[ASK])


@flow("scripted")
def async_client(url: str) -> None:
    async def run() -> None:
        root = url.removesuffix("/v1")
        async with anthropic.AsyncAnthropic(base_url=root, api_key=KEY) as claude:
            jobs = [
                claude.messages.create(model=MODEL, max_tokens=100, messages=[CAPITAL])
                for _ in range(8)
            ]
            assert {m.content[0].text for m in await asyncio.gather(*jobs)} == {
                "The capital is Bern."
            }

    asyncio.run(run())


@flow("tiny")
def required_tool(url: str) -> None:
    message = client(url).messages.create(
        model=MODEL,
        max_tokens=200,
        messages=[ASK],
        tools=[TOOL],
        tool_choice={"type": "tool", "name": "weather"},
    )
    (block,) = [block for block in message.content if block.type == "tool_use"]
    assert block.input["city"] in ("Bern", "Basel")


@flow("tiny")
def parse(url: str) -> None:
    message = client(url).messages.parse(
        model=MODEL, max_tokens=200, messages=[ASK], output_format=Report
    )
    assert isinstance(message.parsed_output, Report)


if __name__ == "__main__":
    sys.exit(main())
