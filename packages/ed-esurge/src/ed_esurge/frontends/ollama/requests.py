"""Common fields of the requests of Ollama such as `keep_alive`, and their conversion to chats."""

from __future__ import annotations

import json
import math
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from starlette.requests import Request

from ed_esurge.frontends.library.definitions import get_definition
from ed_esurge.frontends.library.parameters import (
    OLLAMA_DEFAULTS,
    SamplingOptions,
    chat_fields,
    get_server_defaults,
)
from ed_esurge.server.activity import parse_keep_alive
from ed_esurge.server.generation.models import ServedModel
from ed_esurge.server.generation.requests import MAX_LOGPROBS, MAX_MESSAGES, ChatRequest
from ed_esurge.server.generation.structured import MAX_TOOL_CALLS
from ed_esurge.server.http.errors import InvalidField
from ed_esurge.server.http.fields import (
    IGNORED_KEYS,
    History,
    JsonSchema,
    RequestBody,
    few,
    validate_body,
)


def parse_duration(value: object) -> object:
    """Return a duration in seconds, see `parse_keep_alive`.

    Raises:
        InvalidField: the text is no duration, or the duration is too long.
    """
    try:
        return parse_keep_alive(value)
    except ValueError as error:
        raise InvalidField(str(error)) from None


KeepAlive = Annotated[
    Annotated[float, Field(allow_inf_nan=True)] | None, BeforeValidator(parse_duration)
]


def keep_model(model: ServedModel, seconds: float | None, request: Request) -> None:
    """Apply the `keep_alive` of a request. Models of the start stay loaded, so the field has no
    effect on them, which `X-Ignored-Fields` reports."""
    if seconds is None:
        return
    if model.activity is not None:
        model.activity.keep(seconds)
    elif (ignored := request.scope.get(IGNORED_KEYS)) is not None and math.isfinite(seconds):
        ignored.add("keep_alive")


#: Fields of the chat request -> fields of this API.
OLLAMA_NAMES = {
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "response_format": "format",
    "reasoning_effort": "think",
    **{
        name: f"options.{name}"
        for name in ("temperature", "top_p", "top_k", "stop", "seed", "repeat_last_n")
    },
}
MAX_IMAGES = 64


def _tagless(value: object) -> object:
    """Remove the tag `latest`, which Ollama's clients append to names."""
    return value.removesuffix(":latest") if isinstance(value, str) else value


ModelReference = Annotated[str, Field(min_length=1, max_length=256), BeforeValidator(_tagless)]


def _format(value: object) -> object:
    if value in ("", None):
        return None
    if value == "json" or isinstance(value, Mapping):
        return value
    raise InvalidField('must be "json" or a JSON schema')


AnswerFormat = Annotated[Literal["json"] | JsonSchema | None, BeforeValidator(_format)]
Think = bool | Literal["low", "medium", "high", "max"] | None
Images = Annotated[list[Annotated[str, Field(min_length=1)]], few(MAX_IMAGES)]


class OllamaRequest(RequestBody):
    """Fields of the requests that generate."""

    model: ModelReference
    stream: bool = True
    format: AnswerFormat = None
    options: SamplingOptions = Field(default_factory=SamplingOptions)
    keep_alive: KeepAlive = None
    think: Think = None
    logprobs: bool = False
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None

    def sampling(self, model: ServedModel) -> dict[str, Any]:
        """Return the options: those of the request, of the derived model, and Ollama's defaults."""
        definition = get_definition(model)
        derived = definition.parameters if definition is not None else {}
        return {**OLLAMA_DEFAULTS, **get_server_defaults(model), **derived, **self.options.values()}

    def chat(
        self, model: ServedModel, messages: list[dict[str, Any]], **more: object
    ) -> ChatRequest:
        """Return the chat request with the fields of this request.

        Raises:
            APIError: 400, a field is invalid.
        """
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "stream": self.stream,
            "logprobs": self.logprobs,
            "top_logprobs": self.top_logprobs,
            **chat_fields(self.sampling(model)),
            **more,
        }
        if self.format == "json":
            fields["response_format"] = {"type": "json_object"}
        elif self.format is not None:
            schema = {"name": "answer", "schema": self.format}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        if self.think is not None:
            efforts = {True: "medium", False: "none"}
            effort = self.think if isinstance(self.think, str) else efforts[self.think]
            fields["reasoning_effort"] = effort
        return validate_body(ChatRequest, fields)


class FunctionOfCall(History):
    """The function of a call, with arguments as an object."""

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class OllamaCall(History):
    """A call in a message of the assistant."""

    function: FunctionOfCall
    id: Annotated[str | None, Field(max_length=256)] = None


class OllamaMessage(History):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    images: Images = Field(default_factory=list)
    tool_calls: Annotated[list[OllamaCall], few(MAX_TOOL_CALLS)] = Field(default_factory=list)
    tool_name: str | None = None
    tool_call_id: Annotated[str | None, Field(max_length=256)] = None


OllamaMessages = Annotated[list[OllamaMessage], Field(fail_fast=True), few(MAX_MESSAGES)]


def with_images(text: str, images: list[str]) -> str | list[dict[str, Any]]:
    """Return the content of a message: text, or parts if there are images."""
    if not images:
        return text
    urls = [
        image if image.startswith("data:") else f"data:image;base64,{image}" for image in images
    ]
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [*parts, {"type": "text", "text": text}] if text else parts


class _WaitingCalls:
    """The ids of calls without results, in order. Each operation has a constant amortized time."""

    def __init__(self) -> None:
        self._all: deque[tuple[int, str]] = deque()  # number and id of a call
        self._by_name: defaultdict[str, deque[tuple[int, str]]] = defaultdict(deque)
        self._taken: set[int] = set()
        self._count = 0

    def add(self, call_id: str, name: str) -> None:
        """Append a call."""
        entry = self._count, call_id
        self._count += 1
        self._all.append(entry)
        self._by_name[name].append(entry)

    def take(self, name: str | None) -> str | None:
        """Remove the first call of a function, or else the first call, and return its id; None
        without a call."""
        named = self._by_name.get(name) if name is not None else None
        for calls in (named, self._all):
            while calls:
                number, call_id = calls.popleft()
                if number not in self._taken:
                    self._taken.add(number)
                    return call_id
        return None


def chat_messages(messages: list[OllamaMessage]) -> list[dict[str, Any]]:
    """Return messages of a chat request.

    Results of tools have the names of their functions, or no names: the ids of the calls follow
    from the names, or else from the order.
    """
    result: list[dict[str, Any]] = []
    waiting = _WaitingCalls()
    for place, message in enumerate(messages):
        entry: dict[str, Any] = {
            "role": message.role,
            "content": with_images(message.content, message.images),
        }
        if message.thinking is not None:
            entry["reasoning_content"] = message.thinking
        if message.tool_calls:
            calls = []
            for number, call in enumerate(message.tool_calls):
                call_id = call.id or f"call_{place}_{number}"
                waiting.add(call_id, call.function.name)
                arguments = json.dumps(call.function.arguments, ensure_ascii=False)
                function = {"name": call.function.name, "arguments": arguments}
                calls.append({"id": call_id, "type": "function", "function": function})
            entry["tool_calls"] = calls
        if message.role == "tool":
            call_id = waiting.take(message.tool_name) or f"call_{place}"
            entry["tool_call_id"] = message.tool_call_id or call_id
            if message.tool_name is not None:
                entry["name"] = message.tool_name
        result.append(entry)
    return result
