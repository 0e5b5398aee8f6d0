"""The syntaxes of calls: each reads one call, or a list of calls, and reports it to a
`CallSink`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Protocol

from ed_esurge.replies.formats import Syntax, ToolFormat
from ed_esurge.replies.json_text import dumps, loads, string_value, value
from ed_esurge.replies.python_text import argument
from ed_esurge.replies.scanner import Malformed, Markers, Reader, Scanner, Write

ARGUMENTS = ("arguments", "parameters")
MAX_DEPTH = 64


class CallSink(Protocol):
    """Receiver of calls."""

    def begin(self, name: str, call_id: str | None = None) -> None:
        """Start a call of a function. Raises Malformed for an unknown function."""
        ...

    def write(self, text: str) -> None:
        """Append to the JSON text of the arguments."""
        ...

    def end(self) -> None:
        """Complete the call."""
        ...

    def is_text(self, key: str) -> bool | None:
        """Return whether an argument of this call is a string; None if uncertain."""
        ...


def json_calls(src: Scanner, sink: CallSink, form: ToolFormat) -> Reader[None]:
    """Read `{"name": …, "arguments": {…}}`, or a list of such objects."""
    yield from src.space()
    if (yield from src.peek()) != "[":
        yield from _object(src, sink, form.name_keys)
        return
    src.at += 1
    while True:
        yield from _object(src, sink, form.name_keys)
        if (yield from src.expect(",", "]")) == "]":
            return


def _object(src: Scanner, sink: CallSink, names: tuple[str, ...]) -> Reader[None]:
    yield from src.expect("{")
    name, held, begun = None, None, False
    keys: set[str] = set()
    while True:
        key = yield from string_value(src)
        if key in keys:
            raise Malformed
        keys.add(key)
        yield from src.expect(":")
        if key in names:
            name = yield from string_value(src)
        elif key in ARGUMENTS and name is not None and not begun:
            sink.begin(name)
            begun = True
            yield from _arguments(src, sink.write)
        elif key in ARGUMENTS and held is None and not begun:
            parts: list[str] = []
            yield from _arguments(src, parts.append)
            held = "".join(parts)
        else:
            yield from value(src, lambda text: None)
        if (yield from src.expect(",", "}")) == "}":
            break
    if name is None:
        raise Malformed
    if not begun:
        sink.begin(name)
        sink.write(held or "{}")
    sink.end()


def _arguments(src: Scanner, write: Write) -> Reader[None]:
    """Read arguments: an object, its JSON text in a string, or nothing."""
    yield from src.space()
    first = yield from src.peek()
    if first == "{":
        yield from value(src, write)
        return
    if first == '"':
        text = yield from string_value(src)
        if not isinstance(loads(text or "{}"), dict):
            raise Malformed
        write(text or "{}")
        return
    yield from src.expect("null")
    write("{}")


def keyed(src: Scanner, sink: CallSink, form: ToolFormat) -> Reader[None]:
    """Read a list of objects `{"name": {…}}`."""
    yield from src.expect("[")
    while True:
        yield from src.expect("{")
        sink.begin((yield from string_value(src)))
        yield from src.expect(":")
        yield from _arguments(src, sink.write)
        yield from src.expect("}")
        sink.end()
        if (yield from src.expect(",", "]")) == "]":
            return


def headed(src: Scanner, sink: CallSink, form: ToolFormat) -> Reader[None]:
    """Read `name … {…}`. Earlier models of this kind write lists of objects after the marker."""
    yield from src.space()
    if (yield from src.peek()) in "[{":
        yield from json_calls(src, sink, form)
        return
    yield from _head(src, sink, form)
    yield from src.space()
    if (yield from src.peek()) != "{":
        raise Malformed
    yield from value(src, sink.write)
    sink.end()
    yield from _end(src, form)


def _end(src: Scanner, form: ToolFormat) -> Reader[None]:
    if form.ends:
        yield from src.space()
        yield from src.literal(*form.ends)


def _head(src: Scanner, sink: CallSink, form: ToolFormat) -> Reader[None]:
    """Read the name before a call's arguments, without the beginning of the arguments."""
    text, marker = yield from src.head(Markers(form.name_ends))
    if marker in ("{", form.key_open, *form.ends):
        src.at -= len(marker)
    hit = re.fullmatch(form.name, text)
    if hit is None:
        raise Malformed
    sink.begin(hit["name"], hit.groupdict().get("id"))


def tagged(src: Scanner, sink: CallSink, form: ToolFormat) -> Reader[None]:
    """Read `<f><key>a</key><value>1</value></f>` with the tags of the format."""
    yield from _head(src, sink, form)
    keys: set[str] = set()
    key_close, value_close = Markers((form.key_close,)), Markers((form.value_close,))
    while (yield from src.expect(form.key_open, *form.ends)) == form.key_open:
        head, _ = yield from src.head(key_close)
        hit = re.fullmatch(form.key, head, re.DOTALL)
        if hit is None or (key := hit["key"]) in keys:
            raise Malformed
        declared = hit.groupdict().get("string")
        is_text = sink.is_text(key) if declared is None else declared == "true"
        sink.write(("{" if not keys else ", ") + dumps(key) + ": ")
        keys.add(key)
        if form.value_open:
            yield from src.expect(form.value_open)
        if is_text:
            yield from _text(src, sink.write, value_close, form.padding)
        else:
            parts: list[str] = []
            yield from src.until(value_close, parts.append)
            sink.write(_typed("".join(parts), form.padding))
    sink.write("}" if keys else "{}")
    sink.end()


def _text(src: Scanner, write: Write, close: Markers, padding: str) -> Reader[None]:
    """Read text and emit it as a JSON string, without one padding at either end."""
    begun, held = False, ""

    def pieces(piece: str) -> None:
        nonlocal begun, held
        if not begun and padding:
            piece = piece.removeprefix(padding)
        begun = True
        piece = held + piece
        held = padding if padding and piece.endswith(padding) else ""
        write(dumps(piece.removesuffix(held))[1:-1])

    write('"')
    yield from src.until(close, pieces)
    write('"')


def _typed(text: str, padding: str) -> str:
    """Return the JSON text of a value that may not be a string."""
    plain = text.strip()
    plain = {"True": "true", "False": "false", "None": "null"}.get(plain, plain)
    try:
        return dumps(loads(plain))
    except (Malformed, ValueError):
        inner = text.removeprefix(padding).removesuffix(padding) if padding else text
        return dumps(inner)


def python_calls(src: Scanner, sink: CallSink, form: ToolFormat) -> Reader[None]:
    """Read `[f(a=1, b="x"), g()]`, or one call per line."""
    listed = (yield from src.literal("[")) is not None
    paren, equals = Markers(("(",)), Markers(("=",))
    while True:
        yield from src.space()
        name, _ = yield from src.head(paren)
        if re.fullmatch(r"[A-Za-z_][\w.-]*", name) is None:
            raise Malformed
        sink.begin(name)
        keys: set[str] = set()
        yield from src.space()
        more = (yield from src.literal(")")) is None
        while more:
            yield from src.space()
            key, _ = yield from src.head(equals)
            key = key.strip()
            if not key.isidentifier() or key in keys:
                raise Malformed
            parsed = yield from argument(src)
            sink.write(("{" if not keys else ", ") + f"{dumps(key)}: {parsed}")
            keys.add(key)
            more = (yield from src.expect(",", ")")) == ","
            if more:  # a trailing comma is allowed
                yield from src.space()
                more = (yield from src.literal(")")) is None
        sink.write("}" if keys else "{}")
        sink.end()
        yield from src.space()
        if listed:
            if (yield from src.expect(",", "]")) == "]":
                return
            continue
        if src.at >= len(src.text):  # the end
            return
        yield from src.literal(*form.separators)
        if (yield from src.peek()) in "<[":  # of the section
            return


def braces(src: Scanner, sink: CallSink, form: ToolFormat) -> Reader[None]:
    """Read `call:f{a:<escape>text<escape>,b:[1,2]}`."""
    yield from _head(src, sink, form)
    keys: set[str] = set()
    for_key = Markers((":", "}"))
    src.at += 1
    while True:
        yield from src.space()
        key, marker = yield from src.head(for_key)
        key = key.strip()
        if marker == "}":
            if key or keys:
                raise Malformed
            break
        if not key or key in keys:
            raise Malformed
        found = yield from _bare(src, form, 0)
        sink.write(("{" if not keys else ", ") + f"{dumps(key)}: {dumps(found)}")
        keys.add(key)
        if (yield from src.expect(",", "}")) == "}":
            break
    sink.write("}" if keys else "{}")
    sink.end()


_BARE = re.compile(r"[^,{}\[\]<]*")


def _bare(src: Scanner, form: ToolFormat, depth: int) -> Reader[Any]:
    """Read a value without quotes."""
    if depth > MAX_DEPTH:
        raise Malformed
    yield from src.space()
    yield from src.peek()
    opening = yield from src.literal(form.value_open, "[", "{")
    if opening == form.value_open:
        parts: list[str] = []
        yield from src.until(Markers((form.value_close,)), parts.append)
        return "".join(parts)
    if opening == "[":
        items: list[Any] = []
        yield from src.space()
        if (yield from src.literal("]")) is not None:
            return items
        while True:
            items.append((yield from _bare(src, form, depth + 1)))
            if (yield from src.expect(",", "]")) == "]":
                return items
    if opening == "{":
        known: dict[str, Any] = {}
        yield from src.space()
        if (yield from src.literal("}")) is not None:
            return known
        while True:
            key, _ = yield from src.head(Markers((":",)))
            known[key.strip()] = yield from _bare(src, form, depth + 1)
            if (yield from src.expect(",", "}")) == "}":
                return known
    text = ""
    while piece := src.run(_BARE):
        text += piece
        yield from src.peek()
    if not text.strip():
        raise Malformed
    try:
        return loads(text.strip())
    except Malformed:
        return text.strip()


SYNTAXES: dict[Syntax, Callable[[Scanner, CallSink, ToolFormat], Reader[None]]] = {
    "json": json_calls,
    "keyed": keyed,
    "headed": headed,
    "tagged": tagged,
    "python": python_calls,
    "braces": braces,
}
