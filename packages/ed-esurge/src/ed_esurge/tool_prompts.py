"""Tools in conversations for chat templates that render no tools.

Tools and calls have the published format of Hermes, which Qwen uses as well: the system prompt
lists the functions between `<tools>` and `</tools>`, the model writes calls between `<tool_call>`
and `</tool_call>`, and a message of the user contains results between `<tool_response>` and
`</tool_response>`. `ed_esurge.replies.tool_formats` parses the format by the name `hermes`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

#: Name of the format of the calls in `TOOL_FORMATS`.
FORMAT = "hermes"
GAP = "\n\n"

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


def renders_tools(template: object) -> bool:
    """Return whether a chat template (text, or texts by name) reads the variable `tools`."""
    return "tools" in str(template)


def with_tools_as_text(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    *,
    system: bool,
) -> list[dict[str, Any]]:
    """Return a conversation whose tools, calls and results are text.

    Args:
        messages: messages for a chat template, with `tool_calls` and results of the role `tool`.
        tools: tools for a chat template.
        system: whether the template supports system messages. If not, the first message of the
            user begins with the tools.
    """
    result: list[dict[str, Any]] = []
    answered = False  # whether the last message contains results
    for message in messages:
        entry = {key: value for key, value in message.items() if key != "tool_calls"}
        role = entry.get("role")
        if role == "tool":
            body = _joined("<tool_response>\n", entry.get("content"), "\n</tool_response>")
            entry = {"role": "user", "content": body}
            if answered:
                _extend(result[-1], "\n", body)
                continue
        elif role == "user" and answered:  # templates may require alternating roles
            _extend(result[-1], GAP, entry.get("content"))
            answered = False
            continue
        calls = message.get("tool_calls")
        if calls:
            text = "\n".join(_call(call) for call in calls)
            _extend(entry, "\n" if entry.get("content") else "", text)
        answered = role == "tool"
        result.append(entry)
    return _offered(result, tools, system=system) if tools else result


def _offered(
    messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]], *, system: bool
) -> list[dict[str, Any]]:
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = _INSTRUCTIONS.format(tools=listed)
    role = "system" if system else "user"
    for place, message in enumerate(messages):
        if message.get("role") != role:
            if system:
                break
            continue
        # A system prompt is followed by the tools, and the tools by a message of the user.
        content = message.get("content")
        content = _joined(content, GAP, text) if system else _joined(text, GAP, content)
        return [*messages[:place], {**message, "content": content}, *messages[place + 1 :]]
    return [{"role": role, "content": text}, *messages]


def _call(call: Mapping[str, Any]) -> str:
    function = call.get("function", call)
    known = {"name": function["name"], "arguments": function.get("arguments") or {}}
    return f"<tool_call>\n{json.dumps(known, ensure_ascii=False)}\n</tool_call>"


def _extend(message: dict[str, Any], gap: str, content: Any) -> None:
    message["content"] = _joined(message.get("content"), gap, content)


def _joined(*contents: Any) -> Any:
    """Return the concatenation of contents: texts, or lists of parts."""
    contents = tuple(content for content in contents if content)
    if all(isinstance(content, str) for content in contents):
        return "".join(contents)
    parts: list[Any] = []
    for content in contents:
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return parts
