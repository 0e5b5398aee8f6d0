"""Documented flows of the `openai` client."""

from __future__ import annotations

import io
import json
import sys
import time
import wave
from typing import Any, Literal

from flows import KEY, MODEL, WEATHER, flow, main, raises, weather
from openai import AsyncOpenAI, BadRequestError, NotFoundError, OpenAI
from pydantic import BaseModel

ASK: Any = {"role": "user", "content": "What is the weather in Bern?"}
FUNCTION: dict[str, Any] = {"name": "weather", "description": "The weather.", "parameters": WEATHER}
TOOL: Any = {"type": "function", "function": FUNCTION}


class Report(BaseModel):
    """A structured answer."""

    city: Literal["Bern", "Basel"]
    sunny: bool


def client(url: str) -> OpenAI:
    return OpenAI(base_url=url, api_key=KEY, max_retries=0)


@flow("scripted")
def chat(url: str) -> None:
    answer = client(url).chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "The capital?"}]
    )
    assert answer.choices[0].message.content == "The capital is Bern."
    assert answer.usage and answer.usage.total_tokens > 0
    history: list[Any] = [{"role": "user", "content": "The capital?"}, answer.choices[0].message]
    history.append({"role": "user", "content": "Again?"})
    client(url).chat.completions.create(model=MODEL, messages=history)


@flow("scripted")
def stream(url: str) -> None:
    chunks = client(url).chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "The capital?"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    text, usage = "", None
    for chunk in chunks:
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    assert text == "The capital is Bern." and usage is not None


@flow("scripted")
def stream_helper(url: str) -> None:
    with client(url).chat.completions.stream(
        model=MODEL, messages=[{"role": "user", "content": "The capital?"}]
    ) as events:
        kinds = {event.type for event in events}
        final = events.get_final_completion()
    assert {"content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content == "The capital is Bern."


@flow("scripted")
def tools_agent_loop(url: str) -> None:
    messages: list[Any] = [ASK]
    for _ in range(5):
        answer = client(url).chat.completions.create(model=MODEL, messages=messages, tools=[TOOL])
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            result = weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    assert messages[-1].content == "It is 12 degrees in Bern."
    assert len(messages) == 4


@flow("scripted")
def responses_agent_loop(url: str) -> None:
    tools: list[Any] = [{"type": "function", **FUNCTION}]
    items: list[Any] = [ASK]
    for _ in range(5):
        response = client(url).responses.create(model=MODEL, input=items, tools=tools, store=False)
        items += response.output
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            break
        for call in calls:
            output = weather(**json.loads(call.arguments))
            items.append(
                {"type": "function_call_output", "call_id": call.call_id, "output": output}
            )
    assert response.output_text == "It is 12 degrees in Bern."


@flow("scripted")
def responses_with_memory(url: str) -> None:
    first = client(url).responses.create(model=MODEL, input="The capital?", instructions="Be kind.")
    second = client(url).responses.create(
        model=MODEL, input="Again?", previous_response_id=first.id
    )
    assert second.output_text == "The capital is Bern."
    assert client(url).responses.retrieve(first.id).id == first.id
    with client(url).responses.stream(model=MODEL, input="The capital?") as events:
        kinds = [event.type for event in events]
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"


@flow("scripted")
def files_and_batches(url: str) -> None:
    ai = client(url)
    lines = [
        {
            "custom_id": f"line {number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": MODEL, "messages": [{"role": "user", "content": "The capital?"}]},
        }
        for number in range(3)
    ]
    data = io.BytesIO("\n".join(map(json.dumps, lines)).encode())
    data.name = "requests.jsonl"
    file = ai.files.create(file=data, purpose="batch")
    batch = ai.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    deadline = time.monotonic() + 60
    while batch.status not in ("completed", "failed") and time.monotonic() < deadline:
        time.sleep(0.1)
        batch = ai.batches.retrieve(batch.id)
    assert batch.status == "completed" and batch.output_file_id is not None
    answers = ai.files.content(batch.output_file_id).text.splitlines()
    assert {json.loads(line)["custom_id"] for line in answers} == {f"line {n}" for n in range(3)}
    ai.files.delete(file.id)


def silence(seconds: int) -> tuple[str, bytes]:
    """Return the name and the content of a WAV file."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(8000)
        out.writeframes(bytes(16000 * seconds))
    return "silence.wav", file.getvalue()


@flow("scripted")
def transcriptions(url: str) -> None:
    create = client(url).audio.transcriptions.create
    answer = create(model="speech", file=silence(3))
    assert answer.text == "word0 word1 word2"
    assert answer.usage.seconds == 3
    verbose = create(
        model="speech",
        file=silence(2),
        response_format="verbose_json",
        timestamp_granularities=["segment"],
    )
    assert [(one.start, one.end, one.text) for one in verbose.segments] == [
        (0, 1, "word0"),
        (1, 2, "word1"),
    ]
    assert create(model="speech", file=silence(1), response_format="text") == "word0\n"
    subtitles = create(model="speech", file=silence(1), response_format="srt")
    assert subtitles == "1\n00:00:00,000 --> 00:00:01,000\nword0\n\n"
    events = list(create(model="speech", file=silence(3), stream=True))
    assert "".join(event.delta for event in events[:-1]) == events[-1].text == answer.text
    with raises(BadRequestError):
        create(model="speech", file=("a.wav", b"text"))
    with raises(BadRequestError):
        create(model=MODEL, file=silence(1))


@flow("scripted")
def models_and_errors(url: str) -> None:
    ai = client(url)
    assert [model.id for model in ai.models.list()] == [MODEL, "speech"]
    assert ai.models.retrieve(MODEL).id == MODEL
    with raises(NotFoundError, lambda error: error.code == "model_not_found"):
        ai.chat.completions.create(model="gpt", messages=[ASK])
    with raises(BadRequestError, lambda error: error.param == "messages"):
        ai.chat.completions.create(model=MODEL, messages=[])


@flow("scripted")
def async_client(url: str) -> None:
    import asyncio

    async def run() -> None:
        async with AsyncOpenAI(base_url=url, api_key=KEY) as ai:
            ask = [{"role": "user", "content": "The capital?"}]
            jobs = [ai.chat.completions.create(model=MODEL, messages=ask) for _ in range(8)]
            answers = await asyncio.gather(*jobs)
            assert {a.choices[0].message.content for a in answers} == {"The capital is Bern."}

    asyncio.run(run())


@flow("tiny")
def parse(url: str) -> None:
    ai = client(url)
    messages: list[Any] = [{"role": "user", "content": "Report."}]
    answer = ai.chat.completions.parse(model=MODEL, messages=messages, response_format=Report)
    message = answer.choices[0].message
    assert isinstance(message.parsed, Report)
    # The parsed message is added to the conversation unchanged.
    messages += [message, {"role": "user", "content": "Again."}]
    again = ai.chat.completions.parse(model=MODEL, messages=messages, response_format=Report)
    assert isinstance(again.choices[0].message.parsed, Report)


@flow("tiny")
def responses_parse(url: str) -> None:
    response = client(url).responses.parse(model=MODEL, input="Report.", text_format=Report)
    assert isinstance(response.output_parsed, Report)
    items: list[Any] = [ASK, *response.output, {"role": "user", "content": "Again."}]
    again = client(url).responses.parse(model=MODEL, input=items, text_format=Report)
    assert isinstance(again.output_parsed, Report)


@flow("tiny")
def required_tool(url: str) -> None:
    ai = client(url)
    messages: list[Any] = [ASK]
    chosen: Any = {"type": "function", "function": {"name": "weather"}}
    answer = ai.chat.completions.create(
        model=MODEL, messages=messages, tools=[TOOL], tool_choice=chosen
    )
    message = answer.choices[0].message
    (call,) = message.tool_calls or ()
    assert json.loads(call.function.arguments)["city"] in ("Bern", "Basel")
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "12 degrees"}]
    last = ai.chat.completions.create(
        model=MODEL, messages=messages, tools=[TOOL], tool_choice="none", max_tokens=8
    )
    assert not last.choices[0].message.tool_calls


@flow("tiny")
def logprobs(url: str) -> None:
    answer = client(url).chat.completions.create(
        model=MODEL, messages=[ASK], logprobs=True, top_logprobs=3, max_tokens=5, seed=1
    )
    scores = answer.choices[0].logprobs
    assert scores is not None and scores.content
    assert all(len(token.top_logprobs) == 3 for token in scores.content)
    whole = client(url).completions.create(
        model=MODEL, prompt="Bern", max_tokens=3, logprobs=2, echo=True, seed=1
    )
    assert whole.choices[0].logprobs is not None


@flow("tiny")
def embeddings(url: str) -> None:
    for encoding in ("float", "base64"):
        answer = client(url).embeddings.create(
            model=MODEL, input=["Bern", "Basel"], encoding_format=encoding
        )
        assert len(answer.data) == 2
    default = client(url).embeddings.create(model=MODEL, input="Bern")
    assert abs(sum(x * x for x in default.data[0].embedding) - 1) < 1e-3


if __name__ == "__main__":
    sys.exit(main())
