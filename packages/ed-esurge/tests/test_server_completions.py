"""`/v1/completions` and `/v1/chat/completions` through the official client, over a real socket."""

from __future__ import annotations

import codecs
import http.client
import json
import socket

import httpx
import openai
import pytest
from ed_esurge.server.generation.answers import ChatCompletion, Completion
from ed_esurge.server.launch import background
from ed_esurge.testing import ScriptedEngine

REPLY = "Grüße 世界 🌍"


@pytest.fixture(scope="module")
def engine():
    return ScriptedEngine(lambda prompt, choice: f"{REPLY} {choice} {len(prompt)}")


@pytest.fixture(scope="module")
def client(engine):
    with background(engine) as url:
        yield openai.OpenAI(base_url=url, api_key="none", max_retries=0)


def complete(client, prompt="abc", **options):
    return client.completions.create(model="scripted", prompt=prompt, max_tokens=64, **options)


def chat(client, text="abc", **options):
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(model="scripted", messages=messages, **options)


def last_params(engine):
    return list(engine.requests.values())[-1]


def test_completion_usage_counts_every_token(client, engine):
    answer = complete(client)
    text = f"{REPLY} 0 4"  # <s> a b c
    assert answer.choices[0].text == text
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs is None
    assert answer.object == "text_completion"
    assert answer.model == "scripted"
    assert answer.usage.prompt_tokens == 4
    assert answer.usage.completion_tokens == len(text.encode()) + 1  # and </s>
    assert answer.usage.total_tokens == 4 + len(text.encode()) + 1
    assert last_params(engine).temperature == 1.0  # OpenAI's default
    assert answer._request_id == answer.id


def test_completions_default_to_sixteen_tokens(client, engine):
    answer = client.completions.create(model="scripted", prompt="abc")
    assert answer.usage.completion_tokens == 16
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "lengths"),
    [
        (["a", "bcd"], [2, 4]),
        ([65, 66], [2]),
        ([[65], [66, 67, 68]], [1, 3]),
        ("ü", [3]),
    ],
)
def test_every_prompt_of_a_list_has_its_own_choices(client, prompt, lengths):
    answer = complete(client, prompt, n=2)
    expected = [f"{REPLY} {choice} {length}" for length in lengths for choice in range(2)]
    assert [choice.text for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == list(range(len(expected)))
    assert answer.usage.prompt_tokens == sum(lengths)


@pytest.mark.parametrize("options", [{}, {"n": 3}, {"echo": True}, {"logprobs": 2, "echo": True}])
def test_joined_stream_equals_unstreamed_answer(client, options):
    prompt = ["ab", "cdé"]
    whole = complete(client, prompt, **options)
    texts, reasons, scores, usages = {}, {}, {}, []
    stream = complete(
        client, prompt, stream=True, stream_options={"include_usage": True}, **options
    )
    for chunk in stream:
        assert "\ufffd" not in chunk.model_dump_json()
        if not chunk.choices:
            usages.append(chunk.usage)
            continue
        assert chunk.usage is None
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.finish_reason:
                assert choice.index not in reasons
                reasons[choice.index] = choice.finish_reason
            if choice.logprobs:
                scores.setdefault(choice.index, []).extend(choice.logprobs.text_offset)
    assert len(usages) == 1
    assert usages[0] == whole.usage
    for choice in whole.choices:
        assert texts[choice.index] == choice.text
        assert reasons[choice.index] == choice.finish_reason
        if options.get("logprobs"):
            assert scores[choice.index] == choice.logprobs.text_offset


def test_stream_omits_usage_by_default(client):
    chunks = list(complete(client, stream=True))
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)
    assert len({chunk.id for chunk in chunks}) == 1


def test_completion_logprobs_cover_prompt_and_completion(client):
    answer = complete(client, "aé", echo=True, logprobs=2)
    choice = answer.choices[0]
    scores = choice.logprobs
    assert choice.text.startswith("aé" + REPLY)
    assert len(scores.tokens) == 4 + answer.usage.completion_tokens
    assert scores.tokens[:4] == ["<s>", "a", "bytes:\\xc3", "bytes:\\xa9"]
    assert scores.token_logprobs[0] is None
    assert scores.top_logprobs[0] is None
    assert scores.text_offset[:5] == [0, 0, 1, 1, 2]
    assert scores.token_logprobs[1] == pytest.approx(-0.693147, abs=1e-6)
    assert all(len(top) == 2 for top in scores.top_logprobs[1:])
    for token, offset in zip(scores.tokens, scores.text_offset, strict=True):
        if not token.startswith("bytes:") and token not in ("<s>", "</s>"):
            assert choice.text.startswith(token, offset)


def test_max_tokens_zero_scores_the_prompt(client):
    answer = client.completions.create(
        model="scripted", prompt="abc", max_tokens=0, echo=True, logprobs=0
    )
    choice = answer.choices[0]
    assert choice.text == "abc"
    assert choice.logprobs.tokens == ["<s>", "a", "b", "c"]
    assert choice.finish_reason == "length"
    assert answer.usage.completion_tokens == 0


def test_best_of_returns_completions_with_highest_logprob_per_token(client, engine):
    answer = complete(client, n=1, best_of=3)
    assert len(answer.choices) == 1
    assert last_params(engine).n == 3
    assert answer.usage.completion_tokens > 3 * len(REPLY.encode())


def test_stop_strings_end_the_text(client):
    for stop in ("世界", ["🌍", "界"]):
        whole = complete(client, stop=stop)
        assert whole.choices[0].finish_reason == "stop"
        expected = REPLY.split(stop if isinstance(stop, str) else "界")[0]
        assert whole.choices[0].text == expected
        chunks = complete(client, stop=stop, stream=True)
        assert "".join(chunk.choices[0].text for chunk in chunks) == expected


def test_sampling_options_reach_the_engine(client, engine):
    complete(
        client,
        temperature=0.5,
        top_p=0.9,
        seed=7,
        logit_bias={"65": -100},
        presence_penalty=0.1,
        frequency_penalty=0.2,
        user="someone",
        extra_body={"top_k": 5, "min_p": 0.1, "ignore_eos": True, "stop_token_ids": [3]},
    )
    params = last_params(engine)
    assert (params.temperature, params.top_p, params.seed) == (0.5, 0.9, 7)
    assert params.logit_bias == {65: -100.0}
    assert (params.presence_penalty, params.frequency_penalty) == (0.1, 0.2)
    assert (params.top_k, params.min_p, params.ignore_eos) == (5, 0.1, True)
    assert params.stop_token_ids == (3,)


def test_chat_request_is_rendered_by_the_template(client, engine):
    answer = chat(client, "hi")
    text = answer.choices[0].message.content
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert text == f"{REPLY} 0 {len('<|user|>hi') + 1 + len('<|assistant|>')}"
    # The default of max_tokens is the rest of the context.
    assert last_params(engine).max_tokens == 256 - answer.usage.prompt_tokens
    assert chat(client, max_completion_tokens=3).usage.completion_tokens == 3
    assert chat(client, max_tokens=3).choices[0].finish_reason == "length"


def test_chat_accepts_text_parts_and_its_own_answers(client):
    first = chat(client, n=2)
    again = client.chat.completions.create(
        model="scripted",
        messages=[
            {"role": "developer", "content": "be short"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            first.choices[0].message.model_dump(),
            {"role": "user", "content": "more"},
        ],
    )
    assert again.usage.prompt_tokens > first.usage.prompt_tokens


def test_streamed_chat_equals_unstreamed_chat(client):
    whole = chat(client, n=2)
    stream = chat(client, n=2, stream=True, stream_options={"include_usage": True})
    texts, roles, reasons, usage = ["", ""], [0, 0], [None, None], None
    for chunk in stream:
        assert chunk.object == "chat.completion.chunk"
        if not chunk.choices:
            usage = chunk.usage
        for choice in chunk.choices:
            if choice.delta.role:
                assert texts[choice.index] == ""
                roles[choice.index] += 1
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert roles == [1, 1]
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == ["stop", "stop"]
    assert usage == whole.usage


def test_chat_logprobs_have_exact_bytes(client):
    whole = chat(client, logprobs=True, top_logprobs=3)
    entries = whole.choices[0].logprobs.content
    raw = bytes(byte for entry in entries[:-1] for byte in entry.bytes)
    assert raw.decode() == whole.choices[0].message.content
    assert entries[-1].token == "</s>"
    assert all(len(entry.top_logprobs) == 3 for entry in entries)
    assert entries[0].top_logprobs[0].token == entries[0].token
    streamed = [
        entry
        for chunk in chat(client, logprobs=True, top_logprobs=3, stream=True)
        for entry in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else ())
    ]
    assert streamed == entries


def test_tokenize_and_detokenize_round_trip_text(client):
    post = client.with_options().post
    text = "aé🌍"
    answer = post("/../tokenize", cast_to=object, body={"prompt": text, "return_token_strs": True})
    assert answer["count"] == 8
    assert answer["max_model_len"] == 256
    assert answer["token_strs"][:2] == ["<s>", "a"]
    back = post("/../detokenize", cast_to=object, body={"tokens": answer["tokens"][1:]})
    assert back == {"prompt": text, "content": text}
    body = {"messages": [{"role": "user", "content": "a"}]}
    rendered = post("/../tokenize", cast_to=object, body=body)
    assert rendered["count"] == len("<|user|>a\n<|assistant|>")


def test_models_endpoint_lists_and_retrieves_models(client):
    assert [model.id for model in client.models.list()] == ["scripted"]
    assert client.models.retrieve("scripted").max_model_len == 256
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_stream_chunks_never_split_a_character(client):
    """Every delta is valid text, although every token here is a part of a character."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for chunk in complete(client, stream=True):
        decoder.decode(chunk.choices[0].text.encode(), final=True)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_stream_uses_valid_chunked_encoding(client, version):
    """HTTP/1.1 uses chunks; in HTTP/1.0 the end of the connection ends the body."""
    url = client.base_url
    body = b'{"prompt": "abc", "max_tokens": 64, "stream": true}'
    head = f"POST /v1/completions HTTP/{version}\r\nHost: {url.host}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((url.host, url.port), timeout=30) as connection:
        connection.sendall(head.encode() + body)
        answer = http.client.HTTPResponse(connection, method="POST")
        answer.begin()
        assert (answer.chunked, answer.status) == (version == "1.1", 200)
        text = answer.read().decode()
    *events, done = text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    parts = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events]
    assert "".join(parts) == f"{REPLY} 0 4"
    assert len(parts) > 4


def merge_chunks(chunks, whole):
    """Return the answer that a stream describes, with the texts and lists of its chunks merged."""

    def merge(left, right):
        if isinstance(left, dict) and isinstance(right, dict):
            return {**left, **{name: merge(left.get(name), x) for name, x in right.items()}}
        if isinstance(left, str | list) and isinstance(right, str | list):
            return left + right
        return left if right is None else right

    choices = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            message = choice.pop("delta", None)
            if message is not None:
                choice["message"] = {"content": None, "refusal": None} | message
            choices[choice["index"]] = merge(choices.get(choice["index"]), choice)
    head = {name: x for name, x in chunks[-1].items() if name not in ("choices", "usage")}
    same = {name: whole[name] for name in ("id", "object", "created")}
    return {**head, **same, "choices": list(choices.values()), "usage": chunks[-1]["usage"]}


@pytest.mark.parametrize(
    ("path", "model", "options"),
    [
        ("chat/completions", ChatCompletion, {"n": 2}),
        ("chat/completions", ChatCompletion, {"logprobs": True, "top_logprobs": 2}),
        ("completions", Completion, {"n": 2}),
        ("completions", Completion, {"logprobs": 2}),
    ],
)
def test_written_answers_and_streams_equal_their_models(client, path, model, options):
    chat = {"messages": [{"role": "user", "content": "abc"}]}
    prompt = chat if model is ChatCompletion else {"prompt": "abc"}
    body = {"model": "scripted", "max_tokens": 64, **prompt, **options}
    whole = httpx.post(f"{client.base_url}{path}", json=body).json()
    assert model.model_validate(whole).model_dump(exclude_unset=True) == whole
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    lines = httpx.post(f"{client.base_url}{path}", json={**body, **stream}).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line[6:7] == "{"]
    merged = merge_chunks(chunks, whole)
    assert model.model_validate(merged).model_dump(exclude_unset=True) == whole
