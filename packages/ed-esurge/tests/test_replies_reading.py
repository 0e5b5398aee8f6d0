"""Whole replies as messages: calls, broken calls, thoughts, and ids that repeat."""

from __future__ import annotations

import pytest
from ed_esurge.replies.reading import ReplyReader
from ed_infra.errors import ConfigError

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call>'


class Special:
    content, special = "<|im_end|>", True


class Letters:
    """A tokenizer of characters; `~` is the end token."""

    chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"

    def __init__(self):
        self.added_tokens_decoder = {126: Special()}

    def get_vocab(self):
        return {}

    def decode(self, ids, skip_special_tokens=True):
        return "".join(map(chr, ids)).replace("~", "<|im_end|>")


def read(text, template=None, **options):
    tokenizer = Letters()
    if template is not None:
        tokenizer.chat_template = template
    return ReplyReader(tokenizer, TOOLS, **options)(list(map(ord, text)))


def test_replies_become_messages_with_calls():
    assert read("Hello.~") == ({"role": "assistant", "content": "Hello."}, "")
    message, problem = read(f"I add.\n{CALL}\n{CALL}~")
    assert message["content"] == "I add." and not problem
    assert [call["id"] for call in message["tool_calls"]] == ["call00000", "call00001"]
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 3}}
    assert read(f"{CALL}~") == read(f"{CALL}~")


def test_calls_of_missing_functions_are_calls():
    message, problem = read(CALL.replace("add", "divide"))
    assert message["tool_calls"][0]["function"]["name"] == "divide" and not problem


@pytest.mark.parametrize("text", ["<tool_call>add 3~", '<tool_call>\n{"name": "add", "argum'])
def test_broken_calls_have_a_text_for_the_model(text):
    message, problem = read(text)
    assert "tool_calls" not in message and "no valid call" in problem


def test_thoughts_are_separate_also_if_the_prompt_begins_them():
    template = "<think> tools <tool_call>"
    for text in (f"<think>Hm.</think>{CALL}~", f"Hm.</think>\n\n{CALL}~"):
        message, _ = read(text, template, reasoning_format="qwen3")
        assert message["reasoning_content"] == "Hm." and message["tool_calls"]


def test_unknown_formats_are_errors():
    with pytest.raises(ConfigError, match="does not show the format of function calls"):
        read("", "tools")
    with pytest.raises(ConfigError, match="tool_parser_name 'hermess'"):
        read("", "tools", tool_format="hermess")
