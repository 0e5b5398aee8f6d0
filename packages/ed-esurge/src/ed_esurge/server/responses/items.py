"""Items of a conversation in `/v1/responses`, and their conversion to chat messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from ed_esurge.server.generation.requests import (
    MAX_MESSAGES,
    MAX_PARTS,
    AudioPart,
    ImagePart,
    ImageURL,
    InputAudio,
)
from ed_esurge.server.http.errors import InvalidField
from ed_esurge.server.http.fields import History, few, parts_of, unsupported

Id = Annotated[str, Field(max_length=256)]
PartType = Literal["input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"]
#: Types of the parts of a message.
_IN_MESSAGES = (*get_args(PartType), "input_image", "input_audio")


class ResponsePart(History):
    """A text part of a message or of thoughts."""

    type: PartType
    text: str = ""
    refusal: str | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


def _tag(part: object) -> str:
    """Return the kind of a part of a message."""
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    return str(kind) if kind in ("input_image", "input_audio") else "text"


ResponseParts = Annotated[
    list[ResponsePart], Field(fail_fast=True), parts_of(*get_args(PartType)), few(MAX_PARTS)
]
TextOrParts = Annotated[
    str | Annotated[list[ResponsePart], Field(fail_fast=True)],
    parts_of(*get_args(PartType)),
    few(MAX_PARTS),
]


class ImageInput(History):
    """An image of a message. `detail` has no effect."""

    type: Literal["input_image"]
    image_url: str | None = None
    detail: str | None = None
    file_id: Annotated[None, unsupported("files of images; send image_url")] = None

    def for_chat(self, field: str | None) -> ImagePart:
        """Return the part of a chat message."""
        url = None if self.image_url is None else ImageURL(url=self.image_url)
        return ImagePart(type="image_url", image_url=url).at(field, "image_url")


class AudioInput(History):
    """A recording of a message."""

    type: Literal["input_audio"]
    input_audio: InputAudio | None = None

    def for_chat(self, field: str | None) -> AudioPart:
        """Return the part of a chat message."""
        return AudioPart(type="input_audio", input_audio=self.input_audio).at(field, "input_audio")


MessagePart = Annotated[
    Annotated[ResponsePart, Tag("text")]
    | Annotated[ImageInput, Tag("input_image")]
    | Annotated[AudioInput, Tag("input_audio")],
    Discriminator(_tag),
]


class MessageItem(History):
    """A message. Messages of the assistant contain only text."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[
        str | Annotated[list[MessagePart], Field(fail_fast=True)],
        parts_of(*_IN_MESSAGES),
        few(MAX_PARTS),
    ]
    id: Id | None = None
    status: str | None = None
    phase: str | None = None

    @model_validator(mode="after")
    def _text_of_assistant(self) -> MessageItem:
        if self.role != "assistant" or isinstance(self.content, str):
            return self
        for place, part in enumerate(self.content):
            if not isinstance(part, ResponsePart):
                raise InvalidField(
                    "messages of the assistant contain only text", f"content[{place}].type"
                )
        return self

    def for_chat(self, field: str | None) -> str | list[Any]:
        """Return the content of a chat message: text, or parts if there is an image or a recording.

        Args:
            field: the field of the item in the request. None = the parts are JSON values.
        """
        if isinstance(self.content, str):
            return self.content
        texts = [part.text for part in self.content if isinstance(part, ResponsePart)]
        if len(texts) == len(self.content):
            return "".join(texts)
        parts: list[Any] = []
        for place, part in enumerate(self.content):
            if isinstance(part, ResponsePart):
                parts.append({"type": "text", "text": part.text})
                continue
            made = part.for_chat(None if field is None else f"{field}.content[{place}]")
            parts.append(made.model_dump(exclude_none=True) if field is None else made)
        return parts


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


def text_of(content: str | Sequence[MessagePart]) -> str:
    """Return the text of a message's content."""
    if isinstance(content, str):
        return content
    return "".join(part.text for part in content if isinstance(part, ResponsePart))


def messages_of(items: str | Sequence[InputItem], field: str | None = None) -> list[dict[str, Any]]:
    """Return the chat messages of items. Adjacent items of the assistant are merged.

    Unanswered approval requests are omitted.

    Args:
        items: the items.
        field: the field of the items in the request, for errors about images and recordings. None =
            the messages are JSON values.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []
    for place, item in enumerate(items):
        match item:
            case MessageItem(role="assistant"):
                _of_assistant(messages)["content"] += text_of(item.content)
            case MessageItem():
                at = None if field is None else f"{field}[{place}]"
                messages.append({"role": item.role, "content": item.for_chat(at)})
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
