"""Request models of Anthropic's API, and their conversion to chat requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, ValidationInfo, model_validator

from ed_esurge.sampling import MAX_STOPS, Word
from ed_esurge.server.generation.content_parts import ImagePart
from ed_esurge.server.generation.requests import (
    MAX_MESSAGES,
    MAX_PARTS,
    ChatRequest,
    Effort,
)
from ed_esurge.server.generation.structured import MAX_TOOLS, ToolName
from ed_esurge.server.http.errors import InvalidField
from ed_esurge.server.http.fields import (
    MAX_PAIRS,
    ClientText,
    History,
    JsonSchema,
    MetadataKey,
    MetadataValue,
    RequestBody,
    few,
    omit_tool,
    reject_field,
    validate_body,
)
from ed_esurge.server.messages.blocks import (
    ContentBlocks,
    TextBlocks,
    Thinking,
    ToolResult,
    ToolUse,
    convert_blocks,
    omits_block,
)

#: Limit of the edits of `context_management`.
MAX_EDITS = 16

#: Fields of the chat request -> fields of this API.
MESSAGE_NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
}


class AnthropicMessage(History):
    """One message. A message of the system may be between the turns."""

    role: Literal["user", "assistant", "system"]
    content: ContentBlocks

    def for_chat(self, field: str) -> list[dict[str, Any]]:
        """Return the chat messages. Each result of a call is a separate message.

        Args:
            field: the field of the message in the request.
        """
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        results: list[dict[str, Any]] = []
        images: list[ImagePart] = []
        for place, block in enumerate(self.content):
            if isinstance(block, ToolResult):
                result, new = block.for_chat(f"{field}.content[{place}]")
                results.append(result)
                images += new
        parts = [*images, *convert_blocks(self.content, f"{field}.content")]
        thoughts = [block.thinking for block in self.content if isinstance(block, Thinking)]
        calls = [block.for_chat() for block in self.content if isinstance(block, ToolUse)]
        content = parts
        if all(isinstance(part, dict) for part in parts):
            content = "".join(part["text"] for part in parts if isinstance(part, dict))
        message: dict[str, Any] = {"role": self.role, "content": content}
        if calls:
            message["tool_calls"] = calls
        if thoughts:
            message["reasoning_content"] = "".join(thoughts)
        has_only_results = bool(results) and not (parts or calls or thoughts)
        return results if has_only_results else [*results, message]


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


class ServerTool(History):
    """A tool that Anthropic's servers execute, such as a web search. The model does not see it."""

    type: Annotated[str, Field(min_length=1, max_length=128)]
    name: str | None = None

    @model_validator(mode="after")
    def _omit(self, info: ValidationInfo) -> ServerTool:
        omit_tool(info, self.type)
        return self


def _tag_tool(tool: object) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "function" if kind in (None, "custom") else "hosted"


MessagesTool = Annotated[
    Annotated[AnthropicTool, Tag("function")] | Annotated[ServerTool, Tag("hosted")],
    Discriminator(_tag_tool),
]


class AnthropicChoice(RequestBody):
    """Whether the model must call a function, and which one."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None


class Thoughts(RequestBody):
    """Whether to think: the variable `enable_thinking` of the chat template.

    The budget is only a target. The number of tokens is limited by `max_tokens`.
    """

    type: Literal["disabled", "adaptive", "enabled", "between_tools"]
    budget_tokens: Annotated[int | None, Field(ge=1024, lt=2**31)] = None
    display: Literal["summarized", "omitted"] | None = None
    """`omitted` removes the thoughts from the answer."""

    @model_validator(mode="after")
    def _consistent(self) -> Thoughts:
        if (self.type == "enabled") != (self.budget_tokens is not None):
            raise InvalidField("requires the type enabled, and vice versa", "budget_tokens")
        return self


class OutputFormat(RequestBody):
    """The format of an answer."""

    type: Literal["json_schema"]
    json_schema: JsonSchema

    ALIASES: ClassVar[Mapping[str, str]] = {"schema": "json_schema"}


class OutputConfig(RequestBody):
    """The amount of thinking, and the format of the answer."""

    effort: Effort | None = None
    """A hint, which templates without variables for thinking ignore."""
    format: OutputFormat | None = None
    task_budget: dict[str, Any] | None = None
    """A hint about the tokens of a whole task, without effect on one answer."""


class AllThinking(RequestBody):
    """Keeps the thoughts of all turns."""

    type: Literal["all"]


class ContextEdit(RequestBody):
    """A change of the conversation. Only an edit without effect is supported."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"] | AllThinking


class ContextManagement(RequestBody):
    """Changes of the conversation by the server. This server keeps the messages as they are."""

    edits: Annotated[list[ContextEdit], few(MAX_EDITS)] = Field(default_factory=list)


class CountRequest(RequestBody):
    """Body of `POST /v1/messages/count_tokens`."""

    model: str
    messages: Annotated[
        list[AnthropicMessage], Field(min_length=1, fail_fast=True), few(MAX_MESSAGES)
    ]
    system: str | Annotated[TextBlocks, few(MAX_PARTS)] | None = None
    tools: Annotated[list[MessagesTool], Field(fail_fast=True), few(MAX_TOOLS)] = Field(
        default_factory=list
    )
    tool_choice: AnthropicChoice | None = None
    thinking: Thoughts | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """Alias of `output_config.format` in older versions of the API."""
    # Fields about caching and speed, which have no effect.
    cache_control: dict[str, Any] | None = None
    speed: Literal["standard", "fast"] | None = None
    container: Annotated[None, reject_field("containers")] = None
    context_management: ContextManagement | None = None
    compaction: Annotated[None, reject_field("compaction; shorten the messages")] = None
    mcp_servers: Annotated[
        None, reject_field("mcp_servers; call them in the client, and send tools", [])
    ] = None
    fallbacks: Annotated[
        None, reject_field("fallbacks; send another request for the other model", [])
    ] = None
    # After this code, the client sends complete conversations.
    thread: Annotated[
        None, reject_field("threads; send all messages", code="thread_unsupported_request")
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
            system = "".join(part.text for part in system if not omits_block(part))
        if system:
            messages.insert(0, {"role": "system", "content": system})
        fields: dict[str, Any] = {"model": self.model, "messages": messages}
        if continued:
            fields |= {"continue_final_message": True, "add_generation_prompt": False}
        if self.tools:
            functions = [tool for tool in self.tools if isinstance(tool, AnthropicTool)]
            fields["tools"] = [tool.for_chat() for tool in functions]
        choice = self.tool_choice
        if choice is not None:
            choice_names = {"auto": "auto", "none": "none", "any": "required"}
            named = {"type": "function", "function": {"name": choice.name or ""}}
            fields["tool_choice"] = choice_names.get(choice.type, named)
            fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        if self.thinking is not None:
            enabled = self.thinking.type != "disabled"
            fields["chat_template_kwargs"] = {"enable_thinking": enabled}
            fields["include_reasoning"] = self.thinking.display != "omitted"
        output_config = self.output_config or OutputConfig()
        fields["reasoning_effort"] = output_config.effort
        form = output_config.format or self.output_format
        if form is not None:
            schema = {"name": "answer", "schema": form.json_schema}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return fields

    def chat(self) -> ChatRequest:
        """Return the equivalent chat request.

        Raises:
            APIError: 400, fields contradict each other.
        """
        return validate_body(ChatRequest, self.for_chat()).with_effort_as_hint()


class MessagesRequest(CountRequest):
    """Body of `POST /v1/messages`."""

    max_tokens: Annotated[int, Field(ge=1, lt=2**31)]
    stop_sequences: Annotated[list[Word] | None, few(MAX_STOPS)] = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int | None, Field(ge=-1, lt=2**31)] = None
    stream: bool = False
    # Fields about billing, which have no effect.
    metadata: Annotated[dict[MetadataKey, MetadataValue | None], few(MAX_PAIRS)] | None = None
    service_tier: ClientText | None = None

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
            "stream": self.stream,
            **self.get_set_fields("temperature", "top_p", "top_k"),
        }
