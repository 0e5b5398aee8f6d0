"""`/v1/responses` through the official client: items, events and stored responses."""

from __future__ import annotations

import json

import httpx
import openai
import pytest
from ed_esurge.server.launch import background
from ed_esurge.server.responses.endpoint import ResponseAnswer
from ed_esurge.testing import (
    TOOL_REPLIES,
    TOOL_TEMPLATE,
    NamedReplies,
    ScriptedEngine,
    byte_tokenizer,
)

TOOLS = [
    {
        "type": "function",
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "strict": None,
    },
    {"type": "function", "name": "now", "parameters": None, "strict": None},
]
WEATHER = '{"city": "Zürich", "days": 3}'


@pytest.fixture(scope="module")
def engine():
    return NamedReplies(tokenizer=byte_tokenizer(TOOL_TEMPLATE))


@pytest.fixture(scope="module")
def client(engine):
    with background(engine) as url:
        yield openai.OpenAI(base_url=url, api_key="none", max_retries=0)


def plain(response):
    """Return a response without ids and times."""
    fields = response.model_dump(exclude_none=True)
    for name in ("id", "created_at", "completed_at", "parsed_arguments"):
        fields.pop(name, None)
    for item in fields["output"]:
        for name in ("id", "call_id", "parsed_arguments"):
            item.pop(name, None)
        for part in item.get("content") or []:
            part.pop("parsed", None)
    return fields


@pytest.mark.parametrize("name", ["call", "only", "plain", "broken"])
def test_streamed_response_equals_unstreamed_response(client, name):
    options = {"model": "scripted", "input": f"reply {name}", "tools": TOOLS}
    whole = client.responses.create(**options)
    ResponseAnswer.model_validate(whole.model_dump(exclude_unset=True))
    assert whole.status == "completed"
    kinds = [item.type for item in whole.output]
    if name == "call":
        assert kinds == ["reasoning", "message", "function_call", "function_call"]
        assert whole.output[0].content[0].text == "I look it up."
        assert whole.output_text == "One moment."
        assert whole.usage.output_tokens_details.reasoning_tokens == len("I look it up.")
    elif name == "only":
        assert kinds == ["function_call"] * 2
        assert [item.arguments for item in whole.output] == [WEATHER, "{}"]
    else:
        assert whole.output_text == TOOL_REPLIES[name]
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens

    numbers, texts, items = [], {}, {}
    for event in client.responses.create(**options, stream=True):
        numbers.append(event.sequence_number)
        if event.type.endswith(".delta"):
            texts[event.output_index] = texts.get(event.output_index, "") + event.delta
        if event.type == "response.output_item.done":
            items[event.output_index] = event.item
            last = event
        if event.type == "response.completed":
            streamed = event.response
    assert numbers == list(range(len(numbers)))
    assert plain(streamed) == plain(whole)
    for index, item in items.items():
        said = item.arguments if item.type == "function_call" else item.content[0].text
        assert said == texts.get(index, "")
    assert last.item.status == "completed"
    if name != "broken":  # the stream has already begun the call
        with client.responses.stream(**options) as stream:
            for _ in stream:
                pass
            assert plain(stream.get_final_response())["output"] == plain(whole)["output"]


def test_previous_response_id_continues_the_conversation(client, engine):
    first = client.responses.create(
        model="scripted", input="reply call", tools=TOOLS, instructions="Be kind."
    )
    assert '"role": "system"' in engine.prompts[-1]
    call = next(item for item in first.output if item.type == "function_call")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "12 °C"}
    second = client.responses.create(
        model="scripted",
        input=[result, {"role": "user", "content": "reply plain"}],
        previous_response_id=first.id,
        tools=TOOLS,
    )
    prompt = engine.prompts[-1]
    assert "Be kind." not in prompt  # instructions apply to one response only
    lines = [line for line in prompt.split("\n") if line.startswith(("<|", "<tools>"))]
    messages = [json.loads(line[line.rindex("|>{") + 2 :]) for line in lines if "|>{" in line]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "user"]
    assert messages[1]["content"] == "One moment."
    assert messages[1]["reasoning_content"] == "I look it up."
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == json.loads(WEATHER)
    third = client.responses.create(
        model="scripted", input="reply only", previous_response_id=second.id, stream=True
    )
    *_, end = third
    assert engine.prompts[-1].count('"role": "user"') == 3
    assert client.responses.retrieve(end.response.id).output_text
    # The items of an answer are valid input items.
    sent = [
        {"role": "user", "content": "reply plain"},
        *[item.model_dump() for item in first.output],
    ]
    client.responses.create(model="scripted", input=[*sent, result])


def test_stored_responses_can_be_retrieved_and_deleted(client):
    kept = client.responses.create(model="scripted", input="reply plain")
    again = client.responses.retrieve(kept.id)
    assert again.model_dump() == kept.model_dump()
    client.responses.delete(kept.id)
    with pytest.raises(openai.NotFoundError) as error:
        client.responses.retrieve(kept.id)
    assert error.value.body["code"] == "response_not_found"
    with pytest.raises(openai.NotFoundError, match=r"the response .* does not exist"):
        client.responses.create(model="scripted", input="a", previous_response_id=kept.id)
    loose = client.responses.create(model="scripted", input="reply plain", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(loose.id)


def test_fields_about_client_and_billing_change_no_answer(client, engine):
    plain = client.responses.create(model="scripted", input="reply plain")
    prompt = engine.prompts[-1]
    fields = {"client_metadata": {"build": "7"}, "prompt_cache_retention": "24h"}
    other = client.responses.create(
        model="scripted",
        input="reply plain",
        metadata={"run": "a"},
        service_tier="auto",
        safety_identifier="user",
        prompt_cache_key="key",
        extra_body=fields,
    )
    assert engine.prompts[-1] == prompt
    assert other.output_text == plain.output_text
    assert other.metadata == {"run": "a"}
    assert "client_metadata" not in other.model_dump()


def test_response_store_evicts_oldest_responses():
    engine = ScriptedEngine(max_model_len=4096)
    with background(engine, limits={"max_stored_responses": 2}) as url:
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        ids = [client.responses.create(model="scripted", input="a").id for _ in range(3)]
        assert client.responses.retrieve(ids[1]).id == ids[1]
        with pytest.raises(openai.NotFoundError, match="last 2"):
            client.responses.retrieve(ids[0])


def test_response_that_reaches_its_token_limit_is_incomplete(client):
    options = {"model": "scripted", "tools": TOOLS, "max_output_tokens": 60}
    for name, kind in (("only", "function_call"), ("plain", "message")):
        options["max_output_tokens"] = 60 if name == "only" else 3
        whole = client.responses.create(**options, input=f"reply {name}")
        assert whole.status == "incomplete"
        assert whole.incomplete_details.reason == "max_output_tokens"
        assert (whole.output[-1].type, whole.output[-1].status) == (kind, "incomplete")
        *_, last = client.responses.create(**options, input=f"reply {name}", stream=True)
        assert last.type == "response.incomplete"
        assert plain(last.response) == plain(whole)
        client.responses.create(
            model="scripted", input="reply plain", previous_response_id=whole.id
        )


NO_SCHEMA = {"format": {"type": "json_schema"}}
PICTURE = {"role": "user", "content": [{"type": "input_image"}]}
SEEN = {**PICTURE, "role": "assistant"}
FILE = {"role": "user", "content": [{"type": "input_file", "file_id": "a"}]}


@pytest.mark.parametrize(
    ("body", "param", "fragment"),
    [
        ({"input": []}, "input", "at least 1"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input", "item_reference"),
        ({"input": "a", "background": True, "store": False}, "background", "store"),
        ({"input": "a", "conversation": "c"}, "conversation", "previous_response_id"),
        ({"input": "a", "tools": [{"type": "teleport"}]}, "tools", "function"),
        ({"input": "a", "tool_choice": "required"}, "tool_choice", "requires tools"),
        ({"input": "a", "text": NO_SCHEMA}, "text.format.schema", "missing"),
        ({"input": [PICTURE]}, "input[0].content[0].type", "does not accept images"),
        ({"input": [FILE]}, "input", "send file_data"),
        ({"input": [SEEN]}, "input[0].content[0].type", "contain only text"),
    ],
)
def test_invalid_response_requests_return_400_with_param(client, body, param, fragment):
    with pytest.raises(openai.BadRequestError) as error:
        client.post("/responses", body=body, cast_to=object)
    assert error.value.body["param"].startswith(param)
    assert fragment in error.value.body["message"]


def test_dead_engine_ends_response_stream_with_an_error():
    engine = ScriptedEngine(fail_after=3, max_model_len=4096)
    with background(engine) as url:
        text = httpx.post(f"{url}/responses", json={"input": "a", "stream": True}).text
    assert text.rstrip().rsplit("\n\n", 1)[-1].startswith("event: error\ndata: {")


def test_log_probabilities_of_a_response_cover_exactly_its_text(client):
    options = {
        "model": "scripted",
        "input": "reply call",
        "tools": TOOLS,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    }
    whole = client.responses.create(**options)
    message = next(item for item in whole.output if item.type == "message")
    scores = message.content[0].logprobs
    assert bytes(byte for one in scores for byte in one.bytes).decode() == "One moment."
    assert all(len(one.top_logprobs) == 2 for one in scores)
    deltas, done = [], None
    for event in client.responses.create(**options, stream=True):
        if event.type == "response.output_text.delta":
            deltas += event.logprobs
        if event.type == "response.output_text.done":
            done = event.logprobs
    assert [one.token for one in deltas] == [one.token for one in done]
    assert [one.token for one in done] == [one.token for one in scores]
    plain_text = client.responses.create(
        model="scripted", input="reply plain", include=["message.output_text.logprobs"]
    )
    scores = plain_text.output[0].content[0].logprobs
    assert "".join(one.token for one in scores) == TOOL_REPLIES["plain"]
    with pytest.raises(openai.BadRequestError, match=r"requires 'message\.output_text"):
        client.responses.create(model="scripted", input="a", top_logprobs=2)


def test_input_items_of_a_stored_response_are_listed_in_pages(client):
    sent = [{"role": "user", "content": f"reply plain {n}"} for n in range(5)]
    made = client.responses.create(model="scripted", input=sent)
    pages = client.responses.input_items.list(made.id, limit=2, order="asc")
    assert [item.content[0].text for item in pages.data] == ["reply plain 0", "reply plain 1"]
    everything = [item.content[0].text for item in pages]
    assert everything == [one["content"] for one in sent]
    newest = client.responses.input_items.list(made.id, limit=1)
    assert newest.data[0].content[0].text == "reply plain 4"
    with pytest.raises(openai.BadRequestError, match="number from 1"):
        client.responses.input_items.list(made.id, limit=0)
    with pytest.raises(openai.NotFoundError):
        client.responses.input_items.list("resp_none")


def test_input_tokens_equal_the_tokens_of_the_response(client):
    options = {"model": "scripted", "input": "reply plain", "instructions": "Be kind."}
    counted = client.responses.input_tokens.count(**options, tools=TOOLS)
    made = client.responses.create(**options, tools=TOOLS)
    assert counted.input_tokens == made.usage.input_tokens


def test_truncation_removes_the_oldest_turns_that_do_not_fit(client, engine):
    turns = []
    for n in range(40):
        turns += [
            {"role": "user", "content": f"question {n} " + "x" * 200},
            {"role": "assistant", "content": "answer"},
        ]
    turns.append({"role": "user", "content": "reply plain"})
    options = {"model": "scripted", "input": turns, "instructions": "Be kind."}
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(**options)
    assert error.value.body["code"] == "context_length_exceeded"
    made = client.responses.create(**options, truncation="auto", max_output_tokens=64)
    prompt = engine.prompts[-1]
    assert "Be kind." in prompt and "question 39 " in prompt and "question 0 " not in prompt
    kept = sum(f"question {n} " in prompt for n in range(40))
    assert made.truncation == "auto" and len(prompt) + 64 <= 8192
    first = 40 - kept - 1  # one more turn would not fit
    longer = client.responses.input_tokens.count(
        model="scripted", input=turns[2 * first :], instructions="Be kind."
    )
    assert longer.input_tokens + 64 > 8192


def test_allowed_tools_restrict_the_offered_tools(client, engine):
    choice = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "now"}],
    }
    made = client.responses.create(
        model="scripted", input="reply only", tools=TOOLS, tool_choice=choice
    )
    assert '"weather"' not in engine.prompts[-1].split("</tools>")[0]
    assert [item.name for item in made.output if item.type == "function_call"] == ["now"]
    assert made.tool_choice.mode == "auto"
    choice["tools"] = [{"type": "function", "name": "storm"}]
    with pytest.raises(openai.BadRequestError, match="'storm' is not among the tools"):
        client.responses.create(model="scripted", input="a", tools=TOOLS, tool_choice=choice)


CUSTOM = {"type": "custom", "name": "shell", "description": "Runs a command."}
CUSTOM_REPLY = (
    '<tool_call>\n{"name": "shell", "arguments": {"input": "ls \\"a b\\"\\n"}}\n</tool_call>'
)


def test_custom_tools_receive_text():
    engine = ScriptedEngine(
        lambda prompt, choice: CUSTOM_REPLY,
        tokenizer=byte_tokenizer(TOOL_TEMPLATE),
        max_model_len=8192,
    )
    with background(engine) as url:
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        options = {"model": "scripted", "input": "a", "tools": [CUSTOM]}
        whole = client.responses.create(**options)
        (call,) = whole.output
        assert (call.type, call.name, call.input) == ("custom_tool_call", "shell", 'ls "a b"\n')
        text = ""
        for event in client.responses.create(**options, stream=True):
            if event.type == "response.custom_tool_call_input.delta":
                text += event.delta
            if event.type == "response.custom_tool_call_input.done":
                assert event.input == text == call.input
        result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "x"}
        client.responses.create(**{**options, "input": [call.model_dump(), result]})
        client.responses.create(**{**options, "input": [result]}, previous_response_id=whole.id)


def test_background_responses_are_retrieved_cancelled_and_streamed_again():
    engine = ScriptedEngine(lambda prompt, choice: "abcdefgh", max_model_len=4096, delay=0.02)
    with background(engine, limits={"max_background_responses": 2}) as url:
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        made = client.responses.create(model="scripted", input="a", background=True)
        assert made.status in ("queued", "in_progress")
        assert client.responses.retrieve(made.id).status in ("queued", "in_progress")
        events = [*client.responses.retrieve(made.id, stream=True)]
        assert [event.sequence_number for event in events] == [*range(len(events))]
        done = client.responses.retrieve(made.id)
        assert (done.status, done.output_text) == ("completed", "abcdefgh")
        later = [*client.responses.retrieve(made.id, stream=True, starting_after=4)]
        assert [event.model_dump() for event in later] == [e.model_dump() for e in events[5:]]
        assert client.responses.cancel(made.id).status == "completed"
        stream = client.responses.create(model="scripted", input="a", background=True, stream=True)
        name = next(iter(stream)).response.id
        stream.close()  # the response continues without the connection
        rest = [*client.responses.retrieve(name, stream=True, starting_after=0)]
        assert rest[-1].type == "response.completed"
        stopped = client.responses.create(model="scripted", input="a", background=True)
        with pytest.raises(openai.BadRequestError, match="not finished"):
            client.responses.create(model="scripted", input="b", previous_response_id=stopped.id)
        assert client.responses.cancel(stopped.id).status == "cancelled"
        assert client.responses.retrieve(stopped.id).status == "cancelled"
        for _ in range(2):
            client.responses.create(model="scripted", input="a", background=True)
        with pytest.raises(openai.RateLimitError, match="max_background_responses"):
            client.responses.create(model="scripted", input="a", background=True)
        follow = client.responses.create(model="scripted", input="b", previous_response_id=done.id)
        assert follow.status == "completed"
        plain_response = client.responses.create(model="scripted", input="a")
        with pytest.raises(openai.BadRequestError, match="background"):
            client.responses.cancel(plain_response.id)
        with pytest.raises(openai.BadRequestError, match="store: true"):
            client.responses.create(model="scripted", input="a", background=True, store=False)
