"""Bodies of Anthropic's API, and the chat request that each means."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from ed_esurge.sampling import MAX_STOPS, Word
from ed_esurge.server.generation.requests import MAX_MESSAGES, MAX_PARTS, ChatRequest, Effort
from ed_esurge.server.generation.structured import MAX_TOOLS, Name
from ed_esurge.server.http.errors import Refusal
from ed_esurge.server.http.fields import (
    Body,
    History,
    Schema,
    few,
    parts_of,
    unsupported,
    validated,
)

#: Fields of the chat request, as this API spells them.
NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
}


class Block(History):
    """Base of the blocks. What may be cached is not theirs to say."""

    cache_control: dict[str, Any] | None = None


class TextBlock(Block):
    """Text."""

    type: Literal["text"]
    text: str
    citations: list[Any] | None = None


TextBlocks = Annotated[list[TextBlock], Field(fail_fast=True)]


class ToolUse(Block):
    """A call, in a message of the assistant."""

    type: Literal["tool_use"]
    id: Annotated[str, Field(max_length=256)]
    name: str
    input: dict[str, Any]
    caller: dict[str, Any] | None = None


class ToolResult(Block):
    """What a call gave, in a message of the user."""

    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(max_length=256)]
    content: Annotated[str | TextBlocks | None, parts_of("text"), few(MAX_PARTS)] = None
    is_error: bool | None = None


class Thinking(Block):
    """Thoughts, sent back."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


AnyBlock = Annotated[TextBlock | ToolUse | ToolResult | Thinking, Field(discriminator="type")]
Blocks = Annotated[
    str | Annotated[list[AnyBlock], Field(fail_fast=True)],
    parts_of("text", "tool_use", "tool_result", "thinking"),
    few(MAX_PARTS),
]


class AnthropicMessage(History):
    """One message."""

    role: Literal["user", "assistant"]
    content: Blocks

    def for_chat(self) -> list[dict[str, Any]]:
        """The chat messages that it means: results of calls are messages of their own."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        results: list[dict[str, Any]] = []
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        for block in self.content:
            match block:
                case TextBlock():
                    texts.append(block.text)
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
                    if block.is_error:  # templates have no word for it
                        content = f"Error: {content}"
                    results.append(
                        {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
                    )
        message: dict[str, Any] = {"role": self.role, "content": "".join(texts)}
        if calls:
            message["tool_calls"] = calls
        if thoughts:
            message["reasoning_content"] = "".join(thoughts)
        alone = bool(results) and not (texts or calls or thoughts)
        return results if alone else [*results, message]


class AnthropicTool(Body):
    """A function that the model may call."""

    type: Literal["custom"] | None = None
    name: Name
    description: str | None = None
    input_schema: Schema
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None
    eager_input_streaming: bool | None = None
    """Input is always streamed while it is written."""

    def for_chat(self) -> dict[str, Any]:
        """The tool of a chat request."""
        function: dict[str, Any] = {"name": self.name, "parameters": self.input_schema}
        if self.strict is not None:
            function["strict"] = self.strict
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function}


class AnthropicChoice(Body):
    """Whether and what to call."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class Thoughts(Body):
    """Whether to think: a variable of the chat template, `enable_thinking`. The budget is a target,
    as Anthropic has it; what bounds thoughts here is `max_tokens`."""

    type: Literal["disabled", "adaptive", "enabled"]
    budget_tokens: Annotated[int | None, Field(ge=1024, lt=2**31)] = None
    display: Literal["summarized"] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Thoughts:
        if (self.type == "enabled") != (self.budget_tokens is not None):
            raise Refusal("belongs to the type enabled, and to no other", "budget_tokens")
        return self


class OutputFormat(Body):
    """What an answer must be."""

    type: Literal["json_schema"]
    json_schema: Schema

    ALIASES: ClassVar[dict[str, str]] = {"schema": "json_schema"}


class OutputConfig(Body):
    """How much to think, and what the answer must be."""

    effort: Effort | None = None
    format: OutputFormat | None = None


class CountRequest(Body):
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
    """The name of `output_config.format` in older betas."""
    # What may be cached, and how quickly to answer: there is one way here.
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
    fallbacks: Annotated[None, unsupported("fallbacks; ask again with another model", [])] = None
    # By this code the client learns to send whole conversations.
    thread: Annotated[
        None, unsupported("threads; send all messages", code="thread_unsupported_request")
    ] = None

    @model_validator(mode="after")
    def _one_format(self) -> CountRequest:
        config = self.output_config
        if self.output_format is not None and config is not None and config.format is not None:
            raise Refusal("contradicts output_config.format: send one of both", "output_format")
        return self

    def for_chat(self) -> dict[str, Any]:
        """Return the fields of the chat request that this request means.

        A final message of the assistant is the beginning of the answer: the model continues it.
        """
        messages = [part for message in self.messages for part in message.for_chat()]
        last = messages[-1]
        continued = last["role"] == "assistant" and not last.get("tool_calls")
        if continued and not last["content"]:  # nothing to continue
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
        """Return the chat request that this request means.

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
    # Who is billed, and how.
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None

    @model_validator(mode="after")
    def _budget(self) -> MessagesRequest:
        budget = self.thinking.budget_tokens if self.thinking is not None else None
        if budget is not None and budget >= self.max_tokens:
            raise Refusal(
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
