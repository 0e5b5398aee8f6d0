"""Ollama's API through the official client."""

from __future__ import annotations

import json
import time

import httpx
import ollama
import pytest
from ed_esurge.frontends.ollama import chat, generate
from ed_esurge.frontends.ollama.requests import parse_duration
from ed_esurge.server.launch import background
from ed_esurge.testing import (
    TOOL_PARAMETERS,
    TOOL_REPLIES,
    TOOL_TEMPLATE,
    NamedReplies,
    ScriptedEngine,
    byte_tokenizer,
)

TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": TOOL_PARAMETERS}},
    {"type": "function", "function": {"name": "now", "description": "The time."}},
]
COUNTS = ("total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration")
COUNTS += ("eval_count", "eval_duration")


@pytest.fixture(scope="module")
def engine():
    template = TOOL_TEMPLATE + "{# enable_thinking #}"
    return NamedReplies(tokenizer=byte_tokenizer(template), delay=0.001)


@pytest.fixture(scope="module")
def root(engine):
    with background(engine) as url:
        yield url.removesuffix("/v1")


@pytest.fixture(scope="module")
def client(root):
    return ollama.Client(host=root)


def say(name):
    return [{"role": "user", "content": f"reply {name}"}]


def params_of(engine):
    return [*engine.requests.values()][-1]


def test_streamed_ollama_chat_equals_unstreamed_chat(client, engine):
    whole = client.chat("scripted", say("call"), tools=TOOLS)
    assert whole.message.thinking == "I look it up."
    assert whole.message.content == "One moment."
    calls = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls]
    assert calls == [("weather", {"city": "Zürich", "days": 3}), ("now", {})]
    content = thinking = ""
    streamed, last = [], None
    for part in client.chat("scripted", say("call"), tools=TOOLS, stream=True):
        content += part.message.content or ""
        thinking += part.message.thinking or ""
        streamed += [(c.function.name, c.function.arguments) for c in part.message.tool_calls or []]
        last = part
    assert (content, thinking, streamed) == ("One moment.", "I look it up.", calls)
    assert (last.done, last.done_reason, last.model) == (True, "stop", "scripted")
    broken = client.chat("scripted", say("broken"), tools=TOOLS)
    assert broken.message.content == TOOL_REPLIES["broken"]
    assert not broken.message.tool_calls


def test_ollama_counts_and_durations_are_measured(client, engine):
    start = time.monotonic()
    answer = client.chat("scripted", say("plain"))
    elapsed = (time.monotonic() - start) * 1e9
    chat.OllamaChatAnswer.model_validate(answer.model_dump(exclude_none=True))
    assert answer.eval_count == len(TOOL_REPLIES["plain"]) + 1  # with the end of the sequence
    assert answer.prompt_eval_count == len(engine.tokenizer(engine.prompts[-1])["input_ids"]) - 1
    # The scripted engine sleeps 1 ms before each token.
    assert answer.eval_duration >= (answer.eval_count - 1) * 1e6
    assert answer.eval_duration + answer.prompt_eval_duration <= answer.total_duration <= elapsed
    assert answer.load_duration == 0
    last = [*client.chat("scripted", say("plain"), stream=True)][-1]
    assert all(getattr(last, name) is not None for name in COUNTS)


def test_ollama_options_reach_the_engine(client, engine):
    options = {
        "num_predict": 5,
        "temperature": 0.3,
        "top_k": 7,
        "top_p": 0.5,
        "min_p": 0.1,
        "seed": 11,
        "stop": ["x", "y"],
        "repeat_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
    }
    answer = client.chat("scripted", say("plain"), options=options)
    assert (answer.done_reason, answer.eval_count) == ("length", 5)
    params = params_of(engine)
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (5, 0.3, 7, 0.5)
    assert (params.min_p, params.seed, params.stop) == (0.1, 11, ("x", "y"))
    assert (params.repetition_penalty, params.presence_penalty) == (1.2, 0.5)
    assert params.frequency_penalty == -0.5
    client.chat("scripted", say("plain"), options={"num_predict": -1, "seed": -1})
    params = params_of(engine)
    assert (params.temperature, params.top_k, params.top_p, params.seed) == (0.8, 40, 0.9, None)
    with pytest.raises(ollama.ResponseError, match="context length is 64"):
        client.chat("scripted", say("plain"), options={"num_ctx": 64, "num_predict": 8})


def test_repeat_last_n_is_all_tokens_or_none(client, engine):
    for last, penalty in ((-1, 1.3), (0, 1.0)):
        options = {"repeat_penalty": 1.3, "repeat_last_n": last}
        client.chat("scripted", say("plain"), options=options)
        assert params_of(engine).repetition_penalty == penalty
    client.chat("scripted", say("plain"), options={"repeat_last_n": 64})
    with pytest.raises(ollama.ResponseError, match=r"options\.repeat_last_n.*64 would limit"):
        client.chat("scripted", say("plain"), options={"repeat_penalty": 1.3, "repeat_last_n": 64})


def test_requests_of_curl_without_a_content_type_are_read(root):
    """The examples of Ollama send JSON with `curl -d`, whose content type is that of a form."""
    data = json.dumps({"model": "scripted", "messages": say("plain"), "stream": False})
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    answer = httpx.post(f"{root}/api/chat", content=data, headers=form)
    assert answer.json()["message"]["content"] == TOOL_REPLIES["plain"]
    for name, value in (("Origin", root), ("Referer", root), ("Sec-Fetch-Site", "same-origin")):
        by_page = httpx.post(f"{root}/api/chat", content=data, headers={**form, name: value})
        assert by_page.status_code == 400, name


def test_ollama_format_compiles_a_grammar(client, engine):
    client.chat("scripted", say("plain"), format="json")
    assert params_of(engine).structured_outputs.json_schema == '{"type": "object"}'
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    client.generate("scripted", "reply plain", format=schema)
    assert json.loads(params_of(engine).structured_outputs.json_schema) == schema
    with pytest.raises(ollama.ResponseError, match="format"):
        client.chat("scripted", say("plain"), format={"type": "nothing"})


def test_ollama_generate_uses_the_template_unless_raw(client, engine):
    whole = client.generate("scripted", "reply plain", system="Be brief.", logprobs=True)
    assert whole.response == TOOL_REPLIES["plain"]
    assert "Be brief." in engine.prompts[-1]
    assert len(whole.logprobs) == whole.eval_count
    assert whole.logprobs[0].top_logprobs is None
    generate.GenerateAnswer.model_validate(whole.model_dump(exclude_none=True))
    parts = [*client.generate("scripted", "reply plain", stream=True)]
    assert "".join(part.response for part in parts) == whole.response
    assert parts[-1].context == [*parts[-1].context]
    client.generate("scripted", "reply plain", raw=True)
    assert engine.prompts[-1] == "<s>reply plain"
    follow = client.generate("scripted", " more", raw=True, context=parts[-1].context)
    assert engine.prompts[-1].endswith(TOOL_REPLIES["plain"] + "</s> more")
    assert follow.prompt_eval_count == len(parts[-1].context) + len(" more")


def test_ollama_thinking_follows_the_template(client, engine):
    answer = client.chat("scripted", say("call"), think=True)
    assert answer.message.thinking == "I look it up."
    client.chat("scripted", say("call"), think=False)
    engine.tokenizer.chat_template, kept = TOOL_TEMPLATE, engine.tokenizer.chat_template
    with background(engine) as url:
        other = ollama.Client(host=url.removesuffix("/v1"))
        with pytest.raises(ollama.ResponseError, match="reasoning effort"):
            other.chat("scripted", say("plain"), think=True)
    engine.tokenizer.chat_template = kept


def test_ollama_history_with_tool_results_reaches_the_template(client, engine):
    first = client.chat("scripted", say("only"), tools=TOOLS)
    results = [
        {"role": "tool", "tool_name": name, "content": f"of {name}"} for name in ("now", "weather")
    ]
    client.chat("scripted", [*say("only"), first.message, *results, *say("plain")], tools=TOOLS)
    text = engine.prompts[-1]
    lines = [json.loads(line[line.index("|>") + 2 :]) for line in text.split("\n")[1:4]]
    ids = {call["function"]["name"]: call["id"] for call in lines[0]["tool_calls"]}
    assert [(one["tool_call_id"], one["content"]) for one in lines[1:]] == [
        (ids["now"], "of now"),
        (ids["weather"], "of weather"),
    ]


def test_ollama_embeds_texts(client, engine):
    two = client.embed("scripted", ["ab", "abc"])
    one = client.embed("scripted", "ab", dimensions=4)
    assert two.prompt_eval_count == 3 + 4
    assert len(two.embeddings) == 2
    assert len(one.embeddings[0]) == 4
    assert client.embeddings("scripted", "ab").embedding == pytest.approx(two.embeddings[0])
    long = "x" * 9000
    assert client.embed("scripted", long).prompt_eval_count == engine.max_model_len
    with pytest.raises(ollama.ResponseError, match="maximum context length"):
        client.embed("scripted", long, truncate=False)


def test_ollama_lists_and_describes_the_models(client, root):
    listed = client.list().models
    assert [one.model for one in listed] == ["scripted"]
    running = client.ps().models
    assert running[0].model == "scripted"
    assert running[0].context_length == 8192
    shown = client.show("scripted:latest")
    assert {"completion", "tools", "thinking"} <= set(shown.capabilities)
    assert shown.template
    assert httpx.get(f"{root}/api/version").json()["version"]


def test_ollama_errors_have_the_format_of_the_client(client, root):
    with pytest.raises(ollama.ResponseError, match="does not exist") as error:
        client.chat("other", say("plain"))
    assert error.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="does not exist"):
        client.show("other")
    with pytest.raises(ollama.ResponseError, match=r"options\.top_p"):
        client.chat("scripted", say("plain"), options={"top_p": 2})
    with pytest.raises(ollama.ResponseError, match="model-dir"):
        client.create("mine", from_="scripted")
    with pytest.raises(ollama.ResponseError, match="neither downloads"):
        client.pull("llama3")
    with pytest.raises(ollama.ResponseError, match="template"):
        client.generate("scripted", "a", template="{{ .Prompt }}")
    body = {"model": "scripted", "messages": say("plain"), "options": {"num_gpu": 1}}
    answer = httpx.post(f"{root}/api/chat", json={**body, "keep_alive": "5m", "stream": False})
    assert answer.headers["X-Ignored-Fields"] == "num_gpu, keep_alive"


def test_error_within_a_stream_is_a_line():
    engine = ScriptedEngine(tokenizer=byte_tokenizer(), fail_after=3)
    with background(engine) as url:
        client = ollama.Client(host=url.removesuffix("/v1"))
        with pytest.raises(ollama.ResponseError, match="engine"):
            list(client.chat("scripted", say("plain"), stream=True))


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("5m", 300), ("1h30m", 5400), ("500ms", 0.5), (7, 7), ("7", 7), (-1, float("inf")),
     ("-1m", float("inf")), (0, 0), ("0", 0)],
)  # fmt: skip
def test_keep_alive_accepts_seconds_and_durations(value, seconds):
    assert parse_duration(value) == seconds
    for wrong in ("5 minutes", "m", "1h-5m"):
        with pytest.raises(ValueError, match="duration"):
            parse_duration(wrong)


@pytest.mark.parametrize("keep_alive", [-1, "-1", "-1m", -0.5, 300, "5m"])
def test_every_route_keeps_models_as_long_as_the_client_asks(client, keep_alive):
    calls = (
        lambda: client.generate("scripted", "reply plain", keep_alive=keep_alive).response,
        lambda: client.chat("scripted", say("plain"), keep_alive=keep_alive).message.content,
        lambda: [*client.generate("scripted", "reply plain", keep_alive=keep_alive, stream=True)],
        lambda: client.generate("scripted", "", keep_alive=keep_alive).done,
    )
    assert all(call() for call in calls)


@pytest.mark.parametrize("route", ["/api/embed", "/api/embeddings"])
def test_embeddings_accept_models_that_stay_forever(root, route):
    body = {"model": "scripted", "input": "a", "prompt": "a", "keep_alive": -1}
    answer = httpx.post(root + route, json=body)
    assert "keep_alive" not in answer.text and answer.status_code in (200, 400), answer.text


#: Every option of the official client, with a value that it documents.
OPTIONS = {
    "num_keep": 5,
    "seed": 42,
    "num_predict": 100,
    "top_k": 20,
    "top_p": 0.9,
    "tfs_z": 1.0,
    "typical_p": 0.7,
    "repeat_last_n": -1,
    "temperature": 0.8,
    "repeat_penalty": 1.2,
    "presence_penalty": 1.5,
    "frequency_penalty": 1.0,
    "penalize_newline": True,
    "stop": ["\n", "user:"],
    "numa": False,
    "num_ctx": 1024,
    "num_batch": 2,
    "num_gpu": 1,
    "main_gpu": 0,
    "low_vram": False,
    "use_mmap": True,
    "num_thread": 8,
    "vocab_only": False,
    "mirostat": 0,
    "mirostat_tau": 0.8,
    "mirostat_eta": 0.6,
    "use_mlock": False,
    "f16_kv": True,
    "logits_all": False,
    "embedding_only": False,
}


def test_options_of_the_official_client_reach_the_engine(client, engine):
    known = ollama.Options.model_fields
    answer = client.generate("scripted", "reply plain", options={k: OPTIONS[k] for k in known})
    assert answer.done
    params = params_of(engine)
    for option, field in (("seed", "seed"), ("top_k", "top_k"), ("top_p", "top_p")):
        assert getattr(params, field) == OPTIONS[option]
    assert params.max_tokens == 100 and params.temperature == 0.8
    assert params.repetition_penalty == 1.2 and params.presence_penalty == 1.5
    assert [*params.stop] == ["\n", "user:"]


def test_show_reads_the_older_spelling_of_model(root):
    answers = [httpx.post(f"{root}/api/show", json={key: "scripted"}) for key in ("model", "name")]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].json() == answers[1].json()
