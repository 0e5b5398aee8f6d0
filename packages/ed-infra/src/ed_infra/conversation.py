"""Conversations in the form that a chat template accepts.

Clients and data sets write conversations in several forms: arguments as JSON text, content as a
list of text parts, several system messages, consecutive messages of one role, tools for a template
that renders none. `ConversationFormat` converts all of them to one form, and tests the template by
small probes which shapes it accepts. The trainer, the engine and the server call the same code, so
one conversation has the same tokens in all of them.

Tools for a template without tools have the published format of Hermes, which Qwen uses as well: the
system prompt lists the functions between `<tools>` and `</tools>`, the model writes calls between
`<tool_call>` and `</tool_call>`, and a message of the user contains results between
`<tool_response>` and `</tool_response>`.

`ed_infra.conversation` and `ed_data.conversation` are the same file, because ed-data imports no
other package. `tools.check_workspace` compares them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from pydantic_core import from_json

#: Name of the format in which a template without tools receives them.
TOOL_FORMAT = "hermes"
#: Text between two messages that are merged.
SEPARATOR = "\n\n"
#: Spellings of roles, and the role that templates know.
ROLE_ALIASES = {"developer": "system", "function": "tool"}

_INSTRUCTIONS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""

Message = dict[str, Any]
Messages = list[Message]
#: Renders messages with options of `apply_chat_template`, such as `tools`.
Render = Callable[..., str]


def renders_tools(template: object) -> bool:
    """Return whether a chat template (text, or texts by name) reads the variable `tools`."""
    return "tools" in str(template)


class ConversationFormat:
    """The shapes of conversations that a chat template accepts.

    Each shape is probed once, when a conversation first has it. A template accepts a shape if it
    renders all texts of the probe without an error.

    Args:
        template: the Jinja text of the template, or texts by name.
        render: renders messages with the template.
        reads_parts: whether content must be a list of parts; None = a probe finds it.
    """

    def __init__(self, template: object, render: Render, reads_parts: bool | None = None) -> None:
        self._template, self._render = template, render
        self._accepted: dict[str, bool] = {}
        if reads_parts is not None:
            self.__dict__["reads_parts"] = reads_parts

    def prepare(
        self, messages: Iterable[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[Messages, Sequence[Mapping[str, Any]]]:
        """Return messages that the template accepts, and the tools that it renders itself.

        Args:
            messages: messages with a role, content (text, or parts), and calls; see
                `normalize_message` for their forms.
            tools: functions in the format of OpenAI.
        """
        prepared = [normalize_message(message) for message in messages]
        if any(isinstance(m["content"], list) for m in prepared) and not self.accepts_parts:
            prepared = [_join_text_parts(message) for message in prepared]
        has_calls = any(m["role"] == "tool" or m.get("tool_calls") for m in prepared)
        if not self.renders_tools and (tools or (has_calls and not self.renders_calls)):
            prepared = write_tools_as_text(prepared, tools, self.accepts("system"))
            tools = ()
        elif has_calls:
            prepared = [self._convert_arguments(message) for message in prepared]
        prepared = self._merge_roles(self._place_systems(prepared))
        if self.reads_parts:
            prepared = [_convert_to_parts(message) for message in prepared]
        return prepared, tools

    @cached_property
    def renders_tools(self) -> bool:
        """Whether the template itself renders tools."""
        return renders_tools(self._template)

    @cached_property
    def renders_calls(self) -> bool:
        """Whether the template itself renders calls and their results (DeepSeek V3 renders these,
        and no tools)."""
        convert = write_arguments if self.reads_arguments_as_text else read_arguments
        text = self._render_call(convert({"probe-key": "probe-value"})) or ""
        return "probe-value" in text and "probe-result" in text

    @cached_property
    def reads_parts(self) -> bool:
        """Whether the template requires content as a list of parts and does not accept text."""
        return self.accepts_parts and not self._shows([{"role": "user", "content": "probe-0"}])

    @cached_property
    def accepts_parts(self) -> bool:
        """Whether the template renders the texts of a list of parts."""
        parts = [{"type": "text", "text": "probe-0"}]
        return self._shows([{"role": "user", "content": parts}], without=_LIST_MARKS)

    @cached_property
    def reads_arguments_as_text(self) -> bool:
        """Whether the template concatenates the arguments of a call as JSON text."""
        arguments = {"probe-key": "probe-value"}
        as_object, as_text = (
            self._render_call(value) for value in (arguments, json.dumps(arguments))
        )
        if as_object is not None and "probe-value" in as_object and str(arguments) not in as_object:
            return False
        return as_text is not None and json.dumps(arguments) in as_text

    def accepts(self, shape: str) -> bool:
        """Return whether the template accepts a shape of `_SHAPES`."""
        if shape not in self._accepted:
            messages: Messages = [
                {"role": role, "content": f"probe-{place}"}
                for place, role in enumerate(_SHAPES[shape])
            ]
            if self.reads_parts:
                messages = [_convert_to_parts(message) for message in messages]
            self._accepted[shape] = self._shows(messages)
        return self._accepted[shape]

    def _shows(self, messages: Messages, without: Sequence[str] = ()) -> bool:
        try:
            text = self._render(messages)
        except Exception:  # templates may raise any exception
            return False
        if any(mark in text for mark in without):
            return False
        return all(f"probe-{place}" in text for place in range(len(messages)))

    def _render_call(self, arguments: object, *, reply: bool = False) -> str | None:
        """Return a conversation with a call, or None if the template rejects it.

        Args:
            arguments: the arguments of the call.
            reply: whether a message of the user follows the result.
        """
        call_id = "probe0001"  # Mistral's templates require nine letters and digits
        function = {"name": "probe", "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        messages: Messages = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call_id, "name": "probe", "content": "probe-result"},
        ]
        if reply:
            messages.append({"role": "user", "content": "probe-reply"})
        if self.reads_parts:
            messages = [_convert_to_parts(message) for message in messages]
        schema = {"type": "object", "properties": {"probe-key": {"type": "string"}}}
        definition = {"name": "probe", "description": "", "parameters": schema}
        try:
            return self._render(messages, tools=[{"type": "function", "function": definition}])
        except Exception:  # templates may raise any exception
            return None

    def _convert_arguments(self, message: Message) -> Message:
        calls = message.get("tool_calls")
        if not calls:
            return message
        convert = write_arguments if self.reads_arguments_as_text else read_arguments
        converted = []
        for call in calls:
            function = call["function"]
            arguments = convert(function.get("arguments"))
            converted.append({**call, "function": {**function, "arguments": arguments}})
        return {**message, "tool_calls": converted}

    def _place_systems(self, messages: Messages) -> Messages:
        """Return messages whose system messages are where the template renders them."""
        leading = next(
            (place for place, m in enumerate(messages) if m["role"] != "system"), len(messages)
        )
        systems, turns = messages[:leading], messages[leading:]
        if len(systems) > 1 and not self.accepts("several systems"):
            systems = [_merge(systems)]
        if any(m["role"] == "system" for m in turns) and not self.accepts("late system"):
            turns = [{**m, "role": "user"} if m["role"] == "system" else m for m in turns]
        if systems and not self.accepts("system"):
            user = {**_merge(systems), "role": "user"}
            if turns and turns[0]["role"] == "user":
                user, turns = _merge([user, turns[0]]), turns[1:]
            systems, turns = [], [user, *turns]
        return [*systems, *turns]

    def _merge_roles(self, messages: Messages) -> Messages:
        """Return messages whose roles take turns, if the template requires turns."""
        groups: list[Messages] = []
        for message in messages:
            previous = groups[-1][0]["role"] if groups else "system"
            if self._requires_merge((previous, message["role"])):
                groups[-1].append(message)
            else:
                groups.append([message])
        return [group[0] if len(group) == 1 else _merge(group) for group in groups]

    def _requires_merge(self, pair: tuple[str, str]) -> bool:
        if pair == ("tool", "user"):
            return not self.accepts_user_after_result
        return pair in _PAIRS and not self.accepts(_PAIRS[pair])

    @cached_property
    def accepts_user_after_result(self) -> bool:
        """Whether a message of the user may follow the result of a call."""
        convert = write_arguments if self.reads_arguments_as_text else read_arguments
        arguments = convert({"probe-key": "probe-value"})
        if self._render_call(arguments) is None:  # a merged message would not help
            return True
        return "probe-reply" in (self._render_call(arguments, reply=True) or "")


#: Texts that show a list of parts as Python or JSON writes it.
_LIST_MARKS = ("'type':", '"type":')
#: Roles of the messages of a shape.
_SHAPES = {
    "system": ("system", "user"),
    "several systems": ("system", "system", "user"),
    "late system": ("user", "assistant", "system", "user"),
    "users": ("user", "user"),
    "assistants": ("user", "assistant", "assistant", "user"),
}
#: Consecutive roles, and the shape that a template must accept for them.
_PAIRS = {("user", "user"): "users", ("assistant", "assistant"): "assistants"}


def normalize_message(message: Mapping[str, Any]) -> Message:
    """Return a message in one form, which does not depend on the template.

    Content is text, or a list of parts. `developer` becomes `system`,
    `function` and `function_call` become `tool` and `tool_calls`, `reasoning` becomes
    `reasoning_content`. Fields without a value are omitted.
    """
    normal = {key: value for key, value in message.items() if value is not None}
    role = str(normal.get("role"))
    normal["role"] = ROLE_ALIASES.get(role, role)
    content = normal.get("content", "")
    is_list = isinstance(content, (list, tuple))
    normal["content"] = [_normalize_part(part) for part in content] if is_list else content
    reasoning = normal.get("reasoning")
    if "reasoning_content" not in normal and isinstance(reasoning, str):
        normal["reasoning_content"] = normal.pop("reasoning")
    function = normal.pop("function_call", None)
    calls = normal.get("tool_calls", [{"function": function}] if function else None)
    if isinstance(calls, (list, tuple)) and calls:
        normal["tool_calls"] = [_normalize_call(call) for call in calls]
    else:
        normal.pop("tool_calls", None)
    return normal


def _normalize_call(call: Mapping[str, Any]) -> Message:
    """Return a call with `function`; some data sets omit this level."""
    function = call.get("function")
    if isinstance(function, Mapping):
        extra_fields = {key: value for key, value in call.items() if value is not None}
        return {"type": "function", **extra_fields, "function": dict(function)}
    levels = ("name", "arguments")
    extra_fields = {
        key: value for key, value in call.items() if key not in levels and value is not None
    }
    function = {key: call[key] for key in levels if key in call}
    return {"type": "function", **extra_fields, "function": function}


def _normalize_part(part: object) -> Any:
    """Return a part with text in one form: `{"type": "text", "text": …}`."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, Mapping) and part.get("type", "text") in _TEXT_TYPES:
        return {"type": "text", "text": str(part.get("text") or "")}
    return part


def _join_text_parts(message: Message) -> Message:
    """Return a message with text instead of a list of text parts."""
    content = message["content"]
    if not isinstance(content, list):
        return message
    if not all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        return message
    return {**message, "content": "".join(part["text"] for part in content)}


_TEXT_TYPES = ("text", "input_text", "output_text")


def _convert_to_parts(message: Message) -> Message:
    content = message["content"]
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def read_arguments(arguments: object) -> dict[str, Any]:
    """Return the arguments of a call as an object.

    The text of a call that was cut off is read as far as it goes. Another value than an object is
    the value of the key `arguments`.
    """
    if isinstance(arguments, str):
        with suppress(ValueError):
            arguments = from_json(arguments or "{}", allow_partial="trailing-strings")
    if isinstance(arguments, Mapping):
        return dict(arguments)
    return {} if arguments is None else {"arguments": arguments}


def write_arguments(arguments: object) -> str:
    """Return the arguments of a call as JSON text. Text is returned unchanged."""
    if isinstance(arguments, str):
        return arguments or "{}"
    return json.dumps({} if arguments is None else arguments, ensure_ascii=False)


def _merge(messages: Sequence[Message]) -> Message:
    """Return one message with the content, the reasoning and the calls of several messages."""
    merged = dict(messages[0])
    merged["content"] = _concat_all((SEPARATOR, message["content"]) for message in messages)
    reasoning = [text for message in messages if (text := message.get("reasoning_content"))]
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    if reasoning:
        merged["reasoning_content"] = SEPARATOR.join(reasoning)
    if calls:
        merged["tool_calls"] = calls
    return merged


def _concat(first: object, separator: str, second: object) -> Any:
    """Return the concatenation of two contents: texts, or lists of parts."""
    return _concat_all((("", first), (separator, second)))


def _concat_all(pieces: Iterable[tuple[str, Any]]) -> Any:
    """Return the concatenation of contents: texts, or lists of parts.

    Args:
        pieces: the contents, each with the separator before it. Empty contents are omitted.
    """
    texts, parts = list[str](), list[Any]()
    for separator, content in pieces:
        if not content:
            continue
        prefix = separator if texts or parts else ""
        if isinstance(content, str) and not parts:
            texts += [prefix, content]
            continue
        if texts:
            parts.append({"type": "text", "text": "".join(texts)})
            texts = []
        parts += [{"type": "text", "text": prefix}] if prefix else []
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return parts or "".join(texts)


def write_tools_as_text(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], system: bool
) -> Messages:
    """Return a conversation whose tools, calls and results are text.

    Args:
        messages: normalized messages, with `tool_calls` and results of the role `tool`.
        tools: functions in the format of OpenAI.
        system: whether the template accepts system messages. If not, the first message of the
            user begins with the tools.
    """
    new_messages: Messages = []
    contents: list[list[tuple[str, Any]]] = []
    after_result = False
    for message in messages:
        entry = {key: value for key, value in message.items() if key != "tool_calls"}
        content = entry["content"]
        if entry["role"] == "tool":
            opened = _concat("<tool_response>\n", "", content)
            body = _concat(opened, "", "\n</tool_response>")
            entry = {"role": "user", "content": body}
            if after_result:
                contents[-1].append(("\n", body))
                continue
        elif entry["role"] == "user" and after_result:  # templates may require alternating roles
            contents[-1].append((SEPARATOR, content))
            after_result = False
            continue
        if message.get("tool_calls"):
            text = "\n".join(_write_call(call) for call in message["tool_calls"])
            entry["content"] = _concat(content, "\n", text)
        after_result = message["role"] == "tool"
        new_messages.append(entry)
        contents.append([("", entry["content"])])
    for entry, pieces in zip(new_messages, contents, strict=True):
        if len(pieces) > 1:
            entry["content"] = _concat_all(pieces)
    return _offer_tools(new_messages, tools, system) if tools else new_messages


def _offer_tools(messages: Messages, tools: Sequence[Mapping[str, Any]], system: bool) -> Messages:
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = _INSTRUCTIONS.format(tools=listed)
    role = "system" if system else "user"
    for place, message in enumerate(messages):
        if message["role"] != role:
            if system:
                break
            continue
        # A system prompt is followed by the tools, and the tools by a message of the user.
        content = message["content"]
        pair = (content, text) if system else (text, content)
        entry = {**message, "content": _concat(pair[0], SEPARATOR, pair[1])}
        return [*messages[:place], entry, *messages[place + 1 :]]
    return [{"role": role, "content": text}, *messages]


def _write_call(call: Mapping[str, Any]) -> str:
    function = call["function"]
    fields = {"name": function["name"], "arguments": read_arguments(function.get("arguments"))}
    return f"<tool_call>\n{json.dumps(fields, ensure_ascii=False)}\n</tool_call>"
