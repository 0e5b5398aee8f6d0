"""The request model of `POST /v1/responses`, and its conversion to a chat request."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from ed_esurge.server.generation.requests import MAX_LOGPROBS, ChatRequest, Effort
from ed_esurge.server.generation.structured import MAX_TOOLS
from ed_esurge.server.http.errors import APIError, InvalidField
from ed_esurge.server.http.fields import (
    ClientData,
    ClientText,
    JsonSchema,
    Metadata,
    RequestBody,
    few,
    reject_field,
    validate_body,
)
from ed_esurge.server.responses.items import Id, Input, build_messages, stored_form
from ed_esurge.server.responses.tools import (
    AllowedTools,
    AnyToolType,
    Choice,
    CustomTool,
    HostedTool,
    McpTool,
    NamedFunction,
    OfferedTools,
    ResponsesTool,
)

#: Fields of the chat request -> fields of this API.
RESPONSE_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
#: Value of `include` that requests log-probabilities.
_LOGPROBS = "message.output_text.logprobs"


#: Further content of an answer that a client may request.
Includable = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class TextFormat(RequestBody):
    """The format of an answer."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")] = "answer"
    json_schema: JsonSchema | None = None
    description: str | None = None
    strict: bool | None = None

    ALIASES: ClassVar[Mapping[str, str]] = {"schema": "json_schema"}

    def for_chat(self) -> dict[str, Any]:
        """`response_format` of a chat request."""
        if self.type != "json_schema":
            return {"type": self.type}
        return {"type": self.type, "json_schema": {"name": self.name, "schema": self.json_schema}}


class TextOptions(RequestBody):
    """Options of the answer's text."""

    format: TextFormat = TextFormat()
    verbosity: Annotated[
        None, reject_field("verbosity; ask for a length in a message", "medium")
    ] = None


class ReasoningOptions(RequestBody):
    """The amount of thinking. Answers contain the thoughts themselves instead of a summary."""

    effort: Effort | None = None
    """A hint, which templates without variables for thinking ignore."""
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    mode: Annotated[str | None, Field(max_length=64)] = None


class PromptFields(RequestBody):
    """The fields that determine the prompt of a response: the body of `input_tokens`."""

    input: Input
    model: str | None = None
    instructions: str | None = None
    previous_response_id: Id | None = None
    tools: Annotated[list[ResponsesTool], Field(fail_fast=True), few(MAX_TOOLS)] = Field(
        default_factory=list
    )
    tool_choice: Choice = None
    parallel_tool_calls: bool = True
    text: TextOptions = TextOptions()
    reasoning: ReasoningOptions = ReasoningOptions()
    truncation: Literal["auto", "disabled"] = "disabled"
    """`auto` removes the oldest turns of a conversation that does not fit."""
    chat_template_kwargs: dict[str, Any] | None = None  # extension

    conversation: Annotated[None, reject_field("conversation; use previous_response_id")] = None

    @model_validator(mode="after")
    def _consistent(self) -> PromptFields:
        if self.text.format.type == "json_schema" and self.text.format.json_schema is None:
            raise InvalidField("is missing", "text.format.schema")
        choice = self.tool_choice
        for allowed in choice.tools if isinstance(choice, AllowedTools) else ():
            if not any(allowed.matches(tool) for tool in self.tools):
                name = allowed.name or allowed.server_label
                raise InvalidField(f"{name!r:.80} is not among the tools", "tool_choice")
        return self

    @cached_property
    def offered(self) -> OfferedTools:
        """The functions and custom tools that the model sees.

        Raises:
            APIError: 400, there are too many tools, or two tools have the same name.
        """
        tools = [tool for tool in self.usable_tools if not isinstance(tool, McpTool | HostedTool)]
        try:
            return OfferedTools(tools)
        except InvalidField as error:
            raise APIError(str(error), param="tools") from None

    @property
    def usable_tools(self) -> list[AnyToolType]:
        """The tools that the model may call: `allowed_tools` selects a part."""
        choice = self.tool_choice
        if not isinstance(choice, AllowedTools):
            return self.tools
        return [tool for tool in self.tools if any(one.matches(tool) for one in choice.tools)]

    @property
    def required_custom_tool(self) -> CustomTool | None:
        """The custom tool with a grammar that the response must call: the reply is its input."""
        choice = self.tool_choice
        if not isinstance(choice, NamedFunction) or choice.type != "custom":
            return None
        for tool in self.tools:
            if isinstance(tool, CustomTool) and tool.name == choice.name and tool.format.outputs():
                return tool
        return None

    def chat_fields(self) -> dict[str, Any]:
        """Return the other fields of the equivalent chat request."""
        return {}

    def chat(
        self, previous_messages: Sequence[dict[str, Any]], mcp_tools: Sequence[dict[str, Any]] = ()
    ) -> ChatRequest:
        """Return the equivalent chat request.

        Args:
            previous_messages: messages of the previous responses.
            mcp_tools: the tools of MCP servers, as tools of a chat request.

        Raises:
            APIError: 400, fields contradict each other.
        """
        system = [] if self.instructions is None else [_system(self.instructions)]
        messages = [*previous_messages, *build_messages(self.input, "input", self.offered)]
        if not messages:
            kinds = ", ".join(
                sorted({item.type for item in self.input if not isinstance(item, str)})
            )
            raise APIError(f"has no item with text for the model, only {kinds}", param="input")
        choice: object = self.tool_choice
        if isinstance(choice, AllowedTools):
            choice = choice.mode
        tools = [*self.offered.for_chat(), *mcp_tools]
        if isinstance(choice, NamedFunction):
            if all(tool["function"]["name"] != choice.name for tool in tools):
                raise APIError(f"{choice.name!r} is not among the tools", param="tool_choice")
            choice = {"type": "function", "function": {"name": choice.name}}
        fields = {
            "model": self.model,
            "messages": [*system, *messages],
            "tools": tools,
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": self.text.format.for_chat(),
            "chat_template_kwargs": self.chat_template_kwargs,
            "reasoning_effort": self.reasoning.effort,
            **self.chat_fields(),
        }
        request = validate_body(ChatRequest, fields).with_effort_as_hint()
        raw = self.required_custom_tool
        outputs = raw.format.outputs() if raw is not None else None
        for tool in request.tools:
            if raw is not None and outputs is not None and tool.function.name == raw.name:
                tool.function.constrain_reply(outputs)
        return request


class ResponseRequest(PromptFields):
    """Body of `POST /v1/responses`, with OpenAI's defaults."""

    store: bool = True
    stream: bool = False
    background: bool = False
    """Whether the response is generated without a connection; see the routes of responses."""
    max_output_tokens: Annotated[int | None, Field(ge=1, lt=2**31)] = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None
    metadata: Metadata | None = None
    user: ClientText | None = None

    # Extensions.
    top_k: Annotated[int | None, Field(ge=-1, lt=2**31)] = None
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63)] = None

    context_management: Annotated[None, reject_field("context_management", [])] = None
    image: Annotated[None, reject_field("images; this model answers with text only")] = None
    moderation: Annotated[None, reject_field("moderation")] = None
    prompt: Annotated[None, reject_field("stored prompts; send instructions")] = None
    include: Annotated[list[Includable] | None, few(16)] = None
    """Only log-probabilities have an effect: the items of thoughts contain the thoughts, and the
    output has no items of the other kinds."""
    max_tool_calls: Annotated[int | None, Field(ge=1)] = None
    """Limit of the calls that this server sends to MCP servers."""
    # Fields about billing, speed and the client, which have no effect.
    client_metadata: ClientData | None = None
    service_tier: ClientText | None = None
    safety_identifier: ClientText | None = None
    prompt_cache_key: ClientText | None = None
    prompt_cache_retention: ClientText | None = None
    prompt_cache_options: ClientData | None = None
    stream_options: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _options_fit(self) -> ResponseRequest:
        if self.top_logprobs and not self.logprobs:
            raise InvalidField(f"requires {_LOGPROBS!r} in include", "top_logprobs")
        if self.background and not self.store:
            raise InvalidField("requires store: true", "background")
        return self

    @property
    def logprobs(self) -> bool:
        """Whether the answer contains log-probabilities of its text."""
        return _LOGPROBS in (self.include or ())

    def input_items(self) -> list[dict[str, Any]]:
        """Return the items of the input with ids."""
        return stored_form(self.input, f"in_{uuid.uuid4().hex}")

    def chat_fields(self) -> dict[str, Any]:
        """Return the other fields of the equivalent chat request."""
        fields: dict[str, Any] = {
            "max_completion_tokens": self.max_output_tokens,
            "seed": self.seed,
            **self.get_set_fields("temperature", "top_p", "top_k"),
        }
        if self.logprobs:
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        return fields


def _system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}
