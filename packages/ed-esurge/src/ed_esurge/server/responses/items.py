"""Items of a conversation in `/v1/responses`, and their conversion to chat messages."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args
from urllib.parse import unquote

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import from_json

from ed_esurge.server.generation.content_parts import (
    OMITTED_MEDIUM,
    AudioPart,
    ImagePart,
    ImageURL,
    InputAudio,
)
from ed_esurge.server.generation.requests import MAX_MESSAGES, MAX_PARTS
from ed_esurge.server.http.errors import InvalidField
from ed_esurge.server.http.fields import History, check_part_types, few, reject_field
from ed_esurge.server.responses.tools import OfferedTools

Id = Annotated[str, Field(max_length=256)]
PartType = Literal["input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"]
#: Types of the parts of a message, and of the output of a call.
_IN_MESSAGES = (*get_args(PartType), "input_image", "input_audio", "input_file")
_IN_OUTPUTS = (*get_args(PartType), "input_image", "input_file")
#: Longest head of a `data:` URL.
_HEAD = 256


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
    return str(kind) if kind in ("input_image", "input_audio", "input_file") else "text"


ResponseParts = Annotated[
    list[ResponsePart], Field(fail_fast=True), check_part_types(*get_args(PartType)), few(MAX_PARTS)
]


class ImageInput(History):
    """An image of a message. `detail` has no effect."""

    type: Literal["input_image"]
    image_url: str | None = None
    detail: str | None = None
    file_id: Annotated[None, reject_field("files of images; send image_url")] = None

    def for_chat(self, field: str | None, *, optional: bool = False) -> ImagePart:
        """Return the part of a chat message.

        Args:
            field: the field of the part in the request.
            optional: see `ImagePart.at`.
        """
        url = None if self.image_url is None else ImageURL(url=self.image_url)
        part = ImagePart(type="image_url", image_url=url)
        return part.at(field, "image_url", optional=optional)


class AudioInput(History):
    """A recording of a message."""

    type: Literal["input_audio"]
    input_audio: InputAudio | None = None

    def for_chat(self, field: str | None) -> AudioPart:
        """Return the part of a chat message."""
        return AudioPart(type="input_audio", input_audio=self.input_audio).at(field, "input_audio")


class FileInput(History):
    """A file of text."""

    type: Literal["input_file"]
    filename: Annotated[str | None, Field(max_length=1024)] = None
    file_data: str | None = None
    detail: str | None = None
    file_id: Annotated[None, reject_field("stored files; send file_data")] = None
    file_url: Annotated[None, reject_field("addresses of files; send file_data")] = None

    @model_validator(mode="after")
    def _readable(self) -> FileInput:
        self.read_text()
        return self

    def read_text(self) -> str:
        """Return the text of the file, after its name.

        Raises:
            InvalidField: the file is missing, or not text.
        """
        head, comma, data = (self.file_data or "").partition(",")
        is_address = bool(comma) and head[:5].lower() == "data:" and len(head) <= _HEAD
        if not is_address:
            data, head = self.file_data or "", "data:;base64"
        try:
            raw = base64.b64decode(data, validate=True) if head.endswith(";base64") else None
            text = unquote(data, errors="strict") if raw is None else raw.decode()
        except ValueError:
            raise InvalidField(
                "is not text in UTF-8: send the text of the document", "file_data"
            ) from None
        if not data:
            raise InvalidField("is missing", "file_data")
        return f"{self.filename}:\n{text}\n" if self.filename else f"{text}\n"


MessagePart = Annotated[
    Annotated[ResponsePart, Tag("text")]
    | Annotated[ImageInput, Tag("input_image")]
    | Annotated[AudioInput, Tag("input_audio")]
    | Annotated[FileInput, Tag("input_file")],
    Discriminator(_tag),
]
#: The output of a call: text, or parts.
CallOutput = Annotated[
    str | Annotated[list[MessagePart], Field(fail_fast=True)],
    check_part_types(*_IN_OUTPUTS),
    few(MAX_PARTS),
]


class MessageItem(History):
    """A message. Messages of the assistant contain only text."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[
        str | Annotated[list[MessagePart], Field(fail_fast=True)],
        check_part_types(*_IN_MESSAGES),
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
            if not isinstance(part, ResponsePart | FileInput):
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
        if all(isinstance(part, ResponsePart | FileInput) for part in self.content):
            return get_text(self.content)
        parts: list[Any] = []
        for place, part in enumerate(self.content):
            if isinstance(part, ResponsePart | FileInput):
                parts.append({"type": "text", "text": get_text([part])})
                continue
            medium = part.for_chat(None if field is None else f"{field}.content[{place}]")
            parts.append(medium.model_dump(exclude_none=True) if field is None else medium)
        return parts


class CallItem(History):
    """A function call of the model."""

    type: Literal["function_call"]
    call_id: Id
    name: str
    arguments: str
    namespace: str | None = None
    id: Id | None = None
    status: str | None = None


class ResultItem(History):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: Id
    output: CallOutput
    id: Id | None = None
    status: str | None = None


class CustomCallItem(History):
    """A call of a custom tool, whose input is text."""

    type: Literal["custom_tool_call"]
    call_id: Id
    name: str
    input: str
    namespace: str | None = None
    id: Id | None = None
    status: str | None = None


class CustomResultItem(History):
    """The result of a call of a custom tool."""

    type: Literal["custom_tool_call_output"]
    call_id: Id
    output: CallOutput
    id: Id | None = None
    status: str | None = None


class ClientCallItem(History):
    """A call of a tool that the client executes by an item of its own, such as a shell."""

    type: Literal["local_shell_call", "shell_call", "apply_patch_call"]
    call_id: Id
    action: dict[str, Any] | None = None
    operation: dict[str, Any] | None = None
    id: Id | None = None
    status: str | None = None

    @property
    def name(self) -> str:
        """The name of the tool."""
        return self.type.removesuffix("_call")

    @property
    def arguments(self) -> str:
        """The arguments as JSON text."""
        return json.dumps(self.action or self.operation or {}, ensure_ascii=False)


class ClientResultItem(History):
    """The result of such a call."""

    type: Literal["local_shell_call_output", "shell_call_output", "apply_patch_call_output"]
    call_id: Id | None = None
    output: str | list[Any] | None = None
    id: Id | None = None
    status: str | None = None

    @property
    def text(self) -> str:
        """The result as text."""
        if isinstance(self.output, str):
            return self.output
        return json.dumps(self.output, ensure_ascii=False) if self.output else self.status or ""


class SkippedItem(History):
    """An item without text for the model: the work of OpenAI's servers, and references."""

    type: Literal[
        "additional_tools",
        "code_interpreter_call",
        "compaction",
        "compaction_trigger",
        "computer_call",
        "computer_call_output",
        "configuration_update",
        "file_search_call",
        "image_generation_call",
        "item_reference",
        "program",
        "program_output",
        "tool_search_call",
        "tool_search_output",
        "web_search_call",
    ]
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
    error: object = None


class McpCallItem(History):
    """A call that this server sent to an MCP server."""

    type: Literal["mcp_call"]
    id: Id
    server_label: str
    name: str
    arguments: str
    output: str | None = None
    error: object = None
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
    """Add the default type to messages, and to references, which have only an id."""
    if not isinstance(value, list):
        return value
    return [
        {**item, "type": "message" if "role" in item or "content" in item else "item_reference"}
        if isinstance(item, dict) and item.get("type") is None
        else item
        for item in value
    ]


InputItem = Annotated[
    MessageItem
    | CallItem
    | ResultItem
    | CustomCallItem
    | CustomResultItem
    | ClientCallItem
    | ClientResultItem
    | SkippedItem
    | ReasoningItem
    | McpListItem
    | McpCallItem
    | ApprovalRequestItem
    | ApprovalItem,
    Field(discriminator="type"),
]
Items = Annotated[list[InputItem], Field(fail_fast=True, min_length=1)]
Input = Annotated[str | Items, BeforeValidator(_items), few(MAX_MESSAGES)]


def get_text(content: str | Sequence[MessagePart]) -> str:
    """Return the text of a message's content."""
    if isinstance(content, str):
        return content
    return "".join(
        part.read_text() if isinstance(part, FileInput) else part.text
        for part in content
        if isinstance(part, ResponsePart | FileInput)
    )


def build_messages(
    items: str | Sequence[InputItem],
    field: str | None = None,
    offered: OfferedTools | None = None,
) -> list[dict[str, Any]]:
    """Return the chat messages of items. Adjacent items of the assistant are merged.

    Unanswered approval requests are omitted.

    Args:
        items: the items.
        field: the field of the items in the request, for errors about images and recordings. None =
            the messages are JSON values.
        offered: the tools that the model sees, for the names of calls.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []
    offered = offered or OfferedTools(())
    images: list[Any] = []
    for place, item in enumerate(items):
        if images and not isinstance(item, ResultItem | CustomResultItem):
            # Templates render images only in messages of the user.
            messages.append({"role": "user", "content": images})
            images = []
        match item:
            case MessageItem(role="assistant"):
                _get_assistant_message(messages)["content"] += get_text(item.content)
            case MessageItem():
                at = None if field is None else f"{field}[{place}]"
                messages.append({"role": item.role, "content": item.for_chat(at)})
            case ReasoningItem():
                said = get_text(item.content or item.summary)
                message = _get_assistant_message(messages)
                message["reasoning_content"] = message.get("reasoning_content", "") + said
            case CallItem():
                name = offered.find_name(item.namespace, item.name)
                _call(messages, item.call_id, name, item.arguments)
            case CustomCallItem():
                name = offered.find_name(item.namespace, item.name)
                _call(messages, item.call_id, name, json.dumps({"input": item.input}))
            case ClientCallItem():
                _call(messages, item.call_id, item.name, item.arguments)
            case ResultItem() | CustomResultItem():
                messages.append(_result(item.call_id, get_text(item.output)))
                at = None if field is None else f"{field}[{place}]"
                images += _convert_images(item.output, at)
            case ClientResultItem():
                messages.append(_result(item.call_id or item.id or "", item.text))
            case McpCallItem():
                _call(messages, item.id, item.name, _object_text(item.arguments))
                failed = item.error if isinstance(item.error, str) else json.dumps(item.error)
                text = f"error: {failed}" if item.error is not None else item.output or ""
                messages.append(_result(item.id, text))
            case _:
                pass
    return [*messages, {"role": "user", "content": images}] if images else messages


def _convert_images(output: str | Sequence[MessagePart], field: str | None) -> list[Any]:
    """Return the images of a call's output as parts of a chat message.

    A model that reads only text receives a note instead of such an image.
    """
    images: list[Any] = []
    for place, part in enumerate(() if isinstance(output, str) else output):
        if isinstance(part, ImageInput):
            at = None if field is None else f"{field}.output[{place}]"
            image = part.for_chat(at, optional=True)
            images.append(image.model_dump(exclude_none=True) if field is None else image)
    return images


def omit_images(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message of a model that reads only text, with a note instead of each image."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    note = {"type": "text", "text": OMITTED_MEDIUM}
    parts = [note if part.get("type") == "image_url" else part for part in content]
    return {**message, "content": parts}


def build_denial(request: ApprovalRequestItem, reason: str | None) -> list[dict[str, Any]]:
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


def _object_text(arguments: str) -> str:
    """Return arguments for a chat template, which requires an object: `[1]` as `{"value": [1]}`."""
    try:
        value = from_json(arguments or "{}")
    except ValueError:  # templates receive arguments that were cut off as text
        return arguments
    return arguments if isinstance(value, dict) else json.dumps({"value": value})


def _call(messages: list[dict[str, Any]], call_id: str, name: str, arguments: str) -> None:
    function = {"name": name, "arguments": arguments}
    call = {"id": call_id, "type": "function", "function": function}
    _get_assistant_message(messages).setdefault("tool_calls", []).append(call)


def _result(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def _get_assistant_message(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the assistant's message at the end; append an empty message if necessary."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]
