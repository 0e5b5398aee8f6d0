"""Tools and structured output of requests: `tools`, `tool_choice`, `response_format`,
`structured_outputs` and `guided_*`."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from ed_infra.errors import ConfigError
from pydantic import BeforeValidator, Field, PrivateAttr, ValidationError, model_validator
from pydantic_core import from_json

from ed_esurge.grammars.store import GrammarsBusyError
from ed_esurge.sampling import StructuredOutputs
from ed_esurge.server.generation.engine import ServedEngine
from ed_esurge.server.http.errors import APIError, InvalidField
from ed_esurge.server.http.fields import (
    History,
    JsonSchema,
    RequestBody,
    SchemaOrText,
    few,
    reject_field,
)

MAX_TOOLS, MAX_TOOL_CALLS = 128, 128

ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class FunctionDefinition(RequestBody):
    """A function with its name and its parameters."""

    name: ToolName
    description: str | None = None
    parameters: JsonSchema | None = None
    strict: bool | None = None

    _reply: StructuredOutputs | None = PrivateAttr(None)

    def constrain_reply(self, outputs: StructuredOutputs) -> None:
        """Set the format of a reply that must call this function: text instead of arguments."""
        self._reply = outputs

    @property
    def structured_reply(self) -> StructuredOutputs:
        """The format of a reply that must call this function; by default its arguments."""
        schema = json.dumps(self.schema_of_arguments)
        return self._reply or StructuredOutputs(json_schema=schema)

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        """JSON schema of the arguments. The default is an object with any content."""
        return self.parameters or {"type": "object", "properties": {}}


class Tool(RequestBody):
    """A tool. The only supported type is a function."""

    type: Literal["function"]
    function: FunctionDefinition

    def for_template(self) -> dict[str, Any]:
        """Return the tool for a chat template."""
        function: dict[str, Any] = {
            "name": self.function.name,
            "description": self.function.description or "",
            "parameters": self.function.schema_of_arguments,
        }
        return {"type": "function", "function": function}


class FunctionName(RequestBody):
    """The name of a function."""

    name: ToolName


class NamedTool(RequestBody):
    """The selected function."""

    type: Literal["function"]
    function: FunctionName


def _dump_object(value: object) -> object:
    """Return JSON text instead of an object, the format of transformers."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value


class CalledFunction(History):
    """The function of a call, with arguments as JSON text, which may be cut off."""

    name: str
    arguments: Annotated[str, BeforeValidator(_dump_object)]

    @model_validator(mode="after")
    def _arguments_are_an_object(self) -> CalledFunction:
        try:
            arguments = from_json(self.arguments or "{}")
        except ValueError:
            return self
        if not isinstance(arguments, dict):
            raise InvalidField(f"the arguments {self.arguments!r:.80} are not a JSON object")
        return self


class ToolCall(History):
    """A call in a message of the assistant."""

    id: Annotated[str, Field(max_length=256)]
    type: Literal["function"] = "function"
    function: CalledFunction


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
        raise InvalidField(f"two functions have the name {twice!r}")
    return value


Tools = Annotated[list[Tool], Field(fail_fast=True), BeforeValidator(_distinct), few(MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool | None


class AllowedFunctions(RequestBody):
    """A part of the tools, and whether the model must call one of them."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1), few(MAX_TOOLS)]


class AllowedToolChoice(RequestBody):
    """OpenAI's `tool_choice` that restricts the tools. The model sees only the allowed tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions


def with_allowed_tools(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of a request with only the allowed tools, and a choice without tools.

    Args:
        data: a request whose `tool_choice` is an object.
    """
    choice = data["tool_choice"]
    if choice.get("type") != "allowed_tools":
        return data
    try:
        allowed = AllowedToolChoice.model_validate(choice).allowed_tools
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place = ".".join(map(str, ("tool_choice", *problem["loc"])))
        raise InvalidField(problem["msg"], place) from None
    offered = data.get("tools")
    tools_by_name = {
        tool["function"].get("name"): tool
        for tool in (offered if isinstance(offered, list) else ())
        if isinstance(tool, Mapping) and isinstance(tool.get("function"), Mapping)
    }
    names = [one.function.name for one in allowed.tools]
    for name in names:
        if name not in tools_by_name:
            raise InvalidField(
                f"{name!r} is not among the tools: {[*tools_by_name]}", "tool_choice"
            )
    return {**data, "tools": [tools_by_name[name] for name in names], "tool_choice": allowed.mode}


MAX_CALLS = 64
ANY_OBJECT = json.dumps({"type": "object"})


class JSONSchema(RequestBody):
    """The JSON schema of an answer. The answer follows the schema independent of `strict`."""

    ALIASES: ClassVar[Mapping[str, str]] = {"schema": "json_schema"}

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    json_schema: JsonSchema | None = None
    strict: bool | None = None


class ResponseFormat(RequestBody):
    """The format of an answer."""

    ALIASES: ClassVar[Mapping[str, str]] = {"schema": "bare_schema", "value": "bare_schema"}

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None
    bare_schema: JsonSchema | None = None
    """The schema without a name: `schema` of llama.cpp, `value` of text-generation-inference."""

    @model_validator(mode="after")
    def _consistent(self) -> ResponseFormat:
        if self.bare_schema is not None:
            if self.type == "text" or self.json_schema is not None:
                raise InvalidField(
                    "requires a type of JSON, and no json_schema beside it", "schema"
                )
        elif (self.type == "json_schema") != (self.json_schema is not None):
            raise InvalidField("requires the type json_schema, and vice versa", "json_schema")
        return self

    @property
    def schema_text(self) -> str | None:
        """JSON schema as JSON text; None = plain text."""
        if self.type == "text":
            return None
        named = self.json_schema.json_schema if self.json_schema is not None else None
        schema = self.bare_schema if self.bare_schema is not None else named
        return ANY_OBJECT if schema is None else json.dumps(schema)


_GrammarText = Annotated[str, Field(max_length=2**16)]
_ChoiceTexts = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=2**12)]], Field(min_length=1), few(1024)
]


class StructuredOutputsField(RequestBody):
    """vLLM's `structured_outputs`: exactly one of the first five fields."""

    ALIASES: ClassVar[Mapping[str, str]] = {"json": "json_schema"}

    json_schema: SchemaOrText | None = None
    regex: _GrammarText | None = None
    choice: _ChoiceTexts | None = None
    grammar: _GrammarText | None = None
    json_object: bool | None = None
    structural_tag: Annotated[None, reject_field("structural_tag; send json, regex or grammar")] = (
        None
    )
    disable_any_whitespace: Annotated[
        None, reject_field("white space is the model's choice", False)
    ] = None
    disable_additional_properties: Annotated[
        None, reject_field("write additionalProperties: false into the schema", False)
    ] = None
    whitespace_pattern: Annotated[None, reject_field("whitespace_pattern; send grammar")] = None

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputsField:
        field_names = [*self.outputs()]
        if len(field_names) != 1:
            allowed_names = "json, regex, choice, grammar and json_object"
            raise InvalidField(
                f"requires exactly one of {allowed_names}, got {', '.join(field_names) or 'none'}"
            )
        return self

    def outputs(self) -> dict[str, StructuredOutputs]:
        """Return the structured output by the name of its field."""
        result: dict[str, StructuredOutputs] = {}
        if self.json_schema is not None:
            result["json"] = StructuredOutputs(json_schema=json.dumps(self.json_schema))
        if self.regex is not None:
            result["regex"] = StructuredOutputs(regex=self.regex)
        if self.choice is not None:
            result["choice"] = StructuredOutputs(choice=tuple(self.choice))
        if self.grammar is not None:
            result["grammar"] = StructuredOutputs(grammar=self.grammar)
        if self.json_object:
            result["json_object"] = StructuredOutputs(json_schema=ANY_OBJECT)
        return result


class Guided(RequestBody):
    """Fields for structured output of vLLM, llama.cpp and SGLang. At most one is set."""

    structured_outputs: StructuredOutputsField | None = None
    guided_json: SchemaOrText | None = None
    guided_regex: _GrammarText | None = None
    guided_choice: _ChoiceTexts | None = None
    guided_grammar: _GrammarText | None = None
    # The names of llama.cpp and SGLang.
    json_schema: SchemaOrText | None = None
    grammar: _GrammarText | None = None
    ebnf: _GrammarText | None = None
    regex: _GrammarText | None = None

    def outputs(self) -> dict[str, StructuredOutputs]:
        """Return the structured outputs by the names of their fields."""
        result: dict[str, StructuredOutputs] = {}
        if self.structured_outputs is not None:
            for name, output in self.structured_outputs.outputs().items():
                result[f"structured_outputs.{name}"] = output
        for name in ("guided_json", "json_schema"):
            if (schema := getattr(self, name)) is not None:
                result[name] = StructuredOutputs(json_schema=json.dumps(schema))
        for name in ("guided_regex", "regex"):
            if pattern := getattr(self, name):
                result[name] = StructuredOutputs(regex=pattern)
        if self.guided_choice is not None:
            result["guided_choice"] = StructuredOutputs(choice=tuple(self.guided_choice))
        for name in ("guided_grammar", "grammar", "ebnf"):
            if grammar := getattr(self, name):
                result[name] = StructuredOutputs(grammar=grammar)
        return result


def required_calls(
    tools: Sequence[Tool], choice: ToolChoice, *, parallel: bool
) -> StructuredOutputs | None:
    """Return the structured output of a reply that must call tools; None if calls are optional."""
    if not tools or choice in (None, "none", "auto"):
        return None
    if isinstance(choice, NamedTool):
        (tool,) = [tool for tool in tools if tool.function.name == choice.function.name]
        return tool.function.structured_reply
    shared: dict[str, Any] = {}
    options = []
    for number, tool in enumerate(tools):
        arguments = _prefix_references(tool.function.schema_of_arguments, f"t{number}_")
        for key in ("$defs", "definitions"):
            definitions = arguments.pop(key, None)
            if isinstance(definitions, Mapping):
                shared |= {
                    f"t{number}_{name}": definition for name, definition in definitions.items()
                }
        properties = {"name": {"const": tool.function.name}, "arguments": arguments}
        options.append(
            {
                "type": "object",
                "properties": properties,
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    most = MAX_CALLS if parallel else 1
    calls = {"type": "array", "items": {"anyOf": options}, "minItems": 1, "maxItems": most}
    return StructuredOutputs(json_schema=json.dumps({**calls, "$defs": shared}))


def _prefix_references(schema: object, prefix: str) -> Any:
    """Return a schema whose references to definitions have a prefix, for use in another schema."""
    if isinstance(schema, Mapping):
        moved = {key: _prefix_references(value, prefix) for key, value in schema.items()}
        reference = schema.get("$ref")
        for place in ("#/$defs/", "#/definitions/"):
            if isinstance(reference, str) and reference.startswith(place):
                moved["$ref"] = f"#/$defs/{prefix}{reference.removeprefix(place)}"
        return moved
    return (
        [_prefix_references(item, prefix) for item in schema]
        if isinstance(schema, list)
        else schema
    )


def _in_tools(message: str) -> str:
    """Replace JSON paths in the schema of `required_calls` with the fields of the request."""
    message = re.sub(
        r"\$\.items\.anyOf\[(\d+)\]\.properties\.arguments",
        r"tools[\1].function.parameters",
        message,
    )
    return re.sub(r"\$\.\$defs\.t(\d+)_", r"tools[\1].function.parameters.$defs.", message)


async def compile_one(
    engine: ServedEngine,
    requested_outputs: Mapping[str, StructuredOutputs],
    end_texts: tuple[str, ...] = (),
) -> StructuredOutputs | None:
    """Return the requested structured output after the compilation of its grammar.

    Args:
        requested_outputs: the structured outputs of a request by field.
        end_texts: texts that end the thoughts of the answer; see `StructuredOutputs.after`.

    Raises:
        APIError: 400, there are two structured outputs, or the grammar is invalid; 503, too many
            grammars are queued.
    """
    if not requested_outputs:
        return None
    (field, output), *extra_outputs = requested_outputs.items()
    if extra_outputs:
        raise APIError(
            f"contradicts {field}: an answer can follow only one grammar, so omit one of the two",
            param=extra_outputs[0][0],
        )
    output = output.replace(after=end_texts)
    try:
        compiled = await asyncio.to_thread(engine.compile_structured, output)
        await asyncio.wrap_future(compiled)
    except GrammarsBusyError as error:
        raise APIError(str(error), status=503, code="server_busy") from None
    except ConfigError as error:
        message = _in_tools(str(error)) if field == "tool_choice" else str(error)
        raise APIError(message, param=field, code="invalid_value") from None
    return output
