"""Functions that a client offers to the model, and calls of them in a conversation."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from ed_esurge.server.http.errors import Refusal
from ed_esurge.server.http.fields import Body, History, Schema, few

MAX_TOOLS, MAX_TOOL_CALLS = 128, 128

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class Function(Body):
    """A function: what it is called and what it takes."""

    name: Name
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        """JSON schema of the arguments: an object, of anything if nothing was said."""
        return self.parameters or {"type": "object", "properties": {}}


class Tool(Body):
    """A tool; functions are the only ones."""

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates expect it."""
        function: dict[str, Any] = {
            "name": self.function.name,
            "description": self.function.description or "",
            "parameters": self.function.schema_of_arguments,
        }
        return {"type": "function", "function": function}


class FunctionName(Body):
    """The name of a function."""

    name: Name


class NamedTool(Body):
    """The one function that is to be called."""

    type: Literal["function"]
    function: FunctionName


class CalledFunction(History):
    """A call: name, and arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(History):
    """A call in a message of the assistant."""

    id: Annotated[str, Field(max_length=256)]
    type: Literal["function"] = "function"
    function: CalledFunction

    @model_validator(mode="after")
    def _arguments_are_json(self) -> ToolCall:
        self.for_template()
        return self

    def for_template(self) -> dict[str, Any]:
        """The call as chat templates expect it: arguments as an object."""
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise Refusal(f"the arguments {self.function.arguments!r:.80} are no JSON object")
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


def _distinct(value: object) -> object:
    if value is None:
        return []
    names = [
        tool["function"].get("name")
        for tool in (value if isinstance(value, list) else ())
        if isinstance(tool, dict) and isinstance(tool.get("function"), dict)
    ]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise Refusal(f"two functions are called {twice!r}")
    return value


Tools = Annotated[list[Tool], Field(fail_fast=True), BeforeValidator(_distinct), few(MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool | None
