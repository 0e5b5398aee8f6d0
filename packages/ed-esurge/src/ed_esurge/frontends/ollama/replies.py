"""Answers of Ollama's generating endpoints: lines of a stream, counts and durations."""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from ed_esurge.outputs import append_text
from ed_esurge.replies.blocks import Block
from ed_esurge.replies.json_text import loads_arguments
from ed_esurge.server.generation.answers import AnswerBody
from ed_esurge.server.generation.logprobs import chat_logprobs
from ed_esurge.server.generation.models import ServedModel
from ed_esurge.server.generation.pipeline import ChatGeneration
from ed_esurge.server.http.errors import APIError, ApiFormat
from ed_esurge.server.http.streaming import StreamFormat, encode_json

NANOSECONDS = 1e9


class TimedAnswer(AnswerBody):
    """Common fields of answers. Durations are in nanoseconds, and present in the last line."""

    model: str
    created_at: str
    done: bool
    done_reason: str | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    """Number of prompt tokens, including those of the prefix cache."""
    prompt_eval_duration: int | None = None
    """From the first step of the request to the first token."""
    eval_count: int | None = None
    eval_duration: int | None = None
    """From the first token to the last."""
    logprobs: list[dict[str, Any]] | None = None


class OllamaError(AnswerBody):
    """Ollama's error envelope."""

    error: str


OLLAMA = ApiFormat(
    re.compile("/api/"),
    OllamaError,
    lambda error: ({"error": error.full_message()}, {}),
    stream_type="application/x-ndjson",
    accepts_plain_curl=True,  # the examples of Ollama omit the content type
)


@dataclass(slots=True)
class ReplyLine:
    """New output of a reply.

    Attributes:
        calls: complete calls.
        finish: finish reason in the last line.
    """

    content: str = ""
    thinking: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish: str | None = None

    def add(self, new: ReplyLine) -> None:
        """Append a later line."""
        append_text(self, "content", new.content)
        append_text(self, "thinking", new.thinking)
        self.calls += new.calls
        self.logprobs += new.logprobs
        self.finish = new.finish or self.finish

    @property
    def filled(self) -> bool:
        """Whether the line has output."""
        return bool(self.content or self.thinking or self.calls or self.logprobs or self.finish)


async def reply_lines(turn: ChatGeneration) -> AsyncGenerator[ReplyLine]:
    """Yield the new output after each step of the engine. Calls follow when they are complete."""
    async with aclosing(turn.pieces()) as items:
        async for pieces in items:
            line = ReplyLine()
            for piece in pieces:
                changes = turn.blocks.take(piece.events)
                if piece.finish is not None:
                    changes += turn.blocks.end()
                    line.finish = "length" if piece.finish == "length" else "stop"
                for change in changes:
                    block = change.block
                    if change.kind == "opens" and block.continues:
                        line.content += "\n" if block.kind == "text" else ""
                        line.thinking += "\n" if block.kind == "thoughts" else ""
                    if change.kind == "grows" and block.kind == "text":
                        append_text(line, "content", change.text)
                    elif change.kind == "grows" and block.kind == "thoughts":
                        append_text(line, "thinking", change.text)
                    elif change.kind == "closes" and block.kind == "call":
                        line.calls += _call(block)
                if turn.body.logprobs and piece.out.token_ids:
                    line.logprobs += _logprobs(turn, piece.out.token_ids, piece.out.logprobs or [])
            if line.filled:
                yield line


async def whole_reply(turn: ChatGeneration) -> ReplyLine:
    """Return the complete reply."""
    reply = ReplyLine()
    async with aclosing(reply_lines(turn)) as lines:
        async for line in lines:
            reply.add(line)
    return reply


def _call(block: Block) -> list[dict[str, Any]]:
    """Return a complete call; none for a call that was cut off, or is no call."""
    if block.broken or not block.is_complete:
        return []
    function = {"name": block.name, "arguments": loads_arguments(block.text)}
    return [{"id": block.call_id, "function": function}]


def _logprobs(turn: ChatGeneration, tokens: list[int], logprobs: list[Any]) -> list[dict[str, Any]]:
    top = turn.body.top_logprobs or 0
    entries = chat_logprobs(turn.model.texts, tokens, logprobs, top)["content"]
    for entry in entries:
        if not top:
            del entry["top_logprobs"]
    return entries


def now() -> str:
    """Return the time in the format of RFC 3339."""
    return timestamp(time.time())


def timestamp(seconds: float) -> str:
    """Return a time in seconds since 1970 in the format of RFC 3339."""
    moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return moment.isoformat().replace("+00:00", "Z")


def head(model: ServedModel) -> dict[str, Any]:
    """Return the first fields of a line."""
    return {"model": model.name, "created_at": now()}


class Stopwatch:
    """Measures a request from the beginning of its handler. Loading happens before."""

    def __init__(self, model: ServedModel) -> None:
        self._start, self._load = time.monotonic(), model.load_seconds

    def durations(self) -> dict[str, int]:
        """Return the total duration and the duration of loading, in nanoseconds."""
        total = time.monotonic() - self._start + self._load
        return {
            "total_duration": _convert_to_nanoseconds(total),
            "load_duration": _convert_to_nanoseconds(self._load),
        }

    def last(self, turn: ChatGeneration, reason: str | None) -> dict[str, Any]:
        """Return the fields of the last line."""
        times, counts = turn.generation.times, turn.generation
        first = times.first_token_time if times is not None else None
        begun = times.first_scheduled_time if times is not None else None
        ended = times.last_token_time if times is not None else None
        return {
            "done": True,
            "done_reason": reason,
            **self.durations(),
            "prompt_eval_count": counts.prompt_tokens,
            "prompt_eval_duration": _convert_to_nanoseconds(_between(begun, first)),
            "eval_count": counts.completion_tokens,
            "eval_duration": _convert_to_nanoseconds(_between(first, ended)),
        }


def _between(start: float | None, end: float | None) -> float:
    return 0.0 if start is None or end is None else end - start


def _convert_to_nanoseconds(seconds: float) -> int:
    return round(seconds * NANOSECONDS)


def json_line(fields: dict[str, Any]) -> str:
    """Return one line of a stream."""
    return encode_json(fields) + "\n"


def _error_line(error: APIError) -> str:
    return json_line({"error": error.full_message()})


LINES = StreamFormat(_error_line, "application/x-ndjson")
