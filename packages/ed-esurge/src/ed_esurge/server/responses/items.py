"""Items of a conversation in `/v1/responses`, and their conversion to chat messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field

from ed_esurge.server.generation.requests import MAX_MESSAGES, MAX_PARTS
from ed_esurge.server.http.fields import History, few, parts_of

Id = Annotated[str, Field(max_length=256)]
PartType = Literal["input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"]


class ResponsePart(History):
    """A text part of a message or of thoughts."""

    type: PartType
    text: str = ""
    refusal: str | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


ResponseParts = Annotated[
    list[ResponsePart], Field(fail_fast=True), parts_of(*get_args(PartType)), few(MAX_PARTS)
]
TextOrParts = Annotated[
    str | Annotated[list[ResponsePart], Field(fail_fast=True)],
    parts_of(*get_args(PartType)),
    few(MAX_PARTS),
]


class MessageItem(History):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: TextOrParts
    id: Id | None = None
    status: str | None = None
    phase: str | None = None


class CallItem(History):
    """A function call of the model."""

    type: Literal["function_call"]
    call_id: Id
    name: str
    arguments: str
    id: Id | None = None
    status: str | None = None


class ResultItem(History):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: Id
    output: TextOrParts
    id: Id | None = None
    status: str | None = None


class CustomCallItem(History):
    """A call of a custom tool, whose input is text."""

    type: Literal["custom_tool_call"]
    call_id: Id
    name: str
    input: str
    id: Id | None = None
    status: str | None = None


class CustomResultItem(History):
    """The result of a call of a custom tool."""

    type: Literal["custom_tool_call_output"]
    call_id: Id
    output: TextOrParts
    id: Id | None = None
    status: str | None = None


class ReasoningItem(History):
    """Thoughts of the model in the conversation."""

    type: Literal["reasoning"]
    id: Id | None = None
    summary: ResponseParts = Field(default_factory=list)
    content: ResponseParts | None = None
    encrypted_content: str | None = None
    status: str | None = None


class McpListItem(History):
    """The tools of an MCP server, which the conversation does not repeat."""

    type: Literal["mcp_list_tools"]
    server_label: str
    tools: list[Any] = Field(default_factory=list)
    id: Id | None = None
    error: Any = None


class McpCallItem(History):
    """A call that this server sent to an MCP server."""

    type: Literal["mcp_call"]
    id: Id
    server_label: str
    name: str
    arguments: str
    output: str | None = None
    error: Any = None
    approval_request_id: Id | None = None
    status: str | None = None


class ApprovalRequestItem(History):
    """A call that requires the approval of the user."""

    type: Literal["mcp_approval_request"]
    id: Id
    server_label: str
    name: str
    arguments: str


class ApprovalItem(History):
    """The answer of the user to an approval request."""

    type: Literal["mcp_approval_response"]
    approval_request_id: Id
    approve: bool
    reason: str | None = None
    id: Id | None = None


def _items(value: object) -> object:
    """Add the default type to messages."""
    if not isinstance(value, list):
        return value
    return [
        {**item, "type": "message"} if isinstance(item, dict) and item.get("type") is None else item
        for item in value
    ]


InputItem = Annotated[
    MessageItem
    | CallItem
    | ResultItem
    | CustomCallItem
    | CustomResultItem
    | ReasoningItem
    | McpListItem
    | McpCallItem
    | ApprovalRequestItem
    | ApprovalItem,
    Field(discriminator="type"),
]
Items = Annotated[list[InputItem], Field(fail_fast=True, min_length=1)]
Input = Annotated[str | Items, BeforeValidator(_items), few(MAX_MESSAGES)]


def text_of(content: str | list[ResponsePart]) -> str:
    """Return the text of a message's content."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


def messages_of(items: str | Sequence[InputItem]) -> list[dict[str, Any]]:
    """Return the chat messages of items. Adjacent items of the assistant are merged.

    Unanswered approval requests are omitted.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []
    for item in items:
        match item:
            case MessageItem(role="assistant"):
                _of_assistant(messages)["content"] += text_of(item.content)
            case MessageItem():
                messages.append({"role": item.role, "content": text_of(item.content)})
            case ReasoningItem():
                said = text_of(item.content or item.summary)
                message = _of_assistant(messages)
                message["reasoning_content"] = message.get("reasoning_content", "") + said
            case CallItem():
                _call(messages, item.call_id, item.name, item.arguments)
            case CustomCallItem():
                _call(messages, item.call_id, item.name, json.dumps({"input": item.input}))
            case ResultItem() | CustomResultItem():
                messages.append(_result(item.call_id, text_of(item.output)))
            case McpCallItem():
                _call(messages, item.id, item.name, item.arguments)
                failed = item.error if isinstance(item.error, str) else json.dumps(item.error)
                text = f"error: {failed}" if item.error is not None else item.output or ""
                messages.append(_result(item.id, text))
            case _:
                pass
    return messages


def denied(request: ApprovalRequestItem, reason: str | None) -> list[dict[str, Any]]:
    """Return the messages about a call that the user rejected."""
    messages: list[dict[str, Any]] = []
    _call(messages, request.id, request.name, request.arguments)
    text = "error: the user denied this call" + (f": {reason}" if reason else "")
    return [*messages, _result(request.id, text)]


def stored_form(items: str | Sequence[InputItem], prefix: str) -> list[dict[str, Any]]:
    """Return input items as `input_items` lists them: with ids, and content as parts.

    Args:
        prefix: beginning of the ids of items without an id.
    """
    if isinstance(items, str):
        items = [MessageItem(role="user", content=items)]
    result = []
    for place, item in enumerate(items):
        fields = item.model_dump(exclude_none=True)
        if isinstance(item, MessageItem) and isinstance(item.content, str):
            kind = "output_text" if item.role == "assistant" else "input_text"
            part: dict[str, Any] = {"type": kind, "text": item.content}
            if kind == "output_text":
                part["annotations"] = []
            fields["content"] = [part]
        result.append({"id": f"{prefix}_{place}", "status": "completed", **fields})
    return result


def _call(messages: list[dict[str, Any]], call_id: str, name: str, arguments: str) -> None:
    function = {"name": name, "arguments": arguments}
    call = {"id": call_id, "type": "function", "function": function}
    _of_assistant(messages).setdefault("tool_calls", []).append(call)


def _result(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def _of_assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the assistant's message at the end; append an empty message if necessary."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]
