"""Prompts from held-out data, for the sample of a run and for the suggested request."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ed_data import contents, documents
from ed_data.rows.splits import choose_schema
from ed_data.schema import Content
from ed_infra.chats import Chat, Prompt

from ed_elarge.config.run_config import RunConfig

_WORDS = 12


def find_question(run: RunConfig) -> Chat | None:
    """Return the messages of the first row before its answer, or None if the row is no chat."""
    if run.mixture is None:
        return None
    schema = choose_schema(run.mixture, run.schema)
    first = next(documents(run.mixture.informs[0], schema=schema, media=run.mixture.media), None)
    return None if first is None or not _is_chat(first.content) else question(first.content)


def held_out_prompt(run: RunConfig, texts: Sequence[str]) -> Prompt:
    """Return a held-out prompt: the start of the longest text, or of the first chat.

    Args:
        run: The run with its mixture.
        texts: The held-out texts; may be empty.
    """
    if texts and run.mixture is not None and find_question(run):
        chats = contents(run.mixture, "eval", schema=run.schema)
        return question(next(chat for chat in chats if _is_chat(chat)))
    longest = max(texts, key=len, default="The")
    words = [match.end() for match in re.finditer(r"\S+", longest)]
    return longest[: words[min(len(words), _WORDS) - 1]]


def question(chat: Any) -> Chat:
    """Return the messages of a chat before its first answer."""
    answers = (i for i, message in enumerate(chat) if message["role"] == "assistant")
    return tuple(chat[: next(answers, len(chat)) or 1])


def _is_chat(content: Content) -> bool:
    return not isinstance(content, str) and bool(content) and isinstance(content[0], dict)
