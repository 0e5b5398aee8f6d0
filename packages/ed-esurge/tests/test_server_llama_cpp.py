"""Endpoints and samplers of llama.cpp's server, and vLLM's fields about templates and thoughts."""

from __future__ import annotations

import json

import httpx
import openai
import pytest
from ed_esurge.server.launch import background
from ed_esurge.server.llama_cpp import infill, props, slots
from ed_esurge.testing import TOOL_TEMPLATE, NamedReplies, byte_tokenizer

CHAT = {"model": "scripted", "messages": [{"role": "user", "content": "reply call"}]}
FIM = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>"]


@pytest.fixture(scope="module")
def engine():
    tokenizer = byte_tokenizer(TOOL_TEMPLATE + "{{ documents | tojson if documents }}")
    tokenizer.add_special_tokens({"additional_special_tokens": FIM})
    return NamedReplies(tokenizer=tokenizer)


@pytest.fixture(scope="module")
def http(engine):
    with background(engine) as url, httpx.Client(base_url=url.removesuffix("/v1")) as client:
        yield client


def test_props_and_slots_describe_the_model(http, engine):
    known = http.get("/props").json()
    props.ServerProps.model_validate(known)
    assert known["default_generation_settings"]["n_ctx"] == 8192
    assert known["default_generation_settings"]["params"]["typical_p"] == 1.0
    assert known["total_slots"] == engine.config.max_num_seqs
    assert known["chat_template"] == engine.tokenizer.chat_template
    assert known["eos_token"] == "</s>"
    places = slots.Slots.model_validate(http.get("/slots").json()).root
    assert len(places) == engine.config.max_num_seqs
    assert not any(place.is_processing for place in places)
    assert http.get("/props?model=other").status_code == 404


def test_apply_template_returns_the_prompt_of_a_chat_request(http, engine):
    body = {"messages": [{"role": "user", "content": "reply plain <|fim_prefix|>"}]}
    text = http.post("/apply-template", json=body).json()["prompt"]
    http.post("/v1/chat/completions", json={**body, "max_tokens": 1})
    assert text == engine.prompts[-1]
    assert "<|fim_prefix|>" in text


def test_infill_places_the_texts_around_the_gap(http, engine):
    body = {"input_prefix": "reply plain(", "input_suffix": "<|fim_middle|>)", "n_predict": 6}
    answer = http.post("/infill", json=body).json()
    infill.InfillAnswer.model_validate(answer)
    expected = "<|fim_prefix|>reply plain(<|fim_suffix|><|fim_middle|>)<|fim_middle|>"
    assert engine.prompts[-1] == expected
    assert answer["content"] == "It is "
    assert (answer["stop_type"], answer["tokens_predicted"]) == ("limit", 6)
    # A special token in the suffix of the client is text: 14 bytes instead of one token.
    assert answer["tokens_evaluated"] == 3 + len("reply plain(" + "<|fim_middle|>)")
    with http.stream("POST", "/infill", json={**body, "stream": True}) as stream:
        events = [json.loads(line[6:]) for line in stream.iter_lines() if line]
    assert "".join(event["content"] for event in events) == "It is "
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    extra = [{"filename": "a.py", "text": "x = 1"}]
    http.post("/infill", json={**body, "input_extra": extra, "prompt": "It"})
    assert engine.prompts[-1] == (
        "<|repo_name|>repository\n<|file_sep|>a.py\nx = 1\n<|file_sep|>" + expected + "It"
    )


def test_infill_of_a_model_without_tokens_for_gaps_is_refused():
    with background(NamedReplies()) as url:
        body = {"input_prefix": "a", "input_suffix": "b"}
        error = httpx.post(url.replace("/v1", "/infill"), json=body).json()["error"]
        assert error["param"] == "input_suffix"
        assert "fill in the middle" in error["message"]


def test_samplers_of_llama_cpp_reach_the_engine(http, engine):
    given = {
        "typical_p": 0.5,
        "top_n_sigma": 1.5,
        "xtc_probability": 0.5,
        "xtc_threshold": 0.2,
        "dry_multiplier": 0.8,
        "dry_base": 1.5,
        "dry_allowed_length": 3,
        "dry_penalty_last_n": 64,
        "dry_sequence_breakers": ["\n"],
        "mirostat": 2,
        "mirostat_tau": 4.0,
        "mirostat_eta": 0.2,
    }
    client = openai.OpenAI(
        base_url=f"{str(http.base_url).rstrip('/')}/v1", api_key="none", max_retries=0
    )
    client.chat.completions.create(**CHAT, extra_body=given)
    client.completions.create(model="scripted", prompt="reply plain", extra_body=given)
    for params in [*engine.requests.values()][-2:]:
        for name, value in given.items():
            known = getattr(params, name)
            assert (list(known) if isinstance(known, tuple) else known) == value
    for name, value in (("typical_p", 0), ("mirostat", 3), ("xtc_probability", 2)):
        with pytest.raises(openai.BadRequestError, match=name):
            client.chat.completions.create(**CHAT, extra_body={name: value})


def test_thoughts_are_omitted_without_include_reasoning(http):
    whole = http.post("/v1/chat/completions", json={**CHAT, "include_reasoning": False}).json()
    assert "reasoning_content" not in whole["choices"][0]["message"]
    assert whole["choices"][0]["message"]["content"].startswith("One moment.")
    body = {**CHAT, "include_reasoning": False, "stream": True}
    streamed = http.post("/v1/chat/completions", json=body).text
    assert '"content":"O"' in streamed
    assert "reasoning_content" not in streamed


def test_thinking_token_budget_reaches_the_engine(http, engine):
    body = {**CHAT, "thinking_token_budget": 5}
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    budget = [*engine.requests.values()][-1].thinking_budget
    encoded = engine.tokenizer("</think>", add_special_tokens=False)["input_ids"]
    assert (budget.tokens, list(budget.end_token_ids)) == (5, encoded)
    assert len(budget.start_token_ids) == len("<think>")
    body["chat_template_kwargs"] = {"think": True}
    http.post("/v1/chat/completions", json=body)
    assert [*engine.requests.values()][-1].thinking_budget.start_token_ids == ()
    with background(NamedReplies()) as url:
        answer = httpx.post(f"{url}/chat/completions", json={**CHAT, "thinking_token_budget": 1})
        assert answer.json()["error"]["param"] == "thinking_token_budget"


def test_documents_reach_a_template_that_renders_documents(http, engine):
    documents = [{"title": "t", "text": "some text"}]
    http.post("/v1/chat/completions", json={**CHAT, "documents": documents})
    assert json.dumps(documents) in engine.prompts[-1]
    with background(NamedReplies()) as url:
        body = {**CHAT, "documents": documents}
        error = httpx.post(f"{url}/chat/completions", json=body).json()["error"]
        assert (error["param"], error["code"]) == ("documents", "unsupported_value")


def test_templates_of_clients_require_the_option_of_the_server(http, engine):
    body = {**CHAT, "chat_template": "<{{ messages[0].content }}>"}
    refused = http.post("/v1/chat/completions", json=body).json()["error"]
    assert refused["param"] == "chat_template"
    assert "trust-request-chat-template" in refused["message"]
    with background(engine, trust_request_chat_template=True) as url:
        assert httpx.post(f"{url}/chat/completions", json=body).status_code == 200
        assert engine.prompts[-1] == "<reply call>"
        body["chat_template"] = "{% for i in range(10 ** 12) %}x{% endfor %}"
        answer = httpx.post(f"{url}/chat/completions", json=body)
        assert answer.status_code == 400
        body["chat_template"] = "{{ ''.__class__.__mro__ }}"
        answer = httpx.post(f"{url}/chat/completions", json=body)
        assert "object" not in json.dumps(engine.prompts[-1:])


def test_log_probabilities_can_name_tokens_by_id(http):
    body = {**CHAT, "logprobs": True, "top_logprobs": 2, "return_tokens_as_token_ids": True}
    body |= {"return_token_ids": True, "max_tokens": 3}
    choice = http.post("/v1/chat/completions", json=body).json()["choices"][0]
    names = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert names == [f"token_id:{token}" for token in choice["token_ids"]]
    body = {"prompt": "reply plain", "logprobs": 1, "return_tokens_as_token_ids": True}
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    assert all(name.startswith("token_id:") for name in choice["logprobs"]["tokens"])
