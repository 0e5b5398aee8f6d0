"""Request models of Anthropic's API, and their conversion to chat requests."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from ed_esurge.sampling import MAX_STOPS, Word
from ed_esurge.server.generation.requests import (
    MAX_MESSAGES,
    MAX_PARTS,
    ChatRequest,
    Effort,
    ImagePart,
    ImageURL,
)
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

#: Fields of the chat request -> fields of this API.
NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
}


class ContentBlock(History):
    """Base of the blocks. `cache_control` has no effect."""

    cache_control: dict[str, Any] | None = None


class TextBlock(ContentBlock):
    """Text."""

    type: Literal["text"]
    text: str
    citations: list[Any] | None = None


TextBlocks = Annotated[list[TextBlock], Field(fail_fast=True)]


class ToolUse(ContentBlock):
    """A call in a message of the assistant."""

    type: Literal["tool_use"]
    id: Annotated[str, Field(max_length=256)]
    name: str
    input: dict[str, Any]
    caller: dict[str, Any] | None = None


class ToolResult(ContentBlock):
    """The result of a call in a message of the user."""

    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(max_length=256)]
    content: Annotated[str | TextBlocks | None, parts_of("text"), few(MAX_PARTS)] = None
    is_error: bool | None = None


class Thinking(ContentBlock):
    """Thoughts of the assistant in the conversation."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class Base64Source(History):
    """An image as base64 text."""

    type: Literal["base64"]
    media_type: Annotated[str, Field(max_length=128)]
    data: str

    @property
    def address(self) -> str:
        """The `data:` URL of the image."""
        return f"data:{self.media_type};base64,{self.data}"


class URLSource(History):
    """The address of an image."""

    type: Literal["url"]
    url: str

    @property
    def address(self) -> str:
        """The address of the image."""
        return self.url


class ImageBlock(ContentBlock):
    """An image in a message of the user."""

    type: Literal["image"]
    source: Annotated[Base64Source | URLSource, Field(discriminator="type")]

    def for_chat(self, field: str) -> ImagePart:
        """Return the part of a chat message."""
        url = ImageURL(url=self.source.address)
        return ImagePart(type="image_url", image_url=url).at(field, "source")


AnyBlock = Annotated[
    TextBlock | ImageBlock | ToolUse | ToolResult | Thinking, Field(discriminator="type")
]
ContentBlocks = Annotated[
    str | Annotated[list[AnyBlock], Field(fail_fast=True)],
    parts_of("text", "image", "tool_use", "tool_result", "thinking"),
    few(MAX_PARTS),
]


class AnthropicMessage(History):
    """One message."""

    role: Literal["user", "assistant"]
    content: ContentBlocks

    def for_chat(self, field: str) -> list[dict[str, Any]]:
        """Return the chat messages. Each result of a call is a separate message.

        Args:
            field: the field of the message in the request.
        """
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        results: list[dict[str, Any]] = []
        parts: list[dict[str, Any] | ImagePart] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        for place, block in enumerate(self.content):
            match block:
                case TextBlock():
                    parts.append({"type": "text", "text": block.text})
                case ImageBlock():
                    parts.append(block.for_chat(f"{field}.content[{place}]"))
                case Thinking():
                    thoughts.append(block.thinking)
                case ToolUse():
                    arguments = json.dumps(block.input, ensure_ascii=False)
                    function = {"name": block.name, "arguments": arguments}
                    calls.append({"id": block.id, "type": "function", "function": function})
                case ToolResult():
                    content = block.content or ""
                    if isinstance(content, list):
                        content = "".join(part.text for part in content)
                    if block.is_error:  # templates have no field for errors
                        content = f"Error: {content}"
                    results.append(
                        {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
                    )
        content: Any = parts
        if all(isinstance(part, dict) for part in parts):
            content = "".join(part["text"] for part in parts if isinstance(part, dict))
        message: dict[str, Any] = {"role": self.role, "content": content}
        if calls:
            message["tool_calls"] = calls
        if thoughts:
            message["reasoning_content"] = "".join(thoughts)
        alone = bool(results) and not (parts or calls or thoughts)
        return results if alone else [*results, message]


class AnthropicTool(RequestBody):
    """A function for the model."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: JsonSchema
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None
    eager_input_streaming: bool | None = None
    """The input is always streamed."""

    def for_chat(self) -> dict[str, Any]:
        """Return the tool of a chat request."""
        function: dict[str, Any] = {"name": self.name, "parameters": self.input_schema}
        if self.strict is not None:
            function["strict"] = self.strict
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function}


class AnthropicChoice(RequestBody):
    """Whether the model must call a function, and which one."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None


class Thoughts(RequestBody):
    """Whether to think: the variable `enable_thinking` of the chat template.

    The budget is only a target. The number of tokens is limited by `max_tokens`.
    """

    type: Literal["disabled", "adaptive", "enabled"]
    budget_tokens: Annotated[int | None, Field(ge=1024, lt=2**31)] = None
    display: Literal["summarized"] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Thoughts:
        if (self.type == "enabled") != (self.budget_tokens is not None):
            raise InvalidField("requires the type enabled, and vice versa", "budget_tokens")
        return self


class OutputFormat(RequestBody):
    """The format of an answer."""

    type: Literal["json_schema"]
    json_schema: JsonSchema

    ALIASES: ClassVar[dict[str, str]] = {"schema": "json_schema"}


class OutputConfig(RequestBody):
    """The amount of thinking, and the format of the answer."""

    effort: Effort | None = None
    format: OutputFormat | None = None


class CountRequest(RequestBody):
    """Body of `POST /v1/messages/count_tokens`."""

    model: str
    messages: Annotated[
        list[AnthropicMessage], Field(min_length=1, fail_fast=True), few(MAX_MESSAGES)
    ]
    system: str | Annotated[TextBlocks, few(MAX_PARTS)] | None = None
    tools: Annotated[list[AnthropicTool], Field(fail_fast=True), few(MAX_TOOLS)] = Field(
        default_factory=list
    )
    tool_choice: AnthropicChoice | None = None
    thinking: Thoughts | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """Alias of `output_config.format` in older versions of the API."""
    # Fields about caching and speed, which have no effect.
    cache_control: dict[str, Any] | None = None
    speed: Literal["standard"] | None = None
    container: Annotated[None, unsupported("containers")] = None
    context_management: Annotated[
        None, unsupported("context_management; shorten the messages", {})
    ] = None
    compaction: Annotated[None, unsupported("compaction; shorten the messages")] = None
    mcp_servers: Annotated[
        None, unsupported("mcp_servers; call them in the client, and send tools", [])
    ] = None
    fallbacks: Annotated[
        None, unsupported("fallbacks; send another request for the other model", [])
    ] = None
    # After this code, the client sends complete conversations.
    thread: Annotated[
        None, unsupported("threads; send all messages", code="thread_unsupported_request")
    ] = None

    @model_validator(mode="after")
    def _one_format(self) -> CountRequest:
        config = self.output_config
        if self.output_format is not None and config is not None and config.format is not None:
            raise InvalidField(
                "contradicts output_config.format: send one of both", "output_format"
            )
        return self

    def for_chat(self) -> dict[str, Any]:
        """Return the fields of the equivalent chat request.

        The model continues a final message of the assistant.
        """
        messages: list[dict[str, Any]] = []
        for place, message in enumerate(self.messages):
            messages += message.for_chat(f"messages[{place}]")
        last = messages[-1]
        continued = last["role"] == "assistant" and not last.get("tool_calls")
        if continued and not last["content"]:  # an empty message cannot be continued
            continued = False
            del messages[-1]
        system = self.system
        if isinstance(system, list):
            system = "".join(part.text for part in system)
        if system:
            messages.insert(0, {"role": "system", "content": system})
        fields: dict[str, Any] = {"model": self.model, "messages": messages}
        if continued:
            fields |= {"continue_final_message": True, "add_generation_prompt": False}
        if self.tools:
            fields["tools"] = [tool.for_chat() for tool in self.tools]
        choice = self.tool_choice
        if choice is not None:
            plain = {"auto": "auto", "none": "none", "any": "required"}
            named = {"type": "function", "function": {"name": choice.name or ""}}
            fields["tool_choice"] = plain.get(choice.type, named)
            fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        if self.thinking is not None:
            enabled = self.thinking.type != "disabled"
            fields["chat_template_kwargs"] = {"enable_thinking": enabled}
        wanted = self.output_config or OutputConfig()
        fields["reasoning_effort"] = wanted.effort
        form = wanted.format or self.output_format
        if form is not None:
            schema = {"name": "answer", "schema": form.json_schema}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return fields

    def chat(self) -> ChatRequest:
        """Return the equivalent chat request.

        Raises:
            APIError: 400, fields contradict each other.
        """
        return validated(ChatRequest, self.for_chat())


class MessagesRequest(CountRequest):
    """Body of `POST /v1/messages`."""

    max_tokens: Annotated[int, Field(ge=1, lt=2**31)]
    stop_sequences: Annotated[list[Word] | None, few(MAX_STOPS)] = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int | None, Field(ge=-1, lt=2**31)] = None
    stream: bool = False
    # Fields about billing, which have no effect.
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None

    @model_validator(mode="after")
    def _budget(self) -> MessagesRequest:
        budget = self.thinking.budget_tokens if self.thinking is not None else None
        if budget is not None and budget >= self.max_tokens:
            raise InvalidField(
                f"{budget} must be below max_tokens, which is {self.max_tokens}",
                "thinking.budget_tokens",
            )
        return self

    def for_chat(self) -> dict[str, Any]:
        """See `CountRequest.for_chat`."""
        return {
            **super().for_chat(),
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stream": self.stream,
        }
