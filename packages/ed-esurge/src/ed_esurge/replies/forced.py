"""Tool calls that the request requires and the grammar of the reply enforces."""

from __future__ import annotations

from ed_esurge.replies.events import CallArguments, CallBegins, CallEnds, Event, ReplyText
from ed_esurge.replies.formats import ToolFormat
from ed_esurge.replies.parser import ReplyParser, new_call_id

# A list of calls without other text: the output for `tool_choice: "required"`.
LISTED = ToolFormat(starts=("[",))


class NamedCall:
    """Parser of a reply that consists of the arguments of one function: `tool_choice` with a name.

    Args:
        name: name of the function.
        parser: parser of the reasoning before the arguments.
    """

    def __init__(self, name: str, parser: ReplyParser) -> None:
        self._name, self._parser = name, parser
        self._begun = False

    def feed(self, text: str) -> list[Event]:
        """See `ReplyParser.feed`."""
        return self._convert_events(self._parser.feed(text))

    def close(self, *, cut: bool = False) -> list[Event]:
        """See `ReplyParser.close`."""
        events = self._convert_events(self._parser.close(cut=cut))
        if self._begun and not cut:
            events.append(CallEnds(0))
        return events

    def _convert_events(self, events: list[Event]) -> list[Event]:
        result: list[Event] = []
        for event in events:
            if not isinstance(event, ReplyText):
                result.append(event)
                continue
            if not self._begun:
                self._begun = True
                result.append(CallBegins(0, new_call_id(), self._name))
            result.append(CallArguments(0, event.text))
        return result
