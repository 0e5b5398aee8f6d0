"""A reply as a sequence of blocks, as in OpenAI's Responses API and Anthropic's Messages API.

A block is open until the next block begins. Complete answers and streams use the same blocks.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from ed_esurge.outputs import append_text
from ed_esurge.replies.events import (
    CallArguments,
    CallBegins,
    CallBroken,
    CallEnds,
    Event,
    Reasoning,
    ReplyText,
)

BlockKind = Literal["text", "thoughts", "call"]
What = Literal["opens", "grows", "closes"]


@dataclass(slots=True)
class Block:
    """A part of a reply.

    Attributes:
        text: text of the block; JSON text of the arguments of a call.
        call_id, name: id and function name of a call.
        is_complete: False for a call that was cut off.
        broken: whether the text turned out not to be a call.
        continues: whether an earlier block has the same kind, and other parts are between them.
    """

    index: int
    kind: BlockKind
    text: str = ""
    call_id: str = ""
    name: str = ""
    is_complete: bool = True
    broken: bool = False
    continues: bool = False
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a block. `text` is the text that is appended to the block.

    Attributes:
        end: end of the text in the model's text, in characters, for a block of text.
    """

    kind: What
    block: Block
    text: str = ""
    end: int = 0


class BlockTracker:
    """Converts events to changes of blocks."""

    def __init__(self) -> None:
        self._all: list[Block] = []
        self._open: Block | None = None
        self._kinds: set[BlockKind] = set()  # of the closed blocks with content
        self._last_kind: BlockKind | None = None

    @property
    def whole(self) -> list[Block]:
        """The blocks without broken calls."""
        return [block for block in self._all if not block.broken]

    def take(self, events: Iterable[Event]) -> list[Change]:
        """Return the changes for some events."""
        changes: list[Change] = []
        for event in events:
            match event:
                case ReplyText(text, end, between):
                    if not between or self._is_open("text"):
                        changes += self._into("text", text, end)
                case Reasoning(text, between):
                    if not between or self._is_open("thoughts"):
                        changes += self._into("thoughts", text)
                case CallBegins(_, call_id, name):
                    changes += [*self._close(), self._begin("call", call_id, name)]
                case CallArguments(_, text):
                    changes += self._into("call", text)
                case CallBroken():
                    if self._open is not None:
                        self._open.broken = True
                    changes += self._close()
                case CallEnds():
                    changes += self._close()
        return changes

    def end(self) -> list[Change]:
        """Return the last changes. An empty reply consists of one empty text block."""
        if not self._all:
            return [self._begin("text"), *self._close()]
        if self._open is not None:
            self._open.is_complete = self._open.kind != "call"
        return self._close()

    def _is_open(self, kind: BlockKind) -> bool:
        return self._open is not None and self._open.kind == kind

    def _into(self, kind: BlockKind, text: str, end: int = 0) -> list[Change]:
        changes: list[Change] = []
        if self._open is None or self._open.kind != kind:
            changes += [*self._close(), self._begin(kind)]
        block = self._open
        assert block is not None, "a block was begun"
        append_text(block, "text", text)
        return [*changes, Change("grows", block, text, end)]

    def _begin(self, kind: BlockKind, call_id: str = "", name: str = "") -> Change:
        continues = kind in self._kinds and self._last_kind != kind
        self._open = Block(len(self._all), kind, call_id=call_id, name=name, continues=continues)
        self._all.append(self._open)
        return Change("opens", self._open)

    def _close(self) -> list[Change]:
        block, self._open = self._open, None
        if block is None:
            return []
        if not block.broken and (block.text or block.kind == "call"):
            self._kinds.add(block.kind)
            self._last_kind = block.kind
        return [Change("closes", block)]
