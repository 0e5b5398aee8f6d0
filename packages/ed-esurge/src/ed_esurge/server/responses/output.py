"""Items and events of a response for the blocks of a reply."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from typing import Any

from ed_esurge.outputs import PositionLogprobs
from ed_esurge.replies.blocks import Block, Change
from ed_esurge.server.generation.logprobs import TokenTexts, chat_logprobs
from ed_esurge.server.http.streaming import named_event, write_named_event
from ed_esurge.server.responses.tools import CustomTool, OfferedTools, parse_custom_input

EventFields = dict[str, Any]


class TokenPlaces:
    """Assigns the tokens of a reply to the parts of its text.

    Args:
        texts: texts of the tokens.
        hides_special: whether the text omits special tokens.
        top: number of alternatives of each token.
    """

    def __init__(self, texts: TokenTexts, *, hides_special: bool, top: int) -> None:
        self._texts, self._hides, self._top = texts, hides_special, top
        self._waiting: deque[tuple[int, int, dict[str, Any]]] = deque()
        self._at = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, tokens: Sequence[int], logprobs: Sequence[PositionLogprobs]) -> None:
        """Append tokens of the reply. All tokens of a character begin at the character."""
        entries = chat_logprobs(self._texts, tokens, logprobs, self._top)["content"]
        for token, entry in zip(tokens, entries, strict=True):
            if self._hides and self._texts.is_special(token):
                continue
            start = self._at
            self._at += len(self._utf8.decode(self._texts.get_bytes(token)))
            self._waiting.append((start, self._at, entry))

    def take(self, start: int, end: int) -> list[dict[str, Any]]:
        """Remove and return the tokens of a part of the text. Earlier tokens are dropped."""
        entries = []
        while self._waiting and self._waiting[0][0] < end:
            first, last, entry = self._waiting.popleft()
            if last > start or first >= start:
                entries.append(entry)
        return entries


class OutputItems:
    """Describes the blocks of a reply as items.

    Args:
        offered: the tools that the model sees.
        raw: whether the arguments of calls are the input of a custom tool itself.
        first: index of the first item of the reply in the output.
    """

    def __init__(self, offered: OfferedTools, *, raw: bool, first: int) -> None:
        self._offered, self._raw, self.first = offered, raw, first
        self.logprobs: dict[int, list[dict[str, Any]]] = {}

    def input(self, block: Block) -> str:
        """Return the input of a custom tool's call."""
        return block.text if self._raw else parse_custom_input(block.text)

    def is_custom(self, block: Block) -> bool:
        """Return whether a block is a call of a custom tool."""
        tool = self._offered.functions.get(block.name) if block.kind == "call" else None
        return isinstance(tool, CustomTool)

    def describe_call(self, block: Block) -> dict[str, Any]:
        """Return the id and the name of a call, with the namespace of its tool."""
        namespace, name = self._offered.namespaces.get(block.name, (None, block.name))
        described = {"call_id": block.call_id, "name": name}
        return described if namespace is None else {**described, "namespace": namespace}

    def part(self, block: Block) -> dict[str, Any]:
        """Return the content of a message or of thoughts."""
        if block.kind == "thoughts":
            return {"type": "reasoning_text", "text": block.text}
        logprobs = self.logprobs.get(block.index, [])
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": logprobs}

    def item(self, block: Block, status: str) -> dict[str, Any]:
        """Return a block as an item of the output."""
        open_ = status == "in_progress"
        if self.is_custom(block):
            text = "" if open_ else self.input(block)
            fields = {**self.describe_call(block), "input": text, "status": status}
            return {"type": "custom_tool_call", "id": f"ctc_{block.id}", **fields}
        if block.kind == "call":
            fields = {**self.describe_call(block), "arguments": block.text}
            return {"type": "function_call", "id": f"fc_{block.id}", **fields, "status": status}
        content = [] if open_ else [self.part(block)]
        if block.kind == "thoughts":
            fields = {"id": f"rs_{block.id}", "summary": [], "content": content}
            return {"type": "reasoning", **fields, "status": status}
        fields = {"id": f"msg_{block.id}", "role": "assistant", "content": content}
        return {"type": "message", **fields, "status": status}

    def events(
        self, change: Change, finish: str | None, new: list[dict[str, Any]]
    ) -> list[EventFields]:
        """Return the events of a change.

        Args:
            finish: the finish reason at the end of the reply.
            new: log-probabilities of the new tokens of a text.
        """
        block = change.block
        index = self.first + block.index
        opened = self.item(block, "in_progress")
        place = {"item_id": opened["id"], "output_index": index}
        inner = {**place, "content_index": 0}
        if change.kind == "opens":
            added = event("response.output_item.added", output_index=index, item=opened)
            if block.kind == "call":
                return [added]
            part = {**self.part(block), "text": ""}
            return [added, event("response.content_part.added", **inner, part=part)]
        custom = self.is_custom(block)
        kind, at = {
            "text": ("response.output_text", {**inner, "logprobs": new}),
            "thoughts": ("response.reasoning_text", inner),
            "call": ("response.function_call_arguments", place),
        }[block.kind]
        if custom:
            kind = "response.custom_tool_call_input"
        if change.kind == "grows":
            if custom:  # the input is complete when its JSON text is
                return []
            return [event(f"{kind}.delta", **at, delta=change.text)]
        closed = self.item(block, get_status(block, finish))
        if custom:
            text = self.input(block)
            done = [
                event(f"{kind}.delta", **at, delta=text),
                event(f"{kind}.done", **at, input=text),
            ]
        elif block.kind == "call":
            done = [event(f"{kind}.done", **at, arguments=block.text, name=opened["name"])]
        else:
            if block.kind == "text":
                at = {**at, "logprobs": self.logprobs.get(block.index, [])}
            done = [
                event(f"{kind}.done", **at, text=block.text),
                event("response.content_part.done", **inner, part=self.part(block)),
            ]
        return [*done, event("response.output_item.done", output_index=index, item=closed)]


def get_status(block: Block, finish: str | None) -> str:
    """Return the status of a closed block. The last block of a truncated reply is incomplete."""
    cut = finish == "length" or not block.is_complete or block.broken
    return "incomplete" if cut else "completed"


def event(kind: str, **fields: object) -> EventFields:
    """Return an event without its number."""
    return {"type": kind, **fields}


class EventWriter:
    """Numbers and serializes the events of a stream."""

    def __init__(self) -> None:
        self.count = 0

    def write(self, fields: EventFields) -> str:
        """Return an event as text."""
        return named_event(fields["type"], self._number(fields))

    async def write_long(self, fields: EventFields, size: int) -> str:
        """Return an event as text.

        Args:
            size: bytes of the response. A thread writes long events.
        """
        if fields["type"].endswith(".delta"):
            return self.write(fields)
        return await write_named_event(fields["type"], self._number(fields), size)

    def _number(self, fields: EventFields) -> EventFields:
        self.count += 1
        return {"type": fields["type"], "sequence_number": self.count - 1, **fields}
