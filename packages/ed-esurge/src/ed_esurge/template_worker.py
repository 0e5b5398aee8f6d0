"""The task of the worker process that renders templates of requests, see
`ed_esurge.children.worker`."""

from __future__ import annotations

import json
from typing import Any

from ed_esurge.children.messages import RefusedError, SendAnswer
from ed_esurge.children.worker import run_worker

# Kinds of messages: the text, the pattern of its marks, a text that is too long.
TEXT, MARKS, TOO_LONG = b"T", b"K", b"L"
#: Longest message of an exception of a template, in characters.
_MAX_ERROR = 500


def _prepare() -> None:
    """Import the template engine, which the children share."""
    # The first template imports the modules.
    _work(b'[[{"role": "user", "content": "a"}], {}]', _FIRST, lambda kind, content: None)


_FIRST: dict[str, Any] = {
    "template": "{{ messages[0].content }}",
    "special_tokens": {},
    "added_tokens": [],
    "characters": 2**20,
}


def _work(data: bytes, options: dict[str, Any], say: SendAnswer) -> None:
    """Render a conversation.

    Args:
        data: messages and options of `ChatTemplate.render`, as JSON.
        options: the template, the special tokens by name, the contents of the special tokens, and
            the largest number of characters.

    Raises:
        RefusedError: the template rejects the conversation, or the text is too long (`TOO_LONG`).
    """
    from ed_esurge.template import ChatTemplate

    messages, arguments = json.loads(data)
    template = ChatTemplate(_make_tokenizer(options), options["template"])
    try:
        text, marks = template.render(messages, **arguments)
    except MemoryError:
        raise
    except Exception as error:  # a template can raise any exception
        raise RefusedError(str(error)[:_MAX_ERROR]) from None
    if len(text) > options["characters"]:
        raise RefusedError(str(len(text)), TOO_LONG)
    say(MARKS, marks.pattern.encode())
    say(TEXT, text.encode("utf-8", "surrogatepass"))


def _make_tokenizer(options: dict[str, Any]) -> Any:
    """Return a tokenizer that renders templates and has no vocabulary."""
    from tokenizers import AddedToken
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

    added = {
        number: AddedToken(content, special=True)
        for number, content in enumerate(options["added_tokens"])
    }
    attributes = {
        "chat_template": None,
        "special_tokens_map": options["special_tokens"],
        "added_tokens_decoder": added,
    }
    return object.__new__(type("Renderer", (PreTrainedTokenizerBase,), attributes))


if __name__ == "__main__":
    run_worker(_prepare, _work)
