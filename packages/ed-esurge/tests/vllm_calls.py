"""Parse replies with vLLM's parsers of tool calls, in an environment with vLLM.

`python vllm_calls.py < GIVEN > FOUND`: GIVEN is JSON with the `tools` (name to schema) and the
`replies` (pairs of the parser's name and the text). FOUND has the calls of each reply.
"""

from __future__ import annotations

import json
import sys
from typing import Any


class _Vocabulary(dict[str, int]):
    """Every text is one token, as the special tokens of a format are for their model."""

    def get(self, text: str, default: Any = None) -> int:
        return self[text]

    def __missing__(self, text: str) -> int:
        self[text] = 1 + len(self)
        return self[text]

    def __contains__(self, text: object) -> bool:
        return True


class _Tokenizer:
    """The part of a tokenizer that the parsers of whole replies read."""

    all_special_tokens: tuple[str, ...] = ()
    all_special_ids: tuple[int, ...] = ()
    bos_token, eos_token, eos_token_id, chat_template = "<s>", "</s>", 2, None

    def __init__(self) -> None:
        self.vocabulary = _Vocabulary()

    def get_vocab(self) -> dict[str, int]:
        return self.vocabulary

    def convert_tokens_to_ids(self, text: str) -> int:
        return self.vocabulary[text]

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, tokens: list[int], **_: Any) -> str:
        return "".join(map(chr, tokens))


def main() -> None:
    """Read the replies and write their calls."""
    from vllm.entrypoints.openai.chat_completion.protocol import (  # type: ignore[import-not-found]
        ChatCompletionRequest,
    )
    from vllm.tool_parsers import ToolParserManager  # type: ignore[import-not-found]

    given = json.load(sys.stdin)
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in given["tools"].items()
    ]
    messages = [{"role": "user", "content": "How is the weather?"}]
    request = ChatCompletionRequest(model="model", messages=messages, tools=tools)
    found = []
    for name, text in given["replies"]:
        parser = ToolParserManager.get_tool_parser(name)(_Tokenizer(), request.tools)
        parsed = parser.extract_tool_calls(text, request)
        calls = [(call.function.name, call.function.arguments) for call in parsed.tool_calls]
        found.append({"calls": calls, "content": parsed.content})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
