"""Incremental parser for all formats: converts text to events."""

from __future__ import annotations

import secrets
import string
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ed_esurge.replies.events import (
    CallArguments,
    CallBegins,
    CallBroken,
    CallEnds,
    Event,
    Reasoning,
    ReplyText,
)
from ed_esurge.replies.formats import ReasoningFormat, ToolFormat
from ed_esurge.replies.scanner import Ended, Malformed, Markers, Reader, Scanner
from ed_esurge.replies.syntaxes import SYNTAXES


@dataclass(frozen=True)
class Calls:
    """The calls that a reply may contain.

    Attributes:
        form: format of the calls.
        tools: name of a function -> JSON schema of its parameters. A call of another function is
            treated as text.
        most: maximum number of calls; further text is dropped. None: unlimited.
    """

    form: ToolFormat
    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    most: int | None = None


class ReplyParser:
    """Parses one reply incrementally.

    Args:
        calls: the allowed calls; None treats calls as text.
        reasoning: format of reasoning; None treats reasoning as text.
        inside: whether the reply begins within reasoning.
        drops: texts to omit (special tokens without a meaning for the user).
    """

    def __init__(
        self,
        calls: Calls | None = None,
        reasoning: ReasoningFormat | None = None,
        *,
        inside: bool = False,
        drops: Iterable[str] = (),
    ) -> None:
        self._src = Scanner()
        self._calls, self._reasoning = calls, reasoning
        opens = calls.form.opens if calls is not None else ()
        thinks = reasoning.opens if reasoning is not None else ()
        self._opens, self._thinks = frozenset(opens), frozenset(thinks)
        forms = (calls.form if calls is not None else None, reasoning)
        drops = {*drops, *(text for form in forms if form is not None for text in form.drops)}
        self._markers = Markers((*opens, *thinks, *drops))
        closes = reasoning.closes if reasoning is not None else ()
        # A call also ends unfinished reasoning.
        self._thought_ends = Markers((*closes, *(open_ for open_ in opens if len(open_) > 1)))
        self._events: list[Event] = []
        self._space = ""  # withheld white space, which is dropped if a call follows
        self._trim = inside
        self._trim_thought, self._thought_space = True, ""
        self._cut = False
        self._count = 0
        self._open: _Call | None = None
        self._run = self._reply(inside)
        next(self._run, None)

    def feed(self, text: str) -> list[Event]:
        """Append text and return the new events."""
        self._src.feed(text)
        next(self._run, None)
        return self._take()

    def close(self, *, cut: bool = False) -> list[Event]:
        """End the reply and return the last events.

        Args:
            cut: whether the reply was truncated by its length. An unfinished call is then kept.
        """
        self._src.ended, self._cut = True, cut
        next(self._run, None)
        if self._space and not self._trim:
            self._events.append(ReplyText(self._space, self._src.position))
        return self._take()

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    # ---- reading

    def _reply(self, inside: bool) -> Reader[None]:
        yield  # the first text
        try:
            if inside:
                yield from self._thoughts()
            yield from self._beginning()
            while True:
                marker = yield from self._src.until(self._markers, self._content)
                if marker in self._thinks:
                    self._space = ""
                    yield from self._thoughts()
                    yield from self._beginning()
                elif marker in self._opens:
                    yield from self._section(marker)
        except Ended:
            return

    def _thoughts(self) -> Reader[None]:
        self._trim_thought, self._thought_space = True, ""
        marker = yield from self._src.until(self._thought_ends, self._thought)
        self._trim = True
        if marker in self._opens:
            yield from self._section(marker)

    def _beginning(self) -> Reader[None]:
        """Read the beginning of a reply that may be a call without a marker."""
        form = self._calls.form if self._calls is not None else None
        if form is None or not form.starts:
            return
        src = self._src
        while (yield from src.peek()).isspace():
            src.at += 1
            self._content(src.text[src.at - 1])
        marker = yield from src.literal(*form.opens)  # `[TOOL_CALLS]` also starts with `[`
        if marker is not None:
            yield from self._section(marker)
        elif src.at < len(src.text) and src.text[src.at] in form.starts:
            yield from self._section("")

    def _section(self, marker: str) -> Reader[None]:
        """Read a section of calls after its marker."""
        assert self._calls is not None, "only announced calls are read"
        src, form = self._src, self._calls.form
        src.mark = src.at - len(marker)
        read, count = SYNTAXES[form.syntax], self._count
        try:
            while True:
                yield from src.space()
                if form.begins:
                    yield from src.expect(*form.begins)
                yield from read(src, self, form)
                yield from src.space()
                if (yield from src.literal(*form.closes)) is not None:
                    break
                parted = (yield from src.literal(*form.separators)) is not None
                yield from src.space()
                if src.at >= len(src.text):
                    break
                if not parted and not (yield from self._again(form)):
                    break
        except Malformed:
            self._broken()
        except Ended:
            if self._open is None:
                if src.since_mark().strip() and count == self._count:
                    self._broken()
            elif not self._cut:
                self._broken()
            raise
        finally:
            src.mark = None

    def _again(self, form: ToolFormat) -> Reader[bool]:
        """Return whether another call begins here, without consuming text.

        A section with an end may contain one JSON object per line.
        """
        lines = form.syntax == "json" and bool(form.closes) and not form.begins
        known = yield from self._src.literal(*(("{",) if lines else form.begins))
        self._src.at -= len(known or "")
        return known is not None

    # ---- output; a parser is the `Sink` of its calls

    def _broken(self) -> None:
        """Emit the text since the last complete call as content."""
        raw = self._src.since_mark()
        if self._open is not None:
            if self._open.shown:
                self._events.append(CallBroken(self._count))
            self._space, self._trim = self._open.space, self._open.trim
            self._open = None
        self._content(raw)

    def _content(self, text: str) -> None:
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._events.append(ReplyText(shown, self._src.position - len(self._space)))

    def _thought(self, text: str) -> None:
        if self._trim_thought:
            text = text.lstrip()
            self._trim_thought = not text
        text = self._thought_space + text
        shown = text.rstrip()
        self._thought_space = text[len(shown) :]
        if shown:
            self._events.append(Reasoning(shown))

    def begin(self, name: str, call_id: str | None = None) -> None:
        """See `Sink`."""
        calls = self._calls
        assert calls is not None, "only announced calls begin"
        if name not in calls.tools:
            raise Malformed
        shown = calls.most is None or self._count < calls.most
        self._open = _Call(name, shown, self._space, self._trim)
        self._space, self._trim = "", True
        if shown:
            made = call_id or new_id(calls.form.id_length)
            self._events.append(CallBegins(self._count, made, name))

    def write(self, text: str) -> None:
        """See `Sink`."""
        if self._open is not None and self._open.shown:
            self._events.append(CallArguments(self._count, text))

    def end(self) -> None:
        """See `Sink`."""
        assert self._open is not None, "a call begins before it ends"
        if self._open.shown:
            self._events.append(CallEnds(self._count))
            self._count += 1
        self._open = None
        self._src.mark = self._src.at

    def is_text(self, key: str) -> bool | None:
        """See `Sink`."""
        assert self._calls is not None, "only announced calls are read"
        assert self._open is not None, "arguments belong to a call"
        properties = self._calls.tools[self._open.name].get("properties")
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        return _is_text(schema)


@dataclass(slots=True)
class _Call:
    """The call that the parser reads.

    Attributes:
        shown: whether events of the call are emitted.
        space, trim: withheld white space before the call, and whether it would be dropped.
    """

    name: str
    shown: bool
    space: str
    trim: bool


def _is_text(schema: object) -> bool | None:
    """Return whether values of a schema are strings: True, False, or None if uncertain."""
    if not isinstance(schema, Mapping):
        return None
    kind, options = schema.get("type"), schema.get("enum")
    if isinstance(options, list) and options and all(isinstance(one, str) for one in options):
        return True
    if kind == "string":
        return True
    return False if isinstance(kind, str) else None


def new_id(length: int = 0) -> str:
    """Return a new id for a call, with `length` letters and digits if `length` is not 0."""
    if not length:
        return f"call_{uuid.uuid4().hex[:24]}"
    letters = string.ascii_letters + string.digits
    return "".join(secrets.choice(letters) for _ in range(length))
