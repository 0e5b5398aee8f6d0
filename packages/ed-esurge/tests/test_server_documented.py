"""Every parameter of the official clients has an effect, requires none, or is rejected by name."""

from __future__ import annotations

import inspect
import json

import anthropic
import openai
import pytest
from ed_esurge.server.launch import background
from ed_esurge.testing import TOOL_TEMPLATE, NamedReplies, byte_tokenizer

OUR_OWN = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
# `output_format` is a class, which the client converts to `output_config`.
OUR_OWN |= {"output_format"}
SAY = [{"role": "user", "content": "reply plain"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FUNCTION = {"name": "weather", "description": "d", "parameters": SCHEMA, "strict": True}
TOOL = {"type": "function", "function": FUNCTION}

# Parameter -> an accepted value.
GENERATION = {
    "model": "scripted",
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "logit_bias": {"5": 1},
    "n": 2,
    "seed": 3,
    "stop": ["x"],
    "stream": False,
    "stream_options": None,
    "temperature": 0.5,
    "top_p": 0.5,
    "user": "ann",
}
CHAT = {
    **GENERATION,
    "messages": SAY,
    "function_call": "auto",
    "functions": [],
    "logprobs": True,
    "max_completion_tokens": 9,
    "max_tokens": 9,
    "metadata": {"a": "b"},
    "modalities": ["text"],
    "parallel_tool_calls": True,
    "prediction": {"type": "content", "content": "a"},
    "prompt_cache_key": "a",
    "prompt_cache_options": {},
    "prompt_cache_retention": "24h",
    "reasoning_effort": "low",
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
    "safety_identifier": "a",
    "service_tier": "auto",
    "store": True,
    "tool_choice": "auto",
    "tools": [TOOL],
    "top_logprobs": None,
}
COMPLETION = {**GENERATION, "prompt": "reply plain", "best_of": 2, "echo": True, "logprobs": 2}
COMPLETION |= {"max_tokens": 9, "suffix": ""}
RESPONSE = {
    "background": False,
    "context_management": [],
    "include": ["reasoning.encrypted_content"],
    "input": "reply plain",
    "instructions": "a",
    "max_output_tokens": 9,
    "max_tool_calls": 3,
    "metadata": {"a": "b"},
    "model": "scripted",
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": "a",
    "prompt_cache_options": {},
    "prompt_cache_retention": "24h",
    "reasoning": {"effort": "high", "summary": "auto"},
    "safety_identifier": "a",
    "service_tier": "auto",
    "store": False,
    "stream": False,
    "stream_options": None,
    "temperature": 0.5,
    "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}},
    "tool_choice": "auto",
    "tools": [{"type": "function", **FUNCTION}],
    "top_logprobs": 0,
    "top_p": 0.5,
    "truncation": "disabled",
    "user": "ann",
}
MESSAGE = {
    "cache_control": {"type": "ephemeral"},
    "max_tokens": 2000,
    "messages": SAY,
    "metadata": {"user_id": "a"},
    "model": "scripted",
    "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": SCHEMA}},
    "service_tier": "auto",
    "speed": "standard",
    "stop_sequences": ["x"],
    "stream": False,
    "system": "a",
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "tool_choice": {"type": "auto"},
    "tools": [{"name": "a", "input_schema": SCHEMA, "strict": True, "eager_input_streaming": True}],
}
COUNT = {
    name: MESSAGE[name]
    for name in (
        *("cache_control", "messages", "model", "output_config", "speed", "system", "thinking"),
        *("tool_choice", "tools"),
    )
}

# Parameters without effect on answers: they are ignored, and a header lists them.
REPORTED = {
    *("access_programs", "diagnostics", "inference_geo", "user_profile_id", "workspace_id"),
}

# Further parameters that a parameter requires.
BESIDES = {
    "tool_choice": ("tools",),
    "parallel_tool_calls": ("tools",),
    "thinking": ("max_tokens",),
}


class Thinking(NamedReplies):
    """A model whose template supports efforts."""

    def __init__(self):
        template = TOOL_TEMPLATE + "{{ reasoning_effort }}{{ enable_thinking }}"
        super().__init__(tokenizer=byte_tokenizer(template))


@pytest.fixture(scope="module")
def engine():
    return Thinking()


@pytest.fixture(scope="module")
def clients(engine):
    with background(engine) as url:
        yield (
            openai.OpenAI(base_url=url, api_key="none", max_retries=0),
            anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="none", max_retries=0),
        )


def methods(clients):
    ai, claude = clients
    return {
        "chat": (ai.chat.completions.create, CHAT, {"messages": SAY}),
        "completions": (ai.completions.create, COMPLETION, {"prompt": "reply plain"}),
        "responses": (ai.responses.create, RESPONSE, {"input": "reply plain"}),
        "messages": (claude.messages.create, MESSAGE, {"messages": SAY, "max_tokens": 50}),
        "count": (claude.messages.count_tokens, COUNT, {"messages": SAY}),
    }


@pytest.mark.parametrize("name", ["chat", "completions", "responses", "messages", "count"])
def test_every_documented_parameter_is_accepted_or_rejected_by_name(clients, name):
    create, taken, least = methods(clients)[name]
    documented = set(inspect.signature(create).parameters) - OUR_OWN
    for parameter in sorted(documented):
        body = {"model": "scripted", **least}
        body |= {other: taken[other] for other in BESIDES.get(parameter, ()) if other in documented}
        if parameter in taken:
            create(**{**body, parameter: taken[parameter]})
            continue
        if parameter in REPORTED:
            raw = create.__self__.with_raw_response
            answer = getattr(raw, create.__name__)(
                **body, extra_body={parameter: {"some": "thing"}}
            )
            assert answer.headers["x-ignored-fields"] == parameter
            continue
        # Because of the name, not because of an invalid value.
        with pytest.raises((openai.BadRequestError, anthropic.BadRequestError)) as caught:
            create(**body, extra_body={parameter: {"some": "thing"}})
        said = caught.value.response.json()["error"]["message"]
        assert parameter in said
        assert "not supported" in said


@pytest.mark.parametrize("name", ["chat", "completions", "responses", "messages"])
def test_all_supported_parameters_are_accepted_together(clients, name):
    create, taken, _ = methods(clients)[name]
    documented = inspect.signature(create).parameters
    create(**{parameter: value for parameter, value in taken.items() if parameter in documented})


def told(engine) -> str:
    return engine.prompts[-1].rsplit("<|assistant|>", 1)[-1]


def test_reasoning_effort_reaches_the_template(clients, engine):
    ai, claude = clients
    for effort, thinks in (("none", False), ("low", True), ("high", True)):
        ai.chat.completions.create(model="scripted", messages=SAY, reasoning_effort=effort)
        assert told(engine) == f"{effort}{thinks}"
        answer = ai.responses.create(
            model="scripted", input="reply plain", reasoning={"effort": effort}
        )
        assert told(engine) == f"{effort}{thinks}"
        assert answer.reasoning.effort == effort
    claude.messages.create(
        model="scripted", messages=SAY, max_tokens=9, output_config={"effort": "max"}
    )
    assert told(engine) == "maxTrue"
    claude.messages.create(
        model="scripted", messages=SAY, max_tokens=9, thinking={"type": "disabled"}
    )
    assert told(engine) == "False"
    # chat_template_kwargs have precedence.
    ai.chat.completions.create(
        model="scripted",
        messages=SAY,
        reasoning_effort="low",
        extra_body={"chat_template_kwargs": {"reasoning_effort": "much"}},
    )
    assert told(engine) == "muchTrue"


def test_reasoning_effort_without_template_support_returns_400():
    with background(NamedReplies()) as url:
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        client.chat.completions.create(model="scripted", messages=SAY, reasoning_effort="none")
        with pytest.raises(
            openai.BadRequestError, match="does not support a reasoning effort"
        ) as error:
            client.chat.completions.create(model="scripted", messages=SAY, reasoning_effort="low")
        assert error.value.param == "reasoning_effort"


def test_messages_accept_output_format_tool_errors_and_refusals(clients, engine):
    ai, claude = clients
    claude.messages.create(
        model="scripted", messages=SAY, max_tokens=9, output_config=MESSAGE["output_config"]
    )
    wanted = [*engine.requests.values()][-1].structured_outputs
    assert json.loads(wanted.json_schema) == SCHEMA
    result = {"type": "tool_result", "tool_use_id": "a", "content": "no such city"}
    use = {"type": "tool_use", "id": "a", "name": "weather", "input": {}}
    for is_error, content in ((True, "Error: no such city"), (False, "no such city")):
        claude.messages.create(
            model="scripted",
            max_tokens=9,
            messages=[
                *SAY,
                {"role": "assistant", "content": [use]},
                {"role": "user", "content": [{**result, "is_error": is_error}]},
            ],
        )
        assert f'"{content}"' in engine.prompts[-1]
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "I will not."}]}
    ai.chat.completions.create(model="scripted", messages=[*SAY, refused, *SAY])
    assert "I will not." in engine.prompts[-1]
    for thinking, fragment in (
        ({"type": "enabled", "budget_tokens": 1024}, "must be below max_tokens, which is 50"),
        ({"type": "enabled"}, "requires the type enabled"),
        ({"type": "adaptive", "display": "hidden"}, "omitted"),
    ):
        with pytest.raises(anthropic.BadRequestError, match=fragment):
            claude.messages.create(model="scripted", messages=SAY, max_tokens=50, thinking=thinking)
