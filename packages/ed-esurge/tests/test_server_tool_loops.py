"""Tool calls of ten turns with two tools, through the official clients of three APIs."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import ollama
import openai
import pytest
from ed_esurge.server.launch import background
from ed_esurge.testing import TOOL_PARAMETERS, TOOL_TEMPLATE, ScriptedEngine, byte_tokenizer

TURNS = 10
EMPTY: dict[str, Any] = {"type": "object", "properties": {}}
FUNCTIONS = {"weather": TOOL_PARAMETERS, "now": EMPTY}


class TwoTools(ScriptedEngine):
    """Calls both tools in turn, with thoughts and text, until the prompt has ten results."""

    def __init__(self) -> None:
        tokenizer = byte_tokenizer(TOOL_TEMPLATE)
        super().__init__(self._answer, tokenizer=tokenizer, max_model_len=65_536)
        self.prompts: list[str] = []

    def _answer(self, prompt: list[int], choice: int) -> str:
        text = self.tokenizer.decode(prompt)
        self.prompts.append(text)
        turn = text.count("<|tool|>")
        if turn == TURNS:
            return "It was sunny on all days."
        name = ("weather", "now")[turn % 2]
        arguments = {"city": f"Zürich {turn}", "days": turn} if name == "weather" else {}
        call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        said = f"Step {turn}.\n" if turn % 3 else ""
        return f"<think>\nI need {name}.\n</think>\n\n{said}<tool_call>\n{call}\n</tool_call>"


def result(name: str, arguments: dict[str, Any]) -> str:
    return f"{name} of {json.dumps(arguments, sort_keys=True, ensure_ascii=False)}"


Calls = list[tuple[str, dict[str, Any]]]


def with_openai(url: str, stream: bool) -> tuple[Calls, str]:
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    tools: Any = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in FUNCTIONS.items()
    ]
    messages: list[Any] = [{"role": "user", "content": "How is the weather?"}]
    calls: Calls = []
    for _ in range(TURNS + 1):
        options: Any = {"model": "scripted", "messages": messages, "tools": tools}
        if stream:
            with client.chat.completions.stream(**options) as events:
                message = events.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(**options).choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return calls, message.content or ""
        for call in message.tool_calls:
            assert call.type == "function"
            name, arguments = call.function.name, json.loads(call.function.arguments)
            calls.append((name, arguments))
            content = result(name, arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    raise AssertionError("the conversation did not end")


def with_anthropic(url: str, stream: bool) -> tuple[Calls, str]:
    client = anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="none", max_retries=0)
    tools: Any = [{"name": name, "input_schema": schema} for name, schema in FUNCTIONS.items()]
    messages: list[Any] = [{"role": "user", "content": "How is the weather?"}]
    calls: Calls = []
    for _ in range(TURNS + 1):
        options: Any = {"model": "scripted", "messages": messages, "tools": tools}
        options["max_tokens"] = 1000
        if stream:
            with client.messages.stream(**options) as events:
                message = events.get_final_message()
        else:
            message = client.messages.create(**options)
        messages.append({"role": "assistant", "content": [b.model_dump() for b in message.content]})
        uses = [block for block in message.content if block.type == "tool_use"]
        if message.stop_reason != "tool_use":
            return calls, "".join(b.text for b in message.content if b.type == "text")
        results = []
        for use in uses:
            arguments: Any = use.input
            calls.append((use.name, arguments))
            content = result(use.name, arguments)
            results.append({"type": "tool_result", "tool_use_id": use.id, "content": content})
        messages.append({"role": "user", "content": results})
    raise AssertionError("the conversation did not end")


def with_ollama(url: str, stream: bool) -> tuple[Calls, str]:
    client = ollama.Client(host=url.removesuffix("/v1"))
    tools = [
        {"type": "function", "function": {"name": name, "description": "", "parameters": schema}}
        for name, schema in FUNCTIONS.items()
    ]
    messages: list[Any] = [{"role": "user", "content": "How is the weather?"}]
    calls: Calls = []
    options: Any = {"num_predict": 1000}
    for _ in range(TURNS + 1):
        content, thinking, found = "", "", []
        answers: Any = client.chat(
            "scripted", messages=messages, tools=tools, stream=stream, options=options
        )
        for part in answers if stream else [answers]:
            content += part.message.content or ""
            thinking += part.message.thinking or ""
            found += part.message.tool_calls or ()
        messages.append(
            {
                "role": "assistant",
                "content": content,
                "thinking": thinking,
                "tool_calls": [call.model_dump() for call in found],
            }
        )
        if not found:
            return calls, content
        for call in found:
            name, arguments = call.function.name, dict(call.function.arguments)
            calls.append((name, arguments))
            messages.append({"role": "tool", "tool_name": name, "content": result(name, arguments)})
    raise AssertionError("the conversation did not end")


CLIENTS = {"openai": with_openai, "anthropic": with_anthropic, "ollama": with_ollama}


@pytest.mark.daily("streamed")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_conversations_of_ten_tool_calls_are_equal_through_every_client(stream: bool) -> None:
    expected = [
        ("weather", {"city": f"Zürich {turn}", "days": turn}) if turn % 2 == 0 else ("now", {})
        for turn in range(TURNS)
    ]
    for run in CLIENTS.values():
        engine = TwoTools()
        with background(engine) as url:
            calls, answer = run(url, stream)
        assert calls == expected, run.__name__
        assert answer == "It was sunny on all days."
        last = engine.prompts[-1]
        places = [last.find(json.dumps(result(*call))[1:-1].split("{")[0]) for call in calls]
        assert all(place > 0 for place in places)
        assert last.count("<|assistant|>{") == TURNS
        # The thoughts of earlier turns reach the template.
        assert last.count('"reasoning_content": "I need ') == TURNS, run.__name__
