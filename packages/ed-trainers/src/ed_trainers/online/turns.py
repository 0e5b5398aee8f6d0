"""The tokens between two messages of the model, and the messages of a completion.

`encode_replies` writes the messages of an environment as the chat template does, and
`split_completion` finds the messages again: reward functions read messages, and a sample is stored
as tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from ed_infra.conversation import ConversationFormat

from ed_trainers.environments.tools import ReadReply

#: Content of a message that no template changes.
_ANSWER = "ANSWER-d41c"
#: Contents of results. The quotation mark shows whether a template writes results as JSON.
_RESULT = 'RESULT-{}"d41c'
_Message = Mapping[str, Any]


class ChatTokenizer(Protocol):
    """The methods of a tokenizer with a chat template that samples of several messages need."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of a text."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of tokens."""
        ...

    def apply_chat_template(self, messages: Sequence[_Message], **options: object) -> object:
        """Return the text of messages."""
        ...


_USER = {"role": "user", "content": "-"}


def encode_replies(
    messages: Sequence[_Message], tokenizer: ChatTokenizer, last_token: Sequence[int]
) -> list[int]:
    """Return the tokens between the newest message of the model and its next one.

    Args:
        messages: messages of an environment, or results of tools.
        tokenizer: the tokenizer, with a chat template.
        last_token: the last token of the message of the model; the end token unless the message was
            cut off.
    """
    text = _render_replies(messages, tokenizer, str(tokenizer.decode(last_token)))
    return tokenizer.encode(text, add_special_tokens=False)


def _render_replies(messages: Sequence[_Message], tokenizer: ChatTokenizer, end: str) -> str:
    """Return the text between two messages of the model, without the text `end`."""

    def render(chat: Sequence[_Message], **options: object) -> str:
        options = {"tokenize": False, **options}
        return str(tokenizer.apply_chat_template(list(chat), **options))

    form = ConversationFormat(getattr(tokenizer, "chat_template", None), render)
    results = [message for message in messages if message["role"] == "tool" and "name" in message]
    if results and len(results) == len(messages):
        # Templates require a call before a result, and some repeat its name.
        calls = [
            {
                "id": result.get("tool_call_id", f"call{place:05}"),
                "type": "function",
                "function": {"name": result["name"], "arguments": {}},
            }
            for place, result in enumerate(results)
        ]
        said = [_USER, {"role": "assistant", "content": "", "tool_calls": calls}]
        before = render(form.prepare(said)[0])
        if end and before.rstrip().endswith(end):
            # Templates may write the message in another way when results follow (Qwen3 omits
            # thoughts), and a line end after the end token, which the model did not sample.
            text = render(form.prepare([*said, *messages])[0], add_generation_prompt=True)
            return text.split(end, before.count(end))[-1]
        messages = form.prepare([*said, *messages])[0][len(said) :]
    # The message has no calls, or ends with another token than that of the template. The text after
    # the message is found by its content.
    said = [_USER, {"role": "assistant", "content": _ANSWER}]
    text = render([*said, *messages], add_generation_prompt=True)
    return text[text.index(_ANSWER) + len(_ANSWER) :].removeprefix(end)


def build_error(content: str) -> dict[str, Any]:
    """Return the reply to a message whose call cannot be read."""
    return {"role": "tool", "name": "tool", "content": content}


def split_completion(
    ids: Sequence[int], given: Sequence[tuple[int, int]], tokenizer: ChatTokenizer, read: ReadReply
) -> list[dict[str, Any]]:
    """Return the messages of a completion with tools.

    Args:
        ids: tokens of the completion.
        given: first token and number of tokens of each reply, see `Sampled.given`.
        tokenizer: the tokenizer.
        read: reads messages of the model.
    """
    messages: list[dict[str, Any]] = []
    begin = 0
    for first, count in (*given, (len(ids), 0)):
        message, problem = read(ids[begin:first])
        messages.append(message)
        begin = first + count
        if count:
            end = str(tokenizer.decode(list(ids[first - 1 : first])))
            text = str(tokenizer.decode(list(ids[first:begin])))
            messages += _find_replies(text, message, problem, tokenizer, end)
    return messages


def _find_replies(
    text: str, message: _Message, problem: str, tokenizer: ChatTokenizer, end: str
) -> list[dict[str, Any]]:
    """Return the messages that `_render_replies` wrote as a text."""
    replies = [
        {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"]}
        for call in message.get("tool_calls") or ()
    ]
    if problem:
        replies = [build_error("")]
    replies = replies or [{"role": "user"}]
    marks = [_RESULT.format(place) for place in range(len(replies))]
    marked = [{**reply, "content": mark} for reply, mark in zip(replies, marks, strict=True)]
    pattern, rest = "", _render_replies(marked, tokenizer, end)
    is_json = marks[0] not in rest
    for mark in marks:
        before, _, rest = rest.partition(json.dumps(mark)[1:-1] if is_json else mark)
        pattern += re.escape(before) + "(.*)"
    match = re.fullmatch(pattern + re.escape(rest), text, re.DOTALL)
    if match is None:  # replies of an environment with other roles
        return [{**replies[0], "content": text.strip()}]
    contents = list(match.groups())
    if is_json:
        with suppress(ValueError):  # the text of an environment may look alike
            contents = [json.loads(f'"{content}"') for content in contents]
    return [{**reply, "content": content} for reply, content in zip(replies, contents, strict=True)]
