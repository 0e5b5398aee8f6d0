"""The conversations and texts that the checks use."""

from __future__ import annotations

from typing import Any

SampleChat = list[dict[str, Any]]

QUESTION, ANSWER = "Name two colours.", "Red and blue."

#: Conversations that end with an answer.
CONVERSATIONS: dict[str, SampleChat] = {
    "one turn": [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": ANSWER},
    ],
    "several turns": [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": ANSWER},
        {"role": "user", "content": "  And one more?\n"},
        {"role": "assistant", "content": "Grün – 绿色."},
    ],
    "system message": [
        {"role": "system", "content": "You answer briefly."},
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": ANSWER},
    ],
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Return the weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]


def tool_conversation(arguments: object) -> SampleChat:
    """Return a conversation with a call of the tool; templates read arguments or their JSON."""
    call = {
        "id": "call00001",
        "type": "function",
        "function": {"name": "weather", "arguments": arguments},
    }
    return [
        {"role": "user", "content": "What is the weather at home?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "weather", "tool_call_id": "call00001", "content": "12 degrees"},
    ]


def _call(name: str, arguments: object) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": "call00001", "type": "function", "function": function}


def _result(name: str, content: object) -> dict[str, Any]:
    return {"role": "tool", "name": name, "tool_call_id": "call00001", "content": content}


_USER = {"role": "user", "content": QUESTION}
_ASSISTANT = {"role": "assistant", "content": ANSWER}
_PARTS = [{"type": "text", "text": "You answer"}, {"type": "text", "text": " briefly."}]

#: Conversations as clients and data sets write them, which `ed_infra.conversation` prepares.
SHAPES: dict[str, SampleChat] = {
    "parts of text": [{"role": "user", "content": _PARTS}, _ASSISTANT],
    "developer": [{"role": "developer", "content": "You answer briefly."}, _USER, _ASSISTANT],
    "several systems": [
        {"role": "system", "content": "You answer briefly."},
        {"role": "system", "content": _PARTS},
        *(_USER, _ASSISTANT),
    ],
    "late system": [
        *(_USER, _ASSISTANT),
        {"role": "system", "content": "You answer at length."},
        *(_USER, _ASSISTANT),
    ],
    "several users": [_USER, {"role": "user", "content": _PARTS}, _ASSISTANT],
    "several assistants": [_USER, _ASSISTANT, _ASSISTANT, _USER, _ASSISTANT],
    "content null": [
        _USER,
        {"role": "assistant", "content": None, "tool_calls": [_call("weather", {"city": "Oslo"})]},
        _result("weather", "12 degrees"),
        _ASSISTANT,
    ],
    "arguments as text": [
        _USER,
        {"role": "assistant", "tool_calls": [_call("weather", '{"city": "Cologne"}')]},
        _result("weather", [{"type": "text", "text": "12 degrees"}]),
        _ASSISTANT,
    ],
    "arguments cut off": [
        _USER,
        {"role": "assistant", "content": "", "tool_calls": [_call("weather", '{"city": "Col')]},
        _result("weather", "error"),
        _ASSISTANT,
    ],
    "user after result": [
        _USER,
        {"role": "assistant", "content": "", "tool_calls": [_call("weather", "{}")]},
        _result("weather", "12 degrees"),
        *(_USER, _ASSISTANT),
    ],
    "reasoning": [_USER, {**_ASSISTANT, "reasoning": "Two."}, _USER, _ASSISTANT],
    "older call": [
        _USER,
        {"role": "assistant", "function_call": {"name": "weather", "arguments": "{}"}},
        {"role": "function", "name": "weather", "content": "12 degrees"},
        _ASSISTANT,
    ],
}

#: Texts that a tokenizer must return unchanged.
TEXTS = (
    "The year 1984, at 3:45 pm.",
    "def f(x):\n    return x  # a comment\n\n\tprint(f(2))\n",
    "Grüße aus Köln – naïve café, 北京 и Москва, 🙂.",
    "a  b   c    d",
    "Is x != y , or not ? He said : 'no' .",
)
#: Text on which models are compared.
PASSAGE = (
    "The harbour lies in the north of the island. Ships arrive every morning with mail, tools "
    "and fruit, and leave in the evening. In winter, storms sometimes close the harbour for a "
    "week, and people live on what they stored in autumn. A small school, a library and two shops "
    "stand along the only street."
)
