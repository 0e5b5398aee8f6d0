"""Events that a parser emits for a reply."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ed_esurge.outputs import append_text


@dataclass(frozen=True, slots=True)
class ReplyText:
    """Text for the user.

    Attributes:
        end: end of the text in the model's text, in characters.
        between: whether the text only separates two texts that other parts of the reply separate.
    """

    text: str
    end: int = field(default=0, compare=False)
    between: bool = False


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Reasoning text of the model. `between`: see `ReplyText`."""

    text: str
    between: bool = False


@dataclass(frozen=True, slots=True)
class CallBegins:
    """Start of a function call; `index` is the index of the call in the reply."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnds:
    """The arguments are complete."""

    index: int


@dataclass(frozen=True, slots=True)
class CallBroken:
    """The text was not a valid call. The text follows as content."""

    index: int


Event = ReplyText | Reasoning | CallBegins | CallArguments | CallEnds | CallBroken


@dataclass(slots=True)
class ReplyCall:
    """A call. `arguments` is JSON text, which is incomplete if the reply was truncated."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Reply:
    """Accumulated events of a reply.

    Attributes:
        calls: valid calls by index.
    """

    content: str = ""
    reasoning: str = ""
    calls: dict[int, ReplyCall] = field(default_factory=dict)

    def add(self, events: Iterable[Event]) -> Reply:
        """Append events."""
        for event in events:
            match event:
                case ReplyText(text=text):
                    append_text(self, "content", text)
                case Reasoning(text):
                    append_text(self, "reasoning", text)
                case CallBegins(index, name_id, name):
                    self.calls[index] = ReplyCall(name_id, name)
                case CallArguments(index, text):
                    append_text(self.calls[index], "arguments", text)
                case CallBroken(index):
                    del self.calls[index]
                case CallEnds():
                    pass
        return self
