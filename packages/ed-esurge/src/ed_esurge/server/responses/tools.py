"""Tools of `/v1/responses`: functions, custom tools with text as input, tools of MCP servers."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ed_esurge.sampling import StructuredOutputs
from ed_esurge.server.generation.structured import MAX_TOOLS, ToolName
from ed_esurge.server.http.errors import InvalidField
from ed_esurge.server.http.fields import JsonSchema, RequestBody, few, unsupported

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
        given = self.syntax is not None and self.definition is not None
        if (self.type == "grammar") != given:
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


def input_of(arguments: str) -> str:
    """Return the input of a custom tool's call; incomplete arguments are returned unchanged."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    found = value.get("input") if isinstance(value, dict) else None
    return found if isinstance(found, str) else arguments


class ToolFilter(RequestBody):
    """Names of tools of an MCP server."""

    tool_names: ToolNames | None = None
    read_only: Annotated[None, unsupported("read_only; send tool_names")] = None


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
        None, unsupported("the operator configures the servers; send server_label")
    ] = None
    connector_id: Annotated[None, unsupported("connectors; send server_label")] = None
    authorization: Annotated[
        None, unsupported("credentials of clients; the operator configures the servers")
    ] = None
    headers: Annotated[
        None, unsupported("headers of clients; the operator configures the servers", {})
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


AnyTool = Annotated[FunctionTool | CustomTool | McpTool, Field(discriminator="type")]


class NamedFunction(RequestBody):
    """The selected function or custom tool."""

    type: Literal["function", "custom"]
    name: ToolName


class AllowedTool(RequestBody):
    """One of the allowed tools."""

    type: Literal["function", "custom", "mcp"]
    name: str | None = None
    server_label: str | None = None

    def matches(self, tool: FunctionTool | CustomTool | McpTool) -> bool:
        """Return whether this entry names a tool."""
        if isinstance(tool, McpTool):
            return self.server_label == tool.server_label
        return self.type == tool.type and self.name == tool.name


class AllowedTools(RequestBody):
    """A part of the tools: the model sees and calls only these."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Field(min_length=1), few(MAX_TOOLS)]


Choice = Literal["none", "auto", "required"] | NamedFunction | AllowedTools | None
