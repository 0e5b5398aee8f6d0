"""Endpoints and samplers of llama.cpp's server, and vLLM's fields about templates and thoughts."""

from __future__ import annotations

import json

import httpx
import openai
import pytest
from ed_esurge.frontends.llama_cpp import generated, props
from ed_esurge.server.launch import background
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
    places = props.Slots.model_validate(http.get("/slots").json()).root
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
    generated.GeneratedAnswer.model_validate(answer)
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


def test_completion_continues_text_and_token_ids(http, engine):
    body = {"prompt": "reply plain", "n_predict": 6}
    answer = http.post("/completion", json=body).json()
    generated.GeneratedAnswer.model_validate(answer)
    assert engine.prompts[-1] == "<s>reply plain"
    assert answer["content"] == "It is "
    assert (answer["stop_type"], answer["tokens_predicted"]) == ("limit", 6)
    assert answer["tokens_evaluated"] == 1 + len("reply plain")
    assert "completion_probabilities" not in answer
    params = [*engine.requests.values()][-1]
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.8, 40, 0.95, 0.05)
    # Without a limit the text ends with the end of the sequence.
    assert http.post("/completion", json={"prompt": "reply plain"}).json()["stop_type"] == "eos"
    with http.stream("POST", "/completion", json={**body, "stream": True}) as stream:
        events = [json.loads(line[6:]) for line in stream.iter_lines() if line]
    assert "".join(event["content"] for event in events) == "It is "
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    ids = engine.tokenizer(" plain", add_special_tokens=False)["input_ids"]
    for prompt in (["reply", *ids], engine.tokenizer("reply plain")["input_ids"], ["reply plain"]):
        assert http.post("/completion", json={**body, "prompt": prompt}).json()["content"]
        assert engine.prompts[-1] == "<s>reply plain"


def test_options_of_a_completion_reach_the_engine(http, engine):
    body = {"prompt": "reply plain", "n_predict": 3}
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    more = {
        "logit_bias": [[70, 1.5], [71, False]],
        "repeat_penalty": 1.2,
        "cache_prompt": True,
        "json_schema": schema,
        "n_probs": 2,
    }
    answer = http.post("/completion", json={**body, **more}).json()
    params = [*engine.requests.values()][-1]
    assert params.logit_bias == {70: 1.5, 71: -100.0}
    assert params.repetition_penalty == 1.2
    assert json.loads(params.structured_outputs.json_schema) == schema
    first = answer["completion_probabilities"][0]
    assert first["id"] == answer["tokens"][0]
    assert len(answer["completion_probabilities"]) == 3 and len(first["top_logprobs"]) == 2
    assert first["top_logprobs"][0]["id"] == first["id"]
    http.post("/completion", json={**body, "ignore_eos": True})
    assert [*engine.requests.values()][-1].ignore_eos
    http.post("/completion", json={**body, "grammar": 'root ::= "a" | "b"'})
    grammar = [*engine.requests.values()][-1].structured_outputs.grammar
    assert grammar == 'root ::= "a" | "b"'
    for wrong, param in (
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [999999]}, "prompt"),
        ({"grammar": "root ::= ("}, "grammar"),
        ({"json_schema": {"type": "nothing"}}, "json_schema"),
        ({"samplers": ["top_k"]}, "samplers"),
        ({"logit_bias": [["word", 1]]}, "logit_bias"),
        ({"repeat_penalty": 1.5, "repeat_last_n": 64}, "repeat_last_n"),
        ({"n_predict": 10**7, "num_ctx": 9}, "prompt"),
    ):
        refused = http.post("/completion", json={**body, **wrong})
        assert refused.status_code == 400, (wrong, refused.text)
        assert refused.json()["error"]["param"].startswith(param), refused.text
    # A window of penalties has no effect without penalties, and 0 disables them.
    neutral = {"repeat_penalty": 1.0, "repeat_last_n": 64}
    assert http.post("/completion", json={**body, **neutral}).status_code == 200
    http.post("/completion", json={**body, "repeat_penalty": 1.5, "repeat_last_n": 0})
    assert [*engine.requests.values()][-1].repetition_penalty == 1.0


def test_paths_without_version_have_the_answers_of_their_endpoints(http, engine):
    client = openai.OpenAI(base_url=str(http.base_url), api_key="none", max_retries=0)
    answer = client.chat.completions.create(**CHAT)
    assert answer.choices[0].message.content.startswith("One moment.")
    assert [model.id for model in client.models.list()] == ["scripted"]
    counted = client.responses.input_tokens.count(model="scripted", input="reply call")
    assert counted.input_tokens == answer.usage.prompt_tokens
    for path in ("/chat/completions/input_tokens", "/v1/chat/completions/input_tokens"):
        assert http.post(path, json=CHAT).json()["input_tokens"] == answer.usage.prompt_tokens
    assert http.get("/v1/health").json() == http.get("/health").json()


def test_tokens_have_the_names_of_llama_cpp(http, engine):
    tokens = http.post("/tokenize", json={"content": "ab"}).json()["tokens"]
    assert tokens == engine.tokenizer("ab", add_special_tokens=False)["input_ids"]
    assert http.post("/detokenize", json={"tokens": tokens}).json()["content"] == "ab"
    whole = http.post("/tokenize", json={"content": "ab", "add_special": True}).json()["tokens"]
    assert whole == engine.tokenizer("ab")["input_ids"]
    both = http.post("/tokenize", json={"content": "ab", "prompt": "ab"})
    assert both.status_code == 400


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


@pytest.mark.nightly
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


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/completion", "/infill"])
def test_answers_have_the_fields_that_clients_read(http, path, stream):
    body = {
        "prompt": "reply plain",
        "input_prefix": "reply plain",
        "input_suffix": "",
        "n_predict": 9,
        "temperature": 0.25,
        "top_k": 7,
        "stop": ["x"],
        "stream": stream,
        "typical_p": 0.5,
        "logit_bias": [[5, False]],
        "id_slot": 2,
        "seed": 3,
    }
    answer = http.post(path, json={k: v for k, v in body.items() if k in LLAMA_FIELDS[path]})
    answer = json.loads(answer.text.split("data: ")[-1]) if stream else answer.json()
    settings = answer["generation_settings"]
    used = {"n_predict": 9, "temperature": 0.25, "top_k": 7, "typical_p": 0.5, "seed": 3}
    assert used.items() <= settings.items()
    assert settings["stop"] == ["x"] and settings["logit_bias"] == [[5, -100]]
    defaults = http.get("/props").json()["default_generation_settings"]["params"]
    assert set(defaults) <= set(settings)
    assert {k: v for k, v in settings.items() if k in defaults and k not in used} == {
        k: v for k, v in defaults.items() if k not in used
    }
    assert "reply plain" in answer["prompt"]
    assert (answer["has_new_line"], answer["id_slot"]) == (False, 2)


_SHARED = {"n_predict", "temperature", "top_k", "stop", "stream", "typical_p", "logit_bias"}
LLAMA_FIELDS = {
    "/completion": {"prompt", "id_slot", "seed", *_SHARED},
    "/infill": {"input_prefix", "input_suffix", "id_slot", "seed", *_SHARED},
}


def test_props_report_the_defaults_that_completions_use(http, engine):
    http.post("/completion", json={"prompt": "reply plain", "n_predict": 1})
    params = [*engine.requests.values()][-1]
    defaults = http.get("/props").json()["default_generation_settings"]["params"]
    for name in ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "typical_p"):
        assert defaults[name] == getattr(params, name), name
    assert defaults["repeat_penalty"] == params.repetition_penalty


@pytest.mark.parametrize("stream", [False, True])
def test_response_fields_select_fields_of_the_answer(http, stream):
    names = ["content", "generation_settings/top_k", "tokens_predicted", "missing", "content/x"]
    body = {"prompt": "reply plain", "n_predict": 3, "response_fields": names, "stream": stream}
    answer = http.post("/completion", json=body)
    answer = json.loads(answer.text.split("data: ")[-1]) if stream else answer.json()
    content = "" if stream else "It "
    assert answer == {"content": content, "top_k": 40, "tokens_predicted": 3}


def test_new_lines_of_an_answer_are_reported(http):
    body = {"prompt": "reply inside", "n_predict": 20}
    for stream in (False, True):
        answer = http.post("/completion", json={**body, "stream": stream})
        last = json.loads(answer.text.split("data: ")[-1]) if stream else answer.json()
        assert last["has_new_line"] is True


def test_probabilities_after_the_samplers_are_refused(http):
    body = {"prompt": "reply plain", "n_predict": 1, "n_probs": 2, "post_sampling_probs": True}
    assert http.post("/completion", json=body).status_code == 400
    assert http.post("/completion", json={**body, "post_sampling_probs": False}).is_success
