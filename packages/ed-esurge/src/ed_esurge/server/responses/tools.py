"""Tools of `/v1/responses`: functions, custom tools with text as input, tools of MCP servers.

Tools that this server cannot execute are accepted and not offered to the model.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, model_validator

from ed_esurge.sampling import StructuredOutputs
from ed_esurge.server.generation.structured import MAX_TOOLS, ToolName
from ed_esurge.server.http.errors import InvalidField
from ed_esurge.server.http.fields import (
    History,
    JsonSchema,
    RequestBody,
    few,
    omit_tool,
    reject_field,
)

ToolNames = Annotated[list[str], few(MAX_TOOLS)]


class FunctionTool(RequestBody):
    """A function for the model."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: JsonSchema | None = None
    strict: bool | None = None

    def for_chat(self) -> dict[str, Any]:
        """The tool of a chat request."""
        function = self.model_dump(exclude={"type"}, exclude_none=True)
        return {"type": "function", "function": function}


class CustomFormat(RequestBody):
    """The format of a custom tool's input."""

    type: Literal["text", "grammar"] = "text"
    syntax: Literal["lark", "regex"] | None = None
    definition: Annotated[str | None, Field(max_length=2**16)] = None

    @model_validator(mode="after")
    def _consistent(self) -> CustomFormat:
        has_grammar = self.syntax is not None and self.definition is not None
        if (self.type == "grammar") != has_grammar:
            raise InvalidField("requires the type grammar, and vice versa", "definition")
        return self

    def outputs(self) -> StructuredOutputs | None:
        """The format as structured output; None = any text."""
        if self.type == "text":
            return None
        if self.syntax == "regex":
            return StructuredOutputs(regex=self.definition)
        return StructuredOutputs(grammar=self.definition)


class CustomTool(RequestBody):
    """A tool whose input is text. The model receives a function with the parameter `input`."""

    type: Literal["custom"]
    name: ToolName
    description: str | None = None
    format: CustomFormat = CustomFormat()

    def for_chat(self) -> dict[str, Any]:
        """The tool of a chat request. Its description contains the grammar of the input."""
        lines = [self.description] if self.description else []
        if self.format.type == "grammar":
            lines.append(f"The input follows this {self.format.syntax} grammar:")
            lines.append(self.format.definition or "")
        parameters = {
            "type": "object",
            "properties": {"input": {"type": "string"}},
            "required": ["input"],
            "additionalProperties": False,
        }
        function = {
            "name": self.name,
            "description": "\n".join(line for line in lines if line),
            "parameters": parameters,
        }
        return {"type": "function", "function": function}


def parse_custom_input(arguments: str) -> str:
    """Return the input of a custom tool's call; incomplete arguments are returned unchanged."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    input_text = value.get("input") if isinstance(value, dict) else None
    return input_text if isinstance(input_text, str) else arguments


class ToolFilter(RequestBody):
    """Names of tools of an MCP server."""

    tool_names: ToolNames | None = None
    read_only: Annotated[None, reject_field("read_only; send tool_names")] = None


class ApprovalRules(RequestBody):
    """Which tools require the approval of the user."""

    always: ToolFilter | None = None
    never: ToolFilter | None = None


class McpTool(RequestBody):
    """The tools of an MCP server of the operator, by the label in the operator's configuration."""

    type: Literal["mcp"]
    server_label: Annotated[str, Field(min_length=1, max_length=256)]
    server_description: str | None = None
    allowed_tools: ToolNames | ToolFilter | None = None
    require_approval: Literal["always", "never"] | ApprovalRules | None = None
    server_url: Annotated[
        None, reject_field("the operator configures the servers; send server_label")
    ] = None
    connector_id: Annotated[None, reject_field("connectors; send server_label")] = None
    authorization: Annotated[
        None, reject_field("credentials of clients; the operator configures the servers")
    ] = None
    headers: Annotated[
        None, reject_field("headers of clients; the operator configures the servers", {})
    ] = None

    def allows(self, name: str) -> bool:
        """Return whether the model may call a tool of the server."""
        allowed = self.allowed_tools
        names = allowed.tool_names if isinstance(allowed, ToolFilter) else allowed
        return names is None or name in names

    def requires_approval(self, name: str) -> bool:
        """Return whether a call requires the approval of the user; by default every call does."""
        rules = self.require_approval
        if not isinstance(rules, ApprovalRules):
            return rules != "never"
        return rules.never is None or name not in (rules.never.tool_names or ())


class NamespaceTool(RequestBody):
    """Functions and custom tools under a common name. The model sees each of them.

    The name of a tool is unique in the request, or it begins with the name of its namespace.
    """

    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: Annotated[
        list[Annotated[FunctionTool | CustomTool, Field(discriminator="type")]], few(MAX_TOOLS)
    ]


#: Tools that OpenAI's servers or the client execute by items of their own.
HostedType = Literal[
    "apply_patch",
    "code_interpreter",
    "computer",
    "computer_use",
    "computer_use_preview",
    "file_search",
    "image_generation",
    "local_shell",
    "programmatic_tool_calling",
    "shell",
    "tool_search",
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
]


class HostedTool(History):
    """A tool that this server cannot execute. The model does not see it."""

    type: HostedType

    @model_validator(mode="after")
    def _omit(self, info: ValidationInfo) -> HostedTool:
        omit_tool(info, self.type)
        return self


ResponsesTool = Annotated[
    FunctionTool | CustomTool | McpTool | NamespaceTool | HostedTool, Field(discriminator="type")
]


AnyToolType = FunctionTool | CustomTool | McpTool | NamespaceTool | HostedTool


class OfferedTools:
    """The tools of a request that the model sees, with unique names.

    Attributes:
        functions: the functions and custom tools by the name that the model sees.
        namespaces: the namespace and the name of each tool of a namespace, by that name.

    Args:
        tools: the tools of a request.
    """

    def __init__(self, tools: Sequence[FunctionTool | CustomTool | NamespaceTool]) -> None:
        listed: list[tuple[str, FunctionTool | CustomTool]] = []
        for tool in tools:
            if isinstance(tool, NamespaceTool):
                listed += [(tool.name, one) for one in tool.tools]
            else:
                listed.append(("", tool))
        if len(listed) > MAX_TOOLS:
            raise InvalidField(
                f"has {len(listed)} tools, and the limit of this server is {MAX_TOOLS}", "tools"
            )
        counts = Counter(tool.name for _, tool in listed)
        self.functions: dict[str, FunctionTool | CustomTool] = {}
        self.namespaces: dict[str, tuple[str, str]] = {}
        for namespace, tool in listed:
            name = tool.name
            if namespace and counts[name] > 1:
                name = f"{namespace}__{name}"
            if name in self.functions:
                raise InvalidField(f"two tools have the name {name!r}", "tools")
            self.functions[name] = tool
            if namespace:
                self.namespaces[name] = namespace, tool.name
        self._names = {pair: name for name, pair in self.namespaces.items()}

    def for_chat(self) -> list[dict[str, Any]]:
        """Return the tools of a chat request."""
        chat = []
        for name, tool in self.functions.items():
            entry = tool.for_chat()
            chat.append({**entry, "function": {**entry["function"], "name": name}})
        return chat

    def find_name(self, namespace: str | None, name: str) -> str:
        """Return the name that the model sees for a call in the conversation."""
        return name if namespace is None else self._names.get((namespace, name), name)


class NamedFunction(RequestBody):
    """The selected function or custom tool."""

    type: Literal["function", "custom"]
    name: ToolName


class AllowedTool(RequestBody):
    """One of the allowed tools."""

    type: Literal["function", "custom", "mcp", "namespace"] | HostedType
    name: str | None = None
    server_label: str | None = None

    def matches(self, tool: AnyToolType) -> bool:
        """Return whether this entry names a tool."""
        if isinstance(tool, McpTool):
            return self.type == "mcp" and self.server_label == tool.server_label
        if isinstance(tool, HostedTool):
            return self.type == tool.type
        return self.type == tool.type and self.name == tool.name


class AllowedTools(RequestBody):
    """A part of the tools: the model sees and calls only these."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Field(min_length=1), few(MAX_TOOLS)]


Choice = Literal["none", "auto", "required"] | NamedFunction | AllowedTools | None
