"""What a parser reports of a reply, piece by piece."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model thinks."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """A call of a function: `index` counts the calls of a reply."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnds:
    """The arguments are whole."""

    index: int


@dataclass(frozen=True, slots=True)
class CallBroken:
    """It was no call after all; its text follows as content."""

    index: int


Event = Content | Reasoning | CallBegins | CallArguments | CallEnds | CallBroken


@dataclass(slots=True)
class Call:
    """A call: `arguments` are JSON text, cut short where the reply was."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Reply:
    """Events put together.

    Attributes:
        calls: by their index; broken ones are gone.
    """

    content: str = ""
    reasoning: str = ""
    calls: dict[int, Call] = field(default_factory=dict)

    def add(self, events: Iterable[Event]) -> Reply:
        """Take more events."""
        for event in events:
            match event:
                case Content(text):
                    self.content += text
                case Reasoning(text):
                    self.reasoning += text
                case CallBegins(index, name_id, name):
                    self.calls[index] = Call(name_id, name)
                case CallArguments(index, text):
                    self.calls[index].arguments += text
                case CallBroken(index):
                    del self.calls[index]
                case CallEnds():
                    pass
        return self
