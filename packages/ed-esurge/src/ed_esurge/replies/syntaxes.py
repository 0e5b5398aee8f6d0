"""The syntaxes of calls: each reads one call and reports it to a `CallSink`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Protocol

from ed_esurge.replies.argument_types import ArgumentTypes
from ed_esurge.replies.formats import Syntax, ToolFormat
from ed_esurge.replies.json_text import MAX_DEPTH, dumps, loads, string_value, value
from ed_esurge.replies.python_text import argument
from ed_esurge.replies.scanner import Ended, Malformed, Markers, Reader, Scanner, Write

_ARGUMENTS = ("arguments", "parameters")
#: Names under which a model may write all arguments as one object.
_WRAPPERS = (*_ARGUMENTS, "input")


class CallSink(Protocol):
    """Receiver of calls."""

    def begin(self, name: str, call_id: str | None = None) -> None:
        """Start a call of a function."""
        ...

    def write(self, text: str) -> None:
        """Append to the JSON text of the arguments."""
        ...

    def end(self) -> None:
        """Complete the call."""
        ...

    @property
    def types(self) -> ArgumentTypes:
        """The types of the arguments of this call."""
        ...


def json_call(src: Scanner, sink: CallSink, form: ToolFormat) -> Reader[None]:
    """Read `{"name": …, "arguments": {…}}`."""
    yield from _object(src, sink, form.name_keys)


def _object(src: Scanner, sink: CallSink, names: tuple[str, ...]) -> Reader[None]:
    yield from src.expect("{")
    name, held_arguments, begun = None, None, False
    keys: set[str] = set()
    try:
        while True:
            key = yield from string_value(src)
            if key in keys:
                raise Malformed
            keys.add(key)
            yield from src.expect(":")
            if key in names:
                name = yield from string_value(src)
            elif key in _ARGUMENTS and name is not None and not begun:
                sink.begin(name)
                begun = True
                yield from _arguments(src, sink.write)
            elif key in _ARGUMENTS and held_arguments is None and not begun:
                parts: list[str] = []
                yield from _arguments(src, parts.append)
                held_arguments = "".join(parts)
            else:
                yield from value(src, lambda text: None)
            if (yield from src.expect(",", "}")) == "}":
                break
    except Ended:
        if name is not None and not begun:
            sink.begin(name)  # a call that was cut off before its arguments
        raise
    if name is None:
        raise Malformed
    if not begun:
        sink.begin(name)
        sink.write(held_arguments or "{}")
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


def read_keyed_call(src: Scanner, sink: CallSink, form: ToolFormat) -> Reader[None]:
    """Read an object `{"name": {…}}`."""
    yield from src.expect("{")
    sink.begin((yield from string_value(src)))
    yield from src.expect(":")
    yield from _arguments(src, sink.write)
    yield from src.expect("}")
    sink.end()


def read_headed_call(src: Scanner, sink: CallSink, form: ToolFormat) -> Reader[None]:
    """Read `name … {…}`. Earlier models of this kind write objects after the marker."""
    yield from src.space()
    if (yield from src.peek()) == "{":
        yield from json_call(src, sink, form)
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
    other_markers = {*form.opens, *form.begins, *form.closes} - {*form.name_ends}
    text, marker = yield from src.head(Markers((*form.name_ends, *other_markers)))
    if marker in ("{", form.key_open, *form.ends, *other_markers):
        src.at -= len(marker)
    hit = None if marker in other_markers else re.fullmatch(form.name, text)
    if hit is None:
        raise Malformed
    sink.begin(hit["name"], hit.groupdict().get("id"))


def read_tagged_call(src: Scanner, sink: CallSink, form: ToolFormat) -> Reader[None]:
    """Read `<f><key>a</key><value>1</value></f>` with the tags of the format."""
    yield from _head(src, sink, form)
    keys: set[str] = set()
    wrapper, inner = None, ""  # the only value so far, under a key that the schema lacks
    key_close = Markers((form.key_close,))
    while True:
        tag = yield from _next_tag(src, form)
        if tag != form.key_open:
            break
        head, _ = yield from src.head(key_close)
        hit = re.fullmatch(form.key, head, re.DOTALL)
        if hit is None or (key := hit["key"]) in keys:
            raise Malformed
        if wrapper is not None:
            sink.write("{" + wrapper)
            wrapper = None
        wraps = not keys and key in _WRAPPERS and not sink.types.allows(key)
        if not wraps:
            sink.write(("{" if not keys else ", ") + dumps(key) + ": ")
        keys.add(key)
        if form.value_open:
            yield from src.expect(form.value_open)
        declared = hit.groupdict().get("string")
        schema = sink.types.property(key)
        is_text = declared == "true" and "string" in sink.types.kinds(schema)
        if not wraps and (is_text or (declared is None and sink.types.takes_text_only(schema))):
            yield from _text(src, sink, form, keys)
            continue
        parts: list[str] = []
        yield from _value_until_end(src, sink, form, keys, parts.append)
        text = "".join(parts)
        inner = text.removeprefix(form.padding).removesuffix(form.padding)
        marked_json = text if declared == "false" else None
        converted = (
            dumps(inner) if is_text else sink.types.convert(inner, schema, marked_json=marked_json)
        )
        if wraps:
            wrapper = f"{dumps(key)}: {converted}"
        else:
            sink.write(converted)
    _end_arguments(src, form, tag)
    if wrapper is not None:
        sink.write(_unwrap(inner, sink.types) or f"{{{wrapper}}}")
    else:
        sink.write("}" if keys else "{}")
    sink.end()


def _next_tag(src: Scanner, form: ToolFormat) -> Reader[str | None]:
    """Read the tag of an argument, or of an end; None before other text."""
    yield from src.space()
    yield from src.peek()
    # A model may omit the end of the call before the end of the section.
    return (yield from src.literal(form.key_open, *form.ends, *form.closes))


def _end_arguments(src: Scanner, form: ToolFormat, tag: str | None) -> None:
    """Check the tag after the arguments. The reader of the section reads an end of the section."""
    if tag is None:
        raise Malformed
    if tag not in form.ends:
        src.at -= len(tag)


def _unwrap(text: str, types: ArgumentTypes) -> str | None:
    """Return the arguments that a model wrote as one object under another name."""
    try:
        arguments = loads(text.strip())
    except Malformed:
        return None
    is_object = isinstance(arguments, dict) and all(map(types.declares, arguments))
    return dumps(arguments) if is_object else None


def _text(
    src: Scanner, sink: CallSink, form: ToolFormat, keys: set[str], name: str = ""
) -> Reader[None]:
    """Read text and emit it as a JSON string, without one padding at either end.

    Args:
        name: name of the element in the syntax `elements`.
    """
    begun, held_padding, padding = False, "", form.padding

    def emit(piece: str) -> None:
        nonlocal begun, held_padding
        if not begun and padding:
            piece = piece.removeprefix(padding)
        begun = True
        piece = held_padding + piece
        held_padding = padding if padding and piece.endswith(padding) else ""
        sink.write(dumps(piece.removesuffix(held_padding))[1:-1])

    sink.write('"')
    yield from _value_until_end(src, sink, form, keys, emit, name)
    sink.write('"')


def _value_until_end(
    src: Scanner, sink: CallSink, form: ToolFormat, keys: set[str], write: Write, name: str = ""
) -> Reader[None]:
    """Read the text of a value with its end.

    A model may omit the end: the next argument, or the end of the call, ends the value as well.
    """
    close, bare = form.value_close, ""
    if name:
        close, bare = f"{form.value_close}{name}{form.key_close}", f"</{name}>"
    markers = Markers((close, bare, form.key_open, *form.ends))
    while True:
        marker = yield from src.until(markers, write)
        if marker == close:
            return
        if marker == bare:
            if (yield from _other_tag_follows(src, form, name)):
                return
            write(marker)
            continue
        place = src.position
        ended = yield from (
            _next_key_follows(src, sink, form, keys)
            if marker == form.key_open
            else _end_follows(src, form)
        )
        src.at = place - src.discarded
        if ended:
            src.at -= len(marker)
            return
        write(marker)


def _next_key_follows(
    src: Scanner, sink: CallSink, form: ToolFormat, keys: set[str]
) -> Reader[bool]:
    """Return whether the name of another declared argument follows."""
    try:
        head, _ = yield from src.head(Markers((form.key_close,)))
    except (Ended, Malformed):
        return False
    hit = re.fullmatch(form.key, head, re.DOTALL)
    return hit is not None and hit["key"] not in keys and sink.types.declares(hit["key"])


def _end_follows(src: Scanner, form: ToolFormat) -> Reader[bool]:
    """Return whether the end of a section, another call or the end of the reply follows."""
    yield from src.space()
    if src.at >= len(src.text):
        return True
    return (yield from src.literal(*form.closes, *form.begins, *form.opens)) is not None


def elements(src: Scanner, sink: CallSink, form: ToolFormat) -> Reader[None]:
    """Read arguments that are nested XML elements: `<city>Oslo</city><days><item>1</item></days>`.

    Each tag has a prefix, so the text of a value needs no escapes.
    """
    yield from _head(src, sink, form)
    keys: set[str] = set()
    while True:
        tag = yield from _next_tag(src, form)
        if tag != form.key_open:
            break
        key = yield from _element_name(src, form)
        if key in keys:
            raise Malformed
        sink.write(("{" if not keys else ", ") + dumps(key) + ": ")
        keys.add(key)
        schema = sink.types.property(key)
        if sink.types.takes_text_only(schema):
            yield from _text(src, sink, form, keys, key)
        else:
            element = yield from _element(src, form, sink.types, key, schema, 0)
            sink.write(dumps(element))
    _end_arguments(src, form, tag)
    sink.write("}" if keys else "{}")
    sink.end()


def _element_name(src: Scanner, form: ToolFormat) -> Reader[str]:
    name, _ = yield from src.head(Markers((form.key_close,)))
    if not name.strip() or name.startswith("/") or "<" in name:
        raise Malformed
    return name


def _element(
    src: Scanner, form: ToolFormat, types: ArgumentTypes, name: str, schema: object, depth: int
) -> Reader[Any]:
    """Read the value of an element with its end. Elements named `item` are the items of a list.

    A model may omit the prefix of the closing tag before another tag.
    """
    if depth > MAX_DEPTH:
        raise Malformed
    kinds = types.kinds(schema)
    is_scalar = not kinds & {"array", "object"}
    parts: list[str] = []
    children: list[tuple[str, Any]] = []
    bare = f"</{name}>"
    markers = Markers((form.key_open, bare))
    while True:
        marker = yield from src.until(markers, parts.append)
        if marker == bare:
            if (yield from _other_tag_follows(src, form, name)):
                break
        elif (yield from src.literal(bare[1:])) is not None:
            break
        elif not is_scalar:
            child = yield from _element_name(src, form)
            is_item = child == "item" and "array" in kinds
            inner = types.item(schema) if is_item else types.member(schema, child)
            member = yield from _element(src, form, types, child, inner, depth + 1)
            children.append((child, member))
            continue
        parts.append(marker)
    text = "".join(parts)
    if children:
        if text.strip():
            raise Malformed
        return _combine_elements(children, kinds)
    if not text.strip() and "string" not in kinds and kinds & {"array", "object"}:
        return [] if "array" in kinds else {}
    return loads(types.convert(text, schema))


def _other_tag_follows(src: Scanner, form: ToolFormat, name: str) -> Reader[bool]:
    """Return whether a tag follows that does not end the element, without consuming text."""
    place = src.position
    yield from src.space()
    follows = (yield from src.literal(form.key_open)) is not None
    follows = follows and (yield from src.literal(f"/{name}{form.key_close}")) is None
    src.at = place - src.discarded
    return follows


def _combine_elements(children: list[tuple[str, Any]], kinds: frozenset[str]) -> Any:
    """Return the list or the object that elements describe. A repeated name has a list."""
    if "array" in kinds and ("object" not in kinds or all(name == "item" for name, _ in children)):
        return [member for _, member in children]
    groups: dict[str, list[Any]] = {}
    for name, member in children:
        groups.setdefault(name, []).append(member)
    return {name: group[0] if len(group) == 1 else group for name, group in groups.items()}


def python_call(src: Scanner, sink: CallSink, form: ToolFormat) -> Reader[None]:
    """Read `f(a=1, b="x")`."""
    name, marker = yield from src.head(Markers(("(", ")", "[", "]", ",", "\n")))
    if marker != "(" or re.fullmatch(r"[A-Za-z_][\w.-]*", name) is None:
        src.at -= len(marker)
        raise Malformed
    sink.begin(name)
    key_ends = Markers("=,()[]{}\"'")
    keys: set[str] = set()
    yield from src.space()
    more = (yield from src.literal(")")) is None
    while more:
        yield from src.space()
        key, marker = yield from src.head(key_ends)
        key = key.strip()
        if marker != "=" or not key.isidentifier() or key in keys:
            src.at -= len(marker)
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


def braces(src: Scanner, sink: CallSink, form: ToolFormat) -> Reader[None]:
    """Read `call:f{a:<escape>text<escape>,b:[1,2]}`."""
    yield from _head(src, sink, form)
    keys: set[str] = set()
    for_key = Markers((":", "}"))
    quoted_end = Markers((form.value_close,))
    src.at += 1
    while True:
        yield from src.space()
        yield from src.peek()
        if (yield from src.literal(form.value_open)) is not None:
            key, _ = yield from src.head(quoted_end)
            marker = yield from src.expect(":")
        else:
            key, marker = yield from src.head(for_key)
            key = key.strip()
        if marker == "}":
            if key or keys:
                raise Malformed
            break
        if not key or key in keys:
            raise Malformed
        types = sink.types
        parsed = yield from _bare(src, form, types, types.property(key), 0)
        sink.write(("{" if not keys else ", ") + f"{dumps(key)}: {dumps(parsed)}")
        keys.add(key)
        if (yield from src.expect(",", "}")) == "}":
            break
    sink.write("}" if keys else "{}")
    sink.end()


_BARE = re.compile(r"[^,{}\[\]<]*")


def _bare(
    src: Scanner, form: ToolFormat, types: ArgumentTypes, schema: object, depth: int
) -> Reader[Any]:
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
        item = types.item(schema)
        while True:
            items.append((yield from _bare(src, form, types, item, depth + 1)))
            if (yield from src.expect(",", "]")) == "]":
                return items
    if opening == "{":
        members: dict[str, Any] = {}
        yield from src.space()
        if (yield from src.literal("}")) is not None:
            return members
        while True:
            yield from src.space()
            yield from src.peek()
            if (yield from src.literal(form.value_open)) is not None:
                key, _ = yield from src.head(Markers((form.value_close,)))
                yield from src.expect(":")
            else:
                key, _ = yield from src.head(Markers((":",)))
                key = key.strip()
            member = types.member(schema, key)
            members[key] = yield from _bare(src, form, types, member, depth + 1)
            if (yield from src.expect(",", "}")) == "}":
                return members
    text = ""
    while piece := src.run(_BARE):
        text += piece
        yield from src.peek()
    if not text.strip():
        raise Malformed
    return loads(types.convert(text.strip(), schema))


def skip_brackets(src: Scanner, ends: tuple[str, ...]) -> Reader[None]:
    """Skip a call that is not valid: up to the bracket that closes its first one, or to an end."""
    pairs = {"{": "}", "[": "]", "(": ")"}
    outside = Markers((*ends, *pairs, *pairs.values(), '"'))
    inside = Markers((*ends, '"', "\\"))
    depth = 0
    while True:
        marker = yield from src.until(outside, lambda text: None)
        while marker == '"':  # a string
            marker = yield from src.until(inside, lambda text: None)
            if marker == '"':
                break
            if marker == "\\":
                yield from src.peek()
                src.at += 1
                marker = '"'
        if marker in ends:
            src.at -= len(marker)
            return
        if marker in pairs:
            depth += 1
        elif marker in pairs.values():
            depth -= 1
            if depth <= 0:
                src.at -= depth < 0  # the bracket of the list
                return


# The syntaxes whose calls may be the items of a list.
LISTS = ("json", "keyed", "python", "headed")
SYNTAXES: dict[Syntax, Callable[[Scanner, CallSink, ToolFormat], Reader[None]]] = {
    "json": json_call,
    "keyed": read_keyed_call,
    "headed": read_headed_call,
    "tagged": read_tagged_call,
    "elements": elements,
    "python": python_call,
    "braces": braces,
}
