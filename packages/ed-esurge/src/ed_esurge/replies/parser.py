"""Incremental parser for all formats: converts text to events."""

from __future__ import annotations

import secrets
import string
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ed_esurge.outputs import append_text
from ed_esurge.replies.argument_types import ArgumentTypes
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
from ed_esurge.replies.harmony import ENDS, MESSAGE, STARTS, Header, parse_header
from ed_esurge.replies.json_text import value
from ed_esurge.replies.scanner import Ended, Malformed, Markers, Reader, Scanner
from ed_esurge.replies.syntaxes import LISTS, SYNTAXES, skip_brackets


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
        begins = calls.form.begins if calls is not None else ()
        opens = calls.form.opens if calls is not None else ()
        thinks = reasoning.opens if reasoning is not None else ()
        closes = reasoning.closes if reasoning is not None else ()
        forms = (calls.form if calls is not None else None, reasoning)
        special = frozenset(drops)
        drops = {*special, *(text for form in forms if form is not None for text in form.drops)}
        self._headers = any(form.headers for form in forms if form is not None)
        self._opens = frozenset((*opens, *begins))
        self._thinks, self._closes = frozenset(thinks), frozenset(closes)
        self._markers = Markers((*opens, *begins, *thinks, *drops))
        self._after_thoughts = Markers((*opens, *begins, *thinks, *closes, *drops))
        ends_thoughts = calls is not None and calls.form.ends_thoughts
        self._thought_ends = Markers((*closes, *(opens if ends_thoughts else ()), *special))
        self._drops = special - {*closes, *opens, *begins, *thinks}
        self._section_ends = (*opens, *begins, *thinks, *closes)
        self._events: list[Event] = []
        self._space = ""  # withheld white space, which is dropped if a call follows
        self._trim = inside
        self._trim_thought, self._thought_space = True, ""
        # Whether text and thoughts were emitted, and whether other parts followed them.
        self._spoke = self._thought_before = False
        self._parted = self._thought_parted = False
        self._cut = False
        self._ended_by_call = False
        self._text_until = 0  # markers of calls before this position are text
        self._index = self._count = self._before = 0
        self._open: _Call | None = None
        self._types: dict[str, ArgumentTypes] = {}
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
            if self._headers and not inside:
                yield from self._messages()
            if inside:
                yield from self._thoughts()
            else:
                yield from self._skip_end_of_thoughts()
            yield from self._beginning()
            while True:
                markers = self._after_thoughts if self._ended_by_call else self._markers
                marker = yield from self._src.until(markers, self._content)
                if marker in self._thinks:
                    self._space = ""
                    yield from self._thoughts()
                    yield from self._beginning()
                elif marker in self._opens:
                    if not (yield from self._section(marker)):
                        self._content(marker)
                elif marker in self._closes:  # of the thoughts that a call has ended
                    self._ended_by_call = False
        except Ended:
            return

    def _thoughts(self) -> Reader[None]:
        self._begin_thoughts()
        yield from self._src.space()
        yield from self._src.literal(*self._thinks)  # a repetition of the opening marker
        while True:
            marker = yield from self._src.until(self._thought_ends, self._thought)
            if marker in self._closes:
                break
            if marker in self._drops:
                continue
            if (yield from self._section(marker)):
                self._ended_by_call = True
                break
            self._thought(marker)
        self._trim = self._parted = True

    def _skip_end_of_thoughts(self) -> Reader[None]:
        """Skip the marker with which a model that did not think begins its reply."""
        src = self._src
        src.mark = src.at
        while True:
            yield from src.space()
            marker = yield from src.literal(*self._closes, *self._drops)
            if marker not in self._drops:
                break
        if marker is not None:
            self._trim = True
        else:
            src.at = src.mark
        src.mark = None

    def _begin_thoughts(self) -> None:
        self._trim_thought, self._thought_space = True, ""
        self._thought_parted = True

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
            if not (yield from self._section(marker)):
                self._content(marker)
        elif src.at < len(src.text) and src.text[src.at] in form.starts:
            yield from self._section("")

    def _section(self, marker: str) -> Reader[bool]:
        """Read a section of calls after its marker.

        Returns:
            whether the section has a call. Otherwise the read position is after the marker, and the
            text of the section is read as text, so the time is linear.
        """
        src = self._src
        if src.position - len(marker) < self._text_until:
            return False
        start, partial, self._before = src.position, False, self._count
        src.mark = src.at - len(marker)
        try:
            yield from self._calls_of_section(marker)
        except Malformed:
            pass
        except Ended:
            src.at = len(src.text)
            if self._open is not None and self._open.is_known and self._cut:
                partial = True
            elif self._open is not None:
                self._drop_call()
        if not partial and self._count == self._before:
            self._text_until = max(self._text_until, src.position)
            src.at = start - src.discarded
        src.mark = None
        return partial or self._count > self._before

    def _calls_of_section(self, marker: str) -> Reader[None]:
        """Read calls up to the end of a section. A call that is not valid is skipped.

        Raises:
            Malformed: text that is no call follows. It is not consumed.
            Ended: the reply has ended.
        """
        assert self._calls is not None, "only announced calls are read"
        src, form = self._src, self._calls.form
        begun, listed, parted = marker in form.begins, False, True
        call_end = src.position
        try:
            while True:
                yield from src.space()
                if parted and not listed and form.syntax in LISTS and not form.begins:
                    listed = (yield from src.literal("[")) is not None
                    yield from src.space()
                if form.begins and not begun:
                    yield from src.expect(*form.begins)
                begun = False
                yield from self._call()
                call_end = src.position
                if listed:
                    if (yield from src.expect(",", "]")) == ",":
                        continue
                    listed, call_end = False, src.position
                yield from src.space()
                if (yield from src.literal(*form.closes)) is not None:
                    return
                parted = (yield from src.literal(*form.separators)) is not None
                yield from src.space()
                if src.at >= len(src.text) or not (
                    parted or (yield from self._has_next_call(form))
                ):
                    return
        except Malformed:
            if self._count > self._before:  # text after calls
                src.at = call_end - src.discarded
            raise

    def _call(self) -> Reader[None]:
        """Read one call, or skip it if it is not valid.

        Raises:
            Malformed: the text is not the beginning of a call.
        """
        assert self._calls is not None, "only announced calls are read"
        src, form = self._src, self._calls.form
        yield from src.peek()
        start = src.position
        is_object = form.syntax in ("json", "keyed") and src.text[src.at] == "{"
        try:
            yield from SYNTAXES[form.syntax](src, self, form)
        except Malformed:
            if not (is_object or form.begins or self._open is not None):
                raise
            self._drop_call()
            ends = (*self._section_ends, *form.closes)
            if form.begins:
                yield from src.until_before(Markers(ends))
            else:
                src.at = start - src.discarded
                yield from skip_brackets(src, ends)
            if self._count > self._before:
                src.mark = src.at

    def _has_next_call(self, form: ToolFormat) -> Reader[bool]:
        """Return whether another call begins here, without consuming text.

        A section with an end may contain one call per line.
        """
        lines = bool(form.closes) and not form.begins
        if lines and form.syntax == "python":
            return (yield from self._src.peek()).isidentifier()
        marker = yield from self._src.literal(
            *(("{",) if lines and form.syntax == "json" else form.begins)
        )
        self._src.at -= len(marker or "")
        return marker is not None

    def _messages(self) -> Reader[None]:
        """Read messages with headers. The prompt ends within the first header."""
        src = self._src
        markers = Markers((*STARTS, *ENDS, *self._markers.texts) if self._headers else ())
        src.mark = src.at
        yield from src.space()
        begins = (yield from src.literal("to=")) is not None
        if begins:
            yield from self._message()
        else:
            src.at = src.mark
        src.mark = None
        while True:
            marker = yield from src.until(markers, self._content)
            first = next((start for start in STARTS if marker.startswith(start)), None)
            if first is not None:
                src.mark = src.at - len(marker)
                src.at = src.mark + len(first)
                yield from self._message()
                src.mark = None

    def _message(self) -> Reader[None]:
        """Read a message whose header begins at the mark. Its text for the user is left."""
        src, start = self._src, self._src.position
        try:
            _, marker = yield from src.head(Markers((MESSAGE, STARTS[0], *ENDS)))
            header = parse_header(src.since_mark().removesuffix(MESSAGE))
        except (Malformed, Ended):
            marker, header = "", None
        if header is None or marker != MESSAGE:
            src.at = start - src.discarded
            self._content(src.since_mark())
            return
        if header.recipient and (header.recipient != header.function or self._knows(header)):
            yield from self._message_to(header.function)
        elif header.recipient or header.channel == "analysis":
            if self._reasoning is None:
                self._content(src.since_mark())
                return
            src.mark = None
            self._begin_thoughts()
            end = yield from src.until(Markers((*ENDS, *STARTS)), self._thought)
            src.at -= len(end) if end in STARTS else 0
            self._trim = True
        else:
            self._space, self._trim, self._parted = "", self._spoke or self._trim, True

    def _knows(self, header: Header) -> bool:
        return self._calls is not None and header.function in self._calls.tools

    def _message_to(self, name: str) -> Reader[None]:
        """Read the message to a function: a call, or text for the user."""
        src, ends = self._src, Markers((*ENDS, STARTS[0]))
        try:
            if self._calls is None:
                raise Malformed
            self.begin(name)
            yield from src.space()
            if (yield from src.literal(*ENDS)) is not None:
                self.write("{}")
            elif (yield from src.peek()) == "{":
                yield from value(src, self.write)
            else:
                raise Malformed
            if not (self._open and self._open.is_known):
                raise Malformed
            self.end()
            return
        except Malformed:
            self._drop_call()
            text_reader = src.until_before(ends)
        except Ended:
            if self._cut and self._open is not None and self._open.is_known:
                raise
            self._drop_call()
            self._content(src.since_mark())
            raise
        try:
            yield from text_reader
            yield from src.literal(*ENDS)
        finally:
            self._content(src.since_mark())

    # ---- output; a parser is the `Sink` of its calls

    def _drop_call(self) -> None:
        """Forget the open call."""
        if self._open is None:
            return
        if self._open.is_shown:
            self._events.append(CallBroken(self._index))
            self._index += 1
        self._space, self._trim = self._open.space, self._open.trim
        self._open = None

    def _content(self, text: str) -> None:
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        if not text or text.isspace():
            append_text(self, "_space", text)
            return
        text = self._space + text
        visible_text = text.rstrip()
        self._space = text[len(visible_text) :]
        end = self._src.position - len(self._space)
        if self._parted and self._spoke:
            self._events.append(ReplyText("\n", end - len(visible_text), between=True))
        self._spoke, self._parted = True, False
        self._events.append(ReplyText(visible_text, end))

    def _thought(self, text: str) -> None:
        if self._trim_thought:
            text = text.lstrip()
            self._trim_thought = not text
        if not text or text.isspace():
            append_text(self, "_thought_space", text)
            return
        text = self._thought_space + text
        visible_text = text.rstrip()
        self._thought_space = text[len(visible_text) :]
        if self._thought_parted and self._thought_before:
            self._events.append(Reasoning("\n", between=True))
        self._thought_before, self._thought_parted = True, False
        self._events.append(Reasoning(visible_text))

    def begin(self, name: str, call_id: str | None = None) -> None:
        """See `CallSink`. A call of an unknown function is read and dropped."""
        calls = self._calls
        assert calls is not None, "only announced calls begin"
        is_known = name in calls.tools
        is_shown = is_known and (calls.most is None or self._count < calls.most)
        self._open = _Call(name, is_known, is_shown, self._space, self._trim)
        self._space, self._trim = "", True
        if is_shown:
            assigned_id = call_id or new_call_id(calls.form.id_length)
            self._events.append(CallBegins(self._index, assigned_id, name))

    def write(self, text: str) -> None:
        """See `CallSink`."""
        if self._open is not None and self._open.is_shown:
            self._events.append(CallArguments(self._index, text))

    def end(self) -> None:
        """See `CallSink`."""
        assert self._open is not None, "a call begins before it ends"
        if not self._open.is_known:
            self._drop_call()
            if self._count > self._before:
                self._src.mark = self._src.at
            return
        if self._open.is_shown:
            self._events.append(CallEnds(self._index))
            self._index += 1
        self._count += 1
        self._open, self._parted = None, True
        self._src.mark = self._src.at

    @property
    def types(self) -> ArgumentTypes:
        """See `CallSink`."""
        assert self._calls is not None, "only announced calls are read"
        assert self._open is not None, "arguments belong to a call"
        name = self._open.name
        if name not in self._types:
            self._types[name] = ArgumentTypes(self._calls.tools.get(name, {}))
        return self._types[name]


@dataclass(slots=True)
class _Call:
    """The call that the parser reads.

    Attributes:
        is_known: whether the function is one of the tools.
        is_shown: whether events of the call are emitted.
        space, trim: withheld white space before the call, and whether it would be dropped.
    """

    name: str
    is_known: bool
    is_shown: bool
    space: str
    trim: bool


def new_call_id(length: int = 0) -> str:
    """Return a new id for a call, with `length` letters and digits if `length` is not 0."""
    if not length:
        return f"call_{uuid.uuid4().hex[:24]}"
    letters = string.ascii_letters + string.digits
    return "".join(secrets.choice(letters) for _ in range(length))
