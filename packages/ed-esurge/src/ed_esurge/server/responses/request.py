"""The request model of `POST /v1/responses`, and its conversion to a chat request."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BeforeValidator, Field, model_validator

from ed_esurge.server.generation.requests import MAX_MESSAGES, MAX_PARTS, ChatRequest, Effort
from ed_esurge.server.generation.structured import MAX_TOOLS, ToolName
from ed_esurge.server.http.errors import InvalidField
from ed_esurge.server.http.fields import (
    History,
    JsonSchema,
    RequestBody,
    few,
    parts_of,
    unsupported,
    validated,
)

Id = Annotated[str, Field(max_length=256)]
#: Fields of the chat request -> fields of this API.
NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


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


class ReasoningItem(History):
    """Thoughts of the model in the conversation."""

    type: Literal["reasoning"]
    id: Id | None = None
    summary: ResponseParts = Field(default_factory=list)
    content: ResponseParts | None = None
    encrypted_content: str | None = None
    status: str | None = None


def _items(value: object) -> object:
    """Add the default type to messages."""
    if not isinstance(value, list):
        return value
    return [
        {**item, "type": "message"} if isinstance(item, dict) and item.get("type") is None else item
        for item in value
    ]


InputItem = Annotated[
    MessageItem | CallItem | ResultItem | ReasoningItem, Field(discriminator="type")
]
Items = Annotated[list[InputItem], Field(fail_fast=True, min_length=1)]
Input = Annotated[str | Items, BeforeValidator(_items), few(MAX_MESSAGES)]


def text_of(content: str | list[ResponsePart]) -> str:
    """Return the text of a message's content."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


class FunctionTool(RequestBody):
    """A function for the model."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: JsonSchema | None = None
    strict: bool | None = None


class NamedFunction(RequestBody):
    """The selected function."""

    type: Literal["function"]
    name: ToolName


class TextFormat(RequestBody):
    """The format of an answer."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")] = "answer"
    json_schema: JsonSchema | None = None
    description: str | None = None
    strict: bool | None = None

    ALIASES: ClassVar[dict[str, str]] = {"schema": "json_schema"}

    def for_chat(self) -> dict[str, Any]:
        """`response_format` of a chat request."""
        if self.type != "json_schema":
            return {"type": self.type}
        return {"type": self.type, "json_schema": {"name": self.name, "schema": self.json_schema}}


class TextOptions(RequestBody):
    """Options of the answer's text."""

    format: TextFormat = TextFormat()
    verbosity: Annotated[
        None, unsupported("verbosity; ask for a length in a message", "medium")
    ] = None


class ReasoningOptions(RequestBody):
    """The amount of thinking. Answers contain the thoughts, but no summary."""

    effort: Effort | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class ResponseRequest(RequestBody):
    """Body of `POST /v1/responses`, with OpenAI's defaults."""

    input: Input
    model: str | None = None
    instructions: str | None = None
    previous_response_id: Id | None = None
    store: bool = True
    stream: bool = False
    max_output_tokens: Annotated[int | None, Field(ge=1, lt=2**31)] = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    tools: Annotated[list[FunctionTool], Field(fail_fast=True), few(MAX_TOOLS)] = Field(
        default_factory=list
    )
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool = True
    text: TextOptions = TextOptions()
    reasoning: ReasoningOptions = ReasoningOptions()
    metadata: Annotated[dict[str, str] | None, few(16)] = None
    user: str | None = None

    # Extensions.
    top_k: Annotated[int | None, Field(ge=-1, lt=2**31)] = None
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63)] = None
    chat_template_kwargs: dict[str, Any] | None = None

    background: Annotated[None, unsupported("background; stream the answer", False)] = None
    conversation: Annotated[None, unsupported("conversation; use previous_response_id")] = None
    context_management: Annotated[None, unsupported("context_management", [])] = None
    image: Annotated[None, unsupported("images; this model answers with text only")] = None
    moderation: Annotated[None, unsupported("moderation")] = None
    prompt: Annotated[None, unsupported("stored prompts; send instructions")] = None
    top_logprobs: Annotated[None, unsupported("top_logprobs; use /v1/chat/completions", 0)] = None
    truncation: Annotated[
        None, unsupported("truncation; see truncate_mode of the engine", "disabled")
    ] = None
    include: Annotated[list[Literal["reasoning.encrypted_content"]] | None, few(16)] = None
    """Accepted because the items of thoughts contain the thoughts without encryption."""
    max_tool_calls: Annotated[int | None, Field(ge=1)] = None
    """Limit of the calls of built-in tools, which this server does not have."""
    # Fields about billing and speed, which have no effect.
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    stream_options: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> ResponseRequest:
        if self.text.format.type == "json_schema" and self.text.format.json_schema is None:
            raise InvalidField("is missing", "text.format.schema")
        return self

    def messages(self) -> list[dict[str, Any]]:
        """Return the chat messages of the input. Adjacent items of the assistant are merged."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        messages: list[dict[str, Any]] = []
        for item in self.input:
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
                    function = {"name": item.name, "arguments": item.arguments}
                    call = {"id": item.call_id, "type": "function", "function": function}
                    _of_assistant(messages).setdefault("tool_calls", []).append(call)
                case ResultItem():
                    result = {"tool_call_id": item.call_id, "content": text_of(item.output)}
                    messages.append({"role": "tool", **result})
        return messages

    def chat(self, before: list[dict[str, Any]]) -> ChatRequest:
        """Return the equivalent chat request.

        Args:
            before: messages of the previous responses.

        Raises:
            APIError: 400, fields contradict each other.
        """
        system = [] if self.instructions is None else [_system(self.instructions)]
        choice: object = self.tool_choice
        if isinstance(choice, NamedFunction):
            choice = {"type": "function", "function": {"name": choice.name}}
        tools = [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
            for tool in self.tools
        ]
        fields = {
            "model": self.model,
            "messages": [*system, *before, *self.messages()],
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "tools": tools,
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": self.text.format.for_chat(),
            "top_k": self.top_k,
            "seed": self.seed,
            "chat_template_kwargs": self.chat_template_kwargs,
            "reasoning_effort": self.reasoning.effort,
        }
        return validated(ChatRequest, fields)


def _system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def _of_assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the assistant's message at the end; append an empty message if necessary."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]
